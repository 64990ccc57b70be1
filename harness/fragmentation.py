"""Fragmented KV memory over time (Llumnix, OSDI '24, Figure 12), of a simulated fleet.

A request is blocked where it is the next of a worker's queue, or of the gateway's, and needs more memory than
any worker that could take it has free. At a worker that is this worker alone. Memory is fragmented as far as
the free memory of all workers together would hold blocked requests, the smallest first:

    fragmented = Σ tokens of the blocked requests that fit into Σ free tokens / Σ tokens of all workers

It is counted from the controller's `Snapshot`, at each heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from controlplane.control import Settings, tick
from controlplane.perfmodel.profile import Profile
from controlplane.snapshot import Snapshot
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.control_loop import ControlSettings, SimulatedPlane, drive
from dataplane.simulated.run import RunState
from dataplane.simulated.simulate import WorkerSpec, prepare

BEAT_S, MIGRATE = 0.25, "+migrate"


@dataclass(slots=True)
class Memory:
    """A fleet's memory until `until_s`: by time the shares fragmented and free, and the requests blocked."""

    until_s: float

    at_s: list[float] = field(default_factory=list)
    fragmented: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)

    def add(self, snapshot: Snapshot) -> None:
        """Count a snapshot."""
        if snapshot.now_s > self.until_s:
            return
        fragmented, free, blocked = fragmentation(snapshot)
        self.at_s.append(snapshot.now_s)
        self.fragmented.append(fragmented)
        self.free.append(free)
        self.blocked.append(blocked)

    def mean(self, values: list[float]) -> float:
        """The mean over the time, each value lasting until the next look."""
        lasts = np.diff(self.at_s)
        return float(np.average(values[:-1], weights=lasts)) if lasts.sum() else 0.0


def fragmentation(snapshot: Snapshot) -> tuple[float, float, int]:
    """The shares of all memory that are fragmented, and free; and how many requests are blocked."""
    workers = [(w, w.counted()) for w in snapshot.workers if w.capacity_tokens]
    free = [max(w.capacity_tokens - load.held_tokens, 0) for w, load in workers]
    blocked = [
        load.head_tokens for (_, load), here in zip(workers, free, strict=True) if load.head_tokens > here
    ]
    in_line = [held.request.tokens for held in snapshot.held[:1]]
    blocked += [tokens for tokens in in_line if tokens > max(free, default=0)]
    fits = np.cumsum(sorted(blocked))
    held = fits[fits <= sum(free)]
    capacity = max(sum(w.capacity_tokens for w, _ in workers), 1)
    return float(held[-1]) / capacity if len(held) else 0.0, sum(free) / capacity, len(blocked)


class _WatchedPlane(SimulatedPlane):
    """The simulated plane, whose memory is counted at each heartbeat."""

    def __init__(self, run: RunState, control: ControlSettings) -> None:
        super().__init__(run, control)
        self.memory = Memory(float(run.workload.arrival_s[-1]))

    def observe(self) -> Snapshot:
        snapshot = super().observe()
        self.memory.add(snapshot)
        return snapshot


@dataclass(frozen=True, slots=True)
class Watched:
    """A run: its memory, its moves, and each request's TTFT in seconds (NaN: it had no token)."""

    memory: Memory
    moves: int
    ttft_s: list[float]


def simulated(profile: Profile, workers: int, workload: Workload, policy: str) -> Watched:
    """A run on the simulated plane; a policy without moves is looked at just as often."""
    base, moves = policy.removesuffix(MIGRATE), policy.endswith(MIGRATE)
    run = prepare(workload, [WorkerSpec(profile)] * workers, Slo(600.0, 60.0), base + MIGRATE)
    plane = _WatchedPlane(run, ControlSettings())
    settings = Settings.of_policy(run.policy, run.settings) if moves else Settings(None, None)
    drive(plane, partial(tick, settings))
    outcome = run.outcome()
    return Watched(plane.memory, int(outcome.migrations.sum()), outcome.ttft_s.tolist())
