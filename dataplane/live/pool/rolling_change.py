"""The common part of updates, restarts and reshapes: workers change one by one while the fleet serves.

A new worker takes requests once it has stayed healthy for `gate_s`. What fails is rolled back, and rolling
back is tried until it is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

from controlplane.errors import BadInput
from dataplane.live.engine_api.processes import pause_s
from dataplane.live.pool.member import Member, Revision
from dataplane.live.pool.pool import WorkerPool

State = Literal["running", "rolling-back", "done", "rolled-back", "failed"]
GATE_S = 3.0
LOOK_S = 0.05


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
        wait_s = pause_s(0.0)
        while True:
            try:
                return await walk()
            except RolloutFailed as error:
                self._say(f"{self.what}: rolling back goes on in {wait_s:g} s: {error}")
                await asyncio.sleep(wait_s)
                wait_s = pause_s(wait_s)

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
