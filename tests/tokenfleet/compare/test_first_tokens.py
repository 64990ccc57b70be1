"""Simulated times to the first token as a client sees them: scattered as steps are, with what HTTP adds."""

from dataclasses import replace

import numpy as np
import pytest
from made_profiles import made_profile

from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import Profile, Residuals
from controlplane.perfmodel.step import StepModel
from tokenfleet.cli.compare import first_tokens_s

PROFILE = made_profile(
    StepModel(0.01, 1e-4, 0.0, 0.0), KvModel(1000), gpu="cpu", residuals=Residuals(0.0, 0.0, 0.0, 100)
)


def noisy(mean_relative: float) -> Profile:
    return replace(PROFILE, residuals=replace(PROFILE.residuals, mean_relative=mean_relative))


def test_an_exact_profile_leaves_times_as_they_are_but_for_the_way() -> None:
    found = first_tokens_s(np.full(5, 0.02), noisy(0.0), np.array([0.003]), np.random.default_rng(0))
    assert found.tolist() == [0.023] * 5


def test_a_noisy_host_keeps_the_mean_lowers_the_median_and_raises_the_tail() -> None:
    ttft_s = np.full(200_000, 0.02)
    found = first_tokens_s(ttft_s, noisy(0.24), np.zeros(1), np.random.default_rng(0))
    assert found.mean() == pytest.approx(0.02, rel=0.005)
    assert np.median(found) < 0.0195
    assert np.quantile(found, 0.9) > 0.027
    assert np.abs(np.log(found) - np.log(found).mean()).mean() == pytest.approx(0.24, rel=0.01)


def test_the_way_is_one_that_was_seen() -> None:
    found = first_tokens_s(np.full(50, 0.02), noisy(0.0), np.array([0.001, 0.005]), np.random.default_rng(0))
    assert set(np.round(found - 0.02, 9)) == {0.001, 0.005}
