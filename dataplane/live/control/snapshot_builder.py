"""Snapshots for `tick` from the mirror of a fleet: workers, requests, arrivals, errors of Algorithm 2.

Arrivals are the difference of two counters, a request that is gone has finished, one whose expected length
has grown has outlived its prediction (placement.rebalance keeps both as errors). So a `SnapshotBuilder`
remembers its last look; a new one knows nothing of before, and says so.

The profiles of the types of worker: as given, or as the last steps of their workers show. A worker's step
times are those that the gateway's refit has come to, where it has one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import Hinge, StepModel
from controlplane.placement.rebalance import Decoding, DeviationTracker, Error
from controlplane.scaler.line import profile_seen
from controlplane.snapshot import Cached, HeldRequest, RunningRequest, Snapshot, Transport, WorkerLoad
from controlplane.types import ClassArrivals, RequestId, WorkerId
from controlplane.worker_type import WorkerType
from dataplane.live.control.changes import Changes, Mirror, RefitRow, RequestRow, WorkerRow
from dataplane.live.gateway.demand_count import since


class SnapshotBuilder:
    """Snapshots from a mirror. `profiles`: by the name of a type; others are learned from steps."""

    def __init__(self, profiles: Mapping[str, Profile] | None = None) -> None:
        self.profiles = TypeProfiles(profiles or {})
        self._arrivals: list[ClassArrivals] | None = None
        self._deviations = DeviationTracker()

    def snapshot(self, mirror: Mirror, now_s: float) -> Snapshot:
        """The fleet now, as a mirror that has taken an answer has it."""
        seen = mirror.seen
        assert seen is not None
        self.profiles.learn(seen.workers)
        self.profiles.refit(seen.refits)
        placed: defaultdict[str | None, list[RunningRequest]] = defaultdict(list)
        columns = (mirror.requests.values(), seen.output_tokens, seen.expected_tokens)
        for row, generated, expected in zip(*columns, strict=True):
            placed[row.worker].append(_running(row, generated, expected))
        waiting = placed[None]
        arrived = since(self._arrivals, seen.arrivals)
        self._arrivals = seen.arrivals
        moving = (move.request_id for move in seen.moving)
        fixed = (row.request_id for row in mirror.requests.values() if row.fixed)
        return Snapshot(
            now_s,
            tuple(self._worker(w, placed[w.worker]) for w in seen.workers),
            seen.wanted_workers,
            sum(r.tokens for r in waiting),
            frozenset(RequestId(name) for name in (*moving, *fixed)),
            frozenset(WorkerId(end) for move in seen.moving for end in (move.source, move.target) if end),
            self._errors(mirror.requests, seen),
            None if arrived is None else round(sum(c.requests for c in arrived)),
            None if seen.auto else seen.wanted_workers,
            arrived or (),
            len(waiting),
            seen.cold_start_s,
            seen.drain_s,
            seen.wanted_kinds,
            tuple(seen.outcomes),
            _held(mirror),
            _transport(seen),
        )

    def _worker(self, w: WorkerRow, placed: Sequence[RunningRequest]) -> WorkerLoad:
        # The engine says how many wait in it, not which: the youngest that have no token yet.
        fresh = [i for i, r in enumerate(placed) if not r.generated]
        waiting = 0 if w.last is None else min(w.last.waiting, len(fresh))
        queued = set(fresh[len(fresh) - waiting :])
        return WorkerLoad(
            WorkerId(w.worker),
            w.state,
            w.kv_tokens,
            tuple(r for i, r in enumerate(placed) if i not in queued),
            tuple(placed[i] for i in sorted(queued)),
            self.profiles.step(w.kind),
            w.max_seqs or 1 << 30,
            kind=w.kind,
            kv_bytes_per_token=float(w.kv_bytes_per_token),
        )

    def _errors(self, rows: Mapping[int, RequestRow], seen: Changes) -> dict[WorkerId, Error]:
        """Algorithm 2's errors by worker, brought up to this look."""
        steps = {WorkerId(w.worker): w.last.steps for w in seen.workers if w.last is not None}
        place = {w: i for i, w in enumerate(steps)}
        there = np.array(seen.numbers, np.int64)
        generated = np.array(seen.output_tokens, np.int64)
        worker = np.array([place.get(row.worker, -1) for row in rows.values()], np.int64)  # type: ignore[call-overload]
        now = (worker >= 0) & (generated > 0)
        expected = np.array(seen.expected_tokens, np.int64)
        decoding = Decoding(there[now], worker[now], generated[now], expected[now])
        return self._deviations.look(steps, decoding, lambda gone: ~np.isin(gone, there))


def _running(row: RequestRow, generated: int, expected: int) -> RunningRequest:
    return RunningRequest(
        RequestId(row.request_id),
        row.prompt_tokens + generated,
        row.priority,
        generated=generated,
        remaining_tokens=max(expected - generated, 1),
        tpot_s=row.tpot_s,
        cached=partial(_cached, row),
    )


def _cached(row: RequestRow, worker: WorkerId) -> Cached:
    """Whether others use it is not told: memory is reckoned as if nobody did."""
    return Cached(row.cached.get(worker, 0))


def _step_model(row: Mapping[str, Any]) -> StepModel:
    """A refit's step model, as `step_times` of GET /v1/fleet has it."""
    hinges = tuple(Hinge(h["of"], float(h["from"]), float(h["per_unit_s"])) for h in row["hinges"])
    return StepModel(hinges=hinges, **{name: float(x) for name, x in row.items() if name != "hinges"})


def _held(mirror: Mirror) -> tuple[HeldRequest, ...]:
    seen = mirror.seen
    assert seen is not None
    at = {number: i for i, number in enumerate(seen.numbers)}
    found = []
    for h in seen.held:
        i = at[h.number]
        row = _running(mirror.requests[h.number], seen.output_tokens[i], seen.expected_tokens[i])
        found.append(HeldRequest(row, h.left_s))
    return tuple(found)


def _transport(seen: Changes) -> Transport:
    pairs = {(WorkerId(row.source), WorkerId(row.target)): row.pace for row in seen.paces}
    return Transport(seen.usual.pace, pairs)


REMEMBERED_STEPS = 600
REFIT_STEPS = 200  # before a refit is believed
REFIT_EVERY = 40


@dataclass(slots=True)
class Steps:
    """A kind's last steps (prefill tokens, sequences, context tokens, seconds), and those not fitted yet."""

    last: deque[tuple[float, float, float, float]] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED_STEPS)
    )
    new: int = 0


class TypeProfiles:
    """Profiles by the name of their type. `given` ones stay as they are."""

    def __init__(self, given: Mapping[str, Profile]) -> None:
        self._given = dict(given)
        self._learnt: dict[str, Profile] = {}
        self._refitted: dict[str, StepModel] = {}
        self._steps: defaultdict[str, Steps] = defaultdict(Steps)
        self._last_step: dict[str, int] = {}

    def of(self, kind: str) -> Profile | None:
        """The type's profile, as given or as seen; None before enough was seen."""
        return self._given.get(kind) or self._learnt.get(kind)

    def step(self, kind: str) -> StepModel | None:
        """The type's step times as they are now: by the gateway's refit, else by its profile."""
        profile = self.of(kind)
        return self._refitted.get(kind, None if profile is None else profile.step)

    def known(self, worker_type: WorkerType) -> WorkerType:
        """The type with what is known of it by now."""
        profile, step = self.of(worker_type.name), self.step(worker_type.name)
        if profile is None or step is None:
            return worker_type
        return replace(worker_type, known_profile=replace(profile, step=step))

    def refit(self, rows: Sequence[RefitRow]) -> None:
        """Take in what the gateway's refits have come to."""
        for row in rows:
            if row.steps >= REFIT_STEPS:
                self._refitted[row.kind] = _step_model(row.step)

    def any(self) -> Profile | None:
        """Of a type that has one."""
        return next(iter((self._given | self._learnt).values()), None)

    def learn(self, workers: Sequence[WorkerRow]) -> None:
        """Take in the workers' last steps; refit now and then."""
        for w in workers:
            last = w.last
            if w.kind in self._given or last is None or self._last_step.get(w.worker) == last.steps:
                continue
            self._last_step[w.worker] = last.steps
            if last.step_s > 0 and (last.prefill_tokens or last.sequences):
                steps = self._steps[w.kind]
                steps.last.append((last.prefill_tokens, last.sequences, last.context_tokens, last.step_s))
                steps.new += 1
        for kind, steps in self._steps.items():
            if steps.new >= REFIT_EVERY:
                steps.new = 0
                self._refit(kind, [w for w in workers if w.kind == kind and w.kv_tokens])

    def _refit(self, kind: str, rows: Sequence[WorkerRow]) -> None:
        capacity = min((w.kv_tokens for w in rows), default=0)
        seats = min((w.max_seqs for w in rows), default=0)
        columns = np.array(self._steps[kind].last, float).T
        profile = profile_seen(StepSamples(*columns), capacity, seats, kind)
        if profile is not None:
            self._learnt[kind] = profile
