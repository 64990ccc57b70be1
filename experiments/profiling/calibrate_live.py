"""A profile calibrated from a running engine's metrics, against the steps and requests that it serves next.

    python experiments/profiling/calibrate_live.py [--quick] [--resume DIR] [--format table|json]

One real vLLM engine on a CPU serves Poisson arrivals at a rate that rises and falls, with log-normal lengths.
`tokenfleet calibrate` reads its `/metrics` for fifteen minutes and corrects the library's profile of an 8B
model on an H100, which is wrong here in every term; others of it end after two, four and eight minutes, to
show how the error falls (`--quick`: one, two, four and six). Then ten windows of a minute follow (`--quick`:
of fifteen seconds). Every step of theirs, as the fleet wrote it down, is predicted; row `noise` is the least
mean error that a model of these steps could have. The attainment of each window is simulated under DRAWS
profiles drawn from the calibrated one, and as many binomial draws of its requests each; the targets are the
0.9 quantiles of TTFT and TPOT while it was calibrated, so that they can be missed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.uncertainty import draw_profile
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.made_requests import lengths
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from experiments.profiling.learned_profile import errors, noise
from harness.served import ENGINE_FLAGS, fleet, tiny_model
from tokenfleet.compare.replay import replay, served_model
from tokenfleet.profiles.form import parse_profile, profile_text
from tokenfleet.profiles.library import find_profiles

RATE_RPS, SWING, PERIOD_S = 1.2, 0.8, 75.0  # a third of what the engine carries here, so that no queue builds
LENGTHS = (150.0, 0.7, 2, 1500), (40.0, 0.7, 2, 1500)
MINUTES, WINDOW_S = (2.0, 4.0, 8.0, 15.0), 60.0
QUICK_MINUTES, QUICK_WINDOW_S = (1.0, 2.0, 4.0, 6.0), 15.0
WINDOWS = 10
DRAWS = 40
KV_BYTES = str(1 << 30)
MOST_ERROR, LEAST_WITHIN = 0.08, 0.9
COLUMNS = ("sent_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens")


def traffic(seconds: float, seed: int) -> Workload:
    """Poisson arrivals whose rate swings, and log-normal lengths."""
    rng = np.random.default_rng(seed)
    most = RATE_RPS * (1 + SWING)
    at = np.cumsum(rng.exponential(1 / most, int(3 * most * seconds)))
    rate = RATE_RPS * (1 + SWING * np.sin(2 * np.pi * at / PERIOD_S))
    at = at[(at < seconds) & (rng.uniform(0, most, len(at)) < rate)]
    return Workload(at, *lengths(len(at), rng, *LENGTHS))


def served(minutes: Sequence[float], window_s: float, seed: int) -> dict[str, Any]:
    """The calibrated profiles, the steps after the last, and all requests as their client saw them."""
    (prior,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    with tiny_model("--fat") as model:
        there = model.parent
        (there / "prior.yaml").write_text(profile_text(prior))
        serving = ("--workers", "1", "--policy", "round-robin", "--data", str(there / "data"))
        with fleet(model, *serving, engine_flags=(*ENGINE_FLAGS[:-1], KV_BYTES)) as server:
            calibrations = [
                [
                    sys.executable, "-m", "tokenfleet", "calibrate", "--metrics", f"{server.gateway}/metrics",
                    "--profile", str(there / "prior.yaml"), "--minutes", str(some), "--max-num-seqs", "256",
                    "--output", str(there / f"made-{some:g}.yaml"), "--format", "json",
                ] for some in minutes
            ]  # fmt: skip

            async def serve() -> tuple[Any, list[str]]:
                endpoint = await served_model(server.gateway, None)
                rng = np.random.default_rng(seed)
                await replay(traffic(5.0, seed + 1), endpoint, rng)  # what is loaded first
                watching = [
                    await asyncio.create_subprocess_exec(*one, cwd=ROOT, stdout=subprocess.PIPE)
                    for one in calibrations
                ]
                seconds = 60 * minutes[-1] + WINDOWS * window_s + 10
                done = await replay(traffic(seconds, seed), endpoint, rng)
                return done, [(await one.communicate())[0].decode() for one in watching]

            done, said = asyncio.run(serve())
            (worker,) = server.workers()
        steps = pl.read_csv(there / "data" / "steps.csv")
        made = [(there / f"made-{some:g}.yaml").read_text() for some in minutes]
    since_s = done.began_unix_s + 60 * minutes[-1] + 8
    later = steps.filter(pl.col("at_s") > since_s).sort("at_s")
    return {
        "profiles": made,
        "kv_tokens": worker["kv_blocks"] * worker["block_tokens"],  # which a gateway's metrics do not tell
        "said": json.loads(said[-1]),
        "steps": later.to_dicts(),
        "requests": {name: getattr(done, name).tolist() for name in COLUMNS},
    }


def within(
    profile: Profile, part: dict[str, Any], since_s: float, window_s: float, windows: int
) -> list[Any]:
    """Each window's measured attainment, and the simulated one's interval at 0.9."""
    sent, first, last, prompt, output = (np.array(part["requests"][name]) for name in COLUMNS)
    ttft_s, tpot_s = first - sent, (last - first) / np.maximum(output - 1, 1)
    before = sent < since_s
    slo = Slo(*(float(np.nanquantile(x[before], 0.9)) for x in (ttft_s, tpot_s)))
    good = (ttft_s <= slo.ttft_s) & (tpot_s <= slo.tpot_s)
    rng = np.random.default_rng(0)
    order = np.argsort(sent)
    work = Workload(sent[order], prompt[order], output[order])
    begins = [since_s + k * window_s for k in range(windows)]
    said: list[list[float]] = [[] for _ in begins]
    for _ in range(DRAWS):
        outcome = simulate(work, [WorkerSpec(draw_profile(profile, rng))], slo, "round-robin")
        met = (outcome.ttft_s <= slo.ttft_s) & ~(outcome.tpot_s > slo.tpot_s)
        for k, begin in enumerate(begins):
            rows = (work.arrival_s >= begin) & (work.arrival_s < begin + window_s)
            said[k] += (rng.binomial(rows.sum(), met[rows].mean(), DRAWS) / rows.sum()).tolist()
    found = []
    for k, begin in enumerate(begins):
        rows = (sent >= begin) & (sent < begin + window_s)
        low, high = np.quantile(said[k], (0.05, 0.95))
        found.append((float(good[rows].mean()), float(low), float(high), int(rows.sum())))
    return found


def main() -> int:
    asked = flags(__doc__, resumes=True).parse_args()
    minutes, window_s = (QUICK_MINUTES, QUICK_WINDOW_S) if asked.quick else (MINUTES, WINDOW_S)
    name = f"calibrate {minutes[-1]:g} {asked.seed}"
    part = asked.resume.part(name, lambda: served(minutes, window_s, asked.seed))
    profiles = [parse_profile(text, "made.yaml") for text in part["profiles"]]
    profile = profiles[-1].with_kv(None, part["kv_tokens"])
    (prior,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    fixed, _ = errors(profile, part["steps"])
    seen = within(profile, part, 60 * minutes[-1] + 8, window_s, WINDOWS)
    inside = sum(low <= share <= high for share, low, high, _ in seen) / len(seen)
    rows: list[dict[str, Any]] = [
        {"name": f"{one['name']}, factor", "value": one["factor"]} for one in part["said"]["corrections"]
    ]
    rows += [
        {"name": "steps predicted", "value": float(len(part["steps"]))},
        {"name": "mean error of the prior", "value": errors(prior, part["steps"])[0]},
        *(
            {"name": f"mean error, calibrated for {some:g} minutes", "value": errors(one, part["steps"])[0]}
            for some, one in zip(minutes, profiles, strict=True)
        ),
        {"name": "KV, tokens", "value": float(profile.kv.capacity_tokens)},
        {"name": "noise of equal batches", "value": noise(part["steps"])},
        {"name": "error of intervals, held out", "value": profile.residuals.held_out_mean or float("nan")},
    ]
    for k, (share, low, high, requests) in enumerate(seen):
        rows.append({"name": f"window {k + 1}: {low:.3f} to {high:.3f} of {requests}", "value": share})
    bars = {
        "step error mean": bar(fixed, MOST_ERROR),
        "windows within": bar(inside, LEAST_WITHIN, at_least=True),
    }
    return show("calibrate_live", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
