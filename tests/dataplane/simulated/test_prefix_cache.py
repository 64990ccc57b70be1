"""The compiled prefix caches are judged by the block-by-block reference, on small tight cases."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import NEVER_MET, random_sharing, tight_profile, without_own
from reference_cache import CachedWorker

from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, prepare, simulate
from dataplane.simulated.cluster import advance


def case(seed: int):
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 4, 16]))
    workload, _ = random_sharing(rng, block, 40 * block)
    if rng.random() < 0.5:
        workload = replace(workload, prefixes=without_own(workload.prefixes))
    if rng.random() < 0.3:
        workload = replace(workload, priority=(rng.random(len(workload)) < 0.3).astype(np.int64))
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    return tight_profile(rng, longest, block), workload


def asleep(state, w: int = 0) -> list[int]:
    """The ids of the copies asleep at a worker, the next to be evicted first."""
    caches, ids = state.ledger.caches, []
    copy = caches.workers["first"][w]
    while copy != -1:
        ids.append(int(caches.copies["id"][w, copy]))
        copy = caches.copies["later"][w, copy]
    return ids


def reference_asleep(worker: CachedWorker) -> list[int]:
    return [
        b.id if isinstance(b.id, int) else -2 - ((b.id[1] << 24) | b.id[2])
        for b in worker.pool.free
        if b.id is not None
    ]


SEEN = {"preempted": 0, "evicted": 0, "cached": 0}


@settings(max_examples=600)
@given(st.integers(0, 2**40))
def compare_with_reference(seed):
    profile, workload = case(seed)
    state = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    seen, expected = state.outcome(), CachedWorker(profile, workload).run()
    assert list(seen.cached_tokens) == [r.cached_tokens for r in expected.requests]
    assert list(seen.preemptions) == [r.preemptions for r in expected.requests]
    first = np.array([r.first_token_s for r in expected.requests])
    finish = np.array([r.finish_s for r in expected.requests])
    np.testing.assert_allclose(seen.first_token_s, first, rtol=0, atol=1e-9)
    np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-9)
    assert state.ledger.caches.workers["evicted"][0] == len(expected.pool.evicted)
    assert asleep(state) == reference_asleep(expected)
    SEEN["preempted"] += int(seen.preemptions.sum())
    SEEN["evicted"] += len(expected.pool.evicted)
    SEEN["cached"] += int(seen.cached_tokens.sum())


def test_hits_times_preemptions_and_evictions_are_those_of_going_block_by_block():
    compare_with_reference()
    assert min(SEEN.values()) > 1000, SEEN  # or the cases would not test them
