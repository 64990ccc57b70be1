"""A fleet that could be bought: groups of equal workers, its cost, simulation and standby workers on spot.

Spot workers can be reclaimed, so N + k are bought for the N that must serve. The number that stand follows
the binomial of scaler.line, of rate r and cold start. While fewer than N stand, every request counts as
missed. So does every request that was running on a worker when it was reclaimed (share 1 - exp(-r·d), d the
mean time of a request). Both are more than is really lost.

    attainment >= low(N) · P(at least N of N + k stand) · exp(-r·d)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.line import enough_stand, missing_share
from controlplane.types import Role
from controlplane.worker_type import WorkerGroup, WorkerType
from dataplane.simulated.simulate import WorkerSpec
from tokenfleet.planning.plan_file import FleetCost, FleetPart, Spares
from tokenfleet.planning.request import PlanRequest


@dataclass(frozen=True, slots=True)
class Fleet:
    """Groups of workers that serve one stream of requests together."""

    groups: tuple[WorkerGroup, ...]

    @property
    def workers(self) -> int:
        return sum(group.workers for group in self.groups)

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the fleet; None when any price in it is unknown."""
        total = 0.0
        for group in self.groups:
            if group.worker_type.usd_per_h is None:
                return None
            total += group.workers * group.worker_type.usd_per_h
        return total

    @property
    def host_usd_per_hour(self) -> float:
        """The part of the price that is for host memory with KV."""
        return sum(group.workers * group.worker_type.host_usd_per_h for group in self.groups)

    @property
    def cost(self) -> tuple[float, int, int]:
        """The rank of a fleet: dollars, then GPUs, then workers. An unknown price ranks last."""
        usd = self.usd_per_hour
        return (float("inf") if usd is None else usd, self.gpus, self.workers)

    @property
    def label(self) -> str:
        return " + ".join(f"{g.workers} x {g.worker_type.name}" for g in self.groups)

    def specs(self, as_really: Callable[[Profile], Profile] | None = None) -> list[WorkerSpec]:
        """The workers for the simulator, each profile as `as_really` turns it out to be."""
        return [
            WorkerSpec(
                as_really(g.worker_type.profile) if as_really else g.worker_type.profile,
                g.role,
                link=g.worker_type.kv_link,
            )
            for g in self.groups
            for _ in range(g.workers)
        ]


def totals(fleet: Fleet | None) -> dict[str, Any]:
    """A fleet's size and price by their names in a plan; null where there is no fleet."""
    return {name: getattr(fleet, name, None) for name in ("workers", "gpus", "usd_per_hour")}


def parts_of(fleet: Fleet) -> list[FleetPart]:
    """A fleet's groups as a plan has them."""
    return [
        FleetPart(
            **kind_fields(group.worker_type),
            **totals(Fleet((group,))),
            role=group.role,
            profile_kind=group.worker_type.profile.source.kind,
        )
        for group in fleet.groups
    ]


def fleet_fields(fleet: Fleet) -> dict[str, Any]:
    """A fleet's groups and totals by their names in a plan."""
    return {"fleet": parts_of(fleet)} | totals(fleet)


def kind_fields(worker_type: WorkerType) -> dict[str, Any]:
    """The name of a worker type in a plan (`plan_file.kind_of_worker`)."""
    profile = worker_type.profile
    named = {"gpu": profile.gpu, "tp_degree": profile.tp_degree}
    return named if profile.ranks is None else {**named, "ranks": profile.ranks.name}


def is_allowed(usd_per_h: float | None, gpus: int, request: PlanRequest) -> bool:
    """Whether the limits of a request allow a fleet; an unknown price is within no budget."""
    if request.max_gpus is not None and gpus > request.max_gpus:
        return False
    budget = request.budget_usd_per_h
    return budget is None or (usd_per_h is not None and usd_per_h <= budget * (1.0 + 1e-9))


def apportioned(mix: Fleet, workers: int) -> Fleet:
    """A number of workers in a mix's proportions, by largest remainders; the mix itself for its own count."""
    exact = [group.workers * workers / mix.workers for group in mix.groups]
    counts = [int(share) for share in exact]
    # Of equal remainders the larger worker stays, of equal sizes the dearer: half of "A100 + H100" is "H100".
    sizes = [(-g.worker_type.gpus, -(g.worker_type.usd_per_h or 0.0)) for g in mix.groups]
    by_rest = sorted(range(len(exact)), key=lambda i: (round(counts[i] - exact[i], 9), *sizes[i], i))
    for i in by_rest[: workers - sum(counts)]:
        counts[i] += 1
    groups = (replace(group, workers=n) for group, n in zip(mix.groups, counts, strict=True))
    return Fleet(tuple(group for group in groups if group.workers))


def of_one_kind(worker_type: WorkerType, workers: int, prefill_share: float = 0.0, shift: int = 0) -> Fleet:
    """`workers` of one kind. In split mode `prefill_share` of them prefill, `shift` more or fewer."""
    if not worker_type.is_split:
        return Fleet((WorkerGroup(worker_type, workers),))
    prefill = min(max(round(workers * prefill_share) + shift, 1), workers - 1)
    pools: tuple[tuple[Role, int], ...] = (("prefill", prefill), ("decode", workers - prefill))
    return Fleet(tuple(WorkerGroup(replace(worker_type, role=role), n) for role, n in pools))


MOST_SPARES = 64


@dataclass(frozen=True, slots=True)
class StandbyWorkers:
    """The workers bought beyond the serving fleet, and the attainment that reclaims leave.

    `availability`: share of the time in which every group has as many workers as it needs. `untouched`: share
    of the requests whose worker is not reclaimed under them. `one_fewer`: availability with one worker less.
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
    def planned(self) -> Spares:
        """The standby workers as a plan has them."""
        return Spares(
            workers=self.workers,
            serving=FleetCost(**fleet_fields(self.serving)),
            reclaims_per_h=self.reclaims_per_h,
            cold_start_s=self.cold_start_s,
            availability=self.availability,
            untouched=self.untouched,
            covers="workers interrupted one by one; not a zone that is cleared at once",
        )

    @property
    def survives(self) -> float:
        """The least factor on attainment."""
        return self.availability * self.untouched


def spares_for(
    serving: Fleet,
    low: float,
    target: float,
    reclaims_per_h: float,
    cold_start_s: float,
    request_s: float,
) -> StandbyWorkers | None:
    """The fewest standby workers, each where a dollar helps most, so that `low` of `serving` meets `target`.

    `request_s`: mean time a request runs. None where no number of standby workers is enough, because reclaims
    hit too many running requests (or `low` is no more than the target).
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
            price = serving.groups[i].worker_type.usd_per_h or float(serving.groups[i].worker_type.gpus)
            return (standing(more) - before) / price

        best = max(range(len(extra)), key=lambda i: (gain(i), -i))
        extra[best] += 1
    groups = tuple(replace(g, workers=g.workers + k) for g, k in zip(serving.groups, extra, strict=True))
    return StandbyWorkers(
        serving, Fleet(groups), reclaims_per_h, cold_start_s, standing(extra), untouched, before
    )
