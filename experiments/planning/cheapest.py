"""Is the fleet that a plan calls cheapest the cheapest? Small cases, each held against every cheaper mix.

    python experiments/planning/cheapest.py [--part development|judged] [--quick] [--seed N] [--format …]

Minutes of the sample trace at many times its rate, so that a fleet has a few workers of two or three kinds.
Every mix that is cheaper than the plan's fleet is judged as the planner judges: on the recorded trace and in
19 resampled traces, without moves. None is taken to fail because a larger one does. `cheaper`: by how much
the cheapest of those that hold is cheaper than the plan's. `may be`: by how much the plan says it may be. The
search was made on the cases for development.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from controlplane.worker_type import WorkerGroup, WorkerType
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from tokenfleet.api.options import request_of
from tokenfleet.planning.estimate import Trial
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.inputs import gather
from tokenfleet.planning.planner import make_plan, strictest
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.search import Search
from tokenfleet.planning.threads import open_threads
from tokenfleet.traces import Trace, read_trace

MOST = 0.02  # by which a cheaper mix may be missed


class Case(NamedTuple):
    """Traffic of the sample trace, targets, and the GPU types and TP degrees on offer."""

    window: str
    scale: float
    slo: tuple[str, ...]
    gpus: str
    tps: tuple[int, ...] = (1,)
    model: str = "llama-3.1-8b"
    seed: int = 0


CHAT, BATCH = "chat:ttft=300ms,tpot=40ms", "batch:ttft=10s,tpot=150ms,attainment=0.95"
THREE, TWO = "h100 l40s a100", "h100 a100"
CASES = {
    "development": (
        Case("0m..8m", 16, ("ttft=250ms,tpot=60ms",), THREE),
        Case("0m..6m", 10, ("ttft=200ms,tpot=50ms",), THREE),
        Case("4m..9m", 20, ("ttft=400ms,tpot=40ms",), THREE),
        Case("9m..14m", 12, ("ttft=300ms,tpot=100ms",), "h100 l40s"),
        Case("20m..23m", 24, ("ttft=350ms,tpot=30ms",), "h200 a100"),
        Case("0m..5m", 14, ("ttft=1s,tpot=25ms",), "h200 h100 a100"),
        Case("2m..6m", 4, ("ttft=1.2s,tpot=60ms",), TWO, (2, 4), "llama-3.1-70b"),
        Case("2m..6m", 4, ("ttft=1.6s,tpot=75ms",), "h100 h200", (2,), "llama-3.1-70b"),
        Case("0m..4m", 16, (CHAT, BATCH), THREE),
        Case("6m..10m", 24, (CHAT, BATCH), "h100 l40s"),
    ),
    "judged": (
        Case("10m..16m", 14, ("ttft=220ms,tpot=55ms",), THREE, seed=1),
        Case("30m..35m", 10, ("ttft=280ms,tpot=45ms",), THREE, seed=2),
        Case("24m..28m", 18, ("ttft=500ms,tpot=50ms",), THREE, seed=3),
        Case("40m..46m", 20, ("ttft=200ms,tpot=80ms",), TWO, seed=4),
        Case("14m..18m", 20, ("ttft=450ms,tpot=35ms",), "h200 l40s", seed=5),
        Case("26m..30m", 12, ("ttft=700ms,tpot=22ms",), "h200 h100 a100", seed=6),
        Case("8m..12m", 5, ("ttft=1s,tpot=50ms",), TWO, (2, 4), "llama-3.1-70b", 7),
        Case("33m..37m", 5, ("ttft=1.4s,tpot=60ms",), "h200 a100", (2, 4), "llama-3.1-70b", 8),
        Case("16m..20m", 14, (CHAT, BATCH), THREE, seed=9),
        Case("44m..48m", 20, (CHAT, BATCH), TWO, seed=10),
    ),
}


def of_case(case: Case) -> tuple[PlanRequest, Trace]:
    """The question and the trace; where it has classes, requests take turns in them."""
    request = request_of(
        case.slo, model=case.model, gpu=case.gpus.split(), tp=case.tps,
        window=case.window, rate_scale=case.scale, seed=case.seed, policy="spread",
    )  # fmt: skip
    trace = read_trace(ROOT / "examples/sample_trace.csv")
    if not request.classes:
        return request, trace
    names, load = tuple(one.name for one in request.slo_classes), trace.workload
    load = replace(load, slo_class=np.arange(len(load)) % len(names), slo_classes=names)
    return request, replace(trace, workload=load)


def compared(case: Case) -> dict[str, Any]:
    """A plan, and the cheapest of all fleets below its price that hold."""
    request, trace = of_case(case)
    made = gather(trace, request)
    with open_threads(1) as threads:
        plan = make_plan(made.workload, made.worker_types, request, made.inputs, threads, explained=False)
        classes = made.inputs.classes
        search = Search.of(
            strictest(request, classes), made.workload, made.worker_types, threads, classes=classes
        )
        assert plan.best is not None
        assert plan.mixes is not None
        below = fleets_below(plan.best.fleet.cost, made.worker_types)
        cheapest = next((fleet for fleet in below if holds(search, fleet)), None)
    usd = plan.best.fleet.cost[0]
    return {
        "case": f"{case.window} x{case.scale:g} {', '.join(case.slo)[:28]}",
        "plan": plan.best.fleet.label,
        "usd/h": round(usd, 2),
        "replays": plan.mixes.replays,
        "may be": round(plan.mixes.may_save(plan.best.fleet), 3),
        "tried": len(below),
        "cheaper": 0.0 if cheapest is None else round(1.0 - cheapest.cost[0] / usd, 3),
        "by": None if cheapest is None else cheapest.label,
    }


def fleets_below(cost: tuple[float, int, int], kinds: Sequence[WorkerType]) -> list[Fleet]:
    """All fleets of these types that cost less, the cheapest first."""
    most = (range(int(cost[0] / (kind.usd_per_h or 1.0)) + 1) for kind in kinds)
    fleets = (
        Fleet(tuple(WorkerGroup(kind, n) for kind, n in zip(kinds, counts, strict=True) if n))
        for counts in itertools.product(*most)
    )
    return sorted((f for f in fleets if f.groups and f.cost[:2] < cost[:2]), key=lambda fleet: fleet.cost)


def holds(search: Search, fleet: Fleet) -> bool:
    on_trace = search.replay(fleet, most_missed=search.may_miss)
    return search.meets(on_trace) and Trial(search, fleet).holds()


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--part", choices=tuple(CASES), default="judged")
    asked = parser.parse_args()
    cases = CASES[asked.part][:3] if asked.quick else CASES[asked.part]
    rows = [compared(case._replace(seed=case.seed + asked.seed)) for case in cases]
    bars = {
        "most_cheaper": bar(max(row["cheaper"] for row in rows), MOST),
        "beyond what the plan says": bar(max(row["cheaper"] - row["may be"] for row in rows), 0.0),
    }
    return show("the cheapest fleet", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
