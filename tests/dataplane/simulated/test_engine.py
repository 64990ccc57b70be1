"""The jumping engine is judged by the step-by-step reference, on random small worlds."""

import numpy as np
import pytest
from reference_engine import simulate_split, simulate_worker

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate

NEVER_MET = Slo(1e-6, 1e-6)
CASES = 500  # of each mode


def random_profile(rng: np.random.Generator, mode: EngineMode) -> Profile:
    block = int(rng.choice([1, 1, 4, 16]))
    seqs = int(rng.integers(1, 9))
    return Profile(
        "made",
        "made",
        1,
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
        residuals=Residuals(0.0, 0.0, 0.0, 0),
        source=Source("composed", "made up", "none", "2026-01-01"),
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


@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED])
def test_every_time_is_that_of_going_step_by_step(mode):
    preempted = 0
    for case in range(CASES):
        rng = np.random.default_rng([case, 7])
        profile, workload = random_profile(rng, mode), random_workload(rng)
        seen = simulate(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
        expected = simulate_worker(
            profile, workload.arrival_s, workload.prompt_tokens, workload.output_tokens, workload.priority
        )
        first = np.array([r.first_token_s for r in expected])
        finish = np.array([r.finish_s for r in expected])
        np.testing.assert_allclose(seen.first_token_s, first, rtol=0, atol=1e-9, err_msg=f"case {case}")
        np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-9, err_msg=f"case {case}")
        assert list(seen.preemptions) == [r.preemptions for r in expected], f"case {case}"
        preempted += int(seen.preemptions.sum())
    assert preempted > CASES  # or the cases would not test preemption


def test_split_phases_hand_over_as_the_reference_does():
    for case in range(CASES):
        rng = np.random.default_rng([case, 8])
        prefill, decode = (random_profile(rng, EngineMode.SPLIT) for _ in range(2))
        workload = random_workload(rng)
        transfer_s = float(rng.choice([0.0, 0.02]))
        workers = [WorkerSpec(prefill, "prefill"), WorkerSpec(decode, "decode")]
        seen = simulate(workload, workers, NEVER_MET, "jsq", transfer_s=transfer_s)
        n = len(workload)
        expected = simulate_split(
            prefill,
            decode,
            workload.arrival_s,
            workload.prompt_tokens,
            workload.output_tokens,
            [0] * n,
            [0] * n,
            transfer_s,
            workload.priority,
        )
        finish = np.array([r.finish_s for r in expected])
        np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-9, err_msg=f"case {case}")
        assert list(seen.preemptions) == [r.preemptions for r in expected], f"case {case}"
