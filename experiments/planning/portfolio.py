"""Twenty models on one budget: how long the choice takes, and what shared limits and schedules are worth.

    python experiments/planning/portfolio.py [--part limits|sharing] [--quick] [--seed N] [--jobs N]
        [--format table|json]

The models have shares of the Azure hour's requests, which swing by a factor of five over the hour, each at a
time of its own: twelve of Llama-3.1 8B at 0.5 to 2 requests a second at most (400 ms, 30 ms), eight of 70B at
0.3 to 1.5 (1.6 s, 75 ms). Each may have A100s, H100s or H200s: sixty plans, on `--jobs` processes. First
without limits; then with two thirds of the type of GPU that is taken most, and a quarter more GPUs in all.
`--quick`: four models of ten minutes. Such small models have a worker or two all the time, and schedules save
nothing here; tests/tokenfleet/portfolio/test_portfolio.py has models that are large enough for day and night.

`wall_s` of the first has all plans in it, none kept before; the second finds them kept. That no other choice
within the limits is cheaper is held against every combination by tests/tokenfleet/portfolio/test_choose.py.
Limits are held here against the sum of all models in each window.

`--part sharing`: what it saves that small models share GPUs. Of the twelve of 8B six are rarely used, at 0.1
to 0.5 requests a second at most (2 s, 80 ms); all else is as above. At most one, two and four workers on a
GPU, each step counted as one, two and four times as long; no limits.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.types import Slo
from controlplane.workload import Workload
from experiments.lib.public_data import AZURE_HOUR, azure_hour
from experiments.lib.results import bar, flags, show
from tokenfleet.planning.request import PlanRequest
from tokenfleet.portfolio.plan import PortfolioPlan, plan_portfolio, tasks_of
from tokenfleet.portfolio.request import Model, Portfolio
from tokenfleet.whatif.cache import Cache

HOUR_S = 3600.0
MOST_S = 300.0
SMALL = ("llama-3.1-8b", Slo(0.4, 0.03), (0.5, 2.0))
RARE = ("llama-3.1-8b", Slo(2.0, 0.08), (0.1, 0.5))
LARGE = ("llama-3.1-70b", Slo(1.6, 0.075), (0.3, 1.5))


def part(
    hour: Workload, rate_rps: float, noon_s: float, length_s: float, rng: np.random.Generator
) -> Workload:
    """A share of the hour whose rate is at most `rate_rps`, at its noon, and a fifth of that at night."""
    swing = 0.6 + 0.4 * np.cos(2 * np.pi * (hour.arrival_s - noon_s) / length_s)
    keep = (rng.random(len(hour)) < swing * rate_rps * HOUR_S / len(hour)) & (hour.arrival_s < length_s)
    return hour.take(keep)


def portfolio(hour: Workload, folder: Path, seed: int, is_quick: bool, part_of: str) -> Portfolio:
    """The models, with their traces written to the folder."""
    rng = np.random.default_rng(seed)
    small = [SMALL, SMALL] if part_of == "limits" else [SMALL, RARE]
    kinds = small + [LARGE] * 2 if is_quick else small * 6 + [LARGE] * 8
    models = []
    for i, (model, slo, (low, high)) in enumerate(kinds):
        length_s = 600.0 if is_quick else HOUR_S
        load = part(hour, float(rng.uniform(low, high)), float(rng.uniform(0, HOUR_S)), length_s, rng)
        columns = np.column_stack((load.arrival_s, load.prompt_tokens, load.output_tokens))
        path = folder / f"{i}.csv"
        header = "arrival_s,prompt_tokens,output_tokens"
        np.savetxt(path, columns, "%.6f,%d,%d", header=header, comments="")
        request = PlanRequest(slo, model=model, gpu=("a100", "h100", "h200"))
        models.append(Model(f"model-{i:02d}", (path,), (request,)))
    return Portfolio(tuple(models), {})


def timed(asked: Portfolio, jobs: int, cache: Cache) -> tuple[PortfolioPlan, float]:
    """The plan, and the seconds that it took."""
    began_s = time.perf_counter()
    plan = plan_portfolio(asked, tasks_of(asked), jobs, cache)
    return plan, time.perf_counter() - began_s


def row(name: str, plan: PortfolioPlan, wall_s: float) -> dict[str, Any]:
    most = dict(zip(plan.gpu_types, plan.gpus.max(axis=0).tolist(), strict=True))
    taken = [one.kind.gpu for one in plan.rows]
    return {
        "name": name,
        "usd_per_h": round(plan.usd_per_h, 2),
        "if constant": None if plan.constant_usd_per_h is None else round(plan.constant_usd_per_h, 2),
        "models on": ", ".join(f"{taken.count(gpu)} {gpu}" for gpu in plan.gpu_types),
        "GPUs at most": ", ".join(f"{n} {gpu}" for gpu, n in most.items()),
        "wall_s": round(wall_s, 1),
    }


def sharing(free: Portfolio, asked: Namespace, cache: Cache) -> int:
    """The same models with one, two and four workers on a GPU at most."""
    rows = []
    for most in (1, 2, 4):
        plan, wall_s = timed(replace(free, models_per_gpu=most), asked.jobs, cache)
        parts = [one.kind.workers_per_gpu for one in plan.rows]
        shared = ", ".join(f"{parts.count(n)} on 1/{n}" for n in sorted(set(parts)))
        rows.append(row(f"models-per-gpu {most}", plan, wall_s) | {"models": shared})
    dollars = [float(one["usd_per_h"]) for one in rows]
    bars = {
        f"dollars with {n} over 1": bar(d / dollars[0], 1.0) for n, d in zip((2, 4), dollars[1:], strict=True)
    }
    return show("portfolio: sharing", rows, bars, asked)


def main() -> int:
    parser = flags(__doc__, AZURE_HOUR)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", choices=("limits", "sharing"), default="limits")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        free = portfolio(azure_hour(asked.data), Path(folder), asked.seed, asked.quick, asked.part)
        cache = Cache(Path(folder) / "kept")
        if asked.part == "sharing":
            return sharing(free, asked, cache)
        plan, wall_s = timed(free, asked.jobs, cache)
        rows = [row("no limits", plan, wall_s)]
        peaks = plan.gpus.max(axis=0)
        scarce = int(peaks.argmax())
        tight = replace(
            free,
            gpus={plan.gpu_types[scarce]: int(peaks[scarce] * 2 / 3)},
            max_gpus=math.ceil(plan.gpus.sum(axis=1).max() * 1.25),
        )
        limited, again_s = timed(tight, asked.jobs, cache)
    rows.append(row(f"{tight.gpus}, {tight.max_gpus} GPUs", limited, again_s))
    broken = max(0, *(int(limited.gpus[:, i].max()) - tight.gpus[gpu] for i, gpu in _limited(limited, tight)))
    broken = max(broken, int(limited.gpus.sum(axis=1).max()) - (tight.max_gpus or 0))
    bars = {
        "seconds for all plans and the choice": bar(wall_s, MOST_S),
        "GPUs over a limit": bar(float(broken), 0.0),
    }
    return show("portfolio", rows, bars, asked)


def _limited(plan: PortfolioPlan, asked: Portfolio) -> list[tuple[int, str]]:
    return [(plan.gpu_types.index(gpu), gpu) for gpu in asked.gpus if gpu in plan.gpu_types]


if __name__ == "__main__":
    sys.exit(main())
