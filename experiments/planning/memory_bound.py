"""Late requests where memory binds: with moves and without.

    python experiments/planning/memory_bound.py [--quick] [--format table|json]

Sixteen LLaMA-7B workers on A10s (experiments.lib.llumnix) with the published memory of 13,616 tokens, and the
published slope of decode steps, 0.286 ms a sequence. Targets 10 s, 100 ms. Power-law lengths (S, M and L:
mean 128, 256 and 512 tokens), Poisson arrivals, or Gamma ones where a CV is named; 4,000 requests, three
streams of arrivals. The default policy, `spread+migrate`, against `spread`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

from controlplane.perfmodel.profile import KvModel
from controlplane.types import Slo
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.llumnix import BLOCK, KV_BYTES, WORKERS, a10, workload
from experiments.lib.results import bar, flags, show

PROFILE = replace(a10(per_sequence_s=0.286e-3), kv=KvModel(851 * BLOCK, BLOCK, KV_BYTES))
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


def main() -> int:
    asked = flags(__doc__).parse_args()
    rows, bars = with_moves(asked)
    return show("memory_bound", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
