"""The simulator against two real vLLM workers on this machine.

    python experiments/live_fidelity.py [--quick] [--engine vllm|emulated] [--seed 0] [--format table|json]

One fleet of two tiny-Llama workers serves two traces of Poisson arrivals and log-normal lengths. From the
first, the steps that the fleet itself recorded (`serve --data`) are fitted to a profile, with no special run;
the second is replayed on the fleet and simulated with that profile (`tokenfleet compare`). Requests go to the
worker with the smallest share of its KV promised, in both.

With `--engine emulated` the workers keep a profile's step times on the real clock, which leaves the gateway.

Both traces run on the machine as it is. What its other work does to the second and did not do to the first is
in the errors; `slowdown` compares the mean step times of the two, for the same batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from results import bar, flags, show
from served import ROOT, fleet, tiny_model

from controlplane.perfmodel.samples import StepSamples
from tokenfleet.measurements import read_measurements
from tokenfleet.profile_files import read_profile

REQUESTS, QUICK_REQUESTS = 550, 80
RATE_RPS = 3.0
PROMPT, OUTPUT, SPREAD = 120.0, 24.0, 0.6  # medians, and the standard deviation of their logarithms
SLO = "ttft=1s,tpot=60ms"
MADE = ROOT / "profiles" / "h100-sxm" / "llama-3.1-8b_tp1.yaml"  # what emulated workers are like
KV_TOKENS = (256 << 20) // 2048  # served.ENGINE_FLAGS; 4 layers, 2 heads of 32, keys and values in float32


def trace(path: Path, requests: int, rng: np.random.Generator) -> None:
    """A plain trace."""
    arrival = np.cumsum(rng.exponential(1 / RATE_RPS, requests))
    lengths = [
        np.clip(np.round(m * np.exp(SPREAD * rng.standard_normal(requests))), 2, 1500)
        for m in (PROMPT, OUTPUT)
    ]
    rows = [f"{t:.4f},{p:.0f},{o:.0f}" for t, p, o in zip(arrival, *lengths, strict=True)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")


def tokenfleet(*words: str) -> str:
    run = [sys.executable, "-c", "import sys; from tokenfleet.cli import main; sys.exit(main())"]
    return subprocess.run([*run, *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def compared(server: Any, path: Path, profile: Path, emulated: bool) -> dict[str, Any]:
    """The trace on the fleet and in the simulator."""
    words = ["compare", "--trace", str(path), "--endpoint", server.gateway, "--control", server.control]
    # A fleet that knows its step times places by them, one that does not by KV alone.
    words += ["--policy", "spread" if emulated else "least-kv"]
    words += ["--profile", str(profile), "--slo", SLO, "--format", "json"]
    answer: dict[str, Any] = json.loads(tokenfleet(*words))
    return answer


def fitted(steps: Path, out: Path, emulated: bool) -> None:
    words = ["fit", "--measurements", str(steps), "--model", "tiny-llama", "--gpu", "cpu"]
    kv, block, budget = KV_TOKENS, 32, 2048
    if emulated:
        made = read_profile(MADE)
        kv, block, budget = made.kv.capacity_tokens, made.kv.block_tokens, made.engine.max_batched_tokens
    words += ["--kv-tokens", str(kv), "--block-tokens", str(block), "--max-seqs", "256"]
    tokenfleet(*words, "--max-batched-tokens", str(budget), "--out", str(out), "--format", "json")


def main() -> int:
    parser = flags("The simulator against two real vLLM workers")
    parser.add_argument("--engine", choices=("vllm", "emulated"), default="vllm")
    asked = parser.parse_args()
    emulated = asked.engine == "emulated"
    requests = QUICK_REQUESTS if asked.quick else REQUESTS
    rng = np.random.default_rng(asked.seed)
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name, tiny_model() as model:
        folder = Path(name)
        first, second = folder / "first.csv", folder / "second.csv"
        trace(first, requests, rng)
        trace(second, requests, rng)
        steps, profile = folder / "data" / "steps.csv", folder / "fitted.yaml"
        serving = ["--workers", "2", "--data", str(folder / "data"), "--engine", asked.engine]
        with fleet(model, *serving) as server:
            # Any profile will do for the first replay: only the fleet's own steps are kept of it.
            compared(server, first, MADE, emulated)
            learned = len(steps.read_text().splitlines())
            early = folder / "early.csv"
            early.write_text(steps.read_text())
            fitted(early, profile, emulated)
            answer = compared(server, second, profile, emulated)
        late = folder / "late.csv"
        lines = steps.read_text().splitlines()
        late.write_text("\n".join([lines[0], *lines[learned:]]) + "\n")
        slowdown = _ratio(read_measurements(late), profile) / _ratio(read_measurements(early), profile)
        residuals = read_profile(profile).residuals
    rows: list[dict[str, Any]] = [
        {k: figure[k] for k in ("name", "live", "simulated", "error")} for figure in answer["figures"]
    ]
    rows.append({"name": "requests finished", "live": float(answer["requests"])})
    rows.append({"name": "step model, mean error", "error": residuals.mean_relative})
    rows.append({"name": "slowdown between the traces", "error": slowdown - 1})
    error = {figure["name"]: figure["error"] for figure in answer["figures"]}
    bars = {
        "attainment, points": bar(100 * abs(error["attainment"]), 2.0),
        "TPOT mean": bar(abs(error["TPOT mean"]), 0.05),
        "TTFT p50": bar(abs(error["TTFT p50"]), 0.10),
        "TTFT p90": bar(abs(error["TTFT p90"]), 0.10),
        "requests": bar(float(answer["requests"]), QUICK_REQUESTS if asked.quick else 500, at_least=True),
    }
    return show("live_fidelity", rows, bars, asked)


def _ratio(steps: StepSamples, profile: Path) -> float:
    """Median of measured over predicted step time."""
    model = read_profile(profile).step
    columns = (steps.prefill_tokens, steps.sequences, steps.context_tokens)
    sum_sq = 0.0 if steps.prefill_sum_sq is None else steps.prefill_sum_sq
    return float(np.median(steps.step_s / model.step_s(*columns, sum_sq)))


if __name__ == "__main__":
    sys.exit(main())
