"""The workers that a gateway is connected to, each in one of vLLM's slots."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from controlplane.types import WorkerId
from dataplane.live.link import EngineLink, Telemetry


@dataclass(slots=True, eq=False)
class Attached:
    """A worker as this gateway is connected to it. `slot` is its index in vLLM's metrics."""

    link: EngineLink
    slot: int
    kind: str = ""
    telemetry: Telemetry | None = None
    reader: asyncio.Task[None] | None = None

    @property
    def worker(self) -> WorkerId:
        return self.link.info.worker


class Attachments:
    """Workers by name; at most `slots` at any one time."""

    def __init__(self, slots: int) -> None:
        self._slots = range(slots)
        self._by_worker: dict[WorkerId, Attached] = {}

    def __len__(self) -> int:
        return len(self._by_worker)

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._by_worker

    def __iter__(self) -> Iterator[Attached]:
        """Those there are now, whoever comes or goes meanwhile."""
        return iter(tuple(self._by_worker.values()))

    def get(self, worker: WorkerId) -> Attached | None:
        return self._by_worker.get(worker)

    def add(self, link: EngineLink, kind: str) -> Attached:
        """Give a worker the lowest free slot. Raises StopIteration when every slot is taken."""
        taken = {at.slot for at in self._by_worker.values()}
        at = Attached(link, next(slot for slot in self._slots if slot not in taken), kind)
        self._by_worker[at.worker] = at
        return at

    def discard(self, worker: WorkerId) -> None:
        self._by_worker.pop(worker, None)
