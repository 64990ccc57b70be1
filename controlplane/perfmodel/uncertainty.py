"""Prediction intervals of step times, and draws of profiles within them.

A fit keeps its absolute relative errors e = |predicted / measured - 1| at their mean, 95th percentile and
maximum; what no sample shows (composed profiles, `Residuals.unseen_relative`) joins them as independent
errors do.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile, Residuals

NORMAL_MEAN_ABS = 0.7978845608  # E|z| of a standard normal
MEAN_RANK = 0.575  # share of normal errors below their mean size


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
    alone = profile.prefill.scaled(prefill) if profile.prefill is not None else None
    return replace(profile, step=profile.step.scaled(decode, prefill), prefill=alone)
