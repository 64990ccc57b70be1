"""How sure a fleet is: bounds on attainment from replays in worlds that might as well have been.

Each world is one draw of arrivals and one of coefficients; its misses are m of n. On the logarithm of the
share of misses, y = log((m + 1/2)/(n + 1)), worlds scatter roughly normally, so the next world's y lies below

    mean(y) + t(worlds - 1, confidence) · sd(y) · sqrt(1 + 1/worlds)

with probability `confidence`: a prediction bound, not a bound on a mean. A trace is itself a sample: the
Jeffreys bound on its miss share is a floor to the doubt, so a short trace cannot show a high target
whatever the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, slots=True)
class Estimate:
    """Attainment of a fleet: its mean over worlds, and one-sided bounds each held with `confidence`."""

    expected: float
    low: float
    high: float
    confidence: float
    worlds: int


def estimate(misses: Sequence[int], requests: Sequence[int], confidence: float) -> Estimate:
    """Bounds from two worlds or more: `misses[i]` of `requests[i]`."""
    missed, judged = np.asarray(misses, float), np.asarray(requests, float)
    worlds = len(missed)
    y = np.log((missed + 0.5) / (judged + 1.0))
    reach = float(stats.t.ppf(confidence, worlds - 1) * y.std(ddof=1) * np.sqrt(1.0 + 1.0 / worlds))
    expected = 1.0 - float(missed.sum() / judged.sum())
    low = 1.0 - float(np.exp(y.mean() + reach))
    high = 1.0 - float(np.exp(y.mean() - reach))
    low = min(low, 1.0 - sample_bound(float(missed.mean()), float(judged.mean()), confidence), expected)
    return Estimate(expected, max(low, 0.0), min(max(high, expected), 1.0), confidence, worlds)


def sample_bound(misses: float, requests: float, confidence: float) -> float:
    """Jeffreys' upper bound on a share of which `misses` of `requests` were seen."""
    return float(stats.beta.ppf(confidence, misses + 0.5, max(requests - misses, 0.0) + 0.5))


def most_showable(requests: int, confidence: float) -> float:
    """The highest attainment that a trace of so many requests can show at all: no misses seen."""
    return 1.0 - sample_bound(0.0, float(requests), confidence)


def requests_needed(attainment: float, confidence: float) -> int:
    """How many requests a trace must have for `attainment` to be showable with `confidence`."""
    low, high = 1, 1
    while most_showable(high, confidence) < attainment:
        low, high = high, high * 2
    while low < high:
        middle = (low + high) // 2
        if most_showable(middle, confidence) >= attainment:
            high = middle
        else:
            low = middle + 1
    return low
