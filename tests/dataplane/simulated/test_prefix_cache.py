"""The compiled prefix caches are judged by the block-by-block reference, on small tight cases."""

from dataclasses import replace

import numpy as np
import pytest
from made_profiles import made_profile
from random_cases import (
    NEVER_MET,
    by_day_and_night,
    prefixes_of,
    random_profile,
    random_sharing,
    shared_texts,
    tight_profile,
    without_own,
)
from reference_cache import CachedWorker

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.batch import enqueue
from controlplane.placement.hits import cached_tokens, known_cached, shared_tokens
from controlplane.placement.memory import free_blocks
from controlplane.placement.order import begin_keeping
from controlplane.placement.table import cached_blocks, cached_everywhere
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import WorkerSpec, prepare, simulate

STEP = StepModel(0.005, 2e-5, 1e-4, 1e-7, 1e-8)
PREFILL = PrefillModel(0.004, 3e-5, 2e-9)


def profile_of(block: int = 16, mode: EngineMode = EngineMode.CHUNKED, tokens: int = 1600) -> Profile:
    limits = EngineLimits(mode=mode, max_batched_tokens=512, max_seqs=16)
    return made_profile(STEP, KvModel(capacity_tokens=tokens, block_tokens=block), limits, PREFILL)


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


def to_the_end(state) -> None:
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)


@by_day_and_night(80, 400)
def test_hits_times_preemptions_and_evictions_are_those_of_going_block_by_block(cases):
    seen_at_all = {"preempted": 0, "evicted": 0, "cached": 0}
    for seed in cases:
        profile, workload = case(seed)
        state = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
        to_the_end(state)
        seen, expected = state.outcome(), CachedWorker(profile, workload).run()
        assert list(seen.cached_tokens) == [r.cached_tokens for r in expected.requests], f"case {seed}"
        assert list(seen.preemptions) == [r.preemptions for r in expected.requests], f"case {seed}"
        first = np.array([r.first_token_s for r in expected.requests])
        finish = np.array([r.finish_s for r in expected.requests])
        np.testing.assert_allclose(seen.first_token_s, first, rtol=0, atol=1e-9, err_msg=f"case {seed}")
        np.testing.assert_allclose(seen.finish_s, finish, rtol=0, atol=1e-9, err_msg=f"case {seed}")
        assert state.ledger.caches.workers["evicted"][0] == len(expected.pool.evicted), f"case {seed}"
        assert asleep(state) == reference_asleep(expected), f"case {seed}"
        seen_at_all["preempted"] += int(seen.preemptions.sum())
        seen_at_all["evicted"] += len(expected.pool.evicted)
        seen_at_all["cached"] += int(seen.cached_tokens.sum())
    assert min(seen_at_all.values()) > len(cases), seen_at_all  # or the cases would not test them


def test_a_router_is_told_what_a_request_would_hit_and_changes_nothing_by_asking():
    told = 0
    for seed in range(60):
        profile, workload = case(seed)
        state = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
        led, caches = state.ledger, state.ledger.caches
        for until_s in (0.05, 0.3, 1.0, 5.0):
            advance(led, state.engines, state.cluster, state.rules, until_s)
            used = caches.workers["fresh"][0]
            copies = caches.copies[0, :used]
            unused, free = set(), caches.workers["unused"][0]
            while free != -1:
                unused.add(int(free))
                free = caches.copies["later"][0, free]
            there = {int(copy["id"]) for n, copy in enumerate(copies) if n not in unused}
            before = caches.workers.copy(), caches.copies.copy(), caches.held.copy()
            for r in range(len(workload)):
                tokens = int(led.requests["prompt"][r] + led.requests["key"][r])
                if led.requests["phase"][r] > 1 or tokens < 1:
                    continue
                ids, block = workload.prefixes.of(r).tolist(), profile.kv.block_tokens
                hits = 0
                while hits < (tokens - 1) // block:
                    own = -2 - ((r << 24) | hits)
                    if (ids[hits] if hits < len(ids) else own) not in there:
                        break
                    hits += 1
                for guess in (0, 1, hits, hits + 1, hits + 7):
                    assert cached_blocks(caches, 0, r, (tokens - 1) // block, guess, False) == hits
                named = np.array(ids[: (tokens - 1) // block], np.int64)
                assert cached_everywhere(caches, named).tolist() == [min(hits, len(named))]
                told += hits
            assert (caches.workers == before[0]).all()
            assert (caches.copies == before[1]).all()
            assert (caches.held == before[2]).all()
    assert told > 1000


@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED, EngineMode.SPLIT])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_block_is_free_again_at_the_end_whatever_the_engine(mode, multiple):
    for seed in range(40):
        rng = np.random.default_rng([seed, multiple])
        texts = shared_texts(rng, 16, 600)
        n = len(texts)
        workload = Workload(
            np.sort(rng.uniform(0, 2, n)),
            np.array([prompt for _, prompt in texts]),
            np.array([len(tokens) - prompt for tokens, prompt in texts]),
            prefixes=prefixes_of(texts, 16),
        )
        profile = random_profile(rng, mode)
        # Down to a quarter of what the longest request needs: alone, it outgrows its worker.
        kv = KvModel(capacity_tokens=int(rng.integers(10, 80)) * 16, block_tokens=16 // multiple)
        profile = replace(profile, kv=kv)
        workers = [WorkerSpec(profile)] * 3
        if mode == EngineMode.SPLIT:
            workers = [WorkerSpec(profile, "prefill"), *[WorkerSpec(profile, "decode")] * 2]
        state = prepare(workload, workers, Slo(1.0, 0.05), "jsq")
        to_the_end(state)
        outcome, caches = state.outcome(), state.ledger.caches
        assert outcome.complete
        assert (outcome.cached_tokens >= 0).all()
        assert outcome.prefix_queries == workload.prompt_tokens.sum()
        blocks = profile.kv.capacity_tokens // profile.kv.block_tokens
        assert [free_blocks(caches, w, 1) for w in range(3)] == [blocks] * 3
        assert (caches.workers["empty"] >= 0).all()
        assert (caches.workers["shared"] == 0).all()
        assert (caches.copies["users"] == 0).all()


def pair(prompt: int, output: int = 1, gap_s: float = 10.0, block: int = 16, requests: int = 2) -> Workload:
    """The same prompt again and again, and nothing of the answers named."""
    count = prompt // block
    return Workload(
        np.arange(requests) * gap_s,
        np.full(requests, prompt),
        np.full(requests, output),
        prefixes=Prefixes(block, np.arange(requests + 1) * count, np.tile(np.arange(count), requests)),
    )


@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED])
@pytest.mark.parametrize(("prompt", "cached"), [(100, 96), (96, 80), (16, 0), (15, 0)])
def test_a_prefill_behind_cached_tokens_pays_for_the_rest_and_for_their_attention(mode, prompt, cached):
    profile = profile_of(mode=mode)
    seen = simulate(pair(prompt), [WorkerSpec(profile)], NEVER_MET, "jsq")
    assert list(seen.cached_tokens) == [0, cached]
    squares = prompt**2 - cached**2
    if mode == EngineMode.CHUNKED:
        lasts_s = profile.step.step_s(prompt - cached, 0, 0, squares)
    else:
        lasts_s = profile.prefill.prefill_s(prompt - cached, squares)
    assert seen.ttft_s[1] == pytest.approx(float(lasts_s), abs=1e-12)


def test_without_caching_a_run_is_that_of_a_workload_that_shares_nothing():
    for seed in range(50):
        profile, workload = case(seed)
        seen = simulate(workload, [WorkerSpec(profile)], NEVER_MET, "jsq", prefix_caching=False)
        expected = simulate(replace(workload, prefixes=None), [WorkerSpec(profile)], NEVER_MET, "jsq")
        assert seen.cached_tokens is None
        assert seen.prefix_hit_rate is None
        assert (seen.finish_s == expected.finish_s).all()


def test_coarse_blocks_hit_nearly_what_blocks_of_the_engine_hit():
    rng = np.random.default_rng(5)
    hits = {1: 0, 4: 0}
    for _ in range(40):
        texts = [text for _ in range(4) for text in shared_texts(rng, 64, 4000)]
        arrival_s = np.sort(rng.uniform(0, 60, len(texts)))
        prompt = np.array([p for _, p in texts])
        output = np.array([len(tokens) - p for tokens, p in texts])
        profile = profile_of(tokens=6400)
        coarse = prefixes_of(texts, 64)
        starts = np.repeat(coarse.ids * 4, 4)  # each block as four of the engine's, by the same identity
        fine = Prefixes(16, coarse.offsets * 4, starts + np.tile(np.arange(4), len(coarse.ids)))
        for multiple, prefixes in ((1, fine), (4, coarse)):
            workload = Workload(arrival_s, prompt, output, prefixes=prefixes)
            seen = simulate(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
            hits[multiple] += seen.prefix_hits
    assert hits[1] > 50_000
    assert hits[4] == pytest.approx(hits[1], rel=0.02)


@pytest.mark.parametrize("policy", ["spread", "best-fit", "slack-fit"])
def test_asking_only_the_workers_that_changed_leads_to_the_same_bytes(policy):
    """Each piece of an advance asks every worker again; an advance in one go asks those that have changed."""
    waited = 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        texts = [text for _ in range(12) for text in shared_texts(rng, 16, 900)]
        prompt = np.array([p for _, p in texts])
        output = np.array([len(tokens) - p for tokens, p in texts])
        arrival_s = np.sort(rng.uniform(0, 1.5, len(texts)))
        workload = Workload(arrival_s, prompt, output, prefixes=prefixes_of(texts, 16))
        runs = [prepare(workload, [WorkerSpec(profile_of())] * 3, Slo(0.4, 0.02), policy) for _ in range(2)]
        to_the_end(runs[0])
        now_s = 0.0
        while advance(runs[1].ledger, runs[1].engines, runs[1].cluster, runs[1].rules, now_s):
            now_s += 0.003
        one, pieces = (run.outcome() for run in runs)
        assert one.finish_s.tobytes() == pieces.finish_s.tobytes()
        assert (one.worker == pieces.worker).all()
        waited += int((runs[0].ledger.requests["held_s"] > 0).sum())
    assert waited > 20, "a load on which nobody waits shows nothing"


def test_what_workers_have_cached_is_told_anew_once_a_request_has_joined_one():
    """Where changes are reported it is looked up once; blocks that a queue will store count from then on."""
    workload = pair(100, gap_s=0.0, requests=3)
    state = prepare(workload, [WorkerSpec(profile_of())] * 2, NEVER_MET, "jsq")
    led = state.ledger
    begin_keeping(led.orders)
    assert [known_cached(led, w, 1, 0) for w in (0, 1)] == [0, 0]
    enqueue(led, 1, 0, False)
    for r in (1, 2, 1):
        assert [known_cached(led, w, r, 0) for w in (0, 1)] == [0, 96]
        assert [cached_tokens(led, w, r, 0, False) for w in (0, 1)] == [0, 96]


def test_a_worker_that_fails_or_is_stopped_comes_back_with_an_empty_cache():
    profile = profile_of()
    workload = pair(100)
    fails = simulate(workload, [WorkerSpec(profile, fails_s=((5.0, 6.0),))], NEVER_MET, "jsq")
    drains = simulate(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
    assert list(fails.cached_tokens) == [0, 0]
    assert list(drains.cached_tokens) == [0, 96]


def test_what_running_requests_share_is_held_once():
    profile = profile_of()
    workload = pair(100, output=50, gap_s=1e-6, requests=3)
    state = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
    led = state.ledger
    until_s = 0.0
    while led.workers["running_n"][0] < 3:
        until_s += 1e-3
        advance(led, state.engines, state.cluster, state.rules, until_s)
    assert shared_tokens(led, 0) == 2 * 96
    to_the_end(state)
    assert shared_tokens(led, 0) == 0


def test_blocks_that_are_no_multiple_of_the_engine_s_are_refused():
    profile = profile_of(block=32)
    with pytest.raises(BadInput, match="blocks of 16 tokens are no multiple of the engine's 32"):
        simulate(pair(100), [WorkerSpec(profile)], NEVER_MET, "jsq")
