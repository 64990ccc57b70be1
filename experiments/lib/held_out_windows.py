"""Windows of traffic in pairs: one to plan on, and the one that came after it.

azure      five minutes of the conversation hour at the asked rate; one begins every minute, so that
           neighbours overlap
servegen   half an hour, three of the rates of m-small's two weeks, and of m-mid from its eighth day on;
           Poisson arrivals, ShareGPT lengths (in ten minutes: one rate and the next, a change unforetold)
regimes    half an hour of gamma arrivals (CV 2) at a rate that changes by up to 1.6 times at unknown
           moments, every four minutes in the mean
steady     ten minutes of Poisson arrivals at one rate: the control, where windows differ by chance alone
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.workload import Workload
from experiments.lib.public_data import SERVEGEN, SHAREGPT, azure_hour

MINUTES = {"azure": 5.0, "servegen": 30.0, "regimes": 30.0, "steady": 10.0}
WINDOWS, QUICK_WINDOWS = {"azure": 20, "servegen": 24, "regimes": 20, "steady": 16}, 3
AZURE_RPS, AZURE_STEP_S = 5.53, 60.0
AZURE_LONGEST = 16_000  # tokens
STANDS_S = 600.0  # a rate of ServeGen's series
REGIME_S, REGIME_RATIO = 240.0, 1.6

Rng = np.random.Generator
Pair = tuple[Workload, Workload]  # what is known, and what comes


def pairs_of(name: str, data: Path, rate_rps: float, seed: int, windows: int | None) -> list[Pair]:
    """The pairs of a source, `windows` of them where there are so many; None: as usual."""
    windows = windows or WINDOWS[name]
    window_s = 60.0 * MINUTES[name]
    rng = np.random.default_rng([seed, list(MINUTES).index(name)])
    if name == "azure":
        return azure(data, windows, rate_rps, window_s)
    makes = {"servegen": servegen, "regimes": regimes, "steady": steady}
    return makes[name](data, windows, rate_rps, window_s, rng)


def made(arrival_s: NDArray[np.float64], lengths: NDArray[np.int64], rng: Rng) -> Workload:
    """Arrivals with lengths drawn from `lengths`, shape [kinds, 2]."""
    drawn = lengths[rng.integers(0, len(lengths), len(arrival_s))]
    return Workload(arrival_s - arrival_s[0], drawn[:, 0].copy(), drawn[:, 1].copy())


def arrivals(rate_rps: float, cv: float, window_s: float, rng: Rng) -> NDArray[np.float64]:
    """A window's arrivals with gamma gaps of this coefficient of variation."""
    shape = 1.0 / cv**2
    expected = rate_rps * window_s
    gaps = rng.gamma(shape, 1.0 / (rate_rps * shape), int(expected + 8 * cv * np.sqrt(expected)) + 50)
    when = np.cumsum(gaps)
    return when[when < window_s]


def azure(data: Path, windows: int, rate_rps: float, window_s: float) -> list[Pair]:
    """Stretches of the sped-up hour and what follows them."""
    whole = azure_hour(data)
    arrival = whole.arrival_s * AZURE_RPS / rate_rps
    fits = whole.prompt_tokens + whole.output_tokens <= AZURE_LONGEST

    def window(begin_s: float) -> Workload:
        rows = fits & (arrival >= begin_s) & (arrival < begin_s + window_s)
        return Workload(
            arrival[rows] - arrival[rows][0], whole.prompt_tokens[rows], whole.output_tokens[rows]
        )

    starts = np.arange(0.0, arrival[-1] - 2 * window_s, AZURE_STEP_S)
    if len(starts) > windows:
        starts = starts[np.linspace(0, len(starts) - 1, windows).round().astype(int)]
    return [(window(s), window(s + window_s)) for s in starts]


def sharegpt(data: Path) -> NDArray[np.int64]:
    table = pl.read_csv(data / SHAREGPT).select("num_prefill_tokens", "num_decode_tokens").to_numpy()
    return np.asarray(table[(table > 0).all(axis=1)], np.int64)


def servegen(data: Path, windows: int, rate_rps: float, window_s: float, rng: Rng) -> list[Pair]:
    """Neighbouring stretches of both series, spread over their time."""
    lengths, pairs = sharegpt(data), []
    many = max(round(window_s / STANDS_S), 1)
    each_s = window_s / many
    for name, first, count in (("m-small", 0, windows - windows // 2), ("m-mid", 1008, windows // 2)):
        table = pl.read_csv(data / SERVEGEN[name])
        rates = table["total_rate_rps"].to_numpy()[first:]
        rates = rates[rates > 0]
        rates = np.clip(rate_rps * rates / rates.mean(), 1.0, None)
        for i in np.linspace(0, len(rates) - 2 * many, count).round().astype(int):
            parts = [arrivals(rate, 1.0, each_s, rng) for rate in rates[i : i + 2 * many]]
            when = [part + j % many * each_s for j, part in enumerate(parts)]
            now, then = (made(np.concatenate(w), lengths, rng) for w in (when[:many], when[many:]))
            pairs.append((now, then))
    return pairs


def regimes(data: Path, windows: int, rate_rps: float, window_s: float, rng: Rng) -> list[Pair]:
    """Bursts at a rate that becomes another one at moments of its own; cut into windows."""
    lengths, begin_s, parts = sharegpt(data), 0.0, []
    while begin_s < (windows + 1) * window_s:
        rate = rate_rps * float(np.exp(rng.uniform(-1, 1) * np.log(REGIME_RATIO)))
        lasts_s = rng.exponential(REGIME_S)
        parts.append(begin_s + arrivals(rate, 2.0, lasts_s, rng))
        begin_s += lasts_s
    when = np.concatenate(parts)
    cut = np.searchsorted(when, np.arange(windows + 2) * window_s)
    drawn = [made(when[low:high], lengths, rng) for low, high in pairwise(cut)]
    return list(pairwise(drawn))


def steady(data: Path, windows: int, rate_rps: float, window_s: float, rng: Rng) -> list[Pair]:
    lengths = sharegpt(data)
    drawn = [made(arrivals(rate_rps, 1.0, window_s, rng), lengths, rng) for _ in range(windows + 1)]
    return list(pairwise(drawn))
