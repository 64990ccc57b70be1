"""Admission: place each request at once where a worker has room, and queue it where none has.

The queue is the control plane's (placement.queue), over the rows of the placement's ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf

import numpy as np

from controlplane.compiled import compile_now
from controlplane.placement import ledger as state
from controlplane.placement import queue
from controlplane.placement.exact import HEARTBEAT_S, waiting_line
from controlplane.placement.policies import Policy
from controlplane.types import WorkerId
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Rejection, Tracked

LOOK_EVERY_S = 0.25


class Admission:
    """The queue before the fleet. `begin` starts a request on a worker, `turn_away` ends it with a reason.

    `is_coming`: whether the first worker is starting; no request is turned away for having waited for it, and
    each has its whole time to be placed once it is there.
    `solved`: told of each heartbeat of the exact policy (its requests, whether its placement is proven best).
    """

    def __init__(
        self,
        settings: queue.QueueSettings,
        placement: Placement,
        begin: Callable[[Tracked, WorkerId], Awaitable[None]],
        turn_away: Callable[[Tracked, str], None],
        is_coming: Callable[[], bool] = lambda: False,
        solved: Callable[[int, bool], None] = lambda requests, is_proven: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._placement, self._clock = settings, placement, clock
        self._begin, self._turn_away = begin, turn_away
        self._is_coming, self._solved = is_coming, solved
        self._queue = queue.new_queue(settings)
        self._waiting: dict[int, Tracked] = {}  # by their rows in the ledger
        self._departures_s: deque[float] = deque(maxlen=32)
        self._came_s = -inf  # when a first worker was last on its way
        self._wake = asyncio.Event()
        self._compile()
        self._dispatcher = asyncio.get_running_loop().create_task(self._dispatch())

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_over(self) -> bool:
        return self._dispatcher.done()

    async def take_in(self, tracked: Tracked) -> None:
        """Begin a new request on the worker that is chosen for it, or let it wait for one."""
        now_s = self._clock()
        r = self._placement.row(tracked)
        is_next = not self._waiting or queue.goes_first(self._placement.ledger, self._queue, r)
        if is_next and self._placement.policy != Policy.EXACT:
            worker = self._placement.choose(tracked, now_s)
            if worker is not None:
                await self._begin(tracked, worker)
                return
        out = int(queue.turned_away(self._placement.ledger, self._queue, r))
        if out != state.NONE:
            self._turn_away(self._waiting.get(out, tracked), "the fleet is full and its queue is, too")
        if out != r:
            queue.hold(self._placement.ledger, self._queue, r, now_s)
            self._waiting[r] = tracked
        self.look()

    def take_back(self, tracked: Tracked) -> None:
        """Put a request that has lost its worker back in line, ahead of newcomers."""
        r = self._placement.row(tracked)
        queue.readmit(self._placement.ledger, self._queue, r, self._clock())
        self._waiting[r] = tracked
        self.look()

    def discard(self, tracked: Tracked) -> None:
        """The request is over; another may take its place."""
        self._remove(self._placement.row(tracked))
        self.look()

    def held(self) -> list[tuple[Tracked, float]]:
        """The first in line who may still be on time, and in how many seconds each must begin."""
        line, left_s = np.empty(queue.REFUSALS, np.int64), np.empty(queue.REFUSALS)
        n = queue.on_time(self._placement.ledger, self._queue, self._clock(), line, left_s)
        return [(self._waiting[r], left) for r, left in zip(line[:n].tolist(), left_s.tolist(), strict=False)]

    def look(self) -> None:
        """Something has changed: a place may have come free for what waits."""
        if self._waiting:
            self._wake.set()

    def rejection(self, why: str) -> Rejection:
        """A refusal that says when to come back."""
        return Rejection(why, self._retry_after_s(self._clock()))

    def close(self) -> None:
        """Place no more requests."""
        self._dispatcher.cancel()

    def _compile(self) -> None:
        """Compile the queue's kernels now. Under the first request that waits they would stop all streams."""
        of = self._placement.ledger, self._queue
        line, left_s = np.empty(queue.REFUSALS, np.int64), np.empty(queue.REFUSALS)
        compile_now(queue.goes_first, *of, 0)
        compile_now(queue.turned_away, *of, 0)
        compile_now(queue.leave, *of, 0)
        compile_now(queue.hold, *of, 0, 0.0)
        compile_now(queue.readmit, *of, 0, 0.0)
        compile_now(queue.offer, *of, 0.0)
        compile_now(queue.overdue, *of, 0.0)
        compile_now(queue.offer_late, *of)
        compile_now(queue.on_time, *of, 0.0, line, left_s)
        compile_now(queue.begin_round, self._queue)
        compile_now(queue.refuse, self._queue, 0)

    def _remove(self, r: int) -> None:
        if self._waiting.pop(r, None) is not None:
            queue.leave(self._placement.ledger, self._queue, r)

    async def _dispatch(self) -> None:
        """Place what waits, in order, whenever something may have changed."""
        while True:
            with suppress(TimeoutError):  # not wait_for: before Python 3.12 it may swallow a cancellation
                async with asyncio.timeout(LOOK_EVERY_S if self._waiting else None):
                    await self._wake.wait()
            self._wake.clear()
            now_s = self._clock()
            if self._is_coming():
                self._came_s = now_s
            if now_s - self._came_s >= self._settings.max_wait_s:
                self._turn_away_overdue(now_s)
            if self._placement.policy == Policy.EXACT:
                await self._beat()
            else:
                await self._offer_in_order()

    def _turn_away_overdue(self, now_s: float) -> None:
        why = "no worker had room" if self._placement.has_workers else "the fleet has no worker, and got none"
        while (r := int(queue.overdue(self._placement.ledger, self._queue, now_s))) != state.NONE:
            self._turn_away(self._waiting[r], f"{why} within {self._settings.max_wait_s:g} s")

    async def _offer_in_order(self) -> None:
        now_s = self._clock()
        queue.begin_round(self._queue)
        while True:
            r, has_lost = queue.offer(self._placement.ledger, self._queue, now_s)
            if r == state.NONE:
                return
            if not has_lost:
                await self._offer(int(r), self._placement.policy, now_s)

    async def _offer(self, r: int, policy: Policy, now_s: float) -> None:
        worker = self._placement.choose(self._waiting[r], now_s, policy=policy)
        if worker is None:
            queue.refuse(self._queue, r)
        else:
            await self._send(r, worker)

    async def _send(self, r: int, worker: WorkerId) -> None:
        tracked = self._waiting[r]
        self._remove(r)
        self._departures_s.append(self._clock())
        await self._begin(tracked, worker)

    async def _beat(self) -> None:
        """A heartbeat of the exact policy, solved outside the event loop; then late requests are offered."""
        now_s = self._clock()
        line, _ = waiting_line(self._placement.ledger, self._queue, now_s)
        requests = {r: self._waiting[r] for r in line.tolist()}
        if requests:
            placed, is_proven = await asyncio.to_thread(self._placement.together(line, now_s))
            self._solved(len(requests), is_proven)
            for r, worker in placed:
                if self._waiting.get(r) is requests[r] and self._placement.can_take(worker, requests[r]):
                    await self._send(r, worker)
        queue.begin_round(self._queue)
        while (r := int(queue.offer_late(self._placement.ledger, self._queue))) != state.NONE:
            await self._offer(r, Policy.BEST_FIT, now_s)
        await asyncio.sleep(HEARTBEAT_S)

    def _retry_after_s(self, now_s: float) -> int:
        """A whole number of seconds after which a place is likely: queue length over the recent pace."""
        span_s = now_s - self._departures_s[0] if self._departures_s else 0.0
        if span_s <= 0:
            return max(1, round(min(60.0, self._settings.max_wait_s / 4)))
        pace_rps = len(self._departures_s) / span_s
        return max(1, min(60, round((len(self._waiting) + 1) / pace_rps)))
