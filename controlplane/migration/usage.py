"""Virtual usage and `freeness`: one number for balance, room for long prompts, priorities and draining.

Llumnix (OSDI '24), Algorithm 1. Of a request r on a worker of M tokens:

    V(r) = 0                            r waits, others before it
    V(r) = its demand                   r waits at the head of the queue
    V(r) = held + headroom / high       r runs; `high` counts those of high priority, headroom only for them
    V    = ∞                            a made-up request on a worker that is draining

    F = (M - ΣV) / B        B requests in the batch, a waiting head included; F = +∞ for an idle worker

F is in tokens per request: the steps a worker can still do before its memory is full, as every request takes
one token a step. F is never NaN, so it orders workers strictly and weakly.

The headroom is a share of M; the paper's leaves 1,600 tokens of 13,616 to all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.snapshot import DRAINING, SERVING, Load, RunningRequest, WorkerLoad
from controlplane.types import WorkerId


@dataclass(frozen=True, slots=True)
class Reading:
    """The reading of virtual usage.

    `headroom`: the share of its KV that a worker with a high-priority request counts as held. So the others
    move away and it stays fast. At 0, priorities only order queues and moves.
    """

    headroom: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.headroom < 1.0:
            raise BadInput(f"virtual usage: headroom: must be at least 0 and below 1, got {self.headroom:g}")

    def queued_tokens(self, load: Load) -> int:
        """The demand that counts of those that wait: the head's."""
        return load.head_tokens


PAPER = Reading()


def headroom_tokens(load: Load, capacity_tokens: int, reading: Reading = PAPER) -> float:
    """Tokens kept free for the high-priority requests that run on a worker, together."""
    return reading.headroom * capacity_tokens if load.high else 0.0


def virtual_usage(load: Load, capacity_tokens: int, draining: bool, reading: Reading = PAPER) -> float:
    """ΣV of a worker in tokens; infinite while it drains."""
    if draining:
        return math.inf
    return load.held_tokens + reading.queued_tokens(load) + headroom_tokens(load, capacity_tokens, reading)


def freeness(load: Load, capacity_tokens: int, draining: bool, reading: Reading = PAPER) -> float:
    """F of a worker in tokens per request: +inf when idle, -inf while draining."""
    usage = virtual_usage(load, capacity_tokens, draining, reading)
    if usage == math.inf:
        return -math.inf
    batch = load.running + (1 if load.waiting else 0)
    return (capacity_tokens - usage) / batch if batch else math.inf


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker for the rules of migration: its load, counted once, and its `freeness`."""

    worker: WorkerLoad
    load: Load
    freeness: float

    @property
    def id(self) -> WorkerId:
        return self.worker.worker

    @property
    def free_tokens(self) -> int:
        """Memory that nothing holds."""
        return self.worker.capacity_tokens - self.load.held_tokens + self.load.shared_tokens

    def has_room(self, request: RunningRequest) -> bool:
        """Whether a seat and memory are free for a request, with a token for each that runs to grow into."""
        taken = self.load.waiting_tokens + self.load.running + 1
        is_seat_free = self.load.running + self.load.waiting < self.worker.max_seqs
        return is_seat_free and request.new_at(self.id) + taken <= self.free_tokens


def worker_views(workers: Iterable[WorkerLoad], reading: Reading = PAPER) -> list[WorkerView]:
    """The workers whose capacity is known and that are not starting."""
    views = []
    for w in workers:
        if w.capacity_tokens > 0 and w.state in (SERVING, DRAINING):
            load = w.counted()
            views.append(WorkerView(w, load, freeness(load, w.capacity_tokens, w.state == DRAINING, reading)))
    return views
