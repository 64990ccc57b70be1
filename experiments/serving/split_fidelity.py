"""Prefill and decode workers apart: the simulated fleet against the live one, where both miss targets.

    python experiments/serving/split_fidelity.py [--quick] [--resume FOLDER] [--format table|json]

One prefill and two decode workers serve Poisson arrivals with log-normal lengths (`tokenfleet serve --prefill
1 --decode 2`, `tokenfleet compare`). The targets are set before, by simulation alone: the TTFT and the TPOT
that all but 3 % of the simulated requests keep, so that the simulated attainment is between 90 and 99 %. Then
the live fleet serves the same requests with those targets, and its placement goes by them.

Emulated engines keep the step times of a made profile on the real clock, hand KV over at 2 GB/s, and leave
gateway, placement and hand-overs as they are. Real engines: `near_the_limit.py --only split`.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import StepModel
from controlplane.types import EngineMode, Slo
from controlplane.worker_type import KvLink
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome, WorkerSpec, simulate
from experiments.lib.results import bar, flags, show
from experiments.serving.live_fidelity import tokenfleet
from harness.served import Server, fleet, tiny_model
from tokenfleet.cli.compare import first_tokens_s, met
from tokenfleet.profiles.form import profile_text
from tokenfleet.texts import parse_slo

REQUESTS = 650
QUICK_REQUESTS = 60
RATE_RPS = 4.0
LENGTHS = 400.0, 40.0  # medians of prompts and answers
SPREAD = 0.6  # the standard deviation of their logarithms
MISSED = 0.03  # of the simulated requests, by each target
LINK = KvLink(2e9)
EASY = "ttft=30s,tpot=2s"
MADE = Profile(
    "tiny-llama",
    "made",
    1,
    StepModel(0.03, 2e-4, 2e-3, 1e-6),
    KvModel(120_000, 16, 131_072),
    EngineLimits(max_batched_tokens=512, max_seqs=64),
    Residuals(0.0, 0.0, 0.0, 1),
    Source("composed", "made for this experiment", "Apache-2.0", "2026-11-22"),
)


def load(requests: int, seed: int) -> Workload:
    """Poisson arrivals with log-normal lengths."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / RATE_RPS, requests)).round(4)
    lengths = [
        np.clip(np.round(m * np.exp(SPREAD * rng.standard_normal(requests))), 2, 1500).astype(np.int64)
        for m in LENGTHS
    ]
    return Workload(arrival_s, *lengths)


def simulated(workload: Workload, profile: Profile, slo: Slo) -> Outcome:
    """One prefill and two decode workers."""
    one = profile.with_engine(mode=EngineMode.SPLIT)
    workers = [WorkerSpec(one, "prefill", link=LINK), *[WorkerSpec(one, "decode")] * 2]
    return simulate(workload, workers, slo)


def targets(workload: Workload, profile: Profile) -> str:
    """The targets that all but `MISSED` of the simulated requests keep, each by itself."""
    outcome = simulated(workload, profile, parse_slo(EASY))
    ttft_s, tpot_s = (np.nanquantile(x, 1 - MISSED) for x in (outcome.ttft_s, outcome.tpot_s))
    return f"ttft={1e3 * ttft_s:.0f}ms,tpot={1e3 * tpot_s:.2f}ms"


def replayed(workload: Workload, slo: str) -> dict[str, Any]:
    """What `compare` and `serve` write of one replay: requests, steps, the way there, and hand-overs."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name, tiny_model() as model:
        folder = Path(name)
        rows = zip(workload.arrival_s, workload.prompt_tokens, workload.output_tokens, strict=True)
        lines = ["arrival_s,prompt_tokens,output_tokens", *(f"{t:.4f},{p},{o}" for t, p, o in rows)]
        (folder / "trace.csv").write_text("\n".join(lines) + "\n")
        known = folder / "profile.yaml"
        known.write_text(profile_text(MADE))
        serving = ["--prefill", "1", "--decode", "2", "--engine", "emulated", "--slo", slo]
        serving += ["--data", str(folder / "data"), "--profile", str(known)]
        with fleet(model, *serving) as server:
            words = ["compare", "--trace", str(folder / "trace.csv"), "--endpoint", server.gateway]
            words += ["--control", server.control, "--profile", str(known), "--slo", slo]
            words += ["--per-request", str(folder / "requests.csv"), "--format", "json"]
            said = json.loads(tokenfleet(*words))
            handed = handovers(server)
        return {
            "requests": (folder / "requests.csv").read_text(),
            "overheads_s": said["overheads_s"],
            "failed": said["failed"],
            "handovers": handed,
        }


def handovers(server: Server) -> dict[str, float]:
    """The fleet's hand-overs by outcome."""
    with urllib.request.urlopen(f"{server.control}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith("tokenfleet_handovers_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


def main() -> int:
    parser = flags(__doc__, resumes=True)
    asked = parser.parse_args()
    requests = QUICK_REQUESTS if asked.quick else REQUESTS
    workload = load(requests, asked.seed)
    slo = targets(workload, MADE)
    result = asked.resume.part(f"replay {requests} {asked.seed} {slo}", partial(replayed, workload, slo))
    live = pl.read_csv(io.StringIO(result["requests"]))
    ttft_s, tpot_s = live["ttft_s"].to_numpy(), live["tpot_s"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    sent_s = live["sent_unix_s"].to_numpy()
    sent = Workload(sent_s - sent_s[0], live["prompt_tokens"].to_numpy(), live["output_tokens"].to_numpy())
    outcome = simulated(sent, MADE, parse_slo(slo))
    overheads_s = np.array(result["overheads_s"])
    theirs = first_tokens_s(outcome.ttft_s, MADE, overheads_s, np.random.default_rng(0))
    rows: list[dict[str, Any]] = []
    for label, live_s, other_s in (("TTFT", ttft_s, theirs), ("TPOT", tpot_s, outcome.tpot_s)):
        for q in (0.5, 0.9, 0.99):
            here, there = (float(np.nanquantile(x, q)) for x in (live_s, other_s))
            rows.append({"name": f"{label} p{100 * q:.0f}", "live": here, "simulated": there})
    here, there = met(ttft_s, tpot_s, parse_slo(slo)), met(theirs, outcome.tpot_s, parse_slo(slo))
    rows.append({"name": f"attainment of {slo}", "live": here, "simulated": there, "error": there - here})
    rows.append({"name": "requests finished", "live": float(len(live))})
    rows += [{"name": f"hand-overs {how}", "live": n} for how, n in result["handovers"].items()]
    bars = {
        "attainment, points": bar(100 * abs(there - here), 3.0),
        "simulated attainment at most": bar(there, 0.99),
        "simulated attainment at least": bar(there, 0.90, at_least=True),
        "requests": bar(float(len(live)), float(requests), at_least=True),
    }
    return show("split_fidelity", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
