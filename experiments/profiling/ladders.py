"""Measured ladders of rates on vLLM with prefix caching, replayed: hit rates, latencies, and the knee.

    python experiments/profiling/ladders.py [--only NAME] [--data DIR] [--format table|json]

LMBench's ladders of one replica without a second tier of KV: ShareGPT (each conversation's turns one after
another), `long` (21,000 tokens, of which 1,041 are everybody's) and `short`. Every rate is simulated as it
was sent, with the library's profile (its KV for 0.95 of the GPU's memory, where the run's flags say so), and
with that profile fitted to the ladder's three lowest rates, which are then judged no more.

The knee is the rate, between two of the ladder's, at which the 90th percentile of TTFT passes the larger of
twice its value and its median plus 0.25 s at the three lowest rates, as measured. The hit rate is that of the
simulated engine beside that of a cache of equal size that serves one request after another (`off`, points):
what the server hit was not measured.

Not replayed: LMCache (KV kept in the host's memory), two replicas (each picked by chance), Llama 4 Scout (no
profile, and a mixture of experts).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from controlplane.perfmodel.profile import Profile
from dataplane.simulated.simulate import Outcome
from experiments.lib.ladders import LMBENCH, Run, joined, ladder
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.fit_log import fit_log, replay
from tokenfleet.profiles.library import library_folder, read_profile

GPU_BYTES = 79.15 * 1024**3  # as vLLM sees an 80 GB A100
CALIBRATED_ON = 3
WORKER = {
    "l70": "a100-sxm/llama-3.1-70b_tp2",
    "l8": "a100-sxm/llama-3.1-8b_tp1",
    "apr29": "a100-sxm/llama-3.1-8b_tp1",
}
# The share of the GPU's memory that vLLM was given: the manifests' where there are any, else vLLM's default.
UTILIZATION = {"l70": 0.95, "l8": 0.95, "apr29": 0.9}
LADDERS = (
    "l70-k8s-vllm-sharegpt",
    "l70-ocp-llmd-sharegpt",
    "apr29-root-sharegpt",
    "apr29-vllm-sharegpt",
    "l70-k8s-vllm-short",
    "apr29-root-short",
    "apr29-llmd-short",
    "l8-ocp-vllm-long-high",
    "l8-ocp-vllm-long-low",
    "apr29-root-long",
    "apr29-vllm-long",
)
HIT_BAR, KNEE_BAR, LADDERS_BAR = 1.0, 0.05, 0.8


def worker(name: str) -> Profile:
    """The library's profile of a ladder's engine, with the KV that its share of memory leaves."""
    stack = name.split("-")[0]
    profile = read_profile(library_folder() / f"{WORKER[stack]}.yaml")
    more = (UTILIZATION[stack] - 0.9) * GPU_BYTES * profile.tp_degree / profile.kv.bytes_per_token
    block = profile.kv.block_tokens
    return replace(
        profile,
        kv=replace(profile.kv, capacity_tokens=profile.kv.capacity_tokens + int(more) // block * block),
    )


def told(run: Run, outcome: Outcome, capacity_tokens: int) -> dict[str, float]:
    """A run's figures: measured and simulated means and tails over the requests measured."""
    m, log = run.measured, run.log
    long = m & (log.workload.output_tokens > 1)
    e2e_s = outcome.finish_s - log.workload.arrival_s
    assert outcome.cached_tokens is not None
    hits = np.maximum(outcome.cached_tokens, 0)[m].sum() / log.workload.prompt_tokens[m].sum()
    return {
        "e2e": float(e2e_s[m].mean() / log.e2e_s[m].mean() - 1),
        "tpot": float(outcome.tpot_s[long].mean() / log.tpot_s[long].mean() - 1),
        "ttft": float(outcome.ttft_s[m].mean() / log.ttft_s[m].mean() - 1),
        "ttft p99": float(np.quantile(outcome.ttft_s[m], 0.99) / np.quantile(log.ttft_s[m], 0.99) - 1),
        "p50 s": float(np.quantile(log.ttft_s[m], 0.5)),
        "p90 s": float(np.quantile(log.ttft_s[m], 0.9)),
        "simulated p90 s": float(np.quantile(outcome.ttft_s[m], 0.9)),
        "hit rate": float(hits),
        "allowed": run.hit_rate_alone(capacity_tokens),
    }


def knee_rps(rates_rps: Sequence[float], p90_s: Sequence[float], limit_s: float) -> float:
    """The rate at which the 90th percentile passes the limit; infinite where it never does."""
    for i in range(1, len(rates_rps)):
        if p90_s[i] > limit_s:
            share = (limit_s - p90_s[i - 1]) / (p90_s[i] - p90_s[i - 1])
            return float(rates_rps[i - 1] * (rates_rps[i] / rates_rps[i - 1]) ** max(share, 0.0))
    return math.inf


def replayed(name: str, data: Any, calibrates: bool, seed: int) -> dict[str, Any]:
    """One ladder: its figures at every rate, and both knees."""
    runs = ladder(data, name)
    profile = worker(name)
    low = joined(runs[:CALIBRATED_ON])
    if calibrates:
        profile = fit_log(low.log, profile, low.measured, seed)
    by_rate = [told(run, replay(run.log, profile), profile.kv.capacity_tokens) for run in runs]
    rates_rps = [run.rate_rps for run in runs]
    lowest = by_rate[:CALIBRATED_ON]
    limit_s = max(
        2 * float(np.mean([row["p90 s"] for row in lowest])),
        float(np.mean([row["p50 s"] for row in lowest])) + 0.25,
    )
    return {
        "rates": rates_rps,
        "by_rate": by_rate,
        "knee": knee_rps(rates_rps, [row["p90 s"] for row in by_rate], limit_s),
        "simulated": knee_rps(rates_rps, [row["simulated p90 s"] for row in by_rate], limit_s),
    }


def row_of(name: str, profile: str, found: dict[str, Any], skipped: int) -> dict[str, Any]:
    below = [row for rate, row in zip(found["rates"], found["by_rate"], strict=True) if rate < found["knee"]]
    judged = below[skipped:]
    row: dict[str, Any] = {"ladder": name, "profile": profile, "rates": len(judged)}
    row |= {
        what: float(np.median([abs(r[what]) for r in judged])) for what in ("e2e", "tpot", "ttft", "ttft p99")
    }
    row |= {"hit rate": float(np.mean([r["hit rate"] for r in below]))}
    row |= {"off": 100 * max(abs(r["hit rate"] - r["allowed"]) for r in below)}
    return row | {"knee": found["knee"], "simulated": found["simulated"]}


def is_near(found: dict[str, Any]) -> bool:
    """Whether both knees are within the bar, or there is neither."""
    knee, simulated = found["knee"], found["simulated"]
    return (
        knee == simulated or abs(simulated / knee - 1) <= KNEE_BAR if knee < math.inf else simulated == knee
    )


def main() -> int:
    parser = flags(__doc__, LMBENCH, resumes=True)
    parser.add_argument("--only", choices=LADDERS, help="this ladder")
    asked = parser.parse_args()
    rows, near, off = [], [], []
    for name in LADDERS if asked.only is None else (asked.only,):
        for profile, calibrates in (("library", False), ("fitted", True)):
            found = asked.resume.part(
                f"{name} {profile} {asked.seed}", partial(replayed, name, asked.data, calibrates, asked.seed)
            )
            rows.append(row_of(name, profile, found, CALIBRATED_ON if calibrates else 0))
            if calibrates:
                near.append(is_near(found))
                off.append(rows[-1]["off"])
    bars = {
        "hit rate below the knee beside what the blocks allow, points, worst": bar(max(off), HIT_BAR),
        f"ladders whose knee is within {KNEE_BAR:.0%}, fitted": bar(
            float(np.mean(near)), LADDERS_BAR, at_least=True
        ),
    }
    return show("ladders", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
