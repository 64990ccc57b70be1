"""Replanned fleets: the order to serve by another plan, carried out by a reshape of the pool.

The plan's worker types are added first: their profiles to placement, refits and the host. Then the pool is
reshaped, and nothing else changes its size meanwhile. At the end the types that have no worker go, and the
controller gets the plan's types, bounds and limits. SLO attainment that falls below the target since the
reshape began, where it held before, rolls it back.

The order is in the core's record. A core's successor knows the types of both plans, and goes on with an order
that had begun.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import Policy
from controlplane.scaler.bounds import Autoscale
from controlplane.scaler.mix import MixSettings
from controlplane.worker_type import WorkerGroup, WorkerType
from dataplane.live.control.operations import Operations
from dataplane.live.control.step_times import StepTimes
from dataplane.live.engine_api.processes import Estate
from dataplane.live.ledger.placement import Placement
from dataplane.live.pool.fleet_types import FleetTypes
from dataplane.live.pool.rolling_change import Reshape, State
from dataplane.live.pool.roster import PoolRecord

FEWEST = 100  # requests that tell an attainment
SIGMAS = 3.0  # below the target by chance alone


@dataclass(frozen=True, slots=True)
class PlanToServe:
    """A plan to serve by: workers, engine limits, the loop's bounds (None: fixed), `most` of all workers."""

    name: str
    groups: tuple[WorkerGroup, ...]
    limits: Mapping[str, EngineLimits] = field(default_factory=dict)
    autoscale: Autoscale | None = None
    most: MixSettings = MixSettings()  # noqa: RUF009 - frozen

    @property
    def workers(self) -> dict[str, int]:
        """How many of each type."""
        return {group.worker_type.name: group.workers for group in self.groups}


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The plans that were ordered, for a core's successor. `is_open`: the last one is still being applied."""

    orders: tuple[PlanToServe, ...]
    is_open: bool


def taken_up(estate: Estate, types: FleetTypes, autoscale: Autoscale | None) -> Autoscale | None:
    """The bounds of the loop as an earlier core has left them; `types` become those that it had."""
    kept, pool = estate.record.part("replan", PlanRecord), estate.record.part("pool", PoolRecord)
    if kept is None or pool is None:
        return autoscale
    for order in kept.orders:
        types.add(order.groups, order.limits)
    types.keep(pool.wanted)
    done = kept.orders[:-1] if kept.is_open else kept.orders
    return done[-1].autoscale if done else autoscale


@dataclass(frozen=True, slots=True)
class TypeParts:
    """The parts of a fleet that its worker types concern; `decide_by` starts the controller again."""

    profiles: dict[str, Profile]
    placement: Placement
    step_times: StepTimes
    decide_by: Callable[[tuple[WorkerType, ...], Autoscale | None], None]

    def know(self, kind: str, profile: Profile) -> None:
        """There may be workers of a type from now on."""
        self.profiles[kind] = profile
        self.placement.kinds.know(kind, profile)
        self.step_times.know(kind, profile)

    def forget(self, kind: str) -> None:
        """There are none any more."""
        self.profiles.pop(kind, None)
        self.placement.kinds.forget(kind)
        self.step_times.forget(kind)


class Replanned:
    """The plans that a running fleet is ordered to serve by.

    `on_end`: who hears how one ended: its name, the state, and why it was rolled back. `is_left`: an earlier
    core had begun the last one.
    """

    def __init__(self, operations: Operations, parts: TypeParts) -> None:
        self._operations, self._parts = operations, parts
        estate = operations.facts.estate
        self._record = None if estate is None else estate.record
        kept = None if self._record is None else self._record.part("replan", PlanRecord)
        self._orders = () if kept is None else kept.orders
        self.is_left = kept is not None and kept.is_open
        self.on_end: list[Callable[[str, State, str], None]] = []

    @property
    def served(self) -> str | None:
        """The name of the last plan that was applied; None while the fleet serves as it was started."""
        done = self._orders[:-1] if self.is_left else self._orders
        return done[-1].name if done else None

    def resume(self) -> None:
        """Go on with the plan that was being applied as the core before was lost."""
        if self.is_left:
            *before, left = self._orders
            self._orders, self.is_left = tuple(before), False
            try:
                self.apply(left)
            except BadInput as why:
                self._note(self._orders, False)
                for hears in self.on_end:
                    hears(left.name, "rolled-back", f"a new core cannot go on with it: {why}")

    def apply(self, order: PlanToServe) -> dict[str, Any]:
        """Begin to serve by a plan; how that stands.

        Raises BadInput, and changes nothing, for a plan that this fleet cannot serve by.
        """
        operations, pool = self._operations, self._operations.cluster
        operations.updates.check_no_rollout()
        self._check(order)
        new = [g.worker_type for g in order.groups if g.worker_type.name not in pool.types.names]
        pool.types.add(order.groups, order.limits)
        for one in new:
            self._parts.know(one.name, one.profile)
        pool.asked_kinds = pool.asked_kinds | {one.name: 0 for one in new}
        pool.wanted_kinds = pool.wanted_kinds | {one.name: 0 for one in new}
        before, pool.limits = pool.limits, order.most
        self._note((*self._orders, order), True)

        def over(state: State) -> None:
            if state != "done":
                pool.limits = before
            self._settle(order, state == "done")
            for hears in self.on_end:
                hears(order.name, state, reshape.cause)

        after = dict.fromkeys(pool.types.names, 0) | order.workers
        reshape = Reshape(pool, order.name, after, self._fault(), over)
        return operations.updates.roll(reshape)

    def _check(self, order: PlanToServe) -> None:
        """Raise BadInput where this fleet cannot serve by the plan, or its limits forbid it."""
        operations, pool, workers = self._operations, self._operations.cluster, sum(order.workers.values())
        if operations.settings.policy == Policy.EXACT:
            raise BadInput("apply: --policy exact places on one worker type; a change of plan has two")
        if any(t.role != "any" for t in (*pool.types, *(g.worker_type for g in order.groups))):
            raise BadInput("apply: prefill and decode workers are not replanned while they serve")
        if pool.share is not None:
            raise BadInput("apply: this fleet is one of a portfolio, whose models share their limits")
        if not pool.serving:
            raise BadInput("apply: no worker serves, so nothing would show whether the new ones do")
        if workers > pool.max_workers:
            raise BadInput(f"apply: {workers} workers are planned, and --max-workers is {pool.max_workers}")
        types = (group.worker_type for group in order.groups)
        if (why := order.most.beyond(list(types), order.workers)) is not None:
            raise BadInput(f"apply: {why}")

    def _fault(self) -> Callable[[], str | None]:
        """What shows that clients suffer since now; nothing does where the target was missed before."""
        metrics, target = self._operations.metrics, self._operations.settings.attainment
        began_s = time.monotonic()
        held = not _misses(metrics.timeline.lately(0.0, began_s), target)

        def fault() -> str | None:
            lately = metrics.timeline.lately(began_s, time.monotonic())
            if not held or not _misses(lately, target):
                return None
            both = lately["attainment"]["both"]
            met = both["met"] / both["of"]
            return f"SLO attainment fell to {100 * met:.2f} %, the target is {100 * target:.2f} %"

        return fault

    def _settle(self, order: PlanToServe, is_done: bool) -> None:
        """Forget the types that have no worker any more, and let the controller decide by what stays."""
        operations, pool = self._operations, self._operations.cluster
        there = {m.kind for m in pool.members()} | {k for k, n in pool.wanted_kinds.items() if n}
        if is_done:
            there |= set(order.workers)
        for kind in [kind for kind in pool.types.names if kind not in there]:
            self._parts.forget(kind)
        pool.types.keep(there)
        pool.asked_kinds = {kind: n for kind, n in pool.asked_kinds.items() if kind in there}
        pool.wanted_kinds = {kind: n for kind, n in pool.wanted_kinds.items() if kind in there}
        pool.note()
        self._orders = (*self._orders, order) if is_done else self._orders
        self._note(self._orders, False)
        if is_done:
            operations.settings = replace(operations.settings, autoscale=order.autoscale)
            self._parts.decide_by(tuple(pool.types), order.autoscale)

    def _note(self, orders: tuple[PlanToServe, ...], is_open: bool) -> None:
        if self._record is not None:
            self._record.note(replan=PlanRecord(orders, is_open))


def _misses(lately: Mapping[str, Mapping[str, Mapping[str, int]]], target: float) -> bool:
    """Whether more requests missed their targets than chance explains."""
    both = lately["attainment"]["both"]
    missed, allowed = both["of"] - both["met"], both["of"] * (1.0 - target)
    return both["of"] >= FEWEST and missed > allowed + SIGMAS * math.sqrt(allowed * target)
