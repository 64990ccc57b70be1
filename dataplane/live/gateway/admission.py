"""Admission: place each request at once where a worker has room, and queue it where none has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from controlplane.types import WorkerId
from dataplane.live.gateway.placement import Placement
from dataplane.live.gateway.request import Rejection, Tracked
from dataplane.live.gateway.waiting_room import WaitingRoom, WaitingSettings

LOOK_EVERY_S = 0.25


class Admission:
    """The queue before the fleet. `begin` starts a request on a worker, `turn_away` ends it with a reason.

    `is_coming`: whether the first worker is starting; nobody is turned away for having waited for it.
    """

    def __init__(
        self,
        settings: WaitingSettings,
        placement: Placement,
        begin: Callable[[Tracked, WorkerId], Awaitable[None]],
        turn_away: Callable[[Tracked, str], None],
        is_coming: Callable[[], bool] = lambda: False,
    ) -> None:
        self._placement, self._begin, self._turn_away = placement, begin, turn_away
        self._is_coming = is_coming
        self._room: WaitingRoom[Tracked] = WaitingRoom(settings)
        self._wake = asyncio.Event()
        self._dispatcher = asyncio.get_running_loop().create_task(self._dispatch())

    def __len__(self) -> int:
        return len(self._room)

    @property
    def is_over(self) -> bool:
        return self._dispatcher.done()

    async def take_in(self, tracked: Tracked) -> None:
        """Begin a new request on the worker that is chosen for it, or let it wait for one."""
        now_s = time.monotonic()
        worker = self._placement.choose(tracked, now_s) if len(self._room) == 0 else None
        if worker is not None:
            await self._begin(tracked, worker)
            return
        turned_away = self._room.offer(tracked, tracked.ticket.priority, now_s)
        if turned_away is not None:
            self._turn_away(turned_away, "the fleet is full and its queue is, too")
        self.look()

    def take_back(self, tracked: Tracked) -> None:
        """Put a request that has lost its worker back in line, ahead of newcomers."""
        self._room.readmit(tracked, tracked.ticket.priority, tracked.arrival_s, time.monotonic())
        self.look()

    def discard(self, tracked: Tracked) -> None:
        """The request is over; somebody else may take its place."""
        self._room.discard(tracked)
        self.look()

    def look(self) -> None:
        """Something has changed: a place may have come free."""
        self._wake.set()

    def rejection(self, why: str) -> Rejection:
        """A refusal that says when to come back."""
        return Rejection(why, self._room.retry_after_s(time.monotonic()))

    def close(self) -> None:
        """Place nobody any more."""
        self._dispatcher.cancel()

    async def _dispatch(self) -> None:
        """Place what waits, in order of rank, whenever something may have changed."""
        while True:
            with suppress(TimeoutError):  # not wait_for: before Python 3.12 it may swallow a cancellation
                async with asyncio.timeout(LOOK_EVERY_S if len(self._room) else None):
                    await self._wake.wait()
            self._wake.clear()
            now_s = time.monotonic()
            for late in () if self._is_coming() else self._room.overdue(now_s):
                self._turn_away(late, f"no worker had room within {self._room.settings.max_wait_s:g} s")
            refused = 0
            for waiting in self._room.in_order():
                if waiting not in self._room:
                    continue  # it ended while an earlier one was sent
                worker = self._placement.choose(waiting.what, now_s)
                if worker is not None:
                    self._room.take(waiting, now_s)
                    await self._begin(waiting.what, worker)
                    continue
                refused += 1
                if refused == self._placement.refusals:
                    break
