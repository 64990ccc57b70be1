"""Moves between workers: thresholds, pairs, choice of request, and cases that must never happen."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings, balance, cost_s, gain_s
from controlplane.migration.move import MoveTerms, Price
from controlplane.migration.usage import Reading, WorkerView, worker_views
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import Cached, Load, Migrate, Pace, Reassign, RunningRequest, Transport, WorkerLoad
from controlplane.types import RequestId, WorkerId

STEP = StepModel(0.02, 1e-4, 1e-4, 5e-7)
LOOSE = MoveSettings(out_below=100, in_above=200)


def request(name, tokens, high=0, generated=5, remaining=50):
    return RunningRequest(RequestId(name), tokens, high, generated, remaining)


def worker(name, tokens=(), waiting=(), state="serving", capacity=1000, high=()):
    running = tuple(request(f"{name}{i}", t, int(i in high)) for i, t in enumerate(tokens))
    queue = tuple(request(f"{name}q{i}", t, generated=0) for i, t in enumerate(waiting))
    return WorkerLoad(WorkerId(name), state, capacity, running, queue, STEP, 256)


def planned(settings, *workers, resting=frozenset(), recent=frozenset(), pace=None):
    views = worker_views(workers, settings.reading)
    return balance(settings, views, MoveTerms(resting, recent, Transport(pace or Pace())))


def moves_of(settings, *workers, **more):
    return [(move.request, move.source, move.target) for move in planned(settings, *workers, **more)]


sizes = st.lists(st.integers(1, 400), max_size=5)
fleets = st.lists(st.tuples(sizes, sizes, st.sampled_from(["serving", "serving", "draining"])), max_size=6)


def fleet_of(shapes):
    return [worker(f"w{i}", tuple(r), tuple(q), state) for i, (r, q, state) in enumerate(shapes)]


@given(
    fleets,
    st.sampled_from(
        [
            LOOSE,
            MoveSettings(reading=Reading(headroom=0.9), in_above=300),
        ]
    ),
)
def test_no_worker_is_at_both_ends_and_none_takes_part_twice(shapes, settings):
    fleet = fleet_of(shapes)
    moves = moves_of(settings, *fleet)
    sources, targets = [m[1] for m in moves], [m[2] for m in moves]
    assert not set(sources) & set(targets)
    assert len(set(sources)) == len(sources)
    assert len(set(targets)) == len(targets)
    by_name = {w.worker: w for w in fleet}
    for r, source, target in moves:
        assert r in {x.request for x in (*by_name[source].requests, *by_name[source].waiting)}
        assert by_name[target].state == "serving"


@given(fleets)
def test_a_move_of_a_running_request_leaves_its_target_less_full_than_its_source(shapes):
    fleet = {w.worker: w for w in fleet_of(shapes)}
    for move in planned(MoveSettings(out_below=300, in_above=300), *fleet.values()):
        source = move.source
        assert fleet[source].state == "serving"
        if isinstance(move, Reassign):
            continue
        tokens = next(r.tokens for r in fleet[source].requests if r.request == move.request)
        before, there = fleet[source].counted(), fleet[move.target].counted()
        assert there.held_tokens + there.head_tokens + tokens < before.held_tokens + before.head_tokens


@given(fleets, st.integers(0, 3))
def test_no_more_moves_than_the_budget_allows(shapes, most):
    assert len(moves_of(replace(LOOSE, most=most), *fleet_of(shapes))) <= most


def test_the_least_free_sheds_to_the_most_free():
    fleet = worker("a", (600, 200)), worker("b", (450, 400)), worker("c", (10,)), worker("d", (200,))
    settings = MoveSettings(out_below=200, in_above=300)
    assert moves_of(settings, *fleet) == [("b1", "b", "c"), ("a1", "a", "d")]


def test_within_its_thresholds_a_fleet_is_left_alone():
    assert moves_of(MoveSettings(), worker("a", (500, 100)), worker("b", (10,))) == []


def test_low_priority_and_short_goes_first():
    full = worker("a", (100, 50, 400, 400), high=(1,))
    assert moves_of(LOOSE, full, worker("b", (10,)))[0][0] == "a0"


def test_a_head_of_line_that_fits_elsewhere_at_once_goes_there():
    blocked = worker("a", (500, 400), (300, 20))
    [move] = planned(LOOSE, blocked, worker("b", (10,)))
    assert isinstance(move, Reassign)
    assert (move.request, move.source, move.target) == ("aq0", "a", "b")
    assert "waiting" in move.reason


def test_where_the_head_does_not_fit_room_is_made_for_it():
    blocked = worker("a", (500, 100), (700,))
    [move] = planned(MoveSettings(out_below=100, in_above=100), blocked, worker("b", (400,)))
    assert isinstance(move, Migrate)
    assert move.request == "a1"


def test_nothing_moves_to_where_it_has_no_room():
    fleet = worker("a", (500, 490)), worker("b", (510,))
    assert moves_of(MoveSettings(out_below=300, in_above=300), *fleet) == []


def test_what_rests_stays():
    fleet = worker("a", (460, 450)), worker("b")
    assert moves_of(LOOSE, *fleet) == [("a1", "a", "b")]
    assert moves_of(LOOSE, *fleet, resting={"a1"}) == []
    assert moves_of(LOOSE, *fleet, resting={"a0", "a1"}) == []


def test_what_the_target_has_cached_is_copied_soonest_and_goes_first():
    full, free = worker("a", (300, 250, 350)), worker("b", (10,))
    assert moves_of(LOOSE, full, free) == [("a1", "a", "b")]
    cached = {"a0": 288, "a1": 0, "a2": 0}
    known = (replace(r, cached=lambda w, r=r: Cached(cached[r.request])) for r in full.requests)
    assert moves_of(LOOSE, replace(full, requests=tuple(known)), free) == [("a0", "a", "b")]


def test_a_pair_is_not_turned_round():
    fleet = worker("a", (500, 450)), worker("b", (10,))
    assert moves_of(LOOSE, *fleet, recent={("b", "a")}) == []


def test_a_move_must_pay_for_itself():
    fleet = replace(worker("a", (500, 450)), kv_bytes_per_token=5e5), worker("b")
    assert len(moves_of(LOOSE, *fleet, pace=Pace(2.4e9))) == 1
    assert moves_of(LOOSE, *fleet, pace=Pace(1e4)) == []


def test_the_pace_follows_what_moves_show_and_one_odd_move_changes_it_little():
    pace = Pace().after(1e8, 0.05)
    assert (pace.bytes_per_s, pace.pause_s) == pytest.approx((1e8, 0.05))  # no start value outlives a move
    for _ in range(20):
        pace = pace.after(1e8, 0.05)
    odd = pace.after(1e3, 30.0)
    assert 0.8e8 < odd.bytes_per_s < 1e8
    assert 0.05 < odd.pause_s < 0.06
    for _ in range(40):
        pace = pace.after(3e7, 0.05)
    assert pace.bytes_per_s == pytest.approx(3e7, rel=0.05)


def seen(load, free_tokens=0, ends=1):
    """A worker of this load, with that much free memory and one more request, which ends in `ends` steps."""
    at = WorkerLoad(
        WorkerId("w"), "serving", load.held_tokens + free_tokens, (request("o", 1, remaining=ends),)
    )
    return WorkerView(at, load, 0.0)


def test_a_move_gains_what_its_neighbours_are_spared_and_costs_what_it_disturbs():
    r = request("r", 100, remaining=10)
    here, there = Load(running=5, held_tokens=1000), Load()
    # Alone on the target it is as fast as an idle worker allows; its four neighbours are spared its share.
    gain = gain_s(r, seen(here), seen(there), STEP, STEP)
    assert gain == pytest.approx(10 * (1.5e-4 * 4 + (0.02 + 5e-4 + 5e-4) - (0.02 + 1.5e-4)))
    assert gain_s(r, seen(there), seen(here), STEP, STEP) < 0
    assert cost_s(Price(1e6, 1e9, 0.01, 0.02), 100, here, there) == pytest.approx(0.01 + 0.02 * 0.1 * 6)


def test_relief_of_a_blocked_head_counts_as_gain():
    r = request("r", 100)
    here = Load(running=2, held_tokens=800, waiting=1, head_tokens=400)
    open_ = replace(here, head_tokens=100)
    blocked, relieved = (gain_s(r, seen(at, 200, 30), seen(Load()), STEP, STEP) for at in (here, open_))
    assert blocked > relieved


@pytest.mark.parametrize(
    "wrong",
    [{"out_below": 2.0, "in_above": 1.0}, {"most": -1}, {"rest_s": float("nan")}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(BadInput, match="moves"):
        MoveSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"bytes_per_s": 0.0}, {"fixed_s": -1.0}])
def test_a_price_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(BadInput, match="price"):
        Price(1.0, **wrong)


def test_high_priority_requests_are_not_moved_for_the_sake_of_their_own_headroom():
    reading = Reading(headroom=0.8)
    settings = MoveSettings(reading, out_below=20, in_above=20)
    mixed = worker("a", (150, 140), high=(0,))
    assert moves_of(settings, mixed, worker("b", (5,))) == [("a1", "a", "b")]
    assert moves_of(settings, worker("a", (150, 140), high=(0, 1)), worker("b", (5,))) == []
    # Where memory itself is short, they go too.
    full = worker("a", (500, 480), high=(0, 1))
    assert moves_of(settings, full, worker("b", (5,))) == [("a1", "a", "b")]


def of(kind, one):
    return replace(one, kind=kind)


def test_what_runs_goes_to_workers_of_its_kind_only():
    full = of("a", worker("full", (500, 450)))
    free, own = of("b", worker("free", ())), of("a", worker("own", (10,)))
    assert moves_of(LOOSE, full, free) == []
    assert moves_of(LOOSE, full, free, own) == [("full1", "full", "own")]


def test_what_waits_may_go_to_another_kind_where_no_target_of_its_own_is_left():
    full = of("a", worker("full", (500, 450), (80,)))
    free = of("b", worker("free", ()))
    (move,) = planned(LOOSE, full, free)
    assert isinstance(move, Reassign)
    assert move.request == "fullq0"


def test_kinds_are_paired_each_by_itself_and_nobody_takes_part_twice():
    fleet = [of(k, worker(f"{k}{i}", (500, 450), (90,))) for k in "ab" for i in range(2)]
    fleet += [of("a", worker("afree", ())), of("b", worker("bfree", ())), of("c", worker("cfree", ()))]
    found = moves_of(LOOSE, *fleet)
    assert [(source, target) for _, source, target in found] == [
        ("a0", "afree"),
        ("b0", "bfree"),
        ("a1", "cfree"),
    ]
