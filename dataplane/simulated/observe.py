"""The simulated fleet's snapshot: loads counted in compiled code, requests listed on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel.profile import Profile
from controlplane.placement.constraints import kv_peak, remaining
from controlplane.placement.ledger import (
    DECODING,
    DONE,
    DRAINING,
    NONE,
    OFF,
    ROLES,
    Ints,
    Ledger,
    Records,
    generated,
    queue_first,
)
from controlplane.placement.queue import REFUSALS, Queue, on_time
from controlplane.placement.rebalance import Decoding, DeviationTracker, Error
from controlplane.snapshot import DRAINING as DRAINS
from controlplane.snapshot import SERVING as SERVES
from controlplane.snapshot import STARTING as STARTS
from controlplane.snapshot import HeldRequest, Load, RunningRequest, Snapshot, WorkerLoad
from controlplane.types import ClassOutcomes, RequestId, Slo, WorkerId
from controlplane.worker_type import name_in_role

Table = NDArray[np.float64]
RUNNING, HELD, WAITING, HEAD, WAITING_TOKENS, HIGH, GROWTH, TPOT, PEAK = range(9)
_STATES = {OFF: STARTS, DRAINING: DRAINS}


@compiled
def loads(led: Ledger) -> Table:
    """One row a worker: the fields of a Load. Those in prefill run, and hold all they will."""
    out = np.zeros((len(led.workers), 9))
    for w in range(len(led.workers)):
        out[w, TPOT] = np.inf
        for i in range(led.workers[w].running_n):
            r = led.running[w, i]
            out[w, RUNNING] += 1
            out[w, HELD] += led.requests[r].prompt + generated(led, r)
            out[w, HIGH] += led.requests[r].priority
            out[w, GROWTH] += remaining(led, w, r)
            out[w, TPOT] = min(out[w, TPOT], led.requests[r].tpot_s)
        first = queue_first(led, w)
        if first != NONE:
            out[w, HEAD] = led.requests[first].prompt + led.requests[first].key
        for p in range(2):
            r = led.queue_head[p, w]
            while r != NONE:
                out[w, WAITING] += 1
                out[w, WAITING_TOKENS] += led.requests[r].prompt + led.requests[r].key
                out[w, GROWTH] += max(led.requests[r].predicted - led.requests[r].key, 1)
                out[w, TPOT] = min(out[w, TPOT], led.requests[r].tpot_s)
                r = led.requests[r].next
        out[w, PEAK] = kv_peak(led, w, NONE)
    return out


@compiled
def running_at(led: Ledger, w: int) -> Table:
    """One row a running request, as admitted: number, tokens, generated (0 in prefill), remaining."""
    out = np.empty((led.workers[w].running_n, 4))
    for n in range(led.workers[w].running_n):
        r = led.running[w, n]
        out[n, 0] = r
        out[n, 1] = led.requests[r].prompt + generated(led, r)
        out[n, 2] = generated(led, r) if led.requests[r].phase == DECODING else 0
        out[n, 3] = remaining(led, w, r)
    return out


@compiled
def queue_at(led: Ledger, w: int) -> Table:
    """One row a request that waits at a worker, the next one first: number, tokens, generated, remaining."""
    count = 0
    for p in range(2):
        r = led.queue_head[p, w]
        while r != NONE:
            count += 1
            r = led.requests[r].next
    out = np.empty((count, 4))
    n = 0
    for p in (1, 0):
        r = led.queue_head[p, w]
        while r != NONE:
            out[n, 0] = r
            out[n, 1] = led.requests[r].prompt + led.requests[r].key
            out[n, 2] = led.requests[r].key
            out[n, 3] = max(led.requests[r].predicted - led.requests[r].key, 1)
            n += 1
            r = led.requests[r].next
    return out


class OutcomeCount:
    """What became of a run's requests, by class; `look` counts those that have ended since the last."""

    def __init__(self, slos: Sequence[Slo]) -> None:
        self._slos, self._sums = slos, np.zeros((len(slos), 4), np.int64)
        self._arrived, self._open = 0, np.zeros(0, np.int64)

    def look(self, led: Ledger, jobs: Records, slo_class: Ints, arrived: int) -> tuple[ClassOutcomes, ...]:
        """The counters, once the first `arrived` requests are there."""
        rows = np.concatenate([self._open, np.arange(self._arrived, arrived)])
        ended = ~np.isnan(jobs["finish_s"][rows])
        self._arrived, self._open, rows = arrived, rows[~ended], rows[ended]
        request, finish_s, gaps = led.requests[rows], jobs["finish_s"][rows], jobs["output"][rows] - 1
        served = np.isfinite(finish_s)  # others were turned away
        ttft_met = served & (request["first_s"] - request["arrival_s"] <= request["ttft_s"])
        tpot_s = np.where(served & (gaps > 0), (finish_s - request["first_s"]) / np.maximum(gaps, 1), 0.0)
        tpot_met = served & (tpot_s <= request["tpot_s"])
        for column, counted in enumerate((np.ones_like(served), ttft_met, tpot_met, ttft_met & tpot_met)):
            self._sums[:, column] += np.bincount(slo_class[rows[counted]], minlength=len(self._slos))
        return tuple(
            ClassOutcomes(slo, *sums) for slo, sums in zip(self._slos, self._sums.tolist(), strict=True)
        )


class Listed(Sequence[RunningRequest]):
    """A worker's requests, listed on first use: tick needs those of few workers only."""

    def __init__(self, led: Ledger, w: int, waiting: bool, count: int) -> None:
        self._led, self._w, self._waiting, self._count = led, w, waiting, count
        self._rows: list[RunningRequest] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> RunningRequest: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[RunningRequest]: ...
    def __getitem__(self, i: int | slice) -> RunningRequest | Sequence[RunningRequest]:
        return self._list()[i]

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._list())

    def _list(self) -> list[RunningRequest]:
        if self._rows is None:
            table = queue_at(self._led, self._w) if self._waiting else running_at(self._led, self._w)
            rows = self._led.requests
            self._rows = [
                RunningRequest(
                    RequestId(str(int(r))),
                    int(tokens),
                    int(rows["priority"][int(r)]),
                    int(done),
                    int(still),
                    float(rows["tpot_s"][int(r)]),
                )
                for r, tokens, done, still in table.tolist()
            ]
        return self._rows


def deviations(tracker: DeviationTracker, led: Ledger) -> dict[WorkerId, Error]:
    """Algorithm 2's errors now, the ledger and its predictions being up to date (`observe` renews them)."""
    running_n, steps = led.workers["running_n"], led.workers["step"]
    rows = led.running[np.arange(led.running.shape[1]) < running_n[:, None]]
    worker = np.repeat(np.arange(len(running_n)), running_n)
    decodes = led.requests["phase"][rows] == DECODING
    rows, worker = rows[decodes], worker[decodes]
    made = led.requests["key"][rows] + steps[worker]
    return tracker.look(
        {WorkerId(str(w)): step for w, step in enumerate(steps.tolist())},
        Decoding(rows, worker, made, led.requests["predicted"][rows]),
        lambda gone: led.requests["phase"][gone] == DONE,
    )


def held_requests(led: Ledger, queue: Queue, now_s: float) -> tuple[HeldRequest, ...]:
    """The first in the cluster's line that may still be on time."""
    line, left_s = np.empty(REFUSALS, np.int64), np.empty(REFUSALS)
    n = on_time(led, queue, now_s, line, left_s)
    held = []
    for r, left in zip(line[:n].tolist(), left_s[:n].tolist(), strict=True):
        row = led.requests[r]
        tokens, still = int(row["prompt"] + row["key"]), max(int(row["predicted"] - row["key"]), 1)
        of = RunningRequest(
            RequestId(str(r)), tokens, int(row["priority"]), int(row["key"]), still, float(row["tpot_s"])
        )
        held.append(HeldRequest(of, left))
    return tuple(held)


def observe(
    led: Ledger,
    profiles: Sequence[Profile],
    now_s: float,
    moving: frozenset[int],
    busy: frozenset[int],
    watermark: float,
    states: Sequence[str | None] | None = None,
) -> Snapshot:
    """The fleet at `now_s`, the ledger brought up to it before; workers and requests go by their numbers,
    kinds by their profiles' variants.

    `watermark`: the share of KV that an engine keeps back at admission. `states`: of an elastic fleet's
    workers, None for those that are not there.
    """
    table = loads(led).tolist()
    status, variant = led.workers["status"].tolist(), led.workers["variant"].tolist()
    roles = led.workers["role"].tolist()
    capacity = [int(p.kv.capacity_tokens * (1.0 - watermark)) for p in profiles]
    kinds = [p.type_name for p in profiles]
    workers = []
    for w, row in enumerate(table):
        state = _STATES.get(status[w], SERVES) if states is None else states[w]
        if state is None:
            continue
        profile = profiles[variant[w]]
        running, held, waiting, head, waiting_tokens, high, growth, tpot_s, peak = row
        workers.append(
            WorkerLoad(
                WorkerId(str(w)),
                state,
                capacity[variant[w]] if status[w] != OFF else 0,
                Listed(led, w, False, int(running)),
                Listed(led, w, True, int(waiting)),
                profile.step,
                profile.engine.max_seqs,
                Load(
                    int(running),
                    int(held),
                    int(waiting),
                    int(head),
                    int(waiting_tokens),
                    int(high),
                    int(growth),
                    tpot_s,
                    int(peak),
                ),
                name_in_role(kinds[variant[w]], ROLES[roles[w]]),
                float(profile.kv.bytes_per_token),
            )
        )
    return Snapshot(
        now_s,
        tuple(workers),
        len(workers),
        moving=frozenset(RequestId(str(r)) for r in moving),
        busy=frozenset(WorkerId(str(w)) for w in busy),
    )
