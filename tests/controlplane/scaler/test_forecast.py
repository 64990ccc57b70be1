"""The forecast: scored on what it could have known, sure to its quantile, and silent without a past."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.scaler.forecast import CANDIDATES, ForecastSettings, forecast

DAY = ForecastSettings(bin_s=600.0, season=144, quantile=0.9)


def says(counts, regimes=None, lead=1, settings=DAY):
    level = [c / settings.bin_s if c else 0.0 for c in counts] if regimes is None else regimes
    return forecast(settings, counts, level, lead)


def daily(days, rng, noise=True):
    t = np.arange(days * 144)
    mean = 600.0 * (6.0 - 4.0 * np.cos(2 * np.pi * t / 144))
    return (rng.poisson(mean) if noise else mean).astype(int).tolist()


def test_a_daily_swing_is_foreseen_by_its_season():
    counts = daily(6, np.random.default_rng(0))[:-60]  # in the middle of a rise
    found = says(counts)
    assert found.candidate in ("seasonal", "scaled")
    now, then = counts[-1] / 600.0, counts[len(counts) - 144] / 600.0
    assert found.rps > now
    assert found.rps == pytest.approx(then, rel=0.15)
    assert found.error < 0.05


def test_a_walk_without_season_is_foretold_by_its_last_values():
    rng = np.random.default_rng(1)
    level = 6.0 * np.exp(np.cumsum(rng.normal(0.0, 0.05, 600)))
    found = says(rng.poisson(600.0 * level).tolist())
    assert found.candidate in ("last", "ewma")


def test_a_steady_rate_is_the_regimes():
    rng = np.random.default_rng(2)
    counts = rng.poisson(60.0, 400).tolist()
    found = says(counts, [0.1] * 400)
    assert found.candidate == "regime"
    assert 0.1 < found.rps < 0.13
    assert f"{100 * found.quantile:.0f} %" in found.why
    assert found.candidate in found.why


def test_what_was_said_was_enough_about_as_often_as_promised():
    rng = np.random.default_rng(3)
    for quantile in (0.5, 0.9, 0.97):
        found = says(
            rng.poisson(600.0, 700).tolist(), [1.0] * 700, settings=ForecastSettings(600.0, 144, quantile)
        )
        assert found.covered == pytest.approx(quantile, abs=0.06)


def test_a_longer_lead_covers_the_highest_of_its_bins():
    counts = daily(5, np.random.default_rng(4), noise=False)[:-100]
    near, far = says(counts, lead=1), says(counts, lead=12)
    assert far.rps > 1.2 * near.rps


def test_errors_are_those_that_could_be_known_by_then():
    # The rate jumps in the last bin: the forecast before it was made without knowing.
    calm = says([600] * 300, [1.0] * 300)
    jumped = says([600] * 299 + [60_000], [1.0] * 300)
    assert calm.error == 0
    assert jumped.covered < 1.0
    assert jumped.origins == calm.origins


def test_where_losses_fade_a_climb_is_not_judged_by_the_steady_hours_before_it():
    rng = np.random.default_rng(5)
    mean = 180.0 * 1.04 ** np.concatenate([np.zeros(300), np.arange(1, 16)])
    counts = rng.poisson(mean).tolist()
    levels = [6.0] * 300 + [6.0 * 1.04 ** (i / 2) for i in range(1, 16)]  # what lags behind by half
    alike, fading = (
        says(counts, levels, 2, ForecastSettings(30.0, 1_000, 0.6, fade=fade)) for fade in (math.inf, 10.0)
    )
    assert alike.candidate == "regime"
    assert fading.candidate in ("last", "ewma")
    assert alike.rps < mean[-1] / 30.0 < fading.rps


@given(st.lists(st.none() | st.integers(0, 10_000), max_size=60), st.integers(1, 5))
def test_any_history_gives_a_number_or_nothing(counts, lead):
    found = forecast(ForecastSettings(60.0, 12), counts, [1.0] * len(counts), lead)
    if found is not None:
        assert found.candidate in CANDIDATES
        assert math.isfinite(found.rps)
        assert found.rps >= 0
        assert 0 <= found.covered <= 1


def test_a_short_past_says_nothing():
    assert says([]) is None
    assert says([5] * 10) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: ForecastSettings(bin_s=0.0),
        lambda: ForecastSettings(quantile=1.0),
        lambda: ForecastSettings(fade=0.0),
        lambda: says([1], lead=0),
        lambda: forecast(DAY, [1, 2], [1.0], 1),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(BadInput, match="forecast"):
        make()
