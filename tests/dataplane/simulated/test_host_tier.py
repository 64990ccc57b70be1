"""The compiled tier in host memory is judged by the block-by-block reference, on small tight cases."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import NEVER_MET, random_sharing, tight_profile, without_own
from reference_cache import CachedWorker

from controlplane.perfmodel.profile import HostKv
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import WorkerSpec, prepare


def case(seed: int):
    """A worker with a tier, its requests, and the tier as the reference takes it."""
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 4, 16]))
    workload, _ = random_sharing(rng, block, 40 * block)
    if rng.random() < 0.5:
        workload = replace(workload, prefixes=without_own(workload.prefixes))
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    profile = tight_profile(rng, longest, block)
    held = profile.kv.capacity_tokens // block
    room = int(max(rng.choice([0.2, 0.6, 1.0, 3.0, 20.0]) * held, 1))
    block_s = float(rng.choice([1e-7, 1e-4, 1e-3, 2e-2]))
    kv = replace(profile.kv, bytes_per_token=10)
    host = HostKv(room * block * 10, block * 10 / block_s)
    return replace(profile, kv=kv, host_kv=host), workload, (room, block_s)


def in_line(state) -> list[int]:
    """The ids in host memory, the one used longest ago first."""
    chunks, ids = state.engines.host.chunks, []
    copy = chunks.workers["first"][0]
    while copy != -1:
        ids.append(int(chunks.copies["id"][0, copy]))
        copy = chunks.copies["later"][0, copy]
    return ids


def reference_line(worker: CachedWorker) -> list[int]:
    return [i if isinstance(i, int) else -2 - ((i[1] << 24) | i[2]) for i in worker.host.chunks]


def to_the_end(state) -> None:
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)


def test_loads_stores_evictions_and_times_are_those_of_going_block_by_block():
    seen_at_all = {"loaded": 0, "evicted": 0, "preempted": 0, "both": 0}

    @settings(max_examples=600)
    @given(st.integers(0, 2**40))
    def compare(seed):
        profile, workload, host = case(seed)
        state = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
        to_the_end(state)
        seen, expected = state.outcome(), CachedWorker(profile, workload, host).run()
        assert list(seen.cached_tokens) == [r.cached_tokens for r in expected.requests]
        assert list(seen.loaded_tokens) == [r.loaded_tokens for r in expected.requests]
        assert list(seen.preemptions) == [r.preemptions for r in expected.requests]
        first = np.array([r.first_token_s for r in expected.requests])
        finish = np.array([r.finish_s for r in expected.requests])
        np.testing.assert_allclose(seen.first_token_s, first, rtol=0, atol=1e-9)
        np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-9)
        assert in_line(state) == reference_line(expected)
        assert state.engines.host.chunks.workers["evicted"][0] == len(expected.host.evicted)
        seen_at_all["loaded"] += int(seen.loaded_tokens.sum())
        seen_at_all["evicted"] += len(expected.host.evicted)
        seen_at_all["preempted"] += int(seen.preemptions.sum())
        seen_at_all["both"] += int(
            ((seen.loaded_tokens > 0) & (seen.loaded_tokens < seen.cached_tokens)).sum()
        )

    compare()
    assert min(seen_at_all.values()) > 300, seen_at_all  # or the cases would not test them
