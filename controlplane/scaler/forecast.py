"""The rate forecast: the highest of the coming bins, at a stated quantile, by the best candidate.

A launch made now serves only after the cold start, so what counts is the rate until then. Each candidate
gives, from the counts before, the mean rate of each of the next `lead` bins:

    last       the last bin again
    ewma       an exponentially weighted mean (weight 0.3)
    regime     the mean since the last change point
    seasonal   one season ago
    scaled     one season ago, times how the last hour's bins compare to those a season before

To the highest of these is added the `quantile` of the candidate's own past errors (relative, so that busy
hours do not lend their errors to quiet ones). The candidate with the least pinball loss at that quantile over
the past is taken, scored on forecasts as they would have been made at the time. Past traffic need not last (a
steady hour's best is a climb's worst), so older losses may count less.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.scaler.traffic import Demand

Floats = NDArray[np.float64]
CANDIDATES = ("last", "ewma", "regime", "seasonal", "scaled")
EWMA = 0.3
LEAST_ORIGINS = 12  # past forecasts before an error is believed
MOST_ORIGINS = 576


@dataclass(frozen=True, slots=True)
class ForecastSettings:
    """`bin_s`: bins of the history; `season`: bins of a season (a day); `quantile`: how sure to be.

    `keep`: bins remembered. `fade`: bins after which a loss counts half in a candidate's score.
    """

    bin_s: float = 300.0
    season: int = 288
    quantile: float = 0.6  # the rules for traffic phase, burst and backlog cover the rest
    keep: int = 4032
    fade: float = math.inf

    def __post_init__(self) -> None:
        if not self.bin_s > 0 or self.season < 2 or self.keep < 2:
            raise BadInput(f"forecast: need bin_s > 0, season and keep of at least 2, got {self}")
        if not self.fade > 0:
            raise BadInput(f"forecast: fade: must be positive, got {self.fade:g}")
        if not 0.5 <= self.quantile < 1.0:
            raise BadInput(f"forecast: quantile: must be from 0.5 to below 1, got {self.quantile:g}")


# Minutes know no season: what half-minutes rose by within a cold start, in the last hours. At the median: the
# candidate that is best of late needs no margin for being the wrong one.
NEAR = ForecastSettings(bin_s=30.0, season=1_000_000, quantile=0.5, keep=720, fade=10.0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The rate to be ready for, by which candidate, and how good that has been.

    `error`: mean absolute error of its forecasts as a share of the mean rate. `covered`: the share of past
    times at which the rate it gave was enough. `origins`: how many there were.
    """

    rps: float
    candidate: str
    quantile: float
    error: float
    covered: float
    origins: int

    @property
    def why(self) -> str:
        return (
            f"forecast {self.rps:.3g} requests/s at the {100 * self.quantile:.0f} % quantile"
            f" ({self.candidate}: mean error {100 * self.error:.0f} %,"
            f" was enough {100 * self.covered:.0f} % of {self.origins} times)"
        )


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast, the bins it is made from, and the traffic phase's rate as each of them closed."""

    past: Demand | None = None
    past_rps: tuple[float, ...] = ()
    coming: Forecast | None = None


def foresee(
    settings: ForecastSettings, known: Outlook, past: Demand, rate_rps: float, cold_start_s: float
) -> Outlook:
    """The outlook once arrivals are counted in `past`; a new forecast when a bin has closed.

    `rate_rps`: of the traffic phase now. What is launched now serves after `cold_start_s`.
    """
    before = known.past or Demand(settings.bin_s, settings.keep)
    new = past.first_bin + len(past.closed) - before.first_bin - len(before.closed)
    if not past.closed or (new == 0 and known.coming is not None):
        return replace(known, past=past)
    past_rps = (*known.past_rps, *(rate_rps,) * new)[-len(past.closed) :]
    past_rps = (rate_rps,) * (len(past.closed) - len(past_rps)) + past_rps
    lead = max(math.ceil(cold_start_s / settings.bin_s), 1)
    return Outlook(past, past_rps, forecast(settings, past.closed, past_rps, lead))


def forecast(
    settings: ForecastSettings, counts: Sequence[int | None], regimes: Sequence[float], lead: int
) -> Forecast | None:
    """The rate to be ready for in the `lead` bins after `counts` (oldest first, None = not counted).

    `regimes`: the mean rate (requests a second) of the traffic phase that each bin was seen in, when it
    closed. None where the history is too short for any candidate to have been tried.
    """
    if lead < 1:
        raise BadInput(f"forecast: lead: must be at least 1 bin, got {lead}")
    if len(regimes) != len(counts):
        raise BadInput(f"forecast: {len(counts)} bins and {len(regimes)} traffic phases; need one of each")
    rates = _filled(counts) / settings.bin_s
    n = len(rates)
    if n == 0:
        return None
    said = {
        name: _said(name, rates, np.asarray(regimes, float), settings.season, lead) for name in CANDIDATES
    }
    # Origin i knows bins up to i and foretells i + 1 .. i + lead.
    came = np.array([rates[i + 1 : i + 1 + lead].max() for i in range(max(n - lead, 0))])
    best: tuple[float, Forecast] | None = None
    for name, column in said.items():
        now, past = column[-1], column[: len(came)]
        origins = np.flatnonzero(np.isfinite(past))[-MOST_ORIGINS:]
        learn = LEAST_ORIGINS + lead  # the first scored origin knows at least LEAST_ORIGINS errors
        if not np.isfinite(now) or len(origins) < learn + LEAST_ORIGINS:
            continue
        base, truth = past[origins], came[origins]
        scale = np.maximum(base, 1.0 / settings.bin_s)
        lift = _lift((truth - base) / scale, settings.quantile, lead)
        ready = np.maximum(base + lift[:-1] * scale, 0.0)[learn:]
        base, truth = base[learn:], truth[learn:]
        short = truth - ready
        pinball = np.maximum(settings.quantile * short, (settings.quantile - 1.0) * short)
        fading = np.exp2(-np.arange(len(truth) - 1, -1, -1) / settings.fade)  # the newest counts one
        loss = float(np.average(pinball, weights=fading))
        result = Forecast(
            max(float(now + lift[-1] * max(now, 1.0 / settings.bin_s)), 0.0),
            name,
            settings.quantile,
            float(np.abs(truth - base).mean() / max(float(truth.mean()), 1e-9)),
            float((ready >= truth).mean()),
            len(truth),
        )
        if best is None or loss < best[0]:
            best = loss, result
    return None if best is None else best[1]


def _filled(counts: Sequence[int | None]) -> Floats:
    """Counts, a bin that was not counted taken as the one before."""
    filled, last = [], 0.0
    for count in counts:
        last = last if count is None else float(count)
        filled.append(last)
    return np.array(filled)


def _said(name: str, rates: Floats, regimes: Floats, season: int, lead: int) -> Floats:
    """A candidate's forecast at each origin: the highest mean rate of the next `lead` bins; NaN = none."""
    n = len(rates)
    if name == "last":
        return rates.copy()
    if name == "regime":
        return regimes.copy()
    if name == "ewma":
        return np.array([*accumulate(rates.tolist(), lambda level, rate: level + EWMA * (rate - level))])
    out = np.full(n, np.nan)
    for i in range(season, n):
        ahead = i + 1 - season
        top = rates[ahead : min(ahead + lead, i + 1)].max()
        if name == "scaled":
            near = max(season // 24, 1)
            then, now = rates[max(i + 1 - season - near, 0) : i + 1 - season], rates[i + 1 - near : i + 1]
            top *= min(max(now.mean() / then.mean(), 0.25), 4.0) if then.size and then.mean() > 0 else 1.0
        out[i] = top
    return out


def _lift(errors: Floats, quantile: float, lead: int) -> Floats:
    """The margin added at each origin, and now: the quantile of the errors known by then; NaN for too few.

    An origin's error is known once its `lead` bins have come.
    """
    n = len(errors)
    out = np.full(n + 1, np.nan)
    ordered: list[float] = []
    for i in range(n + 1):
        if i >= lead:
            insort(ordered, float(errors[i - lead]))
        if len(ordered) >= LEAST_ORIGINS:
            place = quantile * (len(ordered) - 1)
            low = int(place)
            high = min(low + 1, len(ordered) - 1)
            out[i] = ordered[low] + (place - low) * (ordered[high] - ordered[low])
    return out
