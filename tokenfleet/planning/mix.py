"""Other fleets than the cheapest of one worker type: a mix of types, and one with standby workers on spot.

**A mix** is taken where it is cheaper than any one worker type. On this trace one worker of type v carries
the share 1/N_v. N_v is the count (with a fraction) at which that type alone just meets the target. The
integer program picks the cheapest counts whose shares add up to one. The pick is then replayed like any
fleet, since types that serve one stream together carry more than the sum of their shares, or less. A pick
that fails is asked to carry more, until it passes or is no longer cheaper.

**A pool of the classes' types**: shares like these say what a type carries of all classes together. A type
that is cheap for some classes may carry nothing of the others. So with several classes, the types that each
class would have by itself form one fleet, up to twice as many of each as these fleets have together. Of all
such fleets cheaper than the best known, the middle one by dollars is replayed. If it holds, dearer ones are
left out. If it fails, those that are a part of it are left out. This ends when none is left.

**Standby workers**: on spot workers a plan is its serving fleet with the standby workers that it needs, and
its cost and attainment after reclaims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import Infeasible
from controlplane.scaler.mix import MixQuestion, MixSettings, cheapest
from controlplane.scaler.weights import Weights
from controlplane.worker_type import WorkerGroup, WorkerType
from controlplane.workload import Workload
from tokenfleet.planning.estimate import Estimate, Trial
from tokenfleet.planning.fleet import Fleet, StandbyWorkers, spares_for
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan, SmallerFleet
from tokenfleet.planning.schedule import Schedule, ScheduleInterval
from tokenfleet.planning.search import Search
from tokenfleet.planning.sizing import Sizing

MORE = 1.06  # demand grows by this much after each mix that fails
TRIES = 3
POOL_TRIES = 24  # fleets of the classes' kinds that are replayed at most
LISTED = 20_000  # of them that are compared by price; of larger ones counts are passed over
LEFT_TO_RECLAIMS = 0.5  # of the allowed misses, where the cheapest fleet leaves too few


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mix that meets the target at the asked confidence, cheaper than the fleet it was held against."""

    fleet: Fleet
    estimate: Estimate


def cheaper_mix(search: Search, sizings: Sequence[Sizing], best: Fleet) -> Mixed | None:
    """A verified mix cheaper than `best`, or None. Split fleets are not mixed."""
    usable = [s for s in sizings if s.workers is not None and not s.worker_type.is_split]
    if len(usable) < 2:
        return None
    types = tuple(s.worker_type for s in usable)
    shares = {s.worker_type.name: 1.0 / fraction_needed(s, search.question) for s in usable}
    limits = _limits(search.question, types)
    demand, tried = 1.0, list[Fleet]()
    for _ in range(TRIES):
        try:
            counts = cheapest(MixQuestion(types, Weights(types[0].name, shares), demand, limits))
        except Infeasible:
            return None
        mix = _of(types, [counts.get(t.name, 0) for t in types])
        if not mix.cost < best.cost:
            return None
        if len(counts) > 1 and mix not in tried:
            tried.append(mix)
            if mixed := _holding(search, mix):
                return mixed
        demand *= MORE
    return None


def _limits(question: PlanRequest, types: Sequence[WorkerType]) -> MixSettings:
    """The question's limits; a budget holds where all prices are known."""
    is_priced = all(t.usd_per_h is not None for t in types)
    return MixSettings(
        max_gpus=question.max_gpus, budget_usd_per_h=question.budget_usd_per_h if is_priced else None
    )


def cheaper_pool(search: Search, apart: Sequence[Fleet], best: Fleet | None) -> Mixed | None:
    """The cheapest verified fleet of the types in `apart`, the classes' own; None where `best` is no dearer.

    Split fleets are not mixed. `best` is None where no fleet is known that holds.
    """
    groups = [group for fleet in apart for group in fleet.groups]
    kinds = list({group.worker_type.name: group.worker_type for group in groups}.values())
    if len(kinds) < 2 or any(kind.is_split for kind in kinds):
        return None
    sums = np.array([sum(g.workers for g in groups if g.worker_type.name == kind.name) for kind in kinds])
    counts = _cheaper(kinds, 2 * sums, best, search.question)
    found: Mixed | None = None
    for _ in range(POOL_TRIES):
        if len(counts) == 0:
            break
        # The most of every kind that the middle of the dollars buys.
        upto = counts[: (len(counts) + 1) // 2]
        tried = upto[np.lexsort((np.arange(len(upto)), (upto / sums).min(axis=1)))[-1]]
        mixed = _holding(search, _of(kinds, tried.tolist()))
        if mixed is None:
            counts = counts[(counts > tried).any(axis=1)]
        else:
            found, counts = mixed, counts[: int((counts == tried).all(axis=1).argmax())]
    return found


def _cheaper(
    kinds: Sequence[WorkerType], most: NDArray[np.int64], best: Fleet | None, question: PlanRequest
) -> NDArray[np.int64]:
    """[fleets, kinds] counts of fleets cheaper than `best` and within limits, the cheapest first."""
    steps = int(LISTED ** (1.0 / len(kinds))) - 1
    levels = [np.unique(np.linspace(0, n, min(n, steps) + 1).astype(np.int64)) for n in most.tolist()]
    grid = np.stack(np.meshgrid(*levels, indexing="ij"), axis=-1).reshape(-1, len(kinds))
    fleets = [(_of(kinds, row), row) for row in grid[(grid > 0).sum(axis=1) > 1].tolist()]
    below = [(fleet.cost, row) for fleet, row in fleets if best is None or fleet.cost < best.cost]
    allowed = [row for cost, row in sorted(below) if _is_allowed(*cost[:2], question)]
    return np.array(allowed, np.int64).reshape(-1, len(kinds))


def _of(kinds: Sequence[WorkerType], counts: Sequence[int]) -> Fleet:
    """The fleet with these counts of each type, without types that have none."""
    chosen = sorted(zip(kinds, counts, strict=True), key=lambda pair: (pair[0].gpu or "", pair[0].tp_degree))
    return Fleet(tuple(WorkerGroup(kind, n) for kind, n in chosen if n))


def _holding(search: Search, mix: Fleet) -> Mixed | None:
    """The mix with its verdict, if it meets the target on the trace and at the asked confidence."""
    if not search.meets(search.replay(mix, most_missed=search.may_miss)):
        return None
    trial = Trial(search, mix)
    holds = trial.holds(screening=search.is_slow) and trial.holds()
    return Mixed(mix, trial.verdict()) if holds else None


def fraction_needed(sizing: Sizing, question: PlanRequest) -> float:
    """Workers, with a fraction, at which a type just meets the target on the trace."""
    assert sizing.workers is not None
    passed = sizing.on_trace[sizing.workers]
    failed = sizing.on_trace.get(sizing.workers - 1)
    if failed is None:
        return float(sizing.workers)
    few, many, target = (math.log(1.0 - a + 1e-6) for a in (failed, passed, question.attainment))
    share = (few - target) / (few - many) if few > many else 1.0
    return sizing.workers - 1 + min(max(share, 0.05), 1.0)


def with_spares(plan: Plan, question: PlanRequest, workload: Workload) -> Plan | None:
    """`plan`, of `question` or a stricter one, with standby workers; None where none allowed suffice."""
    best = plan.best
    assert best is not None
    assert best.estimate is not None
    assert question.reclaims_per_h is not None
    assert question.cold_start_s is not None
    decodes_s = best.tpot.mean * float(workload.output_tokens.mean()) if len(best.tpot.sorted_s) else 0.0
    spares = spares_for(
        best.fleet,
        best.estimate.low,
        question.attainment,
        question.reclaims_per_h,
        question.cold_start_s,
        best.ttft.mean + decodes_s,
    )
    if spares is None or not _is_allowed(spares.bought.usd_per_hour, spares.bought.gpus, question):
        return None
    share = spares.survives
    estimate = replace(
        best.estimate,
        low=best.estimate.low * share,
        expected=best.estimate.expected * share,
    )
    return replace(
        plan,
        question=question,
        best=replace(best, fleet=spares.bought, estimate=estimate),
        alternatives=tuple(replace(c, note=_noted(c.note)) for c in plan.alternatives),
        spares=spares,
        one_fewer=_one_fewer(plan, spares),
        schedule=_with_spares(plan.schedule, spares) if plan.schedule else None,
    )


def stricter(question: PlanRequest) -> PlanRequest:
    """The question with half of its allowed misses left to reclaims, and without their rate."""
    target = 1.0 - (1.0 - question.attainment) * LEFT_TO_RECLAIMS
    return replace(question, attainment=target, reclaims_per_h=None)


def no_spares_do(plan: Plan, question: PlanRequest) -> Plan:
    """`plan` as infeasible: reclaims cost more than any number of standby workers mends or limits allow."""
    without = plan.best.fleet.label if plan.best else "-"
    reason = (
        f"on spot workers reclaimed {question.reclaims_per_h:g} times an hour no number of standby workers"
        f" within the limits keeps {question.attainment:g} (without reclaims: {without})"
    )
    return replace(plan, question=question, best=None, reason=reason, schedule=None, one_fewer=None)


def _is_allowed(usd_per_h: float | None, gpus: int, question: PlanRequest) -> bool:
    """Whether the question's limits allow a fleet; an unknown price is within no budget."""
    if question.max_gpus is not None and gpus > question.max_gpus:
        return False
    budget = question.budget_usd_per_h
    return budget is None or (usd_per_h is not None and usd_per_h <= budget * (1.0 + 1e-9))


def _noted(note: str) -> str:
    return f"{note}; without standby workers" if note else "without standby workers"


def _one_fewer(plan: Plan, spares: StandbyWorkers) -> SmallerFleet | None:
    """With standby workers, one worker fewer is one of these fewer."""
    fewer, best = plan.one_fewer, plan.best
    if spares.workers == 0 or best is None or best.estimate is None or fewer is None:
        return fewer
    share = spares.one_fewer * spares.untouched
    estimate = replace(best.estimate, low=best.estimate.low * share, expected=best.estimate.expected * share)
    reason = f"enough workers serve only {spares.one_fewer:.3%} of the time, too little for its lower bound"
    return SmallerFleet(spares.bought.workers - 1, best.on_trace, estimate, reason)


def _with_spares(schedule: Schedule, spares: StandbyWorkers) -> Schedule:
    """As many standby workers at every time: the fewer workers serve, the more these cover."""
    stretches = tuple(
        ScheduleInterval(s.start_s, s.end_s, s.workers + spares.workers) for s in schedule.stretches
    )
    seconds = sum(s.end_s - s.start_s for s in stretches)
    hours = sum(s.workers * (s.end_s - s.start_s) for s in stretches)
    return replace(
        schedule,
        stretches=stretches,
        attainment=schedule.attainment * spares.survives,
        low=None if schedule.low is None else schedule.low * spares.survives,
        saved_share=1.0 - hours / (seconds * spares.bought.workers) if seconds > 0 else 0.0,
    )
