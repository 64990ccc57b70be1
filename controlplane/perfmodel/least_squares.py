"""Non-negative least squares on relative error, and the columns it is done on.

    minimise Σ_i ((x_i·θ - t_i) / p_i)²   over θ >= 0,   p_i = x_i·θ of the round before

Errors are relative: plain least squares spends itself on the longest steps and errs by 100-250 % on short
prompts. They are relative to the prediction, not to the measurement. Divided by t_i, a step that was slow by
chance would count less than one that was fast. The model would then be too fast by the noise's variance.
Robust fits do divide by t_i (p_i = t_i): they look for the middle, and ignore what is far from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import PREFILL_TERMS, STEP_TERMS, Hinge, HingeOf, Term

HUBER = 1.345  # residuals beyond this many robust standard deviations lose weight
FAR = 2.0  # robust fits: a step predicted at more than this many times its reported time loses weight
ROBUST_ROUNDS = 20
MEAN_ROUNDS = 8
SPARE_POINTS = 2  # distinct batches beyond the number of coefficients

Fitted = Literal["mixed", "prefill", "decode"]
Columns = NDArray[np.float64]

MODEL_TERMS: dict[Fitted, tuple[Term, ...]] = {
    "mixed": STEP_TERMS,
    "prefill": PREFILL_TERMS,
    "decode": tuple(term for term in STEP_TERMS if term.phase == "decode"),
}


@dataclass(frozen=True, slots=True)
class Form:
    """The columns of a fit: its terms, and hinges without their slope yet."""

    terms: tuple[Term, ...]
    knots: tuple[tuple[HingeOf, float], ...] = ()

    @classmethod
    def plain(cls, fitted: Fitted) -> Form:
        """The terms that every fit has."""
        return cls(tuple(term for term in MODEL_TERMS[fitted] if not term.words))

    def with_term(self, term: Term) -> Form:
        """With an optional term; they stand behind the plain ones, in the order of the model."""
        optional = sorted((*self.optional, term), key=lambda t: (*STEP_TERMS, *PREFILL_TERMS).index(t))
        return replace(self, terms=(*(t for t in self.terms if not t.words), *optional))

    @property
    def optional(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if term.words)


def columns_of(samples: StepSamples, form: Form) -> Columns:
    """The design matrix, shape [samples, terms and hinges]."""
    batch = samples.batch
    parts: list[Term | Hinge] = [*form.terms, *(Hinge(of, start, 0.0) for of, start in form.knots)]
    return np.column_stack([np.broadcast_to(part.regressor(batch), len(samples)) for part in parts])


def check_distinct(columns: Columns, samples: StepSamples, names: list[str]) -> None:
    """Raise BadInput where samples cannot tell the coefficients of these columns apart."""
    needed = len(names) + SPARE_POINTS
    distinct = len(np.unique(samples.points)) if len(samples) else 0
    if distinct < needed:
        raise BadInput(
            f"measurements: {distinct} different batches, at least {needed} are needed"
            f" for {len(names)} coefficients ({', '.join(names)})"
        )
    norms = np.linalg.norm(columns, axis=0)
    scaled = columns / np.where(norms == 0, 1.0, norms)
    _, singular, directions = np.linalg.svd(scaled, full_matrices=False)
    if singular[-1] < 1e-6 * singular[0]:
        tied = [name for name, part in zip(names, directions[-1], strict=True) if abs(part) > 0.05]
        raise BadInput(
            f"measurements: {' and '.join(tied)} cannot be told apart: the columns always move together;"
            " vary one while the others stay"
        )


def solved(columns: Columns, step_s: NDArray[np.float64], robust: bool) -> NDArray[np.float64]:
    """Non-negative coefficients, shape [coefficients], that minimise the squared relative error."""
    rows = columns / step_s[:, None]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    solution = _middle(rows, step_s) if robust else _mean(rows)
    return np.asarray(solution / scale, float)


def _mean(rows: Columns) -> NDArray[np.float64]:
    weight = np.ones(len(rows))
    solution = _nnls(rows, weight)
    for _ in range(MEAN_ROUNDS):
        # Rows predict p_i / t_i; a weight of t_i / p_i makes the error one of p_i. Bounded, for a first round
        # that is far off.
        before, weight = solution, 1.0 / np.clip(rows @ solution, 0.1, 10.0)
        solution = _nnls(rows, weight)
        if (np.abs(solution - before) <= 1e-9 * before).all():  # np.allclose takes longer than the fit
            break
    return solution


def _middle(rows: Columns, step_s: NDArray[np.float64]) -> NDArray[np.float64]:
    # The first round is by absolute errors: by relative ones, a step reported at a hundredth of its real time
    # would weigh as much as ten thousand others. In later rounds its error is at most FAR times its reported
    # time.
    solution = _nnls(rows, step_s / step_s.max())
    for _ in range(ROBUST_ROUNDS):
        predicted = rows @ solution
        nearer = 1.0 / np.maximum(predicted / FAR, 1.0)
        error = np.abs(predicted - 1.0) * nearer
        spread = 1.4826 * float(np.median(error))
        if spread == 0:
            break
        weight = np.minimum(1.0, HUBER * spread / np.maximum(error, 1e-300))
        solution = _nnls(rows, nearer * np.sqrt(weight))
    return solution


def _nnls(rows: Columns, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.optimize import nnls  # 40 MB, in processes that mostly fit nothing

    solution, _ = nnls(rows * weight[:, None], weight, maxiter=100 * rows.shape[1])
    return np.asarray(solution, float)
