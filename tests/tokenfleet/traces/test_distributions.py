"""Arrival laws: their rates, their burstiness, their order."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from tokenfleet.traces import distributions as arrivals

RATES = st.floats(0.01, 1000)


@given(RATES, st.floats(0.05, 20), st.integers(0, 200), st.integers(0, 2**31))
def test_arrivals_start_at_zero_and_never_go_back(rate: float, cv: float, requests: int, seed: int) -> None:
    for arrive in (
        arrivals.poisson(rate, requests, np.random.default_rng(seed)),
        arrivals.gamma(rate, cv, requests, np.random.default_rng(seed)),
        arrivals.diurnal(rate / 3, rate, 100.0, requests, np.random.default_rng(seed), cv),
    ):
        assert len(arrive) == requests
        assert (arrive[:1] == 0).all()
        assert np.isfinite(arrive).all()
        assert (np.diff(arrive) >= 0).all()


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_cv_asked_for(cv: float) -> None:
    gaps = np.diff(arrivals.gamma(5.0, cv, 200_000, np.random.default_rng(1)))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_the_legacy_stream_gives_the_gaps_one_at_a_time_draws_give() -> None:
    one_by_one = np.random.RandomState(7)
    gaps = [one_by_one.gamma(1 / 2**2, 2**2 / 26) for _ in range(500)]
    assert np.array_equal(
        arrivals.gamma(26, 2, 500, np.random.RandomState(7)), np.concatenate([[0.0], np.cumsum(gaps)])[:500]
    )


def test_the_diurnal_rate_swings_from_low_to_high_and_back() -> None:
    times = arrivals.diurnal(2.0, 10.0, 1000.0, 600_000, np.random.default_rng(2))
    phase = np.histogram(times[times < 99_000] % 1000.0, bins=20, range=(0, 1000))[0] / (99 * 50)
    middle = (np.arange(20) + 0.5) * 50
    # The mean of the rate over a bin of 50 s, not its value in the middle.
    sinc = math.sin(math.pi / 20) / (math.pi / 20)
    expected = 6.0 - 4.0 * sinc * np.cos(2 * math.pi * middle / 1000)
    assert np.allclose(phase, expected, rtol=0.06)


@given(st.floats(0, 10), st.floats(0.1, 10), st.floats(1, 1e5), st.integers(0, 2**31))
def test_diurnal_arrivals_carried_forward_are_the_operational_times_they_came_from(
    low: float, extra: float, period_s: float, seed: int
) -> None:
    high = low + extra
    times = arrivals.diurnal(low, high, period_s, 100, np.random.default_rng(seed))
    count = np.concatenate([[0.0], np.cumsum(np.random.default_rng(seed).gamma(1.0, 1.0, 100))])[:100]
    turn = 2 * math.pi / period_s
    carried = (low + high) / 2 * times - (high - low) / 2 / turn * np.sin(turn * times)
    assert np.allclose(carried, count, rtol=1e-6, atol=1e-6 * (1 + high * period_s))


@pytest.mark.parametrize(
    "arrive",
    [
        lambda rng: arrivals.poisson(0, 5, rng),
        lambda rng: arrivals.poisson(-1, 5, rng),
        lambda rng: arrivals.poisson(math.inf, 5, rng),
        lambda rng: arrivals.poisson(math.nan, 5, rng),
        lambda rng: arrivals.gamma(1, 0, 5, rng),
        lambda rng: arrivals.diurnal(5, 4, 10, 5, rng),
        lambda rng: arrivals.diurnal(0, 0, 10, 5, rng),
        lambda rng: arrivals.diurnal(1, 2, 0, 5, rng),
    ],
)
def test_impossible_laws_are_refused(arrive: Callable[[np.random.Generator], object]) -> None:
    with pytest.raises(BadInput, match="arrivals: "):
        arrive(np.random.default_rng(0))
