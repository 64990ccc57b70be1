"""The online refit: what it learns, what it forgets, when it speaks up, and what it never does."""

from dataclasses import replace

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import Residuals
from controlplane.perfmodel.refit import BLOCK, PART, SCALE, SHIFT, Cusum, Refit, threshold
from controlplane.perfmodel.step import Hinge, StepModel

TRUTH = StepModel(0.007, 2e-5, 2e-5, 5e-8, 1e-9, (Hinge("sequences", 64, 1e-5),), 2e-3)
PROFILE = made_profile(TRUTH, KvModel(400_000), residuals=Residuals(0.02, 0.05, 0.1, 100))


def scaled(step: StepModel, factor: float) -> StepModel:
    return StepModel(
        step.base_s * factor,
        step.per_prefill_token_s * factor,
        step.per_sequence_s * factor,
        step.per_context_token_s * factor,
        step.per_prefill_sum_sq_s * factor,
        tuple(replace(h, per_unit_s=h.per_unit_s * factor) for h in step.hinges),
        step.per_prefill_step_s * factor,
        step.per_prefill_sequence_s * factor,
    )


def batches(n: int, rng: np.random.Generator) -> np.ndarray:
    b = rng.integers(1, 128, n)
    p = np.where(rng.random(n) < 0.3, rng.integers(16, 2048, n), 0)
    return np.column_stack([p, b, b * rng.integers(100, 3000, n), p.astype(float) ** 2])


def learn(refit: Refit, truth: StepModel, n: int, noise: float = 0.0, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for p, b, c, s in batches(n, rng):
        refit.take(p, b, c, float(truth.step_s(p, b, c, s)) * float(np.exp(noise * rng.normal())), s)


def worst_error(refit: Refit, truth: StepModel) -> float:
    rows = batches(200, np.random.default_rng(99)).T
    return float(np.max(np.abs(refit.model.step_s(*rows) / truth.step_s(*rows) - 1)))


def test_steps_that_go_as_the_profile_says_change_nothing() -> None:
    refit = Refit(PROFILE)
    learn(refit, TRUTH, 300)
    assert worst_error(refit, TRUTH) < 1e-9
    assert refit.slowdown == pytest.approx(1.0)
    assert refit.profile_error < 1e-9
    assert not refit.drifts


@given(st.floats(0.2, 5.0))
@examples(6)
def test_a_common_factor_is_found_and_told(factor: float) -> None:
    refit = Refit(PROFILE)
    truth = scaled(TRUTH, factor)
    learn(refit, truth, 400, noise=0.02)
    assert worst_error(refit, truth) < 0.05
    assert refit.slowdown == pytest.approx(factor, rel=0.05)
    assert refit.profile_error == pytest.approx(abs(factor - 1), rel=0.15, abs=0.03)
    assert bool(refit.drifts) or abs(factor - 1) < 0.5


def test_other_proportions_are_learnt_from_steps_that_differ() -> None:
    truth = replace(TRUTH, base_s=0.009, per_context_token_s=3e-8, per_prefill_token_s=2.6e-5)
    refit = Refit(PROFILE)
    learn(refit, truth, 3000, noise=0.02)
    assert worst_error(refit, truth) < 0.05


def test_steps_that_look_alike_keep_the_proportions_of_the_profile() -> None:
    refit = Refit(PROFILE)
    one = float(TRUTH.step_s(0, 16, 16_000))
    for _ in range(1000):
        refit.take(0, 16, 16_000, 1.5 * one)
    assert worst_error(refit, scaled(TRUTH, 1.5)) < 0.02  # batches it has never seen, too


@given(st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 256), st.floats(1e-6, 1e3)), max_size=120))
@examples(20)
def test_whatever_comes_coefficients_stay_in_their_bounds(rows: list[tuple[int, int, float]]) -> None:
    refit = Refit(PROFILE)
    for p, b, step_s in rows:
        if p + b:
            refit.take(p, b, 700 * b, step_s, p * p)
    ratios = [
        getattr(refit.model, name) / getattr(TRUTH, name)
        for name in ("base_s", "per_prefill_token_s", "per_sequence_s", "per_context_token_s")
    ]
    assert SCALE[0] <= refit.slowdown <= SCALE[1]
    assert all(np.isfinite(ratios))
    assert all(SCALE[0] * PART * 0.999 <= r <= SCALE[1] / PART * 1.001 for r in ratios)


def test_outliers_move_nothing_and_raise_no_alarm() -> None:
    refit = Refit(PROFILE)
    rng = np.random.default_rng(1)
    for i, (p, b, c, s) in enumerate(batches(4000, rng)):
        t = float(TRUTH.step_s(p, b, c, s)) * float(np.exp(0.03 * rng.normal()))
        refit.take(p, b, c, t * (20.0 if i % 60 == 59 else 1.0), s)
    assert not refit.drifts
    assert worst_error(refit, TRUTH) < 0.04


def test_a_sudden_slowdown_is_told_with_its_size_and_its_beginning() -> None:
    refit = Refit(PROFILE)
    learn(refit, TRUTH, 500, noise=0.04)
    assert not refit.drifts
    learn(refit, scaled(TRUTH, 1.3), 200, noise=0.04, seed=1)
    (drift,) = refit.drifts
    assert drift.ratio == pytest.approx(1.3, rel=0.05)
    assert 480 <= drift.since <= 540
    assert worst_error(refit, scaled(TRUTH, 1.3)) < 0.05


def test_and_so_is_its_end() -> None:
    refit = Refit(PROFILE)
    for factor, seed in ((1.0, 0), (1.5, 1), (1.0, 2)):
        learn(refit, scaled(TRUTH, factor), 500, noise=0.04, seed=seed)
    assert [round(d.ratio, 1) for d in refit.drifts] == [1.5, 0.7]
    assert worst_error(refit, TRUTH) < 0.05


def test_terms_the_profile_does_not_have_stay_out() -> None:
    plain = replace(PROFILE, step=StepModel(0.007, 2e-5, 0.0, 5e-8))
    refit = Refit(plain)
    learn(refit, TRUTH, 500)
    assert refit.model.per_sequence_s == 0
    assert refit.model.hinges == ()
    with pytest.raises(BadInput, match="nothing to refit"):
        Refit(replace(PROFILE, step=StepModel(0, 0, 0, 0)))


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_without_a_time_is_refused(step_s: float) -> None:
    with pytest.raises(BadInput, match="positive time"):
        Refit(PROFILE).take(0, 1, 100, step_s)


def test_the_threshold_keeps_its_promise_on_noise_of_any_shape() -> None:
    """The derived bound is 1 % of 10,000 steps; 5 runs of each must see none, the noise being within it."""
    rng = np.random.default_rng(0)
    shapes = {
        "normal": lambda n: rng.normal(0, 0.06, n),
        "two values": lambda n: rng.choice([-0.06, 0.06], n),
        "skewed": lambda n: rng.exponential(0.06, n) - 0.06,
    }
    for make in shapes.values():
        for _ in range(5):
            cusum = Cusum(0.06)
            assert not any(cusum.take(float(e), 0.18) is not None for e in make(10_000))


@given(st.floats(0.0, 0.05), st.floats(0.1, 1.0), st.sampled_from([1, -1]))
@examples(30)
def test_a_lasting_shift_is_always_found(variance: float, clip: float, sign: int) -> None:
    cusum = Cusum(float(np.sqrt(variance)))
    steps = int(BLOCK * (threshold(0.05 + clip**2, clip) / (clip - SHIFT / 2) + 2))
    assert any(cusum.take(sign * 5.0, clip) is not None for _ in range(steps))


def hostile(n: int, rng: np.random.Generator, tail: float, slow: float) -> np.ndarray:
    """Noise of a crowded host: heavy tails both ways, and a share of steps that wait for a processor."""
    noise = np.exp(0.2 * rng.standard_t(tail, n))
    return noise * np.where(rng.random(n) < slow, rng.uniform(1.5, 4.0, n), 1.0)


@given(st.floats(2.0, 6.0), st.floats(0.0, 0.3), st.integers(0, 99))
@examples(8)
def test_heavy_tailed_noise_does_not_make_it_worse_than_a_profile_that_is_right(
    tail: float, slow: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = batches(1000, rng)
    times = TRUTH.step_s(*rows.T) * hostile(len(rows), rng, tail, slow)
    right = scaled(TRUTH, float(np.median(times / TRUTH.step_s(*rows.T))))
    refit = Refit(replace(PROFILE, step=right))
    learned, known = [], []
    for row, t in zip(rows, times, strict=True):
        learned.append(abs(np.log(float(refit.model.step_s(*row)) / t)))
        known.append(abs(np.log(float(right.step_s(*row)) / t)))
        refit.take(*row[:3], t, row[3])
    assert np.mean(learned) <= 1.02 * np.mean(known)


@given(st.sampled_from([1 / 1.3, 1.3]), st.integers(0, 99))
@examples(8)
def test_a_change_is_in_force_from_its_alarm_on_and_what_was_before_when_it_is_over(
    change: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    refit = Refit(PROFILE)

    def serve(factor: float, n: int) -> None:
        for row in batches(n, rng):
            t = float(TRUTH.step_s(*row)) * factor * float(np.exp(0.05 * rng.normal()))
            refit.take(*row[:3], t, row[3])

    serve(1.0, 600)
    while not refit.drifts:
        assert refit.steps < 800
        serve(change, 1)
    assert worst_error(refit, scaled(TRUTH, change)) < 0.12
    serve(1.0, 300)
    assert worst_error(refit, TRUTH) < 0.06
