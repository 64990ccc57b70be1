"""`FleetState`: a live fleet at one instant, as the control API sends it and the controller observes it.

The gateway's core copies the ledger that it places by, and the loads counted in it, between two turns of its
loop. So no record is half written in a copy, and neither side keeps anything of the other. A reply that is
lost costs one heartbeat. The controller lays the records out as the same ledger. `controlplane.port` makes
the snapshot from them, as it does for a simulated fleet.

Caches are too large to copy. Each request names the workers that had most of it cached as it came to its
place.

Demand counters hold arrivals and outcomes since the gateway began, by SLO class; they only grow. The
controller takes the difference between two readings. A controller that has just started has no first reading
and reports the rate as unknown instead of zero.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from controlplane.migration.loads import loads
from controlplane.perfmodel.coefficients import BLOCK_TOKENS, KV_BLOCKS, MAX_SEQS, WIDTH
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import StepModel
from controlplane.placement.ledger import HELD, NONE, REQUEST, WORKER, Ledger, Records, new_ledger
from controlplane.placement.lengths import LengthTable
from controlplane.port import LedgerWorker, Rename, held_request, observe
from controlplane.snapshot import NOT_CACHED, Cached, Pace, RunningRequest, Snapshot, Transport
from controlplane.types import ClassArrivals, ClassOutcomes, RequestId, Slo, WorkerId
from dataplane.live.ledger.request import Tracked

SUMS = ("requests", "prompt_tokens", "output_tokens")
MOST_CLASSES = 64  # clients name targets as they like; past this many they count for the first
# The ledger's arrays that rules of a fleet read, and what they hold; numbers are not named here.
RECORDS = {"workers": WORKER, "requests": REQUEST}
FLOATS = ("coefficients", "length_expected")
COPIED = ("workers", "requests", "queue_head", "running", "length_edges", "length_grid", *FLOATS)


class DemandCount:
    """Requests and tokens by class; `add` is called for every request that reaches the fleet."""

    def __init__(self) -> None:
        self._sums: dict[Slo, list[int]] = {}
        self._ended: dict[Slo, list[int]] = {}

    def add(self, tracked: Tracked) -> None:
        """Count an arrival, with what is expected of its output."""
        sums = _row(self._sums, tracked.slo, 3)
        sums[0] += 1
        sums[1] += tracked.prompt_tokens
        sums[2] += tracked.predicted_tokens

    def end(self, tracked: Tracked, outcome: str, now_s: float | None = None) -> None:
        """Count a request that is over, as `controlplane.types.ClassOutcomes` says.

        One that its client gave up beyond a target counts as it stood; one given up earlier is no outcome.
        """
        is_judged = tracked.is_judged(outcome, time.monotonic() if now_s is None else now_s)
        if not is_judged and outcome != "rejected":
            return
        ttft_met, tpot_met = tracked.slo_met() if is_judged else (False, False)
        sums = _row(self._ended, tracked.slo, 4)
        for at, counts in enumerate((True, ttft_met, tpot_met, ttft_met and tpot_met)):
            sums[at] += counts

    def arrivals(self) -> list[ClassArrivals]:
        """The arrivals of each class."""
        return [ClassArrivals(slo, *sums) for slo, sums in self._sums.items()]

    def outcomes(self) -> list[ClassOutcomes]:
        """The outcomes of each class."""
        return [ClassOutcomes(slo, *sums) for slo, sums in self._ended.items()]


def _row(sums: dict[Slo, list[int]], slo: Slo, columns: int) -> list[int]:
    if slo not in sums and len(sums) >= MOST_CLASSES:
        slo = next(iter(sums))
    return sums.setdefault(slo, [0] * columns)


def since(
    before: Sequence[ClassArrivals] | None, now: Sequence[ClassArrivals]
) -> tuple[ClassArrivals, ...] | None:
    """Arrivals between two readings; None without a first one, or where the counters were reset."""
    if before is None:
        return None
    had = {one.slo: one for one in before}
    arrived = []
    for one in now:
        was = had.pop(one.slo, ClassArrivals(one.slo, 0, 0, 0))
        new = [getattr(one, name) - getattr(was, name) for name in SUMS]
        if min(new) < 0:
            return None
        if new[0]:
            arrived.append(ClassArrivals(one.slo, *new))
    return None if had else tuple(arrived)


class Array(msgspec.Struct, frozen=True):
    """An array's shape and bytes."""

    shape: tuple[int, ...]
    content: bytes


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker, and its row in the ledger; NONE while it starts."""

    worker: str
    kind: str
    state: str
    row: int = NONE
    kv_bytes_per_token: int = 0


class RequestRow(msgspec.Struct, frozen=True):
    """A request, and its row in the ledger.

    `fixed`: it cannot be moved from there. `cached`: tokens of it that other workers had cached as it came to
    its place, of those that had most.
    """

    request: str
    row: int
    fixed: bool = False
    cached: dict[WorkerId, int] = {}


class MoveRow(msgspec.Struct, frozen=True):
    """A move under way."""

    request: str
    source: str | None
    target: str


class FleetState(msgspec.Struct, frozen=True):
    """A fleet at one instant.

    `records`: the ledger's arrays, by name; `loads`: of its workers. `arrivals` and `outcomes`: counters by
    class. `held`: rows of those in line that may be on time, and in how many seconds each must begin. `pace`
    and `paces`: of moves, in all and by source and target. `profiles`: of kinds, as given or measured;
    `steps`: the step times that refits have come to.
    """

    records: dict[str, Array]
    loads: Array
    workers: list[WorkerRow]
    requests: list[RequestRow]
    moving: list[MoveRow]
    wanted_kinds: dict[str, int]
    auto: bool
    cold_start_s: float
    drain_s: float
    arrivals: list[ClassArrivals]
    outcomes: list[ClassOutcomes]
    held: list[tuple[int, float]]
    pace: Pace
    paces: list[tuple[str, str, Pace]]
    profiles: dict[str, Profile]
    steps: dict[str, StepModel]


def copied(led: Ledger) -> tuple[dict[str, Array], Array]:
    """The ledger's arrays as they are now, and the loads of its workers."""
    table = loads(led)  # renews outlived predictions, so it comes first
    return {name: _array(getattr(led, name)) for name in COPIED}, _array(table)


def _array(values: Records) -> Array:
    return Array(values.shape, values.tobytes())


def _values(name: str, array: Array) -> Records:
    dtype = RECORDS.get(name, np.dtype(np.float64 if name in FLOATS else np.int64))
    # Copied, since kernels are compiled for arrays that may be written to.
    return np.frombuffer(array.content, dtype).reshape(array.shape).copy()


class Observer:
    """Snapshots from states. It remembers the last one: arrivals are the difference of two counters.

    A new one knows nothing of before.

    `profiles`: of kinds, as given and as states say; `steps`: what their refits have come to.
    """

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        self.profiles = dict(profiles)
        self.steps: dict[str, StepModel] = {}
        self._arrivals: Sequence[ClassArrivals] | None = None
        self._blank = new_ledger(np.zeros((0, WIDTH)), np.zeros(0, np.int64), 0, 0, LengthTable.constant(1))

    def snapshot(self, state: FleetState, now_s: float) -> Snapshot:
        """The fleet, in its state at `now_s`."""
        self.profiles |= state.profiles
        self.steps |= state.steps
        led = self._blank._replace(**{name: _values(name, array) for name, array in state.records.items()})
        by_row, rename = _requests_of(state)
        waiting = led.requests[[r for r in by_row if led.requests["phase"][r] == HELD]]
        held = [held_request(led, r, left_s) for r, left_s in state.held]
        places = [self._place(led, w) for w in state.workers]
        arrived = since(self._arrivals, state.arrivals)
        self._arrivals = state.arrivals
        wanted = sum(state.wanted_kinds.values())
        pairs = {(WorkerId(source), WorkerId(target)): pace for source, target, pace in state.paces}
        return replace(
            observe(led, _values("coefficients", state.loads), places, now_s, rename),
            wanted=wanted,
            waiting_tokens=int((waiting["prompt"] + waiting["key"]).sum()),
            moving=_tied(state),
            busy=frozenset(WorkerId(end) for m in state.moving for end in (m.source, m.target) if end),
            arrivals=None if arrived is None else round(sum(c.requests for c in arrived)),
            fixed=None if state.auto else wanted,
            by_class=arrived or (),
            waiting_requests=len(waiting),
            cold_start_s=state.cold_start_s,
            drain_s=state.drain_s,
            wanted_kinds=state.wanted_kinds,
            outcomes=tuple(state.outcomes),
            held=tuple(replace(h, request=rename(h.request)) for h in held),
            transport=Transport(state.pace, pairs),
        )

    def _place(self, led: Ledger, w: WorkerRow) -> LedgerWorker:
        profile = self.profiles.get(w.kind)
        step = self.steps.get(w.kind, None if profile is None else profile.step)
        at = LedgerWorker(w.row, WorkerId(w.worker), w.state, w.kind, step)
        if w.row == NONE:
            return at
        k = led.coefficients[led.workers[w.row]["variant"]]
        tokens, seats = int(k[KV_BLOCKS] * k[BLOCK_TOKENS]), int(k[MAX_SEQS])
        bytes_per_token = float(w.kv_bytes_per_token)
        return replace(at, capacity_tokens=tokens, max_seqs=seats, kv_bytes_per_token=bytes_per_token)


def _requests_of(state: FleetState) -> tuple[dict[int, RequestRow], Rename]:
    """The requests by their rows, and how they get their names."""
    by_row = {r.row: r for r in state.requests}
    return by_row, partial(_renamed, by_row)


def _tied(state: FleetState) -> frozenset[RequestId]:
    """Requests on the move, and those that cannot be moved."""
    moving = [RequestId(move.request) for move in state.moving]
    return frozenset([*moving, *(RequestId(r.request) for r in state.requests if r.fixed)])


def _renamed(rows: Mapping[int, RequestRow], request: RunningRequest) -> RunningRequest:
    its = rows[int(request.request)]
    return replace(request, request=RequestId(its.request), cached=partial(_cached, its.cached))


def _cached(tokens: Mapping[WorkerId, int], worker: WorkerId) -> Cached:
    """Whether others use it is not known: memory is counted as if no other request did."""
    return Cached(tokens[worker]) if worker in tokens else NOT_CACHED
