"""The output-length predictor against history itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.placement.lengths import LengthTable, expected_output

histories = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 400)), min_size=1, max_size=120)


def the_columns(history: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    prompt, output = np.array(history, np.int64).T
    return prompt, output


@given(histories, st.integers(1, 8), st.integers(1, 30), st.integers(0, 63))
def test_predictions_of_the_survivors_add_up_to_what_they_produced(history, bins, thin, generated):
    prompt, output = the_columns(history)
    table = LengthTable.from_history(prompt, output, bins, thin)
    alive = output > generated
    predicted = table.predict(prompt[alive], generated)
    assert predicted.sum() == pytest.approx(output[alive].sum(), rel=1e-9)


@given(histories, st.integers(1, 8), st.integers(0, 3000), st.integers(0, 1000))
def test_an_expectation_always_exceeds_what_is_generated(history, bins, prompt, generated):
    table = LengthTable.from_history(*the_columns(history), bins, 5)
    # At least one token more, up to rounding.
    assert table.predict(prompt, generated) >= generated + 1 - 1e-6


@given(histories, st.integers(1, 20), st.integers(1, 30))
def test_edges_increase_and_every_bin_is_thick_enough(history, bins, thin):
    prompt, output = the_columns(history)
    edges = LengthTable.from_history(prompt, output, bins, thin).bin_edges
    assert (np.diff(edges) > 0).all()
    counts = np.histogram(prompt.astype(float), edges.astype(float))[0]
    assert len(counts) <= bins
    assert len(counts) == 1 or counts.min() >= thin


@given(histories, st.integers(0, 500))
def test_one_thick_bin_is_the_plain_conditional_mean(history, generated):
    prompt, output = the_columns(history)
    table = LengthTable.from_history(prompt, output, bins=1)
    if generated in table.grid:
        truth = output[output > generated].mean()
        assert table.predict(7, generated) == pytest.approx(truth)


def test_bins_tell_short_prompts_from_long_ones():
    rng = np.random.default_rng(1)
    prompt = np.concatenate((rng.integers(1, 100, 5000), rng.integers(1000, 2000, 5000)))
    output = np.where(prompt < 500, rng.geometric(1 / 50, 10000), rng.geometric(1 / 300, 10000))
    table = LengthTable.from_history(prompt, output, bins=2)
    assert table.predict([50, 1500]) == pytest.approx([50, 300], rel=0.1)
    # A geometric length has no memory: the rest is the mean again, whatever was generated.
    assert table.predict([50, 1500], [20, 100]) == pytest.approx([70, 400], rel=0.1)


def test_a_thin_bin_leans_on_the_others():
    prompt = np.array([10] * 1000 + [5000] * 2)
    output = np.array([100] * 1000 + [900] * 2)
    table = LengthTable.from_history(prompt, output, bins=1000, thin=1)
    assert 100 < table.predict(5000) < 300


def test_past_all_history_the_expected_rest_stays():
    table = LengthTable.from_history([5, 5, 5], [10, 20, 200])
    rest = table.predict(5, 199) - 199
    assert rest == pytest.approx(1)
    assert table.predict(5, 100_000) - 100_000 == pytest.approx(1)


def test_the_compiled_look_up_is_the_one_that_predict_uses():
    table = LengthTable.from_history([5, 50, 500] * 100, [10, 40, 300] * 100, bins=3, thin=10)
    one = expected_output(table.bin_edges, table.grid, table.expected_total, 50, 12)
    assert one == table.predict(50, 12) == table.predict([50], [12])[0]
    assert table.predict([[5], [50]], [0, 1, 2]).shape == (2, 3)


@given(st.floats(1, 5000), st.integers(0, 6000), st.integers(1, 10000))
def test_a_constant_stays_until_it_is_reached(mean, generated, prompt):
    predicted = float(LengthTable.constant(mean).predict(prompt, generated))
    assert predicted > generated
    if generated + 1 <= mean:
        assert predicted == pytest.approx(mean)


@pytest.mark.parametrize(
    ("prompt", "output", "said"),
    [
        ([], [], "0 prompts"),
        ([1, 2], [3], "2 prompts and 1 outputs"),
        ([0], [3], "prompt_tokens"),
        ([1], [0], "output_tokens"),
        ([1.0], [float("nan")], "output_tokens"),
        ([[1]], [[1]], "one column"),
    ],
)
def test_an_unusable_history_is_refused(prompt, output, said):
    with pytest.raises(BadInput, match=said):
        LengthTable.from_history(prompt, output)


def test_other_unusable_arguments_are_refused():
    with pytest.raises(BadInput, match="bins"):
        LengthTable.from_history([1], [1], bins=0)
    with pytest.raises(BadInput, match="mean"):
        LengthTable.constant(0.5)
    with pytest.raises(BadInput, match="exceed grid"):
        LengthTable(np.array([0, 9]), np.array([0, 5]), np.array([[3.0, 4.0]]))
