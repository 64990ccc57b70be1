"""Workers of several ranks are judged by ranks that really step together, and by stages that really queue."""

from dataclasses import replace

import numpy as np
import pytest
from random_cases import (
    NEVER_MET,
    by_day_and_night,
    prefixes_of,
    random_profile,
    random_workload,
    shared_texts,
    tight_profile,
)
from reference_engine import simulate_ranks

from controlplane.errors import BadInput
from controlplane.perfmodel.capacity import fluid_workers_of
from controlplane.perfmodel.profile import rank_of
from controlplane.perfmodel.ranks import Ranks
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.control_loop import ControlSettings
from dataplane.simulated.elastic import ElasticSettings
from dataplane.simulated.elastic_run import simulate_elastic
from dataplane.simulated.simulate import WorkerSpec, simulate


def ranked(rng, of):
    profile = random_profile(rng, EngineMode.CHUNKED)
    count = int(rng.integers(2, 5))
    if of == "data":
        return replace(profile, ranks=Ranks("data", count, float(rng.choice([0.0, 1e-5, 1e-4]))))
    kv = replace(profile.kv, capacity_tokens=profile.kv.capacity_tokens * count + profile.kv.block_tokens)
    whole = replace(profile, kv=kv, ranks=Ranks("pipeline", count))
    return whole.with_engine(max_seqs=profile.engine.max_seqs * count, max_batched_tokens=200)


@by_day_and_night(60, 300)
@pytest.mark.parametrize("of", ["data", "pipeline"])
def test_every_time_is_that_of_ranks_that_take_each_step_together(of, cases):
    preempted = together = 0
    for case in cases:
        rng = np.random.default_rng([case, 21])
        profile, workload = ranked(rng, of), random_workload(rng)
        workload = replace(workload, priority=np.zeros(len(workload), np.int64))
        count, shared = profile.ranks.count, profile.ranks.shared_token_s
        seen = simulate(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
        expected = simulate_ranks(
            replace(rank_of(profile), ranks=None),
            count,
            shared,
            workload.arrival_s,
            workload.prompt_tokens,
            workload.output_tokens,
            seen.worker,
        )
        first = np.array([r.first_token_s for r in expected])
        finish = np.array([r.finish_s for r in expected])
        np.testing.assert_allclose(seen.first_token_s, first, rtol=0, atol=1e-8, err_msg=f"case {case}")
        np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-8, err_msg=f"case {case}")
        assert list(seen.preemptions) == [r.preemptions for r in expected], f"case {case}"
        preempted += int(seen.preemptions.sum())
        together += len(np.unique(seen.worker)) > 1
    assert preempted > len(cases) // 2  # or the cases would not test preemption
    assert together > len(cases) // 2


def test_ranks_that_cache_do_the_same_work_as_ranks_that_have_nothing_to_share():
    for case in range(60):
        rng = np.random.default_rng([case, 22])
        texts = shared_texts(rng, 4, 200)
        n = len(texts)
        plain = Workload(
            np.sort(rng.uniform(0, 1.0, n)),
            np.array([prompt for _, prompt in texts]),
            np.array([len(tokens) - prompt for tokens, prompt in texts]),
        )
        own = [(np.concatenate([[10_000 + i], tokens]), prompt) for i, (tokens, prompt) in enumerate(texts)]
        longer = replace(plain, prompt_tokens=plain.prompt_tokens + 1)
        profile = replace(tight_profile(rng, 1 << 12, 4), ranks=Ranks("data", 3, 1e-5))
        caching = simulate(
            replace(longer, prefixes=prefixes_of(own, 4)), [WorkerSpec(profile)], NEVER_MET, "jsq"
        )
        bare = simulate(longer, [WorkerSpec(profile)], NEVER_MET, "jsq")
        np.testing.assert_allclose(caching.finish_s, bare.finish_s, rtol=0, atol=1e-9, err_msg=f"case {case}")


def test_a_cycle_of_a_pipeline_lasts_as_long_as_its_slowest_batch_takes_through_all_stages():
    rng = np.random.default_rng(3)
    for _ in range(50):
        stages = int(rng.integers(2, 6))
        stage_s = rng.uniform(0.5, 2.0, stages)  # of each batch in any stage
        free_s, back_s = np.zeros(stages), np.zeros(stages)
        cycles = [back_s.copy()]
        for _ in range(30):
            for batch in range(stages):  # none overtakes another
                at_s = back_s[batch]
                for stage in range(stages):
                    at_s = max(at_s, free_s[stage]) + stage_s[batch]
                    free_s[stage] = at_s
                back_s[batch] = at_s
            cycles.append(back_s.copy())
        np.testing.assert_allclose(cycles[-1] - cycles[-2], stages * stage_s.max(), rtol=1e-9)


def test_prefill_on_one_rank_holds_up_the_decode_of_all():
    rng = np.random.default_rng(1)
    profile = replace(random_profile(rng, EngineMode.CHUNKED), ranks=Ranks("data", 2))
    profile = replace(profile, kv=replace(profile.kv, capacity_tokens=16000, request_tokens=0))
    profile = profile.with_engine(max_batched_tokens=1000, max_seqs=8)
    alone = Workload(np.array([0.0]), np.array([10]), np.array([100]))
    both = Workload(np.array([0.0, 0.3]), np.array([10, 900]), np.array([100, 1]))
    lone = simulate(alone, [WorkerSpec(profile)], NEVER_MET, "jsq")
    beside = simulate(both, [WorkerSpec(profile)], NEVER_MET, "jsq")
    assert beside.worker[0] != beside.worker[1]
    assert beside.finish_s[0] > lone.finish_s[0] + 0.5 * 900 * profile.step.per_prefill_token_s


def test_no_fleet_of_ranks_does_with_fewer_workers_than_the_bound_says():
    for case in range(40):
        rng = np.random.default_rng([case, 23])
        profile = ranked(rng, str(rng.choice(["data", "pipeline"])))
        kv = replace(profile.kv, capacity_tokens=200_000, request_tokens=0)
        profile = replace(profile, kv=kv)
        n = 60
        work = Workload(np.sort(rng.uniform(0, 2.0, n)), rng.integers(1, 150, n), rng.integers(2, 60, n))
        slo = Slo(float(rng.uniform(0.1, 1.0)), float(rng.uniform(1.2, 4.0)) * profile.step.base_s * 2)
        try:
            least = fluid_workers_of(work, profile, slo)
        except BadInput:
            continue
        if least > 1:
            outcome = simulate(work, [WorkerSpec(profile)] * (least - 1), slo, "jsq")
            assert outcome.attainment < 1.0, f"case {case}"


def test_what_cannot_be_done_with_ranks_is_refused_in_one_line():
    rng = np.random.default_rng(5)
    profile, workload = ranked(rng, "data"), random_workload(rng)
    for policy in ("exact", "spread+migrate"):
        with pytest.raises(BadInput, match="several ranks"):
            simulate(workload, [WorkerSpec(profile)], NEVER_MET, policy)
    with pytest.raises(BadInput, match="one size"):
        simulate_elastic(workload, [WorkerSpec(profile)], NEVER_MET, ElasticSettings(), ControlSettings())
    with pytest.raises(BadInput, match="chunk prefill"):
        replace(random_profile(rng, EngineMode.PREFILL_FIRST), ranks=Ranks("data", 2))
    for wrong in (("data", 1, 0.0), ("pipeline", 2, 0.5), ("tensor", 2, 0.0)):
        with pytest.raises(BadInput, match="ranks"):
            Ranks(*wrong)
