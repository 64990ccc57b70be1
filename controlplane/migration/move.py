"""Moves of requests: the terms and the price by which rules choose them, and the legal stages of each.

**Stages.** The source decodes on while its KV is copied (Llumnix's multi-stage pre-copy); only the last
tokens are copied with the request stopped. A stage says who owns the client's stream, and what is held for
the move:

    stage         stream from     held                             when given up
    PENDING       source          nothing                          -
    COPYING       source          source: a lease; target: loader  release both
    CUTTING_OVER  target          source: a hold;  target: loader  replay the request; release both
    DONE          target          nothing
    ABORTED       source          nothing
    LOST          who replays it  nothing

ABORTED is before the cut-over: the client's stream never left the source. LOST is after it: the target could
not go on, and the request is replayed from its tokens. A request that still waits has no KV and cuts over at
once. Unlike in Llumnix the target pulls, so a source never waits for a push, and a request that ends by
itself during a move is not a failure.
"""

from __future__ import annotations

from collections.abc import Container, Set
from dataclasses import dataclass
from enum import Enum, auto

from controlplane.errors import BadInput, IllegalStep
from controlplane.snapshot import Pace, RunningRequest, Transport, WorkerLoad
from controlplane.types import RequestId, WorkerId

Pairs = Container[tuple[WorkerId, WorkerId]]


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """What binds the moves of one heartbeat.

    `resting`: requests that must stay where they are. `recent`: pairs (source, target) that are not turned
    round yet. `transport`: at its pace a move must be worth its price, where speeds are known.
    """

    resting: Set[RequestId]
    recent: Pairs
    transport: Transport

    def movable(self, worker: WorkerLoad) -> list[RunningRequest]:
        """A worker's requests that may move and have a token: in its prefill none has KV to copy whole."""
        return [r for r in worker.requests if r.generated != 0 and r.request not in self.resting]


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a move: KV bytes a token, the link's rate, the pause, and the lengthening of steps."""

    bytes_per_token: float
    bytes_per_s: float = Pace().bytes_per_s
    fixed_s: float = Pace().pause_s
    slowdown: float = Transport().slowdown

    def __post_init__(self) -> None:
        if not (self.bytes_per_token >= 0 and self.bytes_per_s > 0):
            raise BadInput(f"price of moves: need bytes_per_token >= 0 and bytes_per_s > 0, got {self}")
        if not (self.fixed_s >= 0 and self.slowdown >= 0):
            raise BadInput(f"price of moves: fixed_s and slowdown must not be negative, got {self}")

    def copy_s(self, tokens: int) -> float:
        """Seconds to copy that many tokens' KV."""
        return tokens * self.bytes_per_token / self.bytes_per_s


def price_of(transport: Transport, source: WorkerLoad, target: WorkerLoad) -> Price | None:
    """The price of moves between two workers at their link's pace; None where KV's size is not known."""
    if source.kv_bytes_per_token == 0.0:
        return None
    pace = transport.between(source.worker, target.worker)
    return Price(source.kv_bytes_per_token, pace.bytes_per_s, pace.pause_s, transport.slowdown)


class Stage(Enum):
    """The stage of a move."""

    PENDING = auto()
    COPYING = auto()
    CUTTING_OVER = auto()
    DONE = auto()
    ABORTED = auto()
    LOST = auto()


class Happened(Enum):
    """An event that the coordinator learns of."""

    WAITING = auto()  # the request has no token yet: nothing to copy
    ACCEPTED = auto()  # both sides are there; the source has the order to keep the KV
    COPIED = auto()  # one pre-copy stage is on the target
    SWITCHED = auto()  # the gateway listens to the target
    RESUMED = auto()  # the target's first token arrived
    REFUSED = auto()  # cannot continue exactly, over budget, or a side is gone
    COPY_FAILED = auto()  # load error, target full until the time limit, either side lost
    RESUME_FAILED = auto()  # the target failed after the switch
    ENDED = auto()  # the request finished or its client left


NEXT: dict[tuple[Stage, Happened], Stage] = {
    (Stage.PENDING, Happened.REFUSED): Stage.ABORTED,
    (Stage.PENDING, Happened.ENDED): Stage.ABORTED,
    (Stage.PENDING, Happened.ACCEPTED): Stage.COPYING,
    (Stage.PENDING, Happened.WAITING): Stage.CUTTING_OVER,
    (Stage.COPYING, Happened.COPIED): Stage.COPYING,
    (Stage.COPYING, Happened.COPY_FAILED): Stage.ABORTED,
    (Stage.COPYING, Happened.ENDED): Stage.ABORTED,
    (Stage.COPYING, Happened.SWITCHED): Stage.CUTTING_OVER,
    (Stage.CUTTING_OVER, Happened.RESUMED): Stage.DONE,
    (Stage.CUTTING_OVER, Happened.RESUME_FAILED): Stage.LOST,
    (Stage.CUTTING_OVER, Happened.ENDED): Stage.DONE,
}

CLOSED = frozenset({Stage.DONE, Stage.ABORTED, Stage.LOST})


def step(stage: Stage, happened: Happened) -> Stage:
    """The stage after an event. Raises IllegalStep for what the table does not list."""
    try:
        return NEXT[stage, happened]
    except KeyError:
        raise IllegalStep(f"{happened.name} while {stage.name}") from None
