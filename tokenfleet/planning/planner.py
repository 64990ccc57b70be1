"""The planner: finds the cheapest fleet that holds a target on a workload, and explains it.

For each worker type, a fluid bound starts a search on the recorded trace. The cheapest types are then
confirmed in resampled traces (other arrivals, other coefficients), until the lower bound of attainment meets
the target. A mix is taken where it is cheaper and holds as well. The rest explains the answer: one worker
fewer, what binds and when, the scaling rule, the scaling schedule, other policies, other targets.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import stdev
from typing import TypeVar

import numpy as np

from controlplane.errors import BadInput
from controlplane.types import SloClass
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.simulated.outcome import class_counts
from dataplane.simulated.simulate import Outcome
from tokenfleet.planning.classes import ClassOfPlan, part
from tokenfleet.planning.comparisons import (
    baselines,
    cost_by_slo,
    counts_around,
    demand_line,
    nearest_feasible,
    tier_worth,
)
from tokenfleet.planning.estimate import HOPELESS, Estimate, TooFew, look, too_few, verdict_on
from tokenfleet.planning.explain import Binding, binding, failing_rate, headroom, plateau
from tokenfleet.planning.fleet import Fleet, kind_fields, of_one_kind, parts_of
from tokenfleet.planning.mixes.cheapest import Mixed, cheapest_mix
from tokenfleet.planning.moves import Settled, refuse_policy, settled
from tokenfleet.planning.plan_file import Nearest, OneFewer, PassedOver, Uncertainty
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Candidate, Inputs, Plan, latency, one_fewer, uncertainty
from tokenfleet.planning.reuse import reuse_of
from tokenfleet.planning.schedule import Schedule, TraceClock, make_schedule, paid, waits
from tokenfleet.planning.search import Replayer, Search
from tokenfleet.planning.sizing import Sizing, confirm, passes_on_trace, past_hope, size_all, smallest
from tokenfleet.planning.standby import no_spares_do, stricter, with_spares
from tokenfleet.planning.threads import Threads, Watch
from tokenfleet.planning.traffic.replicates import Doubted
from tokenfleet.planning.traffic.sample import LONG, SAMPLED, Sampler
from tokenfleet.planning.verified import verified
from tokenfleet.traces.shape import Phase

R = TypeVar("R")

# Alternatives that are confirmed, the cheapest first. Dearer ones are sized on the recorded trace.
ALTERNATIVES = 1
DOUBT_REPLICATES = 6
_REASONS = 13  # parts of a plan's explanation
ON_TRACE_ALONE = "sized on the recorded trace alone"  # the note of such an alternative
STILL_TELLING = 0.5  # attainment below which a fleet misses too much to name a bottleneck


def make_plan(
    workload: Workload,
    worker_types: Sequence[WorkerType],
    request: PlanRequest,
    inputs: Inputs,
    threads: Threads,
    watch: Watch | None = None,
    *,
    explained: bool = True,
    scheduled: bool = False,
    replayer: Replayer | None = None,
    parts: Parts | None = None,
) -> Plan:
    """The plan for `workload`; with `explained` false only the fleet and its certainty (what-ifs).

    The fleet is the same then; worker types that cannot be cheaper are sized on the trace alone. `scheduled`:
    the schedule is made even so. `replayer` remembers replays; what-ifs of a family share it. `parts`: the
    known fleets of the classes by themselves. An infeasible request is a plan with a reason. Raises
    BadInput on an empty workload or no worker type.
    """
    if len(workload) == 0:
        raise BadInput(f"{inputs.trace}: no requests to plan for")
    if not worker_types:
        raise BadInput("plan: no kind of worker to plan with")
    parts = parts or Parts(worker_types, threads)
    request = strictest(request, inputs.classes)
    replayer = replayer or Replayer(draws=False)

    def serving(request: PlanRequest) -> Plan:
        search = Search.of(request, workload, worker_types, threads, watch, inputs.classes, replayer)
        refuse_policy(search)
        levels = None if inputs.assumed is None else inputs.assumed.levels
        search = replace(search, traffic=replace(search.traffic, sampler=_sampler(search), levels=levels))
        plan = _serving(Plan(request, inputs, search.types, None), search, explained, scheduled)
        return replace(plan, inputs=replace(inputs, phases=_phases(search))) if explained else plan

    plan = serving(request)
    if request.reclaims_per_h is not None and plan.best is not None:
        spared = with_spares(plan, request, workload)
        if spared is None:
            harder = serving(stricter(request))
            spared = with_spares(harder, request, workload) if harder.best else None
        plan = spared or no_spares_do(plan, request)
    if plan.schedule is not None and request.cold_start_s is not None:
        plan = replace(plan, paid=paid(plan.schedule.stretches, request.cold_start_s))
    return replace(plan, classes=_classes(plan, workload, parts)) if explained else plan


def _phases(search: Search) -> tuple[Phase, ...]:
    """The traffic phases; none where a trace was drawn or agents set the rate, which show no real ones."""
    is_real = search.traffic.levels is None and search.terms.agents is None
    return search.traffic.phases if is_real else ()


def strictest(request: PlanRequest, classes: Sequence[SloClass]) -> PlanRequest:
    """The request with the tightest class's targets, and the strictest one's attainment."""
    if not classes:
        return request
    tightest = min(classes, key=lambda one: one.slo.ttft_s)
    return replace(request, slo=tightest.slo, attainment=max(one.attainment for one in classes))


def _sampler(search: Search) -> Sampler | None:
    """The sampler of a long trace; None if it is replayed whole.

    So it is where requests share prefixes or wait for each other, or may wait for minutes: a window does not
    show that.
    """
    workload = search.workload
    if len(workload) <= LONG or not search.traffic.units.is_plain or waits(search):
        return None
    loosest_s = max(slo.tpot_s for slo in search.terms.slos)
    return Sampler(workload, search.may_miss, loosest_s, search.traffic.seed, SAMPLED)


class Parts:
    """The cheapest fleets of parts of the classes by themselves, each planned once."""

    def __init__(self, worker_types: Sequence[WorkerType], threads: Threads) -> None:
        self._worker_types, self._threads = worker_types, threads
        self._known: dict[tuple[frozenset[str], float | None], Fleet | None] = {}

    def fleet(
        self, workload: Workload, inputs: Inputs, request: PlanRequest, kept: Sequence[int]
    ) -> Fleet | None:
        """That of the classes `kept`, by their place; None where no fleet serves them."""
        classes = tuple(inputs.classes[c] for c in kept)
        key = frozenset(one.name for one in classes), request.reclaims_per_h
        if key not in self._known:
            some, of = part(workload, kept), replace(inputs, classes=classes)
            plan = make_plan(
                some, self._worker_types, request, of, self._threads, explained=False, parts=self
            )
            self._known[key] = None if plan.best is None else plan.best.fleet
        return self._known[key]


def _classes(plan: Plan, workload: Workload, parts: Parts) -> tuple[ClassOfPlan, ...]:
    """The outcome and cost of each class on the best fleet; nothing if there is only one."""
    best, inputs = plan.best, plan.inputs
    if best is None or best.estimate is None or len(inputs.classes) < 2:
        return ()
    binds = plan.binding.detail.slo_class if plan.binding else None
    everyone = range(len(inputs.classes))
    return tuple(
        ClassOfPlan(
            inputs.classes[c],
            *best.classes[c],
            best.estimate.classes[c],
            without=parts.fleet(workload, inputs, plan.request, [i for i in everyone if i != c]),
            alone=parts.fleet(workload, inputs, plan.request, [c]),
            binds=inputs.classes[c].name == binds,
            runs_on=best.runs_on[c],
        )
        for c in everyone
    )


def _serving(blank: Plan, search: Search, explained: bool, scheduled: bool) -> Plan:
    """The plan of the fleet that serves; what spot workers need beyond it comes later."""
    search.watch.stage("sizing each worker type on the recorded trace", 0.0)
    sizings = size_all(search)
    possible = sorted((s for s in sizings if s.workers is not None), key=lambda s: s.cost)
    passed_over = tuple(
        PassedOver(**kind_fields(s.worker_type), reason=s.reason) for s in sizings if s.workers is None
    )
    blank = replace(blank, passed_over=passed_over)
    if possible and (few := too_few(search)):
        return _too_short(blank, search, few, possible)
    search.watch.stage("confirming in resampled traces", 0.2)
    confirm_cheapest(search, possible, 1)
    if explained:  # what finds phases takes a second to load, and the mixes leave a core idle
        search.threads.begin(lambda: _phases(search))
    search.watch.stage("looking for a cheaper mix", 0.45)
    single = min((s for s in possible if s.confirmed), key=lambda s: s.cost, default=None)
    mixed, mixes = cheapest_mix(search, sizings, single)
    blank, winner = replace(blank, mixes=mixes), _as_sizing(search, mixed, single) if mixed else single
    if winner is None:
        reasons = "; ".join(f"{s.worker_type.name}: {s.reason}" for s in possible if s.reason)
        blank = replace(blank, reason=reasons, alternatives=_others(search, possible, None))
        return _infeasible(blank, search, sizings)
    return _of_winner(blank, search, possible, winner, explained, scheduled)


def _of_winner(
    plan: Plan, search: Search, possible: Sequence[Sizing], winner: Sizing, explained: bool, scheduled: bool
) -> Plan:
    """The plan of the cheapest fleet, proven on a long trace, with its reasons or its schedule as asked."""
    count = winner.confirmed or 0
    winner.tell_tried()
    best = _candidate(search, winner.mix or winner.fleet(count), winner.sure[count])
    if explained:
        search.watch.found(best.fleet)
    plan = replace(plan, best=best)
    if search.traffic.sampler is not None and explained:
        search.watch.stage("replaying the whole trace", 0.48)
        plan = _proven(plan, search, winner)
        if plan.best is None:
            return plan
    plan, answer = _with_moves(plan, search, winner, explained)
    plan = replace(plan, on_trace=dict(winner.on_trace), sure=dict(winner.sure))
    if explained:
        return _explained(plan, search, answer, winner, possible)
    plan = replace(plan, alternatives=_others(search, possible, winner))
    if scheduled:
        return replace(plan, schedule=_schedule(plan, answer.explains(search), winner))
    return plan


def _with_moves(plan: Plan, search: Search, winner: Sizing, explained: bool) -> tuple[Plan, Settled]:
    """The plan with its answer judged with moves; of what-ifs the answer stays as it was found."""
    best = plan.best
    assert best is not None
    assert best.estimate is not None
    search.watch.stage("judging the answer with moves", 0.49)
    answer = settled(search, winner, best.fleet, best.estimate, is_judged=explained)
    if answer.search is not search and search.traffic.sampler is None:
        best = _candidate(answer.search, answer.fleet, answer.estimate)
    elif answer.search is not search:  # replayed whole without moves, which no stream has
        best = replace(best, estimate=answer.estimate)
    return replace(plan, best=best, moves=answer.worth), answer


def _proven(plan: Plan, search: Search, winner: Sizing) -> Plan:
    """The plan with its fleet replayed on the whole of a long trace, and enough workers for that."""
    assert plan.best is not None
    best, sampled = verified(search, winner, plan.best)
    if best is None:
        reason = (
            f"{plan.best.fleet.label} met the target in samples; replayed whole, {sampled.full_replay:.4f} do"
        )
        return replace(plan, best=None, reason=reason, sampled=sampled)
    if sampled.added_workers:
        verdict = winner.sure[best.fleet.workers] = _verdict(search, best.fleet)
        best = replace(best, estimate=verdict)
    return replace(plan, best=best, sampled=sampled)


def _schedule(plan: Plan, search: Search, winner: Sizing) -> Schedule | None:
    """The schedule of a fleet; None for agents, whose sessions know no time of day.

    Nor is there one for work that waits where requests share prefixes or wait for each other.
    """
    if search.terms.agents is not None or (waits(search) and not search.traffic.units.is_plain):
        return None
    clock = TraceClock.of(plan.inputs.clock_start_s, plan.inputs.rate_scale)
    return make_schedule(search, winner, winner.fleet(winner.confirmed or 0), clock)


def confirm_cheapest(search: Search, possible: Sequence[Sizing], kinds: int) -> None:
    """Confirm worker types until the cheapest `kinds` of them are known, or none is left.

    Next is the type whose next count costs least, up to the count at which another type's costs less. So no
    type is confirmed that is dearer than one that is not.
    """
    wanted = kinds - sum(s.confirmed is not None for s in possible)
    left = [(s.fleet(s.next_count).cost, i) for i, s in enumerate(possible) if not (s.confirmed or s.reason)]
    heapq.heapify(left)
    while left and wanted > 0:
        i = heapq.heappop(left)[1]
        sizing = possible[i]
        most = None if not left else _upto(search, sizing, left[0][0])
        if confirm(search, sizing, most):
            heapq.heappush(left, (sizing.fleet(sizing.next_count).cost, i))
        wanted -= sizing.confirmed is not None


def _upto(search: Search, sizing: Sizing, cost: tuple[float, int, int]) -> int:
    """The most workers of a type that cost no more, or else its next count."""
    count, most = sizing.next_count, past_hope(sizing, search.workload)
    while count < most and sizing.fleet(count + 1).cost <= cost:
        count += 1
    return count


def _explained(
    plan: Plan, still: Search, answer: Settled, winner: Sizing, possible: Sequence[Sizing]
) -> Plan:
    """The plan with its reasons and its neighbourhood; `still`: the search that found it, without moves."""
    best = plan.best
    assert best is not None
    begun = itertools.count()
    search = answer.explains(still)
    alone = still if best.fleet.workers <= 2 else answer.search  # a single worker has no moves
    rough, bound = (s.roughly() if s.traffic.sampler is not None else s for s in (search, still))

    def begin(text: str, explains: Callable[[], R]) -> Callable[[], R]:
        def told() -> R:
            search.watch.stage(text, 0.5 + 0.5 * next(begun) / _REASONS)
            return explains()

        return search.threads.begin(told)

    def around() -> dict[int, float]:
        counts = [n for n in counts_around(winner) if n not in winner.on_trace]
        hopeless = None if search.traffic.sampler is None else HOPELESS  # a long trace's take longest
        seen = search.threads.map(lambda n: search.replay(winner.fleet(n), most_missed=hopeless), counts)
        return winner.on_trace | {n: o.attainment for n, o in zip(counts, seen, strict=True) if o.complete}

    # Side by side, what takes longest first.
    hit_rates = best.estimate.hit_rates if best.estimate else ()
    grow = "growing the sessions"
    reuse = begin(grow, lambda: reuse_of(search, best.fleet, hit_rates))
    next_best = begin("confirming the next best", lambda: _next_best(still, possible, winner))
    line = begin("fitting the scaling rule", lambda: demand_line(bound, winner))
    costed = begin("pricing other targets", lambda: cost_by_slo(bound, winner))
    one_fewer = begin("showing that one fewer fails", lambda: _one_fewer(alone, winner))
    doubt = begin("splitting the uncertainty", lambda: _doubt(search.roughly(), best.fleet))
    others = begin("comparing policies", lambda: baselines(rough, winner))
    tier = begin("valuing KV offload", lambda: tier_worth(rough, winner))
    room = begin("looking for the headroom", lambda: headroom(rough, best.fleet, winner.missed))
    bind = begin("finding the bottleneck", lambda: _binding(rough, winner))
    schedule = begin("making the scaling schedule", lambda: _schedule(plan, search, winner))
    surer = begin("confirming one more", lambda: _one_more(search, winner))
    on_trace = begin("replaying the counts around it", around)()
    plan = replace(
        plan,
        alternatives=next_best(),
        one_fewer=one_fewer(),
        doubt=doubt(),
        binding=bind(),
        headroom=room(),
        plateau=plateau(search, winner.worker_type.profile, on_trace, best.fleet.workers),
        line=line(),
        schedule=schedule(),
        baselines=others(),
        reuse=reuse(),
        tier=tier(),
        costed=costed(),
        on_trace=dict(sorted(on_trace.items())),
        sure=dict(sorted((winner.sure | surer()).items())),
    )
    search.watch.stage("done", 1.0)
    return plan


def _as_sizing(search: Search, mixed: Mixed, single: Sizing | None) -> Sizing:
    """A mix to be explained like any fleet: a count of workers is taken in its proportions."""
    count = mixed.fleet.workers
    single = single or Sizing(mixed.fleet.groups[0].worker_type)
    sizing = Sizing(single.worker_type, fluid=single.fluid, mix=mixed.fleet, confirmed=count)
    sizing.workers = smallest(lambda n: passes_on_trace(search, sizing, n), 1, count, count)
    sizing.sure[count], sizing.missed = mixed.estimate, mixed.missed
    return sizing


def _one_fewer(search: Search, winner: Sizing) -> OneFewer:
    """The fleet less one worker (of a mix: in its proportions), and which test it fails."""
    count = (winner.confirmed or 1) - 1
    if count < winner.fewest:
        fails = "the load alone needs more" if count else "none would be left"
        return one_fewer(0.0, None, fails, workers=count)
    fleet = winner.fleet(count)
    on_trace = search.replay(fleet).attainment
    verdict = winner.sure.get(count)
    if verdict is None:
        verdict = winner.sure[count] = _verdict(search, fleet)
    if on_trace < search.request.attainment:
        fails = "attainment on the recorded trace is below the target"
    elif verdict.expected < search.request.attainment:
        fails = "averaged over resampled traces, attainment is below the target"
    elif verdict.low < search.request.attainment:
        fails = f"its lower bound at confidence {search.request.confidence:g} is below the target"
    else:
        fails = "it holds too; the mix was chosen for its price, not its size"
    return one_fewer(on_trace, verdict, fails, workers=count, fleet=parts_of(fleet))


def _one_more(search: Search, winner: Sizing) -> dict[int, Estimate]:
    more = winner.confirmed + 1 if winner.confirmed else 1
    return {more: winner.sure.get(more) or _verdict(search, winner.fleet(more))}


def _binding(search: Search, winner: Sizing) -> Binding:
    """The binding constraint at the largest fleet that fails the trace.

    Where that fleet is lost altogether (or there is none), easing a constraint would show nothing. Then the
    smallest fleet that does meet the target is made to fail by raising the rate.
    """
    enough = winner.workers or winner.fewest
    if winner.on_trace.get(enough - 1, 0.0) >= STILL_TELLING:
        return binding(search, winner.fleet(enough - 1))
    fleet = winner.fleet(enough)
    return binding(search, fleet, *failing_rate(search, fleet))


def _doubt(search: Search, fleet: Fleet) -> Uncertainty:
    """The scatter of attainment from each source of uncertainty alone."""

    def scatter(source: Doubted) -> float:
        def one(replicate: int) -> float:
            return search.replay(fleet, replicate, doubted=frozenset((source,))).attainment

        return stdev(search.threads.map(one, range(1, DOUBT_REPLICATES + 1)))

    drift = search.traffic.drift
    from_drift = scatter("drift") if drift.told != "steady" else 0.0
    return uncertainty(scatter("arrivals"), from_drift, scatter("coefficients"), drift.told, drift.of_rate)


def _next_best(search: Search, possible: Sequence[Sizing], winner: Sizing) -> tuple[Candidate, ...]:
    """The alternatives, the cheapest of them confirmed where replays do not take long."""
    if not search.is_slow:
        confirm_cheapest(search, possible, ALTERNATIVES + any(s is winner for s in possible))
    return _others(search, possible, winner)


def _others(search: Search, possible: Sequence[Sizing], winner: Sizing | None) -> tuple[Candidate, ...]:
    """Every other worker type that meets the target at least on the trace, cheapest first."""
    rest = [s for s in possible if s is not winner and s.answer is not None]

    def one(sizing: Sizing) -> Candidate:
        fleet = sizing.answer
        assert fleet is not None
        sure = sizing.sure.get(fleet.workers) if sizing.confirmed else None
        note = sizing.reason if sizing.confirmed or sizing.reason else ON_TRACE_ALONE
        return _candidate(search, fleet, sure, note)

    return tuple(sorted(search.threads.map(one, rest), key=lambda c: (c.estimate is None, c.fleet.cost)))


def _candidate(search: Search, fleet: Fleet, verdict: Estimate | None, note: str = "") -> Candidate:
    outcome: Outcome = search.replay(fleet)
    weight = outcome.workload.weight
    counts = class_counts(outcome.met, outcome.workload)[0].round().astype(int)
    return Candidate(
        fleet,
        outcome.attainment,
        verdict,
        latency(outcome.ttft_s, weight),
        latency(outcome.tpot_s, weight),
        outcome.utilisation if weight is None else math.nan,
        note,
        outcome.prefix_hit_rate,
        tuple(zip(counts.tolist(), outcome.class_attainments.tolist(), strict=True)),
        _runs_on(fleet, outcome),
    )


def _runs_on(fleet: Fleet, outcome: Outcome) -> tuple[tuple[tuple[str, float], ...], ...]:
    """The shares of each class's requests by the worker type that served them, largest first."""
    kinds = [group.worker_type for group in fleet.groups]
    engines = [
        g.workers * (1 if g.worker_type.ranks is None else g.worker_type.ranks.count) for g in fleet.groups
    ]
    served, workload = outcome.worker >= 0, outcome.workload
    kind = np.repeat(np.arange(len(kinds)), engines)[outcome.worker[served]]
    counts = np.zeros((len(workload.slo_classes), len(kinds)))
    weight = 1.0 if workload.weight is None else workload.weight[served]
    np.add.at(counts, (workload.slo_class[served], kind), weight)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-9)
    return tuple(
        tuple((kinds[k].name, float(row[k])) for k in np.argsort(-row, kind="stable") if row[k] > 0)
        for row in shares
    )


def _verdict(search: Search, fleet: Fleet) -> Estimate:
    seen = look(search, fleet, range(1, DOUBT_REPLICATES + 1))
    return verdict_on(seen, search.request, search.terms.asked)


def _infeasible(plan: Plan, search: Search, sizings: Sequence[Sizing]) -> Plan:
    """The plan without a fleet: why, and the nearest target that can be met."""
    search.watch.stage("looking for the nearest feasible target", 0.5)
    near = nearest_feasible(search, sizings)
    best = max(sizings, key=lambda s: (s.ceiling, max(s.on_trace.values(), default=0.0)))
    reason = plan.reason or no_worker_fits(plan.request, sizings) or f"{best.worker_type.name}: {best.reason}"
    search.watch.stage("done", 1.0)
    return replace(plan, reason=reason, nearest=near)


def no_worker_fits(request: PlanRequest, sizings: Sequence[Sizing]) -> str | None:
    """The reason that the limits allow too few workers, with the flag to raise; None if they allow enough."""
    for sizing in sizings:
        limit = request.most_workers(sizing.worker_type)
        if limit is None or limit >= max(sizing.fluid, sizing.fewest):
            return None
    fewest = [of_one_kind(s.worker_type, max(s.fluid, s.fewest), 0.5) for s in sizings]
    flag = request.limit_text(sizings[0].worker_type)
    by_gpus = flag.startswith("--max-gpus")
    least_fleet = min(fewest, key=lambda fleet: fleet.cost[1:] if by_gpus else fleet.cost[:2])
    types = [sizing.worker_type for sizing in sizings]
    least_type = min(types, key=lambda kind: kind.gpus if by_gpus else kind.usd_per_h or math.inf)
    cents = math.ceil(100 * (least_fleet.usd_per_hour or 0.0))
    size = (
        f"{least_type.gpus} GPU{'s' * (least_type.gpus > 1)}"
        if by_gpus
        else f"${least_type.usd_per_h or 0.0:,.2f}/h"
    )
    needs = f"{least_fleet.gpus} GPU{'s' * (least_fleet.gpus > 1)}" if by_gpus else f"${cents / 100:,.2f}/h"
    least = f"{least_fleet.gpus}" if by_gpus else f"{cents / 100:g}"
    some = any(request.most_workers(kind) for kind in types)
    return (
        f"{flag} allows {'too few workers' if some else 'no worker'}. The smallest that holds this model is"
        f" {least_type.name} ({size}). The load needs at least {needs}: set {flag.split()[0]} {least} or more"
    )


def _too_short(plan: Plan, search: Search, few: TooFew, possible: Sequence[Sizing]) -> Plan:
    """A trace too short to show the target, whatever the fleet."""
    fleet = possible[0].answer
    assert fleet is not None
    return replace(
        plan,
        reason=few.reason,
        alternatives=(_candidate(search, fleet, None, ON_TRACE_ALONE),),
        nearest=Nearest(attainment=few.showable),
    )
