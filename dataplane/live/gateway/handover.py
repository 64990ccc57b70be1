"""Hand-overs: each request that a prefill worker has made the first token of moves to a decode worker.

A hand-over is a move like any other, so the stream goes on wherever it stands until the target has answered.
Where the prompt takes several steps the move begins with the prefill, and the KV of each chunk travels while
the next is computed. A request that no decode worker can take, or that may not be moved at all, decodes on
where it is, and is offered again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from controlplane.types import RequestId, WorkerId
from dataplane.live.gateway.metrics import Metrics
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Tracked
from dataplane.live.migration.move import MoveRecord

OFFER_EVERY_S = 0.1  # to the decode workers, of a request that found none
STREAMS = 4  # prefills whose KV one decode worker takes at a time


class Handovers:
    """The requests on prefill workers, by their segments. `move` and `why_fixed` are FleetCore's."""

    def __init__(
        self,
        placement: Placement,
        metrics: Metrics,
        move: Callable[[RequestId, WorkerId, str], Awaitable[MoveRecord]],
        why_fixed: Callable[[Tracked], str | None],
    ) -> None:
        self._placement, self._metrics = placement, metrics
        self._move, self._why_fixed = move, why_fixed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._streams: Counter[WorkerId] = Counter()

    def __len__(self) -> int:
        """Requests that are to leave their prefill worker, or are on their way."""
        return len(self._tasks)

    def begun(self, tracked: Tracked) -> None:
        """A request is on a prefill worker: its hand-over may begin before its first token."""
        if self._placement.chunks(tracked) > 1:
            self.prefilled(tracked)

    def prefilled(self, tracked: Tracked) -> None:
        """A request on a prefill worker has a token."""
        segment = tracked.segment
        if segment not in self._tasks:
            task = asyncio.ensure_future(self._hand_over(tracked, segment))
            self._tasks[segment] = task
            task.add_done_callback(lambda _: self._tasks.pop(segment, None))

    def ended(self, tracked: Tracked) -> None:
        """A request is over: on its prefill worker, if its hand-over is not."""
        if tracked.segment in self._tasks and len(tracked.output_token_ids) > 1:
            self._metrics.handovers.labels("stayed").inc()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _hand_over(self, tracked: Tracked, segment: str) -> None:
        """Move the request to a decode worker, trying again while it is to leave this segment."""
        failed: set[WorkerId] = set()
        while self._is_here(tracked, segment):
            # One that may not move keeps its place here, so that its end is counted.
            target = self._target(tracked, failed) if self._why_fixed(tracked) is None else None
            if target is not None:
                if await self._to(tracked, target):
                    return
                if self._is_here(tracked, segment):
                    self._metrics.handovers.labels("failed").inc()
                    failed.add(target)
            elif not self._placement.is_decoding(tracked):
                return  # it is offered once it has its first token
            else:
                failed.clear()
                await asyncio.sleep(OFFER_EVERY_S)

    def _target(self, tracked: Tracked, failed: set[WorkerId]) -> WorkerId | None:
        """The decode worker to offer a request to; of a prefill in progress one with few streams."""
        full: set[WorkerId] = set()
        if not self._placement.is_decoding(tracked):
            full = {w for w, n in self._streams.items() if n >= STREAMS}
        return self._placement.choose_decode(tracked, time.monotonic(), failed | full)

    async def _to(self, tracked: Tracked, target: WorkerId) -> bool:
        """Whether the request has moved there."""
        is_stream = not self._placement.is_decoding(tracked)
        self._placement.expect(tracked, target)
        self._streams[target] += is_stream
        try:
            move = await self._move(tracked.id, target, f"{tracked.worker} only prefills")
        finally:
            self._streams[target] -= is_stream
            self._placement.expect(tracked, None)
        if move.moved:
            self._metrics.handovers.labels("done").inc()
        return move.moved

    def _is_here(self, tracked: Tracked, segment: str) -> bool:
        return tracked.segment == segment and self._placement.hands_over(tracked)
