"""Forecasts and shedding: lengths that were predicted wrongly no longer break a worker."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.migration import overload
from controlplane.migration.move import MoveTerms
from controlplane.migration.overload import ShedSettings, forecast, peak_tokens
from controlplane.migration.usage import worker_views
from controlplane.perfmodel.step import Hinge, StepModel
from controlplane.snapshot import Cached, Pace, RunningRequest, Transport, WorkerLoad
from controlplane.types import RequestId, WorkerId

STEP = StepModel(0.02, 1e-4, 1e-3, 5e-6)
TPOT_S = 0.05


def worker(name, sizes, state="serving", capacity=10_000, step=STEP, seqs=256):
    """`sizes`: (tokens held, tokens still expected) of each running request."""
    running = tuple(
        RunningRequest(RequestId(f"{name}{i}"), held, 0, 5, still, TPOT_S)
        for i, (held, still) in enumerate(sizes)
    )
    return WorkerLoad(WorkerId(name), state, capacity, running, (), step, seqs)


def shed(*workers, settings=None, resting=frozenset(), recent=frozenset(), pace=None):
    terms = MoveTerms(resting, recent, Transport(pace or Pace()))
    moves = overload.shed(settings or ShedSettings(), worker_views(workers), terms)
    return [(move.request, move.source, move.target) for move in moves]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 12)), max_size=6))
def test_the_peak_is_that_of_going_step_by_step(sizes):
    running = worker("w", sizes).requests
    held = [
        sum(h + n for h, still in sizes if still >= n)
        for n in range(max((s for _, s in sizes), default=0) + 1)
    ]
    assert peak_tokens(running) == max(held, default=0)


def test_a_forecast_is_the_step_and_the_peak_as_shares_of_their_limits():
    seen = worker("w", [(1000, 200), (500, 100)])
    ahead = forecast(seen.counted(), seen.requests, 10_000, STEP, ShedSettings(theta=0.5, gamma=0.5))
    assert ahead.step == pytest.approx((0.02 + 2e-3 + 5e-6 * 1650) / TPOT_S)
    assert ahead.kv == pytest.approx(1800 / 5000)


def test_hinges_count_in_the_forecast():
    bent = StepModel(0.02, 1e-4, 1e-3, 5e-6, hinges=(Hinge("sequences", 1, 0.01),))
    seen = worker("w", [(10, 10)] * 3)
    straight, steep = (
        forecast(seen.counted(), seen.requests, 10_000, s, ShedSettings()).step for s in (STEP, bent)
    )
    assert (steep - straight) * TPOT_S == pytest.approx(0.02)
    mixture = replace(bent, hinges=(Hinge("experts", 2.0, 0.01),))
    of_experts = forecast(seen.counted(), seen.requests, 10_000, mixture, ShedSettings()).step
    assert (of_experts - straight) * TPOT_S == pytest.approx(0.02 * (1 - math.exp(-1.5)))


def test_a_worker_that_breaks_its_tpot_sheds_what_has_most_to_come_for_least_to_copy():
    slow = worker("a", [(2000, 300), (500, 600), (3000, 100)])
    assert shed(slow, worker("b", [(100, 10)])) == [("a1", "a", "b")]


def test_a_worker_that_breaks_its_memory_sheds_too_even_of_unknown_speed():
    full = worker("a", [(400, 300), (200, 250)], capacity=1000, step=None)
    assert shed(full, worker("b", [(100, 10)], capacity=1000, step=None)) == [("a1", "a", "b")]


def test_nothing_is_shed_while_forecasts_hold_or_are_only_just_broken():
    fine = worker("a", [(1000, 300), (500, 600)])
    assert shed(fine, worker("b", [])) == []
    just = worker("a", [(2300, 300), (3300, 100)])
    assert 1.0 < forecast(just.counted(), just.requests, 10_000, STEP, ShedSettings()).worst <= 1.05
    assert shed(just, worker("b", [])) == []


def test_nothing_is_shed_to_where_it_would_break_the_forecast():
    slow = worker("a", [(3000, 300), (3000, 600)])
    assert shed(slow, worker("b", [(3000, 300)])) == []
    assert shed(slow, worker("b", [(100, 10)], seqs=1)) == []
    assert shed(slow, worker("b", [], state="draining")) == []


def test_one_request_leaves_a_worker_and_one_arrives():
    fleet = [worker(f"a{i}", [(3000, 300), (3000, 600)]) for i in range(3)] + [
        worker("b", []),
        worker("c", []),
    ]
    moves = shed(*fleet)
    assert len({m[1] for m in moves}) == len({m[2] for m in moves}) == len(moves) == 2


def test_what_rests_stays_and_a_pair_is_not_turned_round():
    slow, free = worker("a", [(3000, 300), (3000, 600)]), worker("b", [])
    assert shed(slow, free, resting={"a1"}) == [("a0", "a", "b")]
    assert shed(slow, free, resting={"a0", "a1"}) == []
    assert shed(slow, free, recent={("b", "a")}) == []
    assert shed(slow, free, settings=ShedSettings(most=0)) == []


def test_what_costs_more_to_move_than_it_spares_stays():
    slow = replace(worker("a", [(3000, 300), (3000, 600)]), kv_bytes_per_token=5e5)
    assert shed(slow, worker("b", [])) == [("a1", "a", "b")]
    assert shed(slow, worker("b", []), pace=Pace(1e5)) == []


def of(priorities, one):
    rows = zip(one.requests, priorities, strict=True)
    return replace(one, requests=tuple(replace(r, priority=p) for r, p in rows))


def test_what_breaks_the_headroom_of_a_high_request_leaves_it_and_it_stays():
    mixed = of((1, 0, 0), worker("a", [(300, 20), (2500, 90), (2000, 50)]))
    free = worker("b", [])
    keeps = ShedSettings(headroom=0.6)
    assert shed(mixed, free) == []
    assert shed(mixed, free, settings=keeps) == [("a2", "a", "b")]
    assert shed(of((1, 1, 1), mixed), free, settings=keeps) == []
    # Nor does a normal request go to where it would take another's headroom.
    assert shed(mixed, of((1,), worker("c", [(3000, 20)])), settings=keeps) == []


@pytest.mark.parametrize("wrong", [{"headroom": 1.0}, {"theta": 2.0}, {"gamma": 0.0}, {"most": -1}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(BadInput, match="shedding"):
        ShedSettings(**wrong)


def test_a_broken_worker_sheds_to_its_own_kind_only():
    broken = replace(worker("full", [(500, 900)] * 12), kind="a")
    free = replace(worker("free", []), kind="b")
    assert shed(broken, free) == []
    assert {target for *_, target in shed(broken, free, replace(worker("own", []), kind="a"))} == {"own"}


def knowing(one, cached):
    """The worker, whose requests other workers have in part cached: `cached` has their tokens by worker."""
    known = tuple(replace(r, cached=lambda w: Cached(cached.get(w, 0))) for r in one.requests)
    return replace(one, requests=known)


def test_of_workers_that_take_a_request_one_that_has_clearly_more_of_it_cached_gets_it():
    slow = worker("a", [(3000, 300), (3000, 600)])
    free, fuller = worker("b", []), worker("c", [(500, 20)])
    assert shed(slow, free, fuller) == [("a1", "a", "b")]
    assert shed(knowing(slow, {"c": 2000}), free, fuller) == [("a1", "a", "c")]
    assert shed(knowing(slow, {"b": 1800, "c": 2000}), free, fuller) == [("a1", "a", "b")]
    # Not where it would break a promise, however much is there.
    assert shed(knowing(slow, {"d": 2900}), free, worker("d", [(3000, 300)])) == [("a1", "a", "b")]


def test_a_copy_that_would_not_pay_does_where_the_target_has_cached_most_of_it():
    slow = replace(worker("a", [(3000, 300), (3000, 600)]), kv_bytes_per_token=5e5)
    assert shed(slow, worker("b", []), pace=Pace(1e5)) == []
    assert shed(knowing(slow, {"b": 2976}), worker("b", []), pace=Pace(1e7)) == [("a1", "a", "b")]
    assert shed(knowing(slow, {"b": 16}), worker("b", []), pace=Pace(1e5)) == []
