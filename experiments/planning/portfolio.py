"""Twenty models on one budget: how long the choice takes, and what shared limits and schedules are worth.

    python experiments/planning/portfolio.py [--part limits|sharing|spot] [--quick] [--seed N] [--jobs N]
        [--format table|json]

The models have shares of the Azure hour's requests, which swing by a factor of five over the hour, each at a
time of its own: twelve of Llama-3.1 8B at 0.5 to 2 requests a second at most (400 ms, 30 ms), eight of 70B at
0.3 to 1.5 (1.6 s, 75 ms). Each may have A100s, H100s or H200s: sixty plans, on `--jobs` processes. First
without limits; then with two thirds of the type of GPU that is taken most, and a quarter more GPUs in all.
`--quick`: four models of ten minutes at three times the rate. Such small models have a worker or two all the
time, and schedules save nothing here; tests/tokenfleet/portfolios/test_portfolio.py has models that are large
enough for day and night.

`wall_s` of the first has all plans in it, none kept before; the second finds them kept. That no other choice
within the limits is cheaper is held against every combination by tests/tokenfleet/portfolios/test_choose.py.
Limits are held here against the sum of all models in each window.

`--part sharing`: what it saves that small models share GPUs. Of the twelve of 8B six are rarely used, at 0.1
to 0.5 requests a second at most (2 s, 80 ms); all else is as above. At most one, two and four workers on a
GPU, each step counted as one, two and four times as long; no limits.

`--part spot`: what it saves that a fleet may be partly on spot. The twenty models, and then two (one of 8B,
one of 70B) with 8 and with 32 times the whole hour's rate at most, may be on demand or on spot (H200s have no
spot price), where a worker is reclaimed 0.05 times an hour and stands again after 5 minutes. Within each
share on spot the choice is made twice: among fleets that are wholly the one or the other, and among all.
`choice_s` is the time of the choice alone, with what more of the limit would save.
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
from tokenfleet.portfolios.offers import fleets_of, tasks_of
from tokenfleet.portfolios.plan import PortfolioPlan, cheapest, plan_portfolio
from tokenfleet.portfolios.request import Model, Portfolio
from tokenfleet.whatifs.solve import Cache

HOUR_S = 3600.0
MOST_S = 300.0
SMALL = ("llama-3.1-8b", Slo(0.4, 0.03), (0.5, 2.0))
RARE = ("llama-3.1-8b", Slo(2.0, 0.08), (0.1, 0.5))
LARGE = ("llama-3.1-70b", Slo(1.6, 0.075), (0.3, 1.5))
FEW = {"few": 8.0, "few and large": 32.0}  # the scale of the whole hour's rate
SHARES = (0.2, 0.5, 0.8)  # on spot


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
    small = [SMALL, RARE] if part_of == "sharing" else [SMALL, SMALL]
    kinds = small + [LARGE] * 2 if is_quick else small * 6 + [LARGE] * 8
    if part_of in FEW:
        most = len(hour) / HOUR_S
        kinds = [(model, slo, (most, most)) for model, slo, _ in (SMALL, LARGE)]
    elif is_quick:  # or ten minutes have too few requests
        kinds = [(model, slo, (3 * low, 3 * high)) for model, slo, (low, high) in kinds]
    models = []
    for i, (model, slo, (low, high)) in enumerate(kinds):
        length_s = 600.0 if is_quick else HOUR_S
        load = part(hour, float(rng.uniform(low, high)), float(rng.uniform(0, HOUR_S)), length_s, rng)
        columns = np.column_stack((load.arrival_s, load.prompt_tokens, load.output_tokens))
        path = folder / f"{part_of[:3]}{i}.csv"
        header = "arrival_s,prompt_tokens,output_tokens"
        np.savetxt(path, columns, "%.6f,%d,%d", header=header, comments="")
        scale = FEW.get(part_of, 1.0)
        request = PlanRequest(slo, model=model, gpu=("a100", "h100", "h200"), rate_scale=scale)
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


def on_either(model: Model) -> Model:
    """The model, on demand or on spot."""
    (request,) = model.asked
    on_demand = replace(request, cold_start_s=300.0)
    return replace(model, asked=(on_demand, replace(on_demand, spot=True, reclaims_per_h=0.05)))


def spot(portfolios: dict[str, Portfolio], asked: Namespace, cache: Cache) -> int:
    """Shares on spot, with fleets that are wholly on demand or on spot, and with those between."""
    rows, bars, beyond = [], {}, [0.0]
    for name, free in portfolios.items():
        either = replace(free, models=tuple(map(on_either, free.models)))
        tasks = tasks_of(either)
        for share in SHARES:
            limited = replace(either, spot_share=share)
            fleets, without = fleets_of(limited, tasks, asked.jobs, cache)
            whole = [one for one in fleets if not one.kind.on_demand]
            dollars = []
            for among, made in (("whole fleets", whole), ("and partly on spot", fleets)):
                began_s = time.perf_counter()
                plan = cheapest(limited, made, without, ())
                choice_s = time.perf_counter() - began_s
                (use,) = plan.uses
                dollars.append(plan.usd_per_h)
                rows.append(
                    {
                        "portfolio": name,
                        "spot-share": share,
                        "among": among,
                        "fleets": len(made),
                        "usd_per_h": round(plan.usd_per_h, 2),
                        "on spot at most": round(use.peak, 4),
                        "models partly on spot": sum(one.kind.on_demand > 0 for one in plan.rows),
                        "choice_s": round(choice_s, 2),
                    }
                )
                beyond.append(use.peak - share)
            ratio = f"{name}, share {share:g}: dollars over those of whole fleets"
            bars[ratio] = bar(dollars[1] / dollars[0], 1.0 + 1e-6)
    bars["share on spot over the limit"] = bar(max(beyond), 1e-6)
    return show("portfolio: spot", rows, bars, asked)


def main() -> int:
    parser = flags(__doc__, AZURE_HOUR)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", choices=("limits", "sharing", "spot"), default="limits")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        free = portfolio(azure_hour(asked.data), Path(folder), asked.seed, asked.quick, asked.part)
        cache = Cache(Path(folder) / "kept")
        if asked.part == "spot":
            hour = azure_hour(asked.data)
            few = {name: portfolio(hour, Path(folder), asked.seed, asked.quick, name) for name in FEW}
            return spot({f"{len(free.models)} models": free} | few, asked, cache)
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
    most = dict(zip(limited.gpu_types, limited.gpus.max(axis=0).tolist(), strict=True))
    broken = max(0, *(n - tight.gpus[gpu] for gpu, n in most.items() if gpu in tight.gpus))
    broken = max(broken, int(limited.gpus.sum(axis=1).max()) - (tight.max_gpus or 0))
    bars = {
        "seconds for all plans and the choice": bar(wall_s, MOST_S),
        "GPUs over a limit": bar(float(broken), 0.0),
    }
    return show("portfolio", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
