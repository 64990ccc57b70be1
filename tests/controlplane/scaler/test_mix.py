"""The cheapest counts of worker types against a trial of all, standby workers, and the steps there."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_types import ask, made_type

from controlplane.errors import BadInput, Infeasible
from controlplane.scaler.line import enough_stand, missing_share, most_missing
from controlplane.scaler.mix import MixSettings, cheapest, choose
from controlplane.scaler.mix_changes import bridged, stepped

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
    priced = all(t.usd_per_h is not None for t in asked.worker_types)
    launch, drain = (s / asked.settings.horizon_s for s in (asked.cold_start_s, asked.drain_s))
    total = gpus = 0.0
    for t in asked.worker_types:
        n, was = counts.get(t.name, 0), asked.there.get(t.name, 0)
        paid = n + launch * max(n - was, 0) + drain * max(was - n, 0)
        total += paid * (t.usd_per_h if priced else t.gpus)
        gpus += n * t.gpus
    return total, gpus


def every(asked):
    """All counts that the limits allow, `least` apart."""
    names = [t.name for t in asked.worker_types]
    for counts in product(*(range(t.low, t.limit + 1) for t in asked.worker_types)):
        named = dict(zip(names, counts, strict=True))
        if asked.is_allowed(named):
            yield named


@settings(max_examples=150)
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
    types, there = [], {}
    for i, (_, usd, gpus, low, more, reclaims, was) in enumerate(drawn):
        price = float(usd) if priced else None
        one = made_type(f"g{i}", price, tp_degree=gpus, low=low, limit=low + more, reclaims_per_h=reclaims)
        types.append(one)
        there[one.name] = was
    limits = MixSettings(budget_usd_per_h=float(budget) if priced and budget is not None else None)
    if priced and budget is not None and sum(t.low * t.usd_per_h for t in types) > budget:
        return
    weights = [w for w, *_ in drawn]
    asked = ask(
        units, types, weights, there, limits, least=least, most=most, cold_start_s=takes[0], drain_s=takes[1]
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
    types = made_type("a", 2.0), made_type("b", 2.0)
    for there in ({"a TP1": 3}, {"b TP1": 3}, {"a TP1": 1, "b TP1": 2}):
        assert choose(ask(3, types, (1.0, 1.0), there, cold_start_s=60.0)) == there


def test_what_saves_less_than_the_change_costs_is_not_done():
    types = made_type("a", 2.0), made_type("b", 1.9)
    assert choose(ask(3, types, (1.0, 1.0), {"a TP1": 3}, cold_start_s=60.0, drain_s=60.0)) == {"a TP1": 3}
    assert choose(ask(3, types, (1.0, 1.0), {"a TP1": 3})) == {"b TP1": 3}
    longer = MixSettings(horizon_s=1e5)
    assert choose(ask(3, types, (1.0, 1.0), {"a TP1": 3}, longer, cold_start_s=60.0, drain_s=60.0)) == {
        "b TP1": 3
    }


def test_no_demand_keeps_what_must_be_kept():
    types = made_type("a", low=1), made_type("b")
    assert choose(ask(0, types, (1.0, 2.0), {"a TP1": 2, "b TP1": 2})) == {"a TP1": 1}
    assert choose(ask(0, types[1:], (1.0,), {"b TP1": 2})) == {}


def test_what_is_too_much_for_the_limits_gets_all_they_allow():
    types = made_type("a", 1.0, limit=2), made_type("b", 3.0, limit=1)
    asked = ask(9, types, (1.0, 2.0), settings=MixSettings(budget_usd_per_h=4.0))
    assert choose(asked) == {"a TP1": 1, "b TP1": 1}
    assert choose(ask(9, types, (1.0, 2.0), most=2)) == {"a TP1": 1, "b TP1": 1}


# --- spot workers -------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.floats(0.001, 0.5), st.floats(0.5, 0.999))
def test_so_many_may_be_missing_and_one_fewer_would_be_too_few(workers, missing, survive):
    k = most_missing(workers, missing, survive)
    assert k == workers or enough_stand(workers - k, k, missing) >= survive
    assert k == 0 or enough_stand(workers - k + 1, k - 1, missing) < survive


def test_spot_workers_are_bought_with_spares_or_not_at_all():
    spot, steady = made_type("spot", 1.0, reclaims_per_h=3.0), made_type("steady", 2.0)
    asked = ask(6, (spot, steady), (1.0, 1.0), cold_start_s=120.0)
    found = choose(asked)
    missing = missing_share(3.0, 120.0)
    spares = found["spot TP1"] - 6
    assert set(found) == {"spot TP1"}
    assert enough_stand(6, spares, missing) >= 0.99 > enough_stand(6, spares - 1, missing)
    # Where half of them are missing at a time, what is cheap is dear.
    assert set(
        choose(ask(6, (made_type("spot", 1.0, reclaims_per_h=30.0), steady), (1.0, 1.0), cold_start_s=120.0))
    ) == {"steady TP1"}


def test_two_spot_types_survive_together():
    types = made_type("s", reclaims_per_h=3.0), made_type("t", reclaims_per_h=3.0)
    one = ask(1, types[:1], (1.0,), cold_start_s=120.0)
    both = ask(1, types, (1.0, 1.0), cold_start_s=120.0)
    alone, together = ([need.standing(types[0], n) for n in range(30)] for need in (one, both))
    assert all(b <= a for a, b in zip(alone, together, strict=True))
    assert alone != together
    assert one.standing(made_type("a"), 7) == 7


def test_those_that_go_stay_until_those_that_come_serve():
    types = made_type("big", 1.0), made_type("small", 1.0)
    asked = ask(3, types, (3.0, 1.0), {"small TP1": 3})
    assert bridged(asked, {"big TP1": 1}, {"small TP1": 3}) == {"big TP1": 1, "small TP1": 3}
    assert bridged(asked, {"big TP1": 1}, {"small TP1": 3, "big TP1": 1}) == {"big TP1": 1}
    tight = ask(3, types, (3.0, 1.0), {"small TP1": 3}, most=2)
    assert bridged(tight, {"big TP1": 1}, {"small TP1": 3}) == {"big TP1": 1, "small TP1": 1}
    fewer = ask(2, types, (3.0, 1.0), {"small TP1": 3})
    assert bridged(fewer, {"big TP1": 1}, {"small TP1": 3}) == {"big TP1": 1, "small TP1": 2}


def test_one_by_one_the_cheapest_comes_and_the_dearest_goes():
    types = made_type("big", 4.0, limit=1), made_type("small", 2.0, low=1)
    capacity = {"big TP1": 4.0, "small TP1": 1.0}
    assert stepped(types, capacity, {"small TP1": 1}, 3) == {"big TP1": 1, "small TP1": 2}
    assert stepped(types, capacity, {"big TP1": 1, "small TP1": 3}, 2) == {"big TP1": 1, "small TP1": 1}
    assert stepped(types, capacity, {"big TP1": 1, "small TP1": 3}, 0) == {"small TP1": 1}
    kept = stepped(
        types, capacity, {"big TP1": 1, "small TP1": 1}, 1, lambda rest: rest.get("big TP1", 0) > 0
    )
    assert kept == {"big TP1": 1, "small TP1": 1}


def test_alone_each_type_would_need_so_many():
    assert ask(7, (made_type("big"), made_type("small")), (3.0, 1.0)).alone() == {
        "big TP1": 3,
        "small TP1": 7,
    }


# --- a planner's need: nothing there yet, no changes to pay for ------------------------------------


def test_one_big_worker_beats_three_small_ones():
    types = made_type("a10", 1.0), made_type("a100", 2.5)
    assert cheapest(ask(12.0, types, (4.0, 12.0))) == {"a100 TP1": 1}


def test_a_small_worker_takes_the_rest_that_a_second_big_one_would_waste():
    types = made_type("a10", 1.0), made_type("a100", 2.5)
    assert cheapest(ask(15.0, types, (4.0, 12.0))) == {"a10 TP1": 1, "a100 TP1": 1}


def test_of_equally_dear_mixes_the_one_with_fewer_gpus_wins():
    types = made_type("a", 8.0, tp_degree=4), made_type("b", 8.0, tp_degree=2)
    for order in (types, types[::-1]):
        assert cheapest(ask(10.0, order, (10.0, 10.0))) == {"b TP2": 1}


def test_without_all_prices_gpus_decide():
    types = made_type("a", 1.0, tp_degree=2), made_type("b", None)
    assert cheapest(ask(10.0, types, (10.0, 10.0))) == {"b TP1": 1}


def test_limits_that_fall_short_are_infeasible():
    for one, limits in (
        (made_type("a", limit=2), MixSettings()),
        (made_type("a", tp_degree=4), MixSettings(max_gpus=11)),
        (made_type("a", 4.0), MixSettings(budget_usd_per_h=11.9)),
    ):
        with pytest.raises(Infeasible):
            cheapest(ask(21.0, (one,), (10.0,), settings=limits))


def test_a_budget_without_prices_is_refused():
    with pytest.raises(BadInput, match="price"):
        cheapest(ask(1.0, (made_type("a", None),), (10.0,), settings=MixSettings(budget_usd_per_h=10.0)))


offered = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(2, 40), st.integers(0, 4)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=100)
@given(offered, st.integers(1, 120), st.integers(2, 24))
def test_the_cheapest_mix_costs_what_the_best_of_all_costs(drawn, demand, max_gpus):
    types = [
        made_type(f"g{i}", float(usd), tp_degree=tp, limit=limit)
        for i, (tp, usd, _, limit) in enumerate(drawn)
    ]
    need = ask(demand, types, [float(c) for _, _, c, _ in drawn], settings=MixSettings(max_gpus=max_gpus))
    able = [one for one in every(need) if need.is_enough(one)]
    if not able:
        with pytest.raises(Infeasible):
            cheapest(need)
        return
    assert cost(need, cheapest(need)) == pytest.approx(min(cost(need, one) for one in able))
