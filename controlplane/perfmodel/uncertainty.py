"""Prediction intervals of step times, and draws of profiles within them.

A fit keeps its absolute relative errors e = |predicted / measured - 1| at their mean, 95th percentile and
maximum. A prediction t̂ of relative error at most q has its truth in

    [t̂ / (1 + q), t̂ / (1 - q)]

q is read off the errors at the asked confidence, joined with the part no sample shows (composed profiles,
`Residuals.unseen_relative`) as independent errors are, and grows beyond the fitted range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile, Residuals
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel

WORST = 0.9  # an error of 1 or more would make the upper end infinite
NORMAL_MEAN_ABS = 0.7978845608  # E|z| of a standard normal
MEAN_RANK = 0.575  # share of normal errors below their mean size


@dataclass(frozen=True)
class Interval:
    """Seconds; arrays of the predictions' shape."""

    low_s: NDArray[np.float64]
    high_s: NDArray[np.float64]


def relative_error(residuals: Residuals, confidence: float) -> float:
    """The relative error that the fit's own samples stay within with this probability.

    Between the kept quantiles it is interpolated; past 1 - 1/n the samples say nothing, and the largest
    error is stretched as the tail of a normal would be. Raises BadInput unless 0 < confidence < 1.
    """
    if not 0 < confidence < 1:
        raise BadInput(f"confidence: must be between 0 and 1, got {confidence:g}")
    seen = max(1.0 - 1.0 / (residuals.samples + 1), 0.96)
    known = np.maximum.accumulate(
        [0.0, residuals.mean_relative, residuals.p95_relative, residuals.max_relative]
    )
    error = float(np.interp(confidence, [0.0, MEAN_RANK, 0.95, seen], known))
    if confidence > seen:
        error *= _two_sided(confidence) / _two_sided(seen)
    # What held-out samples say about the fit's optimism scales the whole curve.
    if residuals.held_out_mean and residuals.mean_relative > 0:
        error *= max(1.0, residuals.held_out_mean / residuals.mean_relative)
    return error


def _two_sided(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def step_interval(
    profile: Profile,
    prefill_tokens: ArrayLike,
    sequences: ArrayLike,
    context_tokens: ArrayLike,
    prefill_sum_sq: ArrayLike = 0.0,
    confidence: float = 0.9,
) -> Interval:
    """Where the time of such steps lies with this probability; arguments broadcast."""
    t = profile.step.step_s(prefill_tokens, sequences, context_tokens, prefill_sum_sq)
    q = _error(profile, confidence) * beyond_range(profile, prefill_tokens, sequences, context_tokens)
    return _around(t, q)


def prefill_interval(profile: Profile, tokens: ArrayLike, confidence: float = 0.9) -> Interval:
    """Where the time of a step that prefills one prompt of `tokens` lies with this probability.

    Raises BadInput for a profile without prefill coefficients.
    """
    if profile.prefill is None:
        raise BadInput(f"{profile.label}: prefill: no coefficients for separate prefill steps")
    q = _error(profile, confidence) * beyond_range(profile, tokens, 0, 0)
    return _around(profile.prefill.prefill_s(tokens), q)


def beyond_range(
    profile: Profile, prefill_tokens: ArrayLike, sequences: ArrayLike, context_tokens: ArrayLike
) -> NDArray[np.float64]:
    """Factor on the error: 1 inside the fitted range, and as many times as a value is past its end."""
    factor = np.ones(np.broadcast(*map(np.asarray, (prefill_tokens, sequences, context_tokens))).shape)
    if profile.fitted is None:
        return factor
    for value, end in (
        (prefill_tokens, profile.fitted.prefill_tokens),
        (sequences, profile.fitted.sequences),
        (context_tokens, profile.fitted.context_tokens),
    ):
        factor = np.maximum(factor, np.asarray(value, float) / max(end, 1.0))
    return factor


def _error(profile: Profile, confidence: float) -> float:
    seen = relative_error(profile.residuals, confidence)
    return float(np.hypot(seen, profile.residuals.unseen_relative * _two_sided(confidence)))


def _around(t: NDArray[np.float64], q: NDArray[np.float64]) -> Interval:
    q = np.minimum(q, WORST)
    return Interval(t / (1.0 + q), t / (1.0 - q))


def draw_profile(profile: Profile, rng: np.random.Generator) -> Profile:
    """A profile as it might really be: decode and prefill each faster or slower by one log-normal factor.

    The spread is the fit's mean error (held out where known) as a standard deviation, joined with what no
    sample shows. One factor per phase rather than per coefficient: errors of neighbouring batches go
    together, and coefficients fitted jointly trade off against each other.
    """
    residuals = profile.residuals
    fit = max(residuals.mean_relative, residuals.held_out_mean or 0.0) / NORMAL_MEAN_ABS
    spread = float(np.hypot(fit, residuals.unseen_relative))
    decode, prefill = (float(x) for x in np.exp(spread * rng.standard_normal(2)))
    return with_times(profile, decode, prefill)


def with_times(profile: Profile, decode: float, prefill: float) -> Profile:
    """The profile with the terms of decode and of prefill so many times as long."""
    hinges = [_slower(h, prefill if h.of == "prefill_tokens" else decode) for h in profile.step.hinges]
    step = StepModel(
        base_s=profile.step.base_s * decode,
        per_prefill_token_s=profile.step.per_prefill_token_s * prefill,
        per_sequence_s=profile.step.per_sequence_s * decode,
        per_context_token_s=profile.step.per_context_token_s * decode,
        per_prefill_sum_sq_s=profile.step.per_prefill_sum_sq_s * prefill,
        per_prefill_step_s=profile.step.per_prefill_step_s * prefill,
        hinges=tuple(hinges),
    )
    alone = profile.prefill
    if alone is not None:
        alone = PrefillModel(
            alone.base_s * prefill,
            alone.per_token_s * prefill,
            alone.per_sum_sq_s * prefill,
            tuple(_slower(h, prefill) for h in alone.hinges),
        )
    return replace(profile, step=step, prefill=alone)


def _slower(hinge: Hinge, factor: float) -> Hinge:
    return replace(hinge, per_unit_s=hinge.per_unit_s * factor)
