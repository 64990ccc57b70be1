"""Lives: what a worker's states take. Launch, watch, drain, evacuate and stop workers, and replace lost ones.

The steps to the wanted number are those of scaler.reconcile, in both planes. A lost worker is replaced, after
pauses that grow when replacements fail early. A start that takes too long is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial

from controlplane.errors import ControlPlaneError
from controlplane.scaler.reconcile import Drain, Launch, Standing, Undrain, steps_to
from controlplane.types import WorkerId
from dataplane.live.engine_api.link import EngineLink
from dataplane.live.engine_api.processes import Tasks, cancel_all
from dataplane.live.gateway.fleet_core import FleetCore
from dataplane.live.pool.leaving import Exit, bring_to
from dataplane.live.pool.member import Host, Life, LifeEvent, Loss, Member, Revision
from dataplane.live.pool.roster import Roster
from dataplane.processes import keeper

Gate = Callable[[Member], Awaitable[None]]
Measure = Callable[[EngineLink, str, bool], Awaitable[None]]
MISSED_CHECKS = 3
START_LIMIT_S = 1800.0  # a large model loads for minutes


class Lives:
    """Walks the workers of a roster through their lives, behind one FleetCore.

    `measure`: what is done with a worker that has warmed up, before it serves (learning.py). `on_gone`: who
    hears of a worker that was lost or did not start, and why. Its event has the facts of a Loss.
    """

    def __init__(
        self,
        roster: Roster,
        host: Host,
        core: FleetCore,
        measure: Measure | None,
        health_every_s: float,
    ) -> None:
        self._roster, self._host, self._core = roster, host, core
        self.measure = measure
        self.on_gone: list[Callable[[Member, str], None]] = []
        self.tasks = Tasks()
        self._pause_s: dict[str, float] = defaultdict(float)  # by kind, as the next two
        self._early, self._unreplaced = Counter[str](), defaultdict[str, list[WorkerId]](list)
        self._withheld = set[str]()  # kinds whose workers wait for room
        self._closing = False
        core.on_lost.append(self._lost)
        self.tasks.spawn(self._watch(health_every_s))

    async def close(self) -> None:
        """End all work, and then every worker."""
        self._closing = True
        await cancel_all(self.tasks)
        left = [member.worker for member in self._roster.members()]
        await asyncio.gather(*map(self._core.detach, left))
        await asyncio.gather(*map(self._host.stop, left))

    def settle(self, kind: str, reason: str) -> None:
        """Take the steps to the wanted number of a kind."""
        roster = self._roster
        wanted = roster.wanted_kinds[kind] + roster.surge[kind]
        for step in steps_to(wanted, self.standing(kind), time.monotonic(), float("inf"), reason):
            if isinstance(step, Launch):
                for _ in range(step.workers):
                    self._begin_if_room(kind, step.reason)
                continue
            member = roster.named(step.worker)
            if isinstance(step, Drain):
                self.drain(member, step.reason)
            elif isinstance(step, Undrain):
                self.take_back(member, step.reason)
            elif member.state == "starting":
                self.give_up(member, step.reason)
            # What is drained stops by itself: its task sees it first.

    def standing(self, kind: str) -> list[Standing]:
        """The workers of a kind that count for its wanted number."""
        return [
            Standing(m.worker, m.state, m.since_s, len(self._core.requests.on_worker(m.worker)))
            for m in self._roster.members()
            if m.kind == kind and not m.is_empty and not m.is_replaced
        ]

    # Starts.

    def _begin_if_room(self, kind: str, reason: str) -> None:
        """Start a worker, or once another has ended where share and limits leave no room for it yet."""
        if self._roster.beyond(kind) is not None:
            self._withheld.add(kind)
            return
        member, unreplaced = self._roster.enroll(kind, reason), self._unreplaced[kind]
        member.replaces = unreplaced.pop(0) if unreplaced else None
        member.task = self.tasks.spawn(self._launch_or_report(member))

    async def _launch_or_report(self, member: Member) -> None:
        try:
            await self._launch(member, self._roster.revision, None)
        except (RuntimeError, OSError, ControlPlaneError) as error:
            self._replace(member, f"it did not start: {error}", None)

    def launch(self, member: Member, revision: Revision, gate: Gate | None = None) -> asyncio.Task[None]:
        """Start a worker and let it serve, past its gate. Raises what hinders it; then it is gone."""
        member.task = self.tasks.spawn(self._launch(member, revision, gate))
        return member.task

    async def _launch(self, member: Member, revision: Revision, gate: Gate | None) -> None:
        types = self._roster.types
        try:
            link = await self._host.launch(
                member.worker, member.kind, revision, partial(setattr, member, "phase")
            )
            kv_tokens = link.info.kv_blocks * link.info.block_tokens
            if (lacks := types.shortfall(member.kind, kv_tokens)) is not None:
                raise RuntimeError(f"worker {member.worker}: {lacks}")
            cold_start_s = time.monotonic() - member.since_s  # without a measurement, which the next has not
            if self.measure is not None:
                member.phase = "measuring step times"
                await self.measure(link, member.kind, False)
            self._core.attach(link, member.kind, types[member.kind].role)
            if gate is not None:
                self._core.set_open(member.worker, False)
                await gate(member)
                self._core.set_open(member.worker, True)
        except BaseException:
            was_given_up = member.life is Life.ENDING  # then that has seen to its end
            if not was_given_up:
                member.happens(LifeEvent.FAILED)
            try:
                await self._core.detach(member.worker)
                await self._host.stop(member.worker)
            finally:
                if not was_given_up:
                    self._ended(member)
            raise
        self._roster.cold_start_s, self._roster.weights = cold_start_s, link.info.weights
        place = f", in place of {member.replaces}" if member.replaces else ""
        facts = {"replaces": member.replaces} if member.replaces else {}
        self._roster.become(member, LifeEvent.READY, f"its engine is ready and warm{place}", **facts)
        self.tasks.spawn(bring_to(self._core, member.worker, self._is_serving))

    def _is_serving(self, worker: WorkerId) -> bool:
        return self._roster.state_of(worker) == "serving"

    def give_up(self, member: Member, reason: str) -> None:
        """End a worker that is not ready yet; its launch cleans up after itself."""
        member.happens(LifeEvent.GIVEN_UP)
        self._roster.tell("stop", reason, worker=member.worker)
        assert member.task is not None  # its launch
        member.stop_work()
        member.task.add_done_callback(lambda _: self._ended(member))

    # Losses.

    def _lost(self, worker: WorkerId, reason: str, go_on: Sequence[bool]) -> None:
        member = self._roster.find(worker)
        if member is None or self._closing:
            return
        was_left, was_replaced = member.state == "draining", member.is_replaced
        member.happens(LifeEvent.LOST)
        if member.life is not Life.ENDING:
            return
        member.stop_work()
        self.tasks.spawn(self._host.stop(worker)).add_done_callback(lambda _: self._ended(member))
        if not was_left:
            self._replace(member, reason, go_on)
            return
        self._tell_loss("gone", member, f"lost while draining: {reason}", go_on)
        if was_replaced:
            self.settle(member.kind, f"in place of {worker}, which was evacuated")

    def _ended(self, member: Member) -> None:
        """Nothing of a worker is left. Launch those for which there was no room before."""
        self._roster.ended(member)
        withheld, self._withheld = self._withheld & self._roster.wanted_kinds.keys(), set()
        for kind in () if self._closing else sorted(withheld):
            self.settle(kind, "there is room for it now")

    def _replace(self, member: Member, cause: str, go_on: Sequence[bool] | None) -> None:
        """Launch another in place of a lost worker, after a pause if it died young."""
        kind, lived_s = member.kind, time.monotonic() - member.since_s
        wait_s = self._pause_s[kind] = keeper.PAUSES.after(self._pause_s[kind], lived_s)
        self._early[kind] = self._early[kind] + 1 if wait_s else 0
        self._tell_loss("lost", member, cause, go_on, wait_s)
        for tell in self.on_gone:
            tell(member, cause)
        self._unreplaced[kind].append(member.worker)
        self.tasks.spawn(self._replace_after(wait_s, member))

    def _tell_loss(
        self, event: str, member: Member, cause: str, go_on: Sequence[bool] | None, wait_s: float = 0.0
    ) -> None:
        kind, fates = member.kind, Counter(go_on or ())
        pause_s = wait_s if self._roster.lacks(kind) else None
        went_on = None if go_on is None else fates[True]
        self._core.metrics.lost_workers.inc()
        loss = Loss(cause, kind, went_on, fates[False], self._roster.serving, pause_s, self._early[kind])
        self._roster.tell(event, str(loss), worker=member.worker, **asdict(loss))

    async def _replace_after(self, wait_s: float, gone: Member) -> None:
        await asyncio.sleep(wait_s)
        if not self._roster.lacks(gone.kind):
            self._unreplaced[gone.kind].clear()
        else:
            self._begin_if_room(gone.kind, f"replaces {gone.worker}")

    async def _watch(self, every_s: float) -> None:
        """Notice a worker whose process hangs or has vanished without its link saying so.

        While nothing is heard of it over its link that decides: an outage ends either way (wire.Patience).
        """
        silent: Counter[WorkerId] = Counter()
        while True:
            await asyncio.sleep(every_s)
            latest_s = time.monotonic() - START_LIMIT_S
            unheard = {at.worker for at in self._core.attached() if at.is_silent}
            for member in self._roster.members():
                if member.state == "starting":
                    if member.since_s < latest_s:
                        cause = f"it did not start within {START_LIMIT_S:g} s"
                        self.give_up(member, cause)
                        self._replace(member, cause, None)
                elif member.worker not in unheard:
                    silent[member.worker] += 1
                    if await self._host.is_healthy(member.worker):
                        del silent[member.worker]
                    elif silent[member.worker] >= MISSED_CHECKS:  # once may be a machine short of CPU
                        cause = "its process does not answer"
                        self._lost(member.worker, cause, await self._core.detach(member.worker, cause))

    # Ways out.

    def way_out(self, member: Member, shut: Collection[WorkerId] = ()) -> Exit:
        """The way out of a worker, into none of `shut`."""
        return Exit(self._core, member.worker, lambda w: w not in shut and self._is_serving(w))

    def _shut(self, member: Member, event: LifeEvent, reason: str) -> None:
        self._roster.become(member, event, reason)
        self._core.set_open(member.worker, False)

    def drain(self, member: Member, reason: str) -> None:
        """Let requests leave a worker, however long that takes, and stop it."""
        self._shut(member, LifeEvent.DRAIN, reason)
        member.task = self.tasks.spawn(self._drain(member))

    async def _drain(self, member: Member) -> None:
        await self.way_out(member).drain(f"{member.worker} is being drained")
        await self._part(member, "the worker was stopped")
        self._roster.drain_s = time.monotonic() - member.since_s
        self._roster.tell("stop", "drained: nothing runs on it any more", worker=member.worker)

    def take_back(self, member: Member, reason: str) -> None:
        """Let a worker that was leaving serve again."""
        member.stop_work()
        self._roster.become(member, LifeEvent.STAY, reason)
        self._core.set_open(member.worker, True)

    def evacuate(self, member: Member, way_out: Exit, seconds: float, reason: str) -> None:
        """Empty a worker within `seconds`, and launch another in its place."""
        member.stop_work()  # its drain
        member.until_s = time.monotonic() + seconds
        self._shut(member, LifeEvent.EVACUATE, f"must be empty within {seconds:.3g} s: {reason}")
        member.task = self.tasks.spawn(self._evacuate(member, way_out, member.until_s, reason))

    async def _evacuate(self, member: Member, way_out: Exit, deadline_s: float, reason: str) -> None:
        done = await way_out.evacuate(deadline_s, f"{member.worker} is evacuated: {reason}")
        await self._part(member, f"{member.worker} reached its deadline: {reason}")
        self._core.metrics.count_evacuation(done.in_time, asdict(done))
        self._roster.tell("evacuated", str(done), worker=member.worker, **asdict(done))
        self.settle(member.kind, f"in place of {member.worker}, which was evacuated")

    def retire(self, member: Member, reason: str) -> None:
        """Shut a worker in whose place another is wanted; `let_go` is the rest."""
        self._shut(member, LifeEvent.RETIRE, reason)

    def let_go(self, member: Member, finish_s: float, what: str) -> None:
        """Let a retired worker's requests move or finish, then stop it."""
        member.task = self.tasks.spawn(self._let_go(member, finish_s, what))

    async def _let_go(self, member: Member, finish_s: float, what: str) -> None:
        worker = member.worker
        await self.way_out(member).drain(f"{worker} is being replaced", time.monotonic() + finish_s)
        await self._part(member, f"{worker} is replaced, and was given {finish_s:g} s to finish")
        self._roster.events.record(time.time(), "stop", f"{what}: it is replaced", worker=worker)

    async def _part(self, member: Member, why: str) -> None:
        """The end of a worker that requests have left; what is still there is replayed, or fails."""
        member.happens(LifeEvent.EMPTIED)
        await self._core.detach(member.worker, why)
        await self._host.stop(member.worker)
        self._ended(member)
