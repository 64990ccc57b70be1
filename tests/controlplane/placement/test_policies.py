"""The choice of each policy, on made-up fleets."""

from collections import Counter
from dataclasses import fields
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_ledgers import NOW_S, ROLES, STATUSES, At, Held, ledger_of, requests, workers
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.assign import assign, last_chance
from controlplane.placement.constraints import fits, harm
from controlplane.placement.ledger import ANY_PHASE, DECODE_ONLY, NONE, PREFILL_ONLY, SERVING
from controlplane.placement.outlook import spare_s
from controlplane.placement.policies import POLICY_CODE, PlacementSettings, Policy
from controlplane.types import EngineMode

KNOBS = PlacementSettings().row()
TTFT_S = 0.4
HOLDING = (Policy.SPREAD, Policy.BEST_FIT, Policy.SLACK_FIT)  # the others never hold what somebody could take
fleets = st.lists(workers(roles=ROLES, statuses=STATUSES), min_size=1, max_size=6)
whole_fleets = st.lists(workers(statuses=STATUSES), min_size=1, max_size=6)
pools = st.sampled_from([ANY_PHASE, PREFILL_ONLY, DECODE_ONLY])
draws = st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2)


def choice(led, policy: Policy, r: int, pool: int = ANY_PHASE, draw=(0.0, 0.0), late: bool = False) -> int:
    return int(assign(led, POLICY_CODE[policy], KNOBS, r, NOW_S, late, pool, np.array(draw)))


def in_pool(fleet: list[At], pool: int) -> list[int]:
    """Serving workers that take whole requests or prefills, or, asked for decoding, the decode pool."""
    return [
        w
        for w, at in enumerate(fleet)
        if at.status == SERVING and (at.role == DECODE_ONLY) == (pool == DECODE_ONLY)
    ]


def fullness(at: At, asked: Held) -> float:
    """Algorithm 1's capacity_norm from the facts: batch and context, each a share of its own limit."""
    profile = at.profile
    limit = min(
        max(profile.step.context_limit(1, asked.tpot_s), 1.0),
        profile.kv.capacity_tokens // profile.kv.block_tokens * profile.kv.block_tokens,
    )
    context = sum(h.prompt + h.tokens for h in at.held)
    return (len(at.held) / profile.engine.max_seqs) ** 2 + (context / limit) ** 2


@given(fleets, requests(decoding=False), pools, draws, st.sampled_from([p for p in Policy if p != "exact"]))
def test_no_policy_chooses_a_worker_that_is_not_serving_in_the_pool(fleet, asked, pool, draw, policy):
    led, r = ledger_of(fleet, asked, NOW_S - 0.01, TTFT_S)
    w = choice(led, policy, r, pool, draw)
    if policy in HOLDING:
        assert w == NONE or w in in_pool(fleet, pool)
    else:  # the baselines never hold what somebody could take
        assert w in (in_pool(fleet, pool) or [NONE])


def test_a_worker_with_three_times_its_memory_on_record_is_taken_where_there_is_no_other():
    full = At(
        made_profile(step=StepModel(0.01, 1e-5, 1e-4, 1e-8), kv=KvModel(80)), [Held(300, 1, 1, True, NOW_S)]
    )
    led, r = ledger_of([full], Held(1, 1), NOW_S - 0.01, TTFT_S)
    assert {choice(led, policy, r) for policy in Policy if policy not in (*HOLDING, "exact")} == {0}


@pytest.mark.parametrize("policy", [Policy.SPREAD, Policy.BEST_FIT])
def test_work_that_yields_takes_the_slowest_kind_that_has_room(policy):
    fast, slow = (
        made_profile(StepModel(0.01 * by, 1e-4 * by, 1e-4 * by, 1e-7 * by), KvModel(100_000)) for by in (1, 2)
    )
    there = Held(400, 40, tokens=5, decoding=True, first_s=NOW_S - 0.2, tpot_s=0.1)
    for full, expected in ((1, 1), (300, 0)):  # the slow one has room for the former alone
        led, r = ledger_of([At(fast), At(slow, [there] * full)], Held(300, 40, tpot_s=0.1), NOW_S, 20.0)
        assert choice(led, policy, r) == (0 if policy == Policy.SPREAD else expected)
        led.requests["yields_tpot_s"][r], led.requests["yields_most_tpot_s"][r] = 0.03, 0.03
        assert choice(led, policy, r) == expected


@given(fleets, requests(decoding=False), pools, st.booleans())
def test_best_fit_takes_the_fullest_worker_that_may(fleet, asked, pool, late):
    led, r = ledger_of(fleet, asked, NOW_S - 0.01, TTFT_S)
    may = [w for w in in_pool(fleet, pool) if fits(led, KNOBS, w, r, 0, NOW_S, late)]
    w = choice(led, Policy.BEST_FIT, r, pool, late=late)
    if not may:
        assert w == NONE
    else:
        assert w in may
        fullest = max(fullness(fleet[v], asked) for v in may)
        assert fullness(fleet[w], asked) == pytest.approx(fullest, rel=1e-9)


@given(whole_fleets, requests(decoding=False), st.booleans())
def test_slack_fit_takes_the_worker_that_may_and_has_least_to_spare(fleet, asked, late):
    led, r = ledger_of(fleet, asked, NOW_S - 0.01, TTFT_S)
    may = [w for w in in_pool(fleet, ANY_PHASE) if fits(led, KNOBS, w, r, 0, NOW_S, late)]
    w = choice(led, Policy.SLACK_FIT, r, late=late)
    if not may:
        assert w == NONE
    else:
        assert w in may
        assert spare_s(led, w, r, 0, NOW_S) == min(spare_s(led, v, r, 0, NOW_S) for v in may)


@given(fleets, requests(decoding=False))
def test_the_baselines_take_the_least_of_what_they_count(fleet, asked):
    led, r = ledger_of(fleet, asked, NOW_S - 0.01, TTFT_S)
    pool = in_pool(fleet, ANY_PHASE)
    if not pool:
        return

    def capacity(at: At) -> int:
        return at.profile.kv.capacity_tokens // at.profile.kv.block_tokens * at.profile.kv.block_tokens

    def context(at: At) -> int:
        return sum(h.prompt + h.tokens for h in at.held)

    counted = {
        Policy.JSQ: lambda at: len(at.held),
        Policy.LEAST_KV: lambda at: context(at) / capacity(at),
        Policy.FREENESS: lambda at: (context(at) - capacity(at)) / len(at.held) if at.held else -inf,
    }
    for policy, count in counted.items():
        w = choice(led, policy, r)
        assert w in pool
        assert count(fleet[w]) == min(count(fleet[v]) for v in pool)


@given(fleets, requests(decoding=False), st.floats(0, 3))
def test_a_last_chance_is_taken_where_it_harms_least_and_within_the_tolerance(fleet, asked, tolerance):
    led, r = ledger_of(fleet, asked, NOW_S - 0.01, TTFT_S)
    knobs = PlacementSettings(tolerance=tolerance).row()
    harms = {w: harm(led, knobs, w, r, 0, NOW_S, False, inf) for w in in_pool(fleet, ANY_PHASE)}
    w = last_chance(led, knobs, r, NOW_S, ANY_PHASE)
    if w == NONE:
        assert all(h >= tolerance for h in harms.values())
    else:
        assert harms[w] == min(harms.values()) < tolerance


PROFILE = made_profile(
    StepModel(0.02, 1e-4, 1e-4, 1e-6),
    KvModel(60_000),
    EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=4096),
    PrefillModel(0.01, 1e-4),
)


def idle_fleet(count: int) -> list[At]:
    return [At(PROFILE) for _ in range(count)]


def test_round_robin_gives_everyone_the_same_share():
    fleet = idle_fleet(5)
    led, _ = ledger_of(fleet, Held(1, 1), NOW_S, TTFT_S)
    assert Counter(choice(led, Policy.ROUND_ROBIN, r) for r in range(20)) == dict.fromkeys(range(5), 4)


def test_power_of_two_draws_every_pair_equally_often():
    count = 5
    fleet = [At(PROFILE, [Held(1, 1)] * w) for w in range(count)]  # the lower number is less loaded
    led, r = ledger_of(fleet, Held(1, 1), NOW_S, TTFT_S)
    grid = [((i + 0.5) / count, (j + 0.5) / (count - 1)) for i in range(count) for j in range(count - 1)]
    seen = Counter(choice(led, Policy.P2C, r, draw=draw) for draw in grid)
    # Of the ordered pairs of different workers, 2·(count - 1 - w) have w as the lower number.
    assert seen == {w: 2 * (count - 1 - w) for w in range(count - 1)}


@pytest.mark.parametrize("draw", [(0.0, 0.0), (0.99, 0.99)])
def test_power_of_two_breaks_ties_by_tokens_held(draw):
    fleet = [At(PROFILE, [Held(500, 1)]), At(PROFILE, [Held(100, 1)])]
    led, r = ledger_of(fleet, Held(1, 1), NOW_S, TTFT_S)
    assert choice(led, Policy.P2C, r, draw=draw) == 1


def test_random_placement_draws_each_worker_equally_often():
    fleet = [At(PROFILE, [Held(1, 1)] * w) for w in range(4)]
    led, r = ledger_of(fleet, Held(1, 1), NOW_S, TTFT_S)
    draws = [((i + 0.5) / 8, 0.0) for i in range(8)]
    assert Counter(choice(led, Policy.RANDOM, r, draw=d) for d in draws) == dict.fromkeys(range(4), 2)


def test_least_request_takes_the_less_loaded_of_two_drawn_alike_and_the_first_at_a_tie():
    count = 4
    fleet = [At(PROFILE, [Held(1, 1)] * (w // 2)) for w in range(count)]  # two pairs of equals
    led, r = ledger_of(fleet, Held(1, 1), NOW_S, TTFT_S)
    grid = [(i, j) for i in range(count) for j in range(count)]
    for i, j in grid:
        drawn = (i + 0.5) / count, (j + 0.5) / count
        assert choice(led, Policy.LEAST_REQUEST, r, draw=drawn) == (j if j // 2 < i // 2 else i)


def test_power_of_two_gives_equal_workers_equal_shares():
    led, r = ledger_of(idle_fleet(4), Held(1, 1), NOW_S, TTFT_S)
    grid = [((i + 0.5) / 4, (j + 0.5) / 3) for i in range(4) for j in range(3)]
    assert Counter(choice(led, Policy.P2C, r, draw=draw) for draw in grid) == dict.fromkeys(range(4), 3)


def test_power_of_two_with_one_worker_takes_it_and_with_none_holds():
    one, r = ledger_of(idle_fleet(1), Held(1, 1), NOW_S, TTFT_S)
    assert choice(one, Policy.P2C, r, draw=(0.99, 0.99)) == 0
    one.workers["status"] = 0
    assert choice(one, Policy.P2C, r, draw=(0.99, 0.99)) == NONE
    assert choice(one, Policy.ROUND_ROBIN, r) == NONE
    assert choice(one, Policy.RANDOM, r, draw=(0.99, 0.99)) == NONE
    assert choice(one, Policy.LEAST_REQUEST, r, draw=(0.99, 0.99)) == NONE


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("theta", -0.1),
        ("theta", 1.1),
        ("theta", float("nan")),
        ("gamma", 0.0),
        ("gamma", 1.5),
        ("tolerance", -1.0),
        ("tolerance", float("nan")),
    ],
)
def test_settings_out_of_range_are_refused_by_name(knob, value):
    with pytest.raises(BadInput, match=f"^{knob}: "):
        PlacementSettings(**{knob: value})


def test_every_setting_is_a_knob_that_compiled_code_sees():
    usual = PlacementSettings().row()
    for field in fields(PlacementSettings):
        if field.name == "queue":
            continue  # read by the queue itself
        usually = field.default
        value = not usually if isinstance(usually, bool) else 1 if usually is None else usually / 2 or 0.5
        assert (PlacementSettings(**{field.name: value}).row() != usual).sum() == 1, field.name
