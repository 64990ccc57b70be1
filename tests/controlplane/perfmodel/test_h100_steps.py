"""Steps of vLLM 0.32 with an 8B model on an H100, by the GPU's clock and by the engine's.

`serve` ran a replay of four minutes at 6 to 20 requests a second (docs/figures/gpu.md). `h100_steps.csv.gz`
has its steps that followed another at once: each one with a prompt in it, and every fifth of the others.
"""

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


def test_the_library_predicts_them_within_an_eighth(steps):
    (profile,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    ran = samples(steps, "gpu_us")
    ratio = ran.step_s / profile.step.step_s(
        ran.prefill_tokens, ran.sequences, ran.context_tokens, ran.prefill_sum_sq
    )
    has_prompt = ran.prefill_tokens > 0
    assert np.median(ratio[has_prompt]) == pytest.approx(1.11, abs=0.015)
    assert np.median(ratio[~has_prompt]) == pytest.approx(0.91, abs=0.015)


def test_by_the_engines_clock_time_of_prompts_falls_on_the_steps_beside_them(steps):
    by_gpu, by_engine = samples(steps, "gpu_us"), samples(steps, "engine_us")
    has_prompt = by_gpu.prefill_tokens > 0
    assert by_engine.step_s[has_prompt].sum() < 0.85 * by_gpu.step_s[has_prompt].sum()
    assert by_engine.step_s[~has_prompt].sum() > 1.05 * by_gpu.step_s[~has_prompt].sum()
    right, wrong = (fit_step(each, robust=True, quick=True).residuals for each in (by_gpu, by_engine))
    assert right.mean_relative < 0.08
    assert wrong.mean_relative > 2 * right.mean_relative
