"""Standby workers of a plan on spot: its serving fleet with the workers that reclaims make it need.

Its cost and attainment are those after reclaims.
"""

from __future__ import annotations

from dataclasses import replace

from controlplane.scaler.bounds import ScheduleInterval
from controlplane.workload import Workload
from tokenfleet.planning.fleet import StandbyWorkers, is_allowed, spares_for
from tokenfleet.planning.plan_file import OneFewer
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan, one_fewer
from tokenfleet.planning.schedule import Schedule

LEFT_TO_RECLAIMS = 0.5  # of the allowed misses, where the cheapest fleet leaves too few


def with_spares(plan: Plan, request: PlanRequest, workload: Workload) -> Plan | None:
    """`plan`, of `request` or a stricter one, with standby workers; None where none allowed suffice."""
    best = plan.best
    assert best is not None
    assert best.estimate is not None
    assert request.reclaims_per_h is not None
    assert request.cold_start_s is not None
    decodes_s = best.tpot.mean * float(workload.output_tokens.mean()) if len(best.tpot.sorted_s) else 0.0
    spares = spares_for(
        best.fleet,
        best.estimate.low,
        request.attainment,
        request.reclaims_per_h,
        request.cold_start_s,
        best.ttft.mean + decodes_s,
    )
    if spares is None or not is_allowed(spares.bought.usd_per_hour, spares.bought.gpus, request):
        return None
    share = spares.survives
    estimate = replace(
        best.estimate,
        low=best.estimate.low * share,
        expected=best.estimate.expected * share,
    )
    return replace(
        plan,
        request=request,
        best=replace(best, fleet=spares.bought, estimate=estimate),
        alternatives=tuple(replace(c, note=_noted(c.note)) for c in plan.alternatives),
        spares=spares,
        one_fewer=_one_fewer(plan, spares),
        schedule=_with_spares(plan.schedule, spares) if plan.schedule else None,
    )


def stricter(request: PlanRequest) -> PlanRequest:
    """The request with half of its allowed misses left to reclaims, and without their rate."""
    target = 1.0 - (1.0 - request.attainment) * LEFT_TO_RECLAIMS
    return replace(request, attainment=target, reclaims_per_h=None)


def no_spares_do(plan: Plan, request: PlanRequest) -> Plan:
    """`plan` as infeasible: reclaims cost more than any number of standby workers mends or limits allow."""
    without = plan.best.fleet.label if plan.best else "-"
    reason = (
        f"on spot workers interrupted {request.reclaims_per_h:g} times an hour no number of standby workers"
        f" within the limits keeps {request.attainment:g} (without reclaims: {without})"
    )
    return replace(plan, request=request, best=None, reason=reason, schedule=None, one_fewer=None)


def _noted(note: str) -> str:
    return f"{note}; without standby workers" if note else "without standby workers"


def _one_fewer(plan: Plan, spares: StandbyWorkers) -> OneFewer | None:
    """With standby workers, one worker fewer is one of these fewer."""
    fewer, best = plan.one_fewer, plan.best
    if spares.workers == 0 or best is None or best.estimate is None or fewer is None:
        return fewer
    share = spares.one_fewer * spares.untouched
    estimate = replace(best.estimate, low=best.estimate.low * share, expected=best.estimate.expected * share)
    time = f"{100 * spares.one_fewer:.3f} % of the time"
    reason = f"enough workers serve only {time}, too little for its lower bound"
    return one_fewer(best.on_trace, estimate, reason, workers=spares.bought.workers - 1)


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
