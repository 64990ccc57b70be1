"""Demand to a wanted number of workers, one heartbeat at a time: arrivals, regime, target, hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.scaler.changepoint import Regimes, follow
from controlplane.scaler.demand import Demand, observe
from controlplane.scaler.hold import Held, HoldSettings, hold
from controlplane.scaler.target import TargetSettings, target
from controlplane.snapshot import Scale, Snapshot


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """How demand becomes workers. `stale_s`: counts older than this are no news."""

    target: TargetSettings
    hold: HoldSettings = field(default_factory=HoldSettings)
    strictness: float = 4.0
    stale_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the scaler remembers; empty at the start, and after a restart, which loses only the hold."""

    demand: Demand = field(default_factory=Demand)
    regimes: Regimes = field(default_factory=Regimes)
    held: Held | None = None
    counted_s: float | None = None  # when arrivals were last reported


def scale(settings: ScalingSettings, state: Scaling, snapshot: Snapshot) -> tuple[Scaling, Scale | None]:
    """The state after this heartbeat, and the change to ask for, if any.

    The fleet's wanted number is the snapshot's: what an operator or another controller set in the meantime
    is where this one goes on from.
    """
    now_s = snapshot.now_s
    demand = observe(state.demand, now_s, snapshot.arrivals)
    regimes = follow(state.regimes, demand, settings.strictness)
    counted_s = state.counted_s if snapshot.arrivals is None else now_s
    stale = counted_s is None or now_s - counted_s > settings.stale_s
    found = target(settings.target, regimes.current, demand.bin_s, stale=stale, fixed=snapshot.fixed)
    held = state.held
    if held is None or held.wanted != snapshot.wanted:
        held = Held(snapshot.wanted)
    if snapshot.fixed is not None:
        held = Held(snapshot.fixed)
    else:
        held = hold(settings.hold, held, found.workers, now_s)
    after = Scaling(demand, regimes, held, counted_s)
    return after, Scale(held.wanted, found.reason) if held.wanted != snapshot.wanted else None
