"""Length mixes: the published workloads to the token, the measured ones to their percentiles."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from controlplane.errors import BadInput
from tokenfleet.traces.distributions import (
    AZURE_CONV,
    NAMED,
    PUBLISHED_SEED,
    SHAREGPT,
    Lognormal,
    Percentiles,
    PowerLaw,
    Uniform,
)

# Llumnix (OSDI '24), Table 1: percentiles 50, 80, 95, 99 of the prompts and of the outputs, prompts' mean.
TABLE_1 = {
    "S": ((38, 113, 413, 1464), (35, 103, 411, 1540), 128.0),
    "M": ((32, 173, 1288, 4208), (30, 175, 1350, 4295), 253.7),
    "L": ((55, 582, 3113, 5166), (52, 615, 3153, 5054), 512.7),
}


def by_hand(rng: np.random.RandomState, mean: int, alpha: float) -> NDArray[np.float64]:
    """One side of a published workload, drawn by inverting the distribution."""
    rank = np.arange(1, 2 * mean)
    weight = rank**-alpha
    up_to = np.cumsum(weight / weight.sum())
    drawn = rank[np.searchsorted(up_to / up_to[-1], rng.random_sample(10_000), side="right")]
    return np.minimum(np.ceil(drawn * mean / drawn.mean()), 6144)


@pytest.mark.parametrize("name", TABLE_1)
def test_the_power_laws_give_the_published_table(name: str) -> None:
    prompts, outputs = NAMED[name].draw(10_000, np.random.RandomState(PUBLISHED_SEED))
    prompt_row, output_row, mean = TABLE_1[name]
    assert tuple(np.percentile(prompts, [50, 80, 95, 99]).astype(int)) == prompt_row
    assert tuple(np.percentile(outputs, [50, 80, 95, 99]).astype(int)) == output_row
    assert prompts.mean() == pytest.approx(mean, abs=0.05)


@pytest.mark.parametrize(("name", "mean", "alpha"), [("S", 128, 2.0), ("M", 256, 1.5), ("L", 512, 1.15)])
def test_the_power_laws_are_drawn_by_inversion_to_the_token(name: str, mean: int, alpha: float) -> None:
    rng = np.random.RandomState(PUBLISHED_SEED)
    prompts, outputs = by_hand(rng, mean, alpha), by_hand(rng, mean, alpha)
    ours = NAMED[name].draw(10_000, np.random.RandomState(PUBLISHED_SEED))
    assert np.array_equal(ours[0], prompts)
    assert np.array_equal(ours[1], outputs)


@pytest.mark.parametrize(
    ("name", "prompt_mean", "output_mean"), [("azure-conv", 1154.7, 211.1), ("sharegpt", 2340.0, 438.7)]
)
def test_measured_mixes_have_the_means_of_what_was_measured(
    name: str, prompt_mean: float, output_mean: float
) -> None:
    prompts, outputs = NAMED[name].draw(200_000, np.random.default_rng(3))
    assert prompts.mean() == pytest.approx(prompt_mean, rel=0.015)
    assert outputs.mean() == pytest.approx(output_mean, rel=0.015)


@pytest.mark.parametrize("side", [AZURE_CONV.prompt, AZURE_CONV.output, SHAREGPT.prompt, SHAREGPT.output])
def test_percentiles_are_drawn_as_they_stand(side: Percentiles) -> None:
    drawn = side.draw(200_000, np.random.default_rng(4))
    share_below = [np.mean(drawn <= tokens) * 100 for tokens in side.tokens]
    assert list(side.percent) == sorted(side.percent)
    assert all(below >= at - 0.5 for below, at in zip(share_below, side.percent, strict=True))


@given(st.floats(1, 5000), st.floats(0.05, 1.5))
def test_a_lognormal_has_its_mean_and_spread(mean: float, cv: float) -> None:
    drawn = Lognormal(mean, cv).draw(20_000, np.random.default_rng(5))
    # Rounding, and the floor of one token, move a short law by up to half a token or so.
    assert drawn.mean() == pytest.approx(mean, rel=0.1, abs=1.0)
    assert drawn.min() >= 1


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(1, 300), st.integers(0, 2**31))
def test_a_uniform_stays_within_its_ends(least: int, width: int, requests: int, seed: int) -> None:
    drawn = Uniform(least, least + width).draw(requests, np.random.default_rng(seed))
    assert len(drawn) == requests
    assert least <= drawn.min() <= drawn.max() <= least + width


@pytest.mark.parametrize("name", NAMED)
def test_no_requests_have_no_lengths(name: str) -> None:
    prompts, outputs = NAMED[name].draw(0, np.random.default_rng(0))
    assert len(prompts) == len(outputs) == 0


def test_a_power_law_is_capped() -> None:
    assert PowerLaw(512, 1.15, most_tokens=700).draw(5000, np.random.default_rng(0)).max() == 700


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lognormal(0, 1),
        lambda: Lognormal(float("nan"), 1),
        lambda: Lognormal(10, 0),
        lambda: Uniform(0, 5),
        lambda: Uniform(5, 4),
    ],
)
def test_impossible_laws_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(BadInput, match="lengths: "):
        make()
