"""The compiled tier in host memory is judged by the block-by-block reference, on small tight cases."""

from dataclasses import replace

import numpy as np
import pytest
from random_cases import (
    NEVER_MET,
    by_day_and_night,
    prefixes_of,
    random_sharing,
    shared_texts,
    tight_profile,
    without_own,
)
from reference_cache import CachedWorker

from controlplane.errors import BadInput
from controlplane.perfmodel.offload import HostKv
from controlplane.placement.batch import queue_first
from controlplane.placement.caches import NOTHING
from controlplane.placement.ledger import NONE
from controlplane.placement.memory import free_blocks
from controlplane.placement.table import block_id, find
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.changes import change_worker
from dataplane.simulated.cluster import advance
from dataplane.simulated.records import DRAIN, FAIL
from dataplane.simulated.simulate import WorkerSpec, prepare, simulate


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


@by_day_and_night(120, 600)
def test_loads_stores_evictions_and_times_are_those_of_going_block_by_block(cases):
    seen_at_all = {"loaded": 0, "evicted": 0, "preempted": 0, "both": 0}
    for seed in cases:
        profile, workload, host = case(seed)
        state = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
        to_the_end(state)
        seen, expected = state.outcome(), CachedWorker(profile, workload, host).run()
        assert list(seen.cached_tokens) == [r.cached_tokens for r in expected.requests], f"case {seed}"
        assert list(seen.loaded_tokens) == [r.loaded_tokens for r in expected.requests], f"case {seed}"
        assert list(seen.preemptions) == [r.preemptions for r in expected.requests], f"case {seed}"
        first = np.array([r.first_token_s for r in expected.requests])
        finish = np.array([r.finish_s for r in expected.requests])
        np.testing.assert_allclose(seen.first_token_s, first, rtol=0, atol=1e-9, err_msg=f"case {seed}")
        np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-9, err_msg=f"case {seed}")
        assert in_line(state) == reference_line(expected), f"case {seed}"
        evicted = len(expected.host.evicted)
        assert state.engines.host.chunks.workers["evicted"][0] == evicted, f"case {seed}"
        seen_at_all["loaded"] += int(seen.loaded_tokens.sum())
        seen_at_all["evicted"] += evicted
        seen_at_all["preempted"] += int(seen.preemptions.sum())
        seen_at_all["both"] += int(
            ((seen.loaded_tokens > 0) & (seen.loaded_tokens < seen.cached_tokens)).sum()
        )
    assert min(seen_at_all.values()) > len(cases) // 2, seen_at_all  # or the cases would not test them


def fleet_case(workers: int):
    """A load on which several workers load from host memory."""
    rng = np.random.default_rng(3)
    texts = [text for _ in range(20) for text in shared_texts(rng, 16, 900)]
    texts = [texts[i] for i in rng.permutation(len(texts))]
    prompt = np.array([p for _, p in texts])
    output = np.array([len(tokens) - p for tokens, p in texts])
    arrival_s = np.sort(rng.uniform(0, 30.0, len(texts)))
    workload = Workload(arrival_s, prompt, output, prefixes=prefixes_of(texts, 16))
    profile = tight_profile(rng, 1200, 16)
    kv = replace(profile.kv, capacity_tokens=640, bytes_per_token=10)
    profile = replace(profile, kv=kv, host_kv=HostKv(500 * 160, 160 / 1e-4))
    return workload, [WorkerSpec(profile)] * workers


@pytest.mark.parametrize("policy", ["spread", "jsq", "round-robin"])
def test_memory_is_whole_again_at_the_end_and_an_advance_by_pieces_leads_to_the_same_bytes(policy):
    workload, workers = fleet_case(3)
    runs = [prepare(workload, workers, Slo(0.5, 0.05), policy) for _ in range(2)]
    to_the_end(runs[0])
    now_s = 0.0
    while advance(runs[1].ledger, runs[1].engines, runs[1].cluster, runs[1].rules, now_s):
        now_s += 0.003
    whole, pieces = (run.outcome() for run in runs)
    assert whole.complete
    assert whole.finish_s.tobytes() == pieces.finish_s.tobytes()
    assert (whole.worker == pieces.worker).all()
    assert whole.host_hit_rate > 0.02
    caches, tier = runs[0].ledger.caches, runs[0].engines.host
    assert [free_blocks(caches, w, 1) for w in range(3)] == [40] * 3
    assert (caches.copies["users"] == 0).all()
    assert (tier.chunks.copies["users"] == 0).all()
    assert (tier.chunks.workers["empty"] + tier.chunks.workers["asleep"] == 500).all()
    assert (tier.workers["loaded"] == 0).all()
    assert (runs[0].engines.workers["loading"] == 0).all()
    assert (runs[0].ledger.workers["queued_tokens"] == 0).all()


def test_blocks_of_a_trace_may_be_larger_than_the_engine_s():
    workload, (worker,) = fleet_case(1)
    fine = replace(worker.profile, kv=replace(worker.profile.kv, block_tokens=4))
    state = prepare(workload, [WorkerSpec(fine)], NEVER_MET, "jsq")
    to_the_end(state)
    assert state.outcome().host_hit_rate > 0.02
    assert free_blocks(state.ledger.caches, 0, 1) == 160
    bare = simulate(workload, [WorkerSpec(replace(fine, host_kv=None))], NEVER_MET, "jsq")
    assert state.outcome().prefix_hit_rate > bare.prefix_hit_rate


def test_a_worker_that_fails_while_it_loads_begins_with_empty_host_memory():
    workload, workers = fleet_case(2)
    slow = replace(workers[0].profile, host_kv=HostKv(500 * 160, 160 / 0.05))
    state = prepare(workload, [WorkerSpec(slow)] * 2, NEVER_MET, "jsq")
    until_s = 0.0
    while state.engines.workers["loading"][0] == 0:
        until_s += 0.01
        advance(state.ledger, state.engines, state.cluster, state.rules, until_s)
    fails = WorkerSpec(slow, fails_s=((until_s, until_s + 0.5),))
    outcome = simulate(workload, [fails, WorkerSpec(slow)], NEVER_MET, "jsq")
    assert outcome.complete
    assert np.isfinite(outcome.finish_s).all()


@pytest.mark.parametrize("what", ["fails", "drains"])
def test_a_request_that_waits_to_be_prefilled_anew_is_stored_where_it_goes_on(what):
    """It has been preempted, so its blocks, which no other request has, were offered where it was."""
    workload, (worker, _) = fleet_case(2)
    rng = np.random.default_rng(5)
    lengths = workload.prompt_tokens + workload.output_tokens
    texts = [rng.integers(1, 1000, n) for n in lengths]
    own = prefixes_of(list(zip(texts, workload.prompt_tokens, strict=True)), 16)
    workload = replace(workload, prefixes=own)
    roomy = WorkerSpec(replace(worker.profile, host_kv=HostKv(20_000 * 160, 160 / 1e-4)))
    state = prepare(workload, [roomy] * 2, NEVER_MET, "jsq")
    until_s, waits = 0.0, False
    while not waits:
        until_s += 0.01
        assert advance(state.ledger, state.engines, state.cluster, state.rules, until_s)
        r = queue_first(state.ledger, 0)
        waits = r != NONE and state.engines.host.requests["stored"][r] > 0
    change_worker(state.ledger, state.engines, state.cluster, 0, FAIL if what == "fails" else DRAIN)
    to_the_end(state)
    outcome, chunks = state.outcome(), state.engines.host.chunks
    assert outcome.complete
    assert outcome.worker[r] == 1
    assert chunks.workers["evicted"][1] == 0
    for other in np.flatnonzero(outcome.worker == 1):
        blocks = range(workload.prompt_tokens[other] // 16)
        assert all(find(chunks, 1, block_id(chunks, other, block)) != NOTHING for block in blocks)


def test_a_run_with_moves_is_refused_and_so_are_engines_that_are_not_simulated_with_it():
    workload, workers = fleet_case(2)
    with pytest.raises(BadInput, match="--host-kv: not simulated with moves"):
        simulate(workload, workers, NEVER_MET, "spread+migrate")
    with pytest.raises(BadInput, match="only chunked engines"):
        workers[0].profile.with_engine(mode=EngineMode.SPLIT)
    kv = replace(workers[0].profile.kv, bytes_per_token=0)
    with pytest.raises(BadInput, match="has no bytes_per_token"):
        replace(workers[0].profile, kv=kv)
