"""A fleet's recent past: decisions and their reasons, and the last hour in buckets of ten seconds.

The buckets hold throughput, TTFT, TPOT, attainment and errors. Prometheus keeps such series where it is
installed; the live page and `tokenfleet fleet status` need them on a fleet that stands alone. Memory is
bounded: the last events, and KEPT buckets, each with at most MOST_VALUES latencies.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controlplane.figures import fact_lines

BUCKET_S = 10.0
KEPT = 361  # an hour, and the bucket that is being filled
LATELY_S = 300.0
MOST_VALUES = 4096  # the newest of a bucket; percentiles of more would not differ


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

    @contextmanager
    def _following(self) -> Iterator[asyncio.Queue[Event]]:
        queue: asyncio.Queue[Event] = asyncio.Queue(self._follower_keep)
        self._followers.append(queue)
        try:
            yield queue
        finally:
            self._followers.remove(queue)

    async def follow(self, after_id: int = 0) -> AsyncIterator[Event]:
        """Kept events after `after_id`, then new ones as they come; ends only by cancellation."""
        with self._following() as queue:
            for event in tuple(self._events):
                if event.id > after_id:
                    yield event
            last = self._next_id - 1
            while True:
                event = await queue.get()
                if event.id > last:
                    yield event


def is_of_loss(event: Event) -> bool:
    """Whether a worker was lost, did not start, or serves in place of such a one."""
    return event.kind in ("lost", "gone") or "replaces" in event.facts  # gone: lost while it drained


async def tell_losses(events: EventLog, tell: Callable[[str], None]) -> None:
    """Tell a line at each event of a loss, until cancelled."""
    async for event in events.follow():
        if is_of_loss(event):
            tell(f"{event.facts['worker']} {event.kind}: {event.reason}")


@dataclass(slots=True)
class Bucket:
    """Counts of BUCKET_S from `at_s` on. `met`: requests within ttft, tpot, both.

    `given_up`: those of the aborted that were beyond a target.
    """

    at_s: float
    tokens: int = 0
    finished: int = 0
    failed: int = 0
    rejected: int = 0
    aborted: int = 0
    given_up: int = 0
    met: list[int] = field(default_factory=lambda: [0, 0, 0])
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_VALUES))
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_VALUES))


class Timeline:
    """The last hour in buckets; one in which nothing happened is not kept. Times are of a monotonic clock."""

    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque(maxlen=KEPT)

    def add_tokens(self, tokens: int, at_s: float) -> None:
        """Output tokens that were passed to clients."""
        self._at(at_s).tokens += tokens

    def add_finished(
        self, ttft_s: float | None, tpot_s: float | None, met: Sequence[bool], at_s: float
    ) -> None:
        """A finished request, its latencies, and whether it met its targets (ttft, tpot, both)."""
        bucket = self._at(at_s)
        bucket.finished += 1
        bucket.met = [count + hit for count, hit in zip(bucket.met, met, strict=True)]
        if ttft_s is not None:
            bucket.ttft_s.append(ttft_s)
        if tpot_s is not None:
            bucket.tpot_s.append(tpot_s)

    def add_given_up(self, waited_s: float, met: Sequence[bool], at_s: float) -> None:
        """A request that its client gave up beyond a target: a miss, and its wait counts as its TTFT."""
        bucket = self._at(at_s)
        bucket.aborted += 1
        bucket.given_up += 1
        bucket.met = [count + hit for count, hit in zip(bucket.met, met, strict=True)]
        bucket.ttft_s.append(waited_s)

    def add_unfinished(self, outcome: str, at_s: float) -> None:
        """A request that ended otherwise: failed, aborted by its client, rejected or rate_limited."""
        bucket = self._at(at_s)
        if outcome == "failed":
            bucket.failed += 1
        elif outcome == "aborted":
            bucket.aborted += 1
        else:
            bucket.rejected += 1

    def points(self, minutes: float, now_s: float, unix_s: float) -> list[dict[str, Any]]:
        """A point for each kept bucket that began in the last `minutes`, oldest first, in Unix time."""
        since_s, ahead_s = now_s - 60.0 * minutes, unix_s - now_s
        kept = [b for b in self._buckets if b.at_s >= since_s]
        return [{"at_s": round(b.at_s + ahead_s, 1), **_summary([b], BUCKET_S)} for b in kept]

    def lately(self, began_s: float, now_s: float) -> dict[str, Any]:
        """The last LATELY_S in one point, or the time since `began_s` where that is shorter."""
        over_s = max(BUCKET_S, min(LATELY_S, now_s - began_s))
        return _summary([b for b in self._buckets if b.at_s >= now_s - over_s], over_s)

    def _at(self, at_s: float) -> Bucket:
        start_s = math.floor(at_s / BUCKET_S) * BUCKET_S
        if not self._buckets or self._buckets[-1].at_s < start_s:
            self._buckets.append(Bucket(start_s))
        return self._buckets[-1]


def _summary(buckets: list[Bucket], over_s: float) -> dict[str, Any]:
    """Rates and latencies of some buckets; a latency is None where no request finished in them."""
    finished = sum(b.finished for b in buckets)
    met = {
        target: {"met": sum(b.met[i] for b in buckets), "of": finished + sum(b.given_up for b in buckets)}
        for i, target in enumerate(("ttft", "tpot", "both"))
    }
    return {
        "over_s": over_s,
        "tokens_per_s": sum(b.tokens for b in buckets) / over_s,
        "finished": finished,
        "failed": sum(b.failed for b in buckets),
        "rejected": sum(b.rejected for b in buckets),
        "aborted": sum(b.aborted for b in buckets),
        "ttft_s": _percentiles(value for b in buckets for value in b.ttft_s),
        "tpot_s": _percentiles(value for b in buckets for value in b.tpot_s),
        "attainment": met,
    }


def _percentiles(values: Iterable[float]) -> dict[str, float] | None:
    found = np.fromiter(values, float)
    if not found.size:
        return None
    p50, p90, p99 = np.percentile(found, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}
