"""A picker that hears of answers late chooses at least as well as the fewest requests do, known exactly."""

import numpy as np
import pytest

from harness.virtual_pick import (
    PEAK,
    SLO,
    Ask,
    Fewest,
    Gateway,
    LlmdDefault,
    Picked,
    in_slo,
    seen_by,
    small_engine,
    tailed,
    write_profile,
)
from tokenfleet.profiles.library import read_profile

SEEDS = (1, 2)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return read_profile(write_profile(tmp_path_factory.mktemp("profile"), 1.0))


def attained(make, seeds=SEEDS):
    """The mean share in SLO at a peak; all in virtual time, so the same on every machine."""
    shares = [
        in_slo(seen_by(lambda: [small_engine() for _ in range(4)], make, tailed(seed, *PEAK)), SLO)
        for seed in seeds
    ]
    return sum(shares) / len(shares)


@pytest.fixture(scope="module")
def fewest():
    return attained(lambda engines: Fewest(engines, 0, True))


@pytest.mark.parametrize(("lag_s", "bunch_s"), [(0.0, 0.0), (0.1, 0.0), (0.3, 0.0), (0.0, 0.3)])
def test_late_news_costs_no_more_than_least_requests_would(profile, fewest, lag_s, bunch_s):
    assert attained(lambda engines: Picked(engines, profile, SLO, lag_s, bunch_s)) >= fewest


def test_the_picker_is_ahead_of_llm_ds_default_scorers_at_a_peak(profile):
    picked = attained(lambda engines: Picked(engines, profile, SLO))
    assert picked >= attained(lambda engines: LlmdDefault(engines, 0)) + 0.05


def test_our_gateway_knows_each_step_and_is_a_little_ahead_of_the_picker_at_a_peak(profile):
    gateway = attained(lambda engines: Gateway(engines, profile, SLO), range(6))
    assert gateway - 0.01 <= attained(lambda engines: Picked(engines, profile, SLO), range(6)) <= gateway


def test_requests_that_are_alike_begin_as_soon_as_through_our_gateway(profile):
    arrivals = np.cumsum(np.random.default_rng(1).exponential(0.01, 600))

    def waited_s(make):
        asks = [Ask(float(at), 500, 8) for at in arrivals]
        seen = seen_by(lambda: [small_engine() for _ in range(4)], make, asks)
        return np.mean([one.ttft_s for one in seen])

    gateway = waited_s(lambda engines: Gateway(engines, profile, SLO))
    assert waited_s(lambda engines: Picked(engines, profile, SLO)) <= gateway + 2e-3
