"""How far levels of the traffic drift: what a trace shows of it, and what a draw makes of it."""

import numpy as np
import pytest
from planning_builders import poisson

from controlplane.workload import Workload
from tokenfleet.planning.answer import Doubt
from tokenfleet.planning.drift import Drift, drift_of


def at_levels(rates_rps: list[float], each_s: float = 300.0, seed: int = 0) -> Workload:
    """Poisson arrivals at one rate after the other, all requests alike."""
    rng = np.random.default_rng(seed)
    parts = [
        i * each_s + np.sort(rng.uniform(0, each_s, rng.poisson(r * each_s))) for i, r in enumerate(rates_rps)
    ]
    arrival_s = np.concatenate(parts)
    return Workload(arrival_s, np.full(len(arrival_s), 100), np.full(len(arrival_s), 50))


def test_traffic_that_stays_what_it_is_shows_next_to_no_drift() -> None:
    shown = [drift_of(at_levels([10.0] * 6, seed=s)).per_level[0] for s in range(40)]
    # Chance alone would make sixths of 3,000 requests differ by 2.6 %.
    assert np.median(shown) < 0.013
    assert np.mean([s == 0.0 for s in shown]) > 0.3


def test_levels_that_scatter_show_as_much_drift_as_stretches_of_them_differ() -> None:
    rng = np.random.default_rng(1)
    shown = [
        drift_of(at_levels(list(10 * np.exp(0.2 * rng.standard_normal(6))), seed=s)).per_level[0]
        for s in range(60)
    ]
    # Two levels differ by sqrt(2) of their scatter.
    assert np.sqrt(np.mean(np.square(shown))) == pytest.approx(0.2 * np.sqrt(2), rel=0.2)


def test_a_trend_is_shape_and_no_drift() -> None:
    steady_growth = at_levels(list(10 * np.exp(np.linspace(0, 1, 60))), each_s=30.0)
    assert drift_of(steady_growth).per_level[0] < 0.08  # from one sixth to the next it grows by 0.17


def test_rate_and_lengths_drift_together_where_they_changed_together() -> None:
    levels = np.array([1.0, 1.5, 0.8, 1.4, 0.9, 1.2])
    workload = at_levels(list(10 / levels), seed=3)
    span = np.minimum(workload.arrival_s // 300.0, 5).astype(int)
    outputs = np.round(50 * levels[span]).astype(np.int64)
    drift = drift_of(Workload(workload.arrival_s, workload.prompt_tokens, outputs))
    covariance = drift.spread @ drift.spread.T
    assert covariance[0, 2] / np.sqrt(covariance[0, 0] * covariance[2, 2]) < -0.95
    assert drift.per_level[1] < 0.02


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
    drift = Drift(np.diag([0.2, 0.0, 0.0]), 6)
    rates = [
        drift.drawn(workload, np.random.default_rng(s)).rate_rps / workload.rate_rps for s in range(4000)
    ]
    # Student's t with 5 degrees of freedom: variance 5/3.
    assert np.std(np.log(rates)) == pytest.approx(0.2 * np.sqrt(5 / 3), rel=0.1)


@pytest.mark.parametrize("requests", [1, 2, 100])
def test_a_trace_too_short_to_tell_shows_none(requests: int) -> None:
    workload = poisson(requests=requests)
    drift = drift_of(workload)
    assert not drift.spread.any()
    assert drift.drawn(workload, np.random.default_rng(0)) is workload


def test_a_long_trace_is_judged_by_its_hours() -> None:
    assert drift_of(at_levels([1.0] * 24, each_s=3600.0)).spans == 24


def test_a_plan_says_how_much_of_its_doubt_comes_from_where() -> None:
    shares = Doubt(arrivals=0.01, drift=0.02, coefficients=0.0).shares
    assert list(shares) == ["drift", "arrivals"]
    assert shares == pytest.approx({"drift": 0.8, "arrivals": 0.2})
    assert Doubt(0.0, 0.0, 0.0).shares == {}
