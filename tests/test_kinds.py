"""Several kinds of worker: what each is worth, the cheapest counts against trying all, and the way there."""

import math
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.perfmodel.step import StepModel
from controlplane.scaler import mixed as mixed_module
from controlplane.scaler.autoscale import has_line, scale
from controlplane.scaler.counts import Asked, alone, bridged, choose, stepped
from controlplane.scaler.hold import HoldSettings
from controlplane.scaler.kinds import (
    PARTS,
    KindSettings,
    MixingSettings,
    Weights,
    carried,
    even,
    stands,
    weigh,
)
from controlplane.scaler.line import Speed, capacity_rps, line_of
from controlplane.scaler.mix import ClassArrivals, Mix
from controlplane.scaler.reclaims import enough_stand, missing_share, most_missing
from controlplane.scaler.scaling import Scaling, ScalingSettings
from controlplane.scaler.target import TargetSettings
from controlplane.snapshot import Snapshot, WorkerLoad
from controlplane.types import Slo, WorkerId

SLO = Slo(1.0, 0.1)
SMALL = Speed(StepModel(0.02, 2e-4, 2e-3, 1e-6), 20_000, 64)
BIG = Speed(StepModel(0.02, 5e-5, 6e-4, 4e-7), 60_000, 128)


def kind(name, usd=1.0, speed=SMALL, **more):
    return KindSettings(name, speed, usd, **more)


def ask(units, kinds, weights, there=None, mixing=None, **more):
    of = dict(zip((k.kind for k in kinds), weights, strict=True))
    lightest = min(of, key=of.__getitem__)
    return Asked(
        tuple(kinds), mixing or MixingSettings(), Weights(lightest, of), units * PARTS, there or {}, **more
    )


# --- the program, against trying everything -----------------------------------------------------------------

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


# --- what each is worth -------------------------------------------------------------------------------------


def seen(prompt=200.0, output=100.0, requests=50.0):
    return Mix((ClassArrivals(SLO, requests, prompt * requests, output * requests),), 0.0)


def test_a_weight_is_what_one_carries_over_what_the_lightest_carries():
    kinds = kind("big", speed=BIG), kind("small")
    weights = weigh(kinds, {}, seen(), None)
    (c,) = seen().classes
    assert weights.reference == "small"
    assert weights.of["small"] == 1.0
    assert weights.of["big"] == pytest.approx(capacity_rps(BIG, c) / capacity_rps(SMALL, c), abs=1e-3)


def test_weights_stay_while_lengths_drift_a_little():
    tight = Speed(BIG.step, 4_000, 128)  # as fast as the big one, with little memory
    kinds = kind("tight", speed=tight), kind("small")
    first = weigh(kinds, {}, seen(prompt=50.0), None)
    assert weigh(kinds, {}, seen(prompt=51.0), first) is first
    assert weigh(kinds, {}, seen(prompt=3000.0), first).reference == "tight"


def test_kinds_of_unknown_speed_hold_the_mix_only_where_there_are_any():
    kinds = kind("small"), kind("new", speed=None)
    assert weigh(kinds, {}, seen(), None).of == {"small": 1.0}
    assert weigh(kinds, {"new": 1}, seen(), None) is None
    assert weigh((kind("small"), kind("new", speed=None, low=1)), {}, seen(), None) is None
    assert weigh(kinds, {}, Mix(), None) is None
    assert even(kinds).of == {"small": 1.0}


# --- the way there ------------------------------------------------------------------------------------------


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


# --- in the scaler ------------------------------------------------------------------------------------------

TWO = kind("big", 2.0, BIG, high=2), kind("small", 1.0)


class Fleet:
    """Runs the scaler beat by beat; what is asked for serves at the next."""

    def __init__(self, there, kinds=TWO, target=None, down_s=30.0, **more):
        self.settings = ScalingSettings(
            target or TargetSettings(None, None),
            HoldSettings(0.0, down_s),
            bin_s=5.0,
            kinds=kinds,
            **more,
        )
        self.state, self.there, self.now_s, self.asked = Scaling(), dict(there), 0.0, []
        self.serving = None

    def beat(self, arrivals, beats=1, **more):
        for _ in range(beats):
            serving = self.there if self.serving is None else self.serving
            workers = tuple(
                WorkerLoad(WorkerId(f"{k}{i}"), "serving", 1000, kind=k, max_seqs=64)
                for k, n in serving.items()
                for i in range(n)
            )
            by_class = (ClassArrivals(SLO, arrivals, 200.0 * arrivals, 100.0 * arrivals),) if arrivals else ()
            seen = Snapshot(
                self.now_s, workers, sum(self.there.values()), arrivals=arrivals, by_class=by_class,
                wanted_kinds=self.there, cold_start_s=10.0, drain_s=5.0, **more,
            )  # fmt: skip
            self.state, action = scale(self.settings, self.state, seen)
            if action is not None:
                self.asked.append(action)
                self.there = dict(action.kinds)
            self.now_s += 1.0


def rate_of(units, speed=SMALL):
    """Requests a second that ask for so many of the lightest."""
    line = line_of(speed, seen())
    return (units - line.intercept) / line.workers_per_rps


@pytest.fixture
def solves(monkeypatch):
    asked = []
    monkeypatch.setattr(mixed_module, "choose", lambda one: asked.append(one) or choose(one))
    return asked


def test_a_rising_and_falling_demand_is_carried_by_the_cheapest_counts(solves):
    fleet = Fleet({"small": 1})
    for units in (0.9, 3, 8, 3, 0.9):
        fleet.beat(rate_of(units), 150)
        asked = fleet.state.mixed.solved[0]
        assert asked.is_enough(fleet.there)
        assert fleet.there == {"big": 0, "small": 0} | choose(asked)
    assert len(solves) < 25
    assert all(a != b for a, b in pairwise(solves))
    assert max(a.kinds["big"] for a in fleet.asked) == 2
    for action in fleet.asked:
        assert action.workers == sum(action.kinds.values())
        assert set(action.facts) >= {"seen", "compared", "weights", "alone", "cost"}
    assert " × small; cheapest: " in fleet.asked[0].reason
    assert "at $" in fleet.asked[0].reason


def test_a_demand_that_rises_to_what_is_there_anyway_is_no_question(solves):
    fleet = Fleet({"small": 1}, (kind("big", 2.0, BIG),))
    fleet.settings = replace(fleet.settings, kinds=(kind("big", 2.0, BIG), kind("small", 1.0)), near=None)
    fleet.beat(rate_of(2.2), 60)
    (before, solved) = fleet.there, len(solves)
    assert before == {"big": 1, "small": 0}
    fleet.beat(rate_of(2.9), 60)
    assert (fleet.there, len(solves)) == (before, solved)
    assert fleet.state.mixed.units > 29
    fleet.beat(rate_of(4.5), 60)
    assert len(solves) > solved


def test_what_is_asked_for_and_cannot_be_had_is_said():
    fleet = Fleet({"small": 1}, (kind("big", 2.0, BIG, high=1), kind("small", 1.0, high=1)))
    fleet.beat(rate_of(30), 40)
    assert fleet.there == {"big": 1, "small": 1}
    assert "all that is allowed, 1 big + 1 small, carries" in fleet.asked[-1].reason


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), min_size=2, max_size=6),
    st.integers(1, 2),
    st.integers(3, 7),
    st.sampled_from([None, 6.0, 9.5]),
    st.integers(0, 3),
)
def test_whatever_comes_limits_hold_at_every_heartbeat(demand, most_big, most, budget, lag):
    kinds = (
        kind("big", 2.0, BIG, high=most_big),
        kind("small", 1.0, low=1),
        kind("spot", 0.6, reclaims_per_h=2.0),
    )
    fleet = Fleet(
        {"small": 1},
        kinds,
        TargetSettings(None, None, low=1, high=most),
        down_s=10.0,
        mixing=MixingSettings(budget_usd_per_h=budget),
    )
    history = [fleet.there] * (lag + 1)
    for units, beats in demand:
        for _ in range(beats):
            fleet.serving = history[-lag - 1]  # what is asked for serves a few heartbeats later
            fleet.beat(rate_of(units) if units else 0)
            history.append(fleet.there)
            there = fleet.there
            assert 1 <= sum(there.values()) <= most
            assert there.get("big", 0) <= most_big
            assert there["small"] >= 1
            usd = 2.0 * there.get("big", 0) + there["small"] + 0.6 * there.get("spot", 0)
            assert budget is None or usd <= budget + 1e-9
    assert [a for a in fleet.asked if not a.reason] == []


def test_demand_that_swings_over_equally_dear_kinds_changes_no_kinds():
    fleet = Fleet({"a": 3}, (kind("a", 1.0), kind("b", 1.0)), down_s=5.0)
    for swing in range(6):
        fleet.beat(rate_of(3 if swing % 2 else 5), 40)
    assert len(fleet.asked) >= 4
    for before, after in pairwise([{"a": 3, "b": 0}, *(action.kinds for action in fleet.asked)]):
        assert len({after[k] > before[k] for k in "ab" if after[k] != before[k]}) == 1, (
            "some come as others go"
        )


def test_a_line_in_workers_of_one_kind_is_converted():
    line = TargetSettings(0.5, 0.2)
    big = ScalingSettings(line, kinds=TWO, line_kind="big")
    small = ScalingSettings(line, kinds=TWO, line_kind="small")
    states = []
    for settings_ in (big, small):
        fleet = Fleet({"small": 1})
        fleet.settings = settings_
        fleet.beat(8.0, 60)
        states.append(fleet.state)
        assert has_line(settings_, fleet.state)
    weight = states[0].weights.of["big"]
    needed = [0.5 * s.regimes.current.upper_rps(10.0, 1.64) + 0.2 for s in states]
    assert states[0].mixed.units == pytest.approx(needed[0] * weight * PARTS, rel=0.05)
    assert states[1].mixed.units == pytest.approx(needed[1] * PARTS, rel=0.05)


def test_nothing_is_changed_before_lengths_are_known_and_while_there_is_no_news():
    fleet = Fleet({"small": 4})
    fleet.beat(0, 100)
    assert fleet.asked == []
    fleet.beat(None, 100)
    assert fleet.asked == []


def test_a_mix_that_somebody_else_set_stays_as_long_as_a_fall_must_last():
    fleet = Fleet({"small": 4}, (kind("cheap", 0.5), kind("small", 1.0)), down_s=50.0)
    fleet.beat(rate_of(3.4), 25)
    assert fleet.there == {"small": 4}
    fleet.beat(rate_of(3.4), 40)
    assert fleet.there == {"cheap": 4, "small": 0}


def test_of_a_mix_that_changes_nobody_goes_before_the_others_serve():
    fleet = Fleet({"small": 4}, (kind("cheap", 0.5), kind("small", 1.0)), down_s=20.0)
    fleet.serving = {"small": 4}
    fleet.beat(rate_of(3.4), 60)
    assert fleet.there == {"cheap": 4, "small": 4}
    assert "4 small more until those serve" in fleet.asked[-1].reason
    fleet.serving = {"small": 4, "cheap": 4}
    fleet.beat(rate_of(3.4))
    assert fleet.there == {"cheap": 4, "small": 0}
    assert "serve now" in fleet.asked[-1].reason


def test_an_operators_number_is_kept_with_the_kinds_that_are_there():
    fleet = Fleet({"big": 1, "small": 1})
    fleet.beat(rate_of(2.0), 10, fixed=2)
    assert fleet.asked == []
    fleet.beat(rate_of(2.0), 1, fixed=4)
    assert fleet.there == {"big": 2, "small": 2}
    fleet.beat(rate_of(9.0), 40, fixed=4)
    assert fleet.there == {"big": 2, "small": 2}


def test_a_fleet_at_zero_wakes_the_cheapest_and_an_idle_one_goes_there():
    fleet = Fleet({}, target=TargetSettings(None, None, low=0, to_zero=True))
    fleet.beat(1, waiting_requests=1)
    assert fleet.there == {"big": 0, "small": 1}
    fleet.beat(rate_of(4.0), 60)
    fleet.beat(0, 120)
    assert sum(fleet.there.values()) == 0


def test_workers_of_kinds_that_are_not_ours_are_left_alone():
    fleet = Fleet({"small": 1, "theirs": 2})
    fleet.beat(rate_of(5.0), 40)
    assert fleet.there["theirs"] == 2
    assert fleet.there["big"] + fleet.there["small"] > 1


def test_requests_that_are_here_keep_their_seats():
    fleet = Fleet({"big": 1, "small": 1})
    fleet.beat(rate_of(3.0), 60)
    before = dict(fleet.there)
    fleet.beat(0, 200, waiting_requests=3)
    assert fleet.there == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: kind(""),
        lambda: kind("a", -1.0),
        lambda: kind("a", gpus=0),
        lambda: kind("a", low=2, high=1),
        lambda: kind("a", reclaims_per_h=math.inf),
        lambda: MixingSettings(horizon_s=0.0),
        lambda: MixingSettings(survive=1.0),
        lambda: MixingSettings(budget_usd_per_h=-1.0),
        lambda: ScalingSettings(TargetSettings(None, None), kinds=(kind("a"), kind("a"))),
        lambda: ScalingSettings(TargetSettings(None, None), kinds=(kind("a"),), line_kind="b"),
        lambda: ScalingSettings(TargetSettings(None, None, low=0, high=1), kinds=(kind("a", low=2),)),
        lambda: ScalingSettings(TargetSettings(None, None, low=3), kinds=(kind("a", high=2),)),
        lambda: ScalingSettings(
            TargetSettings(None, None), kinds=(kind("a", None),), mixing=MixingSettings(budget_usd_per_h=1.0)
        ),
        lambda: ScalingSettings(
            TargetSettings(None, None), kinds=(kind("a", low=2),), mixing=MixingSettings(budget_usd_per_h=1.0)
        ),
        lambda: ScalingSettings(
            TargetSettings(None, None, usd_per_worker_h=1.0, budget_usd_per_h=9.0), kinds=(kind("a"),)
        ),
    ],
)
def test_kinds_that_cannot_be_are_refused(make):
    with pytest.raises(BadInput):
        make()


def test_what_is_counted_on_is_what_stands():
    kinds = kind("a"), kind("s", reclaims_per_h=6.0)
    weights = Weights("a", {"a": 1.0, "s": 2.0})
    sums = [carried(kinds, MixingSettings(), weights, {"a": 2, "s": n}, 600.0) for n in range(12)]
    assert sums[0] == 2.0
    assert np.all(np.diff(sums) >= 0)
    assert sums[-1] < 2.0 + 22.0
