"""The jumping simulator against going step by step: how far apart is any token time?

    python experiments/profiling/jump_exactness.py [--quick] [--seed N] [--format table|json]

Random small cases (block sizes, hinges, KV short enough to preempt, priorities, simultaneous arrivals) run
in the compiled engine and in the independent step-by-step engine of the tests.
"""

from __future__ import annotations

import sys

import numpy as np

from controlplane.types import EngineMode
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show

sys.path.insert(0, str(ROOT / "tests" / "builders"))

from random_cases import NEVER_MET, random_profile, random_workload
from reference_engine import simulate_worker

CASES, QUICK = 1000, 100  # of each mode
BAR_S = 1e-9


def main() -> int:
    asked = flags(__doc__).parse_args()
    rows = []
    for mode in (EngineMode.PREFILL_FIRST, EngineMode.CHUNKED):
        requests, preempted, worst_s, unlike = 0, 0, 0.0, 0
        cases = QUICK if asked.quick else CASES
        for case in range(cases):
            rng = np.random.default_rng([asked.seed, case, 9])
            profile, workload = random_profile(rng, mode), random_workload(rng)
            jumped = simulate(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
            stepped = simulate_worker(
                profile,
                workload.arrival_s,
                workload.prompt_tokens,
                workload.output_tokens,
                workload.priority,
            )
            for seen, name in ((jumped.first_token_s, "first_token_s"), (jumped.finish_s, "finish_s")):
                expected = np.array([getattr(r, name) for r in stepped])
                worst_s = max(worst_s, float(np.abs(seen - expected).max()))
            unlike += int((jumped.preemptions != [r.preemptions for r in stepped]).sum())
            requests += len(workload)
            preempted += int(jumped.preemptions.sum())
        rows.append(
            {
                "mode": str(mode),
                "cases": cases,
                "requests": requests,
                "preemptions": preempted,
                "preempted otherwise": unlike,
                "worst difference (s)": worst_s,
            }
        )
    bars = {
        "worst difference of a token time (s)": bar(max(r["worst difference (s)"] for r in rows), BAR_S),
        "requests preempted otherwise": bar(sum(r["preempted otherwise"] for r in rows), 0),
    }
    return show("jump_exactness", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
