"""How many workers the demand needs: Aladdin's Eq 7, N = ⌈k5·r + c5⌉, within the limits.

The line is learned by simulation on this traffic's own lengths (tokenfleet.planning.line), or from a worker's
speed (scaler.line), so what no number of workers can serve (one prompt whose prefill alone exceeds the
target) does not ask for more of them. r is the upper end of the regime's rate: too few workers cost the
target, one too many costs a worker. Where other rates must be covered too (a burst that is no regime yet, a
forecast, a backlog), the highest counts.

A target must last before the fleet follows it: quickly up, slowly down, and never for want of news.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.errors import BadInput
from controlplane.scaler.line import Line
from controlplane.scaler.regimes import Regime


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The line and the limits.

    `workers_per_rps` and `intercept` None: nothing is known of this traffic, and the number is held. `high`
    None: no upper limit. `z`: standard errors of the rate that are planned for.
    `to_zero`: no arrivals in a whole regime means no workers at all.
    """

    workers_per_rps: float | None
    intercept: float | None
    low: int = 1
    high: int | None = None
    z: float = 1.64
    to_zero: bool = False

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
    """A number of workers and why; None: hold what there is. `compared`: workers by each rate looked at."""

    workers: int | None
    reason: str
    compared: dict[str, float] = field(default_factory=dict)


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
    upper_rps = regime.upper_rps(bin_s, settings.z) if regime.rate_rps > 0 else 0.0
    said = f"{regime.rate_rps:.3g} requests/s for {regime.bins * bin_s:.3g} s, at most {upper_rps:.3g}"
    rates = [Rate("regime", upper_rps, said), *also]
    compared = {rate.name: _workers(line, rate.rps) for rate in rates}
    highest = max(rates, key=lambda rate: rate.rps)
    if settings.to_zero and highest.rps == 0:
        return _within(settings, 0, f"nothing arrives: 0 {unit}", compared)
    asked = math.ceil(compared[highest.name] * parts - 1e-9)
    asked = max(asked, 0 if settings.to_zero else 1)
    said = f"{highest.why}: {asked if parts == 1 else asked / parts} {unit}"
    return _within(settings, asked, said, compared)


def _workers(line: Line, rate_rps: float) -> float:
    return round(line.workers_per_rps * rate_rps + line.intercept, 3)


def _within(settings: TargetSettings, asked: int, why: str, compared: dict[str, float]) -> Target:
    most = settings.high
    if most is not None and asked > most:
        return Target(most, f"{why}, but no more than {most} are allowed", compared)
    low = 0 if asked == 0 and settings.to_zero else settings.low
    if most is not None:
        low = min(low, most)
    if asked < low:
        return Target(low, f"{why}, but at least {low} are kept", compared)
    return Target(asked, why, compared)


@dataclass(frozen=True, slots=True)
class HoldSettings:
    """How long a target must stand above (`up_s`) or below (`down_s`) the wanted number without a break."""

    up_s: float = 0.0
    down_s: float = 80.0

    def __post_init__(self) -> None:
        if not (0 <= self.up_s < math.inf and 0 <= self.down_s < math.inf):
            raise BadInput(f"hold: up_s and down_s must be durations, got {self.up_s:g} and {self.down_s:g}")


@dataclass(frozen=True, slots=True)
class Held:
    """The number of workers wanted, and since when the target has been off it.

    `least_above` and `most_below`: the target nearest to `wanted` that each spell has seen.
    """

    wanted: int
    above_since_s: float | None = None
    least_above: int = 0
    below_since_s: float | None = None
    most_below: int = 0


def hold(settings: HoldSettings, held: Held, target: int | None, now_s: float) -> Held:
    """What is wanted now. A target of None (no news) keeps the number, and ends any spell.

    After a spell the number goes to the target nearest to it that the spell saw, so one dip is not followed.
    """
    if target is None or target == held.wanted:
        return Held(held.wanted)
    if target > held.wanted:
        since_s = now_s if held.above_since_s is None else held.above_since_s
        least = target if held.above_since_s is None else min(held.least_above, target)
        if now_s - since_s >= settings.up_s:
            return Held(least)
        return Held(held.wanted, above_since_s=since_s, least_above=least)
    since_s = now_s if held.below_since_s is None else held.below_since_s
    most = target if held.below_since_s is None else max(held.most_below, target)
    if now_s - since_s >= settings.down_s:
        return Held(most)
    return Held(held.wanted, below_since_s=since_s, most_below=most)
