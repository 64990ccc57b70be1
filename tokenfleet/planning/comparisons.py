"""The answer and its neighbours: other rates, other policies, other targets.

Other rates are Aladdin's Eq 7: workers as a line in the arrival rate, N = ⌈k5·r + c5⌉, learned from
simulation. Where agents run the sessions, the line is in their number. The trace is replayed at several
rates. At each, attainment crosses the target between the last count that fails and the first that passes. The
crossing is read there on the logarithm of the share of misses. A count holds for the rate of the busiest
traffic phase, which decides it: a fleet that scales itself reads the line at the rate of the moment.

A target that cannot be met has a nearest one that can, found by loosening it as little as possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from controlplane.placement.policies import PlacementSettings
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from tokenfleet.planning.explain import hardest, holds_in
from tokenfleet.planning.fleet import Fleet, fleet_fields, of_one_kind, totals
from tokenfleet.planning.mixes.bounds import ceiling, fluid_workers, nearest_possible, nearest_session_s
from tokenfleet.planning.plan_file import AgentsLine, Costed, KvOffload, Nearest, OtherPolicy, ScalingRule
from tokenfleet.planning.search import Search, missed
from tokenfleet.planning.sizing import (
    PER_REQUEST,
    Sizing,
    broken_off,
    confirm,
    passes_on_trace,
    size_on_trace,
    smallest,
)

RATE_SCALES = (0.5, 1.0, 1.5, 2.0)
FOR_FEW = (2.0, 5.0, 8.0, 12.0)  # rates for a fleet of one or two, which says little about a slope
OF_FEW_AGENTS = (1.5, 2.0, 3.0)  # with them grow their sessions, and many take long to replay
FEWEST_POINTS = 3  # two are on a line whatever they are
_BROKEN_OFF = 40.0  # times the misses allowed, where a trial of another rate ends
BASELINES = ("jsq", "p2c", "round-robin")
SLO_SCALES = (0.7, 0.85, 1.0, 1.25, 1.6, 2.0)
_HOPELESS = 3  # times the answer's count, where the search for a baseline ends
# Each step looser than the one before by about a tenth; the last is a hundred times what was asked.
LOOSER = tuple(1.1**i for i in range(49))
JudgedOn = Literal["hardest resampled traces", "recorded trace"]
Which = tuple[bool, bool, bool]  # of the targets TTFT, TPOT and time of sessions
AROUND = 2  # counts on either side of the answer that are drawn
_PLENTY = 8  # times the fluid bound: as good as endless workers


def demand_line(search: Search, sizing: Sizing) -> ScalingRule | AgentsLine | None:
    """The line for one worker type on this trace; None where too few rates give a point."""
    assert sizing.workers is not None
    agents = search.terms.agents
    rate = busiest_rps(search) if agents is None else float(agents)
    scales: tuple[float, ...] = RATE_SCALES
    if sizing.workers <= sizing.fewest + 1:
        scales = FOR_FEW if agents is None else OF_FEW_AGENTS
    counts = search.threads.map(lambda scale: crossing(search, sizing, scale), scales)
    points = tuple((rate * scale, n) for scale, n in zip(scales, counts, strict=True) if n is not None)
    if len(points) < FEWEST_POINTS or rate <= 0:
        return None
    x, y = (np.array(column) for column in zip(*points, strict=True))
    slope, intercept = np.polyfit(x, y, 1)
    r2 = float(np.corrcoef(x, y)[0, 1]) ** 2 if np.ptp(y) > 0 else 1.0
    line: dict[str, Any] = {
        "intercept": float(intercept),
        "r2": r2,
        "points": [list(point) for point in points],
        "mean_prompt_tokens": float(search.workload.prompt_tokens.mean()),
        "mean_output_tokens": float(search.workload.output_tokens.mean()),
    }
    if agents is None:
        return ScalingRule(workers_per_rps=float(slope), **line)
    return AgentsLine(workers_per_agent=float(slope), **line)


def busiest_rps(search: Search) -> float:
    """The highest rate of a traffic phase that has more requests than may be late; at least the mean."""
    requests = len(search.workload)
    few = search.may_miss * requests
    rates = [phase.rate_rps for phase in search.traffic.phases if few < phase.requests < requests]
    return max([search.workload.rate_rps, *rates])


def crossing(search: Search, sizing: Sizing, rate_scale: float) -> float | None:
    """Workers, with a fraction, at which `rate_scale` times the traffic just meets the target.

    None where the smallest fleet there is meets it already: how much smaller it could be is not seen.
    """
    assert sizing.workers is not None
    allowed, most = 1.0 - search.request.attainment, search.may_miss
    stop = min(_BROKEN_OFF * most, most + 0.2)  # the smallest fleets take longest to fail
    if search.is_slow:
        stop = broken_off(search)
    misses: dict[int, float] = {}  # their share by workers; infinite where the trial was broken off

    def passes(workers: int) -> bool:
        outcome = search.replay(sizing.fleet(workers), growth=rate_scale, most_missed=stop)
        share = missed(outcome) / outcome.workload.requests
        misses[workers] = share if outcome.complete else math.inf
        return misses[workers] <= allowed

    fewest = sizing.fewest
    guess = max(round(sizing.workers * rate_scale), fewest)
    count = smallest(passes, fewest, guess, 4 * guess + 8)
    if count is None or count == fewest:
        return None
    if count - 1 not in misses or not math.isfinite(misses[count - 1]):
        return float(count)
    half = 0.5 / len(search.workload)  # of a request, for none that is missed
    few, many, just = (math.log(share + half) for share in (misses[count - 1], misses[count], allowed))
    share = (few - just) / (few - many) if few > many else 1.0
    return count - 1 + min(max(share, 0.0), 1.0)


def baselines(search: Search, sizing: Sizing) -> tuple[OtherPolicy, ...]:
    """The needs of the usual policies, sized like `sizing` on the recorded trace. They know no headroom."""
    assert sizing.workers is not None
    plain = search.on(settings=PlacementSettings())
    cap = _HOPELESS * sizing.workers + 2

    def one(policy: str) -> OtherPolicy:
        others = plain.on(policy=policy)
        fleet, hit_rate = _fewest(others, sizing, cap), None
        if fleet is not None and search.workload.prefixes is not None:
            hit_rate = others.replay(fleet).prefix_hit_rate
        return OtherPolicy(policy=policy, **totals(fleet), tried_up_to=cap, prefix_hit_rate=hit_rate)

    return tuple(search.threads.map(one, [p for p in BASELINES if p != search.terms.policy]))


def tier_worth(search: Search, sizing: Sizing) -> KvOffload | None:
    """The worth of the fleet's host memory; None where it keeps nothing."""
    answer = sizing.answer
    assert sizing.workers is not None
    assert answer is not None
    keeps = next((p for g in answer.groups if (p := g.worker_type.profile).host_bytes), None)
    if keeps is None:
        return None
    cap = _HOPELESS * sizing.workers + 2
    mix = None if sizing.mix is None else _without_tier(sizing.mix)
    bare = replace(sizing, worker_type=_bare(sizing.worker_type), mix=mix)
    with_tier, without = search.replay(answer), search.replay(_without_tier(answer))
    fleet, fewest = sizing.fleet(sizing.workers), _fewest(search, bare, cap)
    usd, usd_without = fleet.usd_per_hour, None if fewest is None else fewest.usd_per_hour
    return KvOffload(
        gib=keeps.host_bytes / 2**30,
        gb_per_s=keeps.load_bytes_per_s / 1e9,
        prefix_hit_rate=with_tier.prefix_hit_rate or 0.0,
        loaded=with_tier.host_hit_rate or 0.0,
        prefix_hit_rate_without=without.prefix_hit_rate or 0.0,
        workers=fleet.workers,
        usd_per_hour=usd,
        workers_without=None if fewest is None else fewest.workers,
        usd_per_hour_without=usd_without,
        host_usd_per_hour=fleet.host_usd_per_hour,
        saved_usd_per_hour=None if usd is None or usd_without is None else usd_without - usd,
        tried_up_to=cap,
    )


def _bare(worker_type: WorkerType) -> WorkerType:
    """The type without host memory for KV, nor its price."""
    usd_per_h = worker_type.usd_per_h
    return replace(
        worker_type,
        known_profile=worker_type.profile.with_host_memory_of(None),
        usd_per_h=None if usd_per_h is None else usd_per_h - worker_type.host_usd_per_h,
        host_usd_per_h=0.0,
    )


def _without_tier(fleet: Fleet) -> Fleet:
    return Fleet(tuple(replace(group, worker_type=_bare(group.worker_type)) for group in fleet.groups))


def cost_by_slo(search: Search, sizing: Sizing) -> tuple[Costed, ...]:
    """The fleet's size as both targets are eased and tightened, judged where the answer missed most.

    Looser targets never take more workers, so each search ends where the one before it did. Where replays
    take long, all targets are sized on the recorded trace alone, the one that was asked for among them.
    """
    assert sizing.workers is not None
    on_trace = search.is_slow or sizing.confirmed is None
    asked = sizing.workers if on_trace else sizing.confirmed
    assert asked is not None
    most = 4 * asked + 4
    numbers: list[int] = []
    judged_on: JudgedOn = "recorded trace"
    if not on_trace:
        numbers, judged_on = hardest(search, sizing.missed), "hardest resampled traces"

    def holds(scale: float, workers: int) -> bool:
        eased, fresh = search.eased(scale, scale), replace(sizing, on_trace={}, fleets={})
        # What fails does so at once, in the hardest.
        return holds_in(eased, fresh.fleet(workers), numbers) and passes_on_trace(eased, fresh, workers)

    def count(scale: float, low: int, high: int) -> int | None:
        eased = search.eased(scale, scale)
        if ceiling(sizing.worker_type.profile, eased.outline, eased) < search.request.attainment:
            return None
        return smallest(lambda n: holds(scale, n), low, low if scale < 1.0 else high, high)

    counts: dict[float, int | None] = {1.0: asked}
    strictest: int | None = None
    for scale in sorted(s for s in SLO_SCALES if s < 1.0):
        strictest = count(scale, asked, most if strictest is None else strictest - 1) or strictest
        counts[scale] = strictest
    enough = asked
    for scale in sorted(s for s in SLO_SCALES if s > 1.0):
        enough = count(scale, sizing.fewest, enough - 1) or enough
        counts[scale] = enough
    return tuple(
        Costed(
            scale=scale,
            on=judged_on,
            **asdict(search.eased(scale, scale).terms.slo),
            **totals(None if (n := counts[scale]) is None else sizing.fleet(n)),
        )
        for scale in SLO_SCALES
    )


def _fewest(search: Search, sizing: Sizing, cap: int) -> Fleet | None:
    """The smallest fleet of the sizing's kind on the trace, searched outwards from the answer's count."""
    assert sizing.workers is not None
    fresh = Sizing(sizing.worker_type, prefill_share=sizing.prefill_share, mix=sizing.mix)
    workers = smallest(lambda n: passes_on_trace(search, fresh, n), sizing.fewest, sizing.workers, cap)
    return None if workers is None else fresh.fleet(workers)


def counts_around(sizing: Sizing) -> Sequence[int]:
    """Worker counts worth drawing around the answer."""
    assert sizing.workers is not None
    count = sizing.confirmed or sizing.workers
    return range(max(min(count - AROUND, sizing.workers - 1), sizing.fewest), count + AROUND + 1)


def nearest_feasible(search: Search, sizings: Sequence[Sizing]) -> Nearest | None:
    """The least loosened target of all worker types, the cheaper fleet if equal; None if nothing helps."""
    targets = search.threads.map(lambda sizing: nearest_of_kind(search, sizing), sizings)
    return min((n for n in targets if n is not None), key=lambda n: n[0], default=(None, None))[1]


def nearest_of_kind(
    search: Search, sizing: Sizing
) -> tuple[tuple[float, tuple[float, int, int]], Nearest] | None:
    """The rank and the nearest target of one worker type, within the limits and at the confidence.

    The first step loosens only the targets that a lone request or session breaks. The second loosens the time
    of sessions. Where that is not enough, the third loosens every target.
    """
    target, session_s, profile = search.terms.slo, search.terms.session_s, sizing.worker_type.profile
    base = nearest_possible(profile, search.outline, target, search.request.attainment)
    if search.terms.classes:
        base = target  # the targets of all classes are loosened as much as each other
    possible = search.on(slo=base, session_s=nearest_session_s(search, profile))
    of_sessions = session_s is not None
    broken = (base.ttft_s > target.ttft_s, base.tpot_s > target.tpot_s, possible.terms.session_s != session_s)
    limit = search.request.most_workers(sizing.worker_type)
    fewest = 2 if sizing.worker_type.is_split else 1
    if limit is not None and limit < fewest:
        return None
    bound = fluid_workers(possible, sizing.worker_type)
    plenty = max(min(_PLENTY * bound, PER_REQUEST * len(search.workload)), 2 * fewest)
    fleet = of_one_kind(
        sizing.worker_type, plenty if limit is None else min(limit, plenty), sizing.prefill_share or 0.5
    )
    for which in dict.fromkeys((broken, (False, False, of_sessions), (True, True, of_sessions))):
        first = _first_step(possible, fleet, which) if any(which) else None
        if first is None:
            continue
        sized: dict[int, Sizing] = {}

        def holds(step: int, which: Which = which, sized: dict[int, Sizing] = sized) -> bool:
            eased = _eased(possible, which, step)
            sized[step] = size_on_trace(eased, sizing.worker_type)
            if sized[step].workers is not None:
                confirm(eased, sized[step])
            return sized[step].confirmed is not None

        # What holds on the recorded trace may not hold in resampled ones: looser still, it does.
        step = smallest(holds, first, first, len(LOOSER) - 1)
        if step is not None:
            eased, count = _eased(possible, which, step), sized[step].confirmed or 0
            slo, took_s = eased.terms.slo, eased.terms.session_s
            looser = max(slo.ttft_s / target.ttft_s, slo.tpot_s / target.tpot_s)
            if took_s is not None and session_s is not None:
                looser = max(looser, took_s / session_s)
            fleet, estimate = sized[step].fleet(count), sized[step].sure[count]
            return (looser, fleet.cost), Nearest(
                **asdict(slo),
                session_s=took_s,
                **fleet_fields(fleet),
                attainment=estimate.expected,
                low=estimate.low,
                looser=looser,
            )
    return None


def _first_step(search: Search, fleet: Fleet, which: Which) -> int | None:
    """The least loosening of the targets in `which` that the fleet meets on the trace."""
    allowed = search.may_miss

    def passes(step: int) -> bool:
        return search.meets(_eased(search, which, step).replay(fleet, most_missed=allowed))

    return smallest(passes, 0, 1, len(LOOSER) - 1)


def _eased(search: Search, which: Which, step: int) -> Search:
    """The same with the targets in `which` loosened by a step."""
    slo, session_s, times = search.terms.slo, search.terms.session_s, LOOSER[step]
    if which[2] and session_s is not None:
        search = search.on(session_s=_rounded_up(session_s * times))
    if search.terms.classes:
        return search.eased(times, times) if which[0] or which[1] else search
    ttft_s = _rounded_up(slo.ttft_s * times) if which[0] else slo.ttft_s
    tpot_s = _rounded_up(slo.tpot_s * times) if which[1] else slo.tpot_s
    return search.on(slo=Slo(ttft_s, tpot_s))


def _rounded_up(seconds: float) -> float:
    """Two figures, so that the answer is one a person would type."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    # Through text, so that 0.31 is 0.31 and not 0.31000000000000005.
    return float(f"{math.ceil(seconds / unit - 1e-9) * unit:.12g}")
