"""Arrival times: Poisson, Gamma renewals with a chosen burstiness, and a daily swing.

The first request arrives at 0 and each next one a gap later. `rng` is a numpy Generator, or the legacy
RandomState whose stream is frozen for good; drawn from the latter, the gaps are those of the published
Llumnix workloads (one `exponential(1/rate)` or `gamma(1/cv², cv²/rate)` a request).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput

Randomness = np.random.Generator | np.random.RandomState
MOST_STEPS = 60  # of Newton within a bracket; a handful is usual, halving alone would need as many


def poisson(rate_rps: float, requests: int, rng: Randomness) -> NDArray[np.float64]:
    """Arrivals [requests] in seconds, exponential gaps (CV 1) at a mean of `rate_rps`."""
    _require(rate_rps > 0, "rate", rate_rps, "a positive number of requests per second")
    return _from_gaps(rng.exponential(1.0 / rate_rps, requests))


def gamma(rate_rps: float, cv: float, requests: int, rng: Randomness) -> NDArray[np.float64]:
    """Arrivals [requests] in seconds, Gamma gaps of coefficient of variation `cv` (1 is Poisson)."""
    _require(rate_rps > 0, "rate", rate_rps, "a positive number of requests per second")
    return _from_gaps(_gamma_gaps(cv, 1.0 / rate_rps, requests, rng))


def diurnal(
    low_rps: float, high_rps: float, period_s: float, requests: int, rng: Randomness, cv: float = 1.0
) -> NDArray[np.float64]:
    """Arrivals [requests] in seconds whose rate swings: `low_rps` at 0, `high_rps` half a period on.

    Unit-mean Gamma gaps are laid out in operational time u = Λ(t), the mean count by t, and carried back:
    Λ(t) = m·t - (a·period/2π)·sin(2πt/period), m = (low + high)/2, a = (high - low)/2. With `cv` 1 this is
    the inhomogeneous Poisson process itself, without thinning.
    """
    _require(low_rps >= 0, "low rate", low_rps, "not negative")
    _require(
        high_rps > 0 and high_rps >= low_rps, "high rate", high_rps, f"positive and at least {low_rps:g}"
    )
    _require(period_s > 0, "period", period_s, "a positive number of seconds")
    count = _from_gaps(_gamma_gaps(cv, 1.0, requests, rng))
    mean_rps, swing_rps = (low_rps + high_rps) / 2, (high_rps - low_rps) / 2
    turn = 2 * math.pi / period_s
    slack = swing_rps / turn
    early, late = (count - slack) / mean_rps, (count + slack) / mean_rps
    time_s = count / mean_rps
    for _ in range(MOST_STEPS):
        excess = mean_rps * time_s - slack * np.sin(turn * time_s) - count
        if (np.abs(excess) <= 8 * np.spacing(count + slack)).all():
            break
        early, late = np.where(excess < 0, time_s, early), np.where(excess < 0, late, time_s)
        rate_rps = mean_rps - swing_rps * np.cos(turn * time_s)
        newton = time_s - excess / np.maximum(rate_rps, 1e-300)
        inside = (newton >= early) & (newton <= late)
        time_s = np.where(inside, newton, (early + late) / 2)
    # Each time is solved for by itself: neighbours may come out an ulp out of order.
    return np.maximum.accumulate(np.maximum(time_s - time_s[:1], 0.0))


def _gamma_gaps(cv: float, mean_s: float, requests: int, rng: Randomness) -> NDArray[np.float64]:
    _require(0 < cv <= 100, "CV", cv, "a coefficient of variation above 0, at most 100")
    return np.asarray(rng.gamma(1.0 / cv**2, mean_s * cv**2, requests), np.float64)


def _from_gaps(gaps_s: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(gaps_s)])[: len(gaps_s)]


def _require(holds: bool, what: str, value: float, expected: str) -> None:
    if not holds or not math.isfinite(value):
        raise BadInput(f"arrivals: {what}: {value:g}, expected {expected}")
