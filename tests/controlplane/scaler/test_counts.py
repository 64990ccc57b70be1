"""The cheapest counts of several kinds of worker against trying all of them, spares, and the way there."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_kinds import ask, kind

from controlplane.scaler.counts import alone, bridged, choose, stepped
from controlplane.scaler.worker_types import MixingSettings, enough_stand, missing_share, most_missing, stands

some_kinds = st.lists(
    st.tuples(
        st.sampled_from([1.0, 1.5, 2.0, 3.0]),  # weight
        st.integers(0, 6),  # $/h
        st.integers(1, 2),  # GPUs
        st.integers(0, 1),  # low
        st.integers(0, 4),  # high, above low
        st.sampled_from([0.0, 0.0, 6.0]),  # reclaims
        st.integers(0, 3),  # there
    ),
    min_size=1,
    max_size=3,
)


def cost(asked, counts):
    """Dollars (GPUs) an hour, switching included, and the GPUs that break ties."""
    priced = all(k.usd_per_h is not None for k in asked.kinds)
    launch, drain = (s / asked.mixing.horizon_s for s in (asked.cold_start_s, asked.drain_s))
    total = gpus = 0.0
    for k in asked.kinds:
        n, was = counts.get(k.kind, 0), asked.there.get(k.kind, 0)
        paid = n + launch * max(n - was, 0) + drain * max(was - n, 0)
        total += paid * (k.usd_per_h if priced else k.gpus)
        gpus += n * k.gpus
    return total, gpus


def every(asked):
    """All counts that the limits allow, `least` apart."""
    names = [k.kind for k in asked.kinds]
    for counts in product(*(range(k.low, k.high + 1) for k in asked.kinds)):
        named = dict(zip(names, counts, strict=True))
        if asked.is_allowed(named):
            yield named


@settings(max_examples=150, deadline=None)
@given(
    some_kinds,
    st.booleans(),
    st.integers(0, 14),
    st.integers(0, 3),
    st.integers(3, 9),
    st.none() | st.integers(12, 30),
    st.sampled_from([(0.0, 0.0), (60.0, 30.0), (600.0, 120.0)]),
)
def test_the_counts_are_the_best_of_all(drawn, priced, units, least, most, budget, takes):
    kinds, there = [], {}
    for i, (_, usd, gpus, low, more, reclaims, was) in enumerate(drawn):
        price = float(usd) if priced else None
        kinds.append(kind(f"k{i}", price, gpus=gpus, low=low, high=low + more, reclaims_per_h=reclaims))
        there[f"k{i}"] = was
    mixing = MixingSettings(budget_usd_per_h=float(budget) if priced and budget is not None else None)
    if priced and budget is not None and sum(k.low * k.usd_per_h for k in kinds) > budget:
        return
    weights = [w for w, *_ in drawn]
    asked = ask(
        units, kinds, weights, there, mixing, least=least, most=most, cold_start_s=takes[0], drain_s=takes[1]
    )
    found = choose(asked)
    assert found in [{n: c for n, c in one.items() if c} for one in every(asked)]
    able = [one for one in every(asked) if asked.is_enough(one) and sum(one.values()) >= least]
    if able:
        assert asked.is_enough(found)
        assert sum(found.values()) >= least
        assert cost(asked, found)[0] == pytest.approx(min(cost(asked, one)[0] for one in able), abs=1e-3)
    else:
        assert asked.carries(found) == pytest.approx(max(map(asked.carries, every(asked))))


def test_of_equally_dear_mixes_the_one_that_is_there_stays():
    kinds = kind("a", 2.0), kind("b", 2.0)
    for there in ({"a": 3}, {"b": 3}, {"a": 1, "b": 2}):
        assert choose(ask(3, kinds, (1.0, 1.0), there, cold_start_s=60.0)) == there


def test_what_saves_less_than_the_change_costs_is_not_done():
    kinds = kind("a", 2.0), kind("b", 1.9)
    assert choose(ask(3, kinds, (1.0, 1.0), {"a": 3}, cold_start_s=60.0, drain_s=60.0)) == {"a": 3}
    assert choose(ask(3, kinds, (1.0, 1.0), {"a": 3})) == {"b": 3}
    longer = MixingSettings(horizon_s=1e5)
    assert choose(ask(3, kinds, (1.0, 1.0), {"a": 3}, longer, cold_start_s=60.0, drain_s=60.0)) == {"b": 3}


def test_no_demand_keeps_what_must_be_kept():
    kinds = kind("a", low=1), kind("b")
    assert choose(ask(0, kinds, (1.0, 2.0), {"a": 2, "b": 2})) == {"a": 1}
    assert choose(ask(0, kinds[1:], (1.0,), {"b": 2})) == {}


def test_what_is_too_much_for_the_limits_gets_all_they_allow():
    kinds = kind("a", 1.0, high=2), kind("b", 3.0, high=1)
    asked = ask(9, kinds, (1.0, 2.0), mixing=MixingSettings(budget_usd_per_h=4.0))
    assert choose(asked) == {"a": 1, "b": 1}
    assert choose(ask(9, kinds, (1.0, 2.0), most=2)) == {"a": 1, "b": 1}


# --- spot workers -------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.floats(0.001, 0.5), st.floats(0.5, 0.999))
def test_so_many_may_be_missing_and_one_fewer_would_be_too_few(workers, missing, survive):
    k = most_missing(workers, missing, survive)
    assert k == workers or enough_stand(workers - k, k, missing) >= survive
    assert k == 0 or enough_stand(workers - k + 1, k - 1, missing) < survive


def test_spot_workers_are_bought_with_spares_or_not_at_all():
    spot, steady = kind("spot", 1.0, reclaims_per_h=3.0), kind("steady", 2.0)
    asked = ask(6, (spot, steady), (1.0, 1.0), cold_start_s=120.0)
    found = choose(asked)
    missing = missing_share(3.0, 120.0)
    spares = found["spot"] - 6
    assert set(found) == {"spot"}
    assert enough_stand(6, spares, missing) >= 0.99 > enough_stand(6, spares - 1, missing)
    # Where half of them are missing at a time, what is cheap is dear.
    assert set(
        choose(ask(6, (kind("spot", 1.0, reclaims_per_h=30.0), steady), (1.0, 1.0), cold_start_s=120.0))
    ) == {"steady"}


def test_two_spot_kinds_survive_together():
    kinds = kind("s", reclaims_per_h=3.0), kind("t", reclaims_per_h=3.0)
    one = stands(kinds[:1], kinds[0], 0.99, 120.0)
    both = stands(kinds, kinds[0], 0.99, 120.0)
    assert [both(n) <= one(n) for n in range(30)] == [True] * 30
    assert any(both(n) < one(n) for n in range(30))
    assert stands((kind("a"),), kind("a"), 0.99, 120.0) is None


def test_those_that_go_stay_until_those_that_come_serve():
    kinds = kind("big", 1.0), kind("small", 1.0)
    asked = ask(3, kinds, (3.0, 1.0), {"small": 3})
    assert bridged(asked, {"big": 1}, {"small": 3}) == {"big": 1, "small": 3}
    assert bridged(asked, {"big": 1}, {"small": 3, "big": 1}) == {"big": 1}
    tight = ask(3, kinds, (3.0, 1.0), {"small": 3}, most=2)
    assert bridged(tight, {"big": 1}, {"small": 3}) == {"big": 1, "small": 1}
    fewer = ask(2, kinds, (3.0, 1.0), {"small": 3})
    assert bridged(fewer, {"big": 1}, {"small": 3}) == {"big": 1, "small": 2}


def test_one_by_one_the_cheapest_comes_and_the_dearest_goes():
    kinds = kind("big", 4.0, high=1), kind("small", 2.0, low=1)
    capacity = {"big": 4.0, "small": 1.0}
    assert stepped(kinds, capacity, {"small": 1}, 3) == {"big": 1, "small": 2}
    assert stepped(kinds, capacity, {"big": 1, "small": 3}, 2) == {"big": 1, "small": 1}
    assert stepped(kinds, capacity, {"big": 1, "small": 3}, 0) == {"small": 1}
    kept = stepped(kinds, capacity, {"big": 1, "small": 1}, 1, lambda rest: rest.get("big", 0) > 0)
    assert kept == {"big": 1, "small": 1}


def test_alone_each_kind_would_need_so_many():
    assert alone(ask(7, (kind("big"), kind("small")), (3.0, 1.0))) == {"big": 3, "small": 7}
