"""Composed profiles are drawn by other engines' errors, which are not symmetric; others by residuals."""

from dataclasses import replace

import numpy as np
import pytest
from builders.made_profiles import made_profile

from controlplane.perfmodel.profile import Frontend, KvModel, Profile, Residuals
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.perfmodel.uncertainty import AT, DENSE, draw_profile, is_dense, with_errors
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome, WorkerSpec, simulate

STEP = StepModel(0.012, 4e-5, 3e-5, 8e-8)


def composed(unseen: float = 0.1) -> Profile:
    residuals = Residuals(0.03, 0.06, 0.1, 100, unseen_relative=unseen)
    return made_profile(STEP, KvModel(400_000), prefill=PrefillModel(0.012, 4e-5), residuals=residuals)


def decode_errors(profile: Profile, draws: int = 2000) -> np.ndarray:
    drawn = [draw_profile(profile, np.random.default_rng(k)).step.base_s for k in range(draws)]
    return np.log(np.array(drawn) / profile.step.base_s)


def test_a_composed_profile_is_drawn_by_the_quantiles_of_others_errors() -> None:
    found = np.quantile(decode_errors(composed(DENSE.unseen)), AT)
    assert found == pytest.approx(DENSE.decode, abs=0.01)


def test_a_larger_stated_error_draws_wider_and_none_draws_by_the_fit_alone() -> None:
    wide = np.quantile(decode_errors(composed(DENSE.unseen + 0.2)), AT)
    assert wide[-2] - wide[1] > DENSE.decode[-2] - DENSE.decode[1] + 0.2
    assert decode_errors(composed(0.0)).std() == pytest.approx(0.03 / 0.798, rel=0.1)


def test_a_frontend_that_is_uncertain_is_drawn_beside_them() -> None:
    profile = replace(composed(), frontend=Frontend(0.012, doubt_s=0.004))
    sure = replace(profile, frontend=Frontend(0.012))
    drawn, without = (
        np.array([draw_profile(one, np.random.default_rng(k)).frontend.per_request_s for k in range(300)])
        for one in (profile, sure)
    )
    assert drawn.std() > without.std()


def test_the_errors_are_in_order_and_experts_and_windows_have_none() -> None:
    assert all(list(row) == sorted(row) and len(row) == len(AT) for row in DENSE[:3])
    assert min(DENSE.late_steps) >= 0.0
    dense = composed()
    mixture = replace(dense, step=replace(STEP, hinges=(Hinge("experts", 8.0, 1e-4),)))
    windowed = replace(dense, kv=replace(dense.kv, request_tokens=1024, window_tokens=1024))
    assert [is_dense(one) for one in (dense, mixture, windowed)] == [True, False, False]
    assert draw_profile(mixture, np.random.default_rng(1)).frontend == mixture.frontend


def test_chance_delays_first_tokens_alone_and_none_changes_nothing() -> None:
    work = Workload(np.arange(2000) * 0.05, np.full(2000, 200), np.full(2000, 30))

    def run(profile: Profile) -> Outcome:
        return simulate(work, [WorkerSpec(profile)], Slo(9.0, 9.0), "round-robin")

    plain, late = run(composed()), run(with_errors(composed(), 1.0, 1.0, 2.0))
    by_chance = late.ttft_s - plain.ttft_s
    assert by_chance.mean() == pytest.approx(2.0 * STEP.base_s, rel=0.01)
    assert np.quantile(by_chance, 0.99) == pytest.approx(2.0 * STEP.base_s * np.log(100), rel=0.05)
    assert late.tpot_s == pytest.approx(plain.tpot_s, rel=1e-9)
    assert np.array_equal(run(with_errors(composed(), 1.0, 1.0, 0.0)).ttft_s, plain.ttft_s)
