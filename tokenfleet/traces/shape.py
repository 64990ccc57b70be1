"""The shape of a trace in figures: phases, rate, burstiness, tails, drift, and the attainment it can resolve.

- CV of gaps: standard deviation over mean of inter-arrival times; 1 for Poisson.
- Fano index at a window w: variance over mean of the counts in windows of w seconds. It is 1 for Poisson at
  every w, and larger the more requests come in crowds.
- Half-width at n requests: an attainment of p judged from n independent requests is known to within
  z·sqrt(p(1-p)/n), z = 1.96 for 95 %.
- Phases: stretches of time with one request rate each, between change points. Those are found as the
  autoscaler finds them (`controlplane.scaler.traffic`), in all of the trace at once. Counts are in bins of
  `BIN_S`, wider in a long trace and in one of few requests. A phase lasts at least `LEAST_S`, less in a
  trace below 40 minutes and more in one above 4 hours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from controlplane.scaler.traffic import change_points
from controlplane.workload import INSTANT_S, Workload

BIN_S = 10.0
LEAST_S = 150.0
OF_SHORT, OF_LONG = 1 / 16, 1 / 96  # of the trace: the least of a phase at most, and at least
BINS = 15  # of the shortest phase
IN_BIN = 10.0  # requests on average: fewer show no change

FANO_WINDOWS_S = (1.0, 10.0, 60.0)
SPARK_CELLS = 60
Z_95 = 1.959963984540054
JUDGED_SHARE = 0.99
ASKED_HALF_WIDTH = 0.005
RESOLUTIONS_S = (1.0, 0.1, 0.01, 0.001)


@dataclass(frozen=True, slots=True)
class Tail:
    """A length column's mean and upper percentiles, in tokens."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class ThirdsRatio:
    """The last third of a trace's time over its first, as ratios (1 = no drift); nan where undefined."""

    rate: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything `trace check` measures. `fano` is keyed by window length, seconds; `rates_rps` are the mean
    rates of equal spans of time, first to last. `resolution_s` is the coarsest step that divides every
    arrival time, 0 where it is finer than a millisecond. Undefined figures are nan.
    """

    requests: int
    duration_s: float
    rate_rps: float
    gap_cv: float
    longest_gap_s: float
    longest_gap_at_s: float
    resolution_s: float
    same_time: int
    same_rows: int
    fano: dict[float, float]
    rates_rps: NDArray[np.float64]
    prompt: Tail
    output: Tail
    drift: ThirdsRatio
    half_width: float
    requests_needed: int


def shape_of(workload: Workload) -> Shape:
    """Measure a workload of at least one request."""
    arrival_s = workload.arrival_s
    gaps_s = np.diff(arrival_s)
    widest = int(np.argmax(gaps_s)) if len(gaps_s) else 0
    repeated = np.zeros(0, bool)
    if len(gaps_s):
        repeated = (
            (gaps_s == 0) & (np.diff(workload.prompt_tokens) == 0) & (np.diff(workload.output_tokens) == 0)
        )
    return Shape(
        requests=len(workload),
        duration_s=workload.duration_s,
        rate_rps=workload.rate_rps,
        gap_cv=float(gaps_s.std() / gaps_s.mean()) if workload.duration_s > 0 else math.nan,
        longest_gap_s=float(gaps_s[widest]) if len(gaps_s) else 0.0,
        longest_gap_at_s=float(arrival_s[widest]),
        resolution_s=next((step for step in RESOLUTIONS_S if _multiples_of(step, arrival_s)), 0.0),
        same_time=int((gaps_s == 0).sum()),
        same_rows=int(repeated.sum()),
        fano={window_s: _fano(arrival_s, window_s) for window_s in FANO_WINDOWS_S},
        rates_rps=_rates(workload),
        prompt=_tail(workload.prompt_tokens),
        output=_tail(workload.output_tokens),
        drift=_drift(workload),
        half_width=half_width(len(workload)),
        requests_needed=requests_needed(),
    )


def half_width(requests: float) -> float:
    """Half the width of the 95 % interval around JUDGED_SHARE, from `requests` independent requests."""
    return Z_95 * math.sqrt(JUDGED_SHARE * (1 - JUDGED_SHARE) / requests)


def requests_needed(share: float = JUDGED_SHARE, within: float = ASKED_HALF_WIDTH) -> int:
    """The fewest independent requests that judge `share` to ± `within` at 95 %: 1,522 for 99 ± 0.5 %."""
    return math.ceil(Z_95**2 * share * (1 - share) / within**2)


def _fano(arrival_s: NDArray[np.float64], window_s: float) -> float:
    """Over whole windows from the first arrival; nan with fewer than ten of them.

    Counts only windows that hold something: the empty ones enter through their number, so that a trace
    with one request a year costs no memory.
    """
    since_s = arrival_s - arrival_s[0]
    windows = int(since_s[-1] // window_s)
    if windows < 10:
        return math.nan
    inside = (since_s[since_s < windows * window_s] // window_s).astype(np.int64)
    counts = np.unique(inside, return_counts=True)[1].astype(np.float64)
    mean = float(counts.sum()) / windows
    return (float((counts**2).sum()) / windows - mean**2) / mean


def _multiples_of(step_s: float, arrival_s: NDArray[np.float64]) -> bool:
    """Whether every gap since the first arrival is a whole number of steps; false of a single instant."""
    steps = (arrival_s - arrival_s[0]) / step_s
    return bool(steps[-1] > 0 and (np.abs(steps - np.rint(steps)) < 1e-4).all())


def _rates(workload: Workload) -> NDArray[np.float64]:
    cells = min(SPARK_CELLS, len(workload))
    if workload.duration_s < cells * INSTANT_S:
        return np.zeros(0)
    # From the first arrival: far from zero the cells of a short trace have no width in floating point.
    counts, edges = np.histogram(workload.arrival_s - workload.arrival_s[0], cells)
    return counts / np.diff(edges)


def _tail(tokens: NDArray[np.int64]) -> Tail:
    p50, p95, p99 = np.percentile(tokens, [50, 95, 99])
    return Tail(float(tokens.mean()), float(p50), float(p95), float(p99), int(tokens.max()))


def _drift(workload: Workload) -> ThirdsRatio:
    third_s = workload.duration_s / 3
    start_s = workload.arrival_s[0]
    early = workload.arrival_s < start_s + third_s
    late = workload.arrival_s >= start_s + 2 * third_s
    if third_s <= 0 or not early.any():
        return ThirdsRatio(math.nan, math.nan, math.nan)
    return ThirdsRatio(
        rate=float(late.sum() / early.sum()),
        prompt_tokens=float(workload.prompt_tokens[late].mean() / workload.prompt_tokens[early].mean()),
        output_tokens=float(workload.output_tokens[late].mean() / workload.output_tokens[early].mean()),
    )


@dataclass(frozen=True, slots=True)
class Phase:
    """Time with one request rate; `prompt_tokens` and `output_tokens` are means, 0 without requests."""

    start_s: float
    end_s: float
    requests: int
    prompt_tokens: float
    output_tokens: float

    @property
    def rate_rps(self) -> float:
        return self.requests / max(self.end_s - self.start_s, INSTANT_S)


def phases_of(workload: Workload) -> tuple[Phase, ...]:
    """The phases of a workload in order, one where its rate is steady; none where it has no time."""
    if len(workload) == 0 or workload.duration_s <= INSTANT_S:
        return ()
    arrival_s = workload.arrival_s
    edges_s = [float(arrival_s[0]), *_changes_s(workload), float(np.nextafter(arrival_s[-1], np.inf))]
    first = np.searchsorted(arrival_s, edges_s)
    phases = []
    for (start_s, end_s), (begin, end) in zip(pairwise(edges_s), pairwise(first.tolist()), strict=True):
        means = [
            float(tokens[begin:end].mean()) if end > begin else 0.0
            for tokens in (workload.prompt_tokens, workload.output_tokens)
        ]
        phases.append(Phase(start_s, min(end_s, float(arrival_s[-1])), end - begin, *means))
    return tuple(phases)


def _changes_s(workload: Workload) -> list[float]:
    """When the rate changes."""
    duration_s, first_s = workload.duration_s, float(workload.arrival_s[0])
    least_s = max(min(LEAST_S, OF_SHORT * duration_s), OF_LONG * duration_s)
    bin_s = max(least_s / BINS, IN_BIN * duration_s / len(workload))
    bins = int(duration_s // bin_s)  # what is left over is no whole bin
    number = ((workload.arrival_s - first_s) // bin_s).astype(np.int64)
    counts = np.bincount(number[number < bins], minlength=bins)
    changes = change_points(counts.tolist(), least_bins=max(round(least_s / bin_s), 3))
    return [float(first_s + i * bin_s) for i in changes]
