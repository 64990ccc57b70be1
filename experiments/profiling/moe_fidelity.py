"""Composed profiles of mixtures of experts beside published measurements of vLLM on eight H200.

    python experiments/profiling/moe_fidelity.py [--data DIR] [--format table|json]

Each cell of `moe/token_position.csv` (docs/data.md) is a closed loop: C clients, each sending the next of ten
prompts of one length when its answer of 128 tokens is complete, after two to warm up. It is simulated with
the library's profile of the model, and TPOT and whole times are compared (medians, as published). The cells
are single runs, unsteady by themselves: row `steadiness` is how far published TPOT is off a line through its
neighbours in C on the same length, the least that any model without memory of chance could err by. Cells of
a length whose TTFT at C = 4 is over twice that at C = 8 are left out: they compiled while they ran. `lone`
are cells of four clients with at most 4,096 tokens: least prefill beside decode.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from controlplane.errors import ControlPlaneError
from controlplane.perfmodel.profile import Profile
from controlplane.prefixes import Sessions
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import find_profiles
from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

SETS = {
    "minimax_m25_vllm_tep8": "minimax-m2.5",
    "minimax_m25_vllm_dep8": "minimax-m2.5, DP8",
    "qwen35_vllm_tp8": "qwen3.5-397b-a17b",
}
# Not of the library: attention in data parallel, composed here where aiconfigurator-core is installed.
RANKS = {
    "minimax_m25_vllm_dep8": PredictedWorker(
        "MiniMaxAI/MiniMax-M2.5", "h200", 1, 0.001, expert_parallel=True, data_parallel=8
    )
}
CELLS = "moe/token_position.csv"
OUTPUT, PROMPTS, WARM = 128, 10, 2
COMPILED = 2.0
LONE_CLIENTS, LONE_TOKENS = 4, 4096
MOST = 0.08


def closed_loop(profile: Profile, prompt: int, clients: int, output: int = OUTPUT) -> dict[str, float]:
    """Medians of what the clients see once warm."""
    turns = WARM + PROMPTS
    n = clients * turns
    turn = np.arange(n) // clients
    before = np.arange(n - clients)  # each client's last
    offsets = np.concatenate([np.zeros(clients, np.int64), np.arange(n - clients + 1)])
    sessions = Sessions(np.arange(n) % clients, offsets, before, np.zeros(n))
    work = Workload(np.zeros(n), np.full(n, prompt), np.full(n, output), sessions=sessions)
    done = simulate(work, [WorkerSpec(profile)], Slo(9e9, 9e9), "round-robin")
    rows = turn >= WARM
    e2e_s = done.finish_s - done.arrival_s
    return {"tpot_p50_s": float(np.median(done.tpot_s[rows])), "e2e_p50_s": float(np.median(e2e_s[rows]))}


def unsteadiness(cells: pl.DataFrame) -> float:
    """Mean relative distance of a cell's TPOT from the line between its neighbours in C."""
    off = []
    for _, row in cells.sort("concurrency").group_by("set", "input_tokens"):
        x, y = (row[name].to_numpy().astype(float) for name in ("concurrency", "tpot_p50_s"))
        for i in range(1, len(x) - 1):
            off.append(abs(np.interp(x[i], x[[i - 1, i + 1]], y[[i - 1, i + 1]]) / y[i] - 1))
    return float(np.mean(off))


def main() -> int:
    asked = flags(__doc__, CELLS).parse_args()
    table = pl.read_csv(asked.data / Path(CELLS))
    rows: list[dict[str, Any]] = []
    errors: list[float] = []
    for name, model in SETS.items():
        try:
            if name in RANKS:
                profile = predicted_profile(RANKS[name], date.today())
            else:
                (profile,) = find_profiles(model, ["h200"], [8])
        except ControlPlaneError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        of = table.filter(pl.col("set") == name)
        kept: list[dict[str, Any]] = []
        found: dict[str, list[float]] = {"tpot_p50_s": [], "e2e_p50_s": []}
        for cell in of.iter_rows(named=True):
            prompt, clients = cell["input_tokens"], cell["concurrency"]
            ttft_s = dict(
                of.filter(pl.col("input_tokens") == prompt)["concurrency", "ttft_p50_s"].iter_rows()
            )
            if ttft_s[4] > COMPILED * ttft_s[8]:
                continue
            kept.append(cell)
            said = closed_loop(profile, prompt, clients)
            for figure, values in found.items():
                values.append(said[figure] / cell[figure] - 1)
        if not kept:
            rows.append({"name": f"{model}: cells kept of {len(of)}", "value": 0.0})
            continue
        tpot = np.array(found["tpot_p50_s"])
        errors += np.abs(tpot).tolist()
        lone = np.array([c["concurrency"] <= LONE_CLIENTS and c["input_tokens"] <= LONE_TOKENS for c in kept])
        rows += [
            {"name": f"{model}: cells kept of {len(of)}", "value": float(len(kept))},
            {"name": f"{model}: TPOT p50, mean error", "value": float(np.abs(tpot).mean())},
            {"name": f"{model}: TPOT p50, mean error, lone", "value": float(np.abs(tpot[lone]).mean())},
            {"name": f"{model}: TPOT p50, median error", "value": float(np.median(np.abs(tpot)))},
            {"name": f"{model}: TPOT p50, bias", "value": float(np.median(tpot))},
            {"name": f"{model}: E2E p50, mean error", "value": float(np.abs(found["e2e_p50_s"]).mean())},
            {"name": f"{model}: steadiness", "value": unsteadiness(pl.DataFrame(kept))},
        ]
    mean = float(np.mean(errors)) if errors else float("nan")
    return show("moe_fidelity", rows, {"mean error of TPOT": bar(mean, MOST)}, asked)


if __name__ == "__main__":
    sys.exit(main())
