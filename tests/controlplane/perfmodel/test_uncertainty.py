"""Composed and calibrated profiles are drawn by other engines' errors, others by their residuals."""

from dataclasses import replace

import numpy as np
import pytest
from builders.made_profiles import made_profile

from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import Frontend, Profile, Residuals
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.perfmodel.uncertainty import (
    AT,
    CALIBRATED,
    DENSE,
    ErrorsElsewhere,
    draw_profile,
    with_errors,
)
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


@pytest.mark.parametrize("known", [DENSE, CALIBRATED])
def test_the_errors_are_in_order(known: ErrorsElsewhere) -> None:
    assert all(list(row) == sorted(row) and len(row) == len(AT) for row in known[:3])
    assert min(known.late_steps) >= 0.0


def test_experts_are_drawn_by_the_same_errors_and_wider_by_what_they_state() -> None:
    mixture = replace(composed(0.25), step=replace(STEP, hinges=(Hinge("experts", 8.0, 1e-4),)))
    assert draw_profile(mixture, np.random.default_rng(1)).frontend != mixture.frontend
    assert np.ptp(np.quantile(decode_errors(mixture), (0.05, 0.95))) > 3 * (
        DENSE.decode[-2] - DENSE.decode[1]
    )


def calibrated(prefill: float = 0.0) -> Profile:
    """As a log of short prompts calibrates it: sure of decode, and of prefill as little as is asked."""
    made = composed(CALIBRATED.unseen)
    residuals = replace(made.residuals, unseen_prefill_relative=prefill)
    source = replace(made.source, kind="measured")
    return replace(made, residuals=residuals, source=source, frontend=Frontend(0.012, doubt_s=0.001))


def test_a_calibrated_profile_is_drawn_by_calibrated_ones_errors_and_decodes_narrower() -> None:
    drawn = [draw_profile(calibrated(), np.random.default_rng(k)).step for k in range(2000)]
    decode = np.log([one.base_s / STEP.base_s for one in drawn])
    first = np.log([one.per_prefill_token_s / STEP.per_prefill_token_s for one in drawn])
    remainder = decode - CALIBRATED.traded * first
    assert np.quantile(remainder, AT) == pytest.approx(CALIBRATED.decode, abs=0.01)
    assert np.quantile(first, AT) == pytest.approx(CALIBRATED.first, abs=0.02)
    narrow, wide = (np.ptp(np.quantile(of, (0.05, 0.95))) for of in (remainder, decode_errors(composed())))
    assert narrow < wide  # beside what it gave for prefill; TPOT as a whole: test_accuracy_ratchet.py


def test_what_prompts_leave_open_is_drawn_on_prefill_and_never_on_decode() -> None:
    pairs = [
        [draw_profile(one, np.random.default_rng(k)).step for one in (calibrated(), calibrated(0.3))]
        for k in range(400)
    ]
    assert all(wide.base_s == narrow.base_s for narrow, wide in pairs)
    prefill = np.log([wide.per_prefill_token_s / narrow.per_prefill_token_s for narrow, wide in pairs])
    assert prefill.std() == pytest.approx(0.3, rel=0.1)


def test_a_calibrated_mean_counts_chance_already() -> None:
    """Its rest shrinks by what chance adds; a composed one comes later by it."""
    rest_s = calibrated().frontend.per_request_s
    late_s = 0.5 * STEP.base_s
    drawn = with_errors(calibrated(), 1.0, 1.0, 0.5).frontend
    assert (drawn.per_request_s, drawn.late_s) == pytest.approx((rest_s - late_s, late_s))
    assert with_errors(calibrated(), 1.0, 1.0, 9.0).frontend.per_request_s == 0.0
    assert with_errors(composed(), 1.0, 1.0, 0.5).frontend.per_request_s == composed().frontend.per_request_s


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
