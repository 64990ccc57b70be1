"""The drift of traffic: how far its levels may have gone by the time a plan is used.

Levels are the rate and the lengths of prompts and outputs. The trace is cut into `SPANS` equal spans (more,
where those would be longer than an hour). Each has x = (log requests, log mean prompt, log mean output). A
trend is the trace's shape, which a plan keeps. What departs from it shows in the second differences
d = x₋ - 2x + x₊. As much as a level changes from one span to the next, it is taken to change from the trace
to what is planned for:

    drift ~ N(0, S),   S seen = E[d dᵀ] / 3

That is the law of levels whose changes are of one size at every distance (1/f). On one side of it are levels
that scatter about a mean: their stretches differ less the longer they are. On the other side are random
walks: their changes grow in variance with the distance. ServeGen's m-mid, in its first week, is close to this
law. From half an hour to the next its rate differs by 0.18 in the logarithm. From one, three and six hours to
the next it differs by 0.18 to 0.21.

An hour of silence, or a night, is the trace's shape too, and no level that the rest may go to. So a
difference weighs less where one of its spans holds less than `SCARCE` of the mean, in proportion.

A span's level also scatters because its requests are finite in number, or come in bursts. That is the
bootstrap's part, and shows in spans of a fifth as well: a fifth of their E[d dᵀ] is taken off. That holds
while a fifth of a span sees some bursts; where it sees fewer than `FEWEST_BURSTS`, no drift is seen. What is
left is known from a few spans only. So it is joined with what is usual, `USUAL` for the rate and nothing for
lengths. The usual counts as an inverse Wishart law of `WEIGHT` degrees of freedom would. A draw of drift then
has Student's t distribution:

    S = (n · S seen + WEIGHT · USUAL²) / (n + WEIGHT),   n + WEIGHT degrees of freedom

n is less than the number of second differences, because neighbours share spans: `INDEPENDENT` of them count.
A long trace outweighs what is usual.

**Steady traffic** does not drift. A trace is steady where two things hold:

* Its rate and lengths differ between its thirds, sixths and so on (`SCALES`) by no more than chance makes
  them. An analysis of variance tests that at each scale: the requests of a part of a span against those of
  the span, and tokens against their own scatter. None is beyond its quantile at `CALM`.
* It is long enough to tell: chance alone must hide no more than `HIDDEN` of what is usual.

A trace that is too short for that is taken to drift as traffic usually does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy import special

from controlplane.workload import INSTANT_S, Workload
from tokenfleet.planning.traffic.draws import busier

SPANS = 24
LONGEST_S = 3600.0
USUAL = 0.15  # of log rate: m-mid's 0.18 with its outliers, 0.12 by its middle 68 %
WEIGHT = 8.0
INDEPENDENT = 0.6  # between 0.5, where levels scatter about a mean, and 0.7, where they walk
NINE_IN_TEN = 1.645  # standard deviations to either side
SCARCE = 0.5
PARTS = 5  # of a span: what they differ by is chance
FEWEST = 5.0  # requests of a part, in the mean; of fewer nothing could be told
FEWEST_BURSTS = 2.0  # and bursts of it: the logarithm of a count of one burst or none says nothing of a level

Told = Literal["steady", "changes", "too short to tell", "assumed"]
SCALES = (3, 6, 12, 24)
CALM = 0.99
HIDDEN = 0.5


@dataclass(frozen=True)
class Drift:
    """The drift of levels: `spread`, [3, 3], a root of S for (rate, prompts, outputs), and its certainty."""

    spread: NDArray[np.float64]
    freedom: float  # degrees of it; what Student's t is asked for
    told: Told = "changes"  # what the trace shows of it

    @property
    def of_rate(self) -> float:
        """The standard deviation of the rate's logarithm."""
        return float(np.sqrt((self.spread[0] ** 2).sum()))

    def levels(self, rng: np.random.Generator) -> tuple[float, float, float]:
        """A draw of rate, prompts and outputs, each as a multiple of what it was."""
        if self.told == "steady":
            return 1.0, 1.0, 1.0
        normal, chance = rng.standard_normal(3), rng.chisquare(self.freedom) / self.freedom
        rate, prompts, outputs = np.exp(self.spread @ normal / np.sqrt(chance)).tolist()
        return rate, prompts, outputs

    def drawn(self, workload: Workload, rng: np.random.Generator) -> Workload:
        """The same requests at drawn levels; none is longer than the longest there was."""
        if self.told == "steady":
            return workload
        rate, prompts, outputs = self.levels(rng)
        drawn = busier(workload, rate).longer(prompts, outputs)
        return replace(
            drawn,
            prompt_tokens=np.minimum(drawn.prompt_tokens, workload.prompt_tokens.max()),
            output_tokens=np.minimum(drawn.output_tokens, workload.output_tokens.max()),
        )


def drift_of(workload: Workload) -> Drift:
    """The trace's drift joined with the usual one, of WEIGHT degrees of freedom; none if it is steady."""
    told = shown(workload)
    if told == "steady":
        return Drift(np.zeros((3, 3)), WEIGHT, told)
    seen, independent = drift_seen(workload)
    freedom = independent + WEIGHT
    root = _root((independent * seen + WEIGHT * np.diag([USUAL**2, 0.0, 0.0])) / freedom)
    return Drift(root, freedom, told)


def assumed_drift(levels: tuple[float, float, float]) -> Drift:
    """The drift of traffic that was drawn: the usual one, and the uncertainty of what was assumed."""
    return Drift(np.diag(np.hypot(levels, (USUAL, 0.0, 0.0))), WEIGHT, "assumed")


def workers_range(
    levels: tuple[float, float, float], workers: int, needed: Callable[[float], float] | None
) -> tuple[int, int]:
    """The workers that a recorded trace would lead to, nine times in ten; `workers` are the plan's.

    `needed`: the scaling rule, workers for a multiple of the traffic drawn; without one, workers are taken to
    be in proportion to traffic. A recorded trace adds usual drift.
    """
    off = NINE_IN_TEN * math.hypot(*levels)
    ends = math.exp(-off), math.exp(off + NINE_IN_TEN * USUAL)
    margin = math.exp(NINE_IN_TEN * math.hypot(USUAL, *levels))
    low, high = (needed(end) if needed else workers / margin * end for end in ends)
    return max(min(math.ceil(low), workers), 1), max(math.ceil(high), workers)


def shown(workload: Workload) -> Told:
    """What a trace shows of its drift."""
    if workload.duration_s <= INSTANT_S or len(workload) < FEWEST * PARTS * max(SCALES[:2]):
        return "too short to tell"
    if any(_differs(workload, spans) for spans in SCALES if len(workload) >= FEWEST * PARTS * spans):
        return "changes"
    spans = SCALES[1]
    chance = np.sqrt(burst_requests(workload, spans) * spans / len(workload))
    return "steady" if chance <= HIDDEN * USUAL else "too short to tell"


def _differs(workload: Workload, spans: int) -> bool:
    """Whether rate, prompts or outputs differ between this many spans by more than chance."""
    since_s = workload.arrival_s - workload.arrival_s[0]
    counts, _ = np.histogram(since_s, PARTS * spans)
    parts = counts.reshape(spans, PARTS).astype(float)
    within = max(float(parts.var(axis=1, ddof=1).mean()), float(parts.mean()))  # Poisson's at least
    between = PARTS * float(parts.mean(axis=1).var(ddof=1))
    if between / within > special.fdtri(spans - 1, spans * (PARTS - 1), CALM):
        return True
    cut = np.concatenate([[0], np.cumsum(parts.sum(axis=1))]).astype(np.int64)
    held = np.diff(cut)
    for tokens in (workload.prompt_tokens, workload.output_tokens):
        means = np.array([tokens[a:b].mean() if b > a else tokens.mean() for a, b in pairwise(cut)])
        between = float((held * (means - tokens.mean()) ** 2).sum()) / (spans - 1)
        if between > float(tokens.var()) * 2.0 * special.gammaincinv((spans - 1) / 2.0, CALM) / (spans - 1):
            return True
    return False


def drift_seen(workload: Workload) -> tuple[NDArray[np.float64], float]:
    """The drift of the trace alone: S, and its degrees of freedom; 0 for a trace that is too short."""
    spans = max(SPANS, round(workload.duration_s / LONGEST_S))
    if workload.duration_s <= INSTANT_S or len(workload) < FEWEST * PARTS * spans:
        return np.zeros((3, 3)), 0.0
    if len(workload) < FEWEST_BURSTS * PARTS * spans * burst_requests(workload, spans):
        return np.zeros((3, 3)), 0.0
    _, count = _counts(workload, spans)
    scarcest = sliding_window_view(np.pad(count, 1, "edge"), 3).min(axis=1)
    weight = np.minimum(scarcest / (SCARCE * count.mean()), 1.0)
    by_chance = _changes(workload, np.repeat(weight, PARTS)) / PARTS
    root = _root((_changes(workload, weight) - by_chance) / 3.0)
    alike = weight[1:-1].sum() ** 2 / (weight[1:-1] ** 2).sum()
    return root @ root.T, INDEPENDENT * float(alike)


def burst_requests(workload: Workload, spans: int) -> float:
    """Requests that come together: the variance of counts in parts of spans over Poisson's, at least 1.

    From second differences inside of each span, E[(n₋ - 2n + n₊)²] / 6, so that levels do not count.
    """
    counts, _ = np.histogram(workload.arrival_s - workload.arrival_s[0], PARTS * spans)
    departs = np.diff(counts.reshape(spans, PARTS).astype(float), n=2, axis=1)
    return max(float((departs**2).mean()) / 6.0 / float(counts.mean()), 1.0)


def _root(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """A root of a symmetric matrix; a difference of estimates may have parts below nothing, left out."""
    value, axis = np.linalg.eigh(matrix)
    return np.asarray(axis * np.sqrt(np.maximum(value, 0.0)))


def _counts(workload: Workload, spans: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The first row of each span, and how many it has; half a one where there is none."""
    edges_s = workload.arrival_s[0] + np.linspace(0.0, workload.duration_s, spans + 1)
    first = np.append(np.searchsorted(workload.arrival_s, edges_s[:-1]), len(workload))
    return first, np.maximum(np.diff(first), 0.5)


def _changes(workload: Workload, weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """E[d dᵀ] over neighbours of as many spans as there are weights, shape [3, 3]."""
    cut, count = _counts(workload, len(weight))
    columns = (workload.prompt_tokens, workload.output_tokens)
    sums = np.array([[of[a:b].sum() for a, b in pairwise(cut)] for of in columns], float)
    overall = np.array([of.mean() for of in columns])
    means = np.where(sums > 0, sums / count, overall[:, None])
    departs = np.diff(np.log(np.vstack((count, means))), n=2, axis=1)
    return np.asarray(departs * weight[1:-1] @ departs.T / weight[1:-1].sum())
