"""Placement in the order of load: the same worker as a look at all of them finds, with a look at few."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from by_day import examples
from full_scan import scan
from hypothesis import given
from hypothesis import strategies as st
from made_ledgers import NOW_S, ROLES, STATUSES, At, Held, ledger_of, requests, workers
from made_profiles import made_profile

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.assign import assign
from controlplane.placement.batch import enqueue
from controlplane.placement.constraints import USE_B, USE_C, USE_E, closed_to, fits
from controlplane.placement.ledger import ANY_PHASE, DECODE_ONLY, NONE, PREFILL_ONLY, copied
from controlplane.placement.lengths import LengthTable
from controlplane.placement.order import (
    FEW,
    LEVELS,
    MANY,
    OPEN,
    ROWS,
    begin_keeping,
    begin_order,
    close,
    enter,
    first,
    has_more,
    level_of,
    new_orders,
    new_trees,
    next_in_order,
    number_of,
    open_those,
    renumber,
    set_up,
    write,
)
from controlplane.placement.policies import POLICY_CODE, PlacementSettings, Policy
from controlplane.placement.ranking import has_order
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import COLUMNS, RunState, WorkerSpec, prepare, simulate

KNOBS = PlacementSettings().row()
ONLY_D = KNOBS.copy()
ONLY_D[[USE_B, USE_C, USE_E]] = 0.0
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


@given(st.integers(9, 24).flatmap(lambda n: st.tuples(st.just(n), _moves(n))))
def test_a_closed_worker_is_out_of_the_order_of_what_it_is_closed_to(drawn):
    n, moves = drawn
    orders, loads, closed, t = new_orders(n), [inf] * n, {}, 1
    orders.made[0] = 2
    for w, load, level, longest, until_s, now_s, tokens in moves:
        if load is None:
            has_more(orders, w)
            closed.pop(w, None)
        elif load == loads[w] < inf:
            close(orders, t, w, load, level, longest, until_s)
            closed[w] = (level, longest, until_s)
        elif w in closed and load > loads[w]:
            renumber(orders, t, w, load)
            loads[w] = load
        else:
            enter(orders, t, w, load)
            loads[w] = load
            closed.pop(w, None)
        open_those(orders, t, tokens, now_s)
        closed = {v: of for v, of in closed.items() if of[2] > now_s and of[1] >= tokens}
        assert {v for v in range(n) if orders.level[t, v] != OPEN} == set(closed)
        asked = level_of(tokens)
        assert LEVELS[asked] <= tokens < (*LEVELS, inf)[asked + 1]
        least = min((x, v) for v, x in enumerate(loads) if v not in closed or closed[v][0] > asked)
        found = next_in_order(orders, t, asked)
        assert found == (least[1], least[0]) if least[0] < inf else found == (NONE, inf)
    assert (orders.trees[:ROWS] == inf).all()
    begin_order(orders, t)
    assert (orders.trees == inf).all()
    assert (orders.level == OPEN).all()


def _moves(n: int) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    loads = st.sampled_from((None, 0.0, 1.0, 1.0, 1.0, 2.0, inf))
    times, levels = st.sampled_from((1.0, 3.0, inf)), st.integers(0, OPEN - 1)
    tokens = st.sampled_from((1, 31, 32, 33, 63, 1024, 6143, 6144, 9000))
    one = st.tuples(
        st.integers(0, n - 2),
        loads,
        levels,
        st.sampled_from((40.0, inf)),
        times,
        st.sampled_from((0.5, 2.0)),
        tokens,
    )
    return st.lists(one, min_size=10, max_size=80)


@pytest.mark.parametrize(("mode", "budget"), [(PREFILL_FIRST, 2048), (CHUNKED, 2048), (CHUNKED, 128)])
def test_a_worker_refuses_every_prompt_that_it_is_closed_to_until_its_step_ends(mode, budget):
    rng, closed = np.random.default_rng(1), np.zeros(OPEN, int)
    for _ in range(500):
        profile = kind(mode, kv_tokens=10**6).with_engine(max_batched_tokens=budget)
        tpot_s = float(rng.choice([0.025, 0.04]))
        boundary_s, gains = NOW_S + float(rng.choice([-0.01, 0.01])), int(rng.integers(0, 2))
        held = [Held(int(rng.choice([1, 700, 2500])), 50)] * int(rng.integers(0, 3))
        for tokens in rng.integers(1, 40, rng.integers(1, 4)).tolist():
            saved_s = float(rng.choice([-0.04, 0.004, 0.02, 0.05, 0.3, 1.0])) * rng.random()
            first_s = max(boundary_s, NOW_S) - tpot_s * (tokens + gains - 1) + saved_s
            held.append(Held(100, 60, tokens, True, first_s, tpot_s))
        at = At(profile, held, boundary_s, gains)
        led, r = ledger_of([at], Held(int(np.exp(rng.uniform(0, 8.5))), 50), NOW_S, 1e9)
        level, longest = closed_to(led, ONLY_D, 0, r, NOW_S)
        if level == OPEN:
            continue
        closed[level] += 1
        assert LEVELS[level] <= led.requests[r]["prompt"] <= longest
        last = int(min(longest, 9000.0))
        for prompt in (
            LEVELS[level],
            max(LEVELS[level], last - budget + len(at.decoding) + 1),
            int(rng.integers(LEVELS[level], last + 1)),
            last,
        ):
            led.requests[r]["prompt"] = prompt
            for at_s in (NOW_S, max(NOW_S, boundary_s)):
                assert not fits(led, ONLY_D, 0, r, 0, at_s, True), (level, longest, prompt)
    assert (closed > 0).sum() > 3
    assert closed.sum() > 60


@pytest.mark.parametrize("mode", [PREFILL_FIRST, CHUNKED])
@pytest.mark.parametrize("seed", range(3))
def test_while_requests_are_placed_the_choice_stays_that_of_a_look_at_every_worker(mode, seed):
    rng, spread, count = np.random.default_rng(seed), POLICY_CODE[Policy.SPREAD], 400
    led = decoding_fleet(mode, MANY, count, rng)
    begin_keeping(led.orders)
    closed, placed, looks_again = 0, 0, 0
    for r in range(len(led.requests) - count, len(led.requests)):
        now_s = NOW_S + 0.0003 * (r - len(led.requests) + count)
        led.requests["arrival_s"][r] = now_s
        known = led.orders.level.copy()
        expected, _ = scan(copied(led), spread, KNOBS, r, now_s, False, ANY_PHASE)
        w = assign(led, spread, KNOBS, r, now_s, False, ANY_PHASE, np.zeros(2))
        assert w == expected
        closed += int((led.orders.level < known).sum())
        looks_again += int((led.orders.level > known).sum())
        if w != NONE and rng.random() < 0.5:
            placed += 1
            enqueue(led, w, r, False)
    assert closed > 100
    assert looks_again > 50
    assert placed > 100


def decoding_fleet(mode: EngineMode, count: int, coming: int, rng: np.random.Generator) -> Any:
    """Workers in runs of decode steps, and some in a step with prefill; the last rows are yet to arrive."""
    fleet = []
    for i in range(count):
        profile, held = kind(mode, 1.0 - 0.2 * (i % 2), 10**6), []
        for tokens in rng.integers(2, 60, rng.integers(1, 6)).tolist():
            saved_s = float(rng.choice([0.01, 0.04, 0.4])) * rng.random()
            held.append(
                Held(int(rng.integers(1, 400)), 200, tokens, True, NOW_S - 0.04 * tokens + saved_s, 0.04)
            )
        held += [Held(int(rng.integers(1, 400)), 50)] * int(rng.random() < 0.2)
        fleet.append(At(profile, held, NOW_S + 0.05 * rng.random()))
    first = sum(len(at.held) for at in fleet)
    led, _ = ledger_of(fleet, Held(1, 50), NOW_S, 5.0)
    led = led._replace(requests=np.concatenate([led.requests, np.repeat(led.requests[-1:], coming - 1)]))
    led.requests["prompt"][first:] = np.exp(rng.uniform(0.0, 8.0, coming)).astype(np.int64)
    led.requests["tpot_s"][first:] = 0.04
    for w, at in enumerate(fleet):
        if not at.waiting:
            run, step_s = led.runs[w], 0.02 + 0.002 * rng.random()
            run["start_s"], run["first_step_s"], run["growth_s"] = NOW_S - step_s * rng.random(), step_s, 1e-5
            run["steps"], run["start_step"] = 30, led.workers["step"][w]
            run["start_context"] = led.workers["context"][w]
            led.workers["boundary_s"][w] = run["start_s"] + step_s
    return led


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
    """Workers of two types; some come late, some fail, and some are drained."""
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


@examples(30)
@given(
    mode=st.sampled_from((CHUNKED, SPLIT, PREFILL_FIRST)),
    policy=st.sampled_from(BY_LOAD),
    count=st.sampled_from((10, 13, 18, MANY)),
    each_rps=st.sampled_from((0.5, 2.0, 6.0)),
    seed=st.integers(0, 99),
    loose_tpot_s=st.sampled_from((0.2, 0.03)),  # of one target, too: what yields has its own order
)
def test_orders_that_are_kept_choose_as_those_made_anew_for_each_request(
    mode, policy, count, each_rps, seed, loose_tpot_s
):
    workers, slos = fleet(mode, count), (SLOS[0], Slo(8.0, loose_tpot_s))
    load = traffic(each_rps * len(workers), 400 if count < MANY else 3000, seed)
    kept, anew = run_of(load, workers, policy, slos), run_of(load, workers, policy, slos)
    advance(kept.ledger, kept.engines, kept.cluster, kept.rules, inf)
    # Nothing is known of what happened between two pieces, so that the first arrival of each finds no order.
    for until_s in np.unique(load.arrival_s).tolist():
        advance(anew.ledger, anew.engines, anew.cluster, anew.rules, np.nextafter(until_s, -inf))
    advance(anew.ledger, anew.engines, anew.cluster, anew.rules, inf)
    one, other = kept.outcome(), anew.outcome()
    for name in COLUMNS:
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name


@pytest.mark.parametrize("mode", [PREFILL_FIRST, CHUNKED])
def test_what_is_written_of_a_worker_is_never_more_than_its_load(mode):
    load = traffic(600.0, 9000, 3)
    run = run_of(load, fleet(mode, MANY), Policy.SPREAD)
    led, spread = run.ledger, POLICY_CODE[Policy.SPREAD]
    tight = int(np.flatnonzero(load.slo_class == 0)[0])
    seen, closed = 0, 0
    for until_s in np.arange(0.5, 12.0, 0.37).tolist():
        advance(led, run.engines, run.cluster, run.rules, until_s)
        for t in range(int(led.orders.made[0])):
            of = led.orders.of[t]
            if not of["is_made"]:
                continue
            fresh = copied(led)
            assign(fresh, spread, KNOBS, int(of["request"]), until_s, False, ANY_PHASE, np.zeros(2))
            for w in range(len(led.workers)):
                now, row = number_of(fresh.orders.trees, OPEN, w), led.orders.level[t, w]
                assert number_of(led.orders.trees, t * ROWS + row, w) <= now
                seen += now < inf
                closed += row != OPEN
    assert seen > 100
    assert closed > 5
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
