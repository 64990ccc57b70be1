"""The calibration by an engine's counters, against an engine of a few lines whose step times are known."""

from dataclasses import replace

import numpy as np
import pytest
from by_day import examples
from counting_engine import LIMITS, counted
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.calibration import Interval, calibrated_by
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.types import EngineMode

KV = KvModel(400_000, 16)
TRUTH = StepModel(0.012, 6e-5, 2e-4, 1e-7)
PRIOR = made_profile(StepModel(0.006, 9e-5, 1e-4, 1e-7), KV, LIMITS)


def off(step, truth=TRUTH):
    """Mean relative error over steps of a server's kind."""
    rng = np.random.default_rng(1)
    b = rng.integers(1, 40, 400)
    batch = (rng.choice([0, 0, 0, 300, 900], 400), b, b * rng.integers(300, 1200, 400))
    return float(np.mean(np.abs(step.step_s(*batch) / truth.step_s(*batch) - 1)))


def a_day(t):
    """Requests a second: waves of seven minutes."""
    return 3.0 + 2.5 * np.sin(t / 70)


def by_name(corrections):
    return {one.name: one for one in corrections}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fifteen_minutes_of_counters_tell_the_step_times(seed):
    made, corrections = calibrated_by(counted(TRUTH, a_day, 900.0, seed), PRIOR)
    assert off(PRIOR.step) > 0.3
    assert off(made.step) < 0.03
    assert all(one.told for one in corrections)
    assert made.residuals.held_out_mean < 0.03
    assert made.kv == PRIOR.kv


@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
def test_a_profile_of_quite_another_machine_will_do(scale):
    prior = replace(PRIOR, step=PRIOR.step.scaled(scale, scale))
    made, _ = calibrated_by(counted(TRUTH, a_day, 900.0), prior)
    assert off(made.step) < 0.03


def test_a_machine_that_is_slow_in_prefill_alone_is_told_within_minutes():
    """A CPU against the profile of a GPU: a step takes twice as long, a prompt's token 75 times."""
    truth = StepModel(0.0175, 7.7e-4, 1.3e-4, 7e-6)
    gpu = replace(PRIOR, step=StepModel(0.0074, 1.02e-5, 1.02e-5, 4.2e-8))
    few = counted(truth, lambda t: 1.2 + np.sin(t / 12), 360.0, 0, 0.1, prompt=150.0, output=40.0)
    made, _ = calibrated_by(few, gpu)
    assert made.step.per_prefill_token_s == pytest.approx(7.7e-4, rel=0.1)
    assert made.frontend.per_request_s < 0.03
    batch = np.array([0, 0, 150, 300]), np.array([1, 8, 3, 5]), np.array([200, 1600, 600, 1000])
    assert np.abs(made.step.step_s(*batch) / truth.step_s(*batch) - 1).mean() < 0.08


def test_errors_of_the_factors_are_about_as_large_as_they_are_off():
    z = []
    for seed in range(6):
        _, corrections = calibrated_by(counted(TRUTH, a_day, 300.0, seed), PRIOR)
        base, prefill = (by_name(corrections)[name] for name in ("base_s", "per_prefill_token_s"))
        z += [(base.factor - 2.0) / base.error, (prefill.factor - 2 / 3) / prefill.error]
    assert 0.2 < np.sqrt(np.mean(np.square(z))) < 6.0


def test_traffic_that_never_varies_scales_the_whole_and_says_so():
    """One request at a time, all alike: what its steps took is learned, and nothing else."""
    one = Interval(3.0, 200.0, 200 * 0.013, 2.0, 0.1, 200.0, 1.0, 0.0, 300.0)
    made, corrections = calibrated_by([one] * 100, PRIOR)
    told = by_name(corrections)
    assert told["base_s"].told
    assert not told["per_sequence_s"].told
    assert not told["per_context_token_s"].told
    ratio = told["per_sequence_s"].factor / told["per_context_token_s"].factor
    assert ratio == pytest.approx(1.0, rel=0.1)
    assert float(made.step.step_s(0, 1, 300)) == pytest.approx(0.013, rel=0.05)


def test_hinges_and_optional_terms_are_corrected_with_the_others():
    truth = replace(TRUTH, per_prefill_sum_sq_s=2e-9, hinges=(Hinge("sequences", 16, 4e-4),))
    prior = replace(PRIOR, step=truth.scaled(0.5, 2.0))
    made, corrections = calibrated_by(counted(truth, lambda t: 2 * a_day(t), 600.0), prior)
    assert off(made.step, truth) < 0.05
    assert "hinge of sequences from 16" in by_name(corrections)


def test_what_first_tokens_take_beside_steps_becomes_the_frontend():
    made, _ = calibrated_by(counted(TRUTH, a_day, 900.0, frontend_s=0.03), PRIOR)
    assert made.frontend.per_request_s == pytest.approx(0.03, abs=0.008)


def test_a_hiccup_of_the_machine_moves_next_to_nothing():
    intervals = [*counted(TRUTH, a_day, 900.0)]
    for k in range(0, len(intervals), 25):
        intervals[k] = intervals[k]._replace(gaps_s=5 * intervals[k].gaps_s)
    made, _ = calibrated_by(intervals, PRIOR)
    assert off(made.step) < 0.04


def shaken(spread, seed=0):
    """A day whose times between tokens are off by a factor of their own in each interval."""
    rng = np.random.default_rng(seed)
    day = counted(TRUTH, a_day, 900.0)
    return [one._replace(gaps_s=one.gaps_s * factor) for one in day for factor in [rng.lognormal(0, spread)]]


def test_a_busy_host_s_scatter_is_calibrated_and_times_of_no_engine_are_refused():
    made, _ = calibrated_by(shaken(0.4), PRIOR)
    assert off(made.step) < 0.3
    with pytest.raises(BadInput, match=r"does not fit: intervals are \d+ % off .*, at most 50 %"):
        calibrated_by(shaken(2.0), PRIOR)


def test_too_little_traffic_is_refused_in_a_line():
    intervals = counted(TRUTH, a_day, 900.0)
    with pytest.raises(BadInput, match=r"\d+ tokens in 2 intervals with traffic; 300 in 6 are needed"):
        calibrated_by(intervals[5:7], PRIOR)
    idle = Interval(3.0, *[0.0] * 8)
    with pytest.raises(BadInput, match="0 tokens in 0 intervals"):
        calibrated_by([idle] * 300, PRIOR)


def test_an_engine_that_never_mixes_has_no_such_calibration():
    apart = replace(PRIOR, prefill=PrefillModel(0.01, 1e-4))
    apart = replace(apart, engine=EngineLimits(mode=EngineMode.PREFILL_FIRST))
    with pytest.raises(BadInput, match="expected chunked"):
        calibrated_by(counted(TRUTH, a_day, 60.0), apart)


seconds, counts = st.floats(1e-3, 1e4), st.integers(0, 10**6)
ROW = (
    seconds,
    counts,
    seconds,
    counts,
    seconds,
    counts,
    counts,
    counts,
    counts,
    counts,
    seconds,
    counts,
    seconds,
)


@examples(40)
@given(st.lists(st.tuples(*ROW), min_size=6, max_size=12))
def test_whatever_an_engine_counts_gives_finite_times_or_a_refusal(rows):
    try:
        made, corrections = calibrated_by([Interval(*row) for row in rows], PRIOR)
    except BadInput:
        return
    assert np.isfinite(made.step.step_s(100, 10, 1000))
    assert all(np.isfinite([one.factor, one.error]).all() for one in corrections)
