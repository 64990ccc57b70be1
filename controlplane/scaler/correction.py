"""The line's correction: by what factor steps seem to be longer than known, from how many requests are late.

At a rate r the line gives k·r + c workers, so N workers have the load v = k·r / (N - c). At v = 1 just the
promised share A of requests is in time. k is higher the longer steps take: k(f) where they take f times what
is known of them. At a load v(f) = k(f)·r / (N - c) this share of the requests that end should be late:

    late(v) = h + (1 - h) / (1 + A / (1 - A) · v^-s)

h is the share that no number of workers serves in time. s is how steeply lateness grows with load. It grows
as √N, since larger fleets even out what arrives, and varies by more from traffic to traffic. So f, s / √N and
h are estimated together, on a grid, f from 0.5 to 2 (Bayes; f lognormal around 1). The loads compared are
those of the workers that served. So cold starts are no error of the line, nor are a limit, a forecast or
rounding that keep the fleet off it: nothing winds up.

Each SLO class has its own A, and its own evidence under the same loads. At f the line keeps the promise of
the class that binds, and others are in time more often than they must be. So the factor rises where a class
that is late more often than was promised asks for it (`SURE` counts for all of them together). It falls no
further than all allow. A class so rare that not even one of its requests in `HALF_S` may be late can show
nothing, and holds up no fall.

Late requests come in bursts, so the evidence of a window counts `1 / CLUSTER`. Where more than `MOST_LATE`
are late, by how much more says nothing. A request that ends has been under the loads of as long as requests
last: by Little's law, those in the fleet over those that end in a second. So v is averaged over that time,
and the backlog of an overload is put down to it. Windows in overload, or just after one, do not count, nor
do those with next to nothing to do. Evidence fades by half in `HALF_REQUESTS` requests, and no sooner
than `HALF_S`.

The factor changes where, with probability `SURE`, the true one makes the workers fewer, or more, by over
`DEAD` of them. It then rises to the quantile `RISE_TO` of what is likely, or falls to `FALL_TO`, by `FALL` of
the workers at most each `FALL_EVERY_S`. The way back to 1 needs no such certainty. It is enough that
these quantiles lie `DEAD` of the workers off, once a burst (`CLUSTER`) was late or expected to be. Where a
refit of step times changes k by more than `MOVED`, the evidence was about another line. It is dropped, and
the factor gives up what the refit now covers itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.scaler.line import Line
from controlplane.snapshot import Facts, Note
from controlplane.types import PLAIN_CLASS, ClassOutcomes, SloClass

Floats = NDArray[np.float64]

WINDOW_S = 15.0
LEAST_REQUESTS = 10  # of a window
FACTORS = np.exp(np.linspace(math.log(0.5), math.log(2.0), 113))
KNOTS = FACTORS[::8]  # where k(f) is asked for; in between it is interpolated
STEEP = np.array([1.5, 3.0, 5.0, 8.0])  # s for one worker
HOPELESS = np.array([0.0, 0.002, 0.006, 0.02, 0.06, 0.2])
SIGMA = 0.15  # of the logarithm of f where nothing is seen
RARE = 2.0  # each step of HOPELESS is thought so much less likely, as a logarithm
CLUSTER = 3.0
MOST_LATE = 0.1
OVERLOAD, IDLE = 1.1, 0.5
HALF_REQUESTS = 4000.0
HALF_S = 600.0
SURE = 0.96
RISE_TO, FALL_TO = 0.55, 0.7
DEAD = 0.05
FALL = 0.2
FALL_EVERY_S = 60.0
MOVED = 0.05

_SHAPE = len(FACTORS), len(STEEP), len(HOPELESS)
LineIf = Callable[[float], Line]  # the line if steps took this factor times as long


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Requests ended, and those of them within TTFT, within TPOT, and within both."""

    ended: float = 0.0
    ttft_met: float = 0.0
    tpot_met: float = 0.0
    met: float = 0.0

    def plus(self, other: Outcomes, weight: float = 1.0) -> Outcomes:
        """These, and `weight` times the others."""
        return Outcomes(
            self.ended + weight * other.ended,
            self.ttft_met + weight * other.ttft_met,
            self.tpot_met + weight * other.tpot_met,
            self.met + weight * other.met,
        )


def by_class(outcomes: Sequence[ClassOutcomes], classes: Sequence[SloClass]) -> dict[str, Outcomes]:
    """The outcomes by the name of their class; those of targets that no class has are PLAIN_CLASS's."""
    names = {one.slo: one.name for one in sorted(classes, key=lambda one: one.attainment)}
    found: dict[str, Outcomes] = {}
    for o in outcomes:
        name = names.get(o.slo, PLAIN_CLASS)
        found[name] = found.get(name, Outcomes()).plus(Outcomes(o.ended, o.ttft_met, o.tpot_met, o.met))
    return found


@dataclass(frozen=True, slots=True)
class Window:
    """The window in progress: its begin, the counters then, and the workers' seconds since."""

    began_s: float
    counters: Mapping[str, Outcomes]
    seen_s: float
    workers: float  # at the last look
    worker_s: float = 0.0


@dataclass(frozen=True)
class Evidence:
    """The evidence on the factor from the requests of one class.

    `logs`: log-likelihoods on the grid (f, s, h), all 0 for none; `requests`: their number; both faded.
    `seen`: the faded counts since the factor changed. `promised`: how many of them the line expected to be
    late with the factor in force.
    """

    logs: Floats = field(default_factory=lambda: np.zeros(_SHAPE), compare=False)
    requests: float = 0.0
    seen: Outcomes = field(default_factory=Outcomes)
    promised: float = 0.0

    def between(self, *shares: float) -> tuple[float, ...]:
        """The factors that the true one is below with these probabilities."""
        below = np.cumsum(self._weights().sum(axis=(1, 2)))
        return tuple(float(np.exp(np.interp(share, below, np.log(FACTORS)))) for share in shares)

    def learned(self, new: Outcomes, late: Floats, passed_s: float, factor: float) -> Evidence:
        """With a window's requests. `late`: the share of late ones on the grid; `factor`: that in force."""
        kept = 0.5 ** min(new.ended / HALF_REQUESTS, passed_s / HALF_S)
        missed = min(new.ended - new.met, MOST_LATE * new.ended)
        logs = (missed * np.log(late) + (new.ended - missed) * np.log1p(-late)) / CLUSTER
        return Evidence(
            kept * self.logs + logs - logs.max(),
            kept * self.requests + new.ended,
            new.plus(self.seen, kept),
            kept * self.promised + self._expected(late, factor) * new.ended,
        )

    def _expected(self, late: Floats, factor: float) -> float:
        """The share of requests late, of those on the grid, by the factor in force."""
        at = int(np.abs(np.log(FACTORS / factor)).argmin())
        weights = self._weights()[at]
        return float((late[at] * weights).sum() / weights.sum())

    @property
    def is_late(self) -> bool:
        """Whether more requests were late, since the factor changed, than predicted."""
        return self.seen.ended - self.seen.met > self.promised

    @property
    def is_shown(self) -> bool:
        """Whether one burst's requests were late, or predicted late, since the factor changed."""
        return max(self.seen.ended - self.seen.met, self.promised) >= CLUSTER

    @property
    def hopeless(self) -> float:
        """The share of requests that no number of workers would serve in time."""
        return float((self._weights().sum(axis=(0, 1)) * HOPELESS).sum())

    def _weights(self) -> Floats:
        of_factor = -0.5 * (np.log(FACTORS) / SIGMA) ** 2
        logs = self.logs + of_factor[:, None, None] - RARE * np.arange(len(HOPELESS))
        weights = np.exp(logs - logs.max())
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class Correction:
    """The factor, and the evidence of each class on it (`evidence`, by name).

    `pressure`: the logarithm of r / (N - c), averaged over as long as requests last. `refit`: what the refit
    made of the line when the evidence began. `calm`: windows since overload.
    """

    factor: float = 1.0
    since_s: float | None = None
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    pressure: float | None = None
    refit: float = 1.0
    calm: int = 0
    window: Window | None = None


def late(loads: Floats, workers: float, attainment: float) -> Floats:
    """The share of requests late, by factor (whose load is given), steepness and hopeless share."""
    odds = attainment / (1.0 - attainment) * loads[:, None] ** (-STEEP * math.sqrt(workers))
    share = HOPELESS + (1.0 - HOPELESS) / (1.0 + odds)[:, :, None]
    return np.asarray(np.clip(share, 1e-6, MOST_LATE))


def look(
    state: Correction,
    now_s: float,
    outcomes: Sequence[ClassOutcomes],
    line_if: LineIf,
    rate_rps: float,
    workers: float,
    inside: float,
    attainment: float,
    refit: float = 1.0,
    classes: Sequence[SloClass] = (),
) -> tuple[Correction, Note | None]:
    """The correction after a heartbeat, and what to say where the factor has changed.

    `outcomes`: counters since the plane began. `rate_rps`: of the last windows. `workers`: that serve, in
    what the line counts in. `inside`: requests sent and not ended. `refit`: what the refit of
    step times made of the line's slope. `attainment`: of requests of none of the `classes`.
    """
    state = refitted(state, refit)
    counters, window = by_class(outcomes, classes), state.window
    if window is None or now_s < window.seen_s or _began_anew(counters, window.counters):
        return replace(state, window=Window(now_s, counters, now_s, workers)), None
    worker_s = window.worker_s + (now_s - window.seen_s) * window.workers
    new = {name: c.plus(window.counters.get(name, Outcomes()), -1.0) for name, c in counters.items()}
    ended, passed_s = _together(new), now_s - window.began_s
    if passed_s < WINDOW_S or ended < LEAST_REQUESTS:
        return replace(state, window=replace(window, seen_s=now_s, workers=workers, worker_s=worker_s)), None
    state = replace(state, window=Window(now_s, counters, now_s, workers))
    served = worker_s / passed_s
    spare = served - line_if(1.0).intercept
    if spare <= 0 or rate_rps <= 0:
        return replace(state, pressure=None, calm=0), None
    here = math.log(rate_rps / spare)
    before = here if state.pressure is None else state.pressure
    lasts_s = inside * passed_s / ended
    mean = before + (here - before) * passed_s / (passed_s + lasts_s)
    slopes = np.log([line_if(float(f)).workers_per_rps for f in KNOTS])
    now = float(np.interp(math.log(state.factor), np.log(KNOTS), slopes))
    calm = 0 if math.exp(max(here, mean) + now) > OVERLOAD else state.calm + 1
    state = replace(state, pressure=mean, calm=calm)
    if calm < 2 or math.exp(mean + now) < IDLE:
        return state, None
    loads = np.exp(mean + np.interp(np.log(FACTORS), np.log(KNOTS), slopes))
    asked = dict.fromkeys(new, attainment) | {one.name: one.attainment for one in classes}
    evidence = _learned(state, new, loads, served, asked, passed_s)
    return decided(replace(state, evidence=evidence), now_s, slopes, _heard(evidence, asked, rate_rps))


def _learned(
    state: Correction,
    new: Mapping[str, Outcomes],
    loads: Floats,
    workers: float,
    asked: Mapping[str, float],
    passed_s: float,
) -> dict[str, Evidence]:
    """The evidence of each class with a window's requests."""
    found = dict(state.evidence)
    for name, counts in new.items():
        if counts.ended:
            share = late(loads, workers, asked[name])
            found[name] = found.get(name, Evidence()).learned(counts, share, passed_s, state.factor)
    return found


def _heard(evidence: Mapping[str, Evidence], asked: Mapping[str, float], rate_rps: float) -> list[str]:
    """The classes that may have a late request in each HALF_S at this rate; all classes where none may."""
    total = sum(one.requests for one in evidence.values())
    heard = [
        name
        for name, one in evidence.items()
        if one.requests / total * rate_rps * HALF_S * (1.0 - asked[name]) >= 1.0
    ]
    return heard or list(evidence)


def _together(counts: Mapping[str, Outcomes]) -> float:
    """The requests ended of all classes."""
    return sum(one.ended for one in counts.values())


def _began_anew(now: Mapping[str, Outcomes], before: Mapping[str, Outcomes]) -> bool:
    """Whether counters are not those of before grown on."""
    return any(name not in now or now[name].ended < was.ended for name, was in before.items())


def decided(
    state: Correction, now_s: float, slopes: Floats, heard: Sequence[str]
) -> tuple[Correction, Note | None]:
    """The factor where the evidence asks for another. `slopes`: the line's, by KNOTS, as logarithms; `heard`:
    the classes that must allow a fall."""
    knots, sure = np.log(KNOTS), 1.0 - (1.0 - SURE) / len(state.evidence)
    now = float(np.interp(math.log(state.factor), knots, slopes))

    def more(factor: float) -> float:
        """The workers that the line asks for with another factor over those of now, as a logarithm."""
        return float(np.interp(math.log(factor), knots, slopes)) - now

    told = {name: _goes(one, sure, more, state.factor) for name, one in state.evidence.items()}
    factor, by = state.factor, max(told, key=lambda name: told[name][0])
    if more(told[by][0]) > DEAD:
        factor = told[by][0]
    elif state.since_s is None or now_s - state.since_s >= FALL_EVERY_S:
        by = max(heard, key=lambda name: told[name][1])
        if more(told[by][1]) < -DEAD:
            factor = max(told[by][1], float(np.exp(np.interp(now + math.log(1.0 - FALL), slopes, knots))))
    if factor == state.factor:
        return state, None
    said = _note(state, factor, by)
    # What the next change is explained by is seen after this one.
    anew = {n: replace(one, seen=Outcomes(), promised=0.0) for n, one in state.evidence.items()}
    return replace(state, factor=factor, since_s=now_s, evidence=anew), said


def _goes(one: Evidence, sure: float, more: Callable[[float], float], factor: float) -> tuple[float, float]:
    """The factors that one class's evidence would rise and fall to. `more`: the workers of another factor."""
    low, high, up, down = one.between(1.0 - sure, sure, RISE_TO, FALL_TO)
    back = 1.0 if one.is_shown else factor
    rise = up if more(low) > DEAD else min(up, back)
    return rise if one.is_late else factor, down if more(high) < -DEAD else max(down, back)


def refitted(state: Correction, refit: float) -> Correction:
    """The correction where a refit now makes `refit` of the line's slope (module docstring)."""
    ratio = refit / state.refit
    if abs(math.log(ratio)) <= MOVED:
        return state
    factor = state.factor
    if factor > 1.0 < ratio:
        factor = max(factor / ratio, 1.0)
    elif factor < 1.0 > ratio:
        factor = min(factor / ratio, 1.0)
    return Correction(factor, state.since_s, refit=refit)


def _note(state: Correction, factor: float, by: str) -> Note:
    """The note on another factor; the class `by` is the reason for it."""
    evidence = state.evidence[by]
    seen, sure = evidence.seen, evidence.between(0.05, 0.95)
    ended = max(seen.ended, 1.0)
    promised = 1.0 - evidence.promised / ended
    shares = {"met": seen.met / ended, "ttft_met": seen.ttft_met / ended, "tpot_met": seen.tpot_met / ended}
    of = "" if by == PLAIN_CLASS else f" of class {by}"
    way = "more" if factor > state.factor else "fewer"
    reason = (
        f"{100 * shares['met']:.2f} % of {seen.ended:,.0f} requests{of} were in time (TTFT"
        f" {100 * shares['ttft_met']:.2f} %, TPOT {100 * shares['tpot_met']:.2f} %);"
        f" the scaling rule expected {100 * promised:.2f} %: {way} workers,"
        f" by step times multiplied by {factor:.3g} ({state.factor:.3g} before;"
        f" likely {sure[0]:.3g} to {sure[1]:.3g})"
    )
    if evidence.hopeless > 0.005:
        reason += f"; {100 * evidence.hopeless:.1f} % would be late on any number of workers"
    facts: Facts = {
        "seen": {"requests": round(seen.ended), **{name: round(s, 4) for name, s in shares.items()}},
        "compared": {
            "promised": round(promised, 4),
            "factor": round(factor, 4),
            "before": round(state.factor, 4),
        },
    }
    return Note("correction", reason, facts)


def to_keep(state: Correction) -> dict[str, Any]:
    """The part that outlives a controller: the factor, and the refit that belongs to it."""
    return {"factor": round(state.factor, 6), "refit": round(state.refit, 6)}


def resumed(kept: Mapping[str, Any]) -> Correction:
    """The correction that `to_keep` gave; its evidence begins empty. Raises ValueError for none."""
    factor, refit = float(kept["factor"]), float(kept["refit"])
    if not (FACTORS[0] <= factor <= FACTORS[-1] and 0 < refit < math.inf):
        raise ValueError(f"a correction of {factor:g}, refit {refit:g}")
    return Correction(factor, refit=refit)
