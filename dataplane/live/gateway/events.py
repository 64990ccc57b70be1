"""The event log: a bounded record of the fleet's decisions and their reasons, for people and programs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from controlplane.figures import fact_lines


@dataclass(frozen=True, slots=True)
class Event:
    """One decision or incident. `at_s` is Unix time; `facts` are plain JSON values."""

    id: int
    at_s: float
    kind: str
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The event and its facts; `says`: the facts in words."""
        told = {"id": self.id, "at_s": self.at_s, "kind": self.kind, "reason": self.reason, **self.facts}
        return told | {"says": fact_lines(self.facts)}


class EventLog:
    """The last `keep` events, and a bounded queue for each follower.

    A follower that does not read loses its oldest events, never ours: ids are consecutive, so it can see
    the gap.
    """

    def __init__(self, keep: int = 2000, follower_keep: int = 500) -> None:
        self._events: deque[Event] = deque(maxlen=keep)
        self._followers: list[asyncio.Queue[Event]] = []
        self._follower_keep = follower_keep
        self._next_id = 1

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def record(self, at_s: float, kind: str, reason: str, **facts: Any) -> Event:
        """Append an event and hand it to every follower."""
        event = Event(self._next_id, at_s, kind, reason, facts)
        self._next_id += 1
        self._events.append(event)
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)
        return event

    def about(self, request_id: str) -> list[Event]:
        """Events that name this request, oldest first."""
        return [event for event in self._events if event.facts.get("request_id") == request_id]

    async def follow(self, after_id: int = 0) -> AsyncIterator[Event]:
        """Kept events after `after_id`, then new ones as they come; ends only by cancellation."""
        queue: asyncio.Queue[Event] = asyncio.Queue(self._follower_keep)
        self._followers.append(queue)
        try:
            for event in tuple(self._events):
                if event.id > after_id:
                    yield event
            last = self._next_id - 1
            while True:
                event = await queue.get()
                if event.id > last:
                    yield event
        finally:
            self._followers.remove(queue)


def is_of_loss(event: Event) -> bool:
    """Whether a worker was lost, did not start, or serves in place of such a one."""
    return event.kind in ("lost", "gone") or "replaces" in event.facts  # gone: lost while it drained


async def tell_losses(events: EventLog, tell: Callable[[str], None]) -> None:
    """Tell a line at each event of a loss, until cancelled."""
    async for event in events.follow():
        if is_of_loss(event):
            tell(f"{event.facts['worker']} {event.kind}: {event.reason}")
