"""Compiles the simulator before all packages are there: it needs Numba, SciPy and the solvers alone.

`make` starts it beside the rest of an installation. A process that needs the simulator meanwhile waits for it
(controlplane/compiled.py). Two requests on two workers compile everything that a plan runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from dataplane.startup import use_kernel_cache

    use_kernel_cache()
    import numpy as np

    from controlplane.perfmodel.engine import EngineLimits, KvModel
    from controlplane.perfmodel.profile import Profile, Residuals, Source
    from controlplane.perfmodel.step import StepModel
    from controlplane.types import Slo
    from controlplane.workload import Workload
    from dataplane.simulated.simulate import WorkerSpec, simulate

    step, source = StepModel(0.01, 1e-5, 1e-4, 1e-8), Source("composed", "made up", "none", "2026-01-01")
    kv = KvModel(capacity_tokens=10_000)
    profile = Profile("made", "made", 1, step, kv, EngineLimits(), Residuals(0.0, 0.0, 0.0, 0), source)
    two = Workload(np.array([0.0, 0.1]), np.array([100, 200]), np.array([3, 4]))
    simulate(two, [WorkerSpec(profile)] * 2, Slo(1.0, 0.05), "spread")
    return 0


if __name__ == "__main__":
    sys.exit(main())
