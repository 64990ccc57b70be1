"""The writer of `tokenfleet.plan/1`: a plan as plain numbers, and the lines that a person reads of them.

Nothing in it changes from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from controlplane.types import SloClass
from controlplane.worker_type import KvLink, WorkerType
from tokenfleet.planning.classes import separate_usd
from tokenfleet.planning.comparisons import DemandLine, TierWorth
from tokenfleet.planning.estimate import Estimate
from tokenfleet.planning.explain import AttainmentPlateau, Binding
from tokenfleet.planning.fleet import Fleet, StandbyWorkers, apportioned
from tokenfleet.planning.loop import expected_loop
from tokenfleet.planning.mixes.cheapest import MixSearch
from tokenfleet.planning.moves import MovesWorth
from tokenfleet.planning.plan_file import SCHEMA, ExpectedLoop, PlanFile
from tokenfleet.planning.result import QUANTILES, Candidate, Doubt, Latency, Plan, Sampled, SmallerFleet
from tokenfleet.planning.traffic.drift import workers_range
from tokenfleet.planning.traffic.sample import ROUGHLY
from tokenfleet.profiles.form import profile_document
from tokenfleet.report.answer import says, tables
from tokenfleet.report.plan_figures import plan_figures
from tokenfleet.traces.phases import phases_json

Part = TypeVar("Part")
CURVE_POINTS = 60
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan's JSON object. Shares and seconds are rounded to what they can carry."""
    document = _numbers(plan)
    read = PlanFile.model_validate(document)
    loop = expected_loop(read)
    document["loop"] = _told(ExpectedLoop.model_dump, loop)
    read = read.model_copy(update={"loop": loop})
    shown = {
        "says": [list(line) for line in says(read)],
        "tables": [table.model_dump() for table in tables(read)],
        "figures": [rounded(asdict(figure)) for figure in plan_figures(read)],
    }
    first = ("schema", "feasible", "reason")
    return {name: document[name] for name in first} | shown | document


def _numbers(plan: Plan) -> dict[str, Any]:
    best = plan.best
    request = plan.request
    engine = plan.worker_types[0].profile.engine.mode if plan.worker_types else None
    return {
        "schema": SCHEMA,
        "feasible": plan.feasible,
        "reason": plan.reason or None,
        **(fleet_json(best.fleet) if best else fleet_json(Fleet(()))),
        "policy": plan.policy,
        "priority_headroom": request.priority_headroom,
        **({"strictness": str(request.strictness)} if request.strictness else {}),
        "engine_mode": str(engine) if engine else None,
        "slo": {"ttft_s": request.slo.ttft_s, "tpot_s": request.slo.tpot_s},
        **({"classes": _classes(plan)} if plan.inputs.classes else {}),
        **({"separate_usd_per_hour": separate_usd(plan.classes)} if plan.classes else {}),
        "session_s": request.session_s,
        "agents": request.agents,
        **_predicted(best, request.attainment),
        **_binding(plan.binding),
        "moves": _told(_moves, plan.moves),
        "headroom": _told(asdict, plan.headroom),
        **({"plateau": _plateau(plan.plateau)} if plan.plateau else {}),
        **({"sampling": _sampled(plan.sampled)} if plan.sampled else {}),
        **_workers_range(plan),
        **({"mixes": _mixes(plan, plan.mixes)} if plan.mixes else {}),
        "one_fewer": _told(_one_fewer, plan.one_fewer),
        "doubt": _told(_doubt, plan.doubt),
        "nearest_feasible": _nearest(plan),
        **_line(plan.line),
        "schedule": _schedule(plan),
        "schedule_detail": _schedule_detail(plan),
        "spares": _told(_spares, plan.spares),
        "alternatives": [candidate_json(c, request.attainment) for c in plan.alternatives],
        "passed_over": [{**_kind(p.worker_type), "reason": p.reason} for p in plan.passed_over],
        "baselines": _baselines(plan),
        "affinity": _affinity(plan),
        "prefix_cache": plan.prefix_cache,
        "reuse": rounded(asdict(plan.reuse)) if plan.reuse else None,
        **({} if plan.tier is None else {"host_kv": _tier(plan.tier)}),
        "curves": _curves(plan),
        "inputs": _inputs(plan),
    }


def _told(write: Callable[[Part], dict[str, Any]], part: Part | None) -> dict[str, Any] | None:
    return None if part is None else write(part)


def _predicted(best: Candidate | None, target: float) -> dict[str, Any]:
    """The prediction for the answer, on the trace and beyond it; null if there is none."""
    if best is None:
        told = dict.fromkeys(("ttft_s", "tpot_s", "utilisation"))
        return {"attainment": attainment_json(None, None, target), **told}
    return {
        "attainment": attainment_json(best.estimate, best.on_trace, target),
        "ttft_s": latency_json(best.ttft),
        "tpot_s": latency_json(best.tpot),
        "utilisation": _figures(best.utilisation),
    }


def fleet_json(fleet: Fleet) -> dict[str, Any]:
    """A fleet's groups and totals."""
    return {
        "fleet": [
            {
                **_kind(group.worker_type),
                "workers": group.workers,
                "gpus": group.gpus,
                "usd_per_hour": _usd(Fleet((group,))),
                "role": group.role,
                "profile_kind": group.worker_type.profile.source.kind,
            }
            for group in fleet.groups
        ],
        "workers": fleet.workers,
        "gpus": fleet.gpus,
        "usd_per_hour": _usd(fleet) if fleet.groups else None,
    }


def _kind(worker_type: WorkerType) -> dict[str, Any]:
    """The name of a worker type in a plan (`plan_file.kind_of_worker`)."""
    profile = worker_type.profile
    named = {"gpu": profile.gpu, "tp_degree": profile.tp_degree}
    return named if profile.ranks is None else {**named, "ranks": profile.ranks.name}


def candidate_json(candidate: Candidate, target: float) -> dict[str, Any]:
    """A fleet that was considered, in the form of the plan's own."""
    return {
        **fleet_json(candidate.fleet),
        "attainment": attainment_json(candidate.estimate, candidate.on_trace, target),
        "ttft_s": latency_json(candidate.ttft),
        "tpot_s": latency_json(candidate.tpot),
        "utilisation": _figures(candidate.utilisation),
        "prefix_hit_rate": _share(candidate.hit_rate),
        "note": candidate.note or None,
    }


def attainment_json(estimate: Estimate | None, on_trace: float | None, target: float) -> dict[str, Any]:
    """Attainment with its bounds; null where it was not estimated."""
    return {
        "target": target,
        "expected": _share(estimate.expected if estimate else None),
        "low": _share(estimate.low if estimate else None),
        "high": _share(estimate.high if estimate else None),
        "confidence": estimate.confidence if estimate else None,
        "worlds": estimate.replicates if estimate else 0,
        "on_trace": _share(on_trace),
    }


def latency_json(latency: Latency) -> dict[str, float | None]:
    """p50, p90, p99 and the mean, seconds."""
    row = {f"p{round(q * 100)}": _figures(latency.at(q)) for q in QUANTILES}
    return row | {"mean": _figures(latency.mean)}


def _classes(plan: Plan) -> list[dict[str, Any]]:
    """Each class's targets, what becomes of it, and what it costs; in whole plans alone the latter."""
    rows = [_class_targets(one) for one in plan.inputs.classes]
    whole = None if plan.best is None else plan.best.fleet.usd_per_hour
    for row, one in zip(rows, plan.classes, strict=False):
        row["attainment"] = attainment_json(one.estimate, one.on_trace, one.of.attainment)
        others = None if one.without is None else one.without.usd_per_hour
        row |= {
            "requests": one.requests,
            "binds": one.binds,
            "without": None if one.without is None else fleet_json(one.without),
            "marginal_usd_per_hour": None if whole is None or others is None else round(whole - others, 4),
            "alone": None if one.alone is None else fleet_json(one.alone),
            "runs_on": [{"worker": kind, "share": round(share, 4)} for kind, share in one.runs_on],
        }
    return rows


def _class_targets(one: SloClass) -> dict[str, Any]:
    return {
        "name": one.name,
        "ttft_s": one.slo.ttft_s,
        "tpot_s": one.slo.tpot_s,
        "deadline_s": one.deadline_s,
        "attainment": {"target": one.attainment},
    }


def _one_fewer(fewer: SmallerFleet) -> dict[str, Any]:
    expected = fewer.estimate.expected if fewer.estimate else fewer.on_trace
    return {
        "workers": fewer.workers,
        "attainment": _share(expected),
        "low": _share(fewer.estimate.low if fewer.estimate else None),
        "on_trace": _share(fewer.on_trace),
        "fails": fewer.fails,
        **({"fleet": fleet_json(fewer.fleet)["fleet"]} if fewer.fleet else {}),
    }


def _moves(worth: MovesWorth) -> dict[str, Any]:
    """The plan's fleet with and without moves, and the fleet that the target takes without them."""
    return {
        "kept": worth.kept,
        "workers_without": worth.needs.workers,
        "usd_per_hour_without": _usd(worth.needs),
        "with_moves": _told(lambda one: rounded(asdict(one)), worth.on),
        "without_moves": _told(lambda one: rounded(asdict(one)), worth.off),
        "why_not": worth.why_not or None,
    }


def _binding(bind: Binding | None) -> dict[str, Any]:
    """The constraint that binds, when, and what says so."""
    if bind is None:
        return dict.fromkeys(("binding", "binding_window_s", "binding_detail"))
    detail = {
        "workers": bind.fleet.workers,
        "fleet": fleet_json(bind.fleet)["fleet"],
        "rate_scale": bind.rate_scale,
        **({} if bind.slo_class is None else {"slo_class": bind.slo_class}),
        "attainment": _share(bind.attainment),
        "window_attainment": _share(bind.window_attainment),
        "relief": {name: _share(gain) for name, gain in bind.relief.items()},
        "prefix_hit_rate": _share(bind.hit_rate),
        "prefix_hit_rate_more_kv": _share(bind.hit_rate_more_kv),
    }
    window_s = [round(t, 3) for t in bind.window_s]
    return {"binding": bind.constraint, "binding_window_s": window_s, "binding_detail": detail}


def _plateau(flat: AttainmentPlateau) -> dict[str, Any]:
    """The worker counts between which attainment hardly differs; misses that no count mends, by target."""
    return {
        "workers": list(flat.workers),
        "span": _share(flat.span),
        "missed": _share(flat.missed),
        "alone": {"ttft": _share(flat.alone_ttft), "tpot": _share(flat.alone_tpot)},
        "alone_needs_s": {
            "ttft": None if flat.ttft_s is None else _figures(flat.ttft_s),
            "tpot": None if flat.tpot_s is None else _figures(flat.tpot_s),
        },
    }


def _doubt(doubt: Doubt) -> dict[str, Any]:
    shares = {name: _share(share) for name, share in doubt.shares.items()}
    return {**rounded(asdict(doubt)), "mostly": doubt.mostly, "shares": shares}


def _mixes(plan: Plan, search: MixSearch) -> dict[str, Any]:
    serving = plan.spares.serving if plan.spares else plan.best.fleet if plan.best else None
    may_save = None if serving is None else _share(search.may_save(serving))
    return {"replayed": search.mixes, "replays": search.replays, "may_save": may_save}


def _sampled(sampled: Sampled) -> dict[str, Any]:
    """The sample of a long trace, its bound on the whole trace's attainment, and that attainment."""
    return {
        "requests": sampled.requests,
        "windows": sampled.windows,
        "binding_windows": sampled.binding,
        "of_windows": sampled.of_windows,
        "attainment": _share(sampled.attainment),
        "low": _share(sampled.low),
        "full_replay": _share(sampled.whole),
        "added_workers": sampled.added,
        "explained_by_requests": ROUGHLY,
    }


def _nearest(plan: Plan) -> dict[str, Any] | None:
    near = plan.nearest
    if near is None and plan.nearest_attainment is None:
        return None
    if near is None:
        return {"attainment": _share(plan.nearest_attainment)}
    return {
        "ttft_s": near.slo.ttft_s,
        "tpot_s": near.slo.tpot_s,
        "session_s": near.session_s,
        **fleet_json(near.fleet),
        "attainment": _share(near.estimate.expected),
        "low": _share(near.estimate.low),
        "looser": _figures(near.looser),
    }


def _line(line: DemandLine | None) -> dict[str, Any]:
    """The line over rates, which a scaler may follow. A line over agents has a name of its own."""
    if line is None:
        return {"demand_line": None}
    told = {
        "workers_per_agent" if line.of_agents else "workers_per_rps": _figures(line.slope),
        "intercept": _figures(line.intercept),
        "r2": _share(line.r2),
        "points": [[_figures(x), _figures(y)] for x, y in line.points],
        "mean_prompt_tokens": _figures(line.prompt_tokens),
        "mean_output_tokens": _figures(line.output_tokens),
    }
    return {"demand_line": None, "agents_line": told} if line.of_agents else {"demand_line": told}


def _schedule(plan: Plan) -> list[dict[str, Any]]:
    if plan.schedule is None or plan.best is None:
        return []
    return [
        {
            "start_s": round(s.start_s, 3),
            "end_s": round(s.end_s, 3),
            "workers": s.workers,
            # Of a mix a count alone would not say which workers stay.
            "gpus": apportioned(plan.best.fleet, s.workers).gpus,
            "fleet": apportioned(plan.best.fleet, s.workers).label,
        }
        for s in plan.schedule.stretches
    ]


def _schedule_detail(plan: Plan) -> dict[str, Any] | None:
    if plan.schedule is None:
        return None
    return {
        "attainment": _share(plan.schedule.attainment),
        **({} if plan.schedule.low is None else {"low": _share(plan.schedule.low)}),
        "saved_share": _share(plan.schedule.saved_share),
        "each_window": "starts after a 30 s lead-in; start-up and draining between windows are not included",
        "paid": _paid(plan),
        **({"week": week_rows(plan.schedule.week)} if plan.schedule.week else {}),
    }


def week_rows(week: Sequence[int]) -> dict[str, list[int]]:
    """Workers by weekday, for each cell of the day (UTC)."""
    of_day = len(week) // len(WEEKDAYS)
    return {name: list(week[day * of_day : (day + 1) * of_day]) for day, name in enumerate(WEEKDAYS)}


def _paid(plan: Plan) -> dict[str, Any] | None:
    """The schedule with its cold starts: what is paid when, and what must be ordered when."""
    if plan.paid is None or plan.best is None or plan.schedule is None:
        return None
    usd = plan.paid.usd_per_hour(plan.best.fleet)
    hours = plan.best.fleet.workers * sum(s.end_s - s.start_s for s in plan.schedule.stretches) / 3600.0
    return {
        "cold_start_s": plan.paid.cold_start_s,
        "worker_hours": _figures(plan.paid.worker_hours),
        "saved_share": _share(1.0 - plan.paid.worker_hours / hours) if hours > 0 else None,
        "usd_per_hour": None if usd is None else round(usd, 4),
        "stretches": [
            {"start_s": round(s.start_s, 3), "end_s": round(s.end_s, 3), "workers": s.workers}
            for s in plan.paid.stretches
        ],
        "orders": [
            {"order_s": round(o.order_s, 3), "ready_s": round(o.ready_s, 3), "workers": o.workers}
            for o in plan.paid.orders
        ],
    }


def _spares(spares: StandbyWorkers) -> dict[str, Any]:
    return {
        "workers": spares.workers,
        "serving": fleet_json(spares.serving),
        "reclaims_per_h": spares.reclaims_per_h,
        "cold_start_s": spares.cold_start_s,
        "availability": _share(spares.availability),
        "untouched": _share(spares.untouched),
        "covers": "workers interrupted one by one; not a zone that is cleared at once",
    }


def _tier(tier: TierWorth) -> dict[str, Any]:
    """The worth of KV offload on the trace; `workers`: the fewest with it."""
    without, host = tier.fleet_without, tier.profile.host_kv
    assert host is not None
    return {
        "gib": _figures(host.capacity_bytes / 2**30),
        "gb_per_s": _figures(host.bytes_per_s / 1e9),
        "prefix_hit_rate": _share(tier.hit_rate),
        "loaded": _share(tier.from_host),
        "prefix_hit_rate_without": _share(tier.hit_rate_without),
        "workers": tier.fleet.workers,
        "usd_per_hour": _usd(tier.fleet),
        "workers_without": without.workers if without else None,
        "usd_per_hour_without": _usd(without) if without else None,
        "host_usd_per_hour": round(tier.fleet.host_usd_per_hour, 4),
        "saved_usd_per_hour": None if (saved := tier.saved_usd_per_hour) is None else round(saved, 4),
        "tried_up_to": tier.tried,
    }


def _baselines(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "policy": b.policy,
            "workers": b.fleet.workers if b.fleet else None,
            "gpus": b.fleet.gpus if b.fleet else None,
            "usd_per_hour": _usd(b.fleet) if b.fleet else None,
            "tried_up_to": b.tried,
            "prefix_hit_rate": _share(b.hit_rate),
        }
        for b in plan.baselines
    ]


def _affinity(plan: Plan) -> dict[str, Any] | None:
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
    return {
        "policy": best.policy,
        "workers": other.workers,
        "saved_workers": max(other.workers - mine.workers, 0),
        "saved_usd_per_hour": round((other.usd_per_hour or 0.0) - (mine.usd_per_hour or 0.0), 4)
        if priced
        else None,
        "prefix_hit_rate": _share(best.hit_rate),
    }


def rounded(value: Any) -> Any:
    """A record's fields as JSON has them."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [rounded(part) for part in value]
    return _figures(value) if isinstance(value, float) else value


def _curves(plan: Plan) -> dict[str, Any]:
    """The data of the report's plots."""
    workers = sorted({*plan.on_trace, *plan.sure})
    return {
        "rate_rps": [[round(t, 3), _figures(r)] for t, r in plan.inputs.rate_curve],
        "attainment_by_workers": [
            {
                "workers": n,
                "on_trace": _share(plan.on_trace.get(n)),
                "expected": _share(plan.sure[n].expected) if n in plan.sure else None,
                "low": _share(plan.sure[n].low) if n in plan.sure else None,
                "high": _share(plan.sure[n].high) if n in plan.sure else None,
            }
            for n in workers
        ],
        "ttft_cdf": _cdf(plan.best.ttft) if plan.best else [],
        "tpot_cdf": _cdf(plan.best.tpot) if plan.best else [],
        "cost_by_slo": [
            {
                "scale": c.scale,
                "on": c.on,
                "ttft_s": _figures(c.slo.ttft_s),
                "tpot_s": _figures(c.slo.tpot_s),
                "workers": c.fleet.workers if c.fleet else None,
                "gpus": c.fleet.gpus if c.fleet else None,
                "usd_per_hour": _usd(c.fleet) if c.fleet else None,
            }
            for c in plan.costed
        ],
    }


def _cdf(latency: Latency) -> list[list[float | None]]:
    """(seconds, share) pairs, closer together towards the tail, where the target is."""
    if len(latency.sorted_s) == 0:
        return []
    shares = np.unique(
        np.concatenate((np.linspace(0, 0.9, 31), 1.0 - np.geomspace(0.1, 1e-4, CURVE_POINTS - 30)))
    )
    return [[_figures(latency.at(float(s))), _share(float(s))] for s in (*shares, 1.0)]


def _workers_range(plan: Plan) -> dict[str, Any]:
    """The workers that a recorded trace might lead to; nothing where the trace is one."""
    best, inputs = plan.best, plan.inputs
    if best is None or inputs.assumed is None:
        return {}
    line = None if plan.line is None or plan.line.of_agents else plan.line
    needed = None if line is None else lambda times: line.slope * inputs.rate_rps * times + line.intercept
    return {"workers_range": list(workers_range(inputs.assumed.levels, best.fleet.workers, needed))}


def _inputs(plan: Plan) -> dict[str, Any]:
    inputs = plan.inputs
    return {
        "trace": inputs.trace,
        "requests": inputs.requests,
        "rate_rps": _figures(inputs.rate_rps),
        "duration_s": round(inputs.duration_s, 3),
        "clock_start_unix_s": inputs.clock_start_s,
        "rate_scale": inputs.rate_scale,
        "ideal_hit_rate": _share(inputs.ideal_hit_rate),
        "phases": phases_json(inputs.phases),
        "profiles": [_type_json(t) for t in plan.worker_types],
        "warnings": list(inputs.warnings),
        "ages": list(inputs.ages),
        **({} if inputs.assumed is None else {"assumed": [list(row) for row in inputs.assumed.rows]}),
        "confidence": plan.request.confidence,
        "max_gpus": plan.request.max_gpus,
        "budget_usd_per_h": plan.request.budget_usd_per_h,
        "seed": plan.request.seed,
    }


def _type_json(worker_type: WorkerType) -> dict[str, Any]:
    profile = worker_type.profile
    return {
        "model": profile.model,
        **_kind(worker_type),
        "kind": profile.source.kind,
        "date": str(profile.source.date),
        "mean_relative_error": _figures(profile.residuals.mean_relative),
        "unseen_relative_error": _figures(profile.residuals.unseen_relative),
        "engine": f"{profile.engine.name} {profile.engine.version}".strip(),
        "context_limit_tokens": profile.context_limit_tokens,
        **_link(worker_type.kv_link),
        "usd_per_gpu_h": worker_type.usd_per_gpu_h,
        "price": worker_type.priced,
        "profile": profile_document(profile),
    }


def _link(link: KvLink | None) -> dict[str, Any]:
    """The link by which a split fleet's workers transfer KV."""
    if link is None:
        return {}
    return {"kv_link": {"gb_per_s": _figures(link.bytes_per_s / 1e9), "latency_s": link.latency_s}}


def _usd(fleet: Fleet) -> float | None:
    usd = fleet.usd_per_hour
    return None if usd is None else round(usd, 4)


def _share(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 6)


def _figures(value: float) -> float | None:
    """Six significant figures; null for what is not a number, which JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
