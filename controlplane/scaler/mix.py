"""What arrives, by SLO class: how many requests and how long, as sums that fade.

Lengths drift, and with them what a worker can do: the sums halve every `half_life_s`, so that the line
learned from them (scaler.line) follows the traffic of the last minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.types import Slo

HALF_LIFE_S = 120.0
MOST_CLASSES = 16  # clients may name targets of their own: the rarest are not remembered


@dataclass(frozen=True, slots=True)
class ClassArrivals:
    """Requests of one SLO class, and their tokens summed; of outputs, what is expected of them."""

    slo: Slo
    requests: float
    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        if min(self.requests, self.prompt_tokens, self.output_tokens) < 0:
            raise BadInput(f"arrivals: requests and tokens must not be negative, got {self}")

    @property
    def mean_prompt_tokens(self) -> float:
        return self.prompt_tokens / self.requests if self.requests else 0.0

    @property
    def mean_output_tokens(self) -> float:
        return self.output_tokens / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """The classes seen, weighted by age; `seen_s`: when the weights are of."""

    classes: tuple[ClassArrivals, ...] = ()
    seen_s: float | None = None

    @property
    def requests(self) -> float:
        return sum(c.requests for c in self.classes)


def blend(mix: Mix, arrived: Sequence[ClassArrivals], now_s: float, half_life_s: float = HALF_LIFE_S) -> Mix:
    """The mix with what arrived since the last look, older arrivals faded."""
    if not half_life_s > 0:
        raise BadInput(f"mix: half_life_s: must be positive, got {half_life_s:g}")
    if not arrived:  # silence does not make the lengths less known
        return mix
    kept = 1.0 if mix.seen_s is None else 0.5 ** (max(now_s - mix.seen_s, 0.0) / half_life_s)
    sums = {c.slo: _scaled(c, kept) for c in mix.classes}
    for new in arrived:
        sums[new.slo] = _sum(sums[new.slo], new) if new.slo in sums else new
    most = sorted(sums.values(), key=lambda c: (-c.requests, c.slo.tpot_s, c.slo.ttft_s))[:MOST_CLASSES]
    return Mix(tuple(c for c in most if c.requests > 0), now_s)


def _scaled(c: ClassArrivals, share: float) -> ClassArrivals:
    return ClassArrivals(c.slo, c.requests * share, c.prompt_tokens * share, c.output_tokens * share)


def _sum(a: ClassArrivals, b: ClassArrivals) -> ClassArrivals:
    return ClassArrivals(
        a.slo,
        a.requests + b.requests,
        a.prompt_tokens + b.prompt_tokens,
        a.output_tokens + b.output_tokens,
    )
