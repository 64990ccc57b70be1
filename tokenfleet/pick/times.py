"""Decision times, counted as Prometheus' histograms are."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

EDGES_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.25)


class DecisionTimes:
    """How many decisions took up to each edge, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(EDGES_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        self._counts[bisect_left(EDGES_S, took_s)] += 1
        self.sum_s += took_s

    def buckets(self) -> list[tuple[str, float]]:
        """Those up to each edge, as Prometheus counts them."""
        names = [*(f"{edge:g}" for edge in EDGES_S), "+Inf"]
        return list(zip(names, accumulate(map(float, self._counts)), strict=True))
