"""The cheapest mix of worker kinds that carries the demand: an integer program.

    minimise    Σ cost_v · n_v
    subject to  Σ capacity_v · n_v >= demand
                Σ gpus_v · n_v <= max_gpus,   Σ usd_v · n_v <= budget,   0 <= n_v <= limit_v, integer

Written with PuLP because it then reads as above; CBC solves a dozen kinds in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from controlplane.errors import BadInput, Infeasible
from controlplane.types import Variant

# So little that it never outweighs a cent, yet of equally dear mixes the one with fewer GPUs wins.
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class MixOffer:
    """A kind of worker: what one carries (any unit, the demand's), its price, and how many can be had."""

    variant: Variant
    capacity: float
    usd_per_hour: float | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.capacity < math.inf:
            raise BadInput(f"mix: {self.variant}: capacity: must be positive, got {self.capacity:g}")
        if self.usd_per_hour is not None and not 0.0 <= self.usd_per_hour < math.inf:
            raise BadInput(f"mix: {self.variant}: usd_per_hour: must not be negative")


def cheapest_mix(
    demand: float,
    offers: Sequence[MixOffer],
    *,
    max_gpus: int | None = None,
    budget_usd_per_h: float | None = None,
    time_limit_s: float = 10.0,
) -> dict[Variant, int]:
    """How many workers of each kind carry `demand` at least cost; kinds with none are left out.

    Ranked by dollars, equal ones by GPUs; by GPUs alone where any price is unknown. Raises Infeasible when
    the limits fall short, BadInput when a budget is given without all prices.
    """
    priced = all(offer.usd_per_hour is not None for offer in offers)
    if budget_usd_per_h is not None and not priced:
        raise BadInput("mix: a budget needs a price for every kind of worker")
    gpus = [offer.variant.tp_degree for offer in offers]
    usd = [offer.usd_per_hour or 0.0 for offer in offers]
    problem = pulp.LpProblem("fleet", pulp.LpMinimize)
    counts = [
        problem.add_variable(f"n{i}", lowBound=0, upBound=_most(offer, demand), cat="Integer")
        for i, offer in enumerate(offers)
    ]
    tie = _TIE * (max(usd) if priced and any(usd) else 1.0)
    cost = [u + tie * g for u, g in zip(usd, gpus, strict=True)] if priced else gpus
    problem += pulp.lpSum(c * n for c, n in zip(cost, counts, strict=True))
    problem += pulp.lpSum(o.capacity / demand * n for o, n in zip(offers, counts, strict=True)) >= 1.0
    if max_gpus is not None:
        problem += pulp.lpSum(g * n for g, n in zip(gpus, counts, strict=True)) <= max_gpus
    if budget_usd_per_h is not None:
        problem += pulp.lpSum(u * n for u, n in zip(usd, counts, strict=True)) <= budget_usd_per_h
    # The CBC that PuLP 3 ships, called through the interface that PuLP 4 keeps.
    cbc = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, timeLimit=time_limit_s, gapRel=0.0, threads=1
    )
    problem.solve(cbc)
    status = pulp.LpStatus[problem.status]
    if status != "Optimal":
        raise Infeasible(f"no mix within the limits carries the demand ({status.lower()})")
    found = {o.variant: round(n.value() or 0) for o, n in zip(offers, counts, strict=True)}
    return {variant: count for variant, count in found.items() if count}


def _most(offer: MixOffer, demand: float) -> int:
    """No more of one kind than would carry everything alone; it keeps the search small."""
    alone = math.ceil(demand / offer.capacity * (1.0 + 1e-9)) + 1
    return alone if offer.limit is None else min(offer.limit, alone)
