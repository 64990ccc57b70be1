"""Moves under `spread` in overload: late requests with moves and without, and what each rule of moving gives.

    python experiments/planning/moves_in_overload.py [--quick] [--resume FOLDER] [--format table|json]

Sixteen LLaMA-7B workers on A10s (experiments.lib.llumnix) with the published memory of 13,616 tokens, and the
published slope of decode steps, 0.286 ms a sequence. Targets 10 s, 100 ms. Power-law lengths (S, M and L:
mean 128, 256 and 512 tokens), Poisson arrivals, or Gamma ones where a CV is named; 4,000 requests, three
streams of arrivals. Rates and streams other than these were looked at while the rules were made.

    spread       nobody moves
    + moves      as the product has it: room, shedding, requests that wait by Algorithm 2
    no room      the same without room for what waits at the gateway (at L-L 4.2/s)
    balance      the same without room, and balanced by freeness besides (there too)

Judged by setting, all streams together: fewer late requests than without moves in 6 of 8, never 2 % more.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from controlplane.control import Settings
from controlplane.migration.balance import MoveSettings
from controlplane.perfmodel.profile import KvModel
from controlplane.types import Slo
from dataplane.simulated.simulate import ControlSettings, WorkerSpec, simulate
from experiments.lib.llumnix import BLOCK, KV_BYTES, WORKERS, a10, workload
from experiments.lib.results import bar, flags, show
from experiments.lib.without import without

PROFILE = replace(a10(per_sequence_s=0.286e-3), kv=KvModel(851 * BLOCK, BLOCK, KV_BYTES))
TARGETS = Slo(10.0, 0.1)
SEEDS = (1, 2, 3)
REQUESTS = 4000
SYSTEMS = ("spread", "+ moves", "no room", "balance")


@dataclass(frozen=True)
class Setting:
    """A load: lengths of prompts and outputs, requests a second, and how bursty."""

    lengths: str
    rate_rps: float
    cv: float = 1.0

    def __str__(self) -> str:
        return f"{self.lengths} {self.rate_rps:g}/s" + (f" CV {self.cv:g}" if self.cv != 1.0 else "")


SETTINGS = (
    *(Setting("L-L", rate) for rate in (3.6, 3.8, 4.0, 4.2, 4.4)),
    Setting("M-M", 12.0),
    Setting("S-L", 5.5),
    Setting("L-L", 3.4, 2.0),
)


def run_one(setting: Setting, system: str, seed: int, requests: int) -> dict[str, int]:
    """Late requests of one run, by what they missed, and how many moved or were preempted."""
    control = None
    if system == "balance":
        control = ControlSettings(Settings(MoveSettings()))
    with without("room" if system in ("no room", "balance") else ""):
        outcome = simulate(
            workload(setting.lengths, setting.rate_rps, seed, setting.cv, requests),
            [WorkerSpec(PROFILE)] * WORKERS,
            TARGETS,
            "spread" if system == "spread" else "spread+migrate",
            control=control,
        )
    late = outcome.ttft_s > outcome.ttft_target_s
    return {
        "late": int((~outcome.met).sum()),
        "by TTFT": int(late.sum()),
        "by TPOT": int((~outcome.met & ~late).sum()),
        "preempted": int((outcome.preemptions > 0).sum()),
        "moved": int((outcome.migrations > 0).sum()),
    }


def run(asked: argparse.Namespace) -> int:
    settings = SETTINGS[3:4] if asked.quick else SETTINGS
    seeds, requests = (SEEDS[:1], 1500) if asked.quick else (SEEDS, REQUESTS)
    rows: list[dict[str, Any]] = []
    fewer, worst = 0, 0.0
    for setting in settings:
        found: dict[str, dict[str, int]] = {}
        systems = SYSTEMS if setting == SETTINGS[3] else SYSTEMS[:2]
        for system in systems:
            parts = [
                asked.resume.part(
                    f"{setting} {system} seed {seed} of {requests}",
                    partial(run_one, setting, system, seed, requests),
                )
                for seed in seeds
            ]
            found[system] = {name: sum(part[name] for part in parts) for name in parts[0]}
        alone, ours = found["spread"], found["+ moves"]
        fewer += ours["late"] < alone["late"]
        worst = max(worst, ours["late"] / max(alone["late"], 1) - 1.0)
        total = requests * len(seeds)
        rows.append(
            {"setting": str(setting), "attainment without": 1 - alone["late"] / total}
            | {"attainment with": 1 - ours["late"] / total}
            | {f"late, {system}": found[system]["late"] for system in systems}
            | {f"{name} {of}": found[of][name] for name in ("by TTFT", "preempted") for of in SYSTEMS[:2]}
            | {"moved": ours["moved"]}
        )
        print(rows[-1], file=sys.stderr)
    bars = {
        "settings with fewer late requests": bar(fewer, 1 if asked.quick else 6, at_least=True),
        "most late requests more, share": bar(round(worst, 4), 0.02),
    }
    return show("moves_in_overload", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(run(flags(__doc__, resumes=True).parse_args()))
