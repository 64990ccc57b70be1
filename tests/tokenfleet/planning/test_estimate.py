"""The certainty of an answer: bounds from resampled traces, and what a short trace cannot show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.planning.estimate import estimate, most_showable, rank, replicates_for, requests_needed

replicates = st.lists(st.integers(0, 200), min_size=2, max_size=24)


@given(replicates, st.integers(200, 5000), st.floats(0.5, 0.99))
def test_the_bounds_enclose_the_expected_or_at_least_a_replicate(
    misses: list[int], requests: int, confidence: float
) -> None:
    found = estimate(misses, [requests] * len(misses), confidence)
    assert 0.0 <= found.low <= found.high <= 1.0
    assert found.low <= 1.0 - np.median(misses) / requests + 1e-12
    assert found.low <= found.expected <= found.high


@given(replicates, st.integers(200, 5000))
def test_more_confidence_asks_for_a_lower_bound(misses: list[int], requests: int) -> None:
    lows = [estimate(misses, [requests] * len(misses), c).low for c in (0.6, 0.8, 0.95, 0.99)]
    assert lows == sorted(lows, reverse=True)


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
def test_the_next_replicate_is_above_the_bound_as_often_as_promised(confidence: float) -> None:
    # Two kinds of day, the bad one rare: no normal would fit their misses.
    rng = np.random.default_rng(3)
    held, replicates, draws = 0, replicates_for(confidence), 3000
    for _ in range(draws):
        bad = rng.random(replicates + 1) < 0.15
        misses = np.where(bad, rng.poisson(300, replicates + 1), rng.poisson(8, replicates + 1))
        bound = estimate(misses[:-1].tolist(), [5000] * replicates, confidence).low
        held += 1.0 - misses[-1] / 5000 >= bound
    assert held / draws >= confidence - 0.025
    if confidence >= 0.9:  # below, bad days pull the mean under the quantile, and the bound with it
        assert held / draws == pytest.approx(confidence, abs=0.025)


def test_a_lower_bound_is_never_above_the_mean() -> None:
    # Three bad days of nineteen: at confidence 0.8 the quantile is a good day's, the mean is not.
    misses = [1] * 16 + [300] * 3
    found = estimate(misses, [5000] * 19, 0.8)
    assert sorted(1.0 - m / 5000 for m in misses)[3] > found.expected
    assert found.low == found.expected < found.high


def test_too_few_replicates_promise_no_more_than_normal_ones_would() -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(2000):
        shares = np.exp(rng.normal(np.log(0.004), 0.6, 9))
        misses = rng.binomial(5000, np.minimum(shares, 1.0))
        bound = estimate(misses[:8].tolist(), [5000] * 8, 0.9).low
        held += 1.0 - misses[8] / 5000 >= bound
    assert 0.89 <= held / 2000 <= 0.95


@given(st.floats(0.5, 0.999))
def test_the_replicates_looked_at_make_the_promise_nearly_exact(confidence: float) -> None:
    replicates = replicates_for(confidence)
    place = rank(replicates, confidence)
    if confidence <= 0.95:
        assert confidence - 1e-9 <= place / (replicates + 1) <= confidence + 1.0 / (replicates + 1)
    assert (place <= replicates) == (confidence <= 0.975 + 1e-9)


def test_a_short_trace_without_a_miss_still_leaves_doubt() -> None:
    assert estimate([0] * 8, [50] * 8, 0.95).low < 0.99
    assert estimate([0] * 8, [5000] * 8, 0.95).low > 0.99


@given(st.floats(0.5, 0.9995), st.floats(0.5, 0.99))
def test_requests_needed_is_the_fewest_that_can_show_the_target(attainment: float, confidence: float) -> None:
    need = requests_needed(attainment, confidence)
    assert most_showable(need, confidence) >= attainment
    assert need == 1 or most_showable(need - 1, confidence) < attainment


def test_three_over_n_is_about_what_nothing_seen_leaves_open() -> None:
    # The rule of three is Clopper-Pearson's; Jeffreys' bound is a little below it.
    assert 1.0 - most_showable(10_000, 0.95) == pytest.approx(1.92e-4, rel=0.01)
