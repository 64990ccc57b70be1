"""Steps of vLLM 0.32 with an 8B model on an H100, by the GPU's clock and by the engine's.

`serve` ran a replay of four minutes at 6 to 20 requests a second (docs/figures/gpu.md). `h100_steps.csv.gz`
has its steps that followed another at once: each one with a prompt in it, and every fifth of the others.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import StepSamples
from tokenfleet.profiles.library import find_profiles


@pytest.fixture(scope="module")
def steps():
    return pl.read_csv(Path(__file__).with_name("h100_steps.csv.gz"))


def samples(steps, clock):
    batch = (steps[name].cast(float).to_numpy() for name in ("prefill_tokens", "sequences", "context_tokens"))
    return StepSamples(*batch, steps[clock].to_numpy() / 1e6, steps["prefill_sum_sq"].cast(float).to_numpy())


def test_the_library_predicts_them_within_a_twelfth(steps):
    (profile,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    ran = samples(steps, "gpu_us")
    ratio = ran.step_s / profile.step.step_s(
        ran.prefill_tokens, ran.sequences, ran.context_tokens, ran.prefill_sum_sq
    )
    has_prompt = ran.prefill_tokens > 0
    assert np.median(ratio[has_prompt]) == pytest.approx(1.045, abs=0.015)
    assert np.median(ratio[~has_prompt]) == pytest.approx(0.99, abs=0.015)
    weight = np.where(has_prompt, 1, 5)  # every fifth step of decode is kept
    assert weight @ ran.step_s == pytest.approx(1.04 * (weight @ (ran.step_s / ratio)), rel=0.01)
    assert np.abs(1 / ratio[has_prompt] - 1).mean() < 0.09
    assert np.abs(1 / ratio[~has_prompt] - 1).mean() < 0.04


def test_sequences_beside_a_prompt_and_the_hosts_time_carry_weight(steps):
    """Without either term the library is further off: on steps with both, and on steps of decode alone."""
    (profile,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    ran, model = samples(steps, "gpu_us"), profile.step
    prompts, many = ran.prefill_tokens > 0, ran.sequences > 60

    def off(step, rows):
        some = ran.take(rows)
        return float(np.abs(step.step_s(*some.batch) / some.step_s - 1).mean())

    alone = replace(model, per_prefill_sequence_s=0.0)
    assert off(model, prompts & many) < 0.75 * off(alone, prompts & many)
    shown = profile.with_engine(steps_ahead=0.0).step
    assert shown.step_s(0, 1, 0) - model.step_s(0, 1, 0) == pytest.approx(0.0007)
    assert off(model, ~prompts) < 0.5 * off(shown, ~prompts)


def test_by_the_engines_clock_time_of_prompts_falls_on_the_steps_beside_them(steps):
    by_gpu, by_engine = samples(steps, "gpu_us"), samples(steps, "engine_us")
    has_prompt = by_gpu.prefill_tokens > 0
    assert by_engine.step_s[has_prompt].sum() < 0.85 * by_gpu.step_s[has_prompt].sum()
    assert by_engine.step_s[~has_prompt].sum() > 1.05 * by_gpu.step_s[~has_prompt].sum()
    right, wrong = (fit_step(each, robust=True, quick=True).residuals for each in (by_gpu, by_engine))
    assert right.mean_relative < 0.08
    assert wrong.mean_relative > 2 * right.mean_relative


def test_equal_decode_steps_hardly_differ_but_one_in_sixty_stalls(steps):
    """A stall is the time of one or two steps. Neither it nor what is left comes in a row."""
    ran, alone = samples(steps, "gpu_us"), steps["prefill_tokens"].to_numpy() == 0
    later_s = ran.step_s - fit_step(ran, robust=True, quick=True).model.step_s(*ran.batch)
    stalls = alone & (later_s > 0.005)
    assert np.mean(stalls[alone]) == pytest.approx(1 / 60, abs=0.004)
    assert np.median(later_s[stalls]) == pytest.approx(0.0116, abs=0.002)
    assert np.mean(stalls[1:][stalls[:-1]]) < 0.15
    same = alone[1:] & alone[:-1] & (np.diff(ran.sequences) == 0)
    apart = np.abs(np.diff(np.log(ran.step_s))[same])
    assert np.median(apart) / 0.6745 / np.sqrt(2) < 0.003
