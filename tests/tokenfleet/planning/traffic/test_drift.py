"""Drift of the traffic's levels: the drift that a trace shows, and the drift of a draw."""

import numpy as np
import pytest
from planning_builders import planned, poisson, said_of

from controlplane.workload import Workload
from tokenfleet.planning.result import uncertainty
from tokenfleet.planning.traffic import drift
from tokenfleet.planning.traffic.drift import (
    INDEPENDENT,
    SPANS,
    USUAL,
    WEIGHT,
    Drift,
    drift_of,
    drift_seen,
    shown,
)
from tokenfleet.report.plan_json import plan_json


def at_levels(rates_rps: list[float], each_s: float = 300.0, seed: int = 0) -> Workload:
    """Poisson arrivals at one rate after the other, all requests alike."""
    rng = np.random.default_rng(seed)
    parts = [
        i * each_s + np.sort(rng.uniform(0, each_s, rng.poisson(r * each_s))) for i, r in enumerate(rates_rps)
    ]
    arrival_s = np.concatenate(parts)
    return Workload(arrival_s, np.full(len(arrival_s), 100), np.full(len(arrival_s), 50))


def level(workload: Workload, which: int = 0) -> float:
    """The standard deviation of a level's drift that the trace alone shows."""
    return float(np.sqrt(drift_seen(workload)[0][which, which]))


def test_traffic_that_stays_what_it_is_shows_next_to_no_drift() -> None:
    shown = [level(at_levels([10.0] * SPANS, seed=s)) for s in range(40)]
    # Chance alone would make spans of 3,000 requests differ by 2.6 %.
    assert np.median(shown) < 0.013
    assert np.mean([s == 0.0 for s in shown]) > 0.2


def test_levels_that_scatter_show_as_much_drift_as_stretches_of_them_differ() -> None:
    rng = np.random.default_rng(1)
    shown = [
        level(at_levels(list(10 * np.exp(0.2 * rng.standard_normal(SPANS))), each_s=60.0, seed=s))
        for s in range(60)
    ]
    # Two levels differ by sqrt(2) of their scatter.
    assert np.sqrt(np.mean(np.square(shown))) == pytest.approx(0.2 * np.sqrt(2), rel=0.1)


def test_a_trend_is_shape_and_no_drift() -> None:
    steady_growth = at_levels(list(10 * np.exp(np.linspace(0, 2, 240))), each_s=30.0)
    assert level(steady_growth) < 0.03  # from one span to the next it grows by 0.083


def test_rate_and_lengths_drift_together_where_they_changed_together() -> None:
    levels = np.exp(0.3 * np.random.default_rng(4).standard_normal(SPANS))
    workload = at_levels(list(10 / levels), seed=3)
    span = np.minimum(workload.arrival_s // 300.0, SPANS - 1).astype(int)
    outputs = np.round(50 * levels[span]).astype(np.int64)
    workload = Workload(workload.arrival_s, workload.prompt_tokens, outputs)
    seen, _ = drift_seen(workload)
    assert seen[0, 2] / np.sqrt(seen[0, 0] * seen[2, 2]) < -0.95
    assert level(workload, 1) < 0.02


def per_level(drift: Drift) -> np.ndarray:
    """Standard deviations of log rate, log prompts and log outputs."""
    return np.sqrt((drift.spread**2).sum(axis=1))


@pytest.mark.parametrize("scatter", [0.1, 0.4])
def test_what_a_trace_shows_is_joined_with_what_is_usual_and_outweighs_it_when_long(
    scatter: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "shown", lambda _: "changes")
    rng = np.random.default_rng(6)
    off = []
    for spans in (SPANS, 10 * SPANS):
        levels = list(2 * np.exp(scatter * rng.standard_normal(spans)))
        workload = at_levels(levels, each_s=3600.0 if spans > SPANS else 300.0)
        found, seen = drift_of(workload), level(workload)
        assert min(seen, USUAL) <= per_level(found)[0] <= max(seen, USUAL)
        off.append(abs(per_level(found)[0] ** 2 - seen**2) / abs(USUAL**2 - seen**2))
    assert off[0] == pytest.approx(WEIGHT / (WEIGHT + INDEPENDENT * (SPANS - 2)), rel=0.1)
    assert off[1] < 0.08


def test_hours_of_silence_are_no_drift_of_the_others() -> None:
    levels = np.full(168, 2.0)
    levels[[30, 31, 77, 120]] = 1e-3
    outages = at_levels(list(levels), each_s=3600.0)
    nights = at_levels(list(np.where(np.arange(168) % 24 < 8, 1e-3, 2.0)), each_s=3600.0)
    assert shown(nights) == "changes"
    for workload in (outages, nights):
        assert per_level(drift_of(workload))[0] < USUAL


def test_a_draw_keeps_the_requests_and_makes_none_longer_than_the_longest() -> None:
    workload = poisson(requests=300)
    drift = Drift(np.diag([0.3, 0.5, 0.5]), 6)
    for seed in range(20):
        drawn = drift.drawn(workload, np.random.default_rng(seed))
        assert len(drawn) == len(workload)
        for name in ("prompt_tokens", "output_tokens"):
            assert getattr(drawn, name).min() >= 1
            assert getattr(drawn, name).max() <= getattr(workload, name).max()


def test_draws_are_off_by_the_drift_and_by_more_for_being_known_so_little() -> None:
    workload = poisson(requests=300)
    drift = Drift(np.diag([0.2, 0.0, 0.0]), 5)
    rates = [
        drift.drawn(workload, np.random.default_rng(s)).rate_rps / workload.rate_rps for s in range(4000)
    ]
    # Student's t with 5 degrees of freedom: variance 5/3.
    assert np.std(np.log(rates)) == pytest.approx(0.2 * np.sqrt(5 / 3), rel=0.1)


@pytest.mark.parametrize("requests", [1, 2, 100])
def test_a_trace_too_short_to_tell_drifts_as_is_usual(requests: int) -> None:
    workload = poisson(requests=requests)
    assert not drift_seen(workload)[0].any()
    found = drift_of(workload)
    assert per_level(found) == pytest.approx([USUAL, 0.0, 0.0])
    drawn = found.drawn(workload, np.random.default_rng(0))
    assert np.array_equal(drawn.prompt_tokens, workload.prompt_tokens)


def test_a_long_trace_is_judged_by_its_hours() -> None:
    _, independent = drift_seen(at_levels([1.0] * 48, each_s=3600.0))
    assert independent == pytest.approx(0.6 * 46, rel=0.01)


def test_a_plan_says_how_much_of_its_doubt_comes_from_where() -> None:
    shares = uncertainty(arrivals=0.01, drift=0.02, coefficients=0.0).shares
    assert list(shares) == ["drift", "arrivals"]
    assert shares == pytest.approx({"drift": 0.8, "arrivals": 0.2})
    assert uncertainty(0.0, 0.0, 0.0).shares == {}


def changing(rate_rps: float) -> Workload:
    """Traffic whose level changes by a tenth from one span to the next."""
    levels = np.exp(0.1 * np.random.default_rng(1).standard_normal(SPANS))
    return at_levels(list(rate_rps * levels / levels.mean()), each_s=20.0)


def test_a_plan_of_steady_traffic_hedges_nothing() -> None:
    plan = planned(at_levels([16.0] * SPANS, each_s=20.0), explained=True)
    assert plan.doubt is not None
    assert plan.doubt.traffic == "steady"
    assert "drift" not in plan.doubt.shares
    assert plan.doubt.of_rate == 0.0
    assert said_of(plan)["Traffic"].endswith(", steady")


def test_a_plan_of_traffic_that_changes_doubts_more_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    hedged = planned(changing(30.0), explained=True)
    monkeypatch.setattr(drift, "shown", lambda _: "steady")
    still = planned(changing(30.0), explained=True)
    assert hedged.best is not None
    assert still.best is not None
    assert hedged.best.fleet.workers >= still.best.fleet.workers
    assert hedged.sure[2].low < still.sure[2].low
    assert hedged.doubt is not None
    assert still.doubt is not None
    assert "drift" in hedged.doubt.shares
    assert "drift" not in still.doubt.shares
    assert hedged.doubt.traffic == "changes"
    assert plan_json(hedged)["doubt"]["traffic"] == "changes"
    assert "drifting (" in said_of(hedged)["Traffic"]


def test_steady_traffic_is_taken_for_what_it_is_and_changing_traffic_too() -> None:
    steady = [shown(at_levels([5.0] * SPANS, each_s=25.0, seed=seed)) for seed in range(40)]
    assert steady.count("steady") >= 38
    rng = np.random.default_rng(3)
    stepped = [
        shown(at_levels([5.0] * 12 + [5.0 * change] * 12, each_s=50.0, seed=seed))
        for seed, change in enumerate(np.exp(rng.choice([-0.25, 0.25], 40)))
    ]
    assert stepped.count("changes") >= 38
    bursts = [shown(in_bursts(20_000, cv=4.0, seed=seed)) for seed in range(20)]
    assert "changes" not in bursts[:10] or bursts.count("changes") <= 2


def test_lengths_that_change_are_no_steady_traffic() -> None:
    workload = at_levels([5.0] * SPANS, each_s=50.0)
    rng = np.random.default_rng(0)
    prompt = rng.integers(50, 150, len(workload)) + np.where(workload.arrival_s > 600.0, 20, 0)
    assert shown(Workload(workload.arrival_s, prompt, workload.output_tokens)) == "changes"


def test_a_few_minutes_are_too_short_to_tell() -> None:
    assert shown(at_levels([5.0] * SPANS, each_s=3.0)) == "too short to tell"
    assert shown(poisson(requests=1)) == "too short to tell"


def in_bursts(requests: int, cv: float, seed: int = 0) -> Workload:
    """Gamma arrivals at one rate, ten a second, whose gaps have this coefficient of variation."""
    gaps_s = np.random.default_rng(seed).gamma(cv**-2, 0.1 * cv**2, requests)
    return Workload(np.cumsum(gaps_s), np.full(requests, 100), np.full(requests, 50))


@pytest.mark.parametrize("requests", [700, 2000, 20_000])
def test_bursts_within_a_span_are_no_drift_of_its_level(requests: int) -> None:
    shown = [level(in_bursts(requests, cv=13.0, seed=s)) for s in range(10)]
    assert max(shown) < 2 * USUAL


def test_a_plan_for_bursts_that_may_drift_names_a_fleet() -> None:
    plan = planned(in_bursts(2000, cv=13.0))
    assert plan.best is not None, plan.reason


@pytest.fixture(scope="module")
def wild() -> Workload:
    """Traffic whose level changes by a factor of two and more from one span to the next."""
    return at_levels(list(20 * np.exp(np.random.default_rng(2).standard_normal(SPANS))), each_s=4.0)


def test_where_limits_leave_no_fleet_for_what_drifts_the_nearest_target_is_told(wild: Workload) -> None:
    plan = planned(wild, max_gpus=6, confidence=0.95)
    assert plan.best is None
    assert plan.nearest is not None
    assert plan.nearest.gpus <= 6
