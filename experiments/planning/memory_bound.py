"""Late requests where memory binds, with moves and without.

    python experiments/planning/memory_bound.py [--fragmentation] [--quick] [--format table|json]

Sixteen LLaMA-7B workers on A10s under vLLM 0.1.7, as Llumnix (OSDI '24) measured them: a memory of 13,616
tokens, decode steps that grow by 0.286 ms a sequence, prefill times of Figure 10's recompute curve. Targets
10 s, 100 ms. Power-law lengths (S, M and L: mean 128, 256 and 512 tokens), Poisson arrivals, or Gamma ones
where a CV is named; 4,000 requests, three streams of arrivals. The default policy, `spread+migrate`, runs
against `spread`.

`--fragmentation`: the memory that `harness/fragmentation.py` counts as fragmented (Figure 12), L-L 4/s, 2,500
requests of one stream.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.results import bar, flags, show
from harness.fragmentation import MIGRATE, simulated
from tokenfleet.traces.distributions import LONG, MEDIUM, PUBLISHED_SEED, SHORT, LengthMix, gamma, poisson

WORKERS, BLOCK, KV_BYTES = 16, 16, 524_288
PER_TOKEN_S = KV_BYTES / 600e9  # the A10's memory
PROFILE = Profile(
    "llama-7b",
    "a10",
    1,
    step=StepModel(0.0426 - 8192 * PER_TOKEN_S, 2.03e-4, 0.286e-3, PER_TOKEN_S),
    prefill=PrefillModel(0.0046, 2.03e-4, 5.1e-9),
    kv=KvModel(851 * BLOCK, BLOCK, KV_BYTES),
    engine=EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=12_800, max_seqs=256),
    residuals=Residuals(0.0, 0.0, 0.0, 0),
    source=Source("published", "Llumnix (OSDI '24), Figure 10, and its artifact", "none", "2024-07-10"),
)
SIDES, DRAWN = {"S": SHORT, "M": MEDIUM, "L": LONG}, 10_000
TARGETS = Slo(10.0, 0.1)
STREAMS, REQUESTS = 3, 4000
POLICIES = ("spread", "spread+migrate")


@dataclass(frozen=True)
class Setting:
    """A load: lengths of prompts and outputs, requests a second, and how bursty."""

    lengths: str
    rate_rps: float
    cv: float = 1.0

    def __str__(self) -> str:
        return f"{self.lengths} {self.rate_rps:g}/s" + (f" CV {self.cv:g}" if self.cv != 1.0 else "")


SETTINGS = (
    *(Setting("L-L", rate) for rate in (3.6, 3.8, 4.0)),
    Setting("M-M", 12.0),
    Setting("S-L", 5.5),
    Setting("L-L", 3.4, 2.0),
)


def workload(name: str, rate_rps: float, seed: int, cv: float, requests: int) -> Workload:
    """A generated trace such as `S-L`: prompts short, outputs long. The seed draws the gaps alone."""
    prompt, output = name.split("-")
    stream = np.random.RandomState(PUBLISHED_SEED)
    prompts, outputs = LengthMix(SIDES[prompt], SIDES[output]).draw(DRAWN, stream)
    stream = np.random.RandomState([PUBLISHED_SEED, seed])
    arrivals = poisson(rate_rps, DRAWN, stream) if cv == 1.0 else gamma(rate_rps, cv, DRAWN, stream)
    return Workload(arrivals, prompts, outputs).take(slice(0, requests))


def with_moves(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by setting, all streams together, and the bars; streams are compared one by one too."""
    rows, late, more = [], dict.fromkeys(POLICIES, 0), 0
    streams, requests = (1, 1500) if asked.quick else (STREAMS, REQUESTS)
    for setting in SETTINGS:
        row: dict[str, Any] = {"setting": str(setting)}
        by_stream: dict[str, list[int]] = {}
        for policy in POLICIES:
            outcomes = [
                simulate(
                    workload(setting.lengths, setting.rate_rps, asked.seed + 1 + i, setting.cv, requests),
                    [WorkerSpec(PROFILE)] * WORKERS,
                    TARGETS,
                    policy,
                )
                for i in range(streams)
            ]
            by_stream[policy] = [int((~o.met).sum()) for o in outcomes]
            late[policy] += sum(by_stream[policy])
            row |= {
                f"late, {policy}": sum(by_stream[policy]),
                f"preempted, {policy}": sum(int((o.preemptions > 0).sum()) for o in outcomes),
                f"moved, {policy}": sum(int((o.migrations > 0).sum()) for o in outcomes),
            }
        more += sum(b > a for a, b in zip(*by_stream.values(), strict=True))
        rows.append(row)
    bars = {
        "late requests, share of those without moves": bar(
            late[POLICIES[1]] / max(late[POLICIES[0]], 1), 0.5
        ),
        "streams with more late requests than without moves": bar(more, 0),
    }
    return rows, bars


def with_fragmentation(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by policy, and the bars: the mean with moves over that without."""
    rows, bars = [], {}
    for base in ("freeness", "spread"):
        means = []
        for policy in (base, base + MIGRATE):
            load = workload("L-L", 4.0, asked.seed + 1, 1.0, 300 if asked.quick else 2500)
            run = simulated(PROFILE, WORKERS, load, policy)
            seen = run.memory
            means.append(seen.mean(seen.fragmented))
            row = {"policy": policy, "fragmented": means[-1], "free": seen.mean(seen.free)}
            rows.append(row | {"p99": float(np.percentile(seen.fragmented, 99)), "moves": run.moves})
        bars[f"{base}: fragmented with moves, share of without"] = bar(means[1] / max(means[0], 1e-9), 0.5)
    return rows, bars


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--fragmentation", action="store_true", help="Figure 12 instead")
    asked = parser.parse_args()
    return show("memory_bound", *(with_fragmentation if asked.fragmentation else with_moves)(asked), asked)


if __name__ == "__main__":
    sys.exit(main())
