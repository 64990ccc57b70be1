"""The step-time model: one linear model of an engine step for every engine mode.

    t = c3 + k1·P + c2·b + k2·C + k4·S + k5·[P > 0] + Σ hinges

P prefill tokens in the step, b decoding sequences, C tokens those sequences hold at the step's start.
Aladdin's Eq 3 (decode) is P = 0; its Eq 2 (prefill) is b = 0, kept apart as `PrefillModel` since engines
that never mix the phases were measured that way. S = Σ (end² - start²) over the step's prefill chunks, so
that a prompt cut into chunks adds up to its length squared (attention within the prompt). k5 is what a step
costs more for prefilling at all: other kernels, and a batch to lay out. A hinge adds
`per_unit_s · max(x - start, 0)`; it stays linear in the coefficients, so the fit stays linear too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.errors import BadInput

HingeOf = Literal["sequences", "prefill_tokens"]


@dataclass(frozen=True, slots=True)
class Hinge:
    """Extra time per unit past a knee: `per_unit_s · max(x - start, 0)`."""

    of: HingeOf
    start: float
    per_unit_s: float

    def __post_init__(self) -> None:
        if self.of not in ("sequences", "prefill_tokens"):
            raise BadInput(f"hinge: of: sequences or prefill_tokens, got {self.of!r}")
        _not_negative("hinge", start=self.start, per_unit_s=self.per_unit_s)


@dataclass(frozen=True, slots=True)
class StepModel:
    """Time of a step that may carry prefill and decode together (seconds, tokens)."""

    base_s: float
    per_prefill_token_s: float
    per_sequence_s: float
    per_context_token_s: float
    per_prefill_sum_sq_s: float = 0.0
    hinges: tuple[Hinge, ...] = ()
    per_prefill_step_s: float = 0.0

    def __post_init__(self) -> None:
        _not_negative(
            "step",
            base_s=self.base_s,
            per_prefill_token_s=self.per_prefill_token_s,
            per_sequence_s=self.per_sequence_s,
            per_context_token_s=self.per_context_token_s,
            per_prefill_sum_sq_s=self.per_prefill_sum_sq_s,
            per_prefill_step_s=self.per_prefill_step_s,
        )

    def step_s(
        self,
        prefill_tokens: ArrayLike,
        sequences: ArrayLike,
        context_tokens: ArrayLike,
        prefill_sum_sq: ArrayLike = 0.0,
    ) -> NDArray[np.float64]:
        """Seconds of each step; arguments broadcast."""
        p, b, c, s = (
            np.asarray(x, float) for x in (prefill_tokens, sequences, context_tokens, prefill_sum_sq)
        )
        t = (
            self.base_s
            + self.per_prefill_token_s * p
            + self.per_sequence_s * b
            + self.per_context_token_s * c
            + self.per_prefill_sum_sq_s * s
            + self.per_prefill_step_s * (p > 0)
        )
        for hinge in self.hinges:
            x = b if hinge.of == "sequences" else p
            t = t + hinge.per_unit_s * np.maximum(x - hinge.start, 0.0)
        return np.asarray(t, float)

    def context_limit(self, sequences: float, tpot_s: float) -> float:
        """Eq 4: the most context `sequences` may hold for a decode step to last at most `tpot_s`.

        Negative when the batch alone is too slow; infinite when context costs nothing.
        """
        rest = tpot_s - float(self.step_s(0, sequences, 0))
        if self.per_context_token_s == 0:
            return float("inf") if rest >= 0 else -1.0
        return rest / self.per_context_token_s


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Time of a step that carries prefill alone (Eq 2 with optional length² and hinge terms)."""

    base_s: float
    per_token_s: float
    per_sum_sq_s: float = 0.0
    hinges: tuple[Hinge, ...] = ()

    def __post_init__(self) -> None:
        _not_negative(
            "prefill", base_s=self.base_s, per_token_s=self.per_token_s, per_sum_sq_s=self.per_sum_sq_s
        )
        if any(h.of != "prefill_tokens" for h in self.hinges):
            raise BadInput("prefill: hinges: only of prefill_tokens")

    def prefill_s(self, tokens: ArrayLike, sum_sq: ArrayLike | None = None) -> NDArray[np.float64]:
        """Seconds to prefill `tokens` in one step; `sum_sq` is Σ length², one prompt's square by default."""
        x = np.asarray(tokens, float)
        sq = x * x if sum_sq is None else np.asarray(sum_sq, float)
        t = self.base_s + self.per_token_s * x + self.per_sum_sq_s * sq
        for hinge in self.hinges:
            t = t + hinge.per_unit_s * np.maximum(x - hinge.start, 0.0)
        return np.asarray(t, float)


def _not_negative(where: str, **values: float) -> None:
    for name, value in values.items():
        # `not >=` rather than `<`: NaN must not pass.
        if not (0.0 <= value < float("inf")):
            raise BadInput(f"{where}: {name}: must be a number of at least 0, got {value}")
