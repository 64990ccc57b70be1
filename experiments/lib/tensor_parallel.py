"""All-reduce times looked up in a table.

All-reduce follows no smooth law in the TP degree N: a machine with NVLink between pairs is 9 times slower at
N = 4 than at N = 2. So it is a table learned per topology and N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.errors import BadInput


@dataclass(frozen=True)
class AllReduceTable:
    """Measured all-reduce times of one topology: for each degree, sizes in order [points] and seconds."""

    topology: str
    rows: Mapping[int, tuple[NDArray[np.float64], NDArray[np.float64]]]

    def __post_init__(self) -> None:
        for n, (size, seconds) in self.rows.items():
            if len(size) < 2 or size.shape != seconds.shape or (np.diff(size) <= 0).any():
                raise BadInput(f"all-reduce {self.topology}: TP {n}: two or more sizes in order are needed")
            if not ((size > 0).all() and (seconds > 0).all() and np.isfinite(seconds).all()):
                raise BadInput(f"all-reduce {self.topology}: TP {n}: sizes and times must be positive")

    def time_s(self, size: ArrayLike, tp_degree: int) -> NDArray[np.float64]:
        """Seconds of one all-reduce of each size, in the unit the table was measured in.

        Interpolated between measured sizes on logarithmic scales; below the smallest size the latency of
        the smallest holds, above the largest the bandwidth of the largest. Nothing is made up for a degree
        that was not measured: raises BadInput with those that were. One GPU reduces nothing: 0.
        """
        wanted = np.asarray(size, float)
        if tp_degree == 1:
            return np.zeros_like(wanted)
        if tp_degree not in self.rows:
            known = ", ".join(str(n) for n in sorted(self.rows))
            raise BadInput(f"all-reduce {self.topology}: TP {tp_degree} was not measured; there is {known}")
        sizes, seconds = self.rows[tp_degree]
        inside = np.clip(wanted, sizes[0], sizes[-1])
        t = np.exp(np.interp(np.log(inside), np.log(sizes), np.log(seconds)))
        return np.asarray(t * np.maximum(wanted / sizes[-1], 1.0), float)


def all_reduce_table(
    topology: str, tp_degree: ArrayLike, size: ArrayLike, seconds: ArrayLike
) -> AllReduceTable:
    """A table from raw measurements, shape [measurements]: the median of each (degree, size)."""
    n, x, t = (np.asarray(v, float) for v in (tp_degree, size, seconds))
    rows = {}
    for degree in np.unique(n):
        sizes = np.unique(x[n == degree])
        medians = np.array([np.median(t[(n == degree) & (x == s)]) for s in sizes])
        rows[int(degree)] = (sizes, medians)
    return AllReduceTable(topology, rows)
