"""Non-negative least squares on relative error, and the columns it is done on.

    minimise Σ_i ((x_i·θ - t_i) / p_i)²   over θ >= 0,   p_i = x_i·θ of the round before

Errors are relative: plain least squares spends itself on the longest steps and errs by 100-250 % on short
prompts. They are relative to the prediction, not to the measurement: divided by t_i a step that was slow by
chance counts less than one that was fast, and the model would be too fast by the noise's variance. Robust
fits do divide by t_i (p_i = t_i): they look for the middle, and ignore what is far from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import HingeOf

HUBER = 1.345  # residuals beyond this many robust standard deviations lose weight
ROBUST_ROUNDS = 20
MEAN_ROUNDS = 8

Phase = Literal["mixed", "prefill", "decode"]
Columns = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Terms:
    """Which columns a fit has besides its plain ones: Σ length², a constant of the steps that prefill, and
    hinges without their slope yet."""

    sum_sq: bool = False
    prefill_step: bool = False
    knots: tuple[tuple[HingeOf, float], ...] = ()


def columns_of(samples: StepSamples, terms: Terms, phase: Phase) -> Columns:
    """The design matrix, shape [samples, coefficients]."""
    columns = [np.ones(len(samples))]
    if phase != "decode":
        columns.append(samples.prefill_tokens)
    if phase != "prefill":
        columns += [samples.sequences, samples.context_tokens]
    if terms.sum_sq:
        assert samples.prefill_sum_sq is not None
        columns.append(samples.prefill_sum_sq)
    if terms.prefill_step:
        columns.append((samples.prefill_tokens > 0).astype(float))
    for of, start in terms.knots:
        x = samples.sequences if of == "sequences" else samples.prefill_tokens
        columns.append(np.maximum(x - start, 0.0))
    return np.column_stack(columns)


def solved(columns: Columns, step_s: NDArray[np.float64], robust: bool) -> NDArray[np.float64]:
    """Non-negative coefficients, shape [coefficients], that minimise the squared relative error."""
    rows = columns / step_s[:, None]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    weight = np.ones(len(rows))
    solution = _nnls(rows, weight)
    for _ in range(0 if robust else MEAN_ROUNDS):
        # Rows predict p_i / t_i; a weight of t_i / p_i makes the error one of p_i. Bounded, for a first round
        # that is far off.
        before, weight = solution, 1.0 / np.clip(rows @ solution, 0.1, 10.0)
        solution = _nnls(rows, weight)
        if np.allclose(solution, before, rtol=1e-9, atol=0.0):
            break
    for _ in range(ROBUST_ROUNDS if robust else 0):
        error = np.abs(rows @ solution - 1.0)
        spread = 1.4826 * float(np.median(error))
        if spread == 0:
            break
        weight = np.minimum(1.0, HUBER * spread / np.maximum(error, 1e-300))
        solution = _nnls(rows, np.sqrt(weight))
    return np.asarray(solution / scale, float)


def _nnls(rows: Columns, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    solution, _ = nnls(rows * weight[:, None], weight, maxiter=100 * rows.shape[1])
    return np.asarray(solution, float)
