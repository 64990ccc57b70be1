"""Change points as they come, bin by bin: how soon a change is seen, and how often one is that is none.

    python experiments/change_points.py [--quick] [--format table|json]

Series of counts in bins of 10 s with one known change (or none):

    Poisson     made: 40 a bin, then 40 · size
    bursty      made: the same with a Gamma-mixed rate (variance about 8 times Poisson's)
    Azure       real: arrivals of the conversation trace, begun anywhere (the hour closed to a ring) and
                thinned to a half; from the change on thinned to a half · size

Detectors, each started afresh on every series and fed one bin at a time:

    ours    scaler.changepoint: optimal segmentation since the last change, penalised, noise measured
    CUSUM   two-sided, on Anscombe-scaled counts against the mean of the first 12 bins after the last alarm,
            drift 0.5
    EWMA    a control chart with weight 0.2 on the same residuals

The thresholds of the others are set, on steady Poisson series of their own, to as many false alarms as ours
has there, or fewer. A change is seen when an alarm comes within 30 bins after it; all other alarms are false.
In the real series some may be right: the traffic's own changes are not labelled.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from results import bar, flags, show

from controlplane.scaler.changepoint import Regimes, follow
from controlplane.scaler.demand import Demand
from tokenfleet.traces.readers import read_trace

Counts = NDArray[np.int64]
Detector = Callable[[Counts], list[int]]
Statistic = Callable[[float], float]  # takes the next residual, returns what has come together since
BINS, CHANGE, WITHIN, LEARN = 160, 80, 30, 12
SIZES = (2.0, 1.5, 1.25, 0.5)
MEAN = 40.0


@dataclass(frozen=True)
class Series:
    """Counts by bin, and where the change is; None = there is none."""

    kind: str
    size: float | None
    counts: Counts

    @property
    def change(self) -> int | None:
        return None if self.size is None else CHANGE


def ours(counts: Counts) -> list[int]:
    """Bins at whose end a new regime is reported."""
    demand, regimes, alarms = Demand(10.0), Regimes(), []
    for n in range(1, len(counts) + 1):
        before = regimes.current
        regimes = follow(
            regimes, Demand(10.0, demand.keep, 0, tuple(int(c) for c in counts[:n]), 0, n * 10.0)
        )
        assert regimes.current is not None
        # The same change placed a bin or two off is no second one.
        if before is not None and regimes.current.start_bin > before.start_bin + 3:
            alarms.append(n - 1)
    return alarms


def residuals(counts: Counts, since: int) -> Iterator[tuple[int, float]]:
    """(bin, residual in standard deviations) after the LEARN bins that the level is learned from."""
    if since + LEARN >= len(counts):
        return
    scaled = 2.0 * np.sqrt(counts + 0.375)
    learned = scaled[since : since + LEARN]
    level, spread = float(learned.mean()), max(float(learned.std(ddof=1)), 1.0)
    for n in range(since + LEARN, len(counts)):
        yield n, (float(scaled[n]) - level) / spread


def restarting(statistic: Callable[[], Statistic], threshold: float) -> Detector:
    """An alarm where a statistic of the residuals passes `threshold`; then the level is learned anew."""

    def detect(counts: Counts) -> list[int]:
        alarms: list[int] = []
        since: int | None = 0
        while since is not None:
            grown = statistic()
            since = next((n for n, z in residuals(counts, since) if grown(z) > threshold), None)
            alarms += [] if since is None else [since]
        return alarms

    return detect


def cusum(threshold: float) -> Detector:
    def statistic() -> Statistic:
        up = down = 0.0

        def grown(z: float) -> float:
            nonlocal up, down
            up, down = max(up + z - 0.5, 0.0), max(down - z - 0.5, 0.0)
            return max(up, down)

        return grown

    return restarting(statistic, threshold)


def ewma(threshold: float, weight: float = 0.2) -> Detector:
    def statistic() -> Statistic:
        level = 0.0

        def grown(z: float) -> float:
            nonlocal level
            level += weight * (z - level)
            return abs(level)

        return grown

    return restarting(statistic, threshold * math.sqrt(weight / (2.0 - weight)))


def made(kind: str, size: float | None, rng: np.random.Generator) -> Series:
    mean = np.full(BINS, MEAN)
    mean[CHANGE:] *= 1.0 if size is None else size
    if kind == "bursty":
        mean = mean * rng.gamma(5.0, 1.0 / 5.0, BINS)
    return Series(kind, size, rng.poisson(mean))


def thinned(arrivals: NDArray[np.float64], size: float | None, rng: np.random.Generator) -> Series:
    """Real arrivals on a ring, from anywhere on; half of them kept, then half · size."""
    ring = arrivals[-1] - arrivals[0]
    at = np.sort((arrivals - arrivals[0] - rng.uniform(0, ring)) % ring)
    at = at[at < BINS * 10.0]
    keep = np.where(at < CHANGE * 10.0, 0.5, 0.5 * (1.0 if size is None else size))
    at = at[rng.random(len(at)) < keep]
    return Series("Azure", size, np.bincount((at // 10.0).astype(int), minlength=BINS)[:BINS])


def score(detector: Detector, series: list[Series]) -> dict[str, float]:
    """Share seen, median delay of those seen (bins), and false alarms in a thousand bins."""
    delays, false = [], 0
    for one in series:
        alarms = detector(one.counts)
        hits = [n - one.change for n in alarms if one.change is not None and 0 <= n - one.change < WITHIN]
        delays += [min(hits)] if hits else []
        false += len(alarms) - len(hits)
    changed = sum(one.change is not None for one in series)
    return {
        "seen": round(len(delays) / changed, 3) if changed else math.nan,
        "delay": float(np.median(delays)) if delays else math.nan,
        "false in 1000 bins": round(1000.0 * false / sum(len(one.counts) for one in series), 2),
    }


def tuned(make: Callable[[float], Detector], steady: list[Series], most_false: float) -> float:
    """The smallest threshold with no more false alarms than ours."""
    for threshold in np.arange(2.0, 20.0, 0.25).tolist():
        if score(make(threshold), steady)["false in 1000 bins"] <= most_false:
            return float(threshold)
    return 20.0


def azure(data: Path) -> NDArray[np.float64]:
    return read_trace(data / "azure" / "AzureLLMInferenceTrace_conv_2023.csv").workload.arrival_s


def run(asked: argparse.Namespace) -> int:
    repeats = 8 if asked.quick else 24
    rng = np.random.default_rng([asked.seed, 5])
    arrivals = azure(asked.data)
    steady = [made("Poisson", None, rng) for _ in range(4 * repeats)]
    most_false = score(ours, steady)["false in 1000 bins"]
    detectors: dict[str, Detector] = {"ours": ours}
    for name, make in (("CUSUM", cusum), ("EWMA", ewma)):
        threshold = tuned(make, steady, most_false)
        detectors[f"{name} at {threshold:g}"] = make(threshold)
    rows: list[dict[str, Any]] = []
    for kind in ("Poisson", "bursty", "Azure"):
        for size in (None, *SIZES):
            series = [
                thinned(arrivals, size, rng) if kind == "Azure" else made(kind, size, rng)
                for _ in range(repeats)
            ]
            for name, detector in detectors.items():
                found = score(detector, series)
                says = "no change" if size is None else f"x{size:g}"
                rows.append({"series": kind, "change": says, "detector": name, **found})
    doubled = [r for r in rows if r["change"] == "x2" and r["detector"] == "ours"]
    calm = [r for r in rows if r["change"] == "no change"]
    mine = sum(r["false in 1000 bins"] for r in calm if r["detector"] == "ours")
    others = {d: sum(r["false in 1000 bins"] for r in calm if r["detector"] == d) for d in detectors}
    bars = {
        "a doubled rate is seen, least share": bar(min(r["seen"] for r in doubled), 0.9, at_least=True),
        "false alarms in 1000 steady bins, all kinds, ours over the best other": bar(
            mine / max(min(v for d, v in others.items() if d != "ours"), 1e-9), 1.0
        ),
    }
    for r in rows:
        r |= {name: None for name, value in r.items() if isinstance(value, float) and math.isnan(value)}
    return show("change_points", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(run(flags(__doc__).parse_args()))
