"""The cheapest mix of worker kinds that carries the demand: an integer program.

    minimise    Σ cost_v · n_v + launch_v · (n_v - there_v)⁺ + let_go_v · (there_v - n_v)⁺
    subject to  Σ capacity_v · s_v(n_v) >= demand
                Σ gpus_v · n_v <= max_gpus,   Σ usd_v · n_v <= budget,   least <= Σ n_v <= most,
                low_v <= n_v <= high_v, integer

s_v(n) of n workers can be counted on: all, unless they are spot workers; then one of the pairs (n, s_v(n)) is
chosen by a binary variable each. A planner, who starts from nothing, pays no launches.

Written with PuLP because it then reads as above; CBC solves a dozen kinds in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind in the program. `capacity`: of one that stands, in the demand's unit.

    `launch` and `let_go`: what a worker more or fewer than the `there` that are costs besides, as shares of a
    worker's price. `stands`: how many of n bought can be counted on, never falling in n; None = all.
    """

    capacity: float
    gpus: int = 1
    usd_per_h: float | None = None
    low: int = 0
    high: int | None = None
    there: int = 0
    launch: float = 0.0
    let_go: float = 0.0
    stands: Callable[[int], int] | None = None

    def standing(self, count: int) -> int:
        return count if self.stands is None else self.stands(count)


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """What all kinds together must keep to; None = no limit."""

    max_gpus: int | None = None
    budget_usd_per_h: float | None = None
    least: int = 0
    most: int | None = None


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
    candidates = [Candidate(o.capacity, o.variant.tp_degree, o.usd_per_hour, high=o.limit) for o in offers]
    found = cheapest_counts(demand, candidates, FleetLimits(max_gpus, budget_usd_per_h), time_limit_s)
    return {o.variant: count for o, count in zip(offers, found, strict=True) if count}


def cheapest_counts(
    demand: float, candidates: Sequence[Candidate], limits: FleetLimits, time_limit_s: float = 10.0
) -> list[int]:
    """How many of each carry `demand` (0 = nothing to carry) at least cost. Ranks and raises as above."""
    program = _Program(demand, candidates, limits, _upper_bounds(demand, candidates, limits))
    program.problem += program.cost
    if demand > 0:
        program.problem += program.carried >= 1.0
    if limits.least:
        program.problem += program.workers >= limits.least
    return program.solved(time_limit_s)


def most_counts(
    demand: float, candidates: Sequence[Candidate], limits: FleetLimits, time_limit_s: float = 10.0
) -> list[int]:
    """The counts with most capacity, for a demand that is too much for any; `limits.least` is no bound here.

    Of equally able ones the cheapest. Raises Infeasible where `low`s and limits contradict each other.
    """
    program = _Program(demand, candidates, limits, _upper_bounds(demand, candidates, limits))
    program.problem += _TIE * program.cost - program.carried
    return program.solved(time_limit_s)


class _Program:
    """Variables and limits; carried is in shares of the demand, cost in the dearest worker's price."""

    def __init__(
        self, demand: float, candidates: Sequence[Candidate], limits: FleetLimits, bounds: Sequence[int]
    ) -> None:
        priced = all(c.usd_per_h is not None for c in candidates)
        if limits.budget_usd_per_h is not None and not priced:
            raise BadInput("mix: a budget needs a price for every kind of worker")
        self.problem = pulp.LpProblem("fleet", pulp.LpMinimize)
        usd = [c.usd_per_h or 0.0 for c in candidates]
        tie = _TIE * (max(usd) if any(usd) else 1.0)
        price = [u + tie * c.gpus if priced else float(c.gpus) for u, c in zip(usd, candidates, strict=True)]
        unit = max(max(price, default=1.0), tie)
        self.counts: list[Any] = []
        carried, cost = [], []
        for i, (c, bound) in enumerate(zip(candidates, bounds, strict=True)):
            n, standing = self._count(i, c, bound)
            self.counts.append(n)
            carried.append(c.capacity / (demand or 1.0) * standing)
            cost.append(price[i] / unit * n)
            for name, share, sign in (("launched", c.launch, 1), ("let_go", c.let_go, -1)):
                if share:
                    more = self.problem.add_variable(f"{name}{i}", lowBound=0)
                    self.problem += more >= sign * (n - c.there)
                    cost.append(share * price[i] / unit * more)
        self.carried, self.cost, self.workers = map(pulp.lpSum, (carried, cost, self.counts))
        if limits.max_gpus is not None:
            gpus = pulp.lpSum(c.gpus * n for c, n in zip(candidates, self.counts, strict=True))
            self.problem += gpus <= limits.max_gpus
        if limits.budget_usd_per_h is not None:
            spent = pulp.lpSum(u * n for u, n in zip(usd, self.counts, strict=True))
            self.problem += spent <= limits.budget_usd_per_h + 1e-9
        if limits.most is not None:
            self.problem += self.workers <= limits.most

    def _count(self, i: int, c: Candidate, bound: int) -> tuple[Any, Any]:
        """n_v, and how many of them can be counted on."""
        if c.stands is None:
            n = self.problem.add_variable(f"n{i}", lowBound=c.low, upBound=bound, cat="Integer")
            return n, n
        range_ = range(c.low, bound + 1)
        chosen = [self.problem.add_variable(f"n{i}is{j}", cat="Binary") for j in range_]
        self.problem += pulp.lpSum(chosen) == 1
        return (
            pulp.lpSum(j * z for j, z in zip(range_, chosen, strict=True)),
            pulp.lpSum(c.stands(j) * z for j, z in zip(range_, chosen, strict=True)),
        )

    def solved(self, time_limit_s: float) -> list[int]:
        # The CBC that PuLP 3 ships, called through the interface that PuLP 4 keeps.
        cbc = pulp.COIN_CMD(
            path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, timeLimit=time_limit_s, gapRel=0.0, threads=1
        )
        self.problem.solve(cbc)
        status = pulp.LpStatus[self.problem.status]
        if status != "Optimal":
            raise Infeasible(f"no mix within the limits carries the demand ({status.lower()})")
        return [round(pulp.value(n) or 0) for n in self.counts]


def _upper_bounds(demand: float, candidates: Sequence[Candidate], limits: FleetLimits) -> list[int]:
    """No more of one kind than would carry everything alone, or must be; it keeps the search small."""
    bounds = []
    for c in candidates:
        alone = math.ceil(demand / c.capacity * (1.0 + 1e-9)) + 1
        allowed = min((m for m in (c.high, limits.most) if m is not None), default=None)
        while c.standing(alone) < math.ceil(demand / c.capacity) and (allowed is None or alone < allowed):
            alone += 1
        bound = max(alone, c.low, c.there, limits.least)
        bounds.append(bound if c.high is None else min(bound, c.high))
    return bounds
