"""Spot workers are reclaimed: how many of those bought stand at a time.

Each is reclaimed r times an hour, independently of the others, and stands again after the cold start T; so at
any time it is missing with probability q = r·T / (1 + r·T), and of n bought Binomial(n, q) are. What takes
many workers at once, such as a zone that is cleared, is not covered.
"""

from __future__ import annotations

from scipy.special import bdtr


def missing_share(reclaims_per_h: float, cold_start_s: float) -> float:
    """Probability that a worker is missing at a given time: gone for T after every 1/r hours on average."""
    gone = reclaims_per_h * cold_start_s / 3600.0
    return gone / (1.0 + gone)


def enough_stand(needed: int, spares: int, missing: float) -> float:
    """P(at least `needed` of `needed + spares` workers stand)."""
    return float(bdtr(spares, needed + spares, missing))


def most_missing(workers: int, missing: float, survive: float) -> int:
    """The fewest k with P(at most k of `workers` are missing) >= survive."""
    k = 0
    while k < workers and enough_stand(workers - k, k, missing) < survive:
        k += 1
    return k
