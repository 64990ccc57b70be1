"""Plan files: of some workers of one profile, and of any fleet with other fields of its own."""

from dataclasses import replace

from controlplane.errors import ProfileMissing
from controlplane.types import EngineMode, Slo
from tokenfleet.profiles.form import profile_document
from tokenfleet.profiles.library import find_profiles

SLO = Slo(0.4, 0.03)


PROFILE = find_profiles("llama-3.1-8b", ["h100"], [1])[0]


def plan_json(workers=2, **fields):
    """A plan of `workers` workers of PROFILE; `fields` replace its own."""
    part = {"gpu": PROFILE.gpu, "tp_degree": 1, "workers": workers, "usd_per_hour": 5.0, "role": "any"}
    return plan_of_fleet([part], PROFILE.model, **fields)


def plan_of_fleet(parts, model="llama-3.1-70b", **fields):
    """A plan of such a fleet; its totals and profiles are the fleet's unless they are given."""
    figures = {"p50": 0.1, "p90": 0.2, "p99": 0.3, "mean": 0.1}
    fleet = [{"gpus": p.get("tp_degree", 1) * p.get("workers", 1)} | p for p in parts if isinstance(p, dict)]
    dollars = [part.get("usd_per_hour") for part in fleet]
    source = {"kind": str(PROFILE.source.kind), "date": str(PROFILE.source.date)}
    profiles = []
    for part in fleet:
        of = {"gpu": part["gpu"], "tp_degree": part.get("tp_degree", 1)}
        profiles.append({"model": model, **of, "profile": document_of(model, **of)} | source)
    return {
        "schema": "tokenfleet.plan/1",
        "feasible": bool(fleet),
        "reason": None,
        "fleet": fleet,
        "workers": sum(part.get("workers", 1) for part in fleet),
        "gpus": sum(part["gpus"] for part in fleet),
        "usd_per_hour": None if None in dollars else sum(dollars),
        "policy": "spread",
        "engine_mode": str(PROFILE.engine.mode),
        "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
        "attainment": {"target": 0.9, "expected": 0.95, "low": 0.92},
        "ttft_s": figures,
        "tpot_s": figures,
        "inputs": {"rate_rps": 12.0, "profiles": profiles},
    } | fields


def document_of(model, gpu, tp_degree, mode=EngineMode.CHUNKED):
    """The library's profile of such a worker, or PROFILE's times under its name where there is none."""
    try:
        profile = find_profiles(model, [gpu], [tp_degree])[0]
    except ProfileMissing:
        profile = replace(PROFILE, model=model, gpu=gpu, tp_degree=tp_degree)
    return profile_document(profile.with_engine(mode, 8192, 256))


def on_parts(plan, workers_per_gpu):
    """A plan of workers of PROFILE that has `workers_per_gpu` of them on each GPU."""
    if workers_per_gpu == 1:
        return plan
    (planned,), fleet = plan["inputs"]["profiles"], plan["fleet"]
    profile = profile_document(PROFILE.shared(workers_per_gpu))
    fleet = [part | {"usd_per_hour": part["usd_per_hour"] / workers_per_gpu} for part in fleet]
    return plan | {"fleet": fleet, "inputs": plan["inputs"] | {"profiles": [planned | {"profile": profile}]}}


def portfolio_json(planned, gpus, cold_start_s=0.0, slo=SLO, workers_per_gpu=1, **fields):
    """The plan of a portfolio: `planned` workers of PROFILE for each model, and `gpus` GPUs of its type."""
    paid = {"paid": {"cold_start_s": cold_start_s, "usd_per_hour": None}}
    targets = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    models = [
        {"name": name, "plan": on_parts(plan_json(n, slo=targets, schedule_detail=paid), workers_per_gpu)}
        for name, n in planned.items()
    ]
    limits = [{"name": f"gpus.{PROFILE.gpu}", "most": gpus}]
    return {"schema": "tokenfleet.portfolio-plan/1", "models": models, "limits": limits} | fields
