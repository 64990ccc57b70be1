"""Bounds on a fleet's attainment, from replays in many replicates.

Each replicate is one draw of arrivals and one of coefficients. The traffic to come is one more of them, so
that it is as likely to stand at any place among them: of W replicates ordered by their share of misses, the
next one does not exceed the r-th with probability r/(W + 1), however they scatter (a conformal bound). The
bound at a confidence c is the replicate at r = ⌈c·(W + 1)⌉, and a fleet holds when so many replicates meet
the target; `replicates_for` says how many make that exact. Where W replicates are too few (r > W), the bound
is the worst of them or, on the logarithm of the share of misses, y = log((m + 1/2)/(n + 1)), that of a
normal's next draw,

    mean(y) + t(W - 1, confidence) · sd(y) · sqrt(1 + 1/W)

whichever is lower. Replicates are made of the trace's own requests, so they hold no kind of miss that it does
not: Jeffreys' bound on a share of which nothing was seen is a floor to the doubt, and a short trace cannot
show a high target whatever the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

REPLICATES = 19  # r is a whole number for each multiple of 0.05
MOST_REPLICATES = 39  # a confidence above 0.975 would take more than pay


@dataclass(frozen=True, slots=True)
class Estimate:
    """Attainment of a fleet: its mean over replicates, and one-sided bounds each held with `confidence`.

    At a confidence well below 0.95 the lower bound may be above a mean that a few bad replicates pull down.
    """

    expected: float
    low: float
    high: float
    confidence: float
    replicates: int
    hit_rates: tuple[float, ...] = ()  # of prefix caches, by replicate; none where nothing is cached


def estimate(misses: Sequence[int], requests: Sequence[int], confidence: float) -> Estimate:
    """Bounds from two replicates or more: `misses[i]` of `requests[i]`."""
    missed, judged = np.asarray(misses, float), np.asarray(requests, float)
    replicates = len(missed)
    share = np.sort(missed / judged)
    expected = 1.0 - float(missed.sum() / judged.sum())
    place = rank(replicates, confidence)
    if place <= replicates:
        low, high = 1.0 - float(share[place - 1]), 1.0 - float(share[replicates - place])
    else:
        y = np.log((missed + 0.5) / (judged + 1.0))
        reach = float(
            stats.t.ppf(confidence, replicates - 1) * y.std(ddof=1) * np.sqrt(1.0 + 1.0 / replicates)
        )
        low = min(1.0 - float(np.exp(y.mean() + reach)), 1.0 - float(share[-1]))
        high = max(1.0 - float(np.exp(y.mean() - reach)), 1.0 - float(share[0]))
    low = max(min(low, most_showable(round(judged.mean()), confidence)), 0.0)
    return Estimate(expected, low, min(max(high, low), 1.0), confidence, replicates)


def rank(replicates: int, confidence: float) -> int:
    """The number of replicates that must hold; more than there are where they are too few to tell."""
    return math.ceil(confidence * (replicates + 1) - 1e-9)


def replicates_for(confidence: float) -> int:
    """The number of replicates to replay."""
    needed = math.ceil(1.0 / (1.0 - confidence) - 1e-9) - 1
    return max(needed, REPLICATES) if needed <= MOST_REPLICATES else REPLICATES


def most_showable(requests: int, confidence: float) -> float:
    """The highest attainment that a trace of so many requests can show at all: Jeffreys, no misses seen."""
    return 1.0 - float(stats.beta.ppf(confidence, 0.5, requests + 0.5))


def requests_needed(attainment: float, confidence: float) -> int:
    """The number of requests that a trace needs for `attainment` to be showable with `confidence`."""
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
