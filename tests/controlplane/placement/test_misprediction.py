"""Errors of predicted lengths: what is learned from them, and what is not."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.lengths import LengthTable
from controlplane.placement.misprediction import SHORTEST, Z2, factor_of, size_of
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import WorkerSpec, prepare

PROFILE = made_profile(
    StepModel(0.005, 1e-5, 1e-4, 1e-7),
    KvModel(100_000, 16, 1),
    EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=4096, max_seqs=64),
    PrefillModel(0.002, 1e-5),
)


def load(n=900):
    """Answers of some 100 tokens, exponential."""
    rng = np.random.default_rng(5)
    outputs = np.maximum(rng.exponential(100, n), 1).astype(np.int64)
    return Workload(np.cumsum(rng.exponential(0.05, n)), rng.integers(5, 200, n), outputs)


def factors(history):
    """The factors after a run whose predictor has seen these answers, and the run."""
    workload = load()
    lengths = LengthTable.from_history(workload.prompt_tokens, history(workload.output_tokens))
    run = prepare(workload, [WorkerSpec(PROFILE)] * 2, Slo(5.0, 0.5), "spread", predictor=lengths)
    advance(run.ledger, run.engines, run.cluster, run.rules, np.inf)
    return run.ledger.errors.factor, run


def test_answers_half_as_long_as_predicted_halve_the_predictions_that_follow():
    factor, run = factors(lambda outputs: outputs * 2)
    sizes = {size_of(int(guess)) for guess in run.ledger.requests["guess"]}
    assert all(0.42 < factor[size] < 0.65 for size in sizes)
    shorter = run.ledger.requests["predicted"] / run.ledger.requests["guess"]
    assert np.median(shorter[-50:]) < 0.65
    assert (shorter[:20] >= 1.0).all(), "no answer was known when these were placed"


def test_right_predictions_and_answers_longer_than_predicted_change_nothing():
    for history in (lambda outputs: outputs, lambda outputs: np.maximum(outputs // 2, 1)):
        factor, run = factors(history)
        assert (factor == 1.0).all()
        begun = run.ledger.errors.counts[0]
        assert begun == len(run.workload)


@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=60))
def test_a_factor_lies_between_the_mean_error_and_none(pairs):
    """(predicted, real); s is between 0 and 1, and 0 while chance explains the error."""
    predicted, real = np.array(pairs, float).T
    e = real - predicted
    sums = np.array([e.sum(), predicted.sum(), (e * e).sum(), (e * predicted).sum(), (predicted**2).sum()])
    factor = factor_of(sums, 1.0)
    least = max(1.0 + min(e.sum() / predicted.sum(), 0.0), SHORTEST)
    assert least - 1e-9 <= factor <= 1.0
    if e.sum() >= 0 or e.sum() ** 2 <= Z2 * (e * e).sum():
        assert factor == 1.0


def test_a_size_that_few_requests_have_is_corrected_as_all_are():
    few = np.array([-10.0, 20.0, 100.0, -200.0, 400.0])  # one request, half as long as predicted
    assert factor_of(few, 0.5) == 0.5
    assert factor_of(np.zeros(5), 0.5) == 0.5
