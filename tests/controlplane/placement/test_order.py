"""Placement in the order of load: the same worker as a look at all of them finds, with a look at few."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from full_scan import scan
from hypothesis import given, settings
from hypothesis import strategies as st
from made_ledgers import NOW_S, ROLES, STATUSES, ledger_of, requests, workers
from made_profiles import made_profile

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.ledger import ANY_PHASE, DECODE_ONLY, NONE, PREFILL_ONLY, copied
from controlplane.placement.lengths import LengthTable
from controlplane.placement.order import FEW, first, new_trees, number_of, set_up, write
from controlplane.placement.policies import POLICY_CODE, PlacementSettings, Policy, assign, has_order
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import COLUMNS, RunState, WorkerSpec, prepare, simulate

KNOBS = PlacementSettings().knobs()
BY_LOAD = (Policy.SPREAD, Policy.JSQ, Policy.LEAST_KV)
CHUNKED, SPLIT, PREFILL_FIRST = EngineMode.CHUNKED, EngineMode.SPLIT, EngineMode.PREFILL_FIRST
SLOS = (Slo(0.6, 0.03), Slo(8.0, 0.2))


@given(
    st.lists(workers(roles=ROLES, statuses=STATUSES), min_size=1, max_size=7),
    st.integers(1, 3),
    requests(decoding=False),
    st.sampled_from((ANY_PHASE, PREFILL_ONLY, DECODE_ONLY)),
    st.booleans(),
    st.sampled_from(BY_LOAD),
    st.sampled_from((0.05, 0.4, 5.0)),
)
def test_the_choice_is_that_of_a_look_at_every_worker(fleet, times, asked, pool, late, policy, ttft_s):
    of_each = (FEW // len(fleet) + 1) * times  # so that there are many, with equals among them
    led, r = ledger_of(fleet * of_each, asked, NOW_S - 0.01, ttft_s)
    assert has_order(led, POLICY_CODE[policy], KNOBS)
    code = POLICY_CODE[policy]
    expected, _ = scan(copied(led), code, KNOBS, r, NOW_S, late, pool)
    assert assign(led, code, KNOBS, r, NOW_S, late, pool, np.zeros(2)) == expected


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), _numbers(n))))
def test_a_tree_tells_the_lowest_worker_with_the_least_number(drawn):
    n, writes = drawn
    trees, numbers = new_trees(2, n), [inf] * n
    for w, number in writes:
        write(trees, 1, w, number)
        numbers[w] = number
        least = min(numbers)
        if least < inf:
            assert first(trees, 1) == numbers.index(least)
        assert [number_of(trees, 1, v) for v in range(n)] == numbers
    assert (trees[0] == inf).all()
    again = trees.copy()
    set_up(again, 1)
    assert np.array_equal(again, trees)


def _numbers(n: int) -> st.SearchStrategy[list[tuple[int, float]]]:
    return st.lists(st.tuples(st.integers(0, n - 1), st.sampled_from((0.0, 1.0, 2.0, inf))), max_size=60)


def kind(mode: EngineMode, speed: float = 1.0, kv_tokens: int = 12_000) -> Profile:
    return made_profile(
        StepModel(0.0187 * speed, 9e-5, 7e-5 * speed, 5e-7),
        KvModel(kv_tokens, 16),
        EngineLimits(mode=mode, max_batched_tokens=2048, max_seqs=48),
        PrefillModel(0.0115 * speed, 9e-5 * speed),
    )


def fleet(mode: EngineMode, count: int) -> list[WorkerSpec]:
    """Two kinds, some of which come late, fail and are drained."""
    if mode == SPLIT:
        prefill = [WorkerSpec(kind(mode), role="prefill")] * (count // 3 + 1)
        return [*prefill, WorkerSpec(kind(mode), role="decode", fails_s=((3.0, 4.0),))] + [
            WorkerSpec(kind(mode, 0.7), role="decode")
        ] * (count // 2)
    alike = [WorkerSpec(kind(mode)), WorkerSpec(kind(mode, 0.6, 6000))] * (count // 2)
    return [
        *alike,
        WorkerSpec(kind(mode), fails_s=((2.0, 5.0),)),
        WorkerSpec(kind(mode, 0.6, 6000), ready_s=3.0),
        WorkerSpec(kind(mode), drain_s=4.0),
    ]


def traffic(rate_rps: float, count: int, seed: int) -> Workload:
    """Two classes and priorities; some requests arrive at the same time."""
    rng = np.random.default_rng(seed)
    return Workload(
        np.round(np.cumsum(rng.exponential(1 / rate_rps, count)), 2),
        rng.integers(1, 400, count),
        rng.integers(1, 200, count),
        priority=(rng.random(count) < 0.1).astype(np.int64),
        slo_class=(rng.random(count) < 0.3).astype(np.int64),
        slo_classes=("chat", "batch"),
    )


def run_of(
    load: Workload, workers: list[WorkerSpec], policy: Policy, slos: tuple[Slo, ...] = SLOS
) -> RunState:
    lengths = LengthTable.from_history(load.prompt_tokens, load.output_tokens)
    return prepare(load, workers, slos, policy, predictor=lengths)


@settings(max_examples=30)
@given(
    mode=st.sampled_from((CHUNKED, SPLIT, PREFILL_FIRST)),
    policy=st.sampled_from(BY_LOAD),
    count=st.integers(10, 18),
    each_rps=st.sampled_from((0.5, 2.0, 6.0)),
    seed=st.integers(0, 99),
    loose_tpot_s=st.sampled_from((0.2, 0.03)),  # of one target, too: what yields has its own order
)
def test_orders_that_are_kept_choose_as_those_made_anew_for_each_request(
    mode, policy, count, each_rps, seed, loose_tpot_s
):
    workers, slos = fleet(mode, count), (SLOS[0], Slo(8.0, loose_tpot_s))
    load = traffic(each_rps * len(workers), 400, seed)
    kept, anew = run_of(load, workers, policy, slos), run_of(load, workers, policy, slos)
    advance(kept.ledger, kept.engines, kept.cluster, kept.rules, inf)
    # Nothing is known of what happened between two pieces, so that the first arrival of each finds no order.
    for until_s in np.unique(load.arrival_s).tolist():
        advance(anew.ledger, anew.engines, anew.cluster, anew.rules, np.nextafter(until_s, -inf))
    advance(anew.ledger, anew.engines, anew.cluster, anew.rules, inf)
    one, other = kept.outcome(), anew.outcome()
    for name in COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name


def test_what_is_written_of_a_worker_is_never_more_than_its_load():
    load = traffic(60.0, 1500, 3)
    run = run_of(load, fleet(CHUNKED, 20), Policy.SPREAD)
    led, spread = run.ledger, POLICY_CODE[Policy.SPREAD]
    tight = int(np.flatnonzero(load.slo_class == 0)[0])
    seen = 0
    for until_s in np.arange(0.5, 12.0, 0.37).tolist():
        advance(led, run.engines, run.cluster, run.rules, until_s)
        for t in range(int(led.orders.made[0])):
            of = led.orders.of[t]
            if not of["is_made"]:
                continue
            fresh = copied(led)
            assign(fresh, spread, KNOBS, int(of["request"]), until_s, False, ANY_PHASE, np.zeros(2))
            for w in range(len(led.workers)):
                now = number_of(fresh.orders.trees, 0, w)
                assert number_of(led.orders.trees, t, w) <= now
                seen += now < inf
    assert seen > 100
    assert tight in led.orders.of["request"]


def test_a_request_looks_at_few_workers_of_a_large_fleet():
    workers = [WorkerSpec(kind(CHUNKED))] * 256
    load = replace(traffic(512.0, 2048, 1), slo_class=np.zeros(2048, np.int64), slo_classes=("chat",))
    run = run_of(load, workers, Policy.SPREAD)
    led, last_s = run.ledger, float(load.arrival_s[load.arrival_s < 2.5][-1])
    advance(led, run.engines, run.cluster, run.rules, last_s)
    in_runs = led.runs["steps"] > 0
    # One that was looked at stands in the step that is in progress; the others where they were last seen.
    behind = in_runs & (led.workers["boundary_s"] <= last_s)
    assert in_runs.sum() > 128
    assert behind.sum() > in_runs.sum() / 2


@pytest.mark.parametrize("policy", BY_LOAD)
def test_with_no_worker_left_nobody_is_chosen(policy):
    load = traffic(5.0, 20, 0)
    seen = simulate(load, [WorkerSpec(kind(CHUNKED), drain_s=0.0)] * (FEW + 1), SLOS, policy)
    assert np.isnan(seen.finish_s).all()
    assert (seen.worker == NONE).all()
