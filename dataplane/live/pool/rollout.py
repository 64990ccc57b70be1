"""A rollout: workers replaced one after another while the fleet serves: all in an update, one in a restart.

Each is replaced start-first where there is room for one more worker (the fleet is never below the wanted
number), else stop-first (never more than one below it). A new worker takes requests once it has warmed up and
stayed healthy for `gate_s`. The old one's requests are moved, with their KV where weights and layout are the
same, or finish. What is left after `finish_s` is replayed, or ends in an explicit error where no worker runs
the weights that it began on.

    running ──all replaced──▶ done
       │ a new worker did not start, or was lost; or an operator cancelled
       ▼
    rolling-back ──all old again──▶ rolled-back        (a restart that failed: failed)

Workers launched for other reasons meanwhile are of the old revision until the first new worker has passed its
gate. From then on they are of the new one, unless it is rolled back. Rolling back is tried until it is done.
The rollout runs in the fleet's own process: no client's and no controller's end stops it. Its state is
written down; a core's successor goes on with it from the workers that are there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from dataplane.live.pool.member import Life, Member, Revision
from dataplane.live.pool.pool import WorkerPool
from dataplane.live.pool.rolling_change import GATE_S, RollingChange, RolloutFailed
from dataplane.live.pool.roster import RolloutRecord


class Rollout(RollingChange):
    """One update (`only` None) or restart (of `only`) of a pool's workers; `run` it once."""

    def __init__(
        self,
        pool: WorkerPool,
        revision: Revision,
        finish_s: float,
        only: WorkerId | None = None,
        gate_s: float = GATE_S,
    ) -> None:
        super().__init__(pool, gate_s)
        self.before, self.revision, self.only = pool.revision, revision, only
        self._finish_s = finish_s
        self._is_resumed, self._stays = False, only is not None  # which failing leaves as it then is
        if only is None and not pool.serving and pool.rollout_left is None:
            raise BadInput("update: no worker serves, so nothing would show whether a new one does; scale up")

    def resume(self, left: RolloutRecord, before: Revision, obstacle: str) -> None:
        """Be the one that the core before has left under way; `obstacle`: why it cannot go on, or nothing."""
        self.pool.rollout_left = None
        self.before, self.replaced, self.cause = before, left.replaced, obstacle or left.cause
        self._is_resumed, self._stays = True, self._stays or bool(obstacle)
        for old in self._retiring():
            self.pool.lives.let_go(old, self._finish_s, self.what)

    @property
    def what(self) -> str:
        return f"update {self.revision.number}" if self.only is None else f"restart of {self.only}"

    def as_json(self) -> dict[str, Any]:
        """Where it stands."""
        members = [m for m in self.pool.members() if not m.is_replaced]
        new = sum(m.revision == self.revision.number for m in members)
        return super().as_json() | {
            "workers": {"new": new, "old": len(members) - new} if self.only is None else {},
            "model": self.revision.model,
            "flags": list(self.revision.flags),
        }

    async def run(self) -> None:
        """Walk it to one of its ends."""
        self.pool.lives.on_gone.append(self._gone)
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
            self.pool.lives.on_gone.remove(self._gone)
            self.pool.surge.clear()

    async def _replace_all(self, to: Revision) -> None:
        while (old := self._next(to)) is not None:
            kind = old.kind
            await self._until(partial(self._is_whole, kind))
            if old.state != "serving":
                continue  # it was lost, or drained, meanwhile
            if self.pool.number_in("serving", kind) > self.pool.wanted_kinds[kind]:
                self._retire(old, to)
                continue
            lack = self.pool.lack(kind)
            if lack is not None and any(m.kind == kind for m in self._retiring()):
                await self._until_one_less()
                continue
            await (self._start_first(old, to) if lack is None else self._stop_first(old, to, lack))
            if self.only is None:
                self.pool.revision = to  # it has shown that it serves
        while self._retiring():
            await self._until_one_less()
        if self.only is None:
            self.pool.revision = to
        for kind in self.pool.wanted_kinds:  # one that was lost meanwhile may have been replaced twice
            self.pool.lives.settle(kind, f"{self.what} is over")

    async def _fill(self) -> None:
        """Start what the core before was starting as it died, and whatever was lost with it."""
        for kind, wanted in self.pool.wanted_kinds.items():
            while self.pool.lack(kind) is not None and any(m.kind == kind for m in self._retiring()):
                await self._until_one_less()
            if self.pool.number_in("serving", kind) < wanted:
                if self.only is None:
                    await self._start(kind, "one that was lost", self.revision)
                    self.pool.revision = self.revision
                self.replaced += 1
                self.pool.lives.settle(kind, self.what)

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
            await self._until(lambda: old not in self._retiring())
        finally:
            self.pool.surge[old.kind] += 1
        self._replaced(old, await self._start(old.kind, old.worker, to))

    async def _start(self, kind: str, old: str, to: Revision) -> Member:
        """A new worker in place of `old`, past its gate. Raises RolloutFailed."""
        new = self.pool.enroll(kind, f"{self.what}: in place of {old}", to.number, Life.TRIED)
        await self._serves(new, to)
        return new

    def _retire(self, old: Member, to: Revision) -> None:
        """Let a worker's requests move or finish, then stop it; another is wanted in its place."""
        if self.pool.state_of(old.worker) != "serving":
            return  # it was lost, or drained, meanwhile
        self.pool.lives.retire(old, f"{self.what}: replaced by a worker of revision {to.number}")
        self.pool.lives.let_go(old, self._finish_s, self.what)

    def _replaced(self, old: Member, new: Member) -> None:
        self.replaced += 1
        self._say(f"{new.worker} serves in place of {old.worker} ({self.how})")

    async def _back(self, cause: str) -> None:
        """Make the fleet wholly old again, however often it takes."""
        self.cause, self.state = cause, "rolling-back"
        self._stop.clear()
        self.pool.revision = self.before
        self._say(f"{self.what} fails: {cause}")
        for member in self._retiring():
            if not member.is_empty and (self._stays or member.revision == self.before.number):
                self.pool.lives.take_back(member, f"{self.what} failed")
        for kind, wanted in self.pool.wanted_kinds.items():
            if self.pool.number_in("serving", kind) < wanted:
                self.pool.lives.settle(kind, f"{self.what} failed")
        if not self._stays:
            await self._go_back(lambda: self._replace_all(self.before))
        for kind in self.pool.wanted_kinds:
            self.pool.lives.settle(kind, f"{self.what} failed")
        if self._stays:
            self._end("failed", f"{self.what} failed: {cause}")
            return
        await self._until(lambda: all(map(self._is_whole, self.pool.wanted_kinds)))
        self._end("rolled-back", f"{self.what}: rolled back, since {cause}")

    # What is there.

    def _next(self, to: Revision) -> Member | None:
        """The worker to replace next: that with the fewest requests."""
        there = [m for m in self.pool.members() if not m.is_replaced]
        if self.only is not None:
            return next((m for m in there if m.worker == self.only and m.state == "serving"), None)
        old = [m for m in there if m.revision != to.number]
        for member in old:
            if member.state == "starting" and self.pool.revision is to:
                self.pool.lives.give_up(member, f"{self.what}: it was of another revision")
                self.pool.lives.settle(member.kind, self.what)
        requests = self.pool.core.requests
        serving = (m for m in old if m.state == "serving")
        return min(serving, key=lambda m: len(requests.on_worker(m.worker)), default=None)

    def _is_whole(self, kind: str) -> bool:
        return self.pool.number_in("serving", kind) >= self.pool.wanted_kinds[kind]

    def _retiring(self) -> list[Member]:
        """The workers that a rollout replaces; there is one rollout at a time."""
        return [m for m in self.pool.members() if m.life in (Life.RETIRING, Life.RETIRED)]

    async def _until_one_less(self) -> None:
        before = len(self._retiring())
        await self._until(lambda: len(self._retiring()) < before)

    def _gone(self, member: Member, reason: str) -> None:
        """A worker was lost: a new one shows that the update is no good."""
        if self.only is None and self.state == "running" and member.revision == self.revision.number:
            self.pool.revision = self.before
            self._fail(f"{member.worker}, which is new, was lost: {reason}")

    def _fail(self, why: str) -> None:
        super()._fail(why)
        self._note()

    def _say(self, said: str) -> None:
        super()._say(said)
        self._note()

    def _note(self) -> None:
        """Write down what a core's successor must know to go on."""
        both, how = (self.revision.named(), self.before.named()), (self.cause, self.replaced)
        self.pool.note(rollout=RolloutRecord(self.is_open, *both, *how, self.only, self._finish_s))
