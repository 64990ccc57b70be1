"""Demand to a wanted number of workers, one heartbeat at a time: arrivals, regime, line, target, hold.

Besides the regime's rate four others must be covered, and the highest counts:

    burst      what the bin in progress has brought already, where the regime cannot explain it
    backlog    the regime's rate and what waits without a worker, to be caught up in `catch_up_s`
    forecast   the coming cold start's highest rate (scaler.forecast), by the history of days
    near       the same by bins shorter than a cold start: what the last minutes rose by, at a quantile

A rise is followed at once. A fall must last: `hold.down_s`, and at least a cold start and a drain, since a
worker let go and wanted back costs both.

In a fleet of several types all of this counts in reference workers (scaler.weights), limits apart, and what
is held becomes the cheapest counts of each type within the limits (scaler.mix).
"""

from __future__ import annotations

import math
from dataclasses import replace

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.forecast import Forecast, ForecastSettings, forecast
from controlplane.scaler.line import Line, at_lengths, line_of
from controlplane.scaler.mix import MixQuestion
from controlplane.scaler.mix_changes import ask, change, fixed_mix, next_mix, taken_up, units_in
from controlplane.scaler.regimes import Regime, follow
from controlplane.scaler.state import Outlook, Scaling, ScalingSettings
from controlplane.scaler.target import Held, HoldSettings, Rate, Target, hold, target
from controlplane.scaler.traffic import Demand, blend, observe
from controlplane.scaler.weights import PARTS, Weights, weigh
from controlplane.snapshot import SERVING, STARTING, Facts, Scale, Snapshot

SILENT_BINS = 6  # without an arrival, before a fleet that may go to zero is thought idle
BURST_Z = 4.0  # standard errors of the bin's count: one look in ten thousand errs


def scale(settings: ScalingSettings, state: Scaling, snapshot: Snapshot) -> tuple[Scaling, Scale | None]:
    """The state after this heartbeat, and the change to ask for, if any.

    The fleet's wanted number is the snapshot's: what an operator or another controller set in the meantime
    is where this one goes on from.
    """
    now_s = snapshot.now_s
    demand = observe(state.demand or Demand(settings.bin_s), now_s, snapshot.arrivals)
    regimes = follow(state.regimes, demand, settings.strictness)
    counted_s = state.counted_s if snapshot.arrivals is None else now_s
    stale = counted_s is None or now_s - counted_s > settings.stale_s
    traffic = blend(state.traffic, snapshot.by_class, now_s)
    after = replace(state, demand=demand, regimes=regimes, counted_s=counted_s, traffic=traffic)
    after = _foreseen(settings, after, snapshot)
    unit, parts, there = "workers", 1, snapshot.wanted
    if settings.is_mix:
        after, question = _question(settings, after, snapshot)
        assert after.fleet_mix is not None
        unit, parts, there = f"× {question.weights.reference}", PARTS, units_in(after.fleet_mix, question)
    line = _line(settings, after)
    also = _also(settings, after, snapshot)
    found = target(
        settings.limits,
        regimes.current,
        demand.bin_s,
        stale=stale,
        fixed=snapshot.fixed,
        line=line,
        also=also,
        unit=unit,
        parts=parts,
    )
    if settings.target.to_zero and snapshot.fixed is None and not stale and _is_silent(demand):
        why = f"nothing has arrived for {SILENT_BINS * demand.bin_s:g} s"
        found = Target(0, why, found.compared)
    if _must_wake(settings, snapshot, found):
        why = f"{snapshot.waiting_requests} requests wait and nobody serves"
        found = Target(max(found.workers or 0, settings.target.low, 1), why, found.compared)
    found = _kept_for_those_here(snapshot, found, there, after.weights)
    held = state.held
    if held is None or held.wanted != there:
        held = Held(there)
    if snapshot.fixed is not None:
        held = held if settings.is_mix else Held(snapshot.fixed)
    elif snapshot.wanted == 0 and found.workers:
        held = Held(found.workers)  # nobody is kept waiting for a hold to end
    else:
        held = hold(_held_for(settings.hold, snapshot), held, found.workers, now_s)
    after = replace(after, held=held)
    if settings.is_mix:
        return _mixed(settings, after, snapshot, question, found, line)
    if held.wanted == snapshot.wanted:
        return after, None
    return after, Scale(
        held.wanted, found.reason, _facts(settings, after, snapshot, found, line, held.wanted)
    )


def has_line(settings: ScalingSettings, state: Scaling) -> bool:
    """Whether demand says how many workers: else another rule must."""
    return _line(settings, state) is not None


def _line(settings: ScalingSettings, state: Scaling) -> Line | None:
    """The line for this traffic; of a mix in reference workers, and None until it is known what those are."""
    types, weights = settings.worker_types, state.weights
    if not settings.is_mix:
        return _line_of_type(settings, state, types[0].known_profile if types else None)
    if weights is None:
        return None
    name = weights.reference if settings.target.line is None else types[0].name
    profile = next(t.known_profile for t in types if t.name == name)
    line = _line_of_type(settings, state, profile)
    return weights.scaled(line, name) if line is not None and name in weights.of else None


def _line_of_type(settings: ScalingSettings, state: Scaling, profile: Profile | None) -> Line | None:
    """The target's own line, at the lengths seen where it says what it was learned at; else the profile's."""
    given = settings.target.line
    if profile is None:
        return given
    if given is None:
        return line_of(profile, state.traffic)
    if settings.learned_at is None:
        return given
    return at_lengths(given, settings.learned_at, profile, state.traffic)


def _question(settings: ScalingSettings, state: Scaling, snapshot: Snapshot) -> tuple[Scaling, MixQuestion]:
    """The state with this traffic's weights; what to choose from, its demand still open."""
    weights = weigh(settings.worker_types, snapshot.wanted_kinds, state.traffic, state.weights)
    limits = settings.target.low, settings.target.high
    question = ask(settings.worker_types, settings.mix, weights, limits, snapshot)
    due_s = snapshot.now_s + _held_for(settings.hold, snapshot).down_s
    return replace(state, weights=weights, fleet_mix=taken_up(state.fleet_mix, question, due_s)), question


def _mixed(
    settings: ScalingSettings,
    state: Scaling,
    snapshot: Snapshot,
    question: MixQuestion,
    found: Target,
    line: Line | None,
) -> tuple[Scaling, Scale | None]:
    """From the units held to counts of each type."""
    before, held = state.fleet_mix, state.held
    assert before is not None
    assert held is not None
    if held.wanted == 0 and settings.target.to_zero:
        question = replace(question, least=0)
    if snapshot.fixed is not None:
        mix = fixed_mix(question, snapshot.fixed)
        state = replace(state, held=Held(mix.units))
    else:
        mix = next_mix(before, question, held.wanted, snapshot, is_news=found.workers is not None)
    state = replace(state, fleet_mix=mix)
    facts = _facts(settings, state, snapshot, found, line, sum(mix.wanted.values()))
    why = found.reason
    if found.workers is not None and found.workers < mix.units and snapshot.fixed is None:
        why += f", {mix.units / PARTS} for now"  # a fall goes no further yet
    return state, change(before, mix, question, why, facts)


def _also(settings: ScalingSettings, state: Scaling, snapshot: Snapshot) -> list[Rate]:
    """The rates besides the regime's."""
    rates: list[Rate] = []
    demand, regime = state.demand, state.regimes.current
    assert demand is not None
    if regime is not None and demand.open_count:
        burst = _burst_rps(regime, demand, settings)
        if burst is not None:
            why = (
                f"{demand.open_count} arrivals in a bin of {demand.bin_s:g} s, {regime.rate_rps:.3g}/s before"
            )
            rates.append(Rate("burst", burst, why))
    if snapshot.waiting_requests and regime is not None:
        rps = regime.rate_rps + snapshot.waiting_requests / settings.catch_up_s
        why = f"{regime.rate_rps:.3g} requests/s, and {snapshot.waiting_requests} wait for a worker"
        rates.append(Rate("backlog", rps, why))
    far, soon = state.far.coming, state.soon.coming
    if far is not None and regime is not None:
        rates.append(Rate("forecast", _ready_rps(settings, far, regime, snapshot), far.why))
    if soon is not None:
        rates.append(Rate("near", soon.rps, soon.why))
    return rates


def _ready_rps(settings: ScalingSettings, coming: Forecast, regime: Regime, snapshot: Snapshot) -> float:
    """The rate when what is launched now serves: of a rise within a bin, the part that has come by then."""
    assert settings.ahead is not None
    share = min(snapshot.cold_start_s / settings.ahead.bin_s, 1.0)
    return regime.rate_rps + share * max(coming.rps - regime.rate_rps, 0.0)


def _burst_rps(regime: Regime, demand: Demand, settings: ScalingSettings) -> float | None:
    """The rate of the bin in progress, where its count is beyond what the regime's noise explains."""
    count = float(demand.open_count or 0)
    expected = regime.upper_rps(demand.bin_s, settings.target.z) * demand.bin_s
    limit = expected + BURST_Z * math.sqrt(regime.noise * max(expected, 1.0))
    return count / demand.bin_s if count > limit else None


def _foreseen(settings: ScalingSettings, state: Scaling, snapshot: Snapshot) -> Scaling:
    """The state with this look in the forecasts' bins; a new forecast when one of them has closed."""
    regime = state.regimes.current
    if settings.ahead is not None:
        state = replace(state, far=_outlook(settings.ahead, state.far, regime, snapshot))
    if settings.near is not None:
        state = replace(state, soon=_outlook(settings.near, state.soon, regime, snapshot))
    return state


def _outlook(
    settings: ForecastSettings, known: Outlook, regime: Regime | None, snapshot: Snapshot
) -> Outlook:
    before = known.past or Demand(settings.bin_s, settings.keep)
    past = observe(before, snapshot.now_s, snapshot.arrivals)
    new = past.first_bin + len(past.closed) - before.first_bin - len(before.closed)
    if not past.closed or (new == 0 and known.coming is not None):
        return replace(known, past=past)
    rate = 0.0 if regime is None else regime.rate_rps
    past_rps = (*known.past_rps, *(rate,) * new)[-len(past.closed) :]
    past_rps = (rate,) * (len(past.closed) - len(past_rps)) + past_rps
    lead = max(math.ceil(snapshot.cold_start_s / settings.bin_s), 1)
    return Outlook(past, past_rps, forecast(settings, past.closed, past_rps, lead))


def _is_silent(demand: Demand) -> bool:
    """Whether nothing arrives any more: the rare arrivals of a regime are no regime of their own."""
    last = demand.closed[-SILENT_BINS:]
    return len(last) == SILENT_BINS and not any(last) and None not in last and demand.open_count == 0


def _must_wake(settings: ScalingSettings, snapshot: Snapshot, found: Target) -> bool:
    """Whether a fleet at zero has somebody waiting; what the demand says may come too late for them."""
    nobody = snapshot.wanted == 0 and snapshot.fixed is None and not found.workers
    return nobody and settings.target.to_zero and snapshot.waiting_requests > 0


def _kept_for_those_here(snapshot: Snapshot, found: Target, wanted: int, weights: Weights | None) -> Target:
    """The target, but no fewer workers than those who are here need: the demand knows arrivals alone.

    `wanted`: workers, or PARTS of reference workers where there are `weights`.
    """
    if found.workers is None or found.workers >= wanted or snapshot.fixed is not None:
        return found
    serving = [w for w in snapshot.workers if w.state == SERVING]
    running = sum(len(w.requests) + len(w.waiting) for w in snapshot.workers)
    if snapshot.waiting_requests:
        why = f"{found.reason}; kept, {snapshot.waiting_requests} requests wait"
        return Target(wanted, why, found.compared)
    of, parts = (weights.of, PARTS) if weights is not None else ({}, 1)
    seats = min((w.max_seqs / of.get(w.kind, 1.0) / parts for w in serving), default=1)
    needed = min(math.ceil(running / seats), wanted)
    if needed <= found.workers:
        return found
    why = f"{found.reason}; {needed if parts == 1 else needed / parts} hold the {running} requests here"
    return Target(needed, why, found.compared)


def _held_for(settings: HoldSettings, snapshot: Snapshot) -> HoldSettings:
    return replace(settings, down_s=max(settings.down_s, snapshot.cold_start_s + snapshot.drain_s))


def _facts(
    settings: ScalingSettings,
    state: Scaling,
    snapshot: Snapshot,
    found: Target,
    line: Line | None,
    wanted: int,
) -> Facts:
    """What was seen, what was compared (workers by each rate), and what the change costs."""
    regime, traffic = state.regimes.current, state.traffic
    seen: dict[str, float] = {
        "serving": sum(w.state == SERVING for w in snapshot.workers),
        "starting": sum(w.state == STARTING for w in snapshot.workers),
        "waiting_requests": snapshot.waiting_requests,
    }
    if regime is not None:
        seen |= {"rate_rps": regime.rate_rps, "noise": regime.noise}
    if traffic.requests > 0:
        seen["prompt_tokens"] = sum(c.prompt_tokens for c in traffic.classes) / traffic.requests
        seen["output_tokens"] = sum(c.output_tokens for c in traffic.classes) / traffic.requests
    if state.far.coming is not None:
        seen |= {"forecast_rps": state.far.coming.rps, "forecast_error": state.far.coming.error}
    if line is not None:
        seen |= {"workers_per_rps": line.workers_per_rps, "intercept": line.intercept}
    change = wanted - snapshot.wanted
    cost: dict[str, float] = {"workers": change, "ready_after_s": snapshot.cold_start_s}
    if change < 0:
        cost = {"workers": change, "drained_after_s": snapshot.drain_s}
    prices = [t.usd_per_h for t in settings.worker_types if t.usd_per_h is not None]
    if len(settings.worker_types) == len(prices) == 1:
        cost["usd_per_h"] = change * prices[0]
    return {
        "seen": {name: round(float(value), 4) for name, value in seen.items()},
        "compared": found.compared,
        "cost": {name: round(float(value), 4) for name, value in cost.items()},
    }
