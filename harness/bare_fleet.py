"""A fleet without a gateway, for measurements and tests: FleetCore's duties in a move, and token streams.

There is no placement, no HTTP and no replay: a request is started on the worker that the caller names.
`Stream.tokens` is what a client would see, with the time of each token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from controlplane.placement.queue import QueueSettings
from controlplane.types import RequestId, WorkerId
from controlplane.worker_type import WorkerGroup, WorkerType
from dataplane.live.control.operations import FleetFacts
from dataplane.live.control.settings import FleetSettings
from dataplane.live.engine_api.kv_messages import LOADER_PREFIX, Transfer
from dataplane.live.engine_api.link import EngineLink, Lost, Outputs, SegmentRefused, Telemetry
from dataplane.live.engine_api.messages import EngineRequest, Finish, Sampling
from dataplane.live.engine_api.segment import plain_request, segment_request
from dataplane.live.gateway.settings import GatewaySettings
from dataplane.live.migration.coordinator import Migrations
from dataplane.live.migration.move import Mode, MoveBudget, MoveRecord, Running
from dataplane.live.pool.fleet_types import FleetTypes


def bare_facts() -> FleetFacts:
    """The facts of an emulated fleet with a fixed number of workers and no address."""
    types = FleetTypes([WorkerGroup(WorkerType(None), 1)])
    gateway = GatewaySettings("any", "", 0)
    return FleetFacts(FleetSettings(gateway, "emulated", types, 1, "", 0, None, 0.99, QueueSettings()), "")


@dataclass(eq=False)
class Stream:
    """One request and what its client has received."""

    request: EngineRequest
    worker: WorkerId
    segment: str
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Any = None
    stays: int = 1
    cut: asyncio.Future[bool] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    cached_tokens: list[int] = field(default_factory=list)  # by segment,
    loaded_tokens: list[int] = field(default_factory=list)  # and those of them that its connector loaded

    @property
    def id(self) -> RequestId:
        return RequestId(self.request.request_id)

    async def until(self, tokens: int) -> None:
        """Return once the client has `tokens` tokens, or the stream has ended."""
        while len(self.tokens) < tokens and self.finish is None:
            self.news.clear()
            await self.news.wait()

    async def ended(self) -> Any:
        """Return the finish reason, once there is one."""
        while self.finish is None:
            self.news.clear()
            await self.news.wait()
        return self.finish


def token_request(
    name: str, prompt: Sequence[int], params: Mapping[str, Any], sampling: Callable[..., Any] = Sampling
) -> EngineRequest:
    """A request for token ids; greedy, and not ended by a token, unless `params` say so.

    `sampling`: vLLM's own class for what `Sampling` does not have.
    """
    settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False} | dict(params)
    return plain_request(name, list(prompt), sampling(**settings), time.time())


class BareFleet:
    """Streams over links, with a `Migrations` of its own."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        budget: MoveBudget | None = None,
        sampling: Callable[..., Any] = Sampling,
    ) -> None:
        self.sampling = sampling
        self.links = {link.info.worker: link for link in links}
        self.telemetry: dict[WorkerId, Telemetry] = {}
        self.lost: dict[WorkerId, str] = {}
        self.refused: dict[str, str] = {}  # by segment
        self.migrations = Migrations(self, budget or MoveBudget())
        self._streams: dict[RequestId, Stream] = {}
        self._listening: dict[str, Stream] = {}
        self._ids = count(1)
        self._readers = [asyncio.ensure_future(self._read(link)) for link in links]

    async def close(self) -> None:
        """Stop listening; links and workers are the caller's."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def start(self, worker: WorkerId, prompt: Sequence[int], params: Mapping[str, Any]) -> Stream:
        """Begin a request on a worker."""
        name = f"request-{id(self):x}-{next(self._ids)}"
        request = token_request(name, prompt, params, self.sampling)
        stream = Stream(request, worker, name)
        self._streams[stream.id] = self._listening[name] = stream
        await self.links[worker].add(segment_request(request, [], name, Transfer()))
        return stream

    async def abort(self, stream: Stream) -> None:
        """End a request as if its client had left."""
        self._end(stream, Finish.ABORT)
        await self.links[stream.worker].abort([stream.segment])

    async def move(self, stream: Stream, target: WorkerId, mode: Mode = "live") -> MoveRecord:
        """Move a request to another worker."""
        return await self.migrations.migrate(stream.id, target, mode)

    # What a move needs (dataplane.live.migration.coordinator.Fleet)

    def running(self, request: RequestId) -> Running | None:
        stream = self._streams.get(request)
        if stream is None:
            return None
        return Running(stream.request, stream.segment, stream.worker, stream.tokens)

    def link(self, worker: WorkerId) -> EngineLink | None:
        return None if worker in self.lost else self.links.get(worker)

    async def cut_over(
        self, request: RequestId, target: WorkerId, transfer: Transfer
    ) -> asyncio.Future[bool]:
        stream = self._streams[request]
        old, source = stream.segment, stream.worker
        del self._listening[old]
        stream.segment, stream.worker = f"{stream.id}#{stream.stays}", target
        stream.stays += 1
        stream.cut = arrival = asyncio.get_running_loop().create_future()
        self._listening[stream.segment] = stream
        continuation = segment_request(stream.request, stream.tokens, stream.segment, transfer)
        await self.links[target].add(continuation)
        await self.links[source].abort([old])
        return arrival

    async def _read(self, link: EngineLink) -> None:
        while True:
            event = await link.receive()
            if isinstance(event, Outputs):
                for output in event.batch.outputs:
                    self._take(output)
            elif isinstance(event, SegmentRefused):
                self.refused[event.segment] = event.reason
            elif isinstance(event, Telemetry):
                self.telemetry[event.worker] = event
            elif isinstance(event, Lost):
                self.lost[link.info.worker] = event.reason
                for stream in list(self._streams.values()):
                    if stream.worker == link.info.worker:
                        self._end(stream, Finish.ERROR)
                return

    def _take(self, output: Any) -> None:
        if output.request_id.startswith(LOADER_PREFIX):
            self.migrations.engines.claim(output)
            return
        stream = self._listening.get(output.request_id)
        if stream is None:
            return
        now_s = time.monotonic()
        stream.tokens += output.new_token_ids
        stream.times += [now_s] * len(output.new_token_ids)
        if output.new_logprobs is not None:
            stream.logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
        if output.prefill_stats is not None:
            stream.cached_tokens.append(output.prefill_stats.num_cached_tokens)
            stream.loaded_tokens.append(output.prefill_stats.num_external_cached_tokens)
        if output.new_token_ids and stream.cut is not None:
            self._settle(stream, True)
        if output.finish_reason is not None:
            self._end(stream, output.finish_reason)
        stream.news.set()

    def _end(self, stream: Stream, reason: Any) -> None:
        self._streams.pop(stream.id, None)
        self._listening.pop(stream.segment, None)
        stream.finish = reason
        self._settle(stream, False)
        stream.news.set()

    @staticmethod
    def _settle(stream: Stream, arrived: bool) -> None:
        if stream.cut is not None and not stream.cut.done():
            stream.cut.set_result(arrived)
        stream.cut = None
