"""Weights: what a worker of each type is worth in reference workers, and how many of those bought stand.

The reference is the type that carries least of this traffic. Demand is counted in tenths of its workers:
rounded to whole ones it would ask for half a worker too many, in the mean. At the lengths seen, x_v(c) being
what a worker of type v carries of class c (scaler.line) and s_c the class's share of the requests,

    capacity_v = 1 / Σ_c s_c / x_v(c)        weight_v = capacity_v / capacity_reference

Lengths drift all the time, a little. The weights do not change until one of them is off by more than `DRIFT`,
so that the fleet is not rearranged for nothing.

A spot worker is reclaimed r times an hour, independently of the others, and stands again after the cold start
T. So at any time it is missing with probability q = r·T / (1 + r·T). Of n bought, Binomial(n, q) are missing.
An event that takes many workers at once, such as a zone that is cleared, is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.line import LEAST_REQUESTS, Line, capacity_rps
from controlplane.scaler.traffic import Traffic
from controlplane.worker_type import WorkerType

DRIFT = 0.1
PARTS = 10  # of a reference worker: what demand is rounded up to
HAIR = 1e-6  # weights are rounded numbers: 3 · 0.33 carries 0.99


@dataclass(frozen=True, slots=True)
class Weights:
    """What a worker of each type, by name, carries in workers of the `reference` type.

    Not `known`: all are taken as even.
    """

    reference: str
    of: Mapping[str, float]
    known: bool = True

    def scaled(self, line: Line, name: str) -> Line:
        """A line in workers of one type, in reference workers."""
        weight = self.of[name]
        return line.times(weight)


def weigh(
    worker_types: Sequence[WorkerType], there: Mapping[str, int], traffic: Traffic, before: Weights | None
) -> Weights | None:
    """The weights at the lengths of `traffic`; `before` while they still hold.

    None before enough was seen, or while a type without a profile is wanted (`there`, or its `low`). Such
    types are left out where there is no worker of them.
    """
    if any(t.low or there.get(t.name) for t in worker_types if t.known_profile is None):
        return None
    profiles = {t.name: t.known_profile for t in worker_types if t.known_profile is not None}
    same = before if before is not None and before.of.keys() == profiles.keys() else None
    if traffic.requests < LEAST_REQUESTS or not profiles:
        return same
    capacity = {name: _capacity_rps(profile, traffic) for name, profile in profiles.items()}
    if same is not None and _hold(same, capacity):
        return same
    reference = min(capacity, key=lambda name: (capacity[name], name))
    return Weights(reference, {name: round(c / capacity[reference], 3) for name, c in capacity.items()})


def _hold(weights: Weights, capacity: Mapping[str, float]) -> bool:
    """Whether weights are still what these capacities say, within DRIFT."""
    unit = capacity[weights.reference]
    return all(abs(capacity[name] / unit / weight - 1.0) <= DRIFT for name, weight in weights.of.items())


def even(worker_types: Sequence[WorkerType]) -> Weights:
    """Every worker as good as any other: all that can be said where `weigh` knows nothing.

    Of the types with a profile, where there are any.
    """
    profiled = [t.name for t in worker_types if t.known_profile is not None]
    names = profiled or [t.name for t in worker_types]
    return Weights(names[0], dict.fromkeys(names, 1.0), known=False)


def _capacity_rps(profile: Profile, traffic: Traffic) -> float:
    return traffic.requests / sum(c.requests / capacity_rps(profile, c) for c in traffic.classes)


def in_parts(workers: float) -> int:
    """Reference workers in whole `PARTS`, no more than there are."""
    return math.floor(workers * PARTS + HAIR)


def missing_share(reclaims_per_h: float, cold_start_s: float) -> float:
    """Probability that a worker is missing at a given time: gone for T after every 1/r hours on average."""
    gone = reclaims_per_h * cold_start_s / 3600.0
    return gone / (1.0 + gone)


def enough_stand(needed: int, spares: int, missing: float) -> float:
    """P(at least `needed` of `needed + spares` workers stand)."""
    from scipy.special import bdtr  # 14 MB, for fleets that scale

    return float(bdtr(spares, needed + spares, missing))


@lru_cache(4096)
def most_missing(workers: int, missing: float, survive: float) -> int:
    """The fewest k with P(at most k of `workers` are missing) >= survive."""
    k = 0
    while k < workers and enough_stand(workers - k, k, missing) < survive:
        k += 1
    return k
