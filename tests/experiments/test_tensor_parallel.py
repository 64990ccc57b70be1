"""All-reduce tables."""

from pathlib import Path

import numpy as np
import pytest

from controlplane.errors import BadInput
from experiments.lib.tensor_parallel import AllReduceTable, all_reduce_table


def table() -> AllReduceTable:
    size = np.tile(np.array([1e3, 1e5, 1e7]), 2)
    return all_reduce_table(
        "made",
        np.repeat([2, 4], 3),
        size,
        np.array([1e-5, 2e-5, 1e-3, 3e-5, 8e-5, 9e-3]),
    )


def test_all_reduce_is_looked_up_between_sizes_and_never_between_degrees() -> None:
    made = table()
    assert made.time_s(1e5, 4) == pytest.approx(8e-5)
    assert made.time_s([1e4], 2)[0] == pytest.approx((1e-5 * 2e-5) ** 0.5)
    assert made.time_s(1.0, 2) == pytest.approx(1e-5)  # latency below the smallest
    assert made.time_s(3e7, 2) == pytest.approx(3e-3)  # bandwidth above the largest
    assert made.time_s(1e5, 1) == 0
    with pytest.raises(BadInput, match="TP 8 was not measured; there is 2, 4"):
        made.time_s(1e5, 8)
    grid = np.geomspace(1, 1e9, 200)
    assert (np.diff(made.time_s(grid, 4)) >= 0).all()


def test_all_reduce_tables_take_the_median_and_refuse_nonsense() -> None:
    made = all_reduce_table("made", [2, 2, 2, 2], [1.0, 1.0, 1.0, 2.0], [1.0, 5.0, 1.0, 2.0])
    assert made.time_s(1.0, 2) == 1.0
    with pytest.raises(BadInput, match="positive"):
        all_reduce_table("made", [2, 2], [1.0, 2.0], [1.0, -2.0])
    with pytest.raises(BadInput, match="two or more sizes"):
        all_reduce_table("made", [2], [1.0], [1.0])


def test_measured_all_reduce_has_a_cliff_that_no_law_in_n_has(bench_data: Path) -> None:
    rows = np.genfromtxt(
        bench_data / "vidur_network" / "a100_pairwise_nvlink.csv",
        delimiter=",",
        names=True,
        usecols=(4, 7, 8, 10),
        dtype=float,
    )
    names = rows.dtype.names
    kept = rows[rows[names[1]] == rows[names[3]]]
    made = all_reduce_table("pairwise", kept[names[1]], kept[names[2]], kept[names[0]] / 1e3)
    # (N - 1)/N would say 1.5 times.
    assert made.time_s(16.8e6, 4) / made.time_s(16.8e6, 2) > 8
