"""The factors on a profile's terms, against SciPy's bounded least squares on the rows themselves."""

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile
from scipy.optimize import lsq_linear

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.factors import NormalEquations, Terms
from controlplane.perfmodel.step import Batch, Hinge, StepModel

STEP = StepModel(0.01, 0.0, 1e-3, 1e-6, hinges=(Hinge("sequences", 8.0, 1e-4),))
PROFILE = made_profile(STEP, KvModel(100_000), EngineLimits())


def measured(seed, truth, noise=0.02):
    """Rows of measurements [rows, terms] whose target is 1, and their weights."""
    rng = np.random.default_rng(seed)
    parts = rng.uniform(0.1, 1.0, (60, len(truth)))
    return parts / (parts @ truth * rng.normal(1.0, noise, 60))[:, None], rng.uniform(0.5, 50.0, 60)


factors = st.lists(st.floats(0.3, 3.0), min_size=2, max_size=5).map(np.array)


@given(st.integers(0, 100), factors)
@examples(25)
def test_factors_are_those_of_least_squares_on_the_rows(seed, truth):
    rows, weight = measured(seed, truth)
    root, terms = np.sqrt(weight)[:, None], len(truth)
    found = NormalEquations.of(rows, weight).drawn_to(1.5, 0.4, 0.0, 9.0)
    matrix = np.vstack([rows * root, np.eye(terms) / 0.4])
    wanted = np.concatenate([root[:, 0], np.full(terms, 1.5 / 0.4)])
    assert found == pytest.approx(lsq_linear(matrix, wanted, bounds=(0.0, 9.0)).x, rel=1e-5)


@given(st.integers(0, 100), factors)
@examples(25)
def test_so_are_they_with_the_common_one_that_they_are_drawn_to(seed, truth):
    rows, weight = measured(seed, truth)
    root, terms, doubt = np.sqrt(weight)[:, None], len(truth), np.linspace(0.3, 0.8, len(truth))
    found = NormalEquations.of(rows, weight).with_common(doubt, 1.0, 3.0, 0.0, 9.0)
    alike = np.column_stack([np.eye(terms), -np.ones(terms)]) / doubt[:, None]
    common = np.append(np.zeros(terms), 1.0)[None] / 3.0
    matrix = np.vstack([np.column_stack([rows * root, np.zeros(len(rows))]), alike, common])
    wanted = np.concatenate([root[:, 0], np.zeros(terms), [1.0 / 3.0]])
    assert found == pytest.approx(lsq_linear(matrix, wanted, bounds=(0.0, 9.0)).x, rel=1e-5)
    covariance = NormalEquations.of(rows, weight).covariance(doubt, 3.0)
    assert covariance == pytest.approx(np.linalg.inv(matrix.T @ matrix)[:-1, :-1])


def test_what_rows_cannot_tell_apart_follows_the_common_factor():
    alike = NormalEquations.of(np.tile([0.3, 0.2, 0.0], (400, 1)), np.ones(400))
    *each, common = alike.with_common(np.full(3, 0.5), 1.0, 3.0, 0.01, 99.0)
    assert each == pytest.approx([2.0, 2.0, 2.0], rel=0.02)
    assert common == pytest.approx(alike.common(1e-6, 1.0), rel=0.02)


def test_a_bound_that_is_met_is_held_and_the_rest_goes_on():
    rows, weight = measured(1, np.array([0.05, 2.0, 1.0]), noise=0.0)
    found = NormalEquations.of(rows, weight).drawn_to(1.0, 1e3, 0.5, 4.0)
    assert found[0] == 0.5
    assert 0.5 < found[1] < 4.0


def test_terms_are_those_that_the_profile_has():
    terms = Terms(PROFILE)
    assert terms.names == ["base_s", "per_sequence_s", "per_context_token_s", "hinge of sequences from 8"]
    batch = Batch(0.0, 10.0, 500.0)
    assert terms.seconds(batch).sum() == pytest.approx(float(STEP.step_s(0.0, 10.0, 500.0)))
    assert terms.times(np.full(4, 2.0)) == STEP.scaled(2.0, 2.0)
    with pytest.raises(BadInput, match="every coefficient is 0"):
        Terms(made_profile(StepModel(0.0, 0.0, 0.0, 0.0), KvModel(100_000), EngineLimits()))
