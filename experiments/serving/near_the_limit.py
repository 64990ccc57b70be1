"""Attainment near the limit: real vLLM workers against their simulation, under three policies, and split.

    python experiments/serving/near_the_limit.py [--quick] [--only PROFILE|POLICY] [--resume FOLDER]
        [--format table|json]

`serve --workers 2`, with no profile, measures its workers as it starts. The profile it learns is taken, and
nothing that runs later changes it. With it the simulator chooses the load, on a seed that is not judged: the
rate at which `spread` meets both targets for 97 % of requests. The targets are multiples of what a request of
the mean prompt takes alone on such a worker. Then each policy serves the same three traces, and is simulated
on them. `split` is one prefill and two decode workers, under `spread` and that profile, at the rate at which
their simulation meets both targets for as many. Prompts vary much and outputs little, so that first tokens
are what is missed.

The model is the larger of `examples/tiny_llama.py`, whose steps take the engine tens of milliseconds: on two
cores the gateway computes where the engines do, and must not take much of them. A part is the replays of one
policy, on one fleet; `--only` runs no other, to keep a quiet machine for minutes and not for an hour.

Where live and simulated differ, three more columns say by what. `at_gateway` is the attainment without the
way from the gateway to the client. `as_served` is the simulation with step times fitted to the steps that
these engines took while they served, in place of those of the profile: what is then left is no error of step
times on average. `steps` is how long they took over what the profile says of their batches, all together;
`noise` how far steps of equal batches lie from their median.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.samples import StepSamples
from controlplane.types import EngineMode, Slo
from controlplane.worker_type import KvLink
from controlplane.workload import Workload
from dataplane.history.files import read_history
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.made_requests import poisson
from experiments.lib.results import bar, flags, show
from experiments.profiling.learned_profile import noise
from harness.served import ENGINE_FLAGS, Server, fleet, tiny_model
from tokenfleet.compare.replay import replay, served_model
from tokenfleet.files import cache_folder
from tokenfleet.profiles.form import parse_profile
from tokenfleet.profiles.library import write_profile

POLICIES = ("spread", "round-robin", "jsq")
SPLIT = "split"
WORKERS = 2
LINK = KvLink(2e9)
REQUESTS, QUICK_REQUESTS = 240, 60  # of each seed
CHOSEN_ON, JUDGED = 99, (0, 1, 2)
LENGTHS = (150.0, 0.9, 4, 1500), (12.0, 0.4, 2, 200)
TTFT_TIMES, TPOT_TIMES = 5.0, 4.0
WANTED = 0.97
BATCH = ("prefill_tokens", "sequences", "context_tokens", "prefill_sum_sq")


def served(
    policy: str, profile: Profile | None, slo: Slo | None, rate_rps: float, requests: int
) -> dict[str, Any]:
    """The replays of the judged seeds under a policy, and what a fleet learned that had no profile."""
    words = [] if slo is None else ["--slo", f"ttft={slo.ttft_s * 1000:.0f}ms,tpot={slo.tpot_s * 1000:.0f}ms"]
    parts = ["--prefill", "1", "--decode", "2"]
    words += parts if policy == SPLIT else ["--workers", str(WORKERS), "--policy", policy]
    before = set(cache_folder("learned").glob("*.json"))
    with tiny_model("--fat") as model:
        if profile is not None:
            write_profile(profile, model.parent / "known.yaml")
            words += ["--profile", str(model.parent / "known.yaml")]
        with fleet(model, *words, engine_flags=ENGINE_FLAGS[:-2]) as server:
            began_s = time.time()
            loads = [poisson(rate_rps, requests, seed, *LENGTHS) for seed in JUDGED if slo]
            replays = [asyncio.run(replayed(server, load)) for load in loads]
        told = said_by_gateway(model.parent / "data", began_s) if slo else {}
        # The model's folder is a new one, so no profile of it was there.
        learned = "".join(path.read_text() for path in set(cache_folder("learned").glob("*.json")) - before)
    return {"replays": replays, "learned": learned} | told


def said_by_gateway(data: Path, since_s: float) -> dict[str, Any]:
    """The steps that engines took since then, and what the gateway saw of each request, in order."""
    steps = pl.read_csv(data / "steps.csv").filter(pl.col("at_s") > since_s)
    seen = read_history(data / "history", since_s, math.inf).sort("arrival_s")
    return {
        "steps": steps.select(*BATCH, "step_s").to_dict(as_series=False),
        "seen": seen.select("ttft_s", "tpot_s").fill_null(0.0).to_dict(as_series=False),
    }


async def replayed(server: Server, workload: Workload) -> dict[str, Any]:
    """Replay a trace: columns of what each request sent, and got."""
    got = await replay(workload, await served_model(server.gateway, None), np.random.default_rng(7))
    tpot_s = (got.last_token_s - got.first_token_s) / np.maximum(got.output_tokens - 1, 1)
    ttft_s = got.first_token_s - got.sent_s
    return {"ttft_s": ttft_s.tolist(), "tpot_s": tpot_s.tolist(), "errors": len(got.errors)}


def attained(replays: dict[str, Any], slo: Slo) -> float:
    """The share of requests within both targets; one that failed has missed them."""
    ttft_s, tpot_s = np.array(replays["ttft_s"], float), np.array(replays["tpot_s"], float)
    return float(np.mean((ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s)))


def as_served(profile: Profile, steps: dict[str, list[float]]) -> Profile:
    """The profile with the step times that engines had while they served."""
    samples = StepSamples(**{name: np.array(column) for name, column in steps.items()})
    return replace(profile, step=fit_step(samples, robust=True, quick=True).model)


def slower(profile: Profile, steps: dict[str, list[float]]) -> float:
    """Seconds of all steps over what the profile says of them."""
    batches = (np.array(steps[name], float) for name in BATCH)
    return float(np.sum(steps["step_s"]) / np.sum(profile.step.step_s(*batches)))


def simulated(profile: Profile, policy: str, slo: Slo, workload: Workload) -> float:
    if policy != SPLIT:
        return simulate(workload, [WorkerSpec(profile)] * WORKERS, slo, policy).attainment
    one = profile.with_engine(mode=EngineMode.SPLIT)
    workers = [WorkerSpec(one, "prefill", link=LINK), *[WorkerSpec(one, "decode")] * 2]
    return simulate(workload, workers, slo).attainment


def targets(profile: Profile) -> Slo:
    mean = round(float(poisson(1.0, 2000, CHOSEN_ON, *LENGTHS).prompt_tokens.mean()))
    ttft_s, tpot_s = TTFT_TIMES * profile.alone_ttft_s(mean), TPOT_TIMES * profile.alone_tpot_s(mean)
    return Slo(round(ttft_s, 3), round(tpot_s, 3))


def chosen_rate(profile: Profile, slo: Slo, policy: str) -> float:
    """The rate at which a fleet attains WANTED in simulation, on the seed that is not judged."""
    low, high = 0.1, 100.0
    for _ in range(12):
        rate = float(np.sqrt(low * high))
        enough = simulated(profile, policy, slo, poisson(rate, 4000, CHOSEN_ON, *LENGTHS)) >= WANTED
        low, high = (rate, high) if enough else (low, rate)
    return round(low, 2)


def profile_of(part: dict[str, Any]) -> Profile:
    return parse_profile(json.loads(part["learned"])["profile"], "learned")


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--only", choices=("profile", *POLICIES, SPLIT), help="run this part and stop")
    asked = parser.parse_args()
    requests = QUICK_REQUESTS if asked.quick else REQUESTS
    made = asked.resume.part("profile", partial(served, "spread", None, None, 1.0, requests))
    profile = profile_of(made)
    slo = targets(profile)
    rates = {part: chosen_rate(profile, slo, part) for part in ("spread", SPLIT)}
    print(f"{profile.source.what}\n{slo}, {rates} requests/s", file=sys.stderr)
    if asked.only == "profile":
        return 0
    rows: list[dict[str, Any]] = []
    means: dict[str, tuple[float, float]] = {}
    for policy in (*POLICIES, SPLIT) if asked.only is None else (asked.only,):
        rate, known = rates.get(policy, rates["spread"]), profile if policy == SPLIT else None
        run = partial(served, policy, known, slo, rate, requests)
        part = asked.resume.part(f"{policy} {requests}", run)
        own = as_served(profile, part["steps"])
        of_policy = [
            {
                "name": f"{policy}, seed {seed}",
                "live": attained(got, slo),
                "at_gateway": attained(
                    {k: seen[i * requests :][:requests] for k, seen in part["seen"].items()}, slo
                ),
                "simulated": simulated(profile, policy, slo, poisson(rate, requests, seed, *LENGTHS)),
                "as_served": simulated(own, policy, slo, poisson(rate, requests, seed, *LENGTHS)),
                "errors": got["errors"],
            }
            for i, (seed, got) in enumerate(zip(JUDGED, part["replays"], strict=True))
        ]
        columns = ("live", "at_gateway", "simulated", "as_served")
        mean = {name: float(np.mean([row[name] for row in of_policy])) for name in columns}
        means[policy] = mean["live"], mean["simulated"]
        of_all = {
            "steps": slower(profile, part["steps"]),
            "noise": noise(pl.DataFrame(part["steps"]).to_dicts()),
        }
        rows += [*of_policy, {"name": f"{policy}, all"} | mean | of_all]
    bars = {
        f"{p}, points from simulated": bar(abs(100 * (a - b)), 3.0 if p == SPLIT else 2.0)
        for p, (a, b) in means.items()
    }
    for other in [p for p in means if p not in ("spread", SPLIT) and "spread" in means]:
        live, said = (means["spread"][i] - means[other][i] for i in (0, 1))
        rows.append({"name": f"spread ahead of {other}", "live": live, "simulated": said})
        bars[f"spread ahead of {other}, points from simulated"] = bar(abs(100 * (live - said)), 2.0)
    return show("near_the_limit", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
