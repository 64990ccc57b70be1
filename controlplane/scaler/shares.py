"""Shares of the models of a portfolio: how many workers each may have, where all share GPUs and dollars.
A model with workers of several types is a tenant for each type.

A model has a *right* to the workers it was planned with. Where those of all are beyond the limits, its right
is what the same program gives when each asks for them. Up to its right it gets what it needs, whatever others
ask. What is left is divided by an integer program. With x_mk = 1 where model m has its k-th worker,

    maximise    Σ value(m, k) · x_mk
    subject to  Σ_m takes_l(m) · (least_m + Σ_k x_mk) <= most_l      for each limit l (GPUs, dollars an hour)

Workers that have a part of a GPU are on it with others of that zone, type and price, a *group*, whose whole
GPUs limits count (`limits.py`).

    value(m, k) = gpus_m · (right_m / k           where m needs it: who is least above its right comes first
                            | TRIFLE · right_m / k         where m only has not let go of it yet
                            + 1  where it is kept: no other's claim beyond its right takes it away)

What a model *asks* for is its scaler's wanted number, which falls late. What it *needs* is what the last
moments alone ask for. There are three answers, from none of the asked workers taken away to all of them at
stake. Each replaces the one before only once it has differed for a time (`Patience`), so shares do not flap.

A lower share is sent at once. A share rises only as far as the limits hold for all that may stand at that
moment: shares as sent, and workers that are still there. So they hold in transit, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pulp

from controlplane.errors import BadInput
from controlplane.scaler.limits import HAIR, Takes, bought, keep_to, solve, whole_gpus

TRIFLE = 1e-3
TIE = 1e-4  # of equal claims, that of who has it
_BUDGET = "budget-usd-per-h"


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model of the portfolio and its workers of type `kind`, each with `gpus` GPUs or with a part of one.

    `floor`: the workers it always has. `asked`, `needed`: workers, as above. `share`: the last one sent to
    it. `held`: workers whose GPUs it has, those that start or leave among them. `is_heard`: whether a share
    can be sent to it now. `zone`: that of all its workers; None where zones are not distinguished.
    `fixed_usd_per_h`: extra dollars an hour for any number of workers, the added cost of the on-demand
    workers of a fleet on spot. It is too much while the fleet has fewer workers than these.
    """

    model: str
    gpu: str
    gpus: float
    usd_per_h: float
    right: int
    floor: int = 1
    asked: int = 0
    needed: int = 0
    share: int = 0
    held: int = 0
    is_heard: bool = True
    zone: str | None = None
    fixed_usd_per_h: float = 0.0
    kind: str = ""

    @property
    def key(self) -> str:
        """Its name among all tenants."""
        return f"{self.model} {self.kind}".strip()

    @property
    def wants(self) -> int:
        """The workers that it may be given: those it needs, and of those it has what it still asks for."""
        return max(self.needed, min(self.asked, self.share))

    @property
    def group(self) -> tuple[str, str, float] | None:
        """Zone, type and dollars an hour of GPUs that its workers have parts of; None: theirs are whole."""
        return None if self.gpus >= 1 else (self.zone or "", self.gpu, round(self.usd_per_h / self.gpus, 6))

    @property
    def most_held(self) -> int:
        """The workers that it may have at any moment until another share is sent to it."""
        return max(self.share, self.held)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of all models together: GPUs by type, GPUs, dollars an hour (None: no limit), and GPUs by zone
    and type."""

    gpus: Mapping[str, int]
    max_gpus: int | None = None
    usd_per_h: float | None = None
    zones: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def rows(self, tenants: Sequence[Tenant]) -> list[tuple[str, list[float], float]]:
        """For each limit its name, what a worker of each tenant and a GPU of each group take, and the most of
        all workers. Of dollars, the most is less what is fixed."""
        whole = [Tenant("", gpu, 1, usd, 0, zone=zone or None) for zone, gpu, usd in _groups(tenants)]
        tenants = [replace(p, gpus=0, usd_per_h=0.0) if p.group else p for p in tenants] + whole
        rows: list[tuple[str, list[float], float]] = []
        for gpu, n in self.gpus.items():
            rows.append((f"gpus.{gpu}", [float(p.gpus * (p.gpu == gpu)) for p in tenants], n))
        for (zone, gpu), n in self.zones.items():
            takes = [float(p.gpus * ((p.zone, p.gpu) == (zone, gpu))) for p in tenants]
            rows.append((f"zones.{zone}.{gpu}", takes, n))
        if self.max_gpus is not None:
            rows.append(("max-gpus", [float(p.gpus) for p in tenants], self.max_gpus))
        if self.usd_per_h is not None:
            rows.append((_BUDGET, [p.usd_per_h for p in tenants], self.usd_per_h - _fixed(tenants)))
        return rows

    def used(self, tenants: Sequence[Tenant], workers: Sequence[int]) -> list[tuple[str, float, float]]:
        """For each limit its name, what `workers` of each tenant take of it, and the most."""
        counts = [*workers, *bought(_parts(tenants) @ workers).tolist()]
        fixed = {_BUDGET: _fixed(tenants)}
        return [
            (name, sum(takes * n for takes, n in zip(row, counts, strict=True)) + beside, most + beside)
            for name, row, most in self.rows(tenants)
            for beside in [fixed.get(name, 0)]
        ]

    def hold(self, tenants: Sequence[Tenant], workers: Sequence[int]) -> bool:
        """Whether `workers` of each tenant keep to the limits."""
        return all(used <= most + HAIR for _, used, most in self.used(tenants, workers))


def _fixed(tenants: Sequence[Tenant]) -> float:
    return sum(p.fixed_usd_per_h for p in tenants)


def _groups(tenants: Sequence[Tenant]) -> list[tuple[str, str, float]]:
    return sorted({group for p in tenants if (group := p.group) is not None})


def _parts(tenants: Sequence[Tenant]) -> Takes:
    """The GPUs of each group that a worker of each tenant has a part of, shape [groups, tenants]."""
    groups = _groups(tenants)
    parts = [p.gpus * (p.group == group) for group in groups for p in tenants]
    return np.array(parts, float).reshape(len(groups), len(tenants))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a division must be the better one: `spare_s` before workers are taken that their model no
    longer needs, `needed_s` before some are that it needs beyond its right."""

    spare_s: float
    needed_s: float


@dataclass(frozen=True, slots=True)
class Claims:
    """Since when the second and the third answer have differed from the ones before; None: they do not.

    `answers`: all three, to the question that `asked` is: it seldom changes from one look to the next.
    """

    spare_since_s: float | None = None
    needed_since_s: float | None = None
    asked: tuple[Tenant, ...] = ()
    answers: tuple[dict[str, int], ...] = ()


def rights(tenants: Sequence[Tenant], limits: Limits) -> dict[str, int]:
    """The workers that each tenant has a right to, `right` being what it was planned with.

    Raises BadInput where the limits do not leave each its floor.
    """
    least = {p.key: p.floor for p in tenants}
    if not limits.hold(tenants, list(least.values())):
        in_zone = ((p, f" in {p.zone}" if p.zone else "") for p in tenants if p.floor)
        floors = ", ".join(f"{p.model} {p.floor * p.gpus:g} {p.gpu}{where}" for p, where in in_zone)
        raise BadInput(f"limits: leave no room for the least of each model ({floors})")
    asking = [replace(p, asked=p.right, needed=p.right) for p in tenants]
    return divide(asking, limits, least, {})


def most_workers(tenant: Tenant, tenants: Sequence[Tenant], limits: Limits, up_to: int) -> int:
    """The workers that a model could have while all others have their floors, at most `up_to`."""

    def are_too_many(workers: int) -> bool:
        return not limits.hold(tenants, [workers if p.key == tenant.key else p.floor for p in tenants])

    return bisect_left(range(1, up_to + 1), True, key=are_too_many)


def divide(
    tenants: Sequence[Tenant], limits: Limits, least: Mapping[str, int], kept: Mapping[str, int]
) -> dict[str, int]:
    """The best division within the limits, which `least` keeps to; `kept`: workers that are kept first."""
    top = {p.key: max(p.wants, least[p.key]) for p in tenants}
    if limits.hold(tenants, [top[p.key] for p in tenants]):
        return top
    problem = pulp.LpProblem("shares", pulp.LpMaximize)
    chosen: dict[str, list[Any]] = {}
    worth: list[Any] = []
    for p in tenants:
        numbers = range(least[p.key] + 1, top[p.key] + 1)
        chosen[p.key] = [
            problem.add_variable(f"x{len(worth) + i}", cat="Binary") for i in range(len(numbers))
        ]
        worth += [value(p, k, kept.get(p.key, 0)) * x for k, x in zip(numbers, chosen[p.key], strict=True)]
    problem += pulp.lpSum(worth)
    counts = [least[p.key] + pulp.lpSum(chosen[p.key]) for p in tenants]
    for number, parts in enumerate(_parts(tenants)):
        counts += [whole for _, whole in whole_gpus(problem, parts, counts[: len(tenants)], number)]
    for _, row, most in limits.rows(tenants):
        keep_to(problem, np.array(row), counts, most)
    solve(problem, "no division of shares keeps to the limits")
    return {key: least[key] + sum(round(pulp.value(x) or 0) for x in xs) for key, xs in chosen.items()}


def value(tenant: Tenant, k: int, kept: int) -> float:
    """What a model's k-th worker is worth to the division; it falls with k."""
    worth = tenant.right / k * (1.0 if k <= tenant.needed else TRIFLE)
    return tenant.gpus * (worth + (1.0 if k <= kept else 0.0) + (TIE if k <= tenant.share else 0.0))


def share_out(
    patience: Patience, claims: Claims, tenants: Sequence[Tenant], limits: Limits, now_s: float
) -> tuple[Claims, dict[str, int]]:
    """The claims to carry on, and the share that each model is to be told now."""
    asked = tuple(replace(p, held=0, is_heard=True) for p in tenants)
    answers = claims.answers if asked == claims.asked else _answers(tenants, limits)
    nothing_asked_is_taken, only_spare_is_taken, by_right_alone = answers
    spare_since_s = needed_since_s = None
    if only_spare_is_taken != nothing_asked_is_taken:
        spare_since_s = now_s if claims.spare_since_s is None else claims.spare_since_s
    if by_right_alone != only_spare_is_taken:
        needed_since_s = now_s if claims.needed_since_s is None else claims.needed_since_s
    target = nothing_asked_is_taken
    if spare_since_s is None or now_s - spare_since_s >= patience.spare_s:
        target = only_spare_is_taken
    if needed_since_s is not None and now_s - needed_since_s >= patience.needed_s:
        target = by_right_alone
    return Claims(spare_since_s, needed_since_s, asked, answers), in_turn(tenants, target, limits)


def _answers(tenants: Sequence[Tenant], limits: Limits) -> tuple[dict[str, int], ...]:
    """Three divisions: one takes nothing that is asked for, one takes nothing needed, one is the best."""
    least = {p.key: max(p.floor, min(p.needed, p.right)) for p in tenants}
    asked = {p.key: min(p.share, p.asked) for p in tenants}
    needed = {p.key: min(p.share, p.needed) for p in tenants}
    kept: tuple[dict[str, int], ...] = (asked, needed, {})
    return tuple(divide(tenants, limits, least, each) for each in kept)


def in_turn(tenants: Sequence[Tenant], target: Mapping[str, int], limits: Limits) -> dict[str, int]:
    """The shares to tell now on the way to the target: lower ones at once, higher ones as there is room."""
    told = {p.key: min(p.share, target[p.key]) if p.is_heard else p.share for p in tenants}
    there = [p.most_held for p in tenants]
    for i, k in _in_order(tenants, target):
        raised = [max(n, k) if j == i else n for j, n in enumerate(there)]
        if told[tenants[i].key] == k - 1 and limits.hold(tenants, raised):
            told[tenants[i].key], there = k, raised
    return told


def _in_order(tenants: Sequence[Tenant], target: Mapping[str, int]) -> Iterable[tuple[int, int]]:
    """The workers to add, as (place of the tenant, number), the most urgent first: who is furthest below."""
    more = [
        (i, k) for i, p in enumerate(tenants) if p.is_heard for k in range(p.share + 1, target[p.key] + 1)
    ]
    return sorted(more, key=lambda one: (-tenants[one[0]].right / one[1], one))
