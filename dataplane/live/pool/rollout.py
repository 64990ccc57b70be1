"""A rollout: workers replaced one after another while the fleet serves: all in an update, one in a restart.

Each is replaced start-first where there is room for one more worker (the fleet is never below the wanted
number), else stop-first (never more than one below it). A new worker takes requests once it has warmed up and
stayed healthy for `gate_s`. The old one's requests are moved, with their KV where weights and layout are the
same, or finish; what is left after `finish_s` is replayed, or ends in an explicit error where no worker runs
the weights that it began on.

    running ──all replaced──▶ done
       │ a new worker did not start, or was lost; or an operator cancelled
       ▼
    rolling-back ──all old again──▶ rolled-back        (a restart that failed: failed)

Workers launched for other reasons meanwhile are of the old revision until the first new worker has passed its
gate, and of the new one from then on, unless it is rolled back. Rolling back is tried until it is done. It
runs in the fleet's own process: no client's and no controller's end stops it. What it is at is written down;
a core's successor goes on with it from the workers that are there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from dataplane.live.engine_api.processes import pause_s
from dataplane.live.pool.member import Member, Revision
from dataplane.live.pool.pool import WorkerPool

State = Literal["running", "rolling-back", "done", "rolled-back", "failed"]
GATE_S = 3.0
LOOK_S = 0.05


class RolloutFailed(Exception):
    """It cannot go on; the message says why."""


class Rollout:
    """One update (`only` None) or restart (of `only`) of a pool's workers; `run` it once."""

    def __init__(
        self,
        pool: WorkerPool,
        revision: Revision,
        finish_s: float,
        only: WorkerId | None = None,
        gate_s: float = GATE_S,
    ) -> None:
        self.pool, self.before, self.revision, self.only = pool, pool.revision, revision, only
        self.state: State = "running"
        self.how = self.cause = ""
        self.replaced = 0
        self._finish_s, self._gate_s = finish_s, gate_s
        self._stop = asyncio.Event()
        self._retiring: list[Member] = []
        self._is_resumed, self._stays = False, only is not None  # which failing leaves as it then is
        if only is None and not pool.serving and pool.rollout_left is None:
            raise BadInput("update: no worker serves, so nothing would show whether a new one does; scale up")

    def resume(self, left: Mapping[str, Any], before: Revision, obstacle: str) -> None:
        """Be the one that the core before has left under way; `obstacle`: why it cannot go on, or nothing."""
        self.pool.rollout_left = None
        self.before, self.replaced, self.cause = before, left["replaced"], obstacle or left["cause"]
        self._is_resumed, self._stays = True, self._stays or bool(obstacle)
        self._retiring = [m for m in self.pool.members() if m.is_leaving and m.until_s is None]
        for old in self._retiring:
            old.task = self.pool.tasks.spawn(self._let_go(old))

    @property
    def is_open(self) -> bool:
        return self.state in ("running", "rolling-back")

    @property
    def what(self) -> str:
        return f"update {self.revision.number}" if self.only is None else f"restart of {self.only}"

    def as_json(self) -> dict[str, Any]:
        """Where it stands."""
        members = [m for m in self.pool.members() if not m.is_leaving]
        new = sum(m.revision == self.revision.number for m in members)
        return {
            "what": self.what,
            "state": self.state,
            "how": self.how,
            "cause": self.cause,
            "replaced": self.replaced,
            "workers": {"new": new, "old": len(members) - new} if self.only is None else {},
            "model": self.revision.model,
            "flags": list(self.revision.flags),
        }

    def cancel(self, why: str) -> None:
        """Roll it back. Raises BadInput where it is not running forwards."""
        if self.state != "running":
            raise BadInput(f"{self.what}: is {self.state}, so there is nothing to cancel")
        self._fail(why)

    async def run(self) -> None:
        """Walk it to one of its ends."""
        self.pool.on_gone.append(self._gone)
        try:
            if self.cause:
                raise RolloutFailed(self.cause)
            self._say(f"{self.what} {'goes on, under a new core' if self._is_resumed else 'begins'}")
            if self._is_resumed:
                await self._fill()
            await self._replace_all(self.revision)
            self._end("done", f"{self.what}: done, {self.replaced} replaced")
        except RolloutFailed as error:
            await self._back(str(error))
        finally:
            self.pool.on_gone.remove(self._gone)
            self.pool.surge.clear()

    async def _replace_all(self, to: Revision) -> None:
        while (old := self._next(to)) is not None:
            kind = old.kind
            await self._until(partial(self._is_whole, kind))
            if old.state != "serving":
                continue  # it was lost, or drained, meanwhile
            if self._standing(kind) > self.pool.wanted_kinds[kind]:
                self._retire(old, to)
                continue
            lack = self._lack(kind)
            if lack is not None and any(m.kind == kind for m in self._still_retiring()):
                await self._until_one_less()
                continue
            await (self._start_first(old, to) if lack is None else self._stop_first(old, to, lack))
            if self.only is None:
                self.pool.revision = to  # it has shown that it serves
        while self._still_retiring():
            await self._until_one_less()
        if self.only is None:
            self.pool.revision = to
        for kind in self.pool.wanted_kinds:  # one that was lost meanwhile may have been replaced twice
            self.pool.settle(kind, f"{self.what} is over")

    async def _fill(self) -> None:
        """Start what the core before was starting as it died, and whatever was lost with it."""
        for kind, wanted in self.pool.wanted_kinds.items():
            while self._lack(kind) is not None and any(m.kind == kind for m in self._still_retiring()):
                await self._until_one_less()
            if self._standing(kind) < wanted:
                if self.only is None:
                    await self._start(kind, "one that was lost", self.revision)
                    self.pool.revision = self.revision
                self.replaced += 1
                self.pool.settle(kind, self.what)

    async def _start_first(self, old: Member, to: Revision) -> None:
        self.how = "start-first: there is room for one worker more"
        self.pool.surge[old.kind] += 1
        try:
            new = await self._start(old.kind, old.worker, to)
            self._retire(old, to)
        finally:
            self.pool.surge[old.kind] -= 1
        self._replaced(old, new)

    async def _stop_first(self, old: Member, to: Revision, lack: str) -> None:
        self.how = f"stop-first: {lack}"
        if self.pool.serving < 2:
            raise RolloutFailed(f"{old.worker} is the only one serving, and {lack}")
        self.pool.surge[old.kind] -= 1  # its place is for the new one
        try:
            self._retire(old, to)
            await self._until(lambda: old not in self._still_retiring())
        finally:
            self.pool.surge[old.kind] += 1
        self._replaced(old, await self._start(old.kind, old.worker, to))

    async def _start(self, kind: str, old: str, to: Revision) -> Member:
        """A new worker in place of `old`, past its gate. Raises RolloutFailed."""
        pool = self.pool
        new = pool.enroll(kind, f"{self.what}: in place of {old}", to.number)
        new.is_tried = True
        new.task = pool.tasks.spawn(pool.launch(new, to, self._gate))
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([new.task, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not new.task.done():
            pool.give_up(new, self.cause)
            raise RolloutFailed(self.cause)
        error = None if new.task.cancelled() else new.task.exception()
        if new.task.cancelled() or error is not None:
            raise RolloutFailed(f"{new.worker} did not start: {error or 'it was given up'}")
        return new

    async def _gate(self, new: Member) -> None:
        """Return once a new worker has stayed healthy, without requests; RuntimeError where it has not."""
        new.phase = "showing that it stays healthy"
        until_s = time.monotonic() + self._gate_s
        while time.monotonic() < until_s:
            await asyncio.sleep(self._gate_s / 5)
            is_lost = self.pool.core.link(new.worker) is None
            if is_lost or not await self.pool.host.is_healthy(new.worker):
                raise RuntimeError(f"it died within {self._gate_s:g} s of its start")

    def _lack(self, kind: str) -> str | None:
        """Why no worker of a kind can be started beside those there are; None where one can."""
        members, most, limit = list(self.pool.members()), self.pool.max_workers, self.pool.types[kind].limit
        if len(members) >= most:
            return f"--max-workers {most} leaves no room for another"
        if limit is not None and sum(m.kind == kind for m in members) >= limit:
            return f"no more than {limit} of {kind} can be had"
        if not self.pool.has_room:
            return f"its share of the portfolio, {self.pool.share} workers, leaves no room for another"
        return self.pool.host.room(kind)

    def _retire(self, old: Member, to: Revision) -> None:
        """Let a worker's requests move or finish, then stop it; another is wanted in its place."""
        if old.state != "serving" or self.pool.state_of(old.worker) is None:
            return  # it was lost, or drained, meanwhile
        self.pool.retire(old, f"{self.what}: replaced by a worker of revision {to.number}")
        old.task = self.pool.tasks.spawn(self._let_go(old))
        self._retiring.append(old)

    async def _let_go(self, old: Member) -> None:
        way_out = self.pool.way_out(old)
        await way_out.drain(f"{old.worker} is being replaced", time.monotonic() + self._finish_s)
        await self.pool.part(old, f"{old.worker} is replaced, and was given {self._finish_s:g} s to finish")
        self.pool.events.record(time.time(), "stop", f"{self.what}: it is replaced", worker=old.worker)

    def _replaced(self, old: Member, new: Member) -> None:
        self.replaced += 1
        self._say(f"{new.worker} serves in place of {old.worker} ({self.how})")

    async def _back(self, cause: str) -> None:
        """Make the fleet wholly old again, however often it takes."""
        self.cause, self.state = cause, "rolling-back"
        self._stop.clear()
        self.pool.revision = self.before
        self._say(f"{self.what} fails: {cause}")
        for member in self._still_retiring():
            if not member.is_stopping and (self._stays or member.revision == self.before.number):
                member.is_leaving = False
                self.pool.undrain(member, f"{self.what} failed")
        for kind, wanted in self.pool.wanted_kinds.items():
            if self._standing(kind) < wanted:
                self.pool.settle(kind, f"{self.what} failed")
        wait_s = pause_s(0.0)
        while not self._stays:
            try:
                await self._replace_all(self.before)
                break
            except RolloutFailed as error:
                self._say(f"{self.what}: rolling back goes on in {wait_s:g} s: {error}")
                await asyncio.sleep(wait_s)
                wait_s = pause_s(wait_s)
        for kind in self.pool.wanted_kinds:
            self.pool.settle(kind, f"{self.what} failed")
        if self._stays:
            self._end("failed", f"{self.what} failed: {cause}")
            return
        await self._until(lambda: all(self._standing(k) >= n for k, n in self.pool.wanted_kinds.items()))
        self._end("rolled-back", f"{self.what}: rolled back, since {cause}")

    # What is there.

    def _next(self, to: Revision) -> Member | None:
        """The worker to replace next: that with the fewest requests."""
        there = [m for m in self.pool.members() if not m.is_leaving]
        if self.only is not None:
            return next((m for m in there if m.worker == self.only and m.state == "serving"), None)
        old = [m for m in there if m.revision != to.number]
        for member in old:
            if member.state == "starting" and self.pool.revision is to:
                self.pool.give_up(member, f"{self.what}: it was of another revision")
                self.pool.settle(member.kind, self.what)
        requests = self.pool.core.requests
        serving = (m for m in old if m.state == "serving")
        return min(serving, key=lambda m: len(requests.on_worker(m.worker)), default=None)

    def _standing(self, kind: str) -> int:
        return sum(m.kind == kind and m.state == "serving" for m in self.pool.members())

    def _is_whole(self, kind: str) -> bool:
        return self._standing(kind) >= self.pool.wanted_kinds[kind]

    def _still_retiring(self) -> list[Member]:
        there = set(self.pool.members())
        self._retiring = [m for m in self._retiring if m in there and m.is_leaving]
        return self._retiring

    async def _until_one_less(self) -> None:
        before = len(self._still_retiring())
        await self._until(lambda: len(self._still_retiring()) < before)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for the fleet. Raises RolloutFailed once the rollout is to be rolled back."""
        while not holds():
            if self._stop.is_set():
                raise RolloutFailed(self.cause)
            await asyncio.sleep(LOOK_S)
        if self._stop.is_set():
            raise RolloutFailed(self.cause)

    def _gone(self, member: Member, reason: str) -> None:
        """A worker was lost: a new one shows that the update is no good."""
        if self.only is None and self.state == "running" and member.revision == self.revision.number:
            self.pool.revision = self.before
            self._fail(f"{member.worker}, which is new, was lost: {reason}")

    def _fail(self, why: str) -> None:
        self.cause = why
        self._note()
        self._stop.set()

    def _end(self, state: State, said: str) -> None:
        self.state = state
        self.pool.core.metrics.rollouts.labels(state).inc()
        self._say(said)

    def _say(self, said: str) -> None:
        self.pool.events.record(time.time(), "update", said, **self.as_json())
        self._note()

    def _note(self) -> None:
        """Write down what a core's successor must know to go on."""
        both = {
            name: (its.number, its.model, its.flags)
            for name, its in (("revision", self.revision), ("before", self.before))
        }
        how = {"cause": self.cause, "replaced": self.replaced, "only": self.only, "finish_s": self._finish_s}
        self.pool.note(rollout={"is_open": self.is_open, **both, **how})
