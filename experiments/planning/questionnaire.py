"""Does a plan from users and a published shape come near the plan from the trace that they stand for?

    python experiments/planning/questionnaire.py [--quick] [--seed 0]

Each public trace is planned twice with one kind of worker: from its requests, and from the questionnaire,
which is given the shape and the trace's requests a day. The busiest hour is given as 1x where a trace is one
busy hour. Of `servegen` it is the default. `held out` marks traces from which the shape was not made:
LMBench's runs with ShareGPT texts (chat), and ServeGen's first day of m-mid, thinned, with Azure's lengths
(it judges the busiest hour alone). ShareGPT and LMBench have no arrivals of users: theirs are those of
Azure's hour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from controlplane.workload import Workload
from experiments.lib.public_data import AZURE_HOUR, SERVEGEN, SHAREGPT, azure_hour
from experiments.lib.results import bar, flags, show
from experiments.planning.prefix_policies import MOONCAKE, WEKA, weka_at
from tokenfleet.api.options import request_of
from tokenfleet.planning.inputs import gather
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.threads import open_threads
from tokenfleet.report.plan_json import plan_file
from tokenfleet.traces import Trace, read_trace
from tokenfleet.traces.distributions import AZURE_CONV
from tokenfleet.traces.usage import BUSIEST, DAY_S, Usage, trace_of_usage

LMBENCH = "lmbench/l70-k8s-vllm-sharegpt.parquet"
NEAR, ENOUGH = 0.3, 5


def at_azure(data: Path, table: pl.DataFrame, prompt: str, output: str) -> Workload:
    """Lengths drawn from a table, at the arrivals of Azure's hour."""
    arrival_s = azure_hour(data).arrival_s
    drawn = table.sample(len(arrival_s), with_replacement=True, seed=1)
    return Workload(arrival_s, drawn[prompt].to_numpy(), drawn[output].to_numpy())


def lmbench(data: Path) -> Workload:
    return at_azure(data, pl.read_parquet(data / LMBENCH), "prompt_tokens", "generation_tokens")


def sharegpt(data: Path) -> Workload:
    return at_azure(data, pl.read_csv(data / SHAREGPT), "num_prefill_tokens", "num_decode_tokens")


def servegen(data: Path) -> Workload:
    """A day of m-mid at 1/1000 of its rate."""
    rate_rps = pl.read_csv(data / SERVEGEN["m-mid"])["total_rate_rps"].to_numpy()[:144] / 1000
    rng = np.random.RandomState(1)
    counts = rng.poisson(rate_rps * 600)
    arrival_s = np.sort(np.repeat(np.arange(144) * 600.0, counts) + rng.uniform(0, 600, counts.sum()))
    return Workload(arrival_s, *AZURE_CONV.draw(len(arrival_s), rng))


class Case(NamedTuple):
    """A trace, the shape that it is told as, its worker, its targets, and the traffic multiplied."""

    read: Callable[[Path], Workload]
    shape: str
    gpu: str
    slo: str
    rate: float
    held_out: bool = False
    peak: float = 1.0


CASES = {
    "azure": Case(azure_hour, "chat", "a100", "ttft=1s,tpot=50ms", 4),
    "lmbench": Case(lmbench, "chat", "a100", "ttft=1s,tpot=50ms", 4, True),
    "servegen": Case(servegen, "chat", "a100", "ttft=1s,tpot=50ms", 8, True, BUSIEST),
    "sharegpt": Case(sharegpt, "long-chat", "a100", "ttft=1s,tpot=50ms", 2),
    "mooncake": Case(lambda at: read_trace(at / MOONCAKE).workload, "rag", "h100", "ttft=10s,tpot=60ms", 1),
    "weka": Case(
        lambda at: weka_at(read_trace(at / WEKA).workload, 0.02, 1).window(3600, 5000),
        *("agents", "h100", "ttft=10s,tpot=60ms", 1),
    ),
}  # fmt: skip


def main() -> int:
    parser = flags(__doc__, AZURE_HOUR, MOONCAKE, WEKA, SHAREGPT, LMBENCH, SERVEGEN["m-mid"])
    asked = parser.parse_args()
    rows = []
    for name, case in list(CASES.items())[: 2 if asked.quick else None]:
        share = {"attainment": 0.95, "confidence": 0.9} if case.shape in ("rag", "agents") else {}
        request = request_of(
            case.slo, model="llama-3.1-8b", gpu=case.gpu, tp=1, drop_too_long=True, seed=asked.seed, **share
        )
        load = case.read(asked.data)
        told = Usage(requests_per_day=load.rate_rps * case.rate * DAY_S, shape=case.shape, peak=case.peak)
        own = Trace(name, "plain", load), replace(request, rate_scale=float(case.rate))
        plans = []
        for trace, of_trace in (own, (trace_of_usage(told, asked.seed), request)):
            gathered = gather(trace, of_trace)
            with open_threads(2) as threads:
                plan = make_plan(gathered.workload, gathered.worker_types, of_trace, gathered.inputs, threads)
            plans.append(plan_file(plan))
        workers, guessed = (plan.workers for plan in plans)
        low, high = plans[1].workers_range or (0, 0)
        rows.append({
            "trace": name, "shape": case.shape, "held out": case.held_out, "workers": workers,
            "questionnaire": guessed, "ratio": round(guessed / max(workers, 1), 3), "low": low, "high": high,
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    near = sum(abs(row["ratio"] - 1) <= NEAR for row in rows)
    covered = sum(row["low"] <= row["workers"] <= row["high"] for row in rows)
    bars = {"near": bar(near, ENOUGH, at_least=True), "covered": bar(covered, len(rows), at_least=True)}
    return show("plans without a trace", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
