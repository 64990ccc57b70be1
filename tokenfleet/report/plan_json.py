"""The writer of `tokenfleet.plan/1`: turns the planner's result into the typed tree, with its lines in words.

Nothing in it changes from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from controlplane.worker_type import WorkerType
from tokenfleet.planning import plan_file as tree
from tokenfleet.planning.classes import separate_usd
from tokenfleet.planning.estimate import attained, bounds
from tokenfleet.planning.explain import Binding
from tokenfleet.planning.fleet import apportioned, fleet_fields, kind_fields
from tokenfleet.planning.loop import expected_loop
from tokenfleet.planning.mixes.cheapest import MixSearch
from tokenfleet.planning.plan_file import PlanFile, to_figures
from tokenfleet.planning.result import Plan, known
from tokenfleet.planning.traffic.drift import workers_range
from tokenfleet.profiles.form import profile_document
from tokenfleet.report.answer import says
from tokenfleet.report.plan_figures import plan_figures
from tokenfleet.report.plan_tables import tables

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NO_FLEET: dict[str, Any] = {"fleet": [], "workers": 0, "gpus": 0, "usd_per_hour": None}
NOTHING: dict[str, Any] = dict.fromkeys(("ttft_s", "tpot_s", "utilisation"))
LIMITS: tuple[str, ...] = ("confidence", "max_gpus", "budget_usd_per_h", "seed")
FIRST = ("schema", "feasible", "reason", "says", "tables", "figures")


def plan_file(plan: Plan) -> PlanFile:
    """The plan as its document."""
    made = _numbers(plan)
    made = made.model_copy(update={"loop": expected_loop(made)})
    shown = {
        "says": [list(line) for line in says(made)],
        "tables": list(tables(made)),
        "figures": [rounded(asdict(figure)) for figure in plan_figures(made)],
    }
    made = made.model_copy(update=shown)
    written = made.model_dump(mode="json", by_alias=True, exclude_unset=True)
    made._document = {name: written[name] for name in FIRST} | written
    return made


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan's JSON object."""
    return plan_file(plan).document


def _numbers(plan: Plan) -> PlanFile:
    best, request = plan.best, plan.request
    nothing = NOTHING | {"attainment": attained(None, None, request.attainment)}
    predicted = best.predicted(request.attainment) if best else nothing
    separate: dict[str, Any] = {"separate_usd_per_hour": separate_usd(plan.classes)} if plan.classes else {}
    return PlanFile(
        schema=tree.SCHEMA,
        feasible=plan.feasible,
        reason=plan.reason or None,
        **(fleet_fields(best.fleet) if best else NO_FLEET),
        policy=plan.policy,
        priority_headroom=request.priority_headroom,
        engine_mode=plan.worker_types[0].profile.engine.mode if plan.worker_types else None,
        slo=tree.LatencyTargets(ttft_s=request.slo.ttft_s, tpot_s=request.slo.tpot_s),
        session_s=request.session_s,
        agents=request.agents,
        **predicted,
        **_binding(plan.binding),
        moves=plan.moves,
        headroom=plan.headroom,
        one_fewer=plan.one_fewer,
        doubt=plan.doubt,
        nearest_feasible=plan.nearest,
        demand_line=plan.line if isinstance(plan.line, tree.ScalingRule) else None,
        schedule=_schedule(plan),
        schedule_detail=_schedule_detail(plan),
        spares=plan.spares.planned if plan.spares else None,
        alternatives=[c.considered(request.attainment) for c in plan.alternatives],
        passed_over=list(plan.passed_over),
        baselines=list(plan.baselines),
        affinity=_affinity(plan),
        prefix_cache=plan.prefix_cache,
        reuse=plan.reuse,
        curves=_curves(plan),
        inputs=_inputs(plan),
        **_given(
            strictness=request.strictness and str(request.strictness),
            classes=_classes(plan),
            plateau=plan.plateau,
            sampling=plan.sampled,
            agents_line=plan.line if isinstance(plan.line, tree.AgentsLine) else None,
            workers_range=_workers_range(plan),
            mixes=plan.mixes and _mixes(plan, plan.mixes),
            host_kv=plan.tier,
        ),
        **separate,
    )


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that have a value; a document lacks the others."""
    return {name: value for name, value in fields.items() if value is not None and value != []}


def _classes(plan: Plan) -> list[tree.PlannedClass]:
    """Each class's targets, what becomes of it, and what it costs; in whole plans alone the latter."""
    asked = plan.inputs.classes
    targets = [asdict(one.slo) | {"name": one.name, "deadline_s": one.deadline_s} for one in asked]
    if not plan.classes:
        of_each = zip(targets, asked, strict=True)
        return [
            tree.PlannedClass(**of, attainment=tree.Attainment(target=one.attainment)) for of, one in of_each
        ]
    whole = None if plan.best is None else plan.best.fleet.usd_per_hour
    rows = []
    for of, one in zip(targets, plan.classes, strict=True):
        others = None if one.without is None else one.without.usd_per_hour
        rows.append(
            tree.PlannedClass(
                **of,
                attainment=attained(one.estimate, one.on_trace, one.of.attainment),
                requests=one.requests,
                binds=one.binds,
                without=None if one.without is None else tree.FleetCost(**fleet_fields(one.without)),
                marginal_usd_per_hour=None if whole is None or others is None else whole - others,
                alone=None if one.alone is None else tree.FleetCost(**fleet_fields(one.alone)),
                runs_on=[tree.RunsOn(worker=kind, share=share) for kind, share in one.runs_on],
            )
        )
    return rows


def _binding(bind: Binding | None) -> dict[str, Any]:
    """The constraint that binds, when, and the trial that shows it."""
    if bind is None:
        return dict.fromkeys(("binding", "binding_window_s", "binding_detail"))
    return {
        "binding": bind.constraint,
        "binding_window_s": list(bind.window_s),
        "binding_detail": bind.detail,
    }


def _mixes(plan: Plan, search: MixSearch) -> tree.MixesReplayed:
    serving = plan.spares.serving if plan.spares else plan.best.fleet if plan.best else None
    may_save = None if serving is None else search.may_save(serving)
    return tree.MixesReplayed(replayed=search.mixes, replays=search.replays, may_save=may_save)


def _schedule(plan: Plan) -> list[tree.Stretch]:
    if plan.schedule is None or plan.best is None:
        return []
    # Of a mix a count alone would not say which workers stay.
    fleets = [apportioned(plan.best.fleet, s.workers) for s in plan.schedule.stretches]
    return [
        tree.Stretch(start_s=s.start_s, end_s=s.end_s, workers=s.workers, gpus=fleet.gpus, fleet=fleet.label)
        for s, fleet in zip(plan.schedule.stretches, fleets, strict=True)
    ]


def _schedule_detail(plan: Plan) -> tree.ScheduleDetail | None:
    if plan.schedule is None:
        return None
    return tree.ScheduleDetail(
        attainment=plan.schedule.attainment,
        saved_share=plan.schedule.saved_share,
        each_window="starts after a 30 s lead-in; start-up and draining between windows are not included",
        paid=_paid(plan),
        **_given(low=plan.schedule.low, week=week_rows(plan.schedule.week) if plan.schedule.week else None),
    )


def week_rows(week: Sequence[int]) -> dict[str, list[int]]:
    """Workers by weekday, for each cell of the day (UTC)."""
    of_day = len(week) // len(WEEKDAYS)
    return {name: list(week[day * of_day : (day + 1) * of_day]) for day, name in enumerate(WEEKDAYS)}


def _paid(plan: Plan) -> tree.Paid | None:
    """The schedule with its cold starts: what is paid when, and what must be ordered when."""
    if plan.paid is None or plan.best is None or plan.schedule is None:
        return None
    hours = plan.best.fleet.workers * sum(s.end_s - s.start_s for s in plan.schedule.stretches) / 3600.0
    return tree.Paid(
        cold_start_s=plan.paid.cold_start_s,
        worker_hours=plan.paid.worker_hours,
        saved_share=1.0 - plan.paid.worker_hours / hours if hours > 0 else None,
        usd_per_hour=plan.paid.usd_per_hour(plan.best.fleet),
        stretches=[tree.Stretch.like(s) for s in plan.paid.stretches],
        orders=[tree.PlannedOrder.like(o) for o in plan.paid.orders],
    )


def _affinity(plan: Plan) -> tree.Affinity | None:
    """The saving of the policy over the best that ignores caches, both on the recorded trace."""
    others = [b for b in plan.baselines if b.workers is not None]
    own = [n for n, share in plan.on_trace.items() if share >= plan.request.attainment]
    if plan.reuse is None or not others or not own or plan.best is None:
        return None
    best = min(
        others, key=lambda b: (math.inf if b.usd_per_hour is None else b.usd_per_hour, b.gpus, b.workers)
    )
    if plan.request.placement.startswith(others[0].policy):
        return None
    mine, workers, usd = apportioned(plan.best.fleet, min(own)), best.workers or 0, best.usd_per_hour
    return tree.Affinity(
        policy=best.policy,
        workers=workers,
        saved_workers=max(workers - mine.workers, 0),
        saved_usd_per_hour=None if usd is None or mine.usd_per_hour is None else usd - mine.usd_per_hour,
        prefix_hit_rate=best.prefix_hit_rate,
    )


def rounded(value: Any) -> Any:
    """A record's fields as JSON has them."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [rounded(part) for part in value]
    return known(to_figures(value)) if isinstance(value, float) else value


def _curves(plan: Plan) -> tree.Curves:
    """The data of the report's plots."""
    counts = sorted({*plan.on_trace, *plan.sure})
    return tree.Curves(
        rate_rps=[[t, r] for t, r in plan.inputs.rate_curve],
        attainment_by_workers=[
            tree.Counted(workers=n, on_trace=plan.on_trace.get(n), **bounds(plan.sure.get(n))) for n in counts
        ],
        ttft_cdf=plan.best.ttft.curve if plan.best else [],
        tpot_cdf=plan.best.tpot.curve if plan.best else [],
        cost_by_slo=list(plan.costed),
    )


def _workers_range(plan: Plan) -> list[int] | None:
    """The workers that a recorded trace might lead to; None where the trace is one."""
    best, inputs = plan.best, plan.inputs
    if best is None or inputs.assumed is None:
        return None
    line = plan.line if isinstance(plan.line, tree.ScalingRule) else None
    rate = inputs.rate_rps
    needed = None if line is None else lambda times: line.workers_per_rps * rate * times + line.intercept
    return list(workers_range(inputs.assumed.levels, best.fleet.workers, needed))


def _inputs(plan: Plan) -> tree.PlanInputs:
    inputs = plan.inputs
    return tree.PlanInputs(
        trace=inputs.trace,
        requests=inputs.requests,
        rate_rps=known(inputs.rate_rps),
        duration_s=inputs.duration_s,
        clock_start_unix_s=inputs.clock_start_s,
        rate_scale=inputs.rate_scale,
        ideal_hit_rate=inputs.ideal_hit_rate,
        phases=[tree.PlannedPhase.like(phase) for phase in inputs.phases],
        profiles=[_profile(t) for t in plan.worker_types],
        warnings=list(inputs.warnings),
        ages=list(inputs.ages),
        **_given(assumed=inputs.assumed and [list(row) for row in inputs.assumed.rows]),
        **{name: getattr(plan.request, name) for name in LIMITS},
    )


def _profile(worker_type: WorkerType) -> tree.PlannedProfile:
    profile, link = worker_type.profile, worker_type.kv_link
    kv_link = link and tree.PlannedLink(gb_per_s=link.bytes_per_s / 1e9, latency_s=link.latency_s)
    return tree.PlannedProfile(
        model=profile.model,
        **kind_fields(worker_type),
        kind=profile.source.kind,
        date=str(profile.source.date),
        mean_relative_error=known(profile.residuals.mean_relative),
        unseen_relative_error=known(profile.residuals.unseen_relative),
        engine=f"{profile.engine.name} {profile.engine.version}".strip(),
        context_limit_tokens=profile.context_limit_tokens,
        **_given(kv_link=kv_link),
        usd_per_gpu_h=worker_type.usd_per_gpu_h,
        price=worker_type.priced,
        profile=profile_document(profile),
    )
