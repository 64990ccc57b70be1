"""Groups of Appendix A: sizes, counts, and who gets which request."""

from __future__ import annotations

from collections import Counter
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput, Infeasible
from controlplane.placement.groups import (
    Turns,
    group_count,
    group_of,
    highest_rate_rps,
    next_group,
    split_workers,
    workers_per_group,
)
from controlplane.types import RequestId, WorkerId


def test_ten_percent_extra_needs_five_workers_a_group_as_in_the_paper():
    assert workers_per_group(0.1) == 5


@given(st.integers(1, 400))
def test_the_extra_share_is_kept_and_one_worker_less_would_break_it(percent):
    extra = min(percent / 400, 1.0)
    least = workers_per_group(extra)
    assert 1 / (2 * least) <= extra + 1e-9
    assert least == 1 or 1 / (2 * (least - 1)) > extra


@given(st.floats(0.001, 1.0))
def test_the_highest_rate_just_keeps_the_limit(limit_s):
    def latency_s(rate: float) -> float:
        return 1e-5 * rate * log2(max(rate, 2.0))

    rate = highest_rate_rps(latency_s, limit_s, 1e7)
    assert latency_s(rate) <= limit_s < latency_s(rate * 1.001)
    assert highest_rate_rps(latency_s, limit_s, rate / 2) == rate / 2


def test_a_limit_that_an_idle_scheduler_breaks_is_infeasible():
    with pytest.raises(Infeasible, match="when idle"):
        highest_rate_rps(lambda rate: 1.0 + rate, 0.5, 100.0)


@given(st.floats(0, 1e4), st.integers(1, 2000), st.floats(1, 1e3), st.sampled_from([0.05, 0.1, 0.2, 0.5]))
def test_the_group_count_is_the_fewest_that_keeps_both_conditions(rate, workers, limit, extra):
    def keeps(groups: int) -> bool:
        big_enough = groups == 1 or workers / groups >= 1 / (2 * extra) - 1e-6
        return rate / groups <= limit * (1 + 1e-9) and big_enough

    feasible = [g for g in range(1, workers + 1) if keeps(g)]
    if feasible:
        assert group_count(rate, workers, limit, extra) == feasible[0]
    else:
        with pytest.raises(Infeasible, match="groups"):
            group_count(rate, workers, limit, extra)


@given(st.integers(1, 50), st.integers(1, 50))
def test_every_worker_is_in_one_group_and_groups_are_level(workers, groups):
    names = [WorkerId(str(k)) for k in range(workers)]
    if groups > workers:
        with pytest.raises(BadInput, match="cannot make"):
            split_workers(names, groups)
        return
    parts = split_workers(names, groups)
    assert sorted(w for part in parts for w in part) == sorted(names)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


weights = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any)


@given(weights)
def test_turns_give_every_group_its_weight_in_each_cycle(weights):
    turns, cycle = Turns(tuple(weights)), sum(weights)
    for _ in range(3):
        seen: Counter[int] = Counter()
        for _ in range(cycle):
            turns, group = next_group(turns)
            seen[group] += 1
        assert [seen[g] for g in range(len(weights))] == weights
        assert turns == Turns(tuple(weights))


def test_turns_are_spread_within_a_cycle():
    turns, order = Turns((3, 1)), []
    for _ in range(4):
        turns, group = next_group(turns)
        order.append(group)
    assert order == [0, 0, 1, 0]


def test_a_hash_deals_in_proportion_and_the_same_everywhere():
    seen = Counter(group_of(RequestId(f"r{k}"), (3, 0, 1)) for k in range(8000))
    assert seen[1] == 0
    assert seen[0] / 8000 == pytest.approx(0.75, abs=0.02)
    assert group_of(RequestId("r1"), (3, 0, 1)) == group_of(RequestId("r1"), (3, 0, 1))


@given(st.integers(0, 500), weights, st.integers(0, 4))
def test_a_group_that_grows_only_takes_requests(k, weights, grown):
    grown %= len(weights)
    more = [w + (2 if g == grown else 0) for g, w in enumerate(weights)]
    before, after = (group_of(RequestId(f"r{k}"), w) for w in (weights, more))
    assert after in (before, grown)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: workers_per_group(0.0),
        lambda: workers_per_group(float("nan")),
        lambda: group_count(-1.0, 5, 1.0, 0.1),
        lambda: group_count(1.0, 5, 0.0, 0.1),
        lambda: Turns(()),
        lambda: Turns((0, 0)),
        lambda: group_of(RequestId("r"), (-1, 2)),
    ],
)
def test_unusable_input_is_refused(wrong):
    with pytest.raises(BadInput, match="groups"):
        wrong()
