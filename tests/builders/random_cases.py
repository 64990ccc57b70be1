"""Random small workers and workloads: block sizes, hinges, KV short enough to preempt, priorities."""

import numpy as np
from made_profiles import made_profile

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload

NEVER_MET = Slo(1e-6, 1e-6)


def random_profile(rng: np.random.Generator, mode: EngineMode) -> Profile:
    block = int(rng.choice([1, 1, 4, 16]))
    seqs = int(rng.integers(1, 9))
    return made_profile(
        step=StepModel(
            base_s=rng.uniform(0.001, 0.03),
            per_prefill_token_s=rng.uniform(0, 2e-4),
            per_sequence_s=rng.uniform(0, 1e-3),
            per_context_token_s=float(rng.choice([0.0, rng.uniform(1e-7, 2e-5)])),
            per_prefill_sum_sq_s=float(rng.choice([0.0, rng.uniform(0, 1e-7)])),
            hinges=(
                Hinge("sequences", 3, rng.uniform(0, 1e-3)),
                Hinge("prefill_tokens", 20, rng.uniform(0, 1e-4)),
            ),
            per_prefill_step_s=float(rng.choice([0.0, rng.uniform(0, 0.01)])),
        ),
        prefill=PrefillModel(
            rng.uniform(0, 0.02), rng.uniform(1e-6, 2e-4), 1e-8, (Hinge("prefill_tokens", 30, 1e-5),)
        ),
        kv=KvModel(capacity_tokens=int(rng.integers(3, 40)) * 16, block_tokens=block),
        engine=EngineLimits(mode=mode, max_batched_tokens=int(rng.integers(seqs, 160)), max_seqs=seqs),
    )


def random_workload(rng: np.random.Generator) -> Workload:
    n = int(rng.integers(1, 40))
    arrival_s = np.sort(rng.uniform(0, rng.choice([0.01, 1.0, 10.0]), n))
    if rng.random() < 0.2:
        arrival_s[: n // 2] = arrival_s[0]
    return Workload(
        arrival_s,
        rng.integers(1, rng.choice([20, 120]), n),
        rng.integers(1, rng.choice([3, 30, 150]), n),
        priority=(rng.random(n) < rng.choice([0.0, 0.3])).astype(np.int64),
    )
