"""The step-time model: one linear model of an engine step for every engine mode, and its coefficients.

    t = c3 + k1·P + c2·b + k2·C + k4·S + (k5 + k6·b)·[P > 0] + Σ hinges

P prefill tokens in the step, b decoding sequences, C tokens those sequences hold at the step's start.
Aladdin's Eq 3 (decode) is P = 0; its Eq 2 (prefill) is b = 0, kept apart as `PrefillModel` since engines that
never mix the phases were measured that way. S = Σ (end² - start²) over the step's prefill chunks, so that a
prompt cut into chunks adds up to its length squared (attention within the prompt). k5 is what a step costs
more for prefilling at all: other kernels, and a batch to lay out. k6 is what a decoding sequence costs more
there. Matrices that only read their weights have its row nearly for free. Next to a prompt they compute, and
its row takes as long as a prompt's token. A hinge adds `per_unit_s · max(x - start, 0)`; it stays linear in
the coefficients, so the fit stays linear too.

A mixture of experts reads the experts that its tokens touch: of E, each token takes k, and n tokens touch
E·(1 - (1 - k/E)^n). That is a hinge of `experts`, per_unit_s · start · (1 - exp(-n/start)), with n = P + b
and start = -1 / ln(1 - k/E) tokens. It adds per_unit_s a token at first, and never more than all experts.

A coefficient is a field of `StepModel` or `PrefillModel` with its `Term`. `STEP_TERMS` and `PREFILL_TERMS`
list them; the fits, the refit, the profile file and the intervals go through these lists. The compiled form
(`coefficients.py`) spells the formula out again, and the forecast of a heartbeat (`migration/overload.py`) a
decode step. What is linear in a request (`sequence_s`) names terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.errors import BadInput

HingeOf = Literal["sequences", "prefill_tokens", "experts"]
Phase = Literal["decode", "prefill"]
Tokens = TypeVar("Tokens", float, NDArray[Any])


class Batch(NamedTuple):
    """The contents of steps: numbers, or arrays that broadcast (module docstring: P, b, C, S)."""

    prefill_tokens: Any
    sequences: Any
    context_tokens: Any
    prefill_sum_sq: Any = 0.0


@dataclass(frozen=True, slots=True)
class Term:
    """A coefficient's part in a step's time: coefficient times `regressor` of the batch.

    `phase`: whose work it is, so what slows that phase down scales it. A term with `words` is optional (0
    unless samples ask for it) and called by them; `of_prefilling` ones are judged on steps that prefill.
    """

    name: str
    phase: Phase
    regressor: Callable[[Batch], Any]
    words: str = ""
    of_prefilling: bool = False


def _term(phase: Phase, regressor: Callable[[Batch], Any], **more: Any) -> dict[str, Any]:
    return {"phase": phase, "regressor": regressor, **more}


def _terms(model: type) -> tuple[Term, ...]:
    return tuple(Term(f.name, **f.metadata) for f in fields(model) if f.metadata)


@dataclass(frozen=True, slots=True)
class Hinge:
    """Extra time per unit past `start`, or up to where all experts are touched (module docstring)."""

    of: HingeOf
    start: float
    per_unit_s: float

    def __post_init__(self) -> None:
        if self.of not in ("sequences", "prefill_tokens", "experts"):
            raise BadInput(f"hinge: of: sequences, prefill_tokens or experts, got {self.of!r}")
        _not_negative("hinge", start=self.start, per_unit_s=self.per_unit_s)
        if self.of == "experts" and self.start == 0:
            raise BadInput("hinge: of experts: from: must be more than 0 tokens")

    def regressor(self, batch: Batch) -> Any:
        """The factor of `per_unit_s`."""
        if self.of == "experts":
            tokens = np.asarray(batch.sequences, float) + batch.prefill_tokens
            return -self.start * np.expm1(-tokens / self.start)
        return np.maximum(
            (batch.sequences if self.of == "sequences" else batch.prefill_tokens) - self.start, 0.0
        )

    def scaled(self, decode: float, prefill: float) -> Hinge:
        """The hinge with its slope multiplied by the factor of its phase."""
        return replace(
            self, per_unit_s=self.per_unit_s * (prefill if self.of == "prefill_tokens" else decode)
        )


@dataclass(frozen=True, slots=True)
class StepModel:
    """Time of a step that may carry prefill and decode together (seconds, tokens)."""

    base_s: float = field(metadata=_term("decode", lambda batch: 1.0))
    per_prefill_token_s: float = field(metadata=_term("prefill", lambda batch: batch.prefill_tokens))
    per_sequence_s: float = field(metadata=_term("decode", lambda batch: batch.sequences))
    per_context_token_s: float = field(metadata=_term("decode", lambda batch: batch.context_tokens))
    per_prefill_sum_sq_s: float = field(
        default=0.0, metadata=_term("prefill", lambda batch: batch.prefill_sum_sq, words="length²")
    )
    hinges: tuple[Hinge, ...] = ()
    per_prefill_step_s: float = field(
        default=0.0,
        metadata=_term(
            "prefill",
            lambda batch: batch.prefill_tokens > 0,
            words="a constant of steps that prefill",
            of_prefilling=True,
        ),
    )
    per_prefill_sequence_s: float = field(
        default=0.0,
        metadata=_term(
            "prefill",
            lambda batch: batch.sequences * (batch.prefill_tokens > 0),
            words="sequences next to a prompt",
            of_prefilling=True,
        ),
    )

    def __post_init__(self) -> None:
        _not_negative("step", **coefficients(self))

    def step_s(
        self,
        prefill_tokens: ArrayLike,
        sequences: ArrayLike,
        context_tokens: ArrayLike,
        prefill_sum_sq: ArrayLike = 0.0,
    ) -> NDArray[np.float64]:
        """Seconds of each step; arguments broadcast."""
        counts = (prefill_tokens, sequences, context_tokens, prefill_sum_sq)
        return _seconds(self, STEP_TERMS, Batch(*(np.asarray(x, float) for x in counts)))

    def sequence_s(self, context_tokens: Tokens) -> Tokens:
        """Seconds that one sequence with this context adds to a decode step, hinges apart."""
        return self.per_sequence_s + self.per_context_token_s * context_tokens

    def prefilling_s(self, sequences: float) -> float:
        """Seconds that a step of `sequences` takes longer for prefilling at all."""
        batch = Batch(1.0, sequences, 0.0)
        return float(sum(getattr(self, t.name) * t.regressor(batch) for t in STEP_TERMS if t.of_prefilling))

    def context_limit(self, sequences: float, tpot_s: float) -> float:
        """Eq 4: the most context `sequences` may hold for a decode step to last at most `tpot_s`.

        Negative when the batch alone is too slow; infinite when context costs nothing.
        """
        rest = tpot_s - float(self.step_s(0, sequences, 0))
        if self.per_context_token_s == 0:
            return float("inf") if rest >= 0 else -1.0
        return rest / self.per_context_token_s

    def scaled(self, decode: float, prefill: float) -> StepModel:
        """The model with the terms of decode and of prefill multiplied by these factors."""
        return _scaled(self, STEP_TERMS, decode, prefill)


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Time of a step that carries prefill alone (Eq 2 with optional length² and hinge terms)."""

    base_s: float = field(metadata=_term("prefill", lambda batch: 1.0))
    per_token_s: float = field(metadata=_term("prefill", lambda batch: batch.prefill_tokens))
    per_sum_sq_s: float = field(
        default=0.0, metadata=_term("prefill", lambda batch: batch.prefill_sum_sq, words="length²")
    )
    hinges: tuple[Hinge, ...] = ()

    def __post_init__(self) -> None:
        _not_negative("prefill", **coefficients(self))
        if any(h.of != "prefill_tokens" for h in self.hinges):
            raise BadInput("prefill: hinges: only of prefill_tokens")

    @classmethod
    def of_step(cls, step: StepModel) -> PrefillModel:
        """Eq 2 as the step model has it: nothing decodes."""
        hinges = tuple(h for h in step.hinges if h.of == "prefill_tokens")
        experts_s = sum(h.start * h.per_unit_s for h in step.hinges if h.of == "experts")  # all are touched
        base_s = step.base_s + step.prefilling_s(0.0) + experts_s
        return cls(base_s, step.per_prefill_token_s, step.per_prefill_sum_sq_s, hinges)

    def prefill_s(self, tokens: ArrayLike, sum_sq: ArrayLike | None = None) -> NDArray[np.float64]:
        """Seconds to prefill `tokens` in one step; `sum_sq` is Σ length², one prompt's square by default."""
        x = np.asarray(tokens, float)
        sq = x * x if sum_sq is None else np.asarray(sum_sq, float)
        return _seconds(self, PREFILL_TERMS, Batch(x, 0.0, 0.0, sq))

    def scaled(self, prefill: float) -> PrefillModel:
        """The model with every term multiplied by `prefill`."""
        return _scaled(self, PREFILL_TERMS, prefill, prefill)


Model = TypeVar("Model", StepModel, PrefillModel)
STEP_TERMS = _terms(StepModel)
PREFILL_TERMS = _terms(PrefillModel)


def coefficients(model: StepModel | PrefillModel) -> dict[str, float]:
    """The model's coefficients by name, in the order of its terms; hinges apart."""
    terms = STEP_TERMS if isinstance(model, StepModel) else PREFILL_TERMS
    return {term.name: getattr(model, term.name) for term in terms}


def coefficients_with_hinges(step: StepModel) -> NDArray[np.float64]:
    """The step model's coefficients, the hinges' slopes behind them, shape [terms + hinges]."""
    return np.array([*coefficients(step).values(), *(h.per_unit_s for h in step.hinges)])


def regressors(step: StepModel, batch: Batch) -> NDArray[np.float64]:
    """The factor of each of these coefficients in such a step, in their order."""
    parts: list[Term | Hinge] = [*STEP_TERMS, *step.hinges]
    return np.array([float(part.regressor(batch)) for part in parts])


def with_coefficients(step: StepModel, values: NDArray[np.float64]) -> StepModel:
    """The step model with other coefficients, in that order."""
    numbers, terms = values.tolist(), len(STEP_TERMS)
    hinges = tuple(replace(h, per_unit_s=x) for h, x in zip(step.hinges, numbers[terms:], strict=True))
    named: dict[str, Any] = {t.name: x for t, x in zip(STEP_TERMS, numbers, strict=False)}
    return replace(step, **named, hinges=hinges)


def _seconds(model: StepModel | PrefillModel, terms: Sequence[Term], batch: Batch) -> NDArray[np.float64]:
    t = 0.0
    for term in terms:
        t = t + getattr(model, term.name) * term.regressor(batch)
    for hinge in model.hinges:
        t = t + hinge.per_unit_s * hinge.regressor(batch)
    return np.asarray(t, float)


def _scaled(model: Model, terms: Sequence[Term], decode: float, prefill: float) -> Model:
    factors = {"decode": decode, "prefill": prefill}
    values: dict[str, Any] = {term.name: getattr(model, term.name) * factors[term.phase] for term in terms}
    return replace(model, **values, hinges=tuple(h.scaled(decode, prefill) for h in model.hinges))


def _not_negative(where: str, **values: float) -> None:
    for name, value in values.items():
        # `not >=` rather than `<`: NaN must not pass.
        if not (0.0 <= value < float("inf")):
            raise BadInput(f"{where}: {name}: must be a number of at least 0, got {value}")
