"""Fitting step models: what it recovers, what it refuses, how sure it is."""

from dataclasses import replace

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.fit import fit_phases, fit_prefill, fit_step, outlying, pooled
from controlplane.perfmodel.profile import FittedRange, Profile, Residuals, relative_error
from controlplane.perfmodel.samples import StepSamples, concatenated, folds
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.perfmodel.uncertainty import draw_profile

PLAIN = StepModel(0.012, 4e-5, 3e-5, 8e-8)


def grid(model: StepModel, noise: float = 0.0, seed: int = 0) -> StepSamples:
    """Steps of a designed grid: prefill alone, decode alone, and both."""
    rows = [
        (p, b, b * c, p * p)
        for p in (0, 128, 512, 1024, 2048)
        for b in (0, 1, 8, 32, 64, 128, 192)
        for c in (256, 1024, 4096)
        if p + b
    ]
    p, b, c, s = np.array(rows, float).T
    t = model.step_s(p, b, c, s) * np.exp(noise * np.random.default_rng(seed).standard_normal(len(p)))
    return StepSamples(p, b, c, t, s)


positive = st.floats(0.1, 10.0)


@given(st.tuples(positive, positive, positive, positive))
def test_a_made_model_is_recovered(scale: tuple[float, ...]) -> None:
    made = StepModel(0.01 * scale[0], 4e-5 * scale[1], 3e-5 * scale[2], 8e-8 * scale[3])
    fit = fit_step(grid(made))
    for name in ("base_s", "per_prefill_token_s", "per_sequence_s", "per_context_token_s"):
        assert getattr(fit.model, name) == pytest.approx(getattr(made, name), rel=1e-6)
    assert fit.residuals.max_relative < 1e-9
    assert fit.model.hinges == ()


def test_a_knee_and_a_square_are_found_and_a_straight_line_gets_none() -> None:
    made = StepModel(0.01, 2e-5, 2e-5, 5e-8, 4e-9, (Hinge("sequences", 64, 2e-4),))
    fit = fit_step(grid(made))
    assert [h.of for h in fit.model.hinges] == ["sequences"]
    assert fit.model.hinges[0].start == 64
    assert fit.model.per_prefill_sum_sq_s == pytest.approx(4e-9, rel=1e-3)
    noisy = fit_step(grid(PLAIN, noise=0.03))
    assert noisy.model.hinges == ()


def test_touched_experts_are_found_in_a_mixtures_steps_and_nowhere_else() -> None:
    made = StepModel(0.004, 2e-5, 2e-5, 5e-8, hinges=(Hinge("experts", 15.5, 4e-4),))
    known = replace(grid(made, noise=0.02), experts=15.5)
    fit = fit_step(known)
    (experts,) = [h for h in fit.model.hinges if h.of == "experts"]
    assert experts.per_unit_s == pytest.approx(4e-4, rel=0.1)
    unknown = fit_step(replace(known, experts=0.0))
    assert fit.residuals.held_out_mean < 0.7 * unknown.residuals.held_out_mean
    dense = fit_step(replace(grid(PLAIN, noise=0.03), experts=15.5))
    assert dense.model.hinges == ()


def test_what_prefilling_at_all_costs_is_found_among_steps_that_mostly_decode() -> None:
    made = replace(PLAIN, per_prefill_step_s=0.006)
    rng = np.random.default_rng(3)
    decoding = rng.integers(1, 64, 3000).astype(float)
    prompts = np.where(rng.random(3000) < 0.04, rng.integers(16, 400, 3000), 0).astype(float)
    context = rng.uniform(100, 500, 3000) * decoding
    noise = np.exp(0.1 * rng.standard_normal(3000))
    step_s = made.step_s(prompts, decoding, context) * noise
    fit = fit_step(StepSamples(prompts, decoding, context, step_s))
    assert fit.model.per_prefill_step_s == pytest.approx(0.006, rel=0.25)
    assert fit.model.per_prefill_token_s == pytest.approx(PLAIN.per_prefill_token_s, rel=0.25)
    none = fit_step(StepSamples(prompts, decoding, context, PLAIN.step_s(prompts, decoding, context) * noise))
    assert none.model.per_prefill_step_s == 0.0


def test_what_sequences_beside_a_prompt_cost_is_found_where_some_steps_have_both() -> None:
    made = replace(PLAIN, per_prefill_sequence_s=2e-4)
    rng = np.random.default_rng(4)
    decoding = rng.integers(1, 64, 600).astype(float)
    prompts = np.where(rng.random(600) < 0.4, rng.integers(16, 400, 600), 0).astype(float)
    context = rng.uniform(100, 500, 600) * decoding
    batch = (prompts, decoding, context)
    noise = np.exp(0.05 * rng.standard_normal(600))
    fit = fit_step(StepSamples(*batch, made.step_s(*batch) * noise), quick=True)
    assert fit.model.per_prefill_sequence_s == pytest.approx(2e-4, rel=0.25)
    none = fit_step(StepSamples(*batch, PLAIN.step_s(*batch) * noise), quick=True)
    assert none.model.per_prefill_sequence_s == 0.0


@given(st.integers(0, 2**31), st.floats(0.0, 0.5))
@examples(30)
def test_coefficients_are_never_negative_and_predictions_grow(seed: int, noise: float) -> None:
    model = fit_step(grid(PLAIN, noise, seed)).model
    values = [model.base_s, model.per_prefill_token_s, model.per_sequence_s, model.per_context_token_s]
    assert min(values) >= 0
    assert (np.diff(model.step_s(np.arange(0, 4096, 64), 0, 0)) >= 0).all()
    assert (np.diff(model.step_s(0, np.arange(1, 256), 1e5)) >= 0).all()
    assert (np.diff(model.step_s(0, 16, np.arange(0, 1e6, 1e4))) >= 0).all()


def test_relative_error_is_what_is_minimised() -> None:
    """A plain fit would spend itself on the long steps; short ones must come out as well."""
    samples = grid(PLAIN, noise=0.05, seed=3)
    fit = fit_step(samples)
    error = np.abs(
        fit.model.step_s(
            samples.prefill_tokens, samples.sequences, samples.context_tokens, samples.prefill_sum_sq
        )
        / samples.step_s
        - 1
    )
    short = samples.step_s < np.quantile(samples.step_s, 0.2)
    assert error[short].mean() < 1.5 * error.mean()


@given(st.floats(0.0, 0.6), st.integers(0, 50))
@examples(30)
def test_noise_makes_a_fit_neither_faster_nor_slower(noise: float, seed: int) -> None:
    """Observed over predicted is 1 on average: what queues behind noisy steps waits for their mean."""
    samples = grid(PLAIN, noise, seed)
    fitted = fit_step(samples, extra_terms=False).model
    columns = (samples.prefill_tokens, samples.sequences, samples.context_tokens, samples.prefill_sum_sq)
    assert np.mean(samples.step_s / fitted.step_s(*columns)) == pytest.approx(1.0, abs=2e-3)


def test_the_robust_fit_shrugs_off_outliers() -> None:
    samples = grid(PLAIN, noise=0.01)
    spoiled = samples.step_s.copy()
    spoiled[::9] *= 4
    samples = replace(samples, step_s=spoiled)
    # Few points are far off: the robust base must be much nearer the truth.
    far = abs(fit_step(samples, extra_terms=False).model.base_s / PLAIN.base_s - 1)
    near = abs(fit_step(samples, robust=True, extra_terms=False).model.base_s / PLAIN.base_s - 1)
    assert near < 0.05
    assert near < far


@given(st.integers(0, 30), st.sampled_from([0.01, 0.05, 0.5, 5.0]), st.booleans())
@examples(20)
def test_steps_told_of_as_far_too_short_or_long_do_not_lead_the_robust_fit(
    seed: int, times: float, plain: bool
) -> None:
    samples = grid(PLAIN, 0.02, seed)
    spoiled = samples.step_s.copy()
    spoiled[np.random.default_rng(seed).choice(len(samples), len(samples) // 30, replace=False)] *= times
    fit = fit_step(replace(samples, step_s=spoiled), robust=True, extra_terms=not plain, quick=True)
    off = fit.model.step_s(*samples.batch) / PLAIN.step_s(*samples.batch) - 1
    assert np.abs(off).max() < 0.05
    # One step in thirty is wrong, however far.
    assert fit.residuals.mean_relative < 0.02 + 1 / 30


@given(st.integers(0, 30), st.sampled_from([0.01, 0.05, 0.1]), st.sampled_from([0, 1, 2, 6]))
@examples(20)
def test_steps_that_something_else_held_up_are_told_from_noise(seed: int, noise: float, stops: int) -> None:
    samples = grid(PLAIN, noise, seed)
    far = np.random.default_rng(seed).choice(len(samples), stops, replace=False)
    spoiled = samples.step_s.copy()
    spoiled[far] *= 5
    assert sorted(np.flatnonzero(outlying(replace(samples, step_s=spoiled)))) == sorted(far)


def test_a_form_that_does_not_fit_makes_no_step_an_outlier() -> None:
    samples = grid(PLAIN, 0.02)
    jumps = np.where(samples.sequences >= 64, 4.0, 1.0)
    assert not outlying(replace(samples, step_s=samples.step_s * jumps)).any()


def test_too_few_batches_and_columns_that_move_together_are_refused() -> None:
    samples = grid(PLAIN)
    with pytest.raises(BadInput, match="5 different batches, at least 6"):
        fit_step(samples.take(np.array([0, 1, 20, 40, 60, 60, 60])).take(np.arange(5)))
    with pytest.raises(BadInput, match="prefill_tokens: all 0"):
        fit_step(samples.take(samples.prefill_tokens == 0))
    with pytest.raises(BadInput, match="sequences: all 0"):
        fit_step(samples.take(samples.sequences == 0))
    tied = samples.take(samples.context_tokens == samples.sequences * 1024)
    with pytest.raises(BadInput, match="per_sequence_s and per_context_token_s cannot be told apart"):
        fit_step(tied)


def test_phases_are_fitted_apart() -> None:
    samples = grid(PLAIN)
    apart = samples.take((samples.prefill_tokens == 0) | (samples.sequences == 0))
    apart = replace(apart, step_s=np.where(apart.sequences == 0, apart.step_s + 0.05, apart.step_s))
    decode, prefill = fit_phases(apart)
    assert decode.model.base_s == pytest.approx(PLAIN.base_s, rel=1e-6)
    assert prefill.model.base_s == pytest.approx(PLAIN.base_s + 0.05, rel=1e-6)
    assert decode.model.per_prefill_token_s == prefill.model.per_token_s
    both = pooled(decode.residuals, prefill.residuals)
    assert both.samples == decode.residuals.samples + prefill.residuals.samples
    assert fit_prefill(apart).model == prefill.model


def test_repeats_of_a_batch_are_judged_together() -> None:
    samples = grid(PLAIN)
    twice = concatenated([samples, samples])
    fold = folds(twice)
    n = len(samples)
    assert (fold[:n] == fold[n:]).all()


def test_bad_samples_are_named() -> None:
    good = grid(PLAIN)
    for column, value, says in (
        ("step_s", 0.0, "row 3: step_s: must be a number of more than 0, got 0"),
        ("step_s", np.nan, "row 3: step_s: must be a number of more than 0, got nan"),
        ("sequences", -1.0, "row 3: sequences: must be a number of at least 0, got -1"),
        ("context_tokens", np.inf, "row 3: context_tokens: must be a number of at least 0, got inf"),
    ):
        values = getattr(good, column).copy()
        values[2] = value
        with pytest.raises(BadInput, match=says):
            replace(good, **{column: values})
    with pytest.raises(BadInput, match="sequences: 2 rows"):
        replace(good, sequences=np.ones(2))


def profile(residuals: Residuals, fitted: FittedRange | None = None) -> Profile:
    return made_profile(
        PLAIN,
        KvModel(100_000),
        prefill=PrefillModel(0.01, 5e-5, hinges=(Hinge("prefill_tokens", 512, 1e-5),)),
        residuals=residuals,
        fitted=fitted,
    )


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9, 0.95])
def test_errors_hold_the_truth_as_often_as_they_say(confidence: float) -> None:
    fit = fit_step(grid(PLAIN, noise=0.05, seed=1), extra_terms=False)
    fresh = grid(PLAIN, noise=0.05, seed=2)
    predicted = fit.model.step_s(fresh.prefill_tokens, fresh.sequences, fresh.context_tokens)
    within = relative_error(fit.residuals, confidence)
    held = (np.abs(predicted / fresh.step_s - 1.0) <= within).mean()
    assert confidence - 0.08 <= held <= min(1.0, confidence + 0.13)


@given(st.floats(0.01, 0.99), st.floats(0.0, 0.3), st.floats(0.0, 0.3), st.floats(0.0, 0.3))
def test_more_confidence_never_narrows_an_error(c: float, a: float, b: float, d: float) -> None:
    mean, p95, worst = sorted((a, b, d))
    residuals = Residuals(mean, p95, worst, 50)
    assert relative_error(residuals, c) <= relative_error(residuals, min(c + 0.009, 0.999)) + 1e-12


@pytest.mark.parametrize("confidence", [0.0, 1.0])
def test_a_confidence_of_none_or_all_is_refused(confidence: float) -> None:
    with pytest.raises(BadInput, match="confidence"):
        relative_error(Residuals(0.02, 0.05, 0.08, 100), confidence)


def test_drawn_profiles_scatter_as_the_residuals_say_and_repeat_with_the_seed() -> None:
    made = profile(Residuals(0.05, 0.1, 0.2, 100))
    drawn = [draw_profile(made, np.random.default_rng(k)) for k in range(400)]
    ratio = np.log([d.step.base_s / made.step.base_s for d in drawn])
    assert abs(ratio.mean()) < 0.01
    assert ratio.std() == pytest.approx(0.05 / 0.798, rel=0.15)
    again = draw_profile(made, np.random.default_rng(7))
    assert again == drawn[7]
    assert again.prefill is not None
    assert made.prefill is not None
    # One factor a phase: what a profile says of proportions stays.
    assert again.prefill.hinges[0].per_unit_s / made.prefill.hinges[0].per_unit_s == pytest.approx(
        again.step.per_prefill_token_s / made.step.per_prefill_token_s
    )
    exact = draw_profile(profile(Residuals(0, 0, 0, 0)), np.random.default_rng(0))
    assert exact.step == PLAIN
