"""A move of one request: its price and its gain, and the legal stages that it passes.

**Price and gain** are in request-seconds; a move is made only where it pays for itself. While `copy_s` =
bytes / bandwidth lasts, every step of both workers is `slowdown` longer; the moved request pauses for
`fixed_s`.

    cost = fixed_s + slowdown · copy_s · (b_source + b_target + 1)

Only the bytes of the tokens that are sent count, not those of first tokens that the target has cached.

The gain is over the n steps that the moved request is still expected to take. The request adds
m = c2 + k2·tokens to every step that it is part of. Its neighbours at the source no longer bear that, and
those at the target do. Its own step times change.

    gain = n · [ m·(b_source - 1 - b_target) + t_source - (t_target + m) ]

Where requests wait at the source for memory, the move also shortens the wait of each request in its queue. It
saves the share min(moved tokens / missing tokens, 1) of the time until the source's next expected finish.

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

from dataclasses import dataclass
from enum import Enum, auto

from controlplane.errors import BadInput, IllegalStep
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import Load, Pace, RunningRequest, Transport, WorkerLoad
from controlplane.types import WorkerId


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


def tenths_to_send(r: RunningRequest, target: WorkerId) -> int:
    """Tenths of a request that a move to a worker sends: the order of targets that are equal otherwise.

    A smaller difference than a tenth is no reason to choose one.
    """
    return -(-10 * r.to_send(target) // max(r.tokens, 1))


def cost_s(price: Price, tokens: int, source: Load, target: Load) -> float:
    """Request-seconds that sending `tokens` tokens takes from all requests that the move touches."""
    busy = source.running + target.running + 1
    return price.fixed_s + price.slowdown * price.copy_s(tokens) * busy


def gain_s(
    request: RunningRequest,
    source: Load,
    target: Load,
    source_step: StepModel,
    target_step: StepModel,
    free_tokens: int,
    next_end_steps: int,
) -> float:
    """Request-seconds that a move is expected to save; negative where it makes things worse.

    `free_tokens`: the source's free memory. `next_end_steps`: steps until something there should finish.
    """
    t_source = float(source_step.step_s(0, source.running, source.held_tokens))
    t_target = float(target_step.step_s(0, target.running, target.held_tokens))
    spared = source_step.per_sequence_s + source_step.per_context_token_s * request.tokens
    borne = target_step.per_sequence_s + target_step.per_context_token_s * request.tokens
    others = spared * (source.running - 1) - borne * target.running
    gain = max(request.remaining_tokens, 1) * (others + t_source - (t_target + borne))
    lacks = source.head_tokens - free_tokens
    if source.waiting and lacks > 0:
        gain += min(request.tokens / lacks, 1.0) * next_end_steps * t_source * source.waiting
    return gain


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
