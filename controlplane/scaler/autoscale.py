"""Scaling by demand: from arrivals to a wanted number of workers, one heartbeat at a time.

    traffic → traffic phase → forecasts → weights of the types → line → correction → target
            → stabilization window → mix

The line follows the step times that the workers' refits give. The outcomes of the requests correct it
(scaler.correction). So the loop is closed twice, by causes and by effects.

A rise is followed at once. A fall must last: `window.down_s`, and at least a cold start and a drain, since a
worker let go and wanted back costs both.

In a fleet of several types all of this but the limits counts in reference workers (scaler.line). What is
wanted becomes the cheapest counts of each type within the limits (scaler.mix).
"""

from __future__ import annotations

from dataclasses import replace

from controlplane.scaler.correction import look
from controlplane.scaler.line import PARTS, Line, bounded, weigh
from controlplane.scaler.mix import MixNeed
from controlplane.scaler.mix_changes import ask, change, fixed_mix, next_mix, taken_up, units_in
from controlplane.scaler.state import Rule, Scaling, ScalingSettings, followed, line_now, rps_now, types_now
from controlplane.scaler.target import (
    StabilizationWindow,
    Stabilized,
    Target,
    at_least_kept,
    enough_for_those_here,
    needed_lately,
    other_rates,
    stabilize,
    target,
)
from controlplane.scaler.traffic import Regime
from controlplane.snapshot import SERVING, STARTING, Facts, Scale, Snapshot

STALE_S = 60.0  # older counts are taken as missing
RISE_Z, LIVED_Z = 2.0, 1.0  # standard errors off the phase: recent work is covered; it judges late requests


def scale(settings: ScalingSettings, state: Scaling, snapshot: Snapshot) -> tuple[Scaling, Scale | None]:
    """The state after this heartbeat, and the change to ask for, if any.

    The fleet's wanted number is the snapshot's: what an operator or another controller set in the meantime
    is where this one goes on from.
    """
    now_s, window = snapshot.now_s, settings.window
    window = replace(window, down_s=max(window.down_s, snapshot.cold_start_s + snapshot.drain_s))
    state = followed(settings, state, snapshot)
    demand, regime, bounds = state.demand, state.regimes.current, settings.target
    assert demand is not None
    stale = state.counted_s is None or now_s - state.counted_s > STALE_S

    need: MixNeed | None = None
    unit, parts = "workers", 1
    there = snapshot.wanted
    if settings.is_mix:
        state, need = _mix_need(settings, state, snapshot, window)
        assert state.fleet_mix is not None
        unit, parts = f"× {need.weights.reference}", PARTS
        there = units_in(state.fleet_mix, need)

    lived_rps, rise_rps = rps_now(settings, state, LIVED_Z, RISE_Z)
    state, line = _corrected(settings, state, snapshot, regime, lived_rps)
    far, near = state.far.coming, state.soon.coming
    ready = 1.0 if settings.ahead is None else min(snapshot.cold_start_s / settings.ahead.bin_s, 1.0)
    waiting = snapshot.waiting_requests
    also = other_rates(demand, regime, waiting, far, near, ready, rise_rps)
    found = target(
        settings.limits,
        regime,
        demand.bin_s,
        stale=stale,
        fixed=snapshot.fixed,
        line=line,
        also=also,
        unit=unit,
        parts=parts,
    )
    low = bounds.low if settings.is_mix else settings.limits.low
    found = at_least_kept(found, low, snapshot.wanted, there if settings.is_mix else low)
    if snapshot.fixed is None:
        known = None if stale else demand
        found = enough_for_those_here(bounds, found, known, snapshot, there, state.weights)
    lately = snapshot.wanted
    if regime is not None and not settings.is_mix:
        lately = needed_lately(bounds, settings.limits, line, demand, regime.noise, snapshot)

    stable = _stable(settings, state, snapshot, window, found, there)
    needed = stable.wanted if stale or regime is None else min(lately, stable.wanted)
    rule = _rule(settings, state, snapshot, found, line)
    state = replace(state, stabilized=stable, rule=rule, needed=needed)
    facts = _facts(settings, state, snapshot, found, line)
    if need is not None:
        return _mixed(settings, state, snapshot, need, found, facts, window)
    return _counted(settings, state, stable.wanted, snapshot.wanted, found, facts)


def _counted(
    settings: ScalingSettings, state: Scaling, workers: int, there: int, found: Target, facts: Facts
) -> tuple[Scaling, Scale | None]:
    """The change of a fleet of one type to a number of workers, and a note where a limit holds it."""
    if found.is_limited:
        state = state.over_limit(found.reason, settings.limits.limited_by or "MAX")
    elif workers != settings.limits.high:  # a target that comes and goes is noted once
        state = state.over_limit("", "")
    return state, None if workers == there else Scale(workers, found.reason, facts)


def _stable(
    settings: ScalingSettings,
    state: Scaling,
    snapshot: Snapshot,
    window: StabilizationWindow,
    found: Target,
    there: int,
) -> Stabilized:
    """The number wanted once the target has lasted. `there`: what is wanted as yet, in the line's parts."""
    stable = state.stabilized
    if stable is None or stable.wanted != there:
        stable = Stabilized(there)
    if snapshot.fixed is not None:
        return stable if settings.is_mix else Stabilized(snapshot.fixed)
    if snapshot.wanted == 0 and found.workers:
        return Stabilized(found.workers)  # requests do not wait for the window to pass
    after = stabilize(window, stable, found.workers, snapshot.now_s)
    if after.wanted < there and not snapshot.may_give_back:
        return replace(stable, most_below=after.wanted)
    return after


def _rule(
    settings: ScalingSettings, state: Scaling, snapshot: Snapshot, found: Target, line: Line | None
) -> Rule | None:
    """The number of workers that demand asked for, if it did and workers are counted."""
    given = line_now(settings, state, settings.worker_types)
    if found.workers is None or line is None or given is None:
        return None
    if settings.is_mix or snapshot.fixed is not None:
        return None
    return Rule(found.workers, line, given.workers_per_rps)


def _corrected(
    settings: ScalingSettings, state: Scaling, snapshot: Snapshot, regime: Regime | None, lived_rps: float
) -> tuple[Scaling, Line | None]:
    """The line by the refitted step times and by what became of the requests, and what was learned of it."""
    types, given = types_now(settings, state), line_now(settings, state, settings.worker_types)
    line = bounded(line_now(settings, state, types), given)
    if line is None or regime is None:
        return state, line

    def line_if(factor: float) -> Line:
        if not types or types[0].known_profile is None:
            return Line(line.workers_per_rps * factor, line.intercept)
        slowed = bounded(line_now(settings, state, tuple(t.slowed(factor) for t in types)), given) or line
        return replace(slowed, intercept=line.intercept)  # the correction takes it as known

    of = {} if state.weights is None else state.weights.of
    workers = sum(of.get(w.kind, 1.0) for w in snapshot.workers if w.state == SERVING)
    taken = [w.counted() for w in snapshot.workers]
    correction, said = look(
        state.correction,
        snapshot.now_s,
        snapshot.outcomes,
        line_if,
        lived_rps,
        workers,
        snapshot.waiting_requests + sum(load.running + load.waiting for load in taken),
        settings.attainment,
        1.0 if given is None else line.workers_per_rps / given.workers_per_rps,
        settings.classes,
    )
    notes = state.notes if said is None else (*state.notes, said)
    state = replace(state, correction=correction, notes=notes)
    return state, line if correction.factor == 1.0 else line_if(correction.factor)


def _mix_need(
    settings: ScalingSettings, state: Scaling, snapshot: Snapshot, window: StabilizationWindow
) -> tuple[Scaling, MixNeed]:
    """The state with this traffic's weights; what to choose from, its demand still open."""
    types = types_now(settings, state)
    weights = weigh(types, snapshot.wanted_kinds, state.traffic, state.weights)
    limits = settings.target.low, settings.target.high
    need = ask(settings.worker_types, settings.mix, weights, limits, snapshot)
    mix = taken_up(state.fleet_mix, need, snapshot.now_s, window.down_s)
    return replace(state, weights=weights, fleet_mix=mix), need


def _mixed(
    settings: ScalingSettings,
    state: Scaling,
    snapshot: Snapshot,
    need: MixNeed,
    found: Target,
    facts: Facts,
    window: StabilizationWindow,
) -> tuple[Scaling, Scale | None]:
    """The counts of each type for the units wanted. Without news of the demand they stay."""
    before, stable = state.fleet_mix, state.stabilized
    assert before is not None
    assert stable is not None
    if stable.wanted == 0 and settings.target.to_zero:
        need = replace(need, least=0)
    if snapshot.fixed is not None:
        mix = fixed_mix(need, snapshot.fixed)
        state = replace(state, stabilized=Stabilized(mix.units))
    elif found.workers is None:
        return state, None
    else:
        mix = next_mix(before, need, stable.wanted, snapshot, window.down_s)
    state = replace(state, fleet_mix=mix)
    why = found.reason
    asked = replace(need, demand=mix.units / PARTS)
    if not asked.is_enough(mix.chosen) and snapshot.fixed is None:
        carries = asked.carries(mix.chosen)
        state = state.over_limit(f"{why}, but all that is allowed carries {carries:.3g}", "the mix's limits")
    else:
        state = state.over_limit("", "")
    if found.workers is not None and found.workers < mix.units and snapshot.fixed is None:
        why += f", {mix.units / PARTS} for now"  # a fall goes no further yet
    return state, change(before, mix, need, why, facts)


def _facts(
    settings: ScalingSettings,
    state: Scaling,
    snapshot: Snapshot,
    found: Target,
    line: Line | None,
) -> Facts:
    """The facts of a change: the observed rates, the workers that each asks for, and the cost."""
    observed = _observed(state, snapshot, line)
    assert state.stabilized is not None
    change = state.stabilized.wanted - snapshot.wanted
    cost: dict[str, float] = {"workers": change, "ready_after_s": snapshot.cold_start_s}
    if change < 0:
        cost = {"workers": change, "drained_after_s": snapshot.drain_s}
    prices = [t.usd_per_h for t in settings.worker_types if t.usd_per_h is not None]
    if len(settings.worker_types) == len(prices) == 1:
        cost["usd_per_h"] = change * prices[0]
    return {
        "seen": {name: round(float(value), 4) for name, value in observed.items()},
        "compared": found.compared,
        "cost": {name: round(float(value), 4) for name, value in cost.items()},
    }


def _observed(state: Scaling, snapshot: Snapshot, line: Line | None) -> dict[str, float]:
    """The facts seen: workers, rates, lengths, and the scaling rule drawn from them."""
    regime, traffic = state.regimes.current, state.traffic
    observed: dict[str, float] = {
        "serving": sum(w.state == SERVING for w in snapshot.workers),
        "starting": sum(w.state == STARTING for w in snapshot.workers),
        "waiting_requests": snapshot.waiting_requests,
    }
    if regime is not None:
        observed |= {"rate_rps": regime.rate_rps, "noise": regime.noise}
        if state.regimes.before_rps is not None and state.demand is not None:
            changed_s = state.regimes.starts[-1] * state.demand.bin_s
            observed |= {"before_rps": state.regimes.before_rps, "changed_s_ago": snapshot.now_s - changed_s}
    if traffic.requests > 0:
        observed["prompt_tokens"] = sum(c.prompt_tokens for c in traffic.classes) / traffic.requests
        observed["output_tokens"] = sum(c.output_tokens for c in traffic.classes) / traffic.requests
    if state.far.coming is not None:
        observed |= {"forecast_rps": state.far.coming.rps, "forecast_error": state.far.coming.error}
    if line is not None:
        observed |= {"workers_per_rps": line.workers_per_rps, "intercept": line.intercept}
    if state.correction.factor != 1.0:
        observed["corrected_by"] = state.correction.factor
    return observed
