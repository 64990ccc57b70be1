"""The segmentation of a series is the cheapest of all there are."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from controlplane.scaler.segments import cuts_of


def cost_of(values: np.ndarray, cuts: list[int], penalty: float) -> float:
    ends = [0, *cuts, len(values)]
    return sum(
        float(((part := values[a:b]) - part.mean()) @ (part - part.mean())) for a, b in pairwise(ends)
    ) + (penalty * (len(cuts) + 1))


@pytest.mark.parametrize("least", [1, 2, 3])
def test_no_other_cuts_cost_less(least: int) -> None:
    found = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        values = np.repeat(rng.normal(0, 3, 3), 4) + rng.normal(0, 1, 12)
        penalty = float(rng.uniform(0.5, 6.0))
        cuts = cuts_of(values, penalty, least)
        assert all(b - a >= least for a, b in pairwise([0, *cuts, len(values)]))
        every = [
            list(some)
            for n in range(12 // least)
            for some in combinations(range(1, 12), n)
            if all(b - a >= least for a, b in pairwise([0, *some, 12]))
        ]
        cheapest = min(cost_of(values, some, penalty) for some in every)
        assert cost_of(values, cuts, penalty) == pytest.approx(cheapest)
        found += len(cuts)
    assert found > 40


def test_a_series_shorter_than_two_segments_has_no_cut() -> None:
    assert cuts_of([0.0, 0.0, 9.0, 9.0], 0.1, 3) == []
    assert cuts_of([], 0.1, 3) == []
