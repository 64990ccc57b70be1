"""Requests that no worker can take yet: a bounded queue with priorities and ageing.

A request's rank is `arrival_s - ageing_s · priority`, and the lowest rank goes first. So a high priority
counts as having arrived `ageing_s` sooner: it overtakes younger normal requests, and a normal request that
has waited `ageing_s` longer than a high one goes ahead of it. Nobody starves, and no rank ever changes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from controlplane.errors import BadInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WaitingSettings:
    """Bounds of the queue: requests, and seconds that one may wait; past either it is turned away."""

    max_requests: int = 256
    max_wait_s: float = 30.0
    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_requests < 0 or not self.max_wait_s > 0 or not self.ageing_s >= 0:
            raise BadInput(f"queue: lengths and times must not be negative, got {self}")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """One waiting request, since when, and its place."""

    what: T
    priority: int
    since_s: float
    rank: float


class WaitingRoom(Generic[T]):
    """The queue itself. Every method that needs the time is told it."""

    def __init__(self, settings: WaitingSettings) -> None:
        self.settings = settings
        self._waiting: list[Waiting[T]] = []
        self._departures_s: deque[float] = deque(maxlen=32)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiting: Waiting[T]) -> bool:
        return any(w is waiting for w in self._waiting)

    def in_order(self) -> list[Waiting[T]]:
        """Everything that waits, next first."""
        return sorted(self._waiting, key=lambda w: w.rank)

    def offer(self, what: T, priority: int, now_s: float) -> T | None:
        """Queue a request; what had to be turned away for it, which may be the newcomer itself.

        A full room turns away its youngest request of lower priority for a newcomer of higher priority:
        a high request is never refused while a normal one keeps a place it has just taken.
        """
        newcomer = Waiting(what, priority, now_s, now_s - self.settings.ageing_s * priority)
        if len(self._waiting) < self.settings.max_requests:
            self._waiting.append(newcomer)
            return None
        lower = [w for w in self._waiting if w.priority < priority]
        if not lower:
            return what
        out = max(lower, key=lambda w: w.rank)
        self._waiting.remove(out)
        self._waiting.append(newcomer)
        return out.what

    def readmit(self, what: T, priority: int, arrival_s: float, now_s: float) -> None:
        """Queue a request that lost its worker: never turned away, and ranked by its first arrival."""
        rank = arrival_s - self.settings.ageing_s * priority
        self._waiting.append(Waiting(what, priority, now_s, rank))

    def take(self, waiting: Waiting[T], now_s: float) -> None:
        """Remove a request that found a worker."""
        self._waiting.remove(waiting)
        self._departures_s.append(now_s)

    def discard(self, what: T) -> bool:
        """Remove a request whose client left; whether it was waiting."""
        found = [w for w in self._waiting if w.what is what]
        for waiting in found:
            self._waiting.remove(waiting)
        return bool(found)

    def overdue(self, now_s: float) -> list[T]:
        """Remove and return the requests that have waited longer than anyone should."""
        late = [w for w in self._waiting if now_s - w.since_s >= self.settings.max_wait_s]
        for waiting in late:
            self._waiting.remove(waiting)
        return [w.what for w in late]

    def retry_after_s(self, now_s: float) -> int:
        """A whole number of seconds after which a place is likely: queue length over the recent pace."""
        span_s = now_s - self._departures_s[0] if self._departures_s else 0.0
        if span_s <= 0:
            return max(1, min(60, round(self.settings.max_wait_s / 4)))
        pace_rps = len(self._departures_s) / span_s
        return max(1, min(60, round((len(self._waiting) + 1) / pace_rps)))
