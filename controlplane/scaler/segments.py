"""The optimal segmentation of a series: each segment costs its squared error, and a penalty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled

Floats = NDArray[np.float64]


@compiled
def find_begins(sums: Floats, squares: Floats, penalty: float, least: int, begins: NDArray[np.int64]) -> None:
    """Fill `begins` [values + 1] with where the last segment begins of the best cut up to each value.

    `sums` and `squares` [values + 1]: those of all values before each.
    """
    cost = np.full(len(sums), np.inf)
    cost[0] = 0.0
    for end in range(least, len(sums)):
        best = np.inf
        for begin in range(end - least + 1):
            total = sums[end] - sums[begin]
            error = squares[end] - squares[begin] - total * total / (end - begin)
            if cost[begin] + error < best:
                best = cost[begin] + error
                begins[end] = begin
        cost[end] = best + penalty


def cuts_of(values: Sequence[float] | Floats, penalty: float, least: int) -> list[int]:
    """The indexes at which the segments but the first begin, rising; each has `least` values or more.

    Their squared errors, and `penalty` for each, are the least in sum. None has its cut at 0.
    """
    series = np.asarray(values, np.float64)
    begins = np.zeros(len(series) + 1, np.int64)
    sums, squares = (np.concatenate([[0.0], np.cumsum(of)]) for of in (series, series * series))
    find_begins(sums, squares, penalty, least, begins)
    cuts, at = [], int(begins[-1])
    while at > 0:
        cuts.append(at)
        at = int(begins[at])
    return cuts[::-1]
