"""`tick`: pure, quiet when there is nothing to do, and every action with its reason."""

from dataclasses import replace

import pytest
from made_types import made_type, profile_of

from controlplane.control import Settings, State, tick
from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.forecast import Forecast, ForecastSettings, Outlook
from controlplane.scaler.load import LoadSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import StabilizationWindow, Stabilized, TargetSettings
from controlplane.snapshot import Migrate, RunningRequest, Scale, Snapshot, WorkerLoad
from controlplane.types import RequestId, WorkerId

STEP = StepModel(0.02, 1e-4, 1e-3, 5e-6)
STILL = Settings(moves=None, shed=None, load=LoadSettings(1, 8))


def by_load(**more):
    """No moves, and scaling by load alone."""
    return replace(STILL, load=LoadSettings(1, 8, **more))


def worker(name, tokens=(), waiting=(), state="serving", capacity=1000):
    running = tuple(RunningRequest(RequestId(f"{name}{i}"), t, 0, 5, 50) for i, t in enumerate(tokens))
    queue = tuple(RunningRequest(RequestId(f"{name}q{i}"), t, 0, 0, 50) for i, t in enumerate(waiting))
    return WorkerLoad(WorkerId(name), state, capacity, running, queue, STEP)


def at(now_s, *workers, wanted=None, **more):
    return Snapshot(now_s, workers, len(workers) if wanted is None else wanted, **more)


def test_an_unbalanced_fleet_is_balanced_move_by_move_and_then_left_alone():
    held = {"a": [300, 250, 200, 150], "b": [50]}
    state, moves = State(), 0
    for beat in range(20):
        fleet = [worker(name, tuple(sizes)) for name, sizes in held.items()]
        state, actions = tick(Settings(MoveSettings(rest_s=0.0)), state, at(beat, *fleet))
        for action in actions:
            assert isinstance(action, Migrate)
            source = action.request[0]
            held[action.target].append(held[source].pop(int(action.request[1:])))
            moves += 1
    assert 0 < moves <= 3
    assert max(map(sum, held.values())) < 900


def test_the_same_sight_gives_the_same_answer_and_the_state_is_not_touched():
    fleet = worker("a", (500, 450)), worker("b", (10,))
    state = State()
    assert tick(Settings(), state, at(0.0, *fleet)) == tick(Settings(), state, at(0.0, *fleet))
    assert state == State()


def test_what_was_asked_to_move_is_not_asked_again_until_it_has_rested():
    fleet = worker("a", (500, 450)), worker("b", (10,))
    state, first = tick(Settings(), State(), at(0.0, *fleet))
    state, second = tick(Settings(), state, at(0.1, *fleet))
    assert first[0].request != second[0].request
    state, _ = tick(Settings(), state, at(0.2, *fleet))
    _, later = tick(Settings(), state, at(9.0, *fleet))
    assert later[0].request == first[0].request


def test_what_is_on_the_move_stays_and_a_worker_at_an_end_of_a_move_takes_no_part():
    fleet = worker("a", (500, 450)), worker("b", (10,))
    for settings in (Settings(), Settings(moves=None)):
        assert len(tick(settings, State(), at(0.0, *fleet))[1]) == 1
        for part in ({"moving": frozenset({"a0", "a1"})}, {"busy": frozenset("a")}, {"busy": frozenset("b")}):
            assert tick(settings, State(), at(0.0, *fleet, **part))[1] == [], part


def test_every_worker_is_at_one_end_of_one_move_at_most():
    fleet = [worker(f"a{i}", (500, 450)) for i in range(3)] + [worker(f"b{i}", (10,)) for i in range(5)]
    _, actions = tick(Settings(), State(), at(0.0, *fleet))
    ends = [end for a in actions for end in (a.request[:2], a.target)]
    assert len(ends) == len(set(ends)) == 6


def test_every_action_says_why():
    fleet = worker("a", (500, 450), (80,)), worker("b", (10,)), worker("c", (20, 10), state="draining")
    settings = Settings(load=LoadSettings(1, 8, rise_s=0.0, high=0.32))
    _, actions = tick(settings, State(), at(0.0, *fleet))
    assert len(actions) >= 2
    assert all(action.reason for action in actions)


def test_nobody_there_is_no_reason_to_act():
    assert tick(Settings(), State(), at(0.0))[1] == []
    assert tick(by_load(hold_s=0.0), State(), at(0.0, wanted=2))[1] == []


def test_a_snapshot_without_figures_holds_the_fleet():
    unknown = worker("a", capacity=0), worker("b", capacity=0)
    state, actions = tick(by_load(hold_s=0.0), State(), at(50.0, *unknown))
    assert actions == []
    assert state.by_load is None


def test_the_fleet_grows_once_load_was_high_for_long_enough():
    fleet = worker("a", (800,)), worker("b", (900,))
    state, actions = tick(STILL, State(), at(0.0, *fleet))
    assert actions == []
    state, actions = tick(STILL, state, at(10.0, *fleet))
    assert [a.workers for a in actions if isinstance(a, Scale)] == [3]
    starting = at(11.0, *fleet, worker("c", state="starting", capacity=0), wanted=3)
    assert tick(STILL, state, starting)[1] == []


def test_the_fleet_grows_by_as_many_as_the_load_asks_for():
    # 5,100 tokens of queue and KV: seven workers hold them at 75 %, five at 102 %.
    fleet = worker("a", (800,), (2000,)), worker("b", (900,), (1400,))
    at_once = by_load(rise_s=0.0)
    _, actions = tick(at_once, State(), at(0.0, *fleet))
    assert [a.workers for a in actions if isinstance(a, Scale)] == [7]
    _, actions = tick(by_load(rise_s=0.0, high=1.02), State(), at(0.0, *fleet))
    assert [a.workers for a in actions if isinstance(a, Scale)] == [5]


def test_the_fleet_shrinks_to_what_the_hold_needed_at_most():
    # In the middle of 30 % and 75 % a worker holds 525 tokens.
    busier, idler = (
        [worker("a", (1050,)), *map(worker, "bcdef")],
        [worker("a", (100,)), *map(worker, "bcdef")],
    )
    state, _ = tick(STILL, State(), at(0.0, *busier))
    state, actions = tick(STILL, state, at(9.0, *idler))
    assert actions == []
    _, actions = tick(STILL, state, at(10.0, *idler))
    assert [a.workers for a in actions if isinstance(a, Scale)] == [2]


def test_the_fleet_shrinks_from_two_to_one_when_nothing_comes():
    fleet = worker("a"), worker("b")
    state, _ = tick(STILL, State(), at(0.0, *fleet))
    _, actions = tick(STILL, state, at(10.0, *fleet))
    assert [a.workers for a in actions if isinstance(a, Scale)] == [1]


def test_the_bounds_hold_whatever_the_load():
    outside = at(0.0, worker("a"), wanted=12)
    assert [a.workers for a in tick(STILL, State(), outside)[1]] == [8]


def test_of_several_types_load_grows_the_cheapest_for_its_capacity_and_shrinks_the_dearest_it_can():
    types = made_type("big", 3.0, profile_of(STEP, 4000, 64), limit=1), made_type("small", 1.0, None)
    scaling = ScalingSettings(TargetSettings(None, None), worker_types=types)
    settings = replace(by_load(hold_s=0.0, rise_s=0.0), scaling=scaling)
    big = replace(worker("b", (3600,), capacity=4000), kind="big TP1")
    small = [replace(worker(f"s{i}", (900,)), kind="small TP1") for i in range(2)]

    def asked(*workers, wanted):
        seen = at(0.0, *workers, wanted=sum(wanted.values()), wanted_kinds=wanted, arrivals=0)
        return [a for a in tick(settings, State(), seen)[1] if isinstance(a, Scale)]

    (more,) = asked(*small, wanted={"small TP1": 2})
    assert (more.workers, more.kinds) == (3, {"big TP1": 1, "small TP1": 2})
    assert more.reason.endswith(": 1 big TP1 + 2 small TP1")
    (most,) = asked(big, *small, wanted={"big TP1": 1, "small TP1": 2})  # no more of the big to be had
    assert most.kinds["big TP1"] == 1
    assert most.kinds["small TP1"] == most.workers - 1 > 2
    idle = replace(worker("b", (500,), capacity=4000), kind="big TP1")
    (fewer,) = asked(idle, *[replace(w, requests=()) for w in small], wanted={"big TP1": 1, "small TP1": 2})
    assert fewer.kinds == {"big TP1": 1, "small TP1": 0}, "the small are dearer for what they hold"


def test_thresholds_the_wrong_way_round_are_refused():
    with pytest.raises(BadInput, match="low < high"):
        LoadSettings(1, 8, high=0.2, low=0.3)
    with pytest.raises(BadInput, match="least <= most"):
        LoadSettings(3, 2)


def by_demand(wanted, counts, state=None, fixed=None, start_s=0.0):
    """Ten heartbeats a bin of 10 s; the wanted numbers as they go, and the state."""
    settings = Settings(
        moves=None,
        shed=None,
        scaling=ScalingSettings(TargetSettings(0.5, 0.2, high=8), StabilizationWindow(0.0, 60.0)),
    )
    state, seen, now_s = state or State(), [], start_s
    for count in counts:
        for part in range(10):
            now_s += 1.0
            arrivals = None if count is None else count // 10 + (part < count % 10)
            snapshot = replace(at(now_s, worker("a"), wanted=wanted), arrivals=arrivals, fixed=fixed)
            state, actions = tick(settings, state, snapshot)
            for action in actions:
                assert action.reason
                wanted = action.workers
        seen.append(wanted)
    return seen, state


def test_demand_that_doubles_is_followed_within_three_bins_and_silence_brings_it_down():
    seen, state = by_demand(1, [40] * 6)
    assert seen[-1] == 3  # 0.5 · 4/s + 0.2, with what a minute leaves unsure
    seen, state = by_demand(3, [80] * 8, state, start_s=60.0)
    assert seen[3] == 5
    seen, _ = by_demand(5, [0] * 20, state, start_s=140.0)
    assert seen[-1] == 1


def test_until_there_is_a_line_the_load_says_how_many():
    unknown = replace(STILL, scaling=ScalingSettings(TargetSettings(None, None)))
    state, seen = State(), []
    for now_s in (0.0, 5.0, 10.0):
        full = at(now_s, worker("a", (900,)), arrivals=5)
        state, actions = tick(unknown, state, full)
        seen += [a.workers for a in actions]
    assert seen == [2]
    # An operator's number is no business of the load's.
    state, actions = tick(
        unknown,
        State(by_load=Stabilized(1, above_since_s=0.0, least_above=2)),
        replace(full, now_s=20.0, fixed=1),
    )
    assert actions == []


def test_a_change_names_the_change_point_before_it():
    settings = Settings(
        moves=None,
        shed=None,
        scaling=ScalingSettings(TargetSettings(0.5, 0.2, high=8), StabilizationWindow(0.0, 60.0)),
    )
    state, scaled, wanted = State(), [], 3
    for now_s in range(1, 401):
        arrivals = 4 if now_s <= 200 else 12
        seen = replace(at(float(now_s), worker("a"), wanted=wanted), arrivals=arrivals)
        state, actions = tick(settings, state, seen)
        scaled += [(now_s, a) for a in actions]
        wanted = actions[0].workers if actions else wanted
    first, last = scaled[0][1].facts["seen"], scaled[-1][1].facts["seen"]
    assert "before_rps" not in first
    at_s, _ = scaled[-1]
    assert at_s > 200
    assert last["before_rps"] == pytest.approx(4.0, rel=0.05)
    assert last["rate_rps"] > 6.0  # it acts before the regime is all of the new rate
    assert last["changed_s_ago"] == pytest.approx(at_s - 200, abs=40.0)


def test_a_change_says_what_was_seen_what_was_compared_and_what_it_costs():
    settings = Settings(
        moves=None,
        shed=None,
        scaling=ScalingSettings(TargetSettings(0.5, 0.2, high=8), worker_types=(made_type("a", 3.0),)),
    )
    state, told = State(), []
    for now_s in range(1, 40):
        seen = replace(at(float(now_s), worker("a"), wanted=1), arrivals=6, cold_start_s=45.0)
        state, actions = tick(settings, state, seen)
        told += actions
    facts = told[0].facts
    assert facts["seen"]["rate_rps"] == 6.0
    assert facts["compared"]["regime"] > 3.0
    assert facts["cost"] == {
        "workers": told[0].workers - 1,
        "ready_after_s": 45.0,
        "usd_per_h": 3.0 * (told[0].workers - 1),
    }


def test_a_burst_is_followed_within_its_bin_and_a_backlog_is_caught_up():
    _, state = by_demand(1, [40] * 6)
    settings = Settings(moves=None, shed=None, scaling=ScalingSettings(TargetSettings(0.5, 0.2, high=20)))
    burst = replace(at(61.0, worker("a"), wanted=3), arrivals=150)
    _, actions = tick(settings, state, burst)
    assert [a.workers for a in actions] == [8]
    assert "154 arrivals" in actions[0].reason
    waiting = replace(at(61.0, worker("a"), wanted=3), arrivals=4, waiting_requests=240)
    _, actions = tick(settings, state, waiting)
    assert [a.workers for a in actions] == [7]  # 4/s, and 240 within half a minute


def test_nothing_is_let_go_while_requests_wait_or_what_runs_needs_it():
    _, state = by_demand(1, [40] * 6)
    settings = Settings(
        moves=None,
        shed=None,
        scaling=ScalingSettings(TargetSettings(0.5, 0.2), StabilizationWindow(0.0, 0.0)),
    )
    fleet = [replace(worker(n, (10,) * 4), max_seqs=4) for n in "abcdef"]
    for waiting, wanted in ((5, []), (0, [])):
        seen = replace(at(61.0, *fleet), arrivals=4, waiting_requests=waiting)
        assert [a.workers for a in tick(settings, state, seen)[1]] == wanted
    idle = [replace(worker(n, (10,)), max_seqs=4) for n in "abcdef"]
    for waiting, wanted in ((0, [3]), (1, [])):
        seen = replace(at(61.0, *idle), arrivals=4, waiting_requests=waiting)
        assert [a.workers for a in tick(settings, state, seen)[1]] == wanted


@pytest.mark.parametrize("arrivals", [None, 4.0])
def test_by_load_too_nothing_is_let_go_while_requests_wait(arrivals):
    fleet = worker("a", (100,)), worker("b"), worker("c")
    for waiting, wanted in ((0, [1]), (1, [])):
        state, counts = State(), []
        for beat in range(12):
            seen = at(beat, *fleet, arrivals=arrivals, waiting_requests=waiting)
            state, actions = tick(STILL, state, seen)
            counts += [a.workers for a in actions]
        assert counts[:1] == wanted


def test_an_outage_of_the_metrics_keeps_the_fleet():
    _, state = by_demand(1, [100] * 6)
    seen, _ = by_demand(6, [None] * 30, state, start_s=60.0)
    assert set(seen) == {6}


def test_a_hand_edited_number_is_where_the_scaler_goes_on_from_and_a_fixed_one_stays():
    _, state = by_demand(1, [40] * 6)
    seen, state = by_demand(7, [40] * 4, state, start_s=60.0)
    assert seen[0] == 7  # not pulled back at once: it is held down first
    seen, _ = by_demand(7, [40] * 30, state, fixed=2, start_s=100.0)
    assert set(seen) == {2}


@pytest.mark.parametrize(("cold_start_s", "workers"), [(60.0, 2.6), (600.0, 6.2), (6000.0, 6.2)])
def test_of_a_rise_that_is_foreseen_a_launch_now_covers_what_has_come_by_then(cold_start_s, workers):
    _, state = by_demand(1, [40] * 6)
    coming = Forecast(12.0, "seasonal", 0.6, 0.1, 0.6, 99)
    state = replace(state, scaling=replace(state.scaling, far=Outlook(coming=coming)))
    ahead = ForecastSettings(bin_s=600.0)
    settings = Settings(
        moves=None, shed=None, scaling=ScalingSettings(TargetSettings(0.5, 0.2, high=20), ahead=ahead)
    )
    seen = replace(at(61.0, worker("a"), wanted=1), arrivals=4, cold_start_s=cold_start_s)
    _, actions = tick(settings, state, seen)
    # 4/s now, 12/s in ten minutes.
    assert actions[0].facts["compared"]["forecast"] == pytest.approx(workers)


def test_traffic_that_keeps_rising_is_covered_a_cold_start_ahead_by_short_bins():
    target = TargetSettings(0.5, 0.2, high=40)
    near = ForecastSettings(bin_s=30.0, quantile=0.7)
    # Each 30 s a twentieth more than before: the mean of a regime is behind, what bins rose by is not.
    counts = [round(40 * 1.05 ** (n // 3)) for n in range(180)]
    ends = []
    for scaling in (ScalingSettings(target), ScalingSettings(target, near=near)):
        settings, state, wanted = Settings(moves=None, shed=None, scaling=scaling), State(), 1
        for n, count in enumerate(counts):
            seen = replace(at(10.0 * n + 5.0, wanted=wanted), arrivals=count, cold_start_s=60.0)
            state, actions = tick(settings, state, seen)
            wanted = next((a.workers for a in actions if isinstance(a, Scale)), wanted)
        ends.append(wanted)
    without, with_near = ends
    assert with_near > without
    assert with_near >= 0.5 * counts[-1] / 10.0
