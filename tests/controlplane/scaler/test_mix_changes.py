"""A fleet of several types that the scaler follows demand with, heartbeat by heartbeat."""

from dataclasses import replace
from itertools import pairwise

import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from made_types import BIG, SLO, SMALL, made_type, seen

from controlplane.scaler import mix_changes
from controlplane.scaler.autoscale import scale
from controlplane.scaler.line import PARTS, line_of
from controlplane.scaler.mix import MixSettings, choose
from controlplane.scaler.state import Scaling, ScalingSettings, has_line
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.snapshot import Snapshot, WorkerLoad
from controlplane.types import ClassArrivals, WorkerId

TWO = made_type("big", 2.0, BIG, limit=2), made_type("small", 1.0)


class Fleet:
    """Runs the scaler beat by beat; what is asked for serves at the next."""

    def __init__(self, there, types=TWO, target=None, down_s=30.0, **more):
        self.settings = ScalingSettings(
            target or TargetSettings(None, None),
            StabilizationWindow(0.0, down_s),
            bin_s=5.0,
            worker_types=types,
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


def rate_of(units, profile=SMALL):
    """The requests a second that need `units` workers of the lightest type."""
    line = line_of(profile, seen())
    return (units - line.intercept) / line.workers_per_rps


@pytest.fixture
def solves(monkeypatch):
    asked = []
    monkeypatch.setattr(mix_changes, "choose", lambda one: asked.append(one) or choose(one))
    return asked


def test_a_rising_and_falling_demand_is_carried_by_the_cheapest_counts(solves):
    fleet = Fleet({"small TP1": 1})
    for units in (0.9, 3, 8, 3, 0.9):
        fleet.beat(rate_of(units), 150)
        asked = fleet.state.fleet_mix.solved[0]
        assert asked.is_enough(fleet.there)
        assert fleet.there == {"big TP1": 0, "small TP1": 0} | choose(asked)
    assert len(solves) < 25
    assert all(a != b for a, b in pairwise(solves))
    assert max(a.kinds["big TP1"] for a in fleet.asked) == 2
    for action in fleet.asked:
        assert action.workers == sum(action.kinds.values())
        assert set(action.facts) >= {"seen", "compared", "weights", "alone", "cost"}
    assert " × small TP1; cheapest: " in fleet.asked[0].reason
    assert "at $" in fleet.asked[0].reason


def test_a_demand_that_rises_to_what_is_there_anyway_is_no_question(solves):
    fleet = Fleet({"small TP1": 1}, (made_type("big", 2.0, BIG),))
    fleet.settings = replace(
        fleet.settings, worker_types=(made_type("big", 2.0, BIG), made_type("small", 1.0)), near=None
    )
    fleet.beat(rate_of(2.2), 60)
    (before, solved) = fleet.there, len(solves)
    assert before == {"big TP1": 1, "small TP1": 0}
    fleet.beat(rate_of(2.9), 60)
    assert (fleet.there, len(solves)) == (before, solved)
    assert fleet.state.fleet_mix.units > 29
    fleet.beat(rate_of(4.5), 60)
    assert len(solves) > solved


def test_what_is_asked_for_and_cannot_be_had_is_said():
    fleet = Fleet({"small TP1": 1}, (made_type("big", 2.0, BIG, limit=1), made_type("small", 1.0, limit=1)))
    fleet.beat(rate_of(30), 40)
    assert fleet.there == {"big TP1": 1, "small TP1": 1}
    assert "all that is allowed, 1 big TP1 + 1 small TP1, carries" in fleet.asked[-1].reason


@examples(15)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), min_size=2, max_size=6),
    st.integers(1, 2),
    st.integers(3, 7),
    st.sampled_from([None, 6.0, 9.5]),
    st.integers(0, 3),
)
def test_whatever_comes_limits_hold_at_every_heartbeat(demand, most_big, most, budget, lag):
    types = (
        made_type("big", 2.0, BIG, limit=most_big),
        made_type("small", 1.0, low=1),
        made_type("spot", 0.6, reclaims_per_h=2.0),
    )
    fleet = Fleet(
        {"small TP1": 1},
        types,
        TargetSettings(None, None, low=1, high=most),
        down_s=10.0,
        mix=MixSettings(budget_usd_per_h=budget),
    )
    history = [fleet.there] * (lag + 1)
    for units, beats in demand:
        for _ in range(beats):
            fleet.serving = history[-lag - 1]  # what is asked for serves a few heartbeats later
            fleet.beat(rate_of(units) if units else 0)
            history.append(fleet.there)
            there = fleet.there
            assert 1 <= sum(there.values()) <= most
            assert there.get("big TP1", 0) <= most_big
            assert there["small TP1"] >= 1
            usd = 2.0 * there.get("big TP1", 0) + there["small TP1"] + 0.6 * there.get("spot TP1", 0)
            assert budget is None or usd <= budget + 1e-9
    assert [a for a in fleet.asked if not a.reason] == []


def test_demand_that_swings_over_equally_dear_types_changes_no_types():
    fleet = Fleet({"a TP1": 3}, (made_type("a", 1.0), made_type("b", 1.0)), down_s=5.0)
    for swing in range(6):
        fleet.beat(rate_of(3 if swing % 2 else 5), 40)
    assert len(fleet.asked) >= 4
    for before, after in pairwise([{"a TP1": 3, "b TP1": 0}, *(action.kinds for action in fleet.asked)]):
        assert len({after[k] > before[k] for k in after if after[k] != before[k]}) == 1, (
            "some come as others go"
        )


def test_a_line_counts_workers_of_the_first_type():
    line = TargetSettings(0.5, 0.2)
    big = ScalingSettings(line, worker_types=TWO)
    small = ScalingSettings(line, worker_types=TWO[::-1])
    states = []
    for settings_ in (big, small):
        fleet = Fleet({"small TP1": 1})
        fleet.settings = settings_
        fleet.beat(8.0, 60)
        states.append(fleet.state)
        assert has_line(settings_, fleet.state)
    weight = states[0].weights.of["big TP1"]
    needed = [0.5 * s.regimes.current.upper_rps(10.0, 1.64) + 0.2 for s in states]
    assert states[0].fleet_mix.units == pytest.approx(needed[0] * weight * PARTS, rel=0.05)
    assert states[1].fleet_mix.units == pytest.approx(needed[1] * PARTS, rel=0.05)


def test_nothing_is_changed_before_lengths_are_known_and_while_there_is_no_news():
    fleet = Fleet({"small TP1": 4})
    fleet.beat(0, 100)
    assert fleet.asked == []
    fleet.beat(None, 100)
    assert fleet.asked == []


def test_a_mix_that_somebody_else_set_stays_as_long_as_a_fall_must_last():
    fleet = Fleet({"small TP1": 4}, (made_type("cheap", 0.5), made_type("small", 1.0)), down_s=50.0)
    fleet.beat(rate_of(3.4), 25)
    assert fleet.there == {"small TP1": 4}
    fleet.beat(rate_of(3.4), 40)
    assert fleet.there == {"cheap TP1": 4, "small TP1": 4}
    fleet.beat(rate_of(3.4), 50)
    assert fleet.there == {"cheap TP1": 4, "small TP1": 0}


def test_of_a_mix_that_changes_nobody_goes_before_the_others_serve():
    fleet = Fleet({"small TP1": 4}, (made_type("cheap", 0.5), made_type("small", 1.0)), down_s=20.0)
    fleet.serving = {"small TP1": 4}
    fleet.beat(rate_of(3.4), 60)
    assert fleet.there == {"cheap TP1": 4, "small TP1": 4}
    assert "4 small TP1 more until those serve" in fleet.asked[-1].reason
    fleet.serving = {"small TP1": 4, "cheap TP1": 4}
    fleet.beat(rate_of(3.4), 25)
    assert fleet.there == {"cheap TP1": 4, "small TP1": 0}
    assert "serve now" in fleet.asked[-1].reason


def test_an_operators_number_is_kept_with_the_types_that_are_there():
    fleet = Fleet({"big TP1": 1, "small TP1": 1})
    fleet.beat(rate_of(2.0), 10, fixed=2)
    assert fleet.asked == []
    fleet.beat(rate_of(2.0), 1, fixed=4)
    assert fleet.there == {"big TP1": 2, "small TP1": 2}
    fleet.beat(rate_of(9.0), 40, fixed=4)
    assert fleet.there == {"big TP1": 2, "small TP1": 2}


def test_a_fleet_at_zero_wakes_the_cheapest_and_an_idle_one_goes_there():
    fleet = Fleet({}, target=TargetSettings(None, None, low=0, to_zero=True))
    fleet.beat(1, waiting_requests=1)
    assert fleet.there == {"big TP1": 0, "small TP1": 1}
    fleet.beat(rate_of(4.0), 60)
    fleet.beat(0, 120)
    assert sum(fleet.there.values()) == 0


def test_workers_of_types_that_are_not_ours_are_left_alone():
    fleet = Fleet({"small TP1": 1, "theirs TP1": 2})
    fleet.beat(rate_of(5.0), 40)
    assert fleet.there["theirs TP1"] == 2
    assert fleet.there["big TP1"] + fleet.there["small TP1"] > 1


def test_requests_that_are_here_keep_their_seats():
    fleet = Fleet({"big TP1": 1, "small TP1": 1})
    fleet.beat(rate_of(3.0), 60)
    before = dict(fleet.there)
    fleet.beat(0, 200, waiting_requests=3)
    assert fleet.there == before
