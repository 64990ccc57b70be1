"""Composed profiles of mixtures of experts beside published measurements of vLLM on eight H200.

    python experiments/profiling/moe_fidelity.py [--data DIR] [--format table|json]

Each cell of `moe/token_position.csv` (docs/data.md) is a closed loop: C clients, each sending the next of ten
prompts of one length when its answer of 128 tokens is complete, after two to warm up. It is simulated with
the library's profile of the model, and TPOT and whole times are compared (medians, as published). The cells
are single runs, unsteady by themselves: row `steadiness` is how far published TPOT is off a line through its
neighbours in C on the same length, the least that any model without memory of chance could err by. `lone` are
cells of four clients with at most 4,096 tokens: least prefill beside decode. `held` is the share of cells
that a plan's 90 % interval holds, of DRAWS drawn profiles; `width` is its median, relative to the prediction.
"""

from __future__ import annotations

import sys
from datetime import date
from typing import Any

import numpy as np
import polars as pl

from controlplane.errors import ControlPlaneError
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.uncertainty import draw_profile
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
LONE_CLIENTS, LONE_TOKENS = 4, 4096
MOST, DRAWS = 0.08, 59


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
    table = pl.read_csv(asked.data / CELLS)
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
        found: dict[str, list[tuple[float, bool, float]]] = {"tpot_p50_s": [], "e2e_p50_s": []}
        others = [draw_profile(profile, np.random.default_rng(k)) for k in range(DRAWS)]
        for cell in of.iter_rows(named=True):
            prompt, clients = cell["input_tokens"], cell["concurrency"]
            said, *drawn = (closed_loop(one, prompt, clients) for one in (profile, *others))
            for figure, values in found.items():
                low, high = np.quantile([one[figure] for one in drawn], (0.05, 0.95))
                is_held = low <= cell[figure] <= high
                values.append((said[figure] / cell[figure] - 1, is_held, (high - low) / said[figure]))
        (tpot, held, width), (e2e, e2e_held, _) = (np.transpose(one) for one in found.values())
        errors += np.abs(tpot).tolist()
        lone = (of["concurrency"] <= LONE_CLIENTS) & (of["input_tokens"] <= LONE_TOKENS)
        figures = {
            "cells": len(of),
            "TPOT p50, mean error": np.abs(tpot).mean(),
            "TPOT p50, mean error, lone": np.abs(tpot[lone.to_numpy()]).mean(),
            "TPOT p50, bias": np.median(tpot),
            "TPOT p50, held": held.mean(),
            "TPOT p50, width": np.median(width),
            "E2E p50, mean error": np.abs(e2e).mean(),
            "E2E p50, held": e2e_held.mean(),
            "steadiness": unsteadiness(of),
        }
        rows += [{"name": f"{model}: {name}", "value": float(value)} for name, value in figures.items()]
    mean = float(np.mean(errors)) if errors else float("nan")
    return show("moe_fidelity", rows, {"mean error of TPOT": bar(mean, MOST)}, asked)


if __name__ == "__main__":
    sys.exit(main())
