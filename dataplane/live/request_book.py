"""The requests a gateway tracks, by id and by the segment each of them listens to."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.types import RequestId, WorkerId
from dataplane.live.tracked import Tracked


class RequestBook:
    """Every request from arrival to end. A request listens to at most one segment at a time."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Tracked] = {}
        self._by_segment: dict[str, Tracked] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(tuple(self._by_id.values()))

    def get(self, request: RequestId) -> Tracked | None:
        return self._by_id.get(request)

    def listening_to(self, segment: str) -> Tracked | None:
        """The request whose present segment this is; None for a segment that was left behind."""
        return self._by_segment.get(segment)

    def on_worker(self, worker: WorkerId) -> list[Tracked]:
        return [tracked for tracked in self._by_id.values() if tracked.worker == worker]

    def find(self, name: str) -> Tracked | None:
        """A request by its id, or by the `x-request-id` it came with."""
        exact = self._by_id.get(RequestId(name))
        return exact or next((t for t in self._by_id.values() if t.ticket.id == name), None)

    def add(self, tracked: Tracked) -> None:
        self._by_id[tracked.id] = tracked

    def listen(self, tracked: Tracked, worker: WorkerId) -> str:
        """Begin a new segment of the request on a worker and return its id."""
        self.ignore(tracked)
        segment = tracked.next_segment()
        tracked.worker = worker
        self._by_segment[segment] = tracked
        return segment

    def ignore(self, tracked: Tracked) -> None:
        """Listen to no segment of the request; what its old one still says is dropped."""
        self._by_segment.pop(tracked.segment, None)
        tracked.segment, tracked.worker = "", None

    def remove(self, tracked: Tracked) -> None:
        """The request is over."""
        self._by_segment.pop(tracked.segment, None)
        self._by_id.pop(tracked.id, None)
