"""The writer of `tokenfleet.plan/1`: turns the planner's result into the typed tree, with its lines in words.

Nothing in it changes from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from controlplane.worker_type import KvLink, WorkerType
from tokenfleet.planning import plan_file as tree
from tokenfleet.planning.classes import separate_usd
from tokenfleet.planning.comparisons import DemandLine, TierWorth
from tokenfleet.planning.estimate import Estimate
from tokenfleet.planning.explain import AttainmentPlateau, Binding
from tokenfleet.planning.fleet import Fleet, StandbyWorkers, apportioned
from tokenfleet.planning.loop import expected_loop
from tokenfleet.planning.mixes.cheapest import MixSearch
from tokenfleet.planning.moves import MovesWorth
from tokenfleet.planning.plan_file import PlanFile, to_figures
from tokenfleet.planning.result import Candidate, Latency, Plan, Sampled, SmallerFleet
from tokenfleet.planning.traffic.drift import workers_range
from tokenfleet.planning.traffic.sample import ROUGHLY
from tokenfleet.profiles.form import profile_document
from tokenfleet.report.answer import says, tables
from tokenfleet.report.plan_figures import plan_figures

Part = TypeVar("Part")
Written = TypeVar("Written")
CURVE_POINTS = 60
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
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
    separate: dict[str, Any] = {"separate_usd_per_hour": separate_usd(plan.classes)} if plan.classes else {}
    return PlanFile(
        schema=tree.SCHEMA,
        feasible=plan.feasible,
        reason=plan.reason or None,
        **_cost(best.fleet if best else Fleet(())),
        policy=plan.policy,
        priority_headroom=request.priority_headroom,
        engine_mode=plan.worker_types[0].profile.engine.mode if plan.worker_types else None,
        slo=tree.LatencyTargets(ttft_s=request.slo.ttft_s, tpot_s=request.slo.tpot_s),
        session_s=request.session_s,
        agents=request.agents,
        **_predicted(best, request.attainment),
        **_binding(plan.binding),
        moves=_told(_moves, plan.moves),
        headroom=_told(tree.Headroom.like, plan.headroom),
        one_fewer=_told(_one_fewer, plan.one_fewer),
        doubt=_told(tree.Uncertainty.like, plan.doubt),
        nearest_feasible=_nearest(plan),
        **_line(plan.line),
        schedule=_schedule(plan),
        schedule_detail=_schedule_detail(plan),
        spares=_told(_spares, plan.spares),
        alternatives=[_considered(c, request.attainment) for c in plan.alternatives],
        passed_over=[tree.PassedOver(**_kind(p.worker_type), reason=p.reason) for p in plan.passed_over],
        baselines=_baselines(plan),
        affinity=_affinity(plan),
        prefix_cache=plan.prefix_cache,
        reuse=_told(tree.Reuse.like, plan.reuse),
        curves=_curves(plan),
        inputs=_inputs(plan),
        **_given(
            strictness=request.strictness and str(request.strictness),
            classes=_classes(plan),
            plateau=_told(_plateau, plan.plateau),
            sampling=_told(_sampled, plan.sampled),
            workers_range=_workers_range(plan),
            mixes=plan.mixes and _mixes(plan, plan.mixes),
            host_kv=_told(_tier, plan.tier),
        ),
        **separate,
    )


def _told(write: Callable[[Part], Written], part: Part | None) -> Written | None:
    return None if part is None else write(part)


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that have a value; a document lacks the others."""
    return {name: value for name, value in fields.items() if value is not None and value != []}


def _known(value: float) -> float | None:
    """None for what is not a number, which JSON cannot say."""
    return value if math.isfinite(value) else None


def fleet_parts(fleet: Fleet) -> list[tree.FleetPart]:
    """A fleet's groups."""
    return [
        tree.FleetPart(
            **_kind(group.worker_type),
            **_totals(Fleet((group,))),
            role=group.role,
            profile_kind=group.worker_type.profile.source.kind,
        )
        for group in fleet.groups
    ]


def _totals(fleet: Fleet | None) -> dict[str, Any]:
    """A fleet's size and price; null where there is no fleet."""
    return {name: getattr(fleet, name, None) for name in ("workers", "gpus", "usd_per_hour")}


def _cost(fleet: Fleet) -> dict[str, Any]:
    """A fleet's groups and totals; a price needs workers."""
    unpriced = {} if fleet.groups else {"usd_per_hour": None}
    return {"fleet": fleet_parts(fleet)} | _totals(fleet) | unpriced


def _kind(worker_type: WorkerType) -> dict[str, Any]:
    """The name of a worker type in a plan (`plan_file.kind_of_worker`)."""
    profile = worker_type.profile
    named = {"gpu": profile.gpu, "tp_degree": profile.tp_degree}
    return named if profile.ranks is None else {**named, "ranks": profile.ranks.name}


def _considered(candidate: Candidate, target: float) -> tree.Considered:
    """A fleet that was considered, in the form of the plan's own."""
    return tree.Considered(
        **_cost(candidate.fleet),
        **_predicted(candidate, target),
        prefix_hit_rate=candidate.hit_rate,
        note=candidate.note or None,
    )


def _predicted(of: Candidate | None, target: float) -> dict[str, Any]:
    """The prediction for a fleet, on the trace and beyond it; null if there is none."""
    if of is None:
        nothing = dict.fromkeys(("ttft_s", "tpot_s", "utilisation"))
        return {"attainment": _attainment(None, None, target), **nothing}
    return {
        "attainment": _attainment(of.estimate, of.on_trace, target),
        "ttft_s": quantiles(of.ttft),
        "tpot_s": quantiles(of.tpot),
        "utilisation": _known(of.utilisation),
    }


def _attainment(estimate: Estimate | None, on_trace: float | None, target: float) -> tree.Attainment:
    """Attainment with its bounds; null where it was not estimated."""
    worlds = 0 if estimate is None else estimate.replicates
    confidence = None if estimate is None else estimate.confidence
    return tree.Attainment(
        target=target, **_bounds(estimate), confidence=confidence, worlds=worlds, on_trace=on_trace
    )


def _bounds(estimate: Estimate | None) -> dict[str, Any]:
    return {name: getattr(estimate, name, None) for name in ("expected", "low", "high")}


def quantiles(latency: Latency) -> tree.Quantiles:
    """p50, p90, p99 and the mean, seconds."""
    p50, p90, p99 = (_known(latency.at(q)) for q in (0.5, 0.9, 0.99))
    return tree.Quantiles(p50=p50, p90=p90, p99=p99, mean=_known(latency.mean))


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
                attainment=_attainment(one.estimate, one.on_trace, one.of.attainment),
                requests=one.requests,
                binds=one.binds,
                without=None if one.without is None else tree.FleetCost(**_cost(one.without)),
                marginal_usd_per_hour=None if whole is None or others is None else whole - others,
                alone=None if one.alone is None else tree.FleetCost(**_cost(one.alone)),
                runs_on=[tree.RunsOn(worker=kind, share=share) for kind, share in one.runs_on],
            )
        )
    return rows


def _one_fewer(fewer: SmallerFleet) -> tree.OneFewer:
    return tree.OneFewer(
        workers=fewer.workers,
        attainment=fewer.estimate.expected if fewer.estimate else fewer.on_trace,
        low=fewer.estimate.low if fewer.estimate else None,
        on_trace=fewer.on_trace,
        fails=fewer.fails,
        **_given(fleet=fewer.fleet and fleet_parts(fewer.fleet)),
    )


def _moves(worth: MovesWorth) -> tree.PlannedMoves:
    """The plan's fleet with and without moves, and the fleet that the target takes without them."""
    return tree.PlannedMoves(
        kept=worth.kept,
        workers_without=worth.needs.workers,
        usd_per_hour_without=worth.needs.usd_per_hour,
        with_moves=None if worth.on is None else tree.ReplayedFleet.like(worth.on),
        without_moves=None if worth.off is None else tree.ReplayedFleet.like(worth.off),
        why_not=worth.why_not or None,
    )


def _binding(bind: Binding | None) -> dict[str, Any]:
    """The constraint that binds, when, and the trial that shows it."""
    if bind is None:
        return dict.fromkeys(("binding", "binding_window_s", "binding_detail"))
    detail = tree.BindingDetail(
        workers=bind.fleet.workers,
        fleet=fleet_parts(bind.fleet),
        rate_scale=bind.rate_scale,
        **_given(slo_class=bind.slo_class),
        attainment=bind.attainment,
        window_attainment=bind.window_attainment,
        relief=bind.relief,
        prefix_hit_rate=bind.hit_rate,
        prefix_hit_rate_more_kv=bind.hit_rate_more_kv,
    )
    return {
        "binding": bind.constraint,
        "binding_window_s": list(bind.window_s),
        "binding_detail": detail,
    }


def _plateau(flat: AttainmentPlateau) -> tree.Plateau:
    """The worker counts between which attainment hardly differs; misses that no count mends, by target."""
    return tree.Plateau(
        workers=list(flat.workers),
        span=flat.span,
        missed=flat.missed,
        alone=tree.AloneShares(ttft=flat.alone_ttft, tpot=flat.alone_tpot),
        alone_needs_s=tree.AloneNeeds(ttft=flat.ttft_s, tpot=flat.tpot_s),
    )


def _mixes(plan: Plan, search: MixSearch) -> tree.MixesReplayed:
    serving = plan.spares.serving if plan.spares else plan.best.fleet if plan.best else None
    may_save = None if serving is None else search.may_save(serving)
    return tree.MixesReplayed(replayed=search.mixes, replays=search.replays, may_save=may_save)


def _sampled(sampled: Sampled) -> tree.TraceSample:
    """The sample of a long trace, its bound on the whole trace's attainment, and that attainment."""
    return tree.TraceSample(
        requests=sampled.requests,
        windows=sampled.windows,
        binding_windows=sampled.binding,
        of_windows=sampled.of_windows,
        attainment=sampled.attainment,
        low=sampled.low,
        full_replay=sampled.whole,
        added_workers=sampled.added,
        explained_by_requests=ROUGHLY,
    )


def _nearest(plan: Plan) -> tree.Nearest | None:
    near = plan.nearest
    if near is None:
        return None if plan.nearest_attainment is None else tree.Nearest(attainment=plan.nearest_attainment)
    return tree.Nearest(
        ttft_s=near.slo.ttft_s,
        tpot_s=near.slo.tpot_s,
        session_s=near.session_s,
        **_cost(near.fleet),
        attainment=near.estimate.expected,
        low=near.estimate.low,
        looser=near.looser,
    )


def _line(line: DemandLine | None) -> dict[str, Any]:
    """The line over rates, which a scaler may follow. A line over agents has a name of its own."""
    if line is None:
        return {"demand_line": None}
    told: dict[str, Any] = {
        "intercept": line.intercept,
        "r2": line.r2,
        "points": [list(at) for at in line.points],
        "mean_prompt_tokens": line.prompt_tokens,
        "mean_output_tokens": line.output_tokens,
    }
    if line.of_agents:
        return {"demand_line": None, "agents_line": tree.AgentsLine(workers_per_agent=line.slope, **told)}
    return {"demand_line": tree.ScalingRule(workers_per_rps=line.slope, **told)}


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


def _spares(spares: StandbyWorkers) -> tree.Spares:
    return tree.Spares(
        workers=spares.workers,
        serving=tree.FleetCost(**_cost(spares.serving)),
        reclaims_per_h=spares.reclaims_per_h,
        cold_start_s=spares.cold_start_s,
        availability=spares.availability,
        untouched=spares.untouched,
        covers="workers interrupted one by one; not a zone that is cleared at once",
    )


def _tier(tier: TierWorth) -> tree.KvOffload:
    """The worth of KV offload on the trace; `workers`: the fewest with it."""
    without, host = tier.fleet_without, tier.profile.host_kv
    assert host is not None
    return tree.KvOffload(
        gib=host.capacity_bytes / 2**30,
        gb_per_s=host.bytes_per_s / 1e9,
        prefix_hit_rate=tier.hit_rate,
        loaded=tier.from_host,
        prefix_hit_rate_without=tier.hit_rate_without,
        workers=tier.fleet.workers,
        usd_per_hour=tier.fleet.usd_per_hour,
        workers_without=without.workers if without else None,
        usd_per_hour_without=without.usd_per_hour if without else None,
        host_usd_per_hour=tier.fleet.host_usd_per_hour,
        saved_usd_per_hour=tier.saved_usd_per_hour,
        tried_up_to=tier.tried,
    )


def _baselines(plan: Plan) -> list[tree.OtherPolicy]:
    return [
        tree.OtherPolicy(policy=b.policy, **_totals(b.fleet), tried_up_to=b.tried, prefix_hit_rate=b.hit_rate)
        for b in plan.baselines
    ]


def _affinity(plan: Plan) -> tree.Affinity | None:
    """The saving of the policy over the best that ignores caches, both on the recorded trace."""
    others = [b for b in plan.baselines if b.fleet is not None]
    own = [n for n, share in plan.on_trace.items() if share >= plan.request.attainment]
    if plan.reuse is None or not others or not own or plan.best is None:
        return None
    best = min(others, key=lambda b: b.fleet.cost if b.fleet else (math.inf, 0, 0))
    assert best.fleet is not None
    if plan.request.placement.startswith(others[0].policy):
        return None
    mine, other = apportioned(plan.best.fleet, min(own)), best.fleet
    priced = mine.usd_per_hour is not None and other.usd_per_hour is not None
    return tree.Affinity(
        policy=best.policy,
        workers=other.workers,
        saved_workers=max(other.workers - mine.workers, 0),
        saved_usd_per_hour=(other.usd_per_hour or 0.0) - (mine.usd_per_hour or 0.0) if priced else None,
        prefix_hit_rate=best.hit_rate,
    )


def rounded(value: Any) -> Any:
    """A record's fields as JSON has them."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [rounded(part) for part in value]
    return _known(to_figures(value)) if isinstance(value, float) else value


def _curves(plan: Plan) -> tree.Curves:
    """The data of the report's plots."""
    counts = sorted({*plan.on_trace, *plan.sure})
    return tree.Curves(
        rate_rps=[[t, r] for t, r in plan.inputs.rate_curve],
        attainment_by_workers=[
            tree.Counted(workers=n, on_trace=plan.on_trace.get(n), **_bounds(plan.sure.get(n)))
            for n in counts
        ],
        ttft_cdf=_cdf(plan.best.ttft) if plan.best else [],
        tpot_cdf=_cdf(plan.best.tpot) if plan.best else [],
        cost_by_slo=[
            tree.Costed(scale=c.scale, on=c.on, **asdict(c.slo), **_totals(c.fleet)) for c in plan.costed
        ],
    )


def _cdf(latency: Latency) -> list[list[float]]:
    """(seconds, share) pairs, closer together towards the tail, where the target is."""
    if len(latency.sorted_s) == 0:
        return []
    shares = np.unique(
        np.concatenate((np.linspace(0, 0.9, 31), 1.0 - np.geomspace(0.1, 1e-4, CURVE_POINTS - 30)))
    )
    return [[latency.at(float(s)), float(s)] for s in (*shares, 1.0)]


def _workers_range(plan: Plan) -> list[int] | None:
    """The workers that a recorded trace might lead to; None where the trace is one."""
    best, inputs = plan.best, plan.inputs
    if best is None or inputs.assumed is None:
        return None
    line = None if plan.line is None or plan.line.of_agents else plan.line
    needed = None if line is None else lambda times: line.slope * inputs.rate_rps * times + line.intercept
    return list(workers_range(inputs.assumed.levels, best.fleet.workers, needed))


def _inputs(plan: Plan) -> tree.PlanInputs:
    inputs = plan.inputs
    return tree.PlanInputs(
        trace=inputs.trace,
        requests=inputs.requests,
        rate_rps=_known(inputs.rate_rps),
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
    profile = worker_type.profile
    return tree.PlannedProfile(
        model=profile.model,
        **_kind(worker_type),
        kind=profile.source.kind,
        date=str(profile.source.date),
        mean_relative_error=_known(profile.residuals.mean_relative),
        unseen_relative_error=_known(profile.residuals.unseen_relative),
        engine=f"{profile.engine.name} {profile.engine.version}".strip(),
        context_limit_tokens=profile.context_limit_tokens,
        **_link(worker_type.kv_link),
        usd_per_gpu_h=worker_type.usd_per_gpu_h,
        price=worker_type.priced,
        profile=profile_document(profile),
    )


def _link(link: KvLink | None) -> dict[str, Any]:
    """The link by which a split fleet's workers transfer KV."""
    if link is None:
        return {}
    return {"kv_link": tree.PlannedLink(gb_per_s=link.bytes_per_s / 1e9, latency_s=link.latency_s)}
