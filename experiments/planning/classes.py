"""The cost of one fleet for several SLO classes, against a fleet for each.

    python experiments/planning/classes.py [--quick] [--resume FOLDER] [--seed 0] [--format table|json]

Traffic is the hour of Azure's conversations, and ten minutes of it at six times the rate. Hours of
ServeGen's m-mid rates at three times Azure's mean rate (20 minutes each) have Azure's lengths. Models are 8B
and 70B on three types of GPU. Classes are dealt to requests at random, so each has the trace's bursts:

  two    chat (half; 8B: 400/30 ms, 70B: 1600/75 ms; 99 %) and batch (half; 30 s, 200 ms; 95 %)
  four   chat (0.4), code (0.2; targets twice as loose; 98 %), agents (0.2; 10 s, 100 ms; 95 %), batch (0.2)

`shared / separate`: dollars of the plan's fleet over those of its classes' own, all at confidence 0.95. `in
time`: the least attainment over the asked one, of any class on the trace; `unseen`: in other draws of it.

  deadline   a day of m-mid's rates, squeezed into half an hour at 32 requests a second in the mean: chat, and
             half of the requests are batch work that comes with it. It is due in a quarter of that time (6 h
             of the day), or within 30 s. Dollars of the constant fleet.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from controlplane.workload import Workload
from experiments.lib.public_data import AZURE_HOUR, SERVEGEN, azure_hour
from experiments.lib.results import bar, flags, show
from tokenfleet.planning.classes import separate_usd
from tokenfleet.planning.inputs import gather
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.request import PlanRequest, read_targets
from tokenfleet.planning.result import Plan
from tokenfleet.planning.search import Search
from tokenfleet.planning.threads import open_threads
from tokenfleet.traces import Trace

MODELS = {"llama-3.1-8b": (0.4, 0.03), "llama-3.1-70b": (1.6, 0.075)}
GPUS = ("a100", "h100", "h200")
SHARES = {"two": (0.5, 0.5), "four": (0.4, 0.2, 0.2, 0.2)}
BATCH = "batch:ttft=30s,tpot=200ms,attainment=0.95"
SERVEGEN_HOURS = (20, 200)  # ten-minute stretches of m-mid that six of begin there
MOST, DEADLINE_MOST, UNSEEN = 0.80, 0.65, range(101, 105)


def slos(model: str, classes: str) -> list[str]:
    ttft_s, tpot_s = MODELS[model]
    chat = f"chat:ttft={ttft_s}s,tpot={tpot_s}s,attainment=0.99"
    if classes == "two":
        return [chat, BATCH]
    code = f"code:ttft={2 * ttft_s}s,tpot={2 * tpot_s}s,attainment=0.98"
    return [chat, code, "agents:ttft=10s,tpot=100ms,attainment=0.95", BATCH]


def servegen_hour(data: Path, begin: int, rate_rps: float, rng: np.random.Generator) -> Workload:
    """Six ten-minute rates of m-mid from `begin` on, in their proportions, with lengths of Azure's hour."""
    rates = pl.read_csv(data / SERVEGEN["m-mid"])["total_rate_rps"].to_numpy()[begin : begin + 6]
    rates = np.maximum(rates, 0.1) / rates.mean() * rate_rps
    parts = [200.0 * i + np.sort(rng.uniform(0, 200, rng.poisson(200 * r))) for i, r in enumerate(rates)]
    return with_lengths(np.concatenate(parts), azure_hour(data), rng)


def with_lengths(arrival_s: np.ndarray, lengths: Workload, rng: np.random.Generator) -> Workload:
    rows = rng.integers(0, len(lengths), len(arrival_s))
    return Workload(arrival_s, lengths.prompt_tokens[rows], lengths.output_tokens[rows])


def dealt(
    workload: Workload, shares: tuple[float, ...], names: list[str], rng: np.random.Generator
) -> Workload:
    of = rng.choice(len(shares), len(workload), p=shares)
    return replace(workload, slo_class=of, slo_classes=tuple(name.partition(":")[0] for name in names))


def plan_of(workload: Workload, model: str, targets: list[str], seed: int, explained: bool) -> Plan:
    request = PlanRequest(
        **read_targets(targets), model=model, gpu=GPUS, seed=seed, drop_too_long=True, policy="spread"
    )
    gathered = gather(Trace("made", "plain", workload), request)
    with open_threads(2) as threads:
        return make_plan(
            *(gathered.workload, gathered.worker_types, request, gathered.inputs, threads),
            explained=explained,
        )


def margin(plan: Plan, workload: Workload, seeds: range) -> float:
    """The least attainment over what is asked, of any class in other draws of the traffic."""
    assert plan.best is not None
    of, classes = plan.inputs.classes, plan.inputs.classes
    with open_threads(1) as threads:
        made = Search.of(plan.request, workload, (), threads, classes=of)
    outcomes = [made.replay(plan.best.fleet, seed) for seed in seeds]
    return float(min((o.class_attainments / [c.attainment for c in classes]).min() for o in outcomes))


def shared(workload: Workload, model: str, classes: str, seed: int) -> dict[str, Any]:
    """A plan of the classes together, beside their own."""
    rng = np.random.default_rng([seed, len(classes)])
    targets = slos(model, classes)
    load = dealt(workload, SHARES[classes], targets, rng)
    plan = plan_of(load, model, targets, seed, True)
    if plan.best is None:
        return {"fleet": plan.reason, "shared / separate": float("nan")}
    usd, apart = plan.best.fleet.usd_per_hour, separate_usd(plan.classes)
    assert usd is not None
    assert apart is not None
    return {
        "fleet": plan.best.fleet.label,
        "usd/h": usd,
        "separate": apart,
        "shared / separate": round(usd / apart, 3),
        "in time": round(min(c.on_trace / c.of.attainment for c in plan.classes), 4),
        "unseen": round(margin(plan, load, UNSEEN), 4),
        "binds": next((c.of.name for c in plan.classes if c.binds), "-"),
    }


def deadline(
    data: Path, rng: np.random.Generator, seed: int, seconds: float, rate_rps: float
) -> dict[str, Any]:
    """Batch work beside chat over a day, squeezed: due in a quarter of it, and served on arrival."""
    rates = pl.read_csv(data / SERVEGEN["m-mid"])["total_rate_rps"].to_numpy()[:144]
    rates = np.maximum(rates, 0.1) / rates.mean() * rate_rps
    width_s = seconds / len(rates)
    arrival_s = np.concatenate(
        [
            width_s * i + np.sort(rng.uniform(0, width_s, rng.poisson(width_s * r)))
            for i, r in enumerate(rates)
        ]
    )
    load = with_lengths(arrival_s, azure_hour(data), rng)
    chat = slos("llama-3.1-8b", "two")[0]
    usd = {}
    for name, batch in (
        ("due", f"batch:deadline={seconds / 4}s,tpot=100ms,attainment=0.95"),
        ("on arrival", BATCH),
    ):
        targets = [chat, batch]
        plan = plan_of(
            dealt(load, (0.5, 0.5), targets, np.random.default_rng(seed)),
            "llama-3.1-8b",
            targets,
            seed,
            False,
        )
        assert plan.best is not None, plan.reason
        usd[name] = plan.best.fleet.usd_per_hour
    return {**usd, "due / on arrival": round(usd["due"] / usd["on arrival"], 3)}  # type: ignore[operator]


def main() -> int:
    parser = flags(__doc__, AZURE_HOUR, SERVEGEN["m-mid"], resumes=True)
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    azure = azure_hour(asked.data)
    loads = {"azure x 6": azure.window(0, 900 if asked.quick else 7200).scaled(6.0)}
    if not asked.quick:
        more = {
            f"m-mid {at}": servegen_hour(asked.data, at, 3 * azure.rate_rps, rng) for at in SERVEGEN_HOURS
        }
        loads |= {"azure": azure, **more}
    models = list(MODELS)[:1] if asked.quick else list(MODELS)
    rows = []
    for name, load in loads.items():
        for model in models:
            for classes in SHARES:
                part = f"{name} {model} {classes}"
                found = asked.resume.part(
                    part, lambda c=classes, m=model, w=load: shared(w, m, c, asked.seed)
                )
                rows.append({"load": name, "model": model, "classes": classes, **found})
    seconds, rate_rps = (1200.0, 16.0) if asked.quick else (1800.0, 32.0)
    late = asked.resume.part("deadline", lambda: deadline(asked.data, rng, asked.seed, seconds, rate_rps))
    ratios = [row["shared / separate"] for row in rows]
    bars = {
        "dollars of the shared fleet over separate ones, mean": bar(float(np.mean(ratios)), MOST),
        "least attainment over what is asked, on the trace": bar(
            min(row["in time"] for row in rows), 1.0, at_least=True
        ),
        "dollars with a deadline over those on arrival": bar(late["due / on arrival"], DEADLINE_MOST),
    }
    return show("classes", [*rows, {"load": "deadline", **late}], bars, asked)


if __name__ == "__main__":
    sys.exit(main())
