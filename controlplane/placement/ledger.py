"""The ledger: what every worker holds, as records that compiled code reads and writes.

Both data planes keep one and ask the same `assign` of it: the simulated plane from its engines, the live
plane from the tokens that pass through the gateway. A worker's clock here is its count of decode steps
(`step`): each step gives every decoding request one token, so a request's tokens are `key + step` and
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
from controlplane.perfmodel.coefficients import (
    BLOCK_TOKENS,
    run_s,
    steps_within,
)
from controlplane.placement.caches import (
    Caches,
    HostMemory,
    cached_blocks,
    common_blocks,
    most_hits,
    no_caches,
    no_host_memory,
)
from controlplane.placement.lengths import LengthTable
from controlplane.placement.order import ASKED, Orders, has_more, new_orders
from controlplane.types import Role

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# A structured array: one record per worker or request, so that compiled code reads a record's fields from
# one place in memory, and passes a few arrays around instead of forty.
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
        # A worker notes its load as it begins a step and reports it as the step ends. What the last report
        # did not tell of (requests, the tokens they will hold once prefilled), what of that the step in
        # progress did not note either, and when its report comes:
        ("unreported", np.int64),
        ("unreported_context", np.int64),
        ("unnoted", np.int64),
        ("unnoted_context", np.int64),
        ("report_s", np.float64),
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
        ("predicted", np.int64),  # expected output tokens in all
        ("ends", np.int64),  # the worker's step count at which it is expected to finish
        ("arrival_s", np.float64),
        ("held_s", np.float64),  # when it last began to wait in the cluster's queue
        ("first_s", np.float64),  # when its first token came; NaN until then
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
    workers["report_s"] = np.inf
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
        caches=no_caches() if caches is None else caches,
        host=no_host_memory() if host is None else host,
        orders=new_orders(len(variant)),
    )


def copied(led: Ledger) -> Ledger:
    """A ledger that goes its own way; the caches stay those of the first."""
    shared = ("caches", "host", "orders")
    own = {name: getattr(led, name).copy() for name in led._fields if name not in shared}
    return led._replace(orders=new_orders(len(led.workers)), **own)


@compiled
def view(led: Ledger, w: int, now_s: float) -> None:
    """Bring a worker that is in a run up to the steps that ended by `now_s`."""
    worker, run = led.workers[w], led.runs[w]
    if now_s >= worker.report_s:
        report(led, w)
    if run.steps == 0 or now_s < worker.boundary_s:
        return  # no step ended since
    done = min(steps_within(run.first_step_s, run.growth_s, now_s - run.start_s), run.steps)
    run.changed_s = now_s
    worker.step = run.start_step + done
    worker.context = run.start_context + done * worker.decoding
    worker.boundary_s = run.start_s + run_s(run.first_step_s, run.growth_s, done + 1)


@compiled
def view_workers(led: Ledger, now_s: float) -> None:
    """The same of every worker."""
    for w in range(len(led.workers)):
        view(led, w, now_s)


@compiled
def report(led: Ledger, w: int) -> None:
    """Tell dispatchers of the load that was noted as the step that ends now began."""
    led.workers[w].unreported = led.workers[w].unnoted
    led.workers[w].unreported_context = led.workers[w].unnoted_context
    led.workers[w].report_s = np.inf


@compiled
def generated(led: Ledger, r: int) -> int:
    """Output tokens of a request so far."""
    if led.requests[r].phase == DECODING:
        return led.requests[r].key + led.workers[led.requests[r].worker].step
    return led.requests[r].key


@compiled
def cached_tokens(led: Ledger, w: int, r: int, guess: int, in_use: bool) -> int:
    """Tokens of a request that worker `w` would have in its cache if the request were put there now.

    What is cached as the worker's last planned step left it, and what those will store that are there already
    and not prefilled: so a burst of one prefix finds the worker that the first of it went to. `in_use`: only
    what others use or will use, which takes no memory. `guess`: the likely answer, which costs least.
    """
    if led.caches.tokens == 0 or led.caches.workers[w].keeps == 0:
        return 0
    unit = led.caches.tokens
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    most, tokens = most_hits(led.caches, led.requests[r].prompt + led.requests[r].key, block)
    blocks = cached_blocks(led.caches, w, r, 0, most, (guess + unit - 1) // unit, in_use)
    i = led.workers[w].running_n - 1
    while i >= 0 and led.requests[led.running[w, i]].phase == PREFILLING:
        blocks = soon_cached(led, r, led.running[w, i], blocks, most)
        i -= 1
    for p in range(len(led.queue_head)):
        other = led.queue_head[p, w]
        while other != NONE:
            blocks = soon_cached(led, r, other, blocks, most)
            other = led.requests[other].next
    return min(blocks * unit, tokens)


@compiled
def host_copies(led: Ledger, w: int, r: int, cached: int, guess: int) -> int:
    """Copies in its host memory that worker `w` would load for a request of which so much is cached.

    At least a whole one. `guess`: the likely answer, which costs least.
    """
    chunks = led.host.chunks
    if chunks.tokens == 0 or chunks.workers[w].keeps == 0:
        return 0
    start, most = cached // chunks.tokens, (led.requests[r].prompt + led.requests[r].key) // chunks.tokens
    copies = cached_blocks(chunks, w, r, start, most, start + guess, False) - start
    return copies if (start + copies) * chunks.tokens - cached >= chunks.tokens else 0


@compiled
def with_loads(led: Ledger, r: int, cached: int, copies: int) -> int:
    """Tokens of a request that are not computed where it has so many cached and loads so many copies."""
    if copies == 0:
        return cached
    unit = led.host.chunks.tokens
    return min((cached // unit + copies) * unit, led.requests[r].prompt + led.requests[r].key - 1)


@compiled
def known_cached(led: Ledger, w: int, r: int, guess: int) -> int:
    """Tokens that worker `w` would not compute of a request, looked up once until something changes.

    Those of `cached_tokens`, in use or not, and those that it would load from host memory behind them.
    Placing one asks that of every worker up to four times, and again at each offer while it waits: then the
    last answer is the guess. Where changes are not told it is looked up each time.
    """
    if led.caches.tokens == 0:
        return 0
    known = led.orders
    if not known.are_kept[0]:
        cached = cached_tokens(led, w, r, guess, False)
        return with_loads(led, r, cached, host_copies(led, w, r, cached, 0))
    row = r % ASKED
    if known.asked_of[row] != r:
        known.asked_of[row] = r
        known.cached_at[row, :] = 0
    if known.cached_at[row, w] != known.changes[0]:
        copies = 0
        if known.cached_at[row, w] > 0:
            guess = known.cached[row, w]
            copies = known.loads[row, w]
        known.cached[row, w] = cached_tokens(led, w, r, guess, False)
        known.loads[row, w] = host_copies(led, w, r, known.cached[row, w], copies)
        known.cached_at[row, w] = known.changes[0]
    return int(with_loads(led, r, known.cached[row, w], known.loads[row, w]))


@compiled
def known_loads(led: Ledger, w: int, r: int) -> int:
    """Copies that worker `w` would load for a request from host memory, looked up once as `known_cached`."""
    if led.host.chunks.tokens == 0:
        return 0
    if not led.orders.are_kept[0]:
        return host_copies(led, w, r, cached_tokens(led, w, r, 0, False), 0)
    known_cached(led, w, r, 0)
    return int(led.orders.loads[r % ASKED, w])


@compiled
def loads_s(led: Ledger, w: int, r: int, from_s: float) -> float:
    """Seconds after `from_s` until worker `w` has loaded a request; 0: it would load nothing.

    Loads follow each other: those that have begun, of those that wait there, its own.
    """
    copies = known_loads(led, w, r)
    if copies == 0:
        return 0.0
    link = led.host.links[w]
    return float(max(link.free_s - from_s, 0.0) + (link.waiting + copies) * link.copy_s)


@compiled
def soon_cached(led: Ledger, r: int, other: int, there: int, most: int) -> int:
    """Of a request's first `most` blocks, how many another's prefill stores, if more than `there`."""
    stores = (led.requests[other].prompt + led.requests[other].key) // led.caches.tokens
    return common_blocks(led.caches, r, other, there, min(most, stores))


@compiled
def shared_tokens(led: Ledger, w: int) -> int:
    """Tokens that several requests at a worker hold, or will, and that lie in its memory once."""
    if led.caches.tokens == 0:
        return 0
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    return int(led.caches.workers[w].shared) * block + led.workers[w].queued_shared


@compiled
def empty_blocks(led: Ledger, w: int) -> int:
    """Blocks of a worker's memory that hold nothing, neither in use nor cached."""
    return int(led.caches.workers[w].empty) if led.caches.tokens > 0 else 0


@compiled
def empty_everywhere(led: Ledger, w: int) -> int:
    """The same of its memory and its host memory."""
    blocks = empty_blocks(led, w)
    if led.host.chunks.tokens > 0:
        block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
        blocks += int(led.host.chunks.workers[w].empty) * (led.host.chunks.tokens // block)
    return blocks


@compiled
def enqueue(led: Ledger, w: int, r: int, at_head: bool) -> None:
    """Put a request into a worker's queue of its priority; `at_head` is for one that was preempted."""
    p = led.requests[r].priority
    led.requests[r].cached = known_cached(led, w, r, 0)
    led.requests[r].shared = cached_tokens(led, w, r, led.requests[r].cached, True)
    if led.host.chunks.tokens > 0:
        led.host.loads[r] = known_loads(led, w, r)
        led.host.links[w].waiting += led.host.loads[r]
    if at_head and led.queue_head[p, w] != NONE:
        led.requests[r].next = led.queue_head[p, w]
        led.queue_head[p, w] = r
    else:
        line_up(led, w, p, r)
    led.requests[r].worker = w
    led.requests[r].phase = QUEUED
    led.workers[w].queued += 1
    led.workers[w].queued_tokens += to_compute(led, r)
    led.workers[w].queued_context += led.requests[r].prompt + led.requests[r].key
    led.workers[w].queued_shared += led.requests[r].shared
    led.orders.changes[0] += 1
    has_more(led.orders, w)


@compiled
def line_up(led: Ledger, w: int, p: int, r: int) -> None:
    """Put a request at the end of one of a worker's queues."""
    tail = led.queue_tail[p, w]
    if tail == NONE:
        led.queue_head[p, w] = r
    else:
        led.requests[tail].next = r
    led.queue_tail[p, w] = r
    led.requests[r].next = NONE


@compiled
def step_out(led: Ledger, w: int, p: int, r: int) -> None:
    """Take a request out of one of a worker's queues, wherever it stands."""
    before = NONE
    at = led.queue_head[p, w]
    while at != r:
        before = at
        at = led.requests[at].next
    if before == NONE:
        led.queue_head[p, w] = led.requests[r].next
    else:
        led.requests[before].next = led.requests[r].next
    if led.queue_tail[p, w] == r:
        led.queue_tail[p, w] = before
    led.requests[r].next = NONE


@compiled
def to_compute(led: Ledger, r: int) -> int:
    """Tokens that the prefill of a request at its worker computes."""
    return led.requests[r].prompt + led.requests[r].key - led.requests[r].cached


@compiled
def queue_first(led: Ledger, w: int) -> int:
    """The request whose turn is next at a worker, high priority before normal, or NONE."""
    high = led.queue_head[1, w]
    return high if high != NONE else led.queue_head[0, w]


@compiled
def next_in_queue(led: Ledger, w: int, r: int) -> int:
    """The request whose turn is next after another's, or NONE."""
    after = led.requests[r].next
    if after == NONE and led.requests[r].priority == 1:
        return int(led.queue_head[0, w])
    return int(after)


@compiled
def dequeue(led: Ledger, w: int, r: int) -> None:
    """Take a request out of its worker's queue, wherever it stands; its prefill is still to be done."""
    step_out(led, w, led.requests[r].priority, r)
    if led.host.chunks.tokens > 0:
        led.host.links[w].waiting -= led.host.loads[r]
        led.host.loads[r] = 0
    led.workers[w].queued_shared -= led.requests[r].shared
    led.requests[r].shared = 0


@compiled
def leave_queue(led: Ledger, w: int, r: int) -> None:
    """Take a request that waits at a worker away from it altogether: it is HELD again."""
    dequeue(led, w, r)
    led.workers[w].queued -= 1
    led.workers[w].queued_tokens -= to_compute(led, r)
    led.workers[w].queued_context -= led.requests[r].prompt + led.requests[r].key
    led.requests[r].worker = NONE
    led.requests[r].phase = HELD
