"""Traffic that becomes another: how far its level may have gone by the time a plan is used.

A bootstrap draws the traffic that was once more. What comes next may also have another level: other rates,
longer prompts, other outputs. Of each of `SPANS` equal spans of the trace (more, where those would be longer
than an hour), x = (log requests, log mean prompt, log mean output). A trend is the trace's shape, which a
plan keeps; what departs from it shows in the second differences d = x₋ - 2x + x₊. As much as a level changes
from one span to the next, it is taken to change from the trace to what is planned for:

    drift ~ N(0, S),   S seen = E[d dᵀ] / 3

That is the law of levels whose changes are of one size at every distance (1/f). It lies between levels that
scatter about a mean, whose stretches differ the less the longer they are, and random walks, whose changes
grow in variance with the distance. ServeGen's m-mid, in its first week, is about so: from half an hour to the
next its rate differs by 0.18 in the logarithm, from one, three and six hours to the next by 0.18 to 0.21
(`experiments/drift_settings.py`).

A span's level also scatters because its requests are only so many, or come in bursts. That is the bootstrap's
part, and shows in spans of a fifth as well: a fifth of their E[d dᵀ] is taken off. What is left is known from
a few spans only, and half an hour that happened to be calm says little about the next. So it is joined with
what is usual, `USUAL` for the rate and nothing for lengths, as an inverse Wishart law of `WEIGHT` degrees of
freedom would be; a draw of drift then has Student's t distribution:

    S = (n · S seen + WEIGHT · USUAL²) / (n + WEIGHT),   n + WEIGHT degrees of freedom

n is less than the second differences are, because neighbours share spans: `INDEPENDENT` of them count. A long
trace outweighs what is usual.

A swing within the trace that its spans are too coarse to follow is taken for drift, too, and traffic that
never changes is hedged for all the same; a plan for traffic that keeps the trace's shape is better off
without (`plan --drift` asks for it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.workload import Workload

SPANS = 24
LONGEST_S = 3600.0
USUAL = 0.15  # of log rate: m-mid's 0.18 with its outliers, 0.12 by its middle 68 %
WEIGHT = 8.0
INDEPENDENT = 0.6  # between 0.5, where levels scatter about a mean, and 0.7, where they walk
PARTS = 5  # of a span: what they differ by is chance
FEWEST = 5.0  # requests of a part, in the mean; of fewer nothing could be told


@dataclass(frozen=True)
class Drift:
    """How far levels go: `spread`, [3, 3], a root of S for (rate, prompts, outputs), known so well."""

    spread: NDArray[np.float64]
    freedom: float  # degrees of it; what Student's t is asked for

    @property
    def per_level(self) -> NDArray[np.float64]:
        """Standard deviations of log rate, log prompts and log outputs, shape [3]."""
        return np.asarray(np.sqrt((self.spread**2).sum(axis=1)))

    def drawn(self, workload: Workload, rng: np.random.Generator) -> Workload:
        """The same requests at levels they might have gone to; none longer than the longest there was."""
        normal, chance = rng.standard_normal(3), rng.chisquare(self.freedom) / self.freedom
        rate, prompts, outputs = np.exp(self.spread @ normal / np.sqrt(chance))
        return replace(
            workload.scaled(float(rate)),
            prompt_tokens=_longer(workload.prompt_tokens, float(prompts)),
            output_tokens=_longer(workload.output_tokens, float(outputs)),
        )


def drift_of(
    workload: Workload, fewest_spans: int = SPANS, usual: float = USUAL, weight: float = WEIGHT
) -> Drift:
    """What the trace shows of drift, joined with what is usual, which weighs so many degrees of freedom."""
    seen, independent = drift_seen(workload, fewest_spans)
    freedom = independent + weight
    return Drift(_root((independent * seen + weight * np.diag([usual**2, 0.0, 0.0])) / freedom), freedom)


def drift_seen(workload: Workload, fewest_spans: int = SPANS) -> tuple[NDArray[np.float64], float]:
    """What the trace alone shows: S, and the degrees of freedom it is known with; 0 of a trace too short."""
    spans = max(fewest_spans, round(workload.duration_s / LONGEST_S))
    if workload.duration_s <= 0 or len(workload) < FEWEST * PARTS * spans:
        return np.zeros((3, 3)), 0.0
    root = _root((_changes(workload, spans) - _changes(workload, PARTS * spans) / PARTS) / 3.0)
    return root @ root.T, INDEPENDENT * (spans - 2)


def _root(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """A root of a symmetric matrix; a difference of estimates may have parts below nothing, left out."""
    value, axis = np.linalg.eigh(matrix)
    return np.asarray(axis * np.sqrt(np.maximum(value, 0.0)))


def _changes(workload: Workload, spans: int) -> NDArray[np.float64]:
    """E[d dᵀ] over neighbouring spans, shape [3, 3]; a span without requests counts as half a one."""
    arrival_s = workload.arrival_s - workload.arrival_s[0]
    edges = np.linspace(0.0, workload.duration_s, spans + 1)
    cut = np.append(np.searchsorted(arrival_s, edges[:-1]), len(workload))
    count = np.maximum(np.diff(cut), 0.5)
    overall = np.array([workload.prompt_tokens.mean(), workload.output_tokens.mean()])
    tokens = np.stack((workload.prompt_tokens, workload.output_tokens))
    sums = np.diff(np.concatenate((np.zeros((2, 1)), tokens.cumsum(axis=1)), axis=1)[:, cut], axis=1)
    means = np.where(sums > 0, sums / count, overall[:, None])
    departs = np.diff(np.log(np.vstack((count, means))), n=2, axis=1)
    return np.asarray(departs @ departs.T / departs.shape[1])


def _longer(tokens: NDArray[np.int64], factor: float) -> NDArray[np.int64]:
    scaled = np.round(tokens * factor).astype(np.int64)
    return np.clip(scaled, 1, tokens.max())
