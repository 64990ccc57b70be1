"""The ledger: what every worker holds, as records that compiled code reads and writes.

Both data planes keep one and ask the same `assign` of it: the simulated plane from its engines, the live
plane from the tokens that pass through the gateway. A worker's clock here is its count of decode steps
(`step`). Each step gives every decoding request one token. So a request's tokens are `key + step`, and
nothing has to be touched per token.

    generated(r) = key[r] + step[worker[r]]   while r decodes,   key[r] otherwise
    context of a worker = Σ prompt + generated over its decoding requests, kept as a running sum

A request is in one phase: HELD (no worker yet), QUEUED (at a worker, prefill not begun), PREFILLING,
DECODING, DONE. One that loads KV from host memory is PREFILLING: it has computed what it loads, and runs once
that is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import by_reference, compiled
from controlplane.perfmodel.coefficients import run_s, steps_within
from controlplane.placement.caches import Caches, HostMemory, no_caches, no_host_memory
from controlplane.placement.lengths import LengthErrors, LengthTable, no_length_errors
from controlplane.placement.order import Orders, new_orders
from controlplane.types import Role

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# A structured array: one record per worker or request. So compiled code reads a record's fields from one
# place in memory, and passes a few arrays around instead of forty.
Records = Any

HELD, QUEUED, PREFILLING, DECODING, DONE = 0, 1, 2, 3, 4
OFF, SERVING, DRAINING = 0, 1, 2
ANY_PHASE, PREFILL_ONLY, DECODE_ONLY = 0, 1, 2  # roles; the latter two are of split mode
ROLES: tuple[Role, ...] = ("any", "prefill", "decode")  # by their codes
NONE = -1
ON_LINK = 2  # the row of the queues, where there is host memory, of requests that load from it


WORKER = np.dtype(
    [
        ("status", np.int64),
        ("role", np.int64),
        ("variant", np.int64),  # row of `coefficients`
        ("step", np.int64),  # decode steps done
        ("boundary_s", np.float64),  # when the step in progress ends; in the past for an idle worker
        ("gains", np.int64),  # tokens each decoding request gets at that boundary: 1, or 0 in a prefill step
        ("decoding", np.int64),
        ("context", np.int64),  # tokens held by decoding requests
        ("queued", np.int64),  # requests whose prefill is not done
        ("queued_tokens", np.int64),  # tokens those have still to compute, beyond the step in progress
        ("queued_context", np.int64),  # tokens those will hold once prefilled
        ("queued_shared", np.int64),  # tokens of those that wait which others will hold for them
        ("running_n", np.int64),  # admitted requests, prefilling or decoding
        ("peak_step", np.int64),  # the step at which its KV was last found to be largest
    ],
    align=True,
)
RUN = np.dtype(
    [
        ("steps", np.int64),  # its planned steps; 0: the worker is in no run
        ("start_s", np.float64),  # when it began, as any other activity of an engine
        ("first_step_s", np.float64),
        ("growth_s", np.float64),  # what each step adds to the next
        ("start_step", np.int64),  # the worker's step count
        ("start_context", np.int64),  # and context when it began
        ("changed_s", np.float64),  # when last something changed that placement looks at
    ],
    align=True,
)
REQUEST = np.dtype(
    [
        ("worker", np.int64),
        ("phase", np.int64),
        ("priority", np.int64),
        ("prompt", np.int64),
        ("key", np.int64),
        ("next", np.int64),  # the one behind it in its queue
        ("cached", np.int64),  # at a worker: tokens that it has cached, or should have when it comes to them,
        ("shared", np.int64),  # and while it waits, those of them that others use
        ("guess", np.int64),  # expected output tokens in all, as predicted at first
        ("predicted", np.int64),  # the same as expected now
        ("turn", np.int64),  # its number among those that have come to a worker; 0 before it does
        ("ends", np.int64),  # the worker's step count at which it is expected to finish
        ("arrival_s", np.float64),
        ("held_s", np.float64),  # when it last began to wait in the cluster's queue
        ("first_s", np.float64),  # when its first token came; NaN until then
        ("lag_s", np.float64),  # how much later a simulated engine that plans ahead makes its tokens
        ("ttft_s", np.float64),  # its targets
        ("tpot_s", np.float64),
        # TPOT of the tighter classes that it leaves room for, the tightest and the loosest; 0 is none, a
        # negative tightest no more.
        ("yields_tpot_s", np.float64),
        ("yields_most_tpot_s", np.float64),
    ],
    align=True,
)


@by_reference
class Ledger(NamedTuple):
    """Records by worker and by request; times in seconds, lengths in tokens."""

    workers: Records  # [workers] of WORKER
    runs: Records  # [workers] of RUN: of simulated workers, the decode steps that are known beforehand
    requests: Records  # [requests] of REQUEST
    queue_head: Ints  # [2, workers], by priority: 1 high, 0 normal; [3, workers] with ON_LINK
    queue_tail: Ints
    running: Ints  # [workers, slots] admitted requests, newest last
    coefficients: Floats  # [variants, WIDTH]
    length_edges: Ints  # the output-length table: see placement.lengths
    length_grid: Ints
    length_expected: Floats
    errors: LengthErrors
    caches: Caches
    host: HostMemory
    orders: Orders


def new_ledger(
    coefficients: Floats,
    variant: Ints,
    requests: int,
    slots: int,
    lengths: LengthTable,
    caches: Caches | None = None,
    host: HostMemory | None = None,
) -> Ledger:
    """An empty ledger for workers of the given variants, all OFF, with `requests` empty rows.

    `caches`: the workers' prefix caches; None: they cache nothing. `host`: what they keep below these.
    """
    queues = 2 if host is None else 3
    workers = np.zeros(len(variant), WORKER)
    workers["variant"] = variant
    workers["boundary_s"] = -1.0
    rows = np.zeros(requests, REQUEST)
    rows["worker"] = rows["next"] = NONE
    rows["first_s"] = np.nan
    return Ledger(
        workers=workers,
        runs=np.zeros(len(variant), RUN),
        requests=rows,
        queue_head=np.full((queues, len(variant)), NONE, np.int64),
        queue_tail=np.full((queues, len(variant)), NONE, np.int64),
        running=np.zeros((len(variant), slots), np.int64),
        coefficients=np.ascontiguousarray(coefficients, np.float64),
        length_edges=np.ascontiguousarray(lengths.bin_edges, np.int64),
        length_grid=np.ascontiguousarray(lengths.grid, np.int64),
        length_expected=np.ascontiguousarray(lengths.expected_total, np.float64),
        errors=no_length_errors(),
        caches=no_caches() if caches is None else caches,
        host=no_host_memory() if host is None else host,
        orders=new_orders(len(variant)),
    )


def copied(ledger: Ledger) -> Ledger:
    """A ledger that goes its own way; the caches stay those of the first."""
    shared = ("errors", "caches", "host", "orders")
    own = {name: getattr(ledger, name).copy() for name in ledger._fields if name not in shared}
    return ledger._replace(orders=new_orders(len(ledger.workers)), **own)


@compiled
def view(ledger: Ledger, w: int, now_s: float) -> None:
    """Bring a worker that is in a run up to the steps that ended by `now_s`."""
    worker, run = ledger.workers[w], ledger.runs[w]
    if run.steps == 0 or now_s < worker.boundary_s:
        return  # no step ended since
    done = run.steps
    if run.first_step_s > 0.0:  # else its steps take no time, and all of them have ended
        done = min(steps_within(run.first_step_s, run.growth_s, now_s - run.start_s), run.steps)
    run.changed_s = now_s
    worker.step = run.start_step + done
    worker.context = run.start_context + done * worker.decoding
    worker.boundary_s = run.start_s + run_s(run.first_step_s, run.growth_s, done + 1)


@compiled
def view_workers(ledger: Ledger, now_s: float) -> None:
    """The same of every worker."""
    for w in range(len(ledger.workers)):
        view(ledger, w, now_s)


@compiled
def generated(ledger: Ledger, r: int) -> int:
    """Output tokens of a request so far."""
    if ledger.requests[r].phase == DECODING:
        return ledger.requests[r].key + ledger.workers[ledger.requests[r].worker].step
    return ledger.requests[r].key
