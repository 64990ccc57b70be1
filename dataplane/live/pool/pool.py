"""The worker pool: launch, warm, watch, drain and stop workers, and relaunch those that are lost.

A worker is `starting`, `serving`, `draining`, or gone. The steps to the wanted number are those of
scaler.reconcile, as in the simulated plane. The number is kept: a lost worker is replaced, with growing
pauses when its replacements fail early, so that a model that cannot run does not relaunch without end; a
start that takes too long is given up.

What must be known of workers to take them over is written down at every change. The pool of a core's
successor adopts those that serve, and walks what had begun to its end: a worker that was starting is ended
and another launched, one that was draining or being evacuated goes on to do so.

The pool of one model of several has a *share*: its GPUs are at no moment those of more workers, with those
that start, leave, or are lost and not yet ended, whatever is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from controlplane.errors import BadInput, ControlPlaneError
from controlplane.migration.evacuation import Order
from controlplane.scaler.reconcile import Drain, Launch, Standing, Step, Undrain, steps_to
from controlplane.snapshot import Facts
from controlplane.types import Role, WorkerId
from dataplane.live.engine_api.link import EngineLink
from dataplane.live.engine_api.processes import Record, Tasks, cancel_all, pause_s
from dataplane.live.gateway.fleet_core import FleetCore
from dataplane.live.pool.fleet_types import FleetTypes
from dataplane.live.pool.leaving import Exit, bring_to
from dataplane.live.pool.member import Host, Member, Revision, WorkerState

log = logging.getLogger(__name__)

FIRST = Revision(1, "")
Gate = Callable[[Member], Awaitable[None]]
Measure = Callable[[EngineLink, str, bool], Awaitable[None]]
MISSED_CHECKS = 3
START_LIMIT_S = 1800.0  # a large model loads for minutes


class WorkerPool:
    """Keeps the wanted number of workers of each kind running behind one FleetCore.

    `measure`: what is done with a worker that has warmed up, before it serves (learning.py). `record`: where
    it writes down what its successor must know. `rollout_left`: the rollout that was under way as the core
    before was lost, as `note` was told of it, until it goes on. `share`: the most workers there may be at any
    moment, set before the start; None for as many as are asked for.
    """

    def __init__(
        self,
        host: Host,
        core: FleetCore,
        max_workers: int,
        types: FleetTypes,
        revision: Revision = FIRST,
        health_every_s: float = 5.0,
        start_limit_s: float = START_LIMIT_S,
        measure: Measure | None = None,
        record: Record | None = None,
    ) -> None:
        self.host, self.core, self.events = host, core, core.events
        self.max_workers, self.types = max_workers, types
        self.start_limit_s = start_limit_s
        self._record_file = record
        left = {} if record is None else record.found.get("rollout") or {}
        self.rollout_left: Mapping[str, Any] | None = left if left.get("is_open") else None
        self._measure = measure
        self.share: int | None = None
        self.asked_kinds = self.wanted_kinds = dict.fromkeys(types.names, 0)
        self.revision = revision  # of those launched from now on
        self.surge: Counter[str] = Counter()  # more than the wanted, by kind, while one replaces another
        self.on_gone: list[Callable[[Member, str], None]] = []
        self.cold_start_s = 0.0  # what the last launch took, and
        self.drain_s = 0.0  # the last drain
        self._members: dict[WorkerId, Member] = {}
        self._ending: Counter[str] = Counter()  # no members any more, but not ended yet; by kind
        self._next = 0  # worker's number
        self._pause_s = 0.0
        self.tasks = Tasks()
        self._closing = self._is_adopting = False
        core.on_lost.append(self._lost)
        self.tasks.spawn(self._watch(health_every_s))

    def members(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def state_of(self, worker: WorkerId) -> WorkerState | None:
        member = self._members.get(worker)
        return None if member is None else member.state

    @property
    def wanted(self) -> int:
        """How many workers of all kinds."""
        return sum(self.wanted_kinds.values())

    @property
    def held(self) -> int:
        """The workers whose GPUs are taken: those that start, serve or leave, and those not yet ended."""
        return len(self._members) + self._ending.total()

    @property
    def has_room(self) -> bool:
        """Whether its share leaves room for one worker more."""
        return self.share is None or self.held < self.share

    @property
    def serving(self) -> int:
        return sum(member.state == "serving" for member in self._members.values())

    @property
    def starting(self) -> int:
        return sum(member.state == "starting" for member in self._members.values())

    async def start(self) -> None:
        """Adopt what an earlier core has left, else launch each kind's first workers, side by side.

        Raises RuntimeError if one of those cannot start.
        """
        if self._record_file is not None and (before := self._record_file.found.get("pool")) is not None:
            await self._adopt(before)
            return
        self.asked_kinds = self._checked(self.types.workers)
        self.wanted_kinds = self._shared(self.asked_kinds)
        # The widest first, while there are nodes with so many free GPUs.
        launches = [
            self._begin_launch(self.enroll(widest.name, "the fleet starts"), report=False)
            for widest in sorted(self.types, key=lambda worker_type: -worker_type.gpus)
            for _ in range(self.wanted_kinds[widest.name])
        ]
        try:
            await asyncio.gather(*launches)
        except BaseException:
            await cancel_all(launches)  # no use in waiting for the others' models to load
            raise

    async def _adopt(self, before: Mapping[str, Any]) -> None:
        """Take over the workers of the core before, and walk what it had begun to its end.

        Its record stays as it is until all that it names is taken over: this core may die on the way.
        """
        self._is_adopting = True
        self._next, self.wanted_kinds = before["next"], dict(before["wanted"])
        self.asked_kinds, self.share = dict(before["asked"]), before["share"]
        self.cold_start_s, self.drain_s = before["cold_start_s"], before["drain_s"]
        members = before["members"].items()
        found = await self.host.adopt([WorkerId(name) for name, its in members if its[1] != "starting"])
        for worker, (kind, _, reason, revision, _, _) in members:
            left = found.get(WorkerId(worker))
            if left is None:
                continue
            member = self.enroll(kind, reason, revision, WorkerId(worker))
            if self._measure is not None:
                await self._measure(left.link, kind, True)
            self.core.attach(left.link, kind, self.types[kind].role)
            self.core.was_running(member.worker, left.segments)
            self.become(member, "serving", "adopted from the core before")
        for worker, (_, state, reason, _, until_s, is_leaving) in members:
            left_over = self._members.get(WorkerId(worker))
            if left_over is not None and state == "draining":
                self._let_leave(left_over, reason, until_s, is_leaving)
        if (rollout := self.rollout_left) is not None:
            self.core.was_mixed = rollout["revision"][1] != rollout["before"][1]
        else:
            for kind in self.wanted_kinds:
                self.settle(kind, "a new core looks after the fleet")
        self._is_adopting = False
        self.note()

    def _let_leave(self, member: Member, reason: str, until_s: float | None, is_leaving: bool) -> None:
        """Go on with what an adopted worker was leaving for."""
        if until_s is not None:
            with suppress(BadInput):  # nowhere to go: it serves until it is gone
                self.evacuate([member.worker], max(0.0, until_s - time.time()), reason)
        elif is_leaving:
            self.retire(member, reason)  # the rollout that goes on sees to its end
        else:
            self._begin_drain(member, reason)

    def scale(self, kinds: Mapping[str, int], reason: str, facts: Facts | None = None) -> None:
        """Set the wanted number of these kinds; launches and drains follow. Raises BadInput beyond a limit.

        `facts`: what the decision saw, compared and costs, for the event it leaves.
        """
        wanted = self._checked(self.wanted_kinds | dict(kinds))
        self._want(wanted, reason, facts)
        for kind in wanted:
            self.settle(kind, reason)

    def allow(self, share: int) -> None:
        """Have at most so many workers from now on, whatever is asked for: those beyond them are drained."""
        self.share, asked = share, self.asked_kinds
        reason = f"its share of the portfolio is {share} workers, {sum(asked.values())} are asked for"
        self._want(asked, reason)
        self.note()
        for kind in asked:
            self.settle(kind, reason)

    def drain(self, worker: WorkerId, reason: str) -> None:
        """Move everything off a worker, then stop it; the wanted number falls by one.

        Raises BadInput for an unknown worker, one that drains already, or the last one.
        """
        member = self._member(worker)
        if member.state == "draining":
            raise BadInput(f"worker {worker}: is draining already")
        if member.state == "serving" and self.serving == 1 and len(self.core.requests):
            raise BadInput(f"worker {worker}: is the only one serving and has requests; scale up first")
        fewer = max(0, self.wanted_kinds[member.kind] - 1)
        self.types.check_roles(self.wanted_kinds | {member.kind: fewer})
        self._want(self.wanted_kinds | {member.kind: fewer}, f"{worker} is drained: {reason}")
        if member.state == "starting":
            self.give_up(member, f"{reason}; it was not ready yet")
        else:
            self._begin_drain(member, reason)

    def set_role(self, worker: WorkerId, role: Role, reason: str) -> None:
        """Give a serving worker another role: what it had of the old one leaves it, and nothing stops.

        Raises BadInput for a worker that does not serve, for a role that this fleet has no workers of, and
        where a phase would be left to no worker.
        """
        member = self._member(worker)
        kind = self.types.in_role(member.kind, role)
        if kind == member.kind or member.state != "serving":
            state = f"is {member.state}" if member.state != "serving" else f"has the role {role} already"
            raise BadInput(f"worker {worker}: {state}")
        serving = Counter(m.kind for m in self.members() if m.state == "serving" and m is not member)
        self.types.check_roles({name: serving[name] + (name == kind) for name in self.types.names})
        moved = {
            member.kind: self.wanted_kinds[member.kind] - 1,
            kind: self.wanted_kinds[kind] + 1,
        }
        wanted = self._checked(self.wanted_kinds | moved)
        self._want(wanted, f"{worker} becomes a {role} worker: {reason}")
        member.kind = kind
        self._record("role", f"{role}: {reason}", worker=worker)
        self.core.become(worker, kind, role)
        if role == "decode":
            self.tasks.spawn(self.way_out(member).shed_unstarted(f"{worker} is a decode worker now"))

    def cancel_drain(self, worker: WorkerId, reason: str) -> None:
        """Let a draining worker serve again. Raises BadInput if it is not draining."""
        member = self._member(worker)
        if member.state != "draining":
            raise BadInput(f"worker {worker}: is not draining")
        if member.is_stopping or member.is_leaving:
            what = "drained and being stopped" if member.is_stopping else "being evacuated or replaced"
            raise BadInput(f"worker {worker}: is {what}; scale up instead")
        more = self.wanted_kinds[member.kind] + 1
        self._want(self.wanted_kinds | {member.kind: more}, f"{worker} stays: {reason}")
        self.undrain(member, reason)

    def evacuate(self, workers: Sequence[WorkerId], seconds: float, reason: str) -> tuple[Order, ...]:
        """Empty workers within `seconds`, none into another, and launch others; return the first plan.

        Raises BadInput, and does nothing, for an unknown worker, one that is leaving for good already, or
        where requests have nowhere to go.
        """
        members, plan = [self._member(worker) for worker in workers], list[Order]()
        for member in members:
            if member.is_stopping or member.is_leaving:
                what = "being stopped" if member.is_stopping else "being evacuated or replaced already"
                raise BadInput(f"worker {member.worker}: is {what}")
        ways = [(m, self.way_out(m, workers)) for m in members if m.state != "starting"]
        deadline_s = time.monotonic() + seconds
        for member, way_out in ways:
            try:
                plan += way_out.plan(seconds)
            except BadInput:
                raise BadInput(
                    f"worker {member.worker}: its requests have nowhere to go, as no other worker serves this"
                    " model; scale up first"
                ) from None
        for member, way_out in ways:
            if member.task is not None:
                member.task.cancel()  # its drain
            member.is_leaving, member.until_s = True, time.time() + seconds
            self.become(member, "draining", f"must be empty within {seconds:g} s: {reason}")
            self.core.set_open(member.worker, False)
            member.task = self.tasks.spawn(self._evacuate(member, way_out, deadline_s, reason))
        for member in members:
            if member.state == "starting":
                self.give_up(member, f"{reason}; it was not ready yet")
                self.settle(member.kind, f"in place of {member.worker}")
        return tuple(plan)

    def at_address(self, address: str) -> tuple[WorkerId, ...]:
        """The workers of the node at an address, but for those that leave it already."""
        attached = {at.worker: urlsplit(at.link.info.endpoint).hostname for at in self.core.attached()}
        there = (m for m in self.members() if not (m.is_stopping or m.is_leaving))
        return tuple(m.worker for m in there if attached.get(m.worker) == address)

    async def close(self) -> None:
        """Stop every worker and the host; returns when nothing of them is left."""
        self._closing = True
        await cancel_all(self.tasks)
        await asyncio.gather(*(self.core.detach(worker) for worker in tuple(self._members)))
        await asyncio.gather(*(self.host.stop(worker) for worker in tuple(self._members)))
        self._members.clear()
        await self.host.close()

    def _want(self, asked: Mapping[str, int], reason: str, facts: Facts | None = None) -> None:
        """Set the numbers asked for, and as far as the share allows wanted, and leave an event where the
        latter change."""
        before, was = self.wanted, self.wanted_kinds
        self.asked_kinds, self.wanted_kinds = dict(asked), self._shared(asked)
        wanted = self.wanted_kinds
        if wanted != was:
            details: dict[str, object] = {"workers": sum(wanted.values()), "before": before}
            if len(self.types) > 1:
                details["kinds"] = dict(wanted)
            details |= {str(part): said for part, said in (facts or {}).items()}
            self._record("scale", reason, **details)

    def _shared(self, asked: Mapping[str, int]) -> dict[str, int]:
        """What of this the share, which is of one kind, allows."""
        return {k: n if self.share is None else min(n, self.share) for k, n in asked.items()}

    # Lives.

    def enroll(
        self, kind: str, reason: str, revision: int | None = None, adopted: WorkerId | None = None
    ) -> Member:
        worker = adopted or WorkerId(f"w{self._take_number()}")
        number = self.revision.number if revision is None else revision
        member = Member(worker, kind, "starting", time.monotonic(), reason, number)
        self._members[worker] = member
        if adopted is None:
            self._record("launch", reason, worker=worker, worker_kind=kind)
        return member

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def _steps(self, kind: str, reason: str) -> list[Step]:
        now_s = time.monotonic()
        standing = [
            Standing(m.worker, m.state, m.since_s, len(self.core.requests.on_worker(m.worker)))
            for m in self._members.values()
            if m.kind == kind and not m.is_stopping and not m.is_leaving
        ]
        wanted = self.wanted_kinds[kind] + self.surge[kind]
        return steps_to(wanted, standing, now_s, self.start_limit_s, reason)

    def _take(self, step: Step, kind: str) -> None:
        if isinstance(step, Launch):
            for _ in range(step.workers):
                if self.has_room:  # else once there is
                    self._begin_launch(self.enroll(kind, step.reason))
            return
        member = self._members[step.worker]
        if isinstance(step, Drain):
            self._begin_drain(member, step.reason)
        elif isinstance(step, Undrain):
            self.undrain(member, step.reason)
        elif member.state == "starting":
            self.give_up(member, step.reason)
        # What is drained stops by itself: its task sees it first.

    def _begin_launch(self, member: Member, report: bool = True) -> asyncio.Task[None]:
        launch = self._launch_or_report(member) if report else self.launch(member, self.revision)
        member.task = self.tasks.spawn(launch)
        return member.task

    def give_up(self, member: Member, reason: str) -> None:
        """End a worker that is not ready yet; its launch cleans up after itself."""
        self._members.pop(member.worker, None)
        self._record("stop", reason, worker=member.worker)
        if member.task is not None:
            member.task.cancel()
            self._count_until(member.task, member.kind)

    def _count_until(self, end: asyncio.Task[None], kind: str) -> None:
        """Count a worker that is no member any more until this has ended it."""

        def ended(_: object) -> None:
            self._ending[kind] -= 1
            self._take_room(kind)

        self._ending[kind] += 1
        end.add_done_callback(ended)

    def _take_room(self, kind: str) -> None:
        """Launch what the share has not let be launched before a worker was gone."""
        if self.share is not None and not self._closing:
            self.settle(kind, "there is room for it in the model's share")

    def retire(self, member: Member, reason: str) -> None:
        """Shut a worker in whose place another is wanted; who lets it go must see to the rest."""
        member.is_leaving = True
        self.become(member, "draining", reason)
        self.core.set_open(member.worker, False)

    def undrain(self, member: Member, reason: str) -> None:
        if member.task is not None:
            member.task.cancel()
        self.become(member, "serving", reason)
        self.core.set_open(member.worker, True)

    async def launch(self, member: Member, revision: Revision, gate: Gate | None = None) -> None:
        """Start a worker and let it serve, past its gate. Raises what hinders it; then it is gone."""
        say = partial(setattr, member, "phase")
        try:
            link = await self.host.launch(member.worker, member.kind, revision, say)
            kv_tokens = link.info.kv_blocks * link.info.block_tokens
            if (lacks := self.types.shortfall(member.kind, kv_tokens)) is not None:
                raise RuntimeError(f"worker {member.worker}: {lacks}")
            cold_start_s = time.monotonic() - member.since_s  # without a measurement, which the next has not
            if self._measure is not None:
                member.phase = "measuring its step times"
                await self._measure(link, member.kind, False)
            self.core.attach(link, member.kind, self.types[member.kind].role)
            if gate is not None:
                self.core.set_open(member.worker, False)
                await gate(member)
                self.core.set_open(member.worker, True)
        except BaseException:
            self._members.pop(member.worker, None)
            self._ending[member.kind] += 1
            try:
                await self.core.detach(member.worker)
                await self.host.stop(member.worker)
            finally:
                self._ending[member.kind] -= 1
            raise
        self.cold_start_s = cold_start_s
        member.is_tried = False
        self.become(member, "serving", "its engine is ready and warm")
        self.tasks.spawn(
            bring_to(self.core, member.worker, lambda worker: self.state_of(worker) == "serving")
        )

    async def _launch_or_report(self, member: Member) -> None:
        try:
            await self.launch(member, self.revision)
        except (RuntimeError, OSError, ControlPlaneError) as error:
            log.error("worker %s did not start: %s", member.worker, error)
            self._replace(member, f"did not start: {error}")

    def _lost(self, worker: WorkerId, reason: str) -> None:
        member = self._members.pop(worker, None)
        if member is None or self._closing:
            return
        if member.is_tried:
            if member.task is not None:
                self._count_until(member.task, member.kind)
            return  # its launch sees it, and tells why
        self._count_until(self.tasks.spawn(self.host.stop(worker)), member.kind)
        if member.state == "draining":
            if member.task is not None:
                member.task.cancel()
            self._record("gone", f"lost while draining: {reason}", worker=worker)
            if member.is_leaving:
                self.settle(member.kind, f"in place of {worker}, which was evacuated")
        else:
            self._replace(member, reason)

    def _replace(self, member: Member, reason: str) -> None:
        """Launch another in place of a lost worker, after a pause if it died young."""
        self._members.pop(member.worker, None)
        self._record("lost", reason, worker=member.worker)
        for tell in self.on_gone:
            tell(member, reason)
        self._pause_s = pause_s(self._pause_s, time.monotonic() - member.since_s)
        self.tasks.spawn(self._replace_after(self._pause_s, member))

    async def _replace_after(self, wait_s: float, gone: Member) -> None:
        await asyncio.sleep(wait_s)
        here = sum(m.kind == gone.kind and m.state != "draining" for m in self._members.values())
        if here < self.wanted_kinds[gone.kind] + self.surge[gone.kind] and self.has_room:
            self._begin_launch(self.enroll(gone.kind, f"replaces {gone.worker}"))

    def _begin_drain(self, member: Member, reason: str) -> None:
        self.become(member, "draining", reason)
        self.core.set_open(member.worker, False)
        member.task = self.tasks.spawn(self._drain(member))

    async def _drain(self, member: Member) -> None:
        await self.way_out(member).drain(f"{member.worker} is being drained")
        await self.part(member, "the worker was stopped")
        self.drain_s = time.monotonic() - member.since_s
        self._record("stop", "drained: nothing runs on it any more", worker=member.worker)

    async def _evacuate(self, member: Member, way_out: Exit, deadline_s: float, reason: str) -> None:
        done = await way_out.evacuate(deadline_s, f"{member.worker} is evacuated: {reason}")
        await self.part(member, f"{member.worker} had to be gone: {reason}")
        self.core.metrics.count_evacuation(done.in_time, asdict(done))
        self._record("evacuated", str(done), worker=member.worker, **asdict(done))
        self.settle(member.kind, f"in place of {member.worker}, which was evacuated")

    async def part(self, member: Member, why: str) -> None:
        """The end of a worker that requests have left; what is still there is replayed, or fails."""
        member.is_stopping = True
        await self.core.detach(member.worker, why)
        await self.host.stop(member.worker)
        self._members.pop(member.worker, None)
        self._take_room(member.kind)

    def way_out(self, member: Member, shut: Collection[WorkerId] = ()) -> Exit:
        """The way out of a worker, into none of `shut`."""

        def is_open(worker: WorkerId) -> bool:
            return worker not in shut and self.state_of(worker) == "serving"

        return Exit(self.core, member.worker, is_open)

    def settle(self, kind: str, reason: str) -> None:
        """Take the steps to the wanted number of a kind."""
        for step in self._steps(kind, reason):
            self._take(step, kind)

    async def _watch(self, every_s: float) -> None:
        """Notice a worker whose process hangs or has vanished without its link saying so.

        While nothing is heard of it over its link that decides: an outage ends either way (wire.Patience).
        """
        silent: Counter[WorkerId] = Counter()
        while True:
            await asyncio.sleep(every_s)
            now_s = time.monotonic()
            unheard = {at.worker for at in self.core.attached() if at.is_silent}
            for member in self.members():
                if member.state == "starting" and now_s - member.since_s > self.start_limit_s:
                    self.give_up(member, f"still not ready after {now_s - member.since_s:.0f} s")
                    self.tasks.spawn(self._replace_after(self._pause_s, member))
                    continue
                if member.state == "starting" or member.worker in unheard:
                    continue
                if await self.host.is_healthy(member.worker):
                    silent.pop(member.worker, None)
                    continue
                silent[member.worker] += 1
                if silent[member.worker] >= MISSED_CHECKS:  # once may be a machine that is short of CPU
                    await self.core.detach(member.worker)
                    self._lost(member.worker, "its process does not answer")

    # Small things.

    def _checked(self, kinds: Mapping[str, int]) -> dict[str, int]:
        """The numbers, in the kinds' order. Raises BadInput for an unknown kind or beyond a limit."""
        for name in kinds:
            self.types.checked_name(name)
        for t in self.types:
            if t.limit is not None and kinds[t.name] > t.limit:
                raise BadInput(f"workers: {t.name}: at most {t.limit}, got {kinds[t.name]}")
        self.types.check_roles(kinds)
        workers = sum(kinds.values())
        if min(kinds.values()) < 0 or workers > self.max_workers:
            raise BadInput(f"workers: must be from 0 to {self.max_workers} (--max-workers), got {workers}")
        return {name: kinds[name] for name in self.types.names}

    def _member(self, worker: WorkerId) -> Member:
        member = self._members.get(worker)
        if member is None:
            names = ", ".join(self._members) or "none"
            raise BadInput(f"worker {worker}: no such worker, there are: {names}")
        return member

    def become(self, member: Member, state: WorkerState, reason: str) -> None:
        member.state, member.since_s, member.reason = state, time.monotonic(), reason
        self._record(state, reason, worker=member.worker)

    def _record(self, kind: str, reason: str, **facts: object) -> None:
        self.events.record(time.time(), kind, reason, **facts)
        self.note()

    def note(self, **facts: Any) -> None:
        """Write down what a successor must know, `facts` with it."""
        if self._record_file is not None and not self._closing and not self._is_adopting:
            members = {
                m.worker: (m.kind, m.state, m.reason, m.revision, m.until_s, m.is_leaving)
                for m in self._members.values()
            }
            now = {"next": self._next, "wanted": self.wanted_kinds, "members": members}
            now |= {"asked": self.asked_kinds, "share": self.share}
            now |= {"cold_start_s": self.cold_start_s, "drain_s": self.drain_s}
            revision = self.revision.number, self.revision.model, self.revision.flags
            self._record_file.note(pool=now | {"revision": revision}, **facts)
