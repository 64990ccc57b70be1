"""Spot workers can be reclaimed: how many more than serve must be bought, so that enough stand (N + k).

How many stand is scaler.reclaims' binomial of rate r and cold start. While fewer than the N that the target
needs stand, every request counts as missed; and so does every request that was running on a worker when it
was reclaimed (share 1 - exp(-r·d), d the mean time of a request). Both are more than is really lost.

    attainment >= low(N) · P(at least N of N + k stand) · exp(-r·d)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from controlplane.scaler.reclaims import enough_stand, missing_share
from tokenfleet.planning.fleet import Fleet

MOST_SPARES = 64


@dataclass(frozen=True, slots=True)
class Spares:
    """What is bought beyond the serving fleet, and what that leaves of its attainment.

    `availability`: share of the time in which every group has as many workers as it needs. `untouched`: share
    of the requests whose worker is not reclaimed under them. `one_fewer`: availability with one spare less.
    """

    serving: Fleet
    bought: Fleet
    reclaims_per_h: float
    cold_start_s: float
    availability: float
    untouched: float
    one_fewer: float

    @property
    def workers(self) -> int:
        return self.bought.workers - self.serving.workers

    @property
    def survives(self) -> float:
        """What attainment is multiplied by, at least."""
        return self.availability * self.untouched


def spares_for(
    serving: Fleet,
    low: float,
    target: float,
    reclaims_per_h: float,
    cold_start_s: float,
    request_s: float,
) -> Spares | None:
    """The fewest spares, each where a dollar helps most, with which `low` of `serving` still meets `target`.

    `request_s`: mean time a request runs. None where no number of spares does, because reclaims hit too many
    running requests (or `low` is no more than the target).
    """
    missing = missing_share(reclaims_per_h, cold_start_s)
    untouched = math.exp(-reclaims_per_h * request_s / 3600.0)
    if low * untouched <= target:
        return None
    extra = [0] * len(serving.groups)

    def standing(counts: list[int]) -> float:
        return math.prod(
            enough_stand(g.workers, k, missing) for g, k in zip(serving.groups, counts, strict=True)
        )

    before = standing(extra)
    while low * untouched * standing(extra) < target:
        if sum(extra) >= MOST_SPARES:
            return None
        before = standing(extra)

        def gain(i: int, before: float = before) -> float:
            more = [k + (i == j) for j, k in enumerate(extra)]
            price = serving.groups[i].offer.usd_per_worker_h or float(serving.groups[i].offer.gpus)
            return (standing(more) - before) / price

        best = max(range(len(extra)), key=lambda i: (gain(i), -i))
        extra[best] += 1
    groups = tuple(replace(g, workers=g.workers + k) for g, k in zip(serving.groups, extra, strict=True))
    return Spares(serving, Fleet(groups), reclaims_per_h, cold_start_s, standing(extra), untouched, before)
