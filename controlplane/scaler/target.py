"""The target number of workers: Aladdin's Eq 7, N = ⌈k5·r + c5⌉, limited and stabilized.

The line is learned by simulation on this traffic's own lengths (tokenfleet.planning.comparisons), or from a
worker's speed (scaler.line). So load that no number of workers can serve does not ask for more of them: for
example a prompt whose prefill alone exceeds the target. r is the upper end of the traffic phase's rate: too
few workers miss the target, one too many costs a worker. Where other rates must be covered too (a burst that
is no phase yet, a forecast, a backlog), the highest counts.

A target must last before the fleet follows it: a short time upward, a long time downward. Missing figures
change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.errors import BadInput
from controlplane.scaler.forecast import Forecast
from controlplane.scaler.line import PARTS, Line, Weights
from controlplane.scaler.traffic import RECENT_S, Demand, Regime
from controlplane.snapshot import SERVING, Snapshot

SILENT_BINS = 6  # without an arrival, before a fleet that may go to zero is thought idle
RATE_Z = 1.64  # standard errors of the rate that are planned for
CATCH_UP_S = 30.0  # in which a backlog is to be served
BURST_Z = 4.0  # standard errors of the bin's count: one look in ten thousand errs


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The line and the limits.

    `workers_per_rps` and `intercept` None: nothing is known of this traffic, and the number is held. `high`
    None: no upper limit; `limited_by`: what sets it, where that is not MAX itself. `to_zero`: no arrivals in
    a whole traffic phase means no workers at all.
    """

    workers_per_rps: float | None
    intercept: float | None
    low: int = 1
    high: int | None = None
    to_zero: bool = False
    limited_by: str = ""

    def __post_init__(self) -> None:
        if (self.workers_per_rps is None) != (self.intercept is None):
            raise BadInput("target: workers_per_rps and intercept: give both or neither")
        if self.workers_per_rps is not None and not 0 <= self.workers_per_rps < math.inf:
            raise BadInput(f"target: workers_per_rps: must not be negative, got {self.workers_per_rps:g}")
        if self.low < 0 or (self.high is not None and self.high < self.low):
            raise BadInput(f"target: need 0 <= low <= high, got {self.low} and {self.high}")

    @property
    def line(self) -> Line | None:
        """The line given; None where there is none."""
        if self.workers_per_rps is None or self.intercept is None:
            return None
        return Line(self.workers_per_rps, self.intercept)


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate the fleet must carry, and what says so: a short name, and a clause for the reason."""

    name: str
    rps: float
    why: str


@dataclass(frozen=True, slots=True)
class Target:
    """A number of workers and why; None: hold what there is. `compared`: workers by each rate looked at.

    `is_limited`: more were asked for than are allowed.
    """

    workers: int | None
    reason: str
    compared: dict[str, float] = field(default_factory=dict)
    is_limited: bool = False


def target(
    settings: TargetSettings,
    regime: Regime | None,
    bin_s: float,
    *,
    stale: bool,
    fixed: int | None = None,
    line: Line | None = None,
    also: Sequence[Rate] = (),
    unit: str = "workers",
    parts: int = 1,
) -> Target:
    """The target now. `stale`: the newest counts are too old, or missing. `fixed`: an operator's number.

    `line`: in place of the settings' own. `also`: other rates that must be covered. `unit`: what the line
    counts in, and `parts`: how many of what the target counts in make one.
    """
    if fixed is not None:
        if fixed < 0:
            raise BadInput(f"target: fixed: must not be negative, got {fixed}")
        return Target(fixed, f"an operator fixed {fixed}")
    if stale or regime is None:
        return Target(None, "no news of the demand: holding")
    line = line or settings.line
    if line is None:
        return Target(None, "no line for this traffic: holding")
    upper_rps = regime.upper_rps(bin_s, RATE_Z) if regime.rate_rps > 0 else 0.0
    said = f"{regime.rate_rps:.3g} requests/s for {regime.bins * bin_s:.3g} s, at most {upper_rps:.3g}"
    rates = [Rate("regime", upper_rps, said), *also]
    compared = {rate.name: round(line.workers_per_rps * rate.rps + line.intercept, 3) for rate in rates}
    highest = max(rates, key=lambda rate: rate.rps)
    if settings.to_zero and highest.rps == 0:
        return _within(settings, 0, f"nothing arrives: 0 {unit}", compared)
    workers = math.ceil(compared[highest.name] * parts - 1e-9)
    workers = max(workers, 0 if settings.to_zero else 1)
    said = f"{highest.why}: {workers if parts == 1 else workers / parts} {unit}"
    return _within(settings, workers, said, compared)


def _within(settings: TargetSettings, asked: int, why: str, compared: dict[str, float]) -> Target:
    most = settings.high
    if most is not None and asked > most:
        by = f" ({settings.limited_by})" if settings.limited_by else ""
        return Target(most, f"{why}, but no more than {most} are allowed{by}", compared, is_limited=True)
    low = 0 if asked == 0 and settings.to_zero else settings.low
    if asked < low:
        return Target(low, f"{why}, but at least {low} are kept", compared)
    return Target(asked, why, compared)


def other_rates(
    demand: Demand,
    regime: Regime | None,
    waiting: int,
    far: Forecast | None,
    near: Forecast | None,
    ready: float,
    recent_rps: float = 0.0,
) -> list[Rate]:
    """The rates to cover in addition to the traffic phase's own.

    - `burst`: what the bin in progress has brought already, where the phase cannot explain it.
    - `backlog`: the phase's rate and what waits without a worker, to be caught up in CATCH_UP_S.
    - `forecast`: the coming cold start's highest rate by the history of days. Of a rise, only the part
      `ready` counts: it will have come when what is launched now serves.
    - `near`: the same by bins shorter than a cold start: the rise of the last minutes, at a quantile.
    - `recent`: the work of the last RECENT_S, where it is more than the phase's.
    """
    rates: list[Rate] = []
    if regime is not None and demand.open_count:
        count = float(demand.open_count)
        expected = regime.upper_rps(demand.bin_s, RATE_Z) * demand.bin_s
        if count > expected + BURST_Z * math.sqrt(regime.noise * max(expected, 1.0)):
            why = f"{demand.open_count} arrivals in {demand.bin_s:g} s, {regime.rate_rps:.3g} req/s before"
            rates.append(Rate("burst", count / demand.bin_s, why))
    if regime is not None and waiting:
        why = f"{regime.rate_rps:.3g} requests/s, and {waiting} wait for a worker"
        rates.append(Rate("backlog", regime.rate_rps + waiting / CATCH_UP_S, why))
    if regime is not None and far is not None:
        rise_rps = max(far.rps - regime.rate_rps, 0.0)
        rates.append(Rate("forecast", regime.rate_rps + ready * rise_rps, far.why))
    if near is not None:
        rates.append(Rate("near", near.rps, near.why))
    if regime is not None and recent_rps > regime.rate_rps:
        why = f"{recent_rps:.3g} requests/s by rate and lengths of the last {RECENT_S:g} s"
        rates.append(Rate("recent", recent_rps, f"{why}, {regime.rate_rps:.3g} before"))
    return rates


def enough_for_those_here(
    settings: TargetSettings,
    found: Target,
    demand: Demand | None,
    snapshot: Snapshot,
    wanted: int,
    weights: Weights | None,
) -> Target:
    """The target, but no fewer workers than those who are here need: the demand knows arrivals alone.

    `demand` None: its counts are too old. `wanted`: workers, or PARTS of reference workers where there are
    `weights`.
    """
    waiting, compared = snapshot.waiting_requests, found.compared
    if settings.to_zero and demand is not None and _is_silent(demand):
        found = Target(0, f"nothing has arrived for {SILENT_BINS * demand.bin_s:g} s", compared)
    if settings.to_zero and waiting and snapshot.wanted == 0 and not found.workers:
        # A fleet at zero: what the demand says may come too late for them.
        found = Target(max(settings.low, 1), f"{waiting} requests wait and no worker serves", compared)
    if found.workers is None or found.workers >= wanted:
        return found
    if (
        waiting * (1 if weights is None else PARTS) > found.workers
    ):  # fewer wait a moment for their place on any busy fleet
        return Target(wanted, f"{found.reason}; kept, {waiting} requests wait", compared)
    return _enough_seats(found, found.workers, snapshot, wanted, weights)


def _enough_seats(
    found: Target, workers: int, snapshot: Snapshot, wanted: int, weights: Weights | None
) -> Target:
    of, parts = ({}, 1) if weights is None else (weights.of, PARTS)
    serving = [w for w in snapshot.workers if w.state == SERVING]
    running = sum(len(w.requests) + len(w.waiting) for w in snapshot.workers)
    seats = min((w.max_seqs / of.get(w.kind, 1.0) / parts for w in serving), default=1)
    needed = min(math.ceil(running / seats), wanted)
    if needed <= workers:
        return found
    why = f"{found.reason}; {needed if parts == 1 else needed / parts} hold the {running} requests here"
    return Target(needed, why, found.compared)


def at_least_kept(found: Target, low: int, wanted: int, there: int) -> Target:
    """The target, but where fewer are `wanted` than the `low` that are kept `there`: no news are needed."""
    is_enough = found.workers is not None or wanted >= low
    return found if is_enough else Target(there, f"at least {low} are kept")


def needed_lately(
    settings: TargetSettings,
    limits: TargetSettings,
    line: Line | None,
    demand: Demand,
    noise: float,
    snapshot: Snapshot,
) -> int:
    """The workers that the last bin and the one in progress ask for, by themselves; if unknown those wanted.

    That shows a fall sooner than a traffic phase of some bins does. It is what another model may have while
    this one's wanted number waits for its window. A backlog and those who are here count, forecasts do not.
    """
    counts = (*demand.closed[-1:], demand.open_count)
    if snapshot.fixed is not None or len(counts) < 2 or None in counts:
        return snapshot.wanted
    seconds = demand.bin_s + snapshot.now_s % demand.bin_s
    lately = Regime(0, sum(c for c in counts if c is not None) / seconds, 1, noise)
    also = other_rates(demand, lately, snapshot.waiting_requests, None, None, 1.0)
    found = target(limits, lately, demand.bin_s, stale=False, line=line, also=also)
    found = enough_for_those_here(settings, found, demand, snapshot, snapshot.wanted, None)
    return snapshot.wanted if found.workers is None else found.workers


def _is_silent(demand: Demand) -> bool:
    """Whether nothing arrives any more: the rare arrivals of a traffic phase are no phase of their own."""
    last = demand.closed[-SILENT_BINS:]
    return len(last) == SILENT_BINS and not any(last) and None not in last and demand.open_count == 0


@dataclass(frozen=True, slots=True)
class StabilizationWindow:
    """The stabilization window: seconds that a target must stay above (`up_s`) or below (`down_s`) it."""

    up_s: float = 0.0
    down_s: float = 80.0

    def __post_init__(self) -> None:
        if not (0 <= self.up_s < math.inf and 0 <= self.down_s < math.inf):
            raise BadInput(
                f"window: up_s and down_s must be durations, got {self.up_s:g} and {self.down_s:g}"
            )


@dataclass(frozen=True, slots=True)
class Stabilized:
    """The number of workers wanted, and since when the target has been off it.

    `least_above` and `most_below`: the target nearest to `wanted` that each spell has seen.
    """

    wanted: int
    above_since_s: float | None = None
    least_above: int = 0
    below_since_s: float | None = None
    most_below: int = 0


def stabilize(
    settings: StabilizationWindow, stable: Stabilized, target: int | None, now_s: float
) -> Stabilized:
    """The number wanted now. A target of None (figures missing) keeps it, and restarts the window.

    After a spell the number goes to the target nearest to it that the spell saw, so one dip is not followed.
    """
    if target is None or target == stable.wanted:
        return Stabilized(stable.wanted)
    if target > stable.wanted:
        since_s = now_s if stable.above_since_s is None else stable.above_since_s
        least = target if stable.above_since_s is None else min(stable.least_above, target)
        if now_s - since_s >= settings.up_s:
            return Stabilized(least)
        return Stabilized(stable.wanted, above_since_s=since_s, least_above=least)
    since_s = now_s if stable.below_since_s is None else stable.below_since_s
    most = target if stable.below_since_s is None else max(stable.most_below, target)
    if now_s - since_s >= settings.down_s:
        return Stabilized(most)
    return Stabilized(stable.wanted, below_since_s=since_s, most_below=most)
