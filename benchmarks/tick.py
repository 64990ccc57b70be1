"""What one `tick` costs: 1,000 workers, 50,000 running requests, the lists counted in the tick itself."""

from __future__ import annotations

import sys
import time

import numpy as np

from controlplane.control import Settings, State, tick
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.load import LoadSettings
from controlplane.snapshot import RunningRequest, Snapshot, WorkerLoad
from controlplane.types import RequestId, WorkerId
from experiments.lib.results import bar, flags, show

WALL_S = 0.05
STEP = StepModel(0.0187, 1e-4, 7e-5, 4.6e-7)


def a_fleet(workers: int, each: int, uneven: float, rng: np.random.Generator) -> Snapshot:
    """Workers with `each` requests; a share `uneven` of them holds long ones, and has somebody waiting."""
    seen = []
    for w in range(workers):
        heavy = rng.random() < uneven
        held = rng.integers(100, 1500 if heavy else 500, each)
        still = rng.integers(1, 600, each)
        running = tuple(
            RunningRequest(RequestId(f"{w}-{i}"), int(h), int(rng.random() < 0.1), 5, int(s), 0.06)
            for i, (h, s) in enumerate(zip(held, still, strict=True))
        )
        queue = (RunningRequest(RequestId(f"{w}-q"), 900, 0, 0, 200, 0.06),) if heavy else ()
        seen.append(WorkerLoad(WorkerId(f"w{w}"), "serving", 40_000, running, queue, STEP, 256))
    return Snapshot(0.0, tuple(seen), workers)


def main() -> int:
    asked = flags(__doc__).parse_args()
    rows = []
    for uneven in (0.0, 0.05, 0.4):
        snapshot = a_fleet(1000, 50, uneven, np.random.default_rng([asked.seed, int(uneven * 100)]))
        walls, actions = [], []
        for _ in range(5 if asked.quick else 40):
            began = time.perf_counter()
            _, actions = tick(Settings(load=LoadSettings(1, 2000)), State(), snapshot)
            walls.append(time.perf_counter() - began)
        rows.append(
            {
                "uneven": uneven,
                "actions": len(actions),
                "median_ms": round(float(np.median(walls)) * 1e3, 1),
                "max_ms": round(max(walls) * 1e3, 1),
            }
        )
    slowest = max(row["median_ms"] for row in rows) / 1e3
    return show("tick", rows, {"tick, s": bar(slowest, WALL_S)}, asked)


if __name__ == "__main__":
    sys.exit(main())
