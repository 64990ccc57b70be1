"""The scaler: demand from arrivals, traffic phases, a target that lasts, and the steps there.

Among them one regression each for what went wrong in other autoscalers.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_types import SLO, made_type

from controlplane.errors import BadInput
from controlplane.scaler.autoscale import scale
from controlplane.scaler.mix import MixSettings
from controlplane.scaler.reconcile import Drain, Launch, Standing, Stop, Undrain, steps_to
from controlplane.scaler.state import Scaling, ScalingSettings, rps_now
from controlplane.scaler.target import (
    StabilizationWindow,
    Stabilized,
    TargetSettings,
    other_rates,
    stabilize,
    target,
)
from controlplane.scaler.traffic import (
    Demand,
    Regime,
    Regimes,
    change_points,
    follow,
    noise_of,
    observe,
    recent_rps,
)
from controlplane.snapshot import Snapshot
from controlplane.types import ClassArrivals, WorkerId

LINE = TargetSettings(0.5, 0.2)


def counted(counts, bin_s=10.0, seen=None):
    """Demand with these bins closed, looked at at every bin's start."""
    demand = observe(seen or Demand(bin_s), 0.0, 0)
    for n, count in enumerate(counts):
        demand = observe(demand, n * bin_s + bin_s / 2, count)
        demand = observe(demand, (n + 1) * bin_s, None if count is None else 0)
        if count is None:
            # The next bin begins with a look again.
            demand = Demand(bin_s, demand.keep, demand.first_bin, demand.closed, 0, demand.seen_s)
    return demand


def standing(name, state="serving", since_s=0.0, requests=0):
    return Standing(WorkerId(name), state, since_s, requests)


def steps(wanted, *workers, now_s=100.0):
    return steps_to(wanted, workers, now_s, 60.0, "asked")


# --- demand -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(0, 50)), max_size=60))
def test_no_arrival_is_lost_or_counted_twice(looks):
    demand, now_s, total = observe(Demand(10.0), 0.0, 0), 0.0, 0
    for gap_s, arrivals in looks:
        now_s += gap_s
        total += arrivals
        demand = observe(demand, now_s, arrivals)
    assert sum(demand.known) + (demand.open_count or 0) == total
    assert len(demand.closed) == int(now_s // 10.0)


def test_no_traffic_is_zero_and_no_news_is_unknown():
    assert counted([0, 0]).closed == (0, 0)
    assert counted([5, None, 5]).closed == (5, None, 5)
    assert observe(observe(Demand(10.0), 0.0, 0), 55.0, math.nan).closed == (None,) * 5
    assert observe(observe(Demand(10.0), 0.0, 0), 55.0, 0).closed == (0,) * 5
    assert observe(observe(Demand(10.0), 0.0, 0), 55.0, 7).closed == (None,) * 5


def test_only_the_newest_bins_are_remembered():
    demand = counted(range(20), seen=Demand(10.0, keep=6))
    assert demand.closed == tuple(range(14, 20))
    assert demand.first_bin == 14


@pytest.mark.parametrize(("now_s", "arrivals"), [(-1.0, 0), (5.0, -1), (5.0, math.inf)])
def test_looks_that_make_no_sense_are_refused(now_s, arrivals):
    with pytest.raises(BadInput, match="demand"):
        observe(observe(Demand(), 1.0, 0), now_s, arrivals)


# --- change points ------------------------------------------------------------------------------------------


def test_a_step_is_found_where_it_is():
    rng = np.random.default_rng(1)
    counts = np.concatenate((rng.poisson(50, 60), rng.poisson(100, 40)))
    assert change_points(counts.tolist()) == [60]


def test_steady_poisson_traffic_hardly_ever_changes():
    false = [change_points(np.random.default_rng(s).poisson(40, 200).tolist()) for s in range(40)]
    assert sum(map(bool, false)) <= 1


def test_bursty_traffic_is_judged_by_its_own_noise():
    rng = np.random.default_rng(2)
    bursty = rng.poisson(rng.gamma(2.0, 20.0, 150)).tolist()
    assert noise_of(bursty) > 5
    assert change_points(bursty) == []
    assert noise_of(rng.poisson(40, 150).tolist()) == pytest.approx(1.0, abs=0.6)


def test_a_rise_is_followed_within_a_minute_and_the_past_is_not_searched_again():
    rng = np.random.default_rng(3)
    regimes, demand, found_at = Regimes(), observe(Demand(10.0), 0.0, 0), None
    for n in range(100):
        demand = observe(demand, n * 10.0 + 5, int(rng.poisson(30 if n < 60 else 75)))
        demand = observe(demand, (n + 1) * 10.0, 0)
        regimes = follow(regimes, demand)
        if found_at is None and regimes.current.start_bin >= 59:
            found_at = n
    assert 60 <= found_at <= 66
    assert regimes.current.rate_rps == pytest.approx(7.5, rel=0.1)
    assert regimes.before_rps == pytest.approx(3.0, rel=0.1)
    # A rise found early may be placed a bin or two off, and placed anew.
    assert all(59 <= start <= 62 for start in regimes.starts)
    assert follow(regimes, demand) is regimes


def test_unknown_bins_are_no_dip():
    demand = counted([40] * 10 + [None] * 10 + [40] * 10)
    regimes = follow(Regimes(), demand)
    assert regimes.starts == ()
    assert regimes.before_rps is None
    assert regimes.current.rate_rps == pytest.approx(4.0)


def test_a_longer_regime_is_surer_of_its_rate():
    short, long = (Regime(0, 4.0, bins).upper_rps(10.0, 1.64) for bins in (3, 300))
    assert short > long > 4.0


# --- the target, and how long it must last ------------------------------------------------------------------


def decide(settings, regime, **more):
    return target(settings, regime, 10.0, **({"stale": False} | more))


def test_the_target_is_the_line_at_the_upper_end_of_the_rate():
    sure = Regime(0, 10.0, 10_000)
    assert decide(LINE, sure).workers == 6  # 5.2 and a little
    assert "10 requests/s" in decide(LINE, sure).reason


def test_zero_arrivals_scale_down_to_the_least_and_to_zero_where_that_is_allowed():
    silent = follow(Regimes(), counted([0] * 12)).current
    assert decide(LINE, silent).workers == 1
    assert decide(TargetSettings(0.5, 0.2, low=2), silent).workers == 2
    assert decide(TargetSettings(0.5, 0.2, low=2, to_zero=True), silent).workers == 0


def test_missing_or_stale_metrics_hold():
    assert decide(LINE, None).workers is None
    assert decide(LINE, Regime(0, 10.0, 100), stale=True).workers is None
    held = stabilize(StabilizationWindow(down_s=0.0), Stabilized(7), None, 50.0)
    assert held.wanted == 7


def test_traffic_that_nothing_was_learned_of_holds_rather_than_shrinks():
    unknown = decide(TargetSettings(None, None), Regime(0, 10.0, 100))
    assert unknown.workers is None
    assert "no line" in unknown.reason


def test_overload_whose_completions_plateau_still_scales_up():
    # Arrivals double; what completes stays where it is, and nobody asks it.
    regimes = follow(Regimes(), counted([100] * 30 + [200] * 10))
    assert decide(LINE, regimes.current).workers > decide(LINE, Regime(0, 10.0, 300)).workers


def test_a_ttft_that_no_worker_can_meet_asks_for_no_more_workers():
    # The target knows arrivals only: slow requests are no reason, whatever their latency.
    assert decide(LINE, Regime(0, 1.0, 10_000)).workers == 1


def test_two_workers_become_one():
    assert decide(LINE, Regime(0, 1.5, 10_000)).workers == 1
    held = stabilize(StabilizationWindow(down_s=60.0), Stabilized(2), 1, 0.0)
    held = stabilize(StabilizationWindow(down_s=60.0), held, 1, 60.0)
    assert held.wanted == 1
    assert steps(1, standing("a", requests=3), standing("b", requests=2))[0].worker == "b"


def test_recent_work_counts_by_rate_and_lengths_once_the_phase_cannot_explain_it():
    demand, phase = counted([50] * 12), Regime(0, 5.0, 12)
    assert [recent_rps(demand, phase, heavier, 2.0) for heavier in (1.0, 1.1, 1.3)] == [5.0, 5.0, 6.5]
    assert recent_rps(demand, phase, 1.1, 1.0) == pytest.approx(5.5)
    asked = {rate.name: rate.rps for rate in other_rates(demand, phase, 0, None, None, 1.0, 6.5)}
    assert asked == {"recent": 6.5}
    assert other_rates(demand, phase, 0, None, None, 1.0, 4.0) == []


def test_longer_prompts_at_the_same_rate_ask_for_workers_before_the_averages_follow():
    small, state = made_type("small"), Scaling()
    settings = ScalingSettings(
        TargetSettings(1.0, 0.0, 1, 99),
        worker_types=(small,),
        learned_at=ClassArrivals(SLO, 1.0, 200.0, 100.0),
    )
    for look in range(270):
        prompt = 200.0 if look < 240 else 800.0
        arrived = ClassArrivals(SLO, 20.0, 20.0 * prompt, 2000.0)
        state, _ = scale(settings, state, Snapshot(2.0 * look, (), 10, arrivals=20, by_class=(arrived,)))
    phase, rule = state.regimes.current, state.rule
    assert phase.rate_rps == pytest.approx(10.0, rel=0.01)
    assert rps_now(settings, state, 2.0)[0] > 1.2 * phase.rate_rps > phase.upper_rps(10.0, 1.64)
    assert rule.workers >= 1.2 * rule.line.workers_per_rps * phase.rate_rps


def test_limit_and_budget_are_said():
    limited = decide(TargetSettings(1.0, 0.0, high=4), Regime(0, 10.0, 10_000))
    assert limited.workers == 4
    assert "no more than 4" in limited.reason
    for one, fleet in (
        (made_type("a", 1.2), MixSettings(budget_usd_per_h=3.6)),
        (made_type("a", tp_degree=2), MixSettings(max_gpus=7)),
        (made_type("a", limit=3), MixSettings()),
    ):
        limits = ScalingSettings(TargetSettings(1.0, 0.0), worker_types=(one,), mix=fleet).limits
        assert decide(limits, Regime(0, 10.0, 10_000)).workers == 3


def test_an_operators_number_is_respected_until_it_is_taken_back():
    busy = Regime(0, 10.0, 10_000)
    assert decide(LINE, busy, fixed=2).workers == 2
    assert decide(LINE, None, fixed=2).workers == 2
    assert decide(LINE, busy).workers == 6


def test_a_dip_shorter_than_the_hold_is_not_followed_and_a_rise_is_at_once():
    settings, held = StabilizationWindow(up_s=0.0, down_s=60.0), Stabilized(5)
    for now_s, asked in ((0.0, 3), (30.0, 2), (59.0, 3), (60.0, 5), (61.0, 3), (119.0, 3)):
        held = stabilize(settings, held, asked, now_s)
        assert held.wanted == 5
    assert stabilize(settings, held, 9, 120.0).wanted == 9


def test_after_the_hold_the_fleet_goes_to_the_nearest_target_it_saw():
    settings, held = StabilizationWindow(down_s=60.0), Stabilized(8)
    for now_s, asked in ((0.0, 3), (30.0, 6), (60.0, 2)):
        held = stabilize(settings, held, asked, now_s)
    assert held.wanted == 6


@given(st.lists(st.integers(4, 6), min_size=2, max_size=60), st.floats(30.0, 300.0))
def test_a_target_that_flickers_never_moves_the_fleet_more_than_once_a_hold(asked, down_s):
    settings, held, changes = StabilizationWindow(up_s=down_s, down_s=down_s), Stabilized(5), []
    for n, number in enumerate(asked):
        before = held.wanted
        held = stabilize(settings, held, number, n * 10.0)
        if held.wanted != before:
            changes.append(n * 10.0)
    assert all(b - a >= down_s for a, b in pairwise(changes))


# --- the steps ----------------------------------------------------------------------------------------------


def test_starting_workers_count_and_are_not_launched_twice():
    assert steps(3, standing("a"), standing("b", "starting", 90.0), standing("c", "starting", 95.0)) == []
    assert steps(4, standing("a"), standing("b", "starting", 90.0)) == [Launch(2, "asked")]


def test_a_worker_that_never_gets_ready_is_given_up_and_replaced_if_still_wanted():
    stuck = standing("b", "starting", 0.0)
    assert [type(s) for s in steps(2, standing("a"), stuck)] == [Stop, Launch]
    # The demand is gone: it is given up all the same, and nothing takes its place.
    assert [(type(s), s.worker) for s in steps(1, standing("a"), stuck)] == [(Stop, "b")]


def test_what_is_draining_serves_again_before_anything_is_launched():
    seen = steps(
        3, standing("a"), standing("b", "draining", requests=1), standing("c", "draining", requests=9)
    )
    assert [(type(s), s.worker) for s in seen] == [(Undrain, "c"), (Undrain, "b")]


def test_scaling_in_gives_up_starts_first_and_then_drains_the_emptiest():
    fleet = standing("a", requests=5), standing("b", requests=1), standing("c", "starting", 80.0)
    assert [(type(s), s.worker) for s in steps(1, *fleet)] == [(Stop, "c"), (Drain, "b")]


def test_a_draining_worker_with_long_streams_is_never_stopped_until_it_is_empty():
    assert steps(1, standing("a"), standing("b", "draining", 0.0, requests=50), now_s=1e6) == []
    assert [type(s) for s in steps(1, standing("a"), standing("b", "draining"))] == [Stop]


def test_zero_wanted_drains_everything_and_launches_nothing():
    seen = steps(0, standing("a", requests=2), standing("b"))
    assert [(type(s), s.worker) for s in seen] == [(Drain, "b"), (Drain, "a")]
    assert steps(0) == []


def test_workers_an_operator_added_or_took_are_only_counted():
    assert steps(2, standing("a"), standing("theirs")) == []
    assert steps(2, standing("a")) == [Launch(1, "asked")]


@given(
    st.integers(0, 6),
    st.lists(
        st.tuples(st.sampled_from(["serving", "starting", "draining"]), st.floats(0, 99), st.integers(0, 3)),
        max_size=6,
    ),
)
def test_the_steps_lead_to_what_is_wanted(wanted, shapes):
    fleet = [standing(f"w{i}", *shape) for i, shape in enumerate(shapes)]
    taken = steps(wanted, *fleet)
    named = [s.worker for s in taken if not isinstance(s, Launch)]
    assert len(named) == len(set(named))
    assert all(s.reason for s in taken)
    there = {s.worker for s in fleet if s.state != "draining"}
    there |= {s.worker for s in taken if isinstance(s, Undrain)}
    there -= {s.worker for s in taken if isinstance(s, Drain | Stop)}
    assert len(there) + sum(s.workers for s in taken if isinstance(s, Launch)) == wanted
    lost = {s.worker for s in taken if isinstance(s, Stop)}
    assert all(s.requests == 0 or s.state == "starting" for s in fleet if s.worker in lost)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Demand(0.0),
        lambda: StabilizationWindow(down_s=-1.0),
        lambda: TargetSettings(1.0, None),
        lambda: TargetSettings(-1.0, 0.0),
        lambda: TargetSettings(1.0, 0.0, low=3, high=2),
        lambda: decide(LINE, None, fixed=-1),
        lambda: follow(Regimes(), counted([1] * 9), strictness=0.0),
        lambda: steps_to(-1, (), 0.0, 1.0, ""),
    ],
)
def test_settings_that_make_no_sense_are_refused(make):
    with pytest.raises(BadInput):
        make()


def test_what_is_needed_falls_with_the_next_whole_bin_and_what_is_wanted_with_its_window():
    settings = ScalingSettings(TargetSettings(0.33, 0.3, 1, 6), StabilizationWindow(0.0, 80.0))
    state, wanted, rng = Scaling(), 1, np.random.default_rng(0)
    needed_at, wanted_at = {}, {}
    for look in range(800):
        now_s = look * 0.5
        arrivals = float(rng.poisson(4.0 if now_s < 200.0 else 0.5))
        state, change = scale(settings, state, Snapshot(now_s, (), wanted, arrivals=arrivals))
        wanted = wanted if change is None else change.workers
        assert state.needed is None or state.needed <= wanted
        needed_at[now_s], wanted_at[now_s] = state.needed, wanted
    assert {wanted_at[s] for s in (100.0, 199.5, 220.0)} == {4}
    assert needed_at[100.0] == 4
    assert needed_at[220.0] == 1
    assert wanted_at[399.5] == 1
