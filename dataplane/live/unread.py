"""Outputs on their way to vLLM's front end: in order, and bounded by making their senders wait."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataplane.live.vllm_surface import EngineCoreOutputs


class Unread:
    """A queue of batches with one reader. `tell` never waits, so that what is told in order stays so.

    A bounded asyncio.Queue would not do: of two senders waiting for a place, the later may be woken
    first, and a request that has just moved has two senders.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._batches: deque[EngineCoreOutputs] = deque()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._batches)

    def tell(self, batch: EngineCoreOutputs) -> None:
        """Append a batch."""
        self._batches.append(batch)
        self._news.set()
        if len(self._batches) >= self._most:
            self._room.clear()

    async def until_room(self) -> None:
        """Wait while the reader lags behind; a sender calls it before it takes its next message."""
        await self._room.wait()

    async def next(self) -> EngineCoreOutputs:
        """Return the oldest batch, waiting for one."""
        while not self._batches:
            self._news.clear()
            await self._news.wait()
        batch = self._batches.popleft()
        if len(self._batches) < self._most:
            self._room.set()
        return batch
