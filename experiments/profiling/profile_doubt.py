"""How far composed profiles are off on measured runs: the doubt that they state, beside what runs show.

    python experiments/profiling/profile_doubt.py [--resume DIR] [--format table|json]

Each of LMBench's ladders (docs/data.md, `profiling/accuracy.py`) calibrates the library's profile on its
three lowest rates: decode and prefill take so many times as long as composed. The doubt of a phase is the
root mean square of the logarithms of these factors, ladders of one cluster, model and GPU counted once, by
their mean. BROKEN is left out of prefill: its first turns are not answered by the engine alone (accuracy.md).
Of mixtures of experts one run has requests one by one, Llama-4-Scout's.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.ladders import LMBENCH, ladder
from experiments.lib.results import bar, flags, show
from experiments.profiling.accuracy import DEVELOPMENT, JUDGED, MIXTURES
from tokenfleet.profiles.accuracy import CALIBRATED_ON
from tokenfleet.profiles.fit_log import calibrated, joined
from tokenfleet.profiles.kernels import UNSEEN, UNSEEN_MIXTURE

BROKEN = "l8-ocp-llmd"  # a stack
WITHIN_90 = 1.645  # standard deviations


def factors(name: str, data: Path) -> dict[str, float]:
    """By phase: how many times as long as composed."""
    runs = ladder(data, name)
    learn = runs.runs[:CALIBRATED_ON]
    known = np.concatenate([run.measured for run in learn])
    workers, caches = runs.settings.workers, runs.settings.engine.prefix_caching
    _, found = calibrated(joined([run.log for run in learn]), runs.worker(), known, workers, caches)
    return {one.name: one.factor for one in found}


def stack_of(name: str) -> str:
    """Cluster, model and GPU, which ladders of several workloads have in common."""
    return "-".join(
        part for part in name.split("-") if part not in ("sharegpt", "short", "long", "low", "high")
    )


def main() -> int:
    asked = flags(__doc__, LMBENCH, resumes=True).parse_args()
    rows: list[dict[str, Any]] = []
    by_stack: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name in (*DEVELOPMENT, *JUDGED, *MIXTURES):
        found = asked.resume.part(name, partial(factors, name, asked.data))
        rows.append({"runs": name, "stack": stack_of(name)} | found)
        by_stack[stack_of(name)].append(found)
    bars, mixtures = {}, set(map(stack_of, MIXTURES))
    for family, stated in (("dense", UNSEEN), ("mixtures", UNSEEN_MIXTURE)):
        for phase in ("decode", "prefill"):
            stacks = [
                found
                for stack, found in by_stack.items()
                if (stack in mixtures) == (family == "mixtures") and (phase, stack) != ("prefill", BROKEN)
            ]
            logs = np.array([np.mean([np.log(one[phase]) for one in of]) for of in stacks])
            inside = float(np.mean(np.abs(logs) <= WITHIN_90 * stated))
            what = f"{family}, {phase}: root mean square over {len(logs)} stacks, beside what is stated"
            off = float(np.round(np.sqrt(np.mean(logs**2)), 3))
            bars[f"{what}, whose 90 % interval holds {inside:.0%}"] = bar(off, stated)
    return show("profile_doubt", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
