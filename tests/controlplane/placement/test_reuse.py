"""Placement where workers cache prefixes: what is expected of each, and what `spread` makes of it."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from by_day import examples
from hypothesis import example, given
from hypothesis import strategies as st
from invariants import check
from made_profiles import made_profile
from random_cases import NEVER_MET

from controlplane.perfmodel.coefficients import MAX_BATCHED, coefficient_row
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.offload import HostKv
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.assign import assign
from controlplane.placement.batch import enqueue
from controlplane.placement.caches import forget
from controlplane.placement.constraints import could_fit, fits, harm
from controlplane.placement.hits import cached_tokens, known_cached, known_loads
from controlplane.placement.ledger import ANY_PHASE, HELD, NONE, PREFILLING, QUEUED
from controlplane.placement.memory import learn
from controlplane.placement.outlook import (
    demand,
    hopeless,
    kv_peak,
    least_cached_s,
    least_prefill_s,
    prefill_lasts_s,
    prefilled_s,
)
from controlplane.placement.policies import POLICY_CODE, PlacementSettings, Policy
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.simulate import WorkerSpec, prepare, simulate

BLOCK = 16
STEP = StepModel(0.005, 2e-5, 1e-4, 1e-7, 1e-9)
PREFILL = PrefillModel(0.004, 3e-5, 1e-9)
RELAXED = Slo(2.0, 0.2)
KNOBS = PlacementSettings().row()
COPY_S = 5e-5  # of loading a block
BY_CACHE = [Policy.SPREAD, Policy.BEST_FIT, Policy.LONGEST_PREFIX, Policy.LLM_D, Policy.SGLANG]


def host_of(blocks: int, copy_s: float = COPY_S) -> HostKv:
    """Host memory of `blocks` blocks, at 10 bytes a token."""
    return HostKv(blocks * BLOCK * 10, BLOCK * 10 / copy_s)


def profile_of(
    tokens: int = 40_000,
    mode: EngineMode = EngineMode.CHUNKED,
    batched: int = 512,
    host: HostKv | None = None,
):
    limits = EngineLimits(mode=mode, max_batched_tokens=batched, max_seqs=32)
    kv = KvModel(capacity_tokens=tokens, block_tokens=BLOCK, bytes_per_token=10)
    return replace(made_profile(STEP, kv, limits, PREFILL), host_kv=host)


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


def ids_at(caches, w: int, in_use: bool) -> set[int]:
    """Ids of the blocks that a worker has copies of, or of those in use."""
    unused, free = set(), int(caches.workers["unused"][w])
    while free != -1:
        unused.add(free)
        free = int(caches.copies["later"][w, free])
    copies = caches.copies[w, : caches.workers["fresh"][w]]
    holds = copies["users"] > 0 if in_use else np.ones(len(copies), bool)
    holds[[n for n in unused if n < len(copies)]] = False
    return set(copies["id"][holds].tolist())


def not_prefilled_at(state, w: int) -> list[int]:
    """The requests at worker `w` that wait or are prefilled."""
    requests = state.ledger.requests
    here = (requests["worker"] == w) & np.isin(requests["phase"], (QUEUED, PREFILLING))
    return np.flatnonzero(here).tolist()


class ByHand:
    """What workers have and will have, from the copies there and the lists of those at them.

    The lists are walked once: it is of one instant.
    """

    def __init__(self, state) -> None:
        self.state = state
        self._stored: dict[tuple[int, bool], set[int]] = {}
        self._in_host: dict[int, set[int]] = {}

    def stored(self, w: int, in_use: bool) -> set[int]:
        """Blocks that worker `w` has, and those that requests at it will store."""
        if (w, in_use) not in self._stored:
            led = self.state.ledger
            there = ids_at(led.caches, w, in_use)
            for other in not_prefilled_at(self.state, w):
                row = led.requests[other]
                full = int(row["prompt"] + row["key"]) // BLOCK
                there |= set(self.state.workload.prefixes.of(other).tolist()[:full])
            self._stored[w, in_use] = there
        return self._stored[w, in_use]

    def in_host(self, w: int) -> set[int]:
        chunks = self.state.ledger.host.chunks
        if w not in self._in_host:
            self._in_host[w] = ids_at(chunks, w, False) if chunks.tokens else set()
        return self._in_host[w]

    def expected(self, w: int, r: int, in_use: bool = False) -> int:
        """Tokens of a request that worker `w` has or will have in its cache."""
        ids, there = self.state.workload.prefixes.of(r).tolist(), self.stored(w, in_use)
        tokens = int(self.state.ledger.requests["prompt"][r])
        hits = 0
        while hits < min((tokens - 1) // BLOCK, len(ids)) and ids[hits] in there:
            hits += 1
        return hits * BLOCK

    def loads(self, w: int, r: int) -> int:
        """Copies in host memory that follow what worker `w` has or will have of a request in its cache."""
        ids, there = self.state.workload.prefixes.of(r).tolist(), self.in_host(w)
        begins = end = self.expected(w, r) // BLOCK
        while end < len(ids) and ids[end] in there:
            end += 1
        return end - begins

    def counted(self, w: int, r: int) -> tuple[int, int]:
        """Tokens of a request that worker `w` would not compute, and copies that it would load."""
        copies = self.loads(w, r)
        return self.expected(w, r) + copies * BLOCK, copies


@examples(60)
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
        by_hand = ByHand(state)
        for r in coming[:6].tolist():
            for w in range(3):
                for in_use in (False, True):
                    expected = by_hand.expected(w, r, in_use)
                    for guess in (0, 16, 160, int(load.prompt_tokens[r])):
                        assert cached_tokens(state.ledger, w, r, guess, in_use) == expected
            most = max(by_hand.expected(w, r) for w in range(3))
            assert least_cached_s(state.ledger, r, True) == least_prefill_s(state.ledger, r, most, True)


def test_what_a_worker_would_load_is_what_its_host_memory_has_behind_what_it_caches():
    seen = Counter()

    @examples(60)
    @given(st.integers(0, 2**40), st.sampled_from([90, 400]))
    @example(14109, 90)  # blocks stay in host memory behind one that was evicted
    @example(257, 90)
    @example(270, 90)
    @example(30, 400)  # copies are on the way, as in the next
    @example(248, 400)
    def compare(seed, room):
        rng = np.random.default_rng(seed)
        load = random_load(rng, 90, 4, 60.0)
        profile = profile_of(tokens=1600, host=host_of(room, float(rng.choice([1e-5, 1e-3]))))
        state = prepare(load, [WorkerSpec(profile)] * 3, RELAXED, "spread")
        led = state.ledger
        for until_s in (0.2, 0.5, 0.9, 1.6):
            advance(led, state.engines, state.cluster, state.rules, until_s)
            view_all(led, state.engines, until_s)
            by_hand = ByHand(state)
            for r in np.flatnonzero((led.requests["phase"] == HELD) & (led.requests["worker"] == NONE))[:12]:
                for w in range(3):
                    tokens, copies = by_hand.counted(w, r)
                    assert known_loads(led, w, r) == copies
                    assert known_cached(led, w, r, 0) == tokens
                    seen["loads"] += copies > 0
                    seen["both"] += 0 < copies < tokens // BLOCK
                    seen["on the way"] += int(state.engines.workers["loading"][w]) > 0

    compare()
    assert min(seen.values()) > 30, seen
    assert len(seen) == 3


def test_what_would_be_loaded_ends_at_the_first_gap_whatever_host_memory_keeps():
    seen = Counter()

    @examples(60)
    @given(st.integers(0, 2**40), st.booleans())
    def compare(seed, are_kept):
        rng = np.random.default_rng(seed)
        load = of_prefixes(np.zeros(6), [(n % 2, int(rng.integers(1, 40))) for n in range(6)])
        state = prepare(load, [WorkerSpec(profile_of(host=host_of(200)))] * 2, RELAXED, "spread")
        led = state.ledger
        led.orders.are_kept[0] = are_kept
        for _ in range(15):
            w, r = int(rng.integers(2)), int(rng.integers(6))
            stored, removed = (np.unique(rng.choice(load.prefixes.ids, n)) for n in (25, 6))
            learn(led.host.chunks, w, stored, removed)
            if rng.random() < 0.3:
                forget(led.caches, w, 2500)
                learn(led.caches, w, load.prefixes.of(r)[: rng.integers(40)], np.zeros(0, np.int64))
            led.orders.changes[0] += 1
            by_hand = ByHand(state)
            for w, r in np.ndindex(2, 6):
                copies, cached = by_hand.loads(w, r), by_hand.expected(w, r)
                assert known_loads(led, w, r) == copies
                assert known_cached(led, w, r, 0) == cached + copies * BLOCK
                behind = load.prefixes.of(r)[cached // BLOCK + copies :].tolist()
                seen["gaps"] += bool(copies) and not by_hand.in_host(w).isdisjoint(behind)
                seen["both"] += 0 < copies * BLOCK < cached

    compare()
    assert seen["gaps"] > 1000, seen
    assert seen["both"] > 100, seen


@examples(40)
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


@pytest.mark.parametrize("host", [None, host_of(400, 2e-3)])
@pytest.mark.parametrize("policy", [*BY_CACHE, Policy.LEAST_PREFILL, Policy.JSQ])
def test_every_sum_holds_at_every_instant_where_prefixes_are_shared(policy, host):
    rng = np.random.default_rng(5)
    load = random_load(rng, 200, 4, 120.0)
    load = replace(load, priority=(rng.random(200) < 0.2).astype(np.int64))
    profile = profile_of(tokens=3200 if host is None else 1600, host=host)
    workers = [WorkerSpec(profile, fails_s=((0.7, 1.0),) if w == 1 else ()) for w in range(3)]
    state = prepare(load, workers, RELAXED, policy)
    for until_s in np.arange(0.05, 4.0, 0.05):
        advance(state.ledger, state.engines, state.cluster, state.rules, float(until_s))
        check(state, float(until_s))
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    assert state.outcome().complete
    assert host is None or state.outcome().host_hit_rate > 0.01


def work_by_hand(state, w: int, r: int, counted: tuple[int, int], now_s: float) -> float:
    """Seconds until worker `w` would have prefilled a request, if no other came after it."""
    led = state.ledger
    worker, k = led.workers[w], led.coefficients[led.workers["variant"][w]]
    profile = state.profiles[0]
    tokens, (cached, copies) = int(led.requests["prompt"][r]), counted
    queued, ahead = 0, 0
    for other in not_prefilled_at(state, w):
        row = led.requests[other]
        queued += int(row["prompt"] + row["key"] - row["cached"])
        if row["phase"] == QUEUED and copies:
            ahead += int(led.host.loads[other])
        if row["phase"] == PREFILLING:
            job = state.engines.requests[other]
            queued -= int(job["computed"] + job["chunk"] - row["cached"])
    work = queued + tokens - cached
    steps = np.ceil(work / max(k[MAX_BATCHED] - worker["decoding"], 1))
    step_s = profile.step.base_s + profile.step.per_sequence_s * worker["decoding"]
    step_s += profile.step.per_prefill_step_s + profile.step.per_context_token_s * worker["context"]
    step_s += profile.step.per_prefill_sequence_s * worker["decoding"]
    work_s = steps * step_s + profile.step.per_prefill_token_s * work
    work_s += profile.step.per_prefill_sum_sq_s * (tokens**2 - cached**2)
    if copies:
        work_s += (ahead + copies) * COPY_S + max(led.host.links["free_s"][w] - now_s, 0.0)
    return float(work_s + (max(worker["boundary_s"] - now_s, 0.0) if worker["queued"] else 0.0))


@examples(90)
@given(st.integers(0, 2**40), st.sampled_from([None, host_of(200), host_of(2000)]))
def test_spread_takes_the_worker_with_least_added_work_among_those_that_may(seed, host):
    rng = np.random.default_rng(seed)
    load = random_load(rng, 90, 3, 60.0)
    profile = profile_of(tokens=6000 if host is None else 2500, host=host)
    state = prepare(load, [WorkerSpec(profile)] * 4, Slo(0.5, 0.05), "spread")
    led = state.ledger
    now_s = float(rng.uniform(0.2, 1.2))
    advance(led, state.engines, state.cluster, state.rules, now_s)
    view_all(led, state.engines, now_s)
    by_hand = ByHand(state)
    for r in range(int(np.searchsorted(load.arrival_s, now_s, "right")), len(load)):
        led.requests["arrival_s"][r] = now_s
        chosen = int(assign(led, POLICY_CODE[Policy.SPREAD], KNOBS, r, now_s, False, ANY_PHASE, np.zeros(2)))
        counted = [by_hand.counted(w, r) for w in range(4)]
        cached = [tokens for tokens, _ in counted]
        may = [w for w in range(4) if fits(led, KNOBS, w, r, cached[w], now_s, False)]
        work_s = [work_by_hand(state, w, r, counted[w], now_s) for w in range(4)]
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


def with_text_in_host_memory(host: HostKv | None, workers: int = 2):
    """Worker 0's cache is full of another text than request 3's, which has gone to its host memory."""
    load = of_prefixes([0.0, 1.0, 5.0, 20.0, 30.0], [(0, 100), (1, 1), (2, 147), (0, 100), (3, 20)])
    profile = profile_of(tokens=150 * BLOCK, host=host)
    state = prepare(load, [WorkerSpec(profile)] * workers, RELAXED, "round-robin")
    advance(state.ledger, state.engines, state.cluster, state.rules, 10.0)
    view_all(state.ledger, state.engines, 10.0)
    return state


def test_a_worker_that_has_the_prefix_in_host_memory_is_chosen_although_anothers_cache_is_empty():
    for host, chosen in ((host_of(500), 0), (host_of(500, copy_s=0.05), 1), (None, 1)):
        state = with_text_in_host_memory(host)
        empty = state.ledger.caches.workers["empty"]
        assert empty[0] < 10 < empty[1]
        assert ByHand(state).expected(0, 3) == 0
        assert known_cached(state.ledger, 0, 3, 0) == (0 if host is None else 1600)
        assert spread_takes(state, 3, 10.0) == chosen


def test_a_ttft_that_only_loading_meets_is_met_and_told_beforehand():
    state = with_text_in_host_memory(host_of(500))
    led, k = state.ledger, state.ledger.coefficients[0]
    loaded_s = 100 * COPY_S + prefill_lasts_s(k, 40, 1640, 1600, 0, 0)
    computed_s = prefill_lasts_s(k, 1640, 1640, 0, 0, 0)
    assert computed_s > 3 * loaded_s
    led.requests["arrival_s"][3], led.requests["ttft_s"][3] = 10.0, (computed_s + loaded_s) / 2
    assert prefilled_s(led, 0, 3, 1600, 10.0, prefill_lasts_s(k, 40, 1640, 1600, 0, 0)) == 10.0 + loaded_s
    assert fits(led, KNOBS, 0, 3, 1600, 10.0, False)
    assert not fits(led, KNOBS, 1, 3, 0, 10.0, False)
    assert not hopeless(led, 3, 10.0, False)
    led.host.links["free_s"][0] = 10.0 + computed_s  # others load until then
    assert not fits(led, KNOBS, 0, 3, 1600, 10.0, False)
    led.host.links["free_s"][0] = 0.0
    assert spread_takes(state, 3, 10.0) == 0
    slow = with_text_in_host_memory(host_of(500, copy_s=0.01))
    slow.ledger.requests["arrival_s"][3], slow.ledger.requests["ttft_s"][3] = (
        10.0,
        (computed_s + loaded_s) / 2,
    )
    assert not fits(slow.ledger, KNOBS, 0, 3, 1600, 10.0, False)
    assert hopeless(slow.ledger, 3, 10.0, False)
    state = with_text_in_host_memory(host_of(500), workers=1)
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    assert state.outcome().loaded_tokens[3] == 1600
    assert state.outcome().ttft_s[3] == pytest.approx(loaded_s)


def test_a_request_that_loads_counts_with_its_prompt_its_answer_and_its_target():
    state = with_text_in_host_memory(host_of(500, copy_s=0.01), workers=1)
    led = state.ledger
    advance(led, state.engines, state.cluster, state.rules, 20.5)
    view_all(led, state.engines, 20.5)
    assert led.workers["queued"][0] == 1
    assert led.workers["queued_tokens"][0] == 40
    assert led.host.links["free_s"][0] > 20.6
    led.requests["predicted"][3], led.requests["predicted"][4] = 77, 5
    led.requests["tpot_s"][3] = 0.09
    assert demand(led, 0, 4) == (1640 + 360, 77 + 5, 0.09)
    assert kv_peak(led, 0, NONE, np.inf) == 1640 + 77


def test_several_that_come_for_a_text_in_host_memory_load_it_once():
    load = of_prefixes([0.0, 1.0, 5.0, 20.0, 20.0, 20.0], [(0, 100), (1, 1), (2, 147), *[(0, 100)] * 3])
    state = prepare(load, [WorkerSpec(profile_of(tokens=150 * BLOCK, host=host_of(500)))], RELAXED, "spread")
    advance(state.ledger, state.engines, state.cluster, state.rules, 20.0)
    assert [int(state.ledger.host.loads[r]) for r in (3, 4, 5)] in ([100, 0, 0], [0, 0, 0])
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    assert sorted(state.outcome().loaded_tokens[3:].tolist()) == [0, 0, 1600]


def test_sessions_that_caches_have_no_room_for_return_to_the_host_memory_that_has_them():
    load = of_prefixes(np.arange(120) * 1.0, [(n % 24, 100) for n in range(120)], own_tokens=20)
    profile = profile_of(tokens=350 * BLOCK, host=host_of(2000))
    outcome = simulate(load, [WorkerSpec(profile)] * 4, RELAXED, "spread")
    assert (outcome.cached_tokens[24:] == 1600).all()
    assert (outcome.loaded_tokens[24:] > 0).mean() > 0.5
    assert set(shares(outcome).values()) == {30}


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
    k = coefficient_row(profile_of())
    whole = prefill_lasts_s(k, 100, 1000, 900, 0, 0)
    assert whole == pytest.approx(0.005 + 2e-5 * 100 + 1e-9 * (1000**2 - 900**2))
