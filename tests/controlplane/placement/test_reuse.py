"""Placement where workers cache prefixes: what is expected of each, and what `spread` makes of it."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check
from made_profiles import made_profile
from random_cases import NEVER_MET

from controlplane.perfmodel.coefficients import MAX_BATCHED, coefficient_row
from controlplane.perfmodel.profile import EngineLimits, KvModel
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.constraints import could_fit, fits, harm, most_cached
from controlplane.placement.ledger import HELD, NONE, PREFILLING, QUEUED, cached_tokens, enqueue
from controlplane.placement.policies import ANY_PHASE, POLICY_CODE, PlacementSettings, Policy, assign
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.simulate import WorkerSpec, prepare, simulate

BLOCK = 16
STEP = StepModel(0.005, 2e-5, 1e-4, 1e-7, 1e-9)
PREFILL = PrefillModel(0.004, 3e-5, 1e-9)
RELAXED = Slo(2.0, 0.2)
KNOBS = PlacementSettings().knobs()
BY_CACHE = [Policy.SPREAD, Policy.BEST_FIT, Policy.LONGEST_PREFIX, Policy.LLM_D, Policy.SGLANG]


def profile_of(tokens: int = 40_000, mode: EngineMode = EngineMode.CHUNKED, batched: int = 512):
    limits = EngineLimits(mode=mode, max_batched_tokens=batched, max_seqs=32)
    return made_profile(STEP, KvModel(capacity_tokens=tokens, block_tokens=BLOCK), limits, PREFILL)


def of_prefixes(arrival_s, shared: list[tuple[int, int]], own_tokens: int = 40, outputs: int = 8) -> Workload:
    """Requests that begin with (which text, how many blocks of it) and go on by themselves."""
    starts = {text: 1000 * n for n, text in enumerate(sorted({text for text, _ in shared}))}
    lists = [starts[text] + np.arange(blocks) for text, blocks in shared]
    counts = [len(ids) for ids in lists]
    ids = np.concatenate([*lists, np.zeros(0, np.int64)])
    prefixes = Prefixes(BLOCK, np.concatenate([[0], np.cumsum(counts)]), ids)
    prompts = np.array(counts) * BLOCK + own_tokens
    return Workload(np.asarray(arrival_s, float), prompts, np.full(len(prompts), outputs), prefixes=prefixes)


def random_load(rng: np.random.Generator, requests: int, texts: int, rps: float) -> Workload:
    arrival_s = np.sort(np.round(np.cumsum(rng.exponential(1 / rps, requests)), 2))  # some at once
    shared = [(int(rng.integers(texts)), int(rng.integers(0, 60))) for _ in range(requests)]
    load = of_prefixes(arrival_s, shared, int(rng.integers(1, 100)))
    return replace(load, output_tokens=rng.integers(1, 40, requests))


def expected_by_hand(state, w: int, r: int, in_use: bool) -> int:
    """What worker `w` has or will have of a request, from the copies there and the lists of those at it."""
    led, caches = state.ledger, state.ledger.caches
    unused, free = set(), int(caches.workers["unused"][w])
    while free != -1:
        unused.add(free)
        free = int(caches.copies["later"][w, free])
    copies = caches.copies[w, : caches.workers["fresh"][w]]
    ids = state.workload.prefixes.of(r).tolist()
    there = {int(c["id"]) for n, c in enumerate(copies) if n not in unused and (c["users"] > 0 or not in_use)}
    for other in range(len(state.workload)):
        row = led.requests[other]
        if row["worker"] == w and row["phase"] in (QUEUED, PREFILLING):
            full = int(row["prompt"] + row["key"]) // BLOCK
            there |= set(state.workload.prefixes.of(other).tolist()[:full])
    tokens = int(led.requests["prompt"][r])
    hits = 0
    while hits < min((tokens - 1) // BLOCK, len(ids)) and ids[hits] in there:
        hits += 1
    return hits * BLOCK


@settings(max_examples=60)
@given(st.integers(0, 2**40), st.sampled_from(BY_CACHE))
def test_what_is_expected_of_a_worker_is_what_it_has_and_what_those_at_it_will_store(seed, policy):
    rng = np.random.default_rng(seed)
    load = random_load(rng, 60, 3, 60.0)
    state = prepare(load, [WorkerSpec(profile_of(tokens=4000))] * 3, RELAXED, policy)
    for until_s in (0.1, 0.4, 0.8, 1.5):
        advance(state.ledger, state.engines, state.cluster, state.rules, until_s)
        view_all(state.ledger, state.engines, until_s)
        coming = np.flatnonzero(
            (state.ledger.requests["phase"] == HELD) & (state.ledger.requests["worker"] == NONE)
        )
        for r in coming[:12].tolist():
            most = 0
            for w in range(3):
                for in_use in (False, True):
                    expected = expected_by_hand(state, w, r, in_use)
                    for guess in (0, 16, 160, int(load.prompt_tokens[r])):
                        assert cached_tokens(state.ledger, w, r, guess, in_use) == expected
                most = max(most, expected_by_hand(state, w, r, False))
            assert most_cached(state.ledger, r) == most


@settings(max_examples=40)
@given(st.integers(0, 2**40), st.sampled_from(BY_CACHE), st.sampled_from(["chunked", "prefill-first"]))
def test_a_request_finds_cached_what_was_expected_as_it_was_placed(seed, policy, mode):
    rng = np.random.default_rng(seed)
    load = random_load(rng, 80, 3, 80.0)
    workers = [WorkerSpec(profile_of(tokens=200_000, mode=EngineMode(mode)))] * 3
    state = prepare(load, workers, Slo(60.0, 5.0), policy)
    expected: dict[int, int] = {}
    for arrival_s in np.unique(load.arrival_s):
        advance(state.ledger, state.engines, state.cluster, state.rules, float(arrival_s))
        for r in np.flatnonzero(state.ledger.requests["phase"] == QUEUED).tolist():
            expected.setdefault(r, int(state.ledger.requests["cached"][r]))
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    found = state.outcome().cached_tokens
    assert len(expected) > 20
    assert {r: int(found[r]) for r in expected} == expected


@pytest.mark.parametrize("policy", [*BY_CACHE, Policy.LEAST_PREFILL, Policy.JSQ])
def test_every_sum_holds_at_every_instant_where_prefixes_are_shared(policy):
    rng = np.random.default_rng(5)
    load = random_load(rng, 200, 4, 120.0)
    load = replace(load, priority=(rng.random(200) < 0.2).astype(np.int64))
    workers = [WorkerSpec(profile_of(tokens=3200), fails_s=((0.7, 1.0),) if w == 1 else ()) for w in range(3)]
    state = prepare(load, workers, RELAXED, policy)
    for until_s in np.arange(0.05, 4.0, 0.05):
        advance(state.ledger, state.engines, state.cluster, state.rules, float(until_s))
        check(state, float(until_s))
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    assert state.outcome().complete


def work_by_hand(state, w: int, r: int, now_s: float) -> float:
    """Seconds until worker `w` would have prefilled a request, were nobody to come after it."""
    led = state.ledger
    worker, k = led.workers[w], led.coefficients[led.workers["variant"][w]]
    profile = state.profiles[0]
    tokens, cached = int(led.requests["prompt"][r]), expected_by_hand(state, w, r, False)
    queued = 0
    for other in range(len(state.workload)):
        row = led.requests[other]
        if row["worker"] != w or row["phase"] not in (QUEUED, PREFILLING):
            continue
        queued += int(row["prompt"] + row["key"] - row["cached"])
        if row["phase"] == PREFILLING:
            job = state.engines.requests[other]
            queued -= int(job["computed"] + job["chunk"] - row["cached"])
    work = queued + tokens - cached
    steps = np.ceil(work / max(k[MAX_BATCHED] - worker["decoding"], 1))
    step_s = profile.step.base_s + profile.step.per_sequence_s * worker["decoding"]
    step_s += profile.step.per_prefill_step_s + profile.step.per_context_token_s * worker["context"]
    work_s = steps * step_s + profile.step.per_prefill_token_s * work
    work_s += profile.step.per_prefill_sum_sq_s * (tokens**2 - cached**2)
    return float(work_s + (max(worker["boundary_s"] - now_s, 0.0) if worker["queued"] else 0.0))


@settings(max_examples=60)
@given(st.integers(0, 2**40))
def test_spread_takes_the_worker_with_least_added_work_among_those_that_may(seed):
    rng = np.random.default_rng(seed)
    load = random_load(rng, 90, 3, 60.0)
    state = prepare(load, [WorkerSpec(profile_of(tokens=6000))] * 4, Slo(0.5, 0.05), "spread")
    led = state.ledger
    now_s = float(rng.uniform(0.2, 1.2))
    advance(led, state.engines, state.cluster, state.rules, now_s)
    view_all(led, state.engines, now_s)
    for r in range(int(np.searchsorted(load.arrival_s, now_s, "right")), len(load)):
        led.requests["arrival_s"][r] = now_s
        chosen = int(assign(led, POLICY_CODE[Policy.SPREAD], KNOBS, r, now_s, False, ANY_PHASE, np.zeros(2)))
        cached = [expected_by_hand(state, w, r, False) for w in range(4)]
        may = [w for w in range(4) if fits(led, KNOBS, w, r, cached[w], now_s, False)]
        work_s = [work_by_hand(state, w, r, now_s) for w in range(4)]
        if not may:
            assert chosen == NONE
            continue
        best = min(may, key=lambda w: work_s[w])
        if chosen == NONE:
            refuse = [
                w for w in range(4) if w not in may and could_fit(led, KNOBS, w, r, cached[w], now_s, False)
            ]
            wanted = min(refuse, key=lambda w: work_s[w])
            assert work_s[wanted] < work_s[best]
            assert cached[wanted] > cached[best]
            continue
        assert chosen in may
        assert work_s[chosen] == pytest.approx(work_s[best], rel=1e-9)
        empty = led.caches.workers["empty"]
        ties = [w for w in may if work_s[w] == work_s[chosen]]
        assert empty[chosen] == max(empty[w] for w in ties) or len(ties) == 1


def spread_takes(state, r: int, now_s: float) -> int:
    state.ledger.requests["arrival_s"][r] = now_s
    code = POLICY_CODE[Policy.SPREAD]
    return int(assign(state.ledger, code, KNOBS, r, now_s, False, ANY_PHASE, np.zeros(2)))


def test_a_request_waits_for_the_worker_that_has_its_prefix_and_no_room_where_another_would_compute_it_anew():
    load = of_prefixes([0.0, 9.0, 9.0], [(0, 100), (0, 60), (1, 60)], own_tokens=1000, outputs=200)
    state = prepare(load, [WorkerSpec(profile_of(tokens=4000))] * 2, Slo(9.0, 9.0), "spread")
    advance(state.ledger, state.engines, state.cluster, state.rules, 0.5)
    view_all(state.ledger, state.engines, 0.5)
    here = int(state.ledger.requests["worker"][0])
    assert not fits(state.ledger, KNOBS, here, 1, 960, 0.5, False)
    assert fits(state.ledger, KNOBS, 1 - here, 1, 0, 0.5, False)
    assert spread_takes(state, 1, 0.5) == NONE
    assert spread_takes(state, 2, 0.5) == 1 - here  # nothing of it is cached anywhere


def test_no_request_waits_for_a_worker_that_could_not_serve_it_even_idle():
    load = of_prefixes([0.0, 0.0], [(0, 100), (0, 100)], own_tokens=20, outputs=20)
    slow = replace(profile_of(), step=replace(STEP, base_s=0.1))
    state = prepare(load, [WorkerSpec(slow), WorkerSpec(profile_of())], Slo(9.0, 0.05), "spread")
    enqueue(state.ledger, 0, 0, False)
    state.ledger.workers["queued_tokens"][0] = 0  # as if it were there for little else
    assert cached_tokens(state.ledger, 0, 1, 0, False) == 1600
    assert spread_takes(state, 1, 0.0) == 1


def shares(outcome) -> Counter:
    return Counter(outcome.worker.tolist())


def test_a_first_block_that_all_share_draws_no_request_to_one_worker():
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1 / 110, 2000))
    load = of_prefixes(arrival_s, [(0, 2)] * 2000, own_tokens=900, outputs=20)
    workers = [WorkerSpec(profile_of(tokens=100_000))] * 6
    spread = shares(simulate(load, workers, RELAXED, "spread"))
    assert max(spread.values()) < 1.5 * min(spread.values()), spread
    herd = shares(simulate(load, workers, RELAXED, "longest-prefix"))
    assert max(herd.values()) > 1000, herd  # the load is one on which a policy could herd


@pytest.mark.parametrize("mode", ["chunked", "prefill-first"])
def test_a_burst_of_one_prefix_computes_it_once_on_each_worker_that_gets_it(mode):
    load = of_prefixes(np.zeros(24), [(n % 3, 120) for n in range(24)], own_tokens=20)
    workers = [WorkerSpec(profile_of(tokens=100_000, mode=EngineMode(mode)))] * 3
    outcome = simulate(load, workers, RELAXED, "spread")
    computed = [r for r in range(24) if outcome.cached_tokens[r] == 0]
    assert len(computed) == 3  # though nothing was cached yet as the other 21 were placed
    for text in range(3):
        assert len({int(outcome.worker[r]) for r in range(24) if r % 3 == text}) == 1


@pytest.mark.parametrize(("rps", "least", "most"), [(3, 1, 1), (60, 2, 4), (190, 5, 6)])
def test_a_hot_prefix_is_on_as_many_workers_as_its_load_needs(rps, least, most):
    rng = np.random.default_rng(2)
    arrival_s = np.cumsum(rng.exponential(1 / rps, 20 * rps))
    load = of_prefixes(arrival_s, [(0, 100)] * len(arrival_s), own_tokens=600, outputs=4)
    outcome = simulate(load, [WorkerSpec(profile_of(tokens=100_000))] * 6, RELAXED, "spread")
    assert least <= len(shares(outcome)) <= most, shares(outcome)
    assert outcome.attainment > 0.99


def test_idle_workers_share_the_sessions_that_come_one_after_another():
    load = of_prefixes(np.arange(40) * 1.0, [(n % 8, 100) for n in range(40)], own_tokens=20)
    outcome = simulate(load, [WorkerSpec(profile_of(tokens=100_000))] * 4, RELAXED, "spread")
    assert (outcome.cached_tokens[8:] == 1600).all()
    assert set(shares(outcome).values()) == {10}


def test_a_long_prompt_that_is_mostly_cached_is_not_given_up_as_late():
    long = of_prefixes([0.0, 2.0], [(0, 600), (0, 600)], own_tokens=30, outputs=4)
    lone = simulate(long, [WorkerSpec(profile_of(tokens=100_000))] * 2, NEVER_MET, "spread").ttft_s
    between = Slo(float(lone[1] + lone[0]) / 2, 1.0)
    outcome = simulate(long, [WorkerSpec(profile_of(tokens=100_000))] * 2, between, "spread")
    assert outcome.met.tolist() == [False, True]
    assert outcome.first_token_s[1] - 2.0 == pytest.approx(lone[1])


def test_memory_that_others_use_costs_a_request_nothing_and_memory_that_sleeps_costs_like_new():
    # Room for one such request beside the first, if what they share counts once.
    load = of_prefixes([0.0, 1.0], [(0, 100), (0, 100)], own_tokens=10, outputs=200)
    state = prepare(load, [WorkerSpec(profile_of(tokens=2400))], Slo(9.0, 9.0), "spread")
    led = state.ledger
    advance(led, state.engines, state.cluster, state.rules, 0.5)
    view_all(led, state.engines, 0.5)
    led.requests["arrival_s"][1] = 0.5
    assert cached_tokens(led, 0, 1, 0, True) == 1600
    assert harm(led, KNOBS, 0, 1, 1600, 0.5, False, 0.5) < np.inf
    led.caches.copies["users"][0] = 0  # as if nobody used them
    assert cached_tokens(led, 0, 1, 0, True) == 0
    assert harm(led, KNOBS, 0, 1, 1600, 0.5, False, 0.5) == np.inf


def test_attention_over_what_is_cached_is_paid_for():
    from controlplane.placement.constraints import prefill_lasts_s

    k = coefficient_row(profile_of())
    whole = prefill_lasts_s(k, 100, 1000, 900, 0, 0)
    assert whole == pytest.approx(0.005 + 2e-5 * 100 + 1e-9 * (1000**2 - 900**2))
