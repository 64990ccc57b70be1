"""The scaler's settings, its state between heartbeats, and the part that outlives a controller.

`followed` takes a look at the fleet into the state; `line_now` is the line by it. What outlives a controller
is the line's correction, and the counts that forecasts are made from. A season is learned over days, and a
controller that starts again has none of its own. Bins have no dates here: the caller that keeps them says how
old they are, and what lies between is not counted (`None`). The rest of the state (traffic phase,
stabilization window, mix) is of minutes, and is found again in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import StepModel
from controlplane.scaler import correction
from controlplane.scaler.correction import Correction
from controlplane.scaler.forecast import ForecastSettings, Outlook, foresee
from controlplane.scaler.line import Line, Weights, carried_over, line_of
from controlplane.scaler.mix import MixSettings, check_types
from controlplane.scaler.mix_changes import MixState
from controlplane.scaler.target import StabilizationWindow, Stabilized, TargetSettings
from controlplane.scaler.traffic import (
    RECENT_HALF_S,
    RECENT_REQUESTS,
    Demand,
    Regimes,
    Traffic,
    blend,
    follow,
    observe,
    recent_rps,
)
from controlplane.snapshot import Note, Snapshot
from controlplane.types import ClassArrivals, Role, SloClass
from controlplane.worker_type import WorkerType


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Settings of following demand.

    `worker_types`: those that may be had. Their profiles say what a worker can do where the target has no
    line of its own. They do so, too, where the lengths drift from those that its line was learned at
    (`learned_at`). That line counts workers of the first type. `mix`: how counts are chosen among them, and
    the limits of all together. `attainment`: the share of requests in time that the line is for; `classes`:
    those with one of their own. `bin_s`: a bin of the counts. `ahead`: whether and how to forecast; `near`:
    by short bins as well.
    """

    target: TargetSettings
    window: StabilizationWindow = field(default_factory=StabilizationWindow)
    bin_s: float = 10.0
    ahead: ForecastSettings | None = None
    near: ForecastSettings | None = None
    learned_at: ClassArrivals | None = None
    worker_types: tuple[WorkerType, ...] = ()
    mix: MixSettings = field(default_factory=MixSettings)
    attainment: float = 0.99
    classes: tuple[SloClass, ...] = ()

    def __post_init__(self) -> None:
        check_types(self.worker_types, self.mix, self.target.low, self.target.high)

    @property
    def is_mix(self) -> bool:
        """Whether counts are chosen by type: there are several, or workers of one that are reclaimed."""
        return len(self.worker_types) > 1 or any(t.reclaims_per_h > 0 for t in self.worker_types)

    @property
    def limits(self) -> TargetSettings:
        """The target's, within what the one type, GPUs and budget allow; of a mix the mix keeps to those."""
        if self.is_mix:
            return replace(self.target, low=0, high=None)
        gpus, usd_per_h = self.mix.max_gpus, self.mix.budget_usd_per_h
        caps = [] if self.target.high is None else [(self.target.high, "")]
        low = self.target.low
        for t in self.worker_types:
            low = max(low, t.low)
            caps += [] if t.limit is None else [(t.limit, f"all {t.name} there are")]
            caps += [] if gpus is None else [(gpus // t.gpus, f"the limit of {gpus} GPUs")]
            if usd_per_h is not None and t.usd_per_h:
                # A hair of tolerance: 3 x 1.2 is 3.5999999999999996.
                caps.append((int(usd_per_h / t.usd_per_h + 1e-9), f"the budget of ${usd_per_h:g}/h"))
        if not caps:
            return replace(self.target, low=low)
        most, by = min(caps, key=lambda cap: cap[0])
        return replace(self.target, low=min(low, most), high=most, limited_by=by)


@dataclass(frozen=True, slots=True)
class Rule:
    """What demand alone asked for at a look, before the stabilization window, and the line that it went by.

    `given_slope`: of the line by the step times that were given, before refits and corrections.
    """

    workers: int
    line: Line
    given_slope: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scaler's state; empty at the start. A restart loses all but what `to_keep` keeps.

    `recent`: the traffic of the last minute or two, by which rises of rate and lengths show soon.
    `far` belongs to `ScalingSettings.ahead`, `soon` to its `near`; `weights` and `fleet_mix` to a mix.
    `steps`: the step times of each type as last told of its workers. `correction`: of the line, by what was
    seen. `over`: the limit that holds the fleet below what is wanted. `needed`: of what is wanted, what
    the last moments ask for. `notes`: what there is to say now.
    `rule`: this look's; None where demand did not decide, and in a mix, which counts in other units.
    """

    demand: Demand | None = None
    regimes: Regimes = field(default_factory=Regimes)
    stabilized: Stabilized | None = None
    counted_s: float | None = None  # when arrivals were last reported
    traffic: Traffic = field(default_factory=Traffic)
    recent: Traffic = field(default_factory=Traffic)
    far: Outlook = field(default_factory=Outlook)
    soon: Outlook = field(default_factory=Outlook)
    weights: Weights | None = None
    fleet_mix: MixState | None = None
    steps: Mapping[str, StepModel] = field(default_factory=dict)
    correction: Correction = field(default_factory=Correction)
    over: str = ""
    needed: int | None = None
    notes: tuple[Note, ...] = ()
    rule: Rule | None = None

    def over_limit(self, why: str, by: str) -> Scaling:
        """The state with a note where a limit begins, or ceases, to hold the fleet below what is wanted."""
        over = by if why else ""
        if over == self.over:
            return self
        note = Note("limit", why or f"what is wanted is allowed again: no longer over {self.over}")
        return replace(self, over=over, notes=(*self.notes, note))


def followed(settings: ScalingSettings, state: Scaling, snapshot: Snapshot) -> Scaling:
    """The state with what has arrived: counts in all bins, lengths, the traffic phase, and forecasts."""
    steps = {**state.steps, **_steps_told(settings, snapshot)}
    now_s, arrivals = snapshot.now_s, snapshot.arrivals
    ahead, near = settings.ahead, settings.near
    far, soon = state.far, state.soon
    far_bins = near_bins = None
    demand = observe(state.demand or Demand(settings.bin_s), now_s, arrivals)
    if ahead is not None:
        far_bins = observe(far.past or Demand(ahead.bin_s, ahead.keep), now_s, arrivals)
    if near is not None:
        near_bins = observe(soon.past or Demand(near.bin_s, near.keep), now_s, arrivals)
    traffic = blend(state.traffic, snapshot.by_class, now_s)
    recent = blend(state.recent, snapshot.by_class, now_s, RECENT_HALF_S)
    regimes = follow(state.regimes, demand)
    rate_rps = 0.0 if regimes.current is None else regimes.current.rate_rps
    if ahead is not None and far_bins is not None:
        far = foresee(ahead, far, far_bins, rate_rps, snapshot.cold_start_s)
    if near is not None and near_bins is not None:
        soon = foresee(near, soon, near_bins, rate_rps, snapshot.cold_start_s)
    return replace(
        state,
        steps=steps,
        notes=(),
        demand=demand,
        regimes=regimes,
        counted_s=state.counted_s if arrivals is None else now_s,
        traffic=traffic,
        recent=recent,
        far=far,
        soon=soon,
    )


def _steps_told(settings: ScalingSettings, snapshot: Snapshot) -> dict[str, StepModel]:
    """The step times that this look tells, by type."""
    steps = {w.kind: w.step for w in snapshot.workers if w.step is not None}
    if len(settings.worker_types) == 1:  # whatever its workers call themselves
        return dict.fromkeys([settings.worker_types[0].name], next(iter(steps.values()))) if steps else {}
    return steps


def has_line(settings: ScalingSettings, state: Scaling) -> bool:
    """Whether demand says how many workers: else another rule must."""
    return line_now(settings, state, settings.worker_types) is not None


def types_now(settings: ScalingSettings, state: Scaling) -> tuple[WorkerType, ...]:
    """The types, with the step times that were last told of their workers."""
    return tuple(
        t
        if t.known_profile is None or t.name not in state.steps
        else replace(t, known_profile=replace(t.known_profile, step=state.steps[t.name]))
        for t in settings.worker_types
    )


def line_now(settings: ScalingSettings, state: Scaling, types: tuple[WorkerType, ...]) -> Line | None:
    """The line for this traffic. Of a mix it is in reference workers, and None until those are known.

    `types`: the settings' own, with the step times to use.
    """
    weights, given = state.weights, settings.worker_types
    if not settings.is_mix:
        if not types:
            return settings.target.line
        return _line_of_type(settings, state, given[0].known_profile, types[0].known_profile, types[0].role)
    if weights is None:
        return None
    name = weights.reference if settings.target.line is None else types[0].name
    profile, before = (next(t.known_profile for t in of if t.name == name) for of in (types, given))
    line = _line_of_type(settings, state, before, profile)
    return weights.scaled(line, name) if line is not None and name in weights.of else None


def rps_now(settings: ScalingSettings, state: Scaling, *zs: float) -> list[float]:
    """The recent rate in requests of the line's lengths (`recent_rps`), by each z; 0 without a phase."""
    demand, regime, heavier = state.demand, state.regimes.current, 1.0
    if demand is None or regime is None:
        return [0.0] * len(zs)
    types = types_now(settings, state)
    line = line_now(settings, state, types)
    recent = line_now(settings, replace(state, traffic=state.recent), types)
    if line and recent and line.workers_per_rps > 0 and state.recent.requests >= RECENT_REQUESTS:
        heavier = recent.workers_per_rps / line.workers_per_rps
    return [recent_rps(demand, regime, heavier, z) for z in zs]


def _line_of_type(
    settings: ScalingSettings,
    state: Scaling,
    before: Profile | None,
    now: Profile | None,
    role: Role = "any",
) -> Line | None:
    """The target's own line, carried over to the step times and lengths seen; else the profile's."""
    line = settings.target.line
    if before is None or now is None:
        return line
    if line is None:
        return line_of(now, state.traffic, role)
    return carried_over(line, settings.learned_at, before, now, state.traffic)


def to_keep(state: Scaling, now_s: float) -> dict[str, Any]:
    """The closed bins of both forecasts as plain values, and how long ago the last of them ended; the line's
    correction."""
    kept = {"correction": correction.to_keep(state.correction)}
    for name, outlook in (("far", state.far), ("soon", state.soon)):
        past = outlook.past
        if past is not None and past.closed:
            kept[name] = {
                "bin_s": past.bin_s,
                "age_s": now_s - (past.first_bin + len(past.closed)) * past.bin_s,
                "counts": list(past.closed),
                "regimes_rps": [round(rate, 6) for rate in outlook.past_rps],
            }
    return kept


def resumed(settings: ScalingSettings, kept: Mapping[str, Any], since_s: float, now_s: float) -> Scaling:
    """A scaler at `now_s` that knows what `to_keep` gave `since_s` earlier; bins of another length are none.

    Raises BadInput for what `to_keep` did not give.
    """
    state = Scaling()
    try:
        if settings.ahead is not None and "far" in kept:
            state = replace(state, far=_outlook(settings.ahead, kept["far"], since_s, now_s))
        if settings.near is not None and "soon" in kept:
            state = replace(state, soon=_outlook(settings.near, kept["soon"], since_s, now_s))
        if "correction" in kept:
            state = replace(state, correction=correction.resumed(kept["correction"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"demand remembered: not what was kept: {error}") from None
    return state


def _outlook(settings: ForecastSettings, kept: Mapping[str, Any], since_s: float, now_s: float) -> Outlook:
    counts = [None if c is None else int(c) for c in kept["counts"]]
    levels = [float(rate) for rate in kept["regimes_rps"]]
    if len(counts) != len(levels):
        raise ValueError(f"{len(counts)} bins and {len(levels)} traffic phases")
    if kept["bin_s"] != settings.bin_s or not counts:
        return Outlook()
    at = int(now_s // settings.bin_s)
    ended_s = float(kept["age_s"]) + since_s - (now_s - at * settings.bin_s)  # before the bin in progress
    lost = max(round(ended_s / settings.bin_s), 0)
    if lost >= settings.keep:
        return Outlook()
    counts = [*counts, *[None] * lost][-settings.keep :]
    levels = [*levels, *[levels[-1]] * lost][-settings.keep :]
    past = Demand(settings.bin_s, settings.keep, at - len(counts), tuple(counts), None, now_s)
    return Outlook(past, tuple(levels))
