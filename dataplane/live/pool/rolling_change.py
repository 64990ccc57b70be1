"""The common part of updates, restarts and reshapes: workers change one by one while the fleet serves.

A new worker takes requests once it has stayed healthy for `gate_s`. What fails is rolled back, and rolling
back is tried until it is done.

In a reshape a fleet's workers become those of another plan. Each step (controlplane.scaler.reconcile) starts
a worker and then drains its share of those that go. Where there is no room for one more, the old ones are
drained first. Requests move to workers of their type. Where none is left, they are computed again on another;
none is cut. A new worker takes requests once it has stayed healthy for `gate_s`.

    running ──as planned──▶ done
       │ a new worker did not start, or was lost; SLO attainment fell; or an operator cancelled
       ▼
    rolling-back ──as before──▶ rolled-back

Rolling back takes the same steps the other way. A worker that still drains then serves again at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal

from controlplane.errors import BadInput
from controlplane.scaler.reconcile import RollingStep, rolling_steps
from dataplane.live.pool.member import Life, Member, Revision
from dataplane.live.pool.pool import WorkerPool
from dataplane.processes import keeper

State = Literal["running", "rolling-back", "done", "rolled-back", "failed"]
GATE_S = 3.0
LOOK_S = 0.05
WATCH_S = 1.0  # between two looks at the SLO attainment


class RolloutFailed(Exception):
    """It cannot go on; the message says why."""


async def stays_healthy(pool: WorkerPool, gate_s: float, new: Member) -> None:
    """Return once a new worker has stayed healthy, without requests; RuntimeError where it has not."""
    new.phase = "showing that it stays healthy"
    until_s = time.monotonic() + gate_s
    while time.monotonic() < until_s:
        await asyncio.sleep(gate_s / 5)
        is_lost = pool.core.link(new.worker) is None
        if is_lost or not await pool.host.is_healthy(new.worker):
            raise RuntimeError(f"it died within {gate_s:g} s of its start")


class RollingChange:
    """A change of a pool's workers that can be cancelled, and goes back where it fails."""

    def __init__(self, pool: WorkerPool, gate_s: float) -> None:
        self.pool = pool
        self.state: State = "running"
        self.how = self.cause = ""
        self.replaced = 0
        self._gate_s = gate_s
        self._stop = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self.state in ("running", "rolling-back")

    @property
    def what(self) -> str:
        """Its name in events."""
        raise NotImplementedError

    def as_json(self) -> dict[str, Any]:
        """Where it stands."""
        return {"what": self.what, "state": self.state, "how": self.how, "cause": self.cause} | {
            "replaced": self.replaced
        }

    def cancel(self, why: str) -> None:
        """Roll it back. Raises BadInput where it is not running forwards."""
        if self.state != "running":
            raise BadInput(f"{self.what}: is {self.state}, so there is nothing to cancel")
        self._fail(why)

    async def _serves(self, new: Member, to: Revision) -> None:
        """Start a new worker; return once it is past its gate. Raises RolloutFailed."""
        pool = self.pool
        launch = pool.lives.launch(new, to, partial(stays_healthy, pool, self._gate_s))
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([launch, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not launch.done():
            pool.lives.give_up(new, self.cause)
            raise RolloutFailed(self.cause)
        error = None if launch.cancelled() else launch.exception()
        if launch.cancelled() or error is not None:
            raise RolloutFailed(f"{new.worker} did not start: {error or 'it was given up'}")

    async def _go_back(self, walk: Callable[[], Awaitable[None]]) -> None:
        """Walk back, however often it takes."""
        wait_s = keeper.PAUSES.after(0.0)
        while True:
            try:
                return await walk()
            except RolloutFailed as error:
                self._say(f"{self.what}: rolling back goes on in {wait_s:g} s: {error}")
                await asyncio.sleep(wait_s)
                wait_s = keeper.PAUSES.after(wait_s)

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait for the fleet. Raises RolloutFailed once it is to be rolled back."""
        while not holds() and not self._stop.is_set():
            await asyncio.sleep(LOOK_S)
        if self._stop.is_set():
            raise RolloutFailed(self.cause)

    def _fail(self, why: str) -> None:
        self.cause = why
        self._stop.set()

    def _end(self, state: State, said: str) -> None:
        self.state = state
        self.pool.core.metrics.rollouts.labels(state).inc()
        self._say(said)

    def _say(self, said: str) -> None:
        self.pool.tell("update", said, **self.as_json())


class Reshape(RollingChange):
    """One change of a pool's workers to the `after` of a plan, by type; `run` it once.

    `name`: the plan's. `fault`: what has gone wrong for clients since it began, or nothing. `ended`: told
    how it ended.
    """

    def __init__(
        self,
        pool: WorkerPool,
        name: str,
        after: Mapping[str, int],
        fault: Callable[[], str | None],
        ended: Callable[[State], None],
        gate_s: float = GATE_S,
    ) -> None:
        super().__init__(pool, gate_s)
        self.name, self.after, self.before = name, dict(after), dict(pool.wanted_kinds)
        self._fault, self._ended = fault, ended

    @property
    def what(self) -> str:
        return f"plan {self.name}"

    def as_json(self) -> dict[str, Any]:
        """Where it stands; `replaced`: the steps taken."""
        return super().as_json() | {
            "workers": dict(self.pool.wanted_kinds),
            "model": self.pool.revision.model,
            "flags": list(self.pool.revision.flags),
        }

    async def run(self) -> None:
        """Walk it to one of its ends."""
        self.pool.lives.on_gone.append(self._gone)
        watch = asyncio.create_task(self._watch())
        try:
            self._say(f"{self.what} begins: {_text(self.before)} → {_text(self.after)}")
            await self._walk(self.after)
            self._end("done", f"{self.what}: done, {_text(self.after)}")
        except RolloutFailed as error:
            await self._back(str(error))
        finally:
            watch.cancel()
            self.pool.lives.on_gone.remove(self._gone)
            self.pool.surge.clear()
            self._ended(self.state)

    async def _walk(self, to: Mapping[str, int]) -> None:
        for step in rolling_steps(self.pool.wanted_kinds, to):
            if step.start is None:
                await self._until(lambda: True)
                self._want(step.stops, -1)
            else:
                await self._replace(step.start, step)
            self.replaced += 1
            self._say(f"{self.what}: {_text(self.pool.wanted_kinds)} {self.how}".rstrip())
        await self._until(lambda: not self._leaving())
        self.pool.scale(to, self.what)

    async def _replace(self, kind: str, step: RollingStep) -> None:
        """Take a step that starts a worker."""
        if any(m.kind == kind for m in self._leaving()):  # it serves again at once
            self._want((kind,), 1)
            self._want(step.stops, -1)
            return
        while self.pool.lack(kind) is not None and (leaving := len(self._leaving())):
            await self._until(lambda before=leaving: len(self._leaving()) < before)  # type: ignore[misc]
        lack = self.pool.lack(kind)
        self.how = "(start-first)" if lack is None else f"(stop-first: {lack})"
        if lack is not None:
            if not step.stops or self.pool.serving <= len(step.stops):
                raise RolloutFailed(f"no worker can be started before the last has stopped: {lack}")
            self._want(step.stops, -1)
            await self._until(lambda: not self._leaving())
        await self._start(kind)
        if lack is None:
            self._want(step.stops, -1)

    def _want(self, kinds: tuple[str, ...], more: int) -> None:
        """Want `more` workers of each of these types, or fewer; launches and drains follow."""
        wanted = Counter(self.pool.wanted_kinds)
        for kind in kinds:
            wanted[kind] += more
        if kinds:
            self.pool.scale(dict(wanted), self.what)

    async def _start(self, kind: str) -> None:
        """A new worker of a kind, past its gate. Raises RolloutFailed."""
        pool = self.pool
        pool.surge[kind] += 1
        try:
            await self._serves(pool.enroll(kind, self.what, None, Life.TRIED), pool.revision)
        finally:
            pool.surge[kind] -= 1
        self._want((kind,), 1)

    async def _back(self, cause: str) -> None:
        """Make the fleet what it was, however often it takes."""
        self.cause, self.state = cause, "rolling-back"
        self._stop.clear()
        self._say(f"{self.what} fails: {cause}")
        await self._go_back(lambda: self._walk(self.before))
        self._end("rolled-back", f"{self.what}: rolled back to {_text(self.before)}, since {cause}")

    async def _watch(self) -> None:
        """Roll it back once clients suffer."""
        while self.state == "running":
            if (fault := self._fault()) is not None:
                self._fail(fault)
                return
            await asyncio.sleep(WATCH_S)

    # What is there.

    def _leaving(self) -> list[Member]:
        return [m for m in self.pool.members() if m.state == "draining"]

    def _gone(self, member: Member, reason: str) -> None:
        """A worker was lost: one of a new type shows that the plan is no good here."""
        if self.state == "running" and not self.before.get(member.kind):
            self._fail(f"{member.worker}, which is new, was lost: {reason}")


def _text(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n) or "no workers"
