"""What a fleet learns of itself as it starts, against the steps that it serves next.

    python experiments/profiling/learned_profile.py [--quick] [--engine vllm|emulated] [--workers N]
        [--format table|json]

Workers without a profile. With `vllm` they are `tokenfleet serve --model TINY`, real engines on CPUs; with
`emulated` emulated engines in this process, on the real clock, timed by the profile of an H100, which nobody
tells the fleet. On two cores, one engine has a core to itself, as an engine has a GPU; two share them with
gateway and client. Then requests arrive (Poisson, log-normal lengths), and each of the
next 500 steps is predicted: by what was learned at the start, and by that as the fleet refits it with each
step before. The seconds are those from the first warm worker to the model being in force.

The row `noise` is the least mean error that a model of these steps could have: of the steps of equal batches
(P and b alike, contexts within a tenth) around their median.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.refit import Refit
from controlplane.types import WorkerId
from controlplane.worker_type import WorkerType
from experiments.lib.made_requests import poisson
from experiments.lib.results import bar, flags, show
from harness.served import ENGINE_FLAGS, fleet, tiny_model
from tokenfleet.compare.replay import replay, served_model
from tokenfleet.files import cache_folder
from tokenfleet.profiles.form import parse_profile, profile_text
from tokenfleet.profiles.library import find_profiles

STEPS, QUICK_STEPS = 500, 100
KIND = "TP1"
RATE_RPS = {"vllm": 1.5, "emulated": 6.0}  # a worker
LENGTHS = (120.0, 0.6, 2, 1500), (24.0, 0.6, 2, 1500)
MOST_S, MOST_ERROR = 30.0, 0.08
NAMES = ("prefill_tokens", "sequences", "context_tokens", "prefill_sum_sq")


def real(steps: int, seed: int, workers: int) -> dict[str, Any]:
    """A served fleet: the profile it learned, when, and the steps it executed after that."""
    before = set(cache_folder("learned").glob("*.json"))
    with tiny_model("--fat") as model:
        data = ("--data", str(model.parent / "data"))
        with fleet(model, "--workers", str(workers), *data, engine_flags=ENGINE_FLAGS[:-2]) as server:
            view = server.ask("GET", "/v1/fleet")
            workload = poisson(workers * RATE_RPS["vllm"], max(30, steps // 10), seed, *LENGTHS)

            async def serve() -> None:
                await replay(workload, await served_model(server.gateway, None), np.random.default_rng(seed))

            asyncio.run(serve())
        table = pl.read_csv(model.parent / "data" / "steps.csv")
        # The model's folder is a new one, so no profile of it was there.
        (kept,) = set(cache_folder("learned").glob("*.json")) - before
        profile = json.loads(kept.read_text())["profile"]
    since_s = float(view["step_times"][0]["since_s"])
    rows = table.filter(pl.col("at_s") > since_s).sort("at_s")
    return {"profile": profile, "placement": view["placement"]["by"], "steps": rows.to_dicts()[:steps]}


def emulated(steps: int, seed: int, workers: int) -> dict[str, Any]:
    """Emulated engines, measured over their links as a fleet does, and the steps of streams after that."""
    return asyncio.run(_emulated(steps, seed, workers))


async def _emulated(steps: int, seed: int, workers: int) -> dict[str, Any]:
    from dataplane.live.emulated.engine import EmulatedEngine, Fabric
    from dataplane.live.gateway.events import EventLog
    from dataplane.live.pool.learning import Learning
    from harness.bare_fleet import BareFleet

    (truth,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    fabric = Fabric()
    engines = [EmulatedEngine(WorkerId(f"w{i}"), truth, fabric) for i in range(workers)]
    learning = Learning({KIND: WorkerType(None)}, ("emulated", ""), {}, 32_000, EventLog())
    await asyncio.gather(*(learning.measure(engine, KIND) for engine in engines))
    first = [engine.steps()[0] for engine in engines]
    bare = BareFleet(engines)
    rng = np.random.default_rng(seed)
    workload = poisson(workers * RATE_RPS["emulated"], max(30, steps // 5), seed, *LENGTHS)
    begun = asyncio.get_running_loop().time()
    streams = []
    for i in range(len(workload)):
        await asyncio.sleep(begun + float(workload.arrival_s[i]) - asyncio.get_running_loop().time())
        prompt = rng.integers(3, 30_000, int(workload.prompt_tokens[i])).tolist()
        params = {"max_tokens": int(workload.output_tokens[i])}
        streams.append(await bare.start(WorkerId(f"w{i % workers}"), prompt, params))
    await asyncio.gather(*(stream.ended() for stream in streams))
    half = steps // workers
    executed = [s for engine, n in zip(engines, first, strict=True) for s in engine.steps(n)[1][:half]]
    await bare.close()
    await asyncio.gather(*(engine.close() for engine in engines))
    rows = [{name: getattr(s, name) for name in (*NAMES, "step_s")} for s in executed]
    by = "targets" if KIND in learning.learnt else learning.why
    return {"profile": profile_text(learning.learnt[KIND]), "placement": by, "steps": rows}


def errors(profile: Profile, steps: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean relative error of the profile as learned, and of its refit before each step."""
    refit = Refit(profile)
    fixed, followed = [], []
    for row in steps:
        batch = [float(row[name]) for name in NAMES]
        fixed.append(abs(float(profile.step.step_s(*batch)) / row["step_s"] - 1))
        followed.append(abs(float(refit.model.step_s(*batch)) / row["step_s"] - 1))
        prefill_tokens, sequences, context_tokens, sum_sq = batch
        refit.take(prefill_tokens, sequences, context_tokens, row["step_s"], sum_sq)
    return float(np.mean(fixed)), float(np.mean(followed))


def noise(steps: list[dict[str, Any]]) -> float:
    """Mean relative distance of steps from the median of those of equal batches."""
    alike: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for row in steps:
        context = round(np.log(max(row["context_tokens"], 1)) / 0.1)
        alike[(row["prefill_tokens"], row["sequences"], context)].append(row["step_s"])
    off = [abs(t / float(np.median(times)) - 1) for times in alike.values() if len(times) > 2 for t in times]
    return float(np.mean(off)) if off else float("nan")


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--engine", choices=("vllm", "emulated"), default="vllm")
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    steps = QUICK_STEPS if asked.quick else STEPS
    work = partial(real if asked.engine == "vllm" else emulated, steps, asked.seed, asked.workers)
    part = asked.resume.part(f"{asked.engine} {asked.workers} {steps} {asked.seed}", work)
    profile = parse_profile(part["profile"], "learned")
    seconds = float(profile.source.what.split(" in ")[1].split(" s ")[0])
    fixed, followed = errors(profile, part["steps"])
    rows: list[dict[str, Any]] = [
        {"name": "measured in, s", "value": seconds},
        {"name": "steps predicted", "value": float(len(part["steps"]))},
        {"name": "mean error, as learned", "value": fixed},
        {"name": "mean error, refitted meanwhile", "value": followed},
        {"name": "noise of equal batches", "value": noise(part["steps"])},
        {"name": "mean error of the fit itself", "value": profile.residuals.mean_relative},
        {"name": f"placed by {part['placement']}", "value": 1.0},
    ]
    bars = {
        "seconds of measurement": bar(seconds, MOST_S),
        "mean error, as learned": bar(fixed, MOST_ERROR),
        "mean error, refitted": bar(followed, MOST_ERROR),
        "steps": bar(float(len(part["steps"])), steps, at_least=True),
    }
    return show("learned_profile", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
