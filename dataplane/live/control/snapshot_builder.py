"""Snapshots for `tick` from the control API's replies: workers, requests, arrivals, errors of Algorithm 2.

Arrivals are the difference of two counters, a request that is gone has finished, one whose expected length
has grown has outlived its prediction (placement.rebalance keeps both as errors). So a `SnapshotBuilder`
remembers its last look; a new one knows nothing of before, and says so.

The profiles of the types of worker: as given, or as the last steps of their workers show.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.samples import StepSamples
from controlplane.placement.rebalance import Decoding, DeviationTracker, Error
from controlplane.scaler.line import profile_seen
from controlplane.snapshot import RunningRequest, Snapshot, WorkerLoad
from controlplane.types import RequestId, WorkerId
from dataplane.live.gateway.demand_count import since

PRIORITIES = {"normal": 0, "high": 1}

Row = Mapping[str, Any]


class SnapshotBuilder:
    """Snapshots from replies. `profiles`: by the name of a type; others are learned from steps."""

    def __init__(self, profiles: Mapping[str, Profile] | None = None) -> None:
        self.profiles = TypeProfiles(profiles or {})
        self._arrivals: list[dict[str, Any]] | None = None
        self._deviations = DeviationTracker()
        self.kv_bytes_per_token = 0  # of the workers; 0 = not known yet

    def snapshot(self, fleet: Row, requests: Sequence[Row], now_s: float) -> Snapshot:
        """The fleet now; `fleet` and `requests` as GET /v1/fleet and /v1/requests have them."""
        self.profiles.learn(fleet["workers"])
        sizes = [int(w.get("kv_bytes_per_token", 0)) for w in fleet["workers"]]
        self.kv_bytes_per_token = max(sizes, default=0) or self.kv_bytes_per_token
        placed: defaultdict[str | None, list[Row]] = defaultdict(list)
        for r in requests:
            placed[r["worker"]].append(r)
        waiting = placed[None]
        arrived = since(self._arrivals, fleet["arrivals"])
        self._arrivals = fleet["arrivals"]
        return Snapshot(
            now_s,
            tuple(self._worker(w, placed[w["worker"]]) for w in fleet["workers"]),
            int(fleet["wanted_workers"]),
            sum(_tokens(r) for r in waiting),
            frozenset(
                RequestId(r["request_id"])
                for r in (*fleet["moving"], *(r for r in requests if r.get("fixed")))
            ),
            frozenset(WorkerId(move[end]) for move in fleet["moving"] for end in ("source", "target")),
            self._errors(fleet["workers"], requests),
            None if arrived is None else sum(c.requests for c in arrived),
            None if fleet["auto"] else int(fleet["wanted_workers"]),
            arrived or (),
            len(waiting),
            float(fleet["cold_start_s"]),
            float(fleet["drain_s"]),
            fleet["wanted_kinds"],
        )

    def _worker(self, w: Row, placed: Sequence[Row]) -> WorkerLoad:
        # The engine says how many wait in it, not which: the youngest that have no token yet.
        queued = int((w.get("telemetry") or {}).get("waiting", 0))
        fresh = sorted((r for r in placed if r["state"] == "prefilling"), key=lambda r: -float(r["age_s"]))
        queue = fresh[len(fresh) - min(queued, len(fresh)) :]
        names = {r["request_id"] for r in queue}
        profile = self.profiles.of(w["kind"])
        return WorkerLoad(
            WorkerId(w["worker"]),
            w["state"],
            int(w.get("kv_blocks", 0)) * int(w.get("block_tokens", 0)),
            tuple(_running(r) for r in placed if r["request_id"] not in names),
            tuple(_running(r) for r in queue),
            None if profile is None else profile.step,
            int(w.get("max_seqs", 1 << 30)),
            kind=w["kind"],
        )

    def _errors(self, workers: Sequence[Row], requests: Sequence[Row]) -> dict[WorkerId, Error]:
        """Algorithm 2's errors by worker, brought up to this look."""
        steps = {WorkerId(w["worker"]): int(w["telemetry"]["steps"]) for w in workers if w.get("telemetry")}
        place = {w: i for i, w in enumerate(steps)}
        rows = [r for r in requests if r["worker"] in place and r["state"] == "decoding"]
        decoding = Decoding(
            np.array([r["request_id"] for r in rows], np.str_),
            np.array([place[r["worker"]] for r in rows], np.int64),
            np.array([int(r["output_tokens"]) for r in rows], np.int64),
            np.array([int(r["expected_tokens"]) for r in rows], np.int64),
        )
        there = np.array([r["request_id"] for r in requests], np.str_)
        return self._deviations.look(steps, decoding, lambda gone: ~np.isin(gone, there))


def _tokens(r: Row) -> int:
    return int(r["prompt_tokens"]) + int(r["output_tokens"])


def _running(r: Row) -> RunningRequest:
    return RunningRequest(
        RequestId(r["request_id"]),
        _tokens(r),
        PRIORITIES[r["priority"]],
        generated=int(r["output_tokens"]),
        remaining_tokens=max(int(r["expected_tokens"]) - int(r["output_tokens"]), 1),
        tpot_s=float(r["slo"]["tpot_s"]),
    )


REMEMBERED_STEPS = 600
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
        self._steps: defaultdict[str, Steps] = defaultdict(Steps)
        self._last_step: dict[str, int] = {}

    def of(self, kind: str) -> Profile | None:
        """The type's profile, as given or as seen; None before enough was seen."""
        return self._given.get(kind) or self._learnt.get(kind)

    def any(self) -> Profile | None:
        """Of a type that has one."""
        return next(iter((self._given | self._learnt).values()), None)

    def learn(self, workers: Sequence[Row]) -> None:
        """Take in the workers' last steps, as GET /v1/fleet tells them; refit now and then."""
        for w in workers:
            load, kind = w.get("telemetry"), w["kind"]
            if kind in self._given or not load or self._last_step.get(w["worker"]) == load["steps"]:
                continue
            self._last_step[w["worker"]] = load["steps"]
            if load["step_s"] > 0 and (load["prefill_tokens"] or load["sequences"]):
                steps = self._steps[kind]
                steps.last.append(
                    (load["prefill_tokens"], load["sequences"], load["context_tokens"], load["step_s"])
                )
                steps.new += 1
        for kind, steps in self._steps.items():
            if steps.new >= REFIT_EVERY:
                steps.new = 0
                self._refit(kind, [w for w in workers if w["kind"] == kind and w.get("kv_blocks")])

    def _refit(self, kind: str, rows: Sequence[Row]) -> None:
        capacity = min((int(w["kv_blocks"]) * int(w["block_tokens"]) for w in rows), default=0)
        seats = min((int(w["max_seqs"]) for w in rows), default=0)
        columns = np.array(self._steps[kind].last, float).T
        profile = profile_seen(StepSamples(*columns), capacity, seats, kind)
        if profile is not None:
            self._learnt[kind] = profile
