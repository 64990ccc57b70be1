"""The simulator against two real vLLM workers on this machine.

    python experiments/serving/live_fidelity.py [--quick] [--resume FOLDER] [--format table|json]

One fleet of two tiny-Llama workers serves a trace of Poisson arrivals and log-normal lengths (`tokenfleet
compare --per-request`), and records the steps it takes (`serve --data`). The time is cut into stretches of
20 s. The steps of the odd ones are fitted to a profile (`tokenfleet fit`), with no special run, and the
requests sent in the even ones are judged by a simulation of the whole replay with that profile; and the other
way round. So every request is judged, each by a profile that has not seen a step of its stretch. What the way
to the engine and back takes is learned in the same stretches, from requests that found their worker idle, as
`compare --steps` learns it from all of a replay.
Requests go to the worker with the smallest share of its KV promised, in both planes.

Stretches alternate, since a machine that others share is now faster and now slower for minutes. Fitted to a
first half and judged on a second, the difference between the two halves is nearly all there is in the errors;
the rows `one half to the other` show it: the same replay, cut once.
`--resume` keeps the replay, or judges one that is there already.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.samples import StepSamples
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.command import tokenfleet
from experiments.lib.made_requests import poisson
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from harness.served import fleet, tiny_model
from tokenfleet.cli.compare import ComparedFigure, compared, first_tokens_s
from tokenfleet.compare.replay import learned_overheads_s, read_steps
from tokenfleet.profiles.library import read_profile
from tokenfleet.profiles.measurements import read_measurements
from tokenfleet.texts import parse_slo

REQUESTS, QUICK_REQUESTS = 550, 80
RATE_RPS = 3.0
STRETCH_S = 20.0
LENGTHS = (120.0, 0.6, 2, 1500), (24.0, 0.6, 2, 1500)
Columns = NDArray[np.float64]
SLO = "ttft=1s,tpot=60ms"
MADE = ROOT / "profiles" / "h100-sxm" / "llama-3.1-8b_tp1.yaml"
POLICY = "least-kv"  # a fleet without known step times places by KV alone
KV_TOKENS = (256 << 20) // 2048  # served.ENGINE_FLAGS; 4 layers, 2 heads of 32, keys and values in float32


def replayed(requests: int, seed: int) -> dict[str, str]:
    """The requests and the steps of one replay, as the CSV that `compare` and `serve` write."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name, tiny_model() as model:
        folder = Path(name)
        path = folder / "trace.csv"
        made = poisson(RATE_RPS, requests, seed, *LENGTHS)
        columns = zip(made.arrival_s, made.prompt_tokens, made.output_tokens, strict=True)
        rows = [f"{t:.4f},{p},{o}" for t, p, o in columns]
        path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
        with fleet(model, "--workers", "2", "--data", str(folder / "data")) as server:
            words = ["compare", "--trace", str(path), "--endpoint", server.gateway]
            # Any profile will do here: the simulations that count come later.
            words += ["--control", server.control, "--profile", str(MADE), "--slo", SLO, "--format", "json"]
            words += ["--per-request", str(folder / "requests.csv")]
            tokenfleet(*words, "--policy", POLICY)
        return {
            "requests": (folder / "requests.csv").read_text(),
            "steps": (folder / "data" / "steps.csv").read_text(),
        }


def fitted(steps: Path, out: Path) -> Profile:
    words = ["fit", "--measurements", str(steps), "--model", "tiny-llama", "--gpu", "cpu"]
    words += ["--kv-tokens", str(KV_TOKENS), "--block-tokens", "32", "--max-num-seqs", "256"]
    tokenfleet(*words, "--max-num-batched-tokens", "2048", "--output", str(out), "--format", "json")
    return read_profile(out)


def simulated(live: pl.DataFrame, profile: Profile, extra_s: Columns) -> pl.DataFrame:
    """The whole replay with that profile: columns ttft_s and tpot_s, rows as in `live`."""
    sent = live["sent_unix_s"].to_numpy()
    workload = Workload(sent - sent[0], live["prompt_tokens"].to_numpy(), live["output_tokens"].to_numpy())
    outcome = simulate(workload, [WorkerSpec(profile)] * 2, parse_slo(SLO), POLICY)
    ttft_s = first_tokens_s(outcome.ttft_s, profile, extra_s, np.random.default_rng(0))
    return pl.DataFrame({"ttft_s": ttft_s, "tpot_s": outcome.tpot_s})


def judged(folder: Path, live: pl.DataFrame, length_s: float) -> tuple[dict[str, ComparedFigure], float]:
    """The figures when stretches of this length learn and are judged in turn, and their slowdown.

    The slowdown is how many times as long steps of the second kind of stretch take as those of the first.
    """
    steps = pl.read_csv(folder / "steps.csv")
    begin = float(live["sent_unix_s"][0])
    of_step = ((steps["at_s"].to_numpy() - begin) // length_s).clip(0) % 2
    of_request = ((live["sent_unix_s"].to_numpy() - begin) // length_s) % 2
    theirs = np.full((len(live), 2), np.nan)
    ratios = []
    for learns in (0, 1):
        path = folder / f"learned{learns}.csv"
        steps.filter(pl.Series(of_step == learns)).write_csv(path)
        profile = fitted(path, path.with_suffix(".yaml"))
        seen = live.filter(pl.Series(of_request == learns))
        sent, prompt, ttft = (seen[name].to_numpy() for name in ("sent_unix_s", "prompt_tokens", "ttft_s"))
        extra_s = learned_overheads_s(sent, prompt, ttft, read_steps(folder / "steps.csv"))
        other = simulated(live, profile, extra_s).to_numpy()
        theirs[of_request != learns] = other[of_request != learns]
        ratios.append(_ratio(read_measurements(path), folder / "learned0.yaml"))
    both = {"ttft_s": theirs[:, 0], "tpot_s": theirs[:, 1]}
    ttft_s, tpot_s = live["ttft_s"].to_numpy(), live["tpot_s"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    figures = compared(ttft_s, tpot_s, both, parse_slo(SLO), {})
    return {f.name: f for f in figures}, ratios[1] / ratios[0]


def main() -> int:
    asked = flags(__doc__, resumes=True).parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name:
        folder = Path(name)
        requests = QUICK_REQUESTS if asked.quick else REQUESTS
        part = f"replay {requests} {asked.seed}"
        for kind, csv in asked.resume.part(part, partial(replayed, requests, asked.seed)).items():
            (folder / f"{kind}.csv").write_text(csv)
        live = pl.read_csv(folder / "requests.csv")
        span_s = float(live["sent_unix_s"][-1] - live["sent_unix_s"][0])
        turns, slower = judged(folder, live, STRETCH_S)
        residuals = read_profile(folder / "learned0.yaml").residuals
        halves, drift = judged(folder, live, span_s / 2 + 1)
    rows: list[dict[str, Any]] = [
        {"name": f.name, "live": f.live, "simulated": f.simulated, "error": f.error, "kind": f.kind}
        for f in turns.values()
    ]
    rows += [
        {"name": f"{n}, one half to the other", "live": halves[n].live, "simulated": halves[n].simulated}
        | {"error": halves[n].error}
        for n in ("TTFT p50", "TTFT p90", "TPOT mean")
    ]
    rows.append({"name": "requests finished", "live": float(len(live))})
    rows.append({"name": "step model, mean error", "error": residuals.mean_relative})
    rows.append({"name": "steps of even stretches slower than of odd ones", "error": slower - 1})
    rows.append({"name": "steps of the second half slower than of the first", "error": drift - 1})
    bars = {
        "attainment, points": bar(100 * abs(turns["attainment"].error or 0.0), 2.0),
        "TPOT mean": bar(abs(turns["TPOT mean"].error or 0.0), 0.05),
        "TTFT p50": bar(abs(turns["TTFT p50"].error or 0.0), 0.10),
        "TTFT p90": bar(abs(turns["TTFT p90"].error or 0.0), 0.10),
        "requests": bar(float(len(live)), QUICK_REQUESTS if asked.quick else 500, at_least=True),
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
