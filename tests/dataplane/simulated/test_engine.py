"""The jumping engine is judged by the step-by-step reference, on random small cases."""

import numpy as np
import pytest
from random_cases import NEVER_MET, by_day_and_night, random_profile, random_workload
from reference_engine import simulate_split, simulate_worker

from controlplane.types import EngineMode
from controlplane.worker_type import KvLink
from dataplane.simulated.simulate import WorkerSpec, simulate

BY_DAY, ALL = 100, 500  # cases of each mode


@pytest.mark.always
@by_day_and_night(BY_DAY, ALL)
@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED])
def test_every_time_is_that_of_going_step_by_step(mode, cases):
    preempted = 0
    for case in cases:
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
    assert preempted > len(cases)  # or the cases would not test preemption


@by_day_and_night(BY_DAY, ALL)
def test_an_engine_that_plans_ahead_gives_first_tokens_a_step_later(cases):
    late = waited = 0
    for case in cases:
        rng = np.random.default_rng([case, 9])
        profile, workload = random_profile(rng, EngineMode.CHUNKED), random_workload(rng)
        ahead = profile.with_engine(steps_ahead=float(rng.choice([1.0, 1.7])))
        plain, seen = (simulate(workload, [WorkerSpec(p)], NEVER_MET, "jsq") for p in (profile, ahead))
        expected = simulate_worker(
            ahead, workload.arrival_s, workload.prompt_tokens, workload.output_tokens, workload.priority
        )
        first = np.array([r.first_token_s for r in expected])
        finish = np.array([r.finish_s for r in expected])
        np.testing.assert_allclose(seen.first_token_s, first, rtol=0, atol=1e-9, err_msg=f"case {case}")
        np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-9, err_msg=f"case {case}")
        np.testing.assert_allclose(seen.tpot_s, plain.tpot_s, rtol=1e-9, atol=1e-12)
        late += int((seen.ttft_s > plain.ttft_s).sum())
        waited += int((seen.ttft_s == plain.ttft_s).sum())
    assert late > len(cases)
    assert waited > len(cases)  # on idle engines, and behind a spent budget


@by_day_and_night(BY_DAY, ALL)
def test_split_phases_hand_over_as_the_reference_does(cases):
    for case in cases:
        rng = np.random.default_rng([case, 8])
        prefill, decode = (random_profile(rng, EngineMode.SPLIT) for _ in range(2))
        workload = random_workload(rng)
        transfer_s = float(rng.choice([0.0, 0.02]))
        link = KvLink(1e9, transfer_s)  # random profiles' KV has no bytes
        workers = [WorkerSpec(prefill, "prefill", link=link), WorkerSpec(decode, "decode")]
        seen = simulate(workload, workers, NEVER_MET, "jsq")
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
