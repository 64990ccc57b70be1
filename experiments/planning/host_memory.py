"""What rate do 16 H100s carry with host memory below their KV? Llama-3.1 8B on Weka's agent sessions.

    python experiments/planning/host_memory.py [--quick] [--resume FOLDER] [--format table|json]

Load, targets and goal are those of `prefix_policies.py` on Weka's data: sessions begun a second, 90 % of the
requests within both targets, placed by `spread`. Each worker has so much host memory for KV that has left its
GPU, loaded at the 50 GB/s that are taken for an H100's bus, and at 12.5 GB/s for one that others share.
`hits`: the hit rate at the rate carried, and `loaded` the part of it that came from host memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt

import numpy as np

from controlplane.perfmodel.profile import HostKv
from controlplane.placement.policies import Policy
from controlplane.workload import Workload
from experiments.lib.results import bar, flags, show
from experiments.planning.prefix_policies import (
    BETWEEN,
    GOAL,
    PRECISION,
    WEKA,
    Model,
    loads,
    models,
    run,
)

GIB, GB = 1 << 30, 1e9
TIERS = {
    "none": None,
    "64 GiB at 50 GB/s": HostKv(64 * GIB, 50 * GB),
    "256 GiB at 50 GB/s": HostKv(256 * GIB, 50 * GB),
    "256 GiB at 12.5 GB/s": HostKv(256 * GIB, 12.5 * GB),
}


def carried(
    load_at: Callable[[float, int], Workload], model: Model, seed: int, near: float
) -> dict[str, float]:
    """The highest rate at which the goal is met, and the hits at it; `near`: a rate not far from it."""
    low, high = BETWEEN["weka"]
    hits, loaded, rate = 0.0, 0.0, near
    while high / low > PRECISION:
        outcome = run(load_at(rate, seed), model, Policy.SPREAD, GOAL["weka"], seed)
        if outcome.complete and outcome.attainment >= GOAL["weka"]:
            low, hits, loaded = rate, outcome.prefix_hit_rate or 0.0, outcome.host_hit_rate or 0.0
        else:
            high = rate
        # Outwards from the guess by a fifth, then the middle.
        rate = sqrt(low * high)
        if low == BETWEEN["weka"][0] or high == BETWEEN["weka"][1]:
            rate = high / 1.2 if low == BETWEEN["weka"][0] else low * 1.2
    return {"rate": low, "hits": hits, "loaded": loaded}


def main() -> int:
    asked = flags(__doc__, WEKA, resumes=True).parse_args()
    load_at = loads(asked.data, asked.quick)["weka"]
    model = models()["8b"]
    seeds = range(asked.seed, asked.seed + (1 if asked.quick else 3))
    near = dict.fromkeys(seeds, 0.5)
    rows = []
    for name, tier in TIERS.items():
        with_tier = replace(model, profile=replace(model.profile, host_kv=tier))
        found = []
        for seed in seeds:
            one = asked.resume.part(f"{name} {seed}", partial(carried, load_at, with_tier, seed, near[seed]))
            near[seed] = one["rate"]
            found.append(one)
        rows.append(
            {
                "host memory": name,
                "rate": float(np.mean([one["rate"] for one in found])),
                "seeds": " ".join(f"{one['rate']:.3f}" for one in found),
                "hits": float(np.mean([one["hits"] for one in found])),
                "loaded": float(np.mean([one["loaded"] for one in found])),
            }
        )
    bars = {
        f"{row['host memory']}: rate by that without": bar(row["rate"] / rows[0]["rate"], 1.0, at_least=True)
        for row in rows[1:]
    }
    return show("host_memory", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
