"""The advice: how many replicas a fleet should have, one look after another; a pure function.

    traffic → snapshot → the scaler of `serve` (controlplane.scaler) → replicas wanted, how sure, why

The live loop and the replay of a recorded day call it alike. Each look goes on from the advice of the last,
not from what the fleet has: advice that is not followed stays. The first advice needs FEWEST_BINS bins. It
follows every look until a fall would have lasted long enough. A fleet that follows the advice by itself does
not shrink until then (`Advice.published`).

A look that counted nothing holds the last advice. After WITHDRAWN_S it is no longer published, so that a
scaler behind it falls back to its own number.

Where a fleet has several types of replica, all of them are one fleet: traffic is counted over all servers,
and the mix of `serve` says how many of each. Each look is followed at once until a fall can have lasted.

The range is that of the line at the ends of the rate's interval. At the upper end a replica is as much slower
as the step times may be off, at the lower end as much faster. Rate and step times are each taken at 90 %. Of
a fleet of several types, each end is a mix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.autoscale import scale
from controlplane.scaler.line import PARTS, line_of
from controlplane.scaler.mix import choose
from controlplane.scaler.target import RATE_Z, StabilizationWindow
from controlplane.snapshot import SERVING, RunningRequest, Scale, Snapshot, WorkerLoad
from controlplane.types import ClassArrivals, RequestId, WorkerId
from tokenfleet.advise.advice import Advice, AdviceChange, AdviceSettings, AdviceState, TypeAdvice
from tokenfleet.advise.look import HALF_LIFE_S, FleetTraffic, blended, nearest_edges, outcomes, share_within

ORIGIN_S = 300.0 - 1e-3  # of the first look: it ends a bin of each length (10 s, 30 s, 5 min)
FEWEST_BINS = 2
WITHDRAWN_S = 600.0
SEEDED = 20.0  # requests that a server's whole life counts for at the first look
_ONE = RunningRequest(RequestId(""), 0)


def advise(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> tuple[AdviceState, Advice]:
    """The state after this look, and its advice."""
    state = _followed(settings, state, traffic)
    snapshot, followed = _snapshot(settings, state, traffic), settings.scaling
    if followed.is_mix and _is_early(settings, state, traffic.at_s):
        snapshot = replace(snapshot, cold_start_s=0.0)
        followed = replace(followed, window=StabilizationWindow(0.0, 0.0))
    scaling, change = scale(followed, state.scaling, snapshot)
    state = replace(state, scaling=scaling)
    if not traffic.held:
        state = _decided(settings, state, traffic.at_s, change)
    return state, _advice(settings, state, traffic)


def looked_at(settings: AdviceSettings, every_s: float) -> AdviceSettings:
    """The settings with bins of a whole number of looks."""
    bin_s = every_s * math.ceil(settings.scaling.bin_s / every_s)
    return replace(settings, scaling=replace(settings.scaling, bin_s=bin_s))


def _decided(settings: AdviceSettings, state: AdviceState, now_s: float, change: Scale | None) -> AdviceState:
    """The state with another advice, where there is one."""
    demand = state.scaling.demand
    if demand is None or len(demand.known) < FEWEST_BINS:
        return state
    wanted = _wanted(settings, state, now_s, change)
    if wanted is None or wanted == state.wanted:
        return state
    before = None if state.wanted is None else sum(state.wanted)
    why = "more counts" if change is None else change.reason
    return replace(state, wanted=wanted, change=AdviceChange(now_s, before, sum(wanted), why))


def _wanted(
    settings: AdviceSettings, state: AdviceState, now_s: float, change: Scale | None
) -> tuple[int, ...] | None:
    """The replicas of each type that this look asks for; None where it does not say."""
    rule, mix = state.scaling.rule, state.scaling.fleet_mix
    if mix is not None:
        return tuple(mix.wanted.get(t.name, 0) for t in settings.types) if mix.weights.known else None
    if rule is None:
        return None
    if _is_early(settings, state, now_s):
        return (rule.workers,)
    return None if change is None else (change.workers,)


def _is_early(settings: AdviceSettings, state: AdviceState, now_s: float) -> bool:
    """Whether each look is followed at once: a fall would not have lasted long enough yet."""
    return state.wanted is None or now_s - state.begun_s < settings.settled_s


def _followed(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> AdviceState:
    """The state with what this look counted."""
    if state.first_s is None:
        state = replace(state, first_s=traffic.at_s)
    if traffic.held:
        return state
    passed_s = max(traffic.at_s - (state.counted_s or traffic.at_s), 0.0)
    recent = blended(state.recent, traffic, passed_s)
    ended = outcomes(settings.slo, state.outcomes, traffic)
    has = tuple(traffic.has(kind) for kind in range(len(settings.types)))
    arrived = [traffic.arrived.get(kind, 0.0) for kind in range(len(has))]
    arrivals, recently = (
        tuple(old * kept + new for old, new in zip(before or (0.0,) * len(has), arrived, strict=True))
        for before, kept in ((state.arrivals, 1.0), (state.recently, 0.5 ** (passed_s / HALF_LIFE_S)))
    )
    state = replace(state, counted_s=traffic.at_s, has=has, arrivals=arrivals, recently=recently)
    return replace(state, recent=recent, outcomes=ended)


def _snapshot(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> Snapshot:
    """The fleet as the scaler sees it: its servers as workers, the advice as what is wanted."""
    profiles = [settings.profile(kind, state) for kind in range(len(settings.types))]
    workers = tuple(
        WorkerLoad(
            WorkerId(str(number)),
            SERVING,
            profiles[kind].kv.capacity_tokens,
            (_ONE,) * round(running),
            step=profiles[kind].step if kind in state.profiles else None,
            max_seqs=profiles[kind].engine.max_seqs,
            kind=settings.types[kind].name,
        )
        for number, (kind, running) in enumerate(zip(traffic.kinds, traffic.running, strict=False))
    )
    wanted = _kept(settings, state.has) if state.wanted is None else state.wanted
    by_class: tuple[ClassArrivals, ...] = ()
    if traffic.ended > 0 and not traffic.held:
        # The first look tells of whole lives, which are no more than a hint of the traffic of today.
        part = min(SEEDED / traffic.ended, 1.0) if traffic.arrivals is None else 1.0
        sums = traffic.ended, traffic.prompt_tokens, traffic.output_tokens
        by_class = (ClassArrivals(settings.slo, *(max(value, 0.0) * part for value in sums)),)
    return Snapshot(
        now_s=traffic.at_s,
        workers=workers,
        wanted=sum(wanted),
        wanted_kinds=dict(zip((t.name for t in settings.types), wanted, strict=True)),
        arrivals=traffic.arrivals,
        by_class=by_class,
        waiting_requests=0 if traffic.held else round(traffic.waiting),
        cold_start_s=settings.cold_start_s,
        outcomes=() if state.outcomes is None else (state.outcomes,),
    )


def _published(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> tuple[int, ...] | None:
    """The advice for a scaler that follows it by itself; None where there is none, or an old one alone."""
    if state.wanted is None or traffic.at_s - state.held_since_s > WITHDRAWN_S:
        return None
    if traffic.at_s - state.begun_s < settings.settled_s:
        return tuple(max(n, _has(state, k) + traffic.starts(k)) for k, n in enumerate(state.wanted))
    return state.wanted


def _has(state: AdviceState, kind: int) -> int:
    """The servers of a type at the last look that counted."""
    return state.has[kind] if state.has else 0


def _kept(settings: AdviceSettings, has: Sequence[int]) -> tuple[int, ...]:
    """What is there of each type, within the bounds."""
    if not settings.scaling.is_mix:
        return (_allowed(settings, sum(has)),)
    counts = has or (0,) * len(settings.types)
    return tuple(
        max(n if t.limit is None else min(n, t.limit), t.low)
        for t, n in zip(settings.types, counts, strict=True)
    )


def _allowed(settings: AdviceSettings, replicas: float) -> int:
    """That many replicas, or the nearest number that the bounds allow."""
    limits = settings.scaling.limits
    return int(min(max(replicas, limits.low, 1), math.inf if limits.high is None else limits.high))


def _advice(settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic) -> Advice:
    scaling = state.scaling
    regime, rule, demand = scaling.regimes.current, scaling.rule, scaling.demand
    known = scaling.traffic.classes[:1]
    assert demand is not None
    assert state.first_s is not None
    line = None if rule is None else rule.line
    targets = {"ttft": settings.slo.ttft_s, "tpot": settings.slo.tpot_s}
    of_types = _of_types(settings, state, traffic, demand.bin_s)
    return Advice(
        at_s=traffic.at_s,
        has=sum(one.has for one in of_types),
        starting=traffic.starting,
        wanted=_total(state.wanted or [None]),
        published=_total([one.published for one in of_types]),
        likely=_range([one.likely for one in of_types]),
        regime=regime,
        upper_rps=0.0 if regime is None else regime.upper_rps(demand.bin_s, RATE_Z),
        since_s=None if regime is None else max(regime.start_bin * demand.bin_s, state.first_s),
        line=line,
        lengths=(known[0].mean_prompt_tokens, known[0].mean_output_tokens) if known else None,
        running=sum(traffic.running),
        waiting=traffic.waiting,
        arrivals=sum(state.arrivals),
        shares={name: share_within(state.recent.get(name, {}), targets[name]) for name in targets},
        edges={name: nearest_edges(state.recent.get(name, {}), targets[name]) for name in targets},
        change=state.change,
        of_types=of_types,
        usd_per_h=settings.usd_per_h([one.has for one in of_types]),
        wanted_usd_per_h=None if state.wanted is None else settings.usd_per_h(state.wanted),
        held=traffic.held,
        held_since_s=state.held_since_s if traffic.held else None,
    )


def _total(counts: Sequence[int | None]) -> int | None:
    """Their sum; None where one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _range(ranges: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    """The sum of ranges; None where one is not known."""
    known = [one for one in ranges if one is not None]
    return (sum(low for low, _ in known), sum(high for _, high in known)) if known else None


def _of_types(
    settings: AdviceSettings, state: AdviceState, traffic: FleetTraffic, bin_s: float
) -> tuple[TypeAdvice, ...]:
    """The advice for each type."""
    published, likely = _published(settings, state, traffic), _likely(settings, state, bin_s)
    recently, made = sum(state.recently), []
    for kind, worker_type in enumerate(settings.types):
        profile = settings.profile(kind, state)
        line = line_of(profile, state.scaling.traffic)
        one = TypeAdvice(
            worker_type,
            profile,
            kind in state.profiles,
            _has(state, kind) if traffic.held else traffic.has(kind),
            traffic.starts(kind),
            None if state.wanted is None else state.wanted[kind],
            None if published is None else published[kind],
            None if likely is None else likely[kind],
            state.arrivals[kind] if state.arrivals else 0.0,
            None if line is None else 1.0 / line.workers_per_rps,
            state.recently[kind] / recently if recently > 0 else None,
        )
        made.append(one)
    return tuple(made)


def _likely(settings: AdviceSettings, state: AdviceState, bin_s: float) -> list[tuple[int, int]] | None:
    """From how few to how many replicas of each type may be right; what is wanted lies within."""
    regime, rule, mix = state.scaling.regimes.current, state.scaling.rule, state.scaling.fleet_mix
    if regime is None or state.wanted is None:
        return None
    doubt = max(doubt_of(settings.profile(kind, state)) for kind in range(len(settings.types)))
    upper_rps = regime.upper_rps(bin_s, RATE_Z)
    rates = max(2.0 * regime.rate_rps - upper_rps, 0.0) / (1.0 + doubt), upper_rps * (1.0 + doubt)
    ends: list[tuple[int, ...]]
    if rule is not None:
        line = rule.line
        needed = [math.ceil(line.workers_per_rps * rps + line.intercept - 1e-9) for rps in rates]
        ends = [(_allowed(settings, n),) for n in needed]
    elif mix is not None and mix.solved is not None and upper_rps > 0:
        need, units = mix.solved[0], mix.units / PARTS
        counts = [choose(replace(need, demand=units * rps / upper_rps)) for rps in rates]
        ends = [tuple(one.get(t.name, 0) for t in settings.types) for one in counts]
    else:
        return None
    return [(min(of), max(of)) for of in zip(*ends, state.wanted, strict=True)]


def doubt_of(profile: Profile) -> float:
    """By what share a replica may be slower or faster than its profile, at 90 %."""
    return RATE_Z * profile.residuals.spread
