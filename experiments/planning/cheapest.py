"""Is the fleet that a plan calls cheapest the cheapest? Small cases, each held against every cheaper mix.

    python experiments/planning/cheapest.py [--part development|judged|drawn|portfolios]
        [--quick] [--resume FOLDER] [--seed N] [--format …]

Minutes of the sample trace at many times its rate, so that a fleet has a few workers of two or three kinds.
Every mix that is cheaper than the plan's fleet is judged as the planner judges: on the recorded trace and in
19 resampled traces, without moves. None is taken to fail because a larger one does. `cheaper`: by how much
the cheapest of those that hold is cheaper than the plan's. `may be`: by how much the plan says it may be. The
search was made on the cases for development. Those of `drawn` were drawn after it: 28, every third of them
with two classes.

`portfolios`: nine of two or three models with limits on the GPUs of a type, on all GPUs or on dollars. Each
answer is held against every choice of cheaper fleets within the limits, mixes among them, as constant fleets.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from controlplane.errors import Infeasible
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
from tokenfleet.planning.threads import Threads, open_threads
from tokenfleet.portfolios.offers import tasks_of
from tokenfleet.portfolios.plan import plan_portfolio
from tokenfleet.portfolios.request import Model, Portfolio
from tokenfleet.profiles.library import canonical_gpus
from tokenfleet.report.tables import fleet_text
from tokenfleet.traces import Trace, read_trace
from tokenfleet.whatifs.solve import Cache

MOST = 0.02  # by which a cheaper mix may be missed
TRACE = ROOT / "examples/sample_trace.csv"
DRAWN, PORTFOLIOS = 28, 9
MOST_USD = 40.0  # of a portfolio that the plan has no answer to


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


def drawn(number: int, with_classes: bool) -> Case:
    """A case by chance: 3 to 6 minutes, targets from tight to loose, two or three kinds of worker."""
    rng = np.random.default_rng([31, number])
    start, long = int(rng.integers(0, 52)), int(rng.integers(3, 7))
    kinds = sorted(rng.choice(["h100", "l40s", "a100", "h200"], int(rng.integers(2, 4)), replace=False))
    ttft_ms, tpot_ms = int(rng.integers(20, 100)) * 10, int(rng.integers(5, 20)) * 5
    slo = (CHAT, BATCH) if with_classes else (f"ttft={ttft_ms}ms,tpot={tpot_ms}ms",)
    return Case(
        f"{start}m..{start + long}m", int(rng.integers(6, 20)), slo, " ".join(kinds), seed=100 + number
    )


def of_case(case: Case) -> tuple[PlanRequest, Trace]:
    """The question and the trace; where it has classes, requests take turns in them."""
    request = request_of(
        case.slo, model=case.model, gpu=case.gpus.split(), tp=case.tps,
        window=case.window, rate_scale=case.scale, seed=case.seed, policy="spread",
    )  # fmt: skip
    trace = read_trace(TRACE)
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
        best = None if plan.best is None else plan.best.fleet
        below = fleets_below((MOST_USD, 0, 0) if best is None else best.cost, made.worker_types)
        cheapest = next((fleet for fleet in below if holds(search, fleet)), None)
    return {
        "case": f"{case.window} x{case.scale:g} {', '.join(case.slo)[:28]}",
        "plan": None if best is None else best.label,
        "usd/h": None if best is None else round(best.cost[0], 2),
        "replays": 0 if plan.mixes is None else plan.mixes.replays,
        "may be": 0.0 if best is None or plan.mixes is None else round(plan.mixes.may_save(best), 3),
        "tried": len(below),
        "cheaper": saved(None if best is None else best.cost[0], cheapest and [cheapest]),
        "by": None if cheapest is None else cheapest.label,
    }


def limited(number: int, seed: int) -> tuple[list[Case], dict[str, Any]]:
    """The models of a portfolio, one drawn case each, and its limits, which bind."""
    rng = np.random.default_rng([32, number])
    cases = [drawn(200 + 3 * number + i, False) for i in range(2 + number % 2)]
    cases = [case._replace(gpus=THREE, scale=case.scale / 2, seed=case.seed + seed) for case in cases]
    tight = int(rng.integers(1, 4))
    if number % 3 == 2:
        return cases, {"gpus": {}, "max_gpus": 3 * len(cases)}
    return cases, {"gpus": {canonical_gpus(THREE.split()[number // 3 % 3])[0]: tight}}


def chosen(number: int, seed: int) -> dict[str, Any]:
    """A portfolio's answer, and the cheapest constant choices within its limits."""
    cases, limits = limited(number, seed)
    models = [Model(f"model-{i}", (TRACE,), (of_case(case)[0],)) for i, case in enumerate(cases)]
    portfolio = Portfolio(tuple(models), **limits)
    row: dict[str, Any] = {"case": f"{len(cases)} models, {limits}"}
    try:
        plan = plan_portfolio(portfolio, tasks_of(portfolio), 1, Cache(None))
    except Infeasible:
        usd: float | None = None
    else:
        usd = plan.constant_usd_per_h
        row["plan"] = "; ".join(fleet_text(one.plan.fleet) for one in plan.rows)
    with open_threads(1) as threads:
        found = enumerated(cases, portfolio, usd or MOST_USD, threads)
    row |= {"usd/h": usd, "cheaper": saved(usd, found)}
    return row | {"by": "; ".join(fleet.label for fleet in found or ())}


def saved(usd: float | None, fleets: Sequence[Fleet] | None) -> float:
    """The share of dollars that the fleets save; 1 where the plan has no answer and there is one."""
    if fleets is None:
        return 0.0
    return 1.0 if usd is None else round(1.0 - cost(fleets) / usd, 3)


def enumerated(
    cases: Sequence[Case], portfolio: Portfolio, usd: float, threads: Threads
) -> Sequence[Fleet] | None:
    """The cheapest choice below a price that holds within the limits; None where there is none."""
    below, judges, least = [], [], []
    for case in cases:
        request, trace = of_case(case)
        made = gather(trace, request)
        search = Search.of(request, made.workload, made.worker_types, threads)
        judges.append(judge := cache(partial(holds, search)))
        below.append(fleets_below((usd, 0, 0), made.worker_types))
        first = next((f.cost[0] for f in below[-1] if judge(f)), None)
        if first is None:
            return None
        least.append(first)
    for i, fleets in enumerate(below):
        most = usd - sum(least) + least[i]
        below[i] = [f for f in fleets if least[i] - 1e-9 <= f.cost[0] <= most]
    choices = (c for c in itertools.product(*below) if cost(c) < usd - 1e-6 and fits(c, portfolio))
    for choice in sorted(choices, key=cost):
        if all(judge(fleet) for judge, fleet in zip(judges, choice, strict=True)):
            return choice
    return None


def cost(fleets: Sequence[Fleet]) -> float:
    return sum(fleet.cost[0] for fleet in fleets)


def fits(fleets: Sequence[Fleet], portfolio: Portfolio) -> bool:
    """Whether the fleets keep to the limits."""
    gpus = Counter[str | None]()
    for group in (group for fleet in fleets for group in fleet.groups):
        gpus[group.worker_type.gpu] += group.gpus
    in_all = portfolio.max_gpus is None or gpus.total() <= portfolio.max_gpus
    return in_all and all(gpus[gpu] <= most for gpu, most in portfolio.gpus.items())


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
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--part", choices=(*CASES, "drawn", "portfolios"), default="judged")
    asked = parser.parse_args()
    most = 3 if asked.quick else None
    if asked.part == "portfolios":
        work = [(f"portfolio {n}", partial(chosen, n, asked.seed)) for n in range(PORTFOLIOS)]
    else:
        cases = CASES.get(asked.part) or [drawn(n, n % 3 == 2) for n in range(DRAWN)]
        seeded = [case._replace(seed=case.seed + asked.seed) for case in cases]
        work = [(f"{asked.part} {n}", partial(compared, case)) for n, case in enumerate(seeded)]
    rows = [asked.resume.part(name, judge) for name, judge in work[:most]]
    bars = {"most_cheaper": bar(max(row["cheaper"] for row in rows), MOST)}
    if asked.part != "portfolios":
        beyond = max(row["cheaper"] - row["may be"] for row in rows)
        bars["beyond what the plan says"] = bar(beyond, 0.0)
    return show("the cheapest fleet", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
