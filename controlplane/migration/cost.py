"""The price of a move and its gain, in request-seconds; a move is made only where it pays for itself.

Cost. While `copy_s` = bytes / bandwidth lasts, every step of both workers is `slowdown` longer; the moved
request pauses for `fixed_s`.

    cost = fixed_s + slowdown · copy_s · (b_source + b_target + 1)

Gain, over the n steps that the moved request is still expected to take. It adds m = c2 + k2·tokens to every
step that it is part of; its neighbours at the source are spared that and those at the target bear it, and its
own step times change.

    gain = n · [ m·(b_source - 1 - b_target) + t_source - (t_target + m) ]

Where a request waits at the source for memory, the move also spares the head of the queue its wait, up to the
share of the missing memory that the moved tokens give: the time until the source's next expected finish.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import Load, RunningRequest


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a move: KV bytes a token, the link's rate, the pause, and the lengthening of steps."""

    bytes_per_token: float
    bytes_per_s: float = 2.4e9  # Gloo between hosts, as the paper measured it
    fixed_s: float = 0.01
    slowdown: float = 0.02

    def __post_init__(self) -> None:
        if not (self.bytes_per_token >= 0 and self.bytes_per_s > 0):
            raise BadInput(f"price of moves: need bytes_per_token >= 0 and bytes_per_s > 0, got {self}")
        if not (self.fixed_s >= 0 and self.slowdown >= 0):
            raise BadInput(f"price of moves: fixed_s and slowdown must not be negative, got {self}")

    def copy_s(self, tokens: int) -> float:
        """Seconds to copy that many tokens' KV."""
        return tokens * self.bytes_per_token / self.bytes_per_s


def cost_s(price: Price, tokens: int, source: Load, target: Load) -> float:
    """Request-seconds that a move takes from all it touches; a waiting request has nothing to copy."""
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
