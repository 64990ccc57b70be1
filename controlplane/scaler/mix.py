"""The mix: how many workers of each type carry the demand at least cost.

The cheapest counts n_v are those of an integer program:

    minimise    Σ price_v · (n_v + launch · (n_v - there_v)⁺ + drain · (there_v - n_v)⁺)
    subject to  Σ weight_v · s_v(n_v) >= demand
                Σ gpus_v · n_v <= max_gpus,   Σ price_v · n_v <= budget,   least <= Σ n_v <= most,
                low_v <= n_v <= limit_v, integer

s_v(n) of n workers can be counted on: all, unless they are spot workers; then one of the pairs (n, s_v(n)) is
chosen by a binary variable each. What a launch pays in its cold start and a drained worker in its drain is
spread over `horizon_s`. So the mix does not change for one that saves no more than the change costs. A
planner, who starts from nothing, pays no launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pulp

from controlplane.errors import BadInput, Infeasible
from controlplane.scaler.limits import keep_to, solve
from controlplane.scaler.line import HAIR, Weights, missing_share, most_missing
from controlplane.worker_type import WorkerType

Counts = Mapping[str, int]  # workers by the name of their type

SURVIVE = 0.99  # the probability with which at any time enough spot workers stand
# So little that it never outweighs a cent, yet of equally dear mixes the one with fewer GPUs wins.
_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class MixSettings:
    """How counts are chosen among types.

    `horizon_s`: what a change costs (a launch's cold start, a drain) is weighed as if it came once in so
    long. `max_gpus` and `budget_usd_per_h`, which needs every type's price: of all workers together; None: no
    limit.
    """

    horizon_s: float = 900.0
    max_gpus: int | None = None
    budget_usd_per_h: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.horizon_s < math.inf:
            raise BadInput(f"mix: horizon_s: must be a positive duration, got {self.horizon_s:g}")
        if self.budget_usd_per_h is not None and not 0.0 <= self.budget_usd_per_h < math.inf:
            raise BadInput("mix: budget_usd_per_h: must not be negative")

    def beyond(self, types: Iterable[WorkerType], counts: Counts) -> str | None:
        """The limit that these workers, by type, would break, if any. Without a price a type is free."""
        held = [(t, counts.get(t.name, 0)) for t in types]
        gpus, usd = sum(t.gpus * n for t, n in held), sum((t.usd_per_h or 0.0) * n for t, n in held)
        if self.max_gpus is not None and gpus > self.max_gpus:
            return f"{gpus} GPUs are more than the limit of {self.max_gpus}"
        if self.budget_usd_per_h is not None and usd > self.budget_usd_per_h + 1e-9:
            return f"${usd:,.2f}/h is more than the budget of ${self.budget_usd_per_h:,.2f}/h"
        return None


@dataclass(frozen=True, slots=True)
class MixNeed:
    """A demand in reference workers, and what may carry it.

    `worker_types`: their profiles are not read, they count as `weights`. `there`: what is wanted now.
    `least`, `most`: workers of all types together. `cold_start_s`, `drain_s`: what a launch and a drain take.
    """

    worker_types: tuple[WorkerType, ...]
    weights: Weights
    demand: float
    settings: MixSettings = MixSettings()
    there: Counts = field(default_factory=dict)
    least: int = 0
    most: int | None = None
    cold_start_s: float = 0.0
    drain_s: float = 0.0

    def standing(self, worker_type: WorkerType, count: int) -> int:
        """How many of `count` workers can be counted on.

        Types are reclaimed independently: with m spot types each must survive at SURVIVE to the power 1/m.
        """
        missing = missing_share(worker_type.reclaims_per_h, self.cold_start_s)
        if missing == 0.0:
            return count
        spot = sum(t.reclaims_per_h > 0 for t in self.worker_types)
        return count - most_missing(count, missing, SURVIVE ** (1.0 / spot))

    def carries(self, counts: Counts) -> float:
        """Reference workers that these counts can be counted on for; types without a weight carry nothing."""
        return sum(
            self.weights.of.get(t.name, 0.0) * self.standing(t, counts.get(t.name, 0))
            for t in self.worker_types
        )

    def is_enough(self, counts: Counts) -> bool:
        return self.carries(counts) >= self.demand - HAIR

    def is_allowed(self, counts: Counts) -> bool:
        """Whether the limits of the fleet and of its types allow these counts."""
        return (
            (self.most is None or sum(counts.values()) <= self.most)
            and all(t.limit is None or counts.get(t.name, 0) <= t.limit for t in self.worker_types)
            and self.settings.beyond(self.worker_types, counts) is None
        )

    def usd_per_h(self, counts: Counts) -> float | None:
        """What these workers cost an hour; None where a type's price is not known."""
        prices = {t.name: t.usd_per_h for t in self.worker_types}
        there = present(counts)
        usd = [price * n for name, n in there.items() if (price := prices.get(name)) is not None]
        return sum(usd) if len(usd) == len(there) else None

    def alone(self) -> dict[str, int]:
        """How many workers of each type would carry the demand alone, within the limits or not."""
        counts = {}
        for t in self.worker_types:
            if t.name in self.weights.of:
                n = math.ceil(self.demand / self.weights.of[t.name] - HAIR)
                while not self.is_enough({t.name: n}):
                    n += 1
                counts[t.name] = n
        return counts


def check_types(types: Sequence[WorkerType], settings: MixSettings, low: int, high: int | None) -> None:
    """Raises BadInput where names repeat, or limits of types, fleet and budget contradict each other."""
    names = [t.name for t in types]
    if len(set(names)) < len(names):
        raise BadInput(f"worker types: each once, got {', '.join(names)}")
    least = sum(t.low for t in types)
    if high is not None and least > high:
        raise BadInput(f"worker types: low: {least} are always kept, but no more than {high} are allowed")
    limits = [t.limit for t in types if t.limit is not None]
    if names and len(limits) == len(names) and sum(limits) < low:
        raise BadInput(f"worker types: limit: {sum(limits)} can be had, but at least {low} are to be kept")
    if settings.budget_usd_per_h is not None:
        _check_budget(types, settings.budget_usd_per_h)


def _check_budget(types: Sequence[WorkerType], usd_per_h: float) -> None:
    if any(t.usd_per_h is None for t in types):
        raise BadInput("mix: a budget needs a price for every type of worker")
    kept = sum((t.usd_per_h or 0.0) * t.low for t in types)
    if kept > usd_per_h:
        raise BadInput(f"worker types: low: what is always kept costs ${kept:g}/h, more than the budget")


def choose(need: MixNeed) -> dict[str, int]:
    """The cheapest counts that carry the demand; those with most capacity where none within the limits do.

    Types that are not to be chosen from, having no weight, keep what is there.
    """
    weighed = tuple(t for t in need.worker_types if t.name in need.weights.of)
    others = {name: n for name, n in need.there.items() if name not in need.weights.of}
    elsewhere, low = sum(others.values()), sum(t.low for t in weighed)
    most = None if need.most is None else max(need.most - elsewhere, low)
    remaining = replace(need, most=most, least=max(need.least - elsewhere, 0))
    try:
        return cheapest(remaining) | others
    except Infeasible:
        return MixProgram(remaining).most_capable() | others


def cheapest(need: MixNeed) -> dict[str, int]:
    """The cheapest counts that carry the demand; types with none are left out.

    Ranked by dollars, equal ones by GPUs; by GPUs alone where any price is unknown. Raises Infeasible when
    the limits fall short, BadInput when a budget is given without all prices.
    """
    return MixProgram(need).cheapest()


class MixProgram:
    """The integer program: carried is in shares of the demand, cost in the dearest worker's price."""

    def __init__(self, need: MixNeed) -> None:
        types = [t for t in need.worker_types if t.name in need.weights.of]
        self._need = need
        self.problem = pulp.LpProblem("mix", pulp.LpMinimize)
        self.counts: dict[str, Any] = {}
        prices = _prices(types)
        unit = max(prices, default=1.0)
        changes = need.cold_start_s, need.drain_s
        carried, cost = [], []
        for i, (t, price) in enumerate(zip(types, prices, strict=True)):
            n, standing = self._count(i, t)
            self.counts[t.name] = n
            carried.append(need.weights.of[t.name] / (need.demand or 1.0) * standing)
            cost.append(price / unit * n)
            for name, takes_s, sign in zip(("launched", "drained"), changes, (1, -1), strict=True):
                if takes_s:
                    more = self.problem.add_variable(f"{name}{i}", lowBound=0)
                    self.problem += more >= sign * (n - need.there.get(t.name, 0))
                    cost.append(takes_s / need.settings.horizon_s * price / unit * more)
        self._carried, self._cost = pulp.lpSum(carried), pulp.lpSum(cost)
        self._limit(types)

    def cheapest(self) -> dict[str, int]:
        self.problem += self._cost
        if self._need.demand > 0:
            self.problem += self._carried >= 1.0
        if self._need.least:
            self.problem += pulp.lpSum(self.counts.values()) >= self._need.least
        return self._solved()

    def most_capable(self) -> dict[str, int]:
        """The counts with most capacity, of equally able ones the cheapest; `least` is no bound here."""
        self.problem += _TIE * self._cost - self._carried
        return self._solved()

    def _limit(self, types: Sequence[WorkerType]) -> None:
        budget = self._need.settings.budget_usd_per_h
        if budget is not None:
            _check_budget(types, budget)
        for each, most in (
            ([t.gpus for t in types], self._need.settings.max_gpus),
            ([t.usd_per_h or 0.0 for t in types], budget),
            ([1] * len(types), self._need.most),
        ):
            if most is not None:
                keep_to(self.problem, np.array(each, float), list(self.counts.values()), most)

    def _count(self, i: int, t: WorkerType) -> tuple[Any, Any]:
        """n_v, and how many of them can be counted on."""
        need, bound = self._need, self._bound(t)
        if need.standing(t, bound) == bound:
            n = self.problem.add_variable(f"n{i}", lowBound=t.low, upBound=bound, cat="Integer")
            return n, n
        chosen = {j: self.problem.add_variable(f"n{i}is{j}", cat="Binary") for j in range(t.low, bound + 1)}
        self.problem += pulp.lpSum(chosen.values()) == 1
        return (
            pulp.lpSum(j * z for j, z in chosen.items()),
            pulp.lpSum(need.standing(t, j) * z for j, z in chosen.items()),
        )

    def _bound(self, t: WorkerType) -> int:
        """No more of one type than would carry everything alone, or must be; it keeps the search small."""
        need = self._need
        needed = need.demand / need.weights.of[t.name]
        alone = math.ceil(needed * (1.0 + 1e-9)) + 1
        allowed = min((m for m in (t.limit, need.most) if m is not None), default=None)
        while need.standing(t, alone) < math.ceil(needed) and (allowed is None or alone < allowed):
            alone += 1
        bound = max(alone, t.low, need.there.get(t.name, 0), need.least)
        return bound if t.limit is None else min(bound, t.limit)

    def _solved(self) -> dict[str, int]:
        solve(self.problem, "no mix within the limits carries the demand ({})")
        return present({name: round(pulp.value(n) or 0) for name, n in self.counts.items()})


def _prices(types: Sequence[WorkerType]) -> list[float]:
    """Dollars with a little for each GPU; GPUs where any price is unknown."""
    usd = [t.usd_per_h for t in types if t.usd_per_h is not None]
    if len(usd) < len(types):
        return [float(t.gpus) for t in types]
    tie = _TIE * (max(usd, default=0.0) or 1.0)
    return [u + tie * t.gpus for u, t in zip(usd, types, strict=True)]


def present(counts: Counts) -> dict[str, int]:
    """The counts, types with none left out."""
    return {name: n for name, n in counts.items() if n}


def label(counts: Counts) -> str:
    """`2 h100-sxm TP1 + 1 a100-sxm TP1`."""
    return " + ".join(f"{n} {name}" for name, n in sorted(present(counts).items())) or "none"
