"""Requests with lengths that are log-normal: the load of the studies on real engines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.workload import Workload

Side = tuple[float, float, int, int]  # median, standard deviation of the logarithm, least and most tokens


def lengths(count: int, rng: np.random.Generator, *sides: Side) -> list[NDArray[np.int64]]:
    """Tokens of `count` requests, an array for each side."""
    return [
        np.clip(np.round(median * np.exp(spread * rng.standard_normal(count))), least, most).astype(np.int64)
        for median, spread, least, most in sides
    ]


def poisson(rate_rps: float, count: int, seed: int, prompt: Side, output: Side) -> Workload:
    """`count` requests with Poisson arrivals."""
    rng = np.random.default_rng(seed)
    return Workload(np.cumsum(rng.exponential(1 / rate_rps, count)), *lengths(count, rng, prompt, output))
