"""The gateway's connections and tables: attached workers and their adapters, requests, outputs not yet read.

A worker is attached in one of vLLM's engine slots. Requests are found by id and by the one segment that each
listens to. Outputs on their way to vLLM's front end keep their order and are bounded by making senders wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from controlplane.types import RequestId, Role, WorkerId
from dataplane.live.engine_api.link import Adapters, EngineLink, Telemetry
from dataplane.live.engine_api.messages import Adapter, EngineRequest, Finish, SegmentOutput, StepOutputs
from dataplane.live.ledger.request import Tracked

MOST_UNREAD = 256  # batches that the front end may lag behind before workers are made to wait


@dataclass(slots=True, eq=False)
class Attached:
    """A worker as this gateway is connected to it. `slot` is its index in vLLM's metrics."""

    link: EngineLink
    slot: int
    kind: str = ""
    role: Role = "any"
    telemetry: Telemetry | None = None
    reader: asyncio.Task[None] | None = None
    is_silent: bool = False

    @property
    def worker(self) -> WorkerId:
        return self.link.info.worker


class Attachments(dict[WorkerId, Attached]):
    """Workers by name; at most `slots` at any one time."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._slots = range(slots)
        self.carries_penalties = True  # as all of a fleet's

    def add(self, link: EngineLink, kind: str, role: Role) -> Attached:
        """Give a worker the lowest free slot. Raises StopIteration when every slot is taken."""
        taken = {at.slot for at in self.values()}
        at = Attached(link, next(slot for slot in self._slots if slot not in taken), kind, role)
        self[at.worker] = at
        self.carries_penalties = link.info.carries_penalties
        return at

    def link(self, worker: WorkerId) -> EngineLink | None:
        at = self.get(worker)
        return None if at is None else at.link


class RequestBook:
    """Every request from arrival to end, in order of arrival. One listens to one segment at most."""

    def __init__(self) -> None:
        self._by_id: dict[RequestId, Tracked] = {}
        self._by_segment: dict[str, Tracked] = {}
        self._by_worker: defaultdict[WorkerId, dict[RequestId, Tracked]] = defaultdict(dict)

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
        """The worker's requests, in the order in which they came to it."""
        return list(self._by_worker[worker].values()) if worker in self._by_worker else []

    def find(self, name: str) -> Tracked | None:
        """A request by its id, or by the `x-request-id` it came with."""
        exact = self._by_id.get(RequestId(name))
        return exact or next((t for t in self._by_id.values() if t.ticket.id == name), None)

    def add(self, tracked: Tracked) -> None:
        self._by_id[tracked.id] = tracked
        tracked.ticket.requests.append(tracked.id)

    def listen(self, tracked: Tracked, worker: WorkerId) -> str:
        """Begin a new segment of the request on a worker and return its id."""
        self.ignore(tracked)
        segment = tracked.next_segment()
        tracked.worker = worker
        self._by_segment[segment] = tracked
        self._by_worker[worker][tracked.id] = tracked
        return segment

    def ignore(self, tracked: Tracked) -> None:
        """Listen to no segment of the request; what its old one still says is dropped."""
        self._leave_place(tracked)
        tracked.segment, tracked.worker, tracked.ties = "", None, None

    def remove(self, tracked: Tracked) -> None:
        """The request is over."""
        self._leave_place(tracked)
        if self._by_id.pop(tracked.id, None) is not None:
            tracked.ticket.requests.remove(tracked.id)

    def _leave_place(self, tracked: Tracked) -> None:
        self._by_segment.pop(tracked.segment, None)
        if tracked.worker is not None and tracked.worker in self._by_worker:
            here = self._by_worker[tracked.worker]
            here.pop(tracked.id, None)
            if not here:
                del self._by_worker[tracked.worker]


class Unread:
    """A queue of batches with one reader. `tell` never waits, so that batches keep their order.

    A bounded asyncio.Queue would not do: of two senders waiting for a place, the later may be woken
    first, and a request that has just moved has two senders. With a `sink`, nothing is queued: it takes each
    batch at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.sink: Callable[[StepOutputs], None] | None = None
        self._batches: deque[StepOutputs] = deque()
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._room.set()

    def __len__(self) -> int:
        return len(self._batches)

    def tell(self, batch: StepOutputs) -> None:
        """Append a batch."""
        if self.sink is not None:
            self.sink(batch)
            return
        self._batches.append(batch)
        self._news.set()
        if len(self._batches) >= self._most:
            self._room.clear()

    def tell_end(self, name: str, reason: Finish) -> None:
        """Append the end of a request."""
        output = SegmentOutput(name, [], finish_reason=reason)
        self.tell(StepOutputs(outputs=[output], timestamp=time.monotonic()))

    async def until_room(self) -> None:
        """Wait while the reader lags behind; a sender calls it before it takes its next message."""
        await self._room.wait()

    async def next(self) -> StepOutputs:
        """Return the oldest batch, waiting for one."""
        while not self._batches:
            self._news.clear()
            await self._news.wait()
        batch = self._batches.popleft()
        if len(self._batches) < self._most:
            self._room.set()
        return batch


class FrontEndClient:
    """The fleet, wherever it is, as a front end reads and calls it. It lives in the loop that makes it.

    vLLM's front end gets it as an `vllm_surface.EngineClient`. `slots` bounds the workers at any one time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.unread = Unread(MOST_UNREAD)

    async def add_adapter(self, adapter: Adapter) -> None:
        """Take a LoRA adapter in. Raises RuntimeError with an engine's reason where it cannot be loaded."""
        raise NotImplementedError

    async def add_request_async(self, request: EngineRequest) -> None:
        """Take a new request."""
        raise NotImplementedError

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """End requests: the client left, or the front end found a stop string."""
        raise NotImplementedError

    async def get_output_async(self) -> StepOutputs:
        """Return the next batch of outputs, in the order their tokens were tracked."""
        return await self.unread.next()

    def shutdown(self, timeout: float | None = None) -> None:
        """Called from a thread: let requests finish for `timeout` seconds, then end them in an error."""
        in_the_loop = threading.get_ident() == self._thread  # vLLM's __del__ may come here, and cannot wait
        if self._loop.is_running() and not in_the_loop and not self._is_closed:
            asyncio.run_coroutine_threadsafe(self._close(timeout or 0.0), self._loop).result()

    @property
    def _is_closed(self) -> bool:
        raise NotImplementedError

    async def _close(self, timeout_s: float) -> None:
        raise NotImplementedError


class AdapterBook:
    """The LoRA adapters that workers hold, by their ids, and the loads that are asked for.

    A request carries the path of its adapter, and a worker that does not hold it loads it before the request.
    So an adapter is loaded once when it is named to the fleet: that shows whether it can be loaded. Other
    workers load it as requests come to them. Placement prefers workers that hold it. An engine forgets the
    least used adapters beyond its `--max-cpu-loras`.
    """

    def __init__(self) -> None:
        self._held: dict[WorkerId, frozenset[int]] = {}
        self._loads: defaultdict[tuple[WorkerId, int], list[asyncio.Future[str]]] = defaultdict(list)

    def of(self, worker: WorkerId) -> frozenset[int]:
        """The ids of the adapters that a worker holds."""
        return self._held.get(worker, frozenset())

    def holders(self, adapter: int) -> list[WorkerId]:
        """The workers that hold an adapter."""
        return [worker for worker, held in self._held.items() if adapter in held]

    def take(self, worker: WorkerId, told: Adapters) -> None:
        """Note what a worker says."""
        self._held[worker] = frozenset(told.held)
        self._settle(worker, told.asked, told.error)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._held.pop(worker, None)
        for name, adapter in list(self._loads):
            if name == worker:
                self._settle(worker, adapter, f"{worker} is gone")

    async def load(self, links: list[EngineLink], adapter: Adapter) -> None:
        """Load an adapter on one worker, and again where it is held and to be replaced.

        Raises RuntimeError with the engine's reason; vLLM's server makes an error of it.
        """
        if not links:
            raise RuntimeError(f"adapter {adapter.lora_name}: no worker is there to load it")
        named = adapter.lora_int_id
        chosen = [link for link in links if named in self.of(link.info.worker)]
        if not chosen or not adapter.load_inplace:
            chosen = [min(links, key=lambda link: len(self.of(link.info.worker)))]
        loads = []
        for link in chosen:
            load: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._loads[link.info.worker, named].append(load)
            loads.append(load)
            await link.load_adapter(adapter)
        errors = [error for error in await asyncio.gather(*loads) if error]
        if errors:
            raise RuntimeError(errors[0])

    def _settle(self, worker: WorkerId, adapter: int, error: str) -> None:
        for load in self._loads.pop((worker, adapter), ()):
            if not load.done():
                load.set_result(error)
