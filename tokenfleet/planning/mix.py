"""Other fleets in place of the cheapest one of a kind: a mix of kinds, and one with spares for spot workers.

**A mix** is taken where it is cheaper than any one kind of worker. On this trace one worker of kind v carries
the share 1/N_v, N_v being the count (with a fraction) at which that kind alone just meets the target. The
integer program picks the cheapest counts whose shares add up to one; the pick is then replayed like any
fleet, since kinds that serve one stream together are more than their sum of shares, or less. A pick that
fails is asked to carry more, until it passes or is no longer cheaper.

**Spares**: on spot workers a plan is its serving fleet with the spares that it needs, and its cost and
attainment after reclaims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.errors import Infeasible
from controlplane.scaler.mix import MixQuestion, MixSettings, cheapest
from controlplane.scaler.weights import Weights
from controlplane.worker_type import WorkerGroup
from controlplane.workload import Workload
from tokenfleet.planning.estimate import Estimate, Trial
from tokenfleet.planning.fleet import Fleet, Spares, spares_for
from tokenfleet.planning.replicates import Replicates
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import OneFewer, Plan
from tokenfleet.planning.schedule import Schedule, Stretch
from tokenfleet.planning.sizing import Sizing, broken_off
from tokenfleet.planning.threads import Threads

MORE = 1.06  # demand grows by this much after each mix that fails
TRIES = 3
LEFT_TO_RECLAIMS = 0.5  # of the allowed misses, where the cheapest fleet leaves too few


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mix that meets the target at the asked confidence, cheaper than the fleet it was held against."""

    fleet: Fleet
    estimate: Estimate


def cheaper_mix(
    replicates: Replicates, question: PlanRequest, sizings: Sequence[Sizing], best: Fleet, pool: Threads
) -> Mixed | None:
    """A verified mix cheaper than `best`, or None. Split fleets are not mixed."""
    usable = [s for s in sizings if s.workers is not None and not s.worker_type.is_split]
    if len(usable) < 2:
        return None
    types = tuple(s.worker_type for s in usable)
    shares = {s.worker_type.name: 1.0 / fraction_needed(s, question) for s in usable}
    is_priced = all(t.usd_per_h is not None for t in types)
    limits = MixSettings(
        max_gpus=question.max_gpus, budget_usd_per_h=question.budget_usd_per_h if is_priced else None
    )
    demand, tried = 1.0, list[Fleet]()
    for _ in range(TRIES):
        try:
            counts = cheapest(MixQuestion(types, Weights(types[0].name, shares), demand, limits))
        except Infeasible:
            return None
        chosen = sorted((t for t in types if t.name in counts), key=lambda t: (t.gpu or "", t.tp_degree))
        mix = Fleet(tuple(WorkerGroup(t, counts[t.name]) for t in chosen))
        if not mix.cost < best.cost:
            return None
        if len(counts) > 1 and mix not in tried:
            tried.append(mix)
            outcome = replicates.replay(mix, most_missed=broken_off(replicates, question))
            if outcome.complete and outcome.attainment >= question.attainment:
                trial = Trial(replicates, question, mix, pool)
                if trial.holds():
                    return Mixed(mix, trial.verdict())
        demand *= MORE
    return None


def fraction_needed(sizing: Sizing, question: PlanRequest) -> float:
    """Workers, with a fraction, at which a kind just meets the target on the trace."""
    assert sizing.workers is not None
    passed = sizing.on_trace[sizing.workers]
    failed = sizing.on_trace.get(sizing.workers - 1)
    if failed is None:
        return float(sizing.workers)
    few, many, target = (math.log(1.0 - a + 1e-6) for a in (failed, passed, question.attainment))
    share = (few - target) / (few - many) if few > many else 1.0
    return sizing.workers - 1 + min(max(share, 0.05), 1.0)


def with_spares(plan: Plan, question: PlanRequest, workload: Workload) -> Plan | None:
    """`plan`, of `question` or a stricter one, with the spares it needs; None where none are enough."""
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
    if spares is None or not _within_limits(spares, question):
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
    """The question with half of its allowed misses left to reclaims, and nothing said of them."""
    target = 1.0 - (1.0 - question.attainment) * LEFT_TO_RECLAIMS
    return replace(question, attainment=target, reclaims_per_h=None)


def no_spares_do(plan: Plan, question: PlanRequest) -> Plan:
    """`plan` as infeasible: reclaims cost more than any number of spares mends, or than is allowed."""
    without = plan.best.fleet.label if plan.best else "-"
    reason = (
        f"on spot workers reclaimed {question.reclaims_per_h:g} times an hour no number of spares within the"
        f" limits keeps {question.attainment:g} (without reclaims: {without})"
    )
    return replace(plan, question=question, best=None, reason=reason, schedule=None, one_fewer=None)


def _within_limits(spares: Spares, question: PlanRequest) -> bool:
    usd = spares.bought.usd_per_hour
    if question.max_gpus is not None and spares.bought.gpus > question.max_gpus:
        return False
    return question.budget_usd_per_h is None or (
        usd is not None and usd <= question.budget_usd_per_h * (1.0 + 1e-9)
    )


def _noted(note: str) -> str:
    return f"{note}; without spares" if note else "without spares"


def _one_fewer(plan: Plan, spares: Spares) -> OneFewer | None:
    """With spares, one worker fewer is one spare fewer."""
    fewer, best = plan.one_fewer, plan.best
    if spares.workers == 0 or best is None or best.estimate is None or fewer is None:
        return fewer
    share = spares.one_fewer * spares.untouched
    estimate = replace(best.estimate, low=best.estimate.low * share, expected=best.estimate.expected * share)
    reason = (
        f"enough workers stand only {spares.one_fewer:.3%} of the time, which its lower bound cannot spare"
    )
    return OneFewer(spares.bought.workers - 1, best.on_trace, estimate, reason)


def _with_spares(schedule: Schedule, spares: Spares) -> Schedule:
    """As many spares at every time: the fewer workers serve, the more these cover."""
    stretches = tuple(Stretch(s.start_s, s.end_s, s.workers + spares.workers) for s in schedule.stretches)
    seconds = sum(s.end_s - s.start_s for s in stretches)
    hours = sum(s.workers * (s.end_s - s.start_s) for s in stretches)
    return replace(
        schedule,
        stretches=stretches,
        attainment=schedule.attainment * spares.survives,
        saved_share=1.0 - hours / (seconds * spares.bought.workers) if seconds > 0 else 0.0,
    )
