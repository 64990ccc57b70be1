"""The worker pool: the orders of a controller, of operators and of clouds to the workers of one fleet.

What must be known of workers to take them over is written down at every change (roster.py). The pool of a
core's successor adopts those that serve, and finishes what had begun. It ends a worker that was starting and
launches another. A worker that was draining or being evacuated goes on to do so.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from controlplane.errors import BadInput
from controlplane.migration.evacuation import Order
from controlplane.scaler.mix import label
from controlplane.scaler.reconcile import role_changes
from controlplane.snapshot import Facts
from controlplane.types import Role, WorkerId
from dataplane.live.engine_api.processes import Record, cancel_all
from dataplane.live.gateway.fleet_core import FleetCore
from dataplane.live.pool.fleet_types import FleetTypes
from dataplane.live.pool.lives import Lives, Measure
from dataplane.live.pool.member import Host, Life, LifeEvent, Member, Revision
from dataplane.live.pool.roster import MemberRecord, PoolRecord, RolloutRecord, Roster

FIRST = Revision(1, "")


class WorkerPool(Roster):
    """The roster of a fleet that takes orders: `lives` carries them out, on `host` and behind `core`.

    `rollout_left`: the rollout that was under way as the core before was lost, until it goes on.
    """

    def __init__(
        self,
        host: Host,
        core: FleetCore,
        max_workers: int,
        types: FleetTypes,
        revision: Revision = FIRST,
        share: Mapping[str, int] | None = None,
        health_every_s: float = 5.0,
        measure: Measure | None = None,
        record: Record | None = None,
    ) -> None:
        super().__init__(types, max_workers, core.events, revision, share, record)
        self.host, self.core = host, core
        core.await_workers(lambda: self.starting > 0)
        self.lives = Lives(self, host, core, measure, health_every_s)
        self.tasks = self.lives.tasks
        self._before = None if record is None else record.part("pool", PoolRecord)
        left = None if record is None else record.part("rollout", RolloutRecord)
        self.rollout_left = left if left is not None and left.is_open else None

    async def start(self) -> None:
        """Adopt what an earlier core has left, else launch each kind's first workers, side by side.

        Raises RuntimeError if one of those cannot start.
        """
        if self._before is not None:
            await self._adopt(self._before)
            return
        self.asked_kinds = self.checked(self.types.workers)
        self.wanted_kinds = self.shared(self.asked_kinds)
        # The widest first, while there are nodes with that many free GPUs.
        launches = [
            self.lives.launch(self.enroll(widest.name, "the fleet starts"), self.revision)
            for widest in sorted(self.types, key=lambda worker_type: -worker_type.gpus)
            for _ in range(self.wanted_kinds[widest.name])
        ]
        try:
            await asyncio.gather(*launches)
        except BaseException:
            await cancel_all(launches)  # no use in waiting for the others' models to load
            raise

    async def _adopt(self, before: PoolRecord) -> None:
        """Take over the workers of the core before, and walk what it had begun to its end.

        Its record stays unchanged until all that it names is taken over: this core may die on the way.
        """
        self._writes = False
        self._next, self.share = before.next, before.share
        self.wanted_kinds, self.asked_kinds = dict(before.wanted), dict(before.asked)
        self.cold_start_s, self.drain_s = before.cold_start_s, before.drain_s
        self.weights = before.weights
        begun = {
            name: left
            for name, left in before.members.items()
            if left.life not in (Life.STARTING, Life.TRIED)
        }
        found = await self.host.adopt(list(begun))
        for worker in [worker for worker in begun if worker in found]:
            link, left = found[worker].link, begun[worker]
            if self.lives.measure is not None:
                await self.lives.measure(link, left.kind, True)
            member = self._enter(worker, left.kind, left.reason, left.revision)
            self.core.attach(link, left.kind, self.types[left.kind].role)
            self.become(member, LifeEvent.READY, "adopted from the core before")
        rollout = self.rollout_left
        were_mixed = rollout is not None and rollout.revision.model != rollout.before.model
        segments = {worker: one.segments for worker, one in found.items()}
        self.core.left.note(segments, were_mixed, before.weights if rollout is None else None)
        for member in self.members():
            self._let_leave(member, begun[member.worker])
        if rollout is None:
            for kind in self.wanted_kinds:
                self.lives.settle(kind, "a new core looks after the fleet")
        self._writes = True
        self.note()

    def _let_leave(self, member: Member, left: MemberRecord) -> None:
        """Go on with what an adopted worker was leaving for."""
        if left.until_s is not None and left.life in (Life.EVACUATING, Life.EVACUATED):
            with suppress(BadInput):  # nowhere to go: it serves until it is gone
                self.evacuate([member.worker], max(0.0, left.until_s - time.monotonic()), left.reason)
        elif left.life in (Life.RETIRING, Life.RETIRED):
            self.lives.retire(member, left.reason)  # the rollout that goes on sees to its end
        elif left.life in (Life.DRAINING, Life.DRAINED):
            self.lives.drain(member, left.reason)

    def scale(self, kinds: Mapping[str, int], reason: str, facts: Facts | None = None) -> None:
        """Set the wanted number of these kinds; changes of role, launches and drains follow.

        `facts`: what the decision saw, compared and costs, for the event it leaves. Raises BadInput beyond a
        limit.
        """
        asked = self.checked(self.wanted_kinds | dict(kinds))
        wanted = {kind: n + self.surge[kind] for kind, n in self.shared(asked).items()}
        standing = {kind: self.lives.standing(kind) for kind in asked}
        for worker, kind in role_changes(wanted, standing, {t.name: t.hardware for t in self.types}):
            if self.has_room(kind):
                self.set_role(worker, self.types[kind].role, reason, facts)
        self.want(asked, reason, facts)
        for kind in self.types.names:
            self.lives.settle(kind, reason)

    def allow(self, share: Mapping[str, int]) -> None:
        """Have at most `share` workers of each kind from now on, whatever is asked for, and drain the others.

        Raises BadInput for other kinds than the fleet has.
        """
        if share.keys() != set(self.types.names):
            raise BadInput(f"workers: expected a number for each of {', '.join(self.types.names)}")
        self.share, asked = dict(share), self.asked_kinds
        self.note()
        self.scale(asked, f"its share of the portfolio is {label(share)}, and {label(asked)} are asked for")

    def drain(self, worker: WorkerId, reason: str) -> None:
        """Move everything off a worker, then stop it; the wanted number falls by one.

        Raises BadInput for an unknown worker, one that drains already, or the last one.
        """
        member = self.named(worker)
        if member.state == "draining":
            raise BadInput(f"worker {worker}: is draining already")
        if member.state == "serving" and self.serving == 1 and len(self.core.requests):
            raise BadInput(f"worker {worker}: is the only one serving and has requests; scale up first")
        fewer = max(0, self.wanted_kinds[member.kind] - 1)
        self.types.check_roles(self.wanted_kinds | {member.kind: fewer})
        self.want(self.wanted_kinds | {member.kind: fewer}, f"{worker} is drained: {reason}")
        if member.state == "starting":
            self.lives.give_up(member, f"{reason}; it was not ready yet")
        else:
            self.lives.drain(member, reason)

    def set_role(self, worker: WorkerId, role: Role, reason: str, facts: Facts | None = None) -> None:
        """Give a serving worker another role: what it had of the old one leaves it, and nothing stops.

        Raises BadInput for a worker that does not serve, for a role that this fleet has no workers of, and
        where a phase would be left to no worker.
        """
        member = self.named(worker)
        kind = self.types.in_role(member.kind, role)
        if kind == member.kind or member.state != "serving":
            state = f"is {member.state}" if member.state != "serving" else f"has the role {role} already"
            raise BadInput(f"worker {worker}: {state}")
        if not self.has_room(kind):
            raise BadInput(f"worker {worker}: the model's share of the portfolio has no further {kind}")
        serving = Counter(m.kind for m in self.members() if m.state == "serving" and m is not member)
        self.types.check_roles({name: serving[name] + (name == kind) for name in self.types.names})
        moved = {member.kind: self.wanted_kinds[member.kind] - 1, kind: self.wanted_kinds[kind] + 1}
        wanted = self.checked(self.wanted_kinds | moved)
        self.want(wanted, f"{worker} becomes a {role} worker: {reason}", facts)
        member.kind = kind
        self.tell("role", f"{role}: {reason}", worker=worker)
        self.core.become(worker, kind, role)
        if role == "decode":
            self.tasks.spawn(self.lives.way_out(member).shed_unstarted(f"{worker} is a decode worker now"))

    def cancel_drain(self, worker: WorkerId, reason: str) -> None:
        """Let a draining worker serve again. Raises BadInput if it is not draining."""
        member = self.named(worker)
        if member.state != "draining":
            raise BadInput(f"worker {worker}: is not draining")
        if member.is_empty or member.is_replaced:
            what = "drained and being stopped" if member.is_empty else "being evacuated or replaced"
            raise BadInput(f"worker {worker}: is {what}; scale up instead")
        more = self.wanted_kinds[member.kind] + 1
        self.want(self.wanted_kinds | {member.kind: more}, f"{worker} stays: {reason}")
        self.lives.take_back(member, reason)

    def evacuate(self, workers: Sequence[WorkerId], seconds: float, reason: str) -> tuple[Order, ...]:
        """Empty workers within `seconds`, none into another, and launch others; return the first plan.

        Raises BadInput, and does nothing, for an unknown worker, one that is leaving for good already, or
        where requests have nowhere to go.
        """
        members, plan = [self.named(worker) for worker in workers], list[Order]()
        for member in members:
            if member.is_empty or member.is_replaced:
                what = "being stopped" if member.is_empty else "being evacuated or replaced already"
                raise BadInput(f"worker {member.worker}: is {what}")
        ways = [(m, self.lives.way_out(m, workers)) for m in members if m.state != "starting"]
        for member, way_out in ways:
            try:
                plan += way_out.plan(seconds)
            except BadInput:
                raise BadInput(
                    f"worker {member.worker}: its requests have nowhere to go, as no other worker serves this"
                    " model; scale up first"
                ) from None
        for member, way_out in ways:
            self.lives.evacuate(member, way_out, seconds, reason)
        for member in members:
            if member.state == "starting":
                self.lives.give_up(member, f"{reason}; it was not ready yet")
                self.lives.settle(member.kind, f"in place of {member.worker}")
        return tuple(plan)

    def at_address(self, address: str) -> tuple[WorkerId, ...]:
        """The workers of the node at an address, except those that leave it already."""
        attached = {at.worker: urlsplit(at.link.info.endpoint).hostname for at in self.core.attached()}
        there = (m for m in self.members() if not (m.is_empty or m.is_replaced))
        return tuple(m.worker for m in there if attached.get(m.worker) == address)

    async def close(self) -> None:
        """Stop every worker and the host; returns when nothing of them is left."""
        self._writes = False
        await self.lives.close()
        self._there.clear()
        await self.host.close()

    def lack(self, kind: str) -> str | None:
        """Why no further worker of a kind can be started; None where one can."""
        members, limit = list(self.members()), self.types[kind].limit
        if len(members) >= self.max_workers:
            return f"--max-workers {self.max_workers} leaves no room for another"
        if limit is not None and sum(m.kind == kind for m in members) >= limit:
            return f"no more than {limit} of {kind} are available"
        return self.beyond(kind) or self.host.room(kind)
