"""The advice: how many replicas a fleet should have, one look after another; a pure function.

    traffic → snapshot → the scaler of `serve` (controlplane.scaler) → replicas wanted, how sure, why

The live loop and the replay of a recorded day call it alike. Each look goes on from the advice of the last,
not from what the fleet has: advice that is not followed stays. The first advice needs FEWEST_BINS bins. It
follows every look until a fall would have lasted long enough. A fleet that follows the advice by itself does
not shrink until then (`Advice.published`).

A look that counted nothing holds the last advice. After WITHDRAWN_S it is no longer published, so that a
scaler behind it falls back to its own number.

The range is that of the line at the ends of the rate's interval. At the upper end a replica is as much slower
as the step times may be off, at the lower end as much faster. Rate and step times are each taken at 90 %.
"""

from __future__ import annotations

import math
from dataclasses import replace

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.autoscale import scale
from controlplane.scaler.line import Line
from controlplane.scaler.target import RATE_Z
from controlplane.scaler.traffic import Regime
from controlplane.snapshot import SERVING, RunningRequest, Scale, Snapshot, WorkerLoad
from controlplane.types import ClassArrivals, ClassOutcomes, RequestId, Slo, WorkerId
from tokenfleet.advise.advice import Advice, AdviceChange, AdviceSettings, AdviceState
from tokenfleet.advise.look import Buckets, FleetTraffic, nearest_edges, share_within

ORIGIN_S = 300.0 - 1e-3  # of the first look: it ends a bin of each length (10 s, 30 s, 5 min)
FEWEST_BINS = 2
WITHDRAWN_S = 600.0
SEEDED = 20.0  # requests that a server's whole life counts for at the first look
HALF_LIFE_S = 120.0  # of the latency histograms that are shown
_ONE = RunningRequest(RequestId(""), 0)


def advise(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> tuple[AdviceState, Advice]:
    """The state after this look, and its advice."""
    state = _followed(settings, state, traffic)
    snapshot = _snapshot(settings, state, traffic)
    scaling, change = scale(settings.scaling, state.scaling, snapshot)
    is_held = bool(traffic.held)
    state = replace(state, scaling=scaling)
    if not is_held:
        state = _decided(settings, state, traffic.at_s, change)
    return state, _advice(settings, state, traffic)


def looked_at(settings: AdviceSettings, every_s: float) -> AdviceSettings:
    """The settings with bins of a whole number of looks."""
    bin_s = every_s * math.ceil(settings.scaling.bin_s / every_s)
    return replace(settings, scaling=replace(settings.scaling, bin_s=bin_s))


def _decided(settings: AdviceSettings, state: AdviceState, now_s: float, change: Scale | None) -> AdviceState:
    """The state with another advice, where there is one."""
    rule, demand = state.scaling.rule, state.scaling.demand
    if rule is None or demand is None or len(demand.known) < FEWEST_BINS:
        return state
    assert state.first_s is not None
    wanted, why = state.wanted, ""
    if state.wanted is None or now_s - state.first_s < settings.settled_s:
        wanted = rule.workers
        why = "the first counts" if state.wanted is None else "more counts"
    elif change is not None:
        wanted = change.workers
    if wanted is None or wanted == state.wanted:
        return state
    said = AdviceChange(now_s, state.wanted, wanted, change.reason if change is not None else why)
    return replace(state, wanted=wanted, change=said)


def _followed(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> AdviceState:
    """The state with what this look counted."""
    if state.first_s is None:
        state = replace(state, first_s=traffic.at_s)
    if traffic.held:
        return state
    recent = _blended(state.recent, traffic, traffic.at_s - (state.counted_s or traffic.at_s))
    outcomes = _outcomes(settings.slo, state.outcomes, traffic)
    arrivals = state.arrivals + (traffic.arrivals or 0.0)
    state = replace(state, counted_s=traffic.at_s, has=traffic.servers, arrivals=arrivals)
    return replace(state, recent=recent, outcomes=outcomes)


def _snapshot(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> Snapshot:
    """The fleet as the scaler sees it: its servers as workers, the advice as what is wanted."""
    profile, kind = state.profile or settings.worker_type.profile, settings.worker_type.name
    workers = tuple(
        WorkerLoad(
            WorkerId(str(number)),
            SERVING,
            profile.kv.capacity_tokens,
            (_ONE,) * round(running),
            step=None if state.profile is None else profile.step,
            max_seqs=profile.engine.max_seqs,
            kind=kind,
        )
        for number, running in enumerate(traffic.running)
    )
    by_class: tuple[ClassArrivals, ...] = ()
    if traffic.ended > 0 and not traffic.held:
        # The first look tells of whole lives, which are no more than a hint of the traffic of today.
        part = min(SEEDED / traffic.ended, 1.0) if traffic.arrivals is None else 1.0
        sums = traffic.ended, traffic.prompt_tokens, traffic.output_tokens
        by_class = (ClassArrivals(settings.slo, *(max(value, 0.0) * part for value in sums)),)
    return Snapshot(
        now_s=traffic.at_s,
        workers=workers,
        wanted=_allowed(settings, state.has) if state.wanted is None else state.wanted,
        arrivals=traffic.arrivals,
        by_class=by_class,
        waiting_requests=0 if traffic.held else round(traffic.waiting),
        cold_start_s=settings.cold_start_s,
        outcomes=() if state.outcomes is None else (state.outcomes,),
    )


def _published(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> int | None:
    """The advice for a scaler that follows it by itself; None where there is none, or an old one alone."""
    now_s = traffic.at_s
    if state.wanted is None or now_s - state.held_since_s > WITHDRAWN_S:
        return None
    if now_s - state.begun_s < settings.settled_s:
        return max(state.wanted, state.has + traffic.starting)
    return state.wanted


def _allowed(settings: AdviceSettings, replicas: float) -> int:
    """That many replicas, or the nearest number that the bounds allow."""
    limits = settings.scaling.limits
    return int(min(max(replicas, limits.low, 1), math.inf if limits.high is None else limits.high))


def _advice(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> Advice:
    scaling, profile = state.scaling, state.profile or settings.worker_type.profile
    regime, rule, demand = scaling.regimes.current, scaling.rule, scaling.demand
    known = scaling.traffic.classes[:1]
    assert demand is not None
    assert state.first_s is not None
    line = None if rule is None else rule.line
    targets = {"ttft": settings.slo.ttft_s, "tpot": settings.slo.tpot_s}
    return Advice(
        at_s=traffic.at_s,
        has=state.has if traffic.held else traffic.servers,
        starting=traffic.starting,
        wanted=state.wanted,
        published=_published(settings, state, traffic),
        likely=_likely(settings, state, profile, line, regime, demand.bin_s),
        regime=regime,
        upper_rps=0.0 if regime is None else regime.upper_rps(demand.bin_s, RATE_Z),
        since_s=None if regime is None else max(regime.start_bin * demand.bin_s, state.first_s),
        line=line,
        lengths=(known[0].mean_prompt_tokens, known[0].mean_output_tokens) if known else None,
        running=sum(traffic.running),
        waiting=traffic.waiting,
        arrivals=state.arrivals,
        shares={name: share_within(state.recent.get(name, {}), targets[name]) for name in targets},
        edges={name: nearest_edges(state.recent.get(name, {}), targets[name]) for name in targets},
        change=state.change,
        profile=profile,
        held=traffic.held,
        held_since_s=state.held_since_s if traffic.held else None,
    )


def _likely(
    settings: AdviceSettings,
    state: AdviceState,
    profile: Profile,
    line: Line | None,
    regime: Regime | None,
    bin_s: float,
) -> tuple[int, int] | None:
    """From how few to how many replicas may be right; what is wanted lies within."""
    if line is None or regime is None or state.wanted is None:
        return None
    doubt = doubt_of(profile)
    upper_rps = regime.upper_rps(bin_s, RATE_Z)
    lower_rps = max(2.0 * regime.rate_rps - upper_rps, 0.0)
    ends = (
        line.workers_per_rps * lower_rps / (1.0 + doubt) + line.intercept,
        line.workers_per_rps * upper_rps * (1.0 + doubt) + line.intercept,
    )
    low, high = (_allowed(settings, math.ceil(end - 1e-9)) for end in ends)
    return min(low, state.wanted), max(high, state.wanted)


def doubt_of(profile: Profile) -> float:
    """By what share a replica may be slower or faster than its profile, at 90 %."""
    return RATE_Z * profile.residuals.spread


def _blended(recent: Buckets, traffic: FleetTraffic, passed_s: float) -> Buckets:
    """Recent latency histograms: older requests fade. The first look is left out: it covers whole lives."""
    if traffic.arrivals is None:
        return recent
    kept = 0.5 ** (max(passed_s, 0.0) / HALF_LIFE_S)
    return {
        name: {
            edge: recent.get(name, {}).get(edge, 0.0) * kept + max(count, 0.0) for edge, count in new.items()
        }
        for name, new in traffic.buckets.items()
    }


def _outcomes(slo: Slo, before: ClassOutcomes | None, traffic: FleetTraffic) -> ClassOutcomes | None:
    """What became of requests, where the histograms count it: both targets are edges of theirs.

    How many were within both lies between two numbers; the lower is taken.
    """
    if traffic.arrivals is None:
        return before
    counts = [traffic.buckets.get(name, {}) for name in ("ttft", "tpot")]
    shares = [share_within(c, t) for c, t in zip(counts, (slo.ttft_s, slo.tpot_s), strict=True)]
    if None in shares or any(share is not None and share[0] != share[1] for share in shares):
        return before
    ended = max(traffic.ended, 0.0)
    in_ttft, in_tpot = (min(max(share[0], 0.0), 1.0) * ended for share in shares if share is not None)
    was = before or ClassOutcomes(slo, 0, 0, 0, 0)
    return ClassOutcomes(
        slo,
        was.ended + round(ended),
        was.ttft_met + round(in_ttft),
        was.tpot_met + round(in_tpot),
        was.met + round(max(in_ttft + in_tpot - ended, 0.0)),
    )
