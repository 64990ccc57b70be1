"""A gateway's connection to one worker, over ZMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq.asyncio
from zmq.constants import ContextOption, Flag, SocketOption, SocketType
from zmq.constants import Event as SocketEvent
from zmq.error import Again

from controlplane.errors import BadInput
from dataplane.live.engine_api import link as links
from dataplane.live.engine_api import wire
from dataplane.live.engine_api.cache_events import CacheChange
from dataplane.live.engine_api.messages import Adapter, Codec, EngineRequest
from dataplane.live.engine_api.processes import cancel_all
from dataplane.live.engine_api.wire import knock

OUTGOING_MESSAGES = 1024
UNREAD_EVENTS = 1024
GOODBYE_MS = 200


def link_context() -> zmq.asyncio.Context:
    """A context for the links of a gateway: ZMQ's own bound of 1,023 sockets would end at 341 workers."""
    context = zmq.asyncio.Context()
    context.set(ContextOption.MAX_SOCKETS, context.get(ContextOption.SOCKET_LIMIT))
    return context


class WorkerLink:
    """An `EngineLink` to a `Worker`; make one with `connect`."""

    def __init__(
        self,
        worker: links.WorkerInfo,
        key: str,
        context: zmq.asyncio.Context,
        codec: Codec,
        patience: wire.LinkTimings = wire.PATIENCE,
    ) -> None:
        self.patience = patience
        self._endpoint = worker.endpoint
        self._socket: Any = context.socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.SNDHWM, OUTGOING_MESSAGES)
        self._socket.setsockopt(SocketOption.RCVHWM, UNREAD_EVENTS)
        self._monitor: Any = self._socket.get_monitor_socket(SocketEvent.DISCONNECTED)
        knock(self._socket, key, worker.link_key)
        self._socket.connect(worker.endpoint)
        self._codec = codec
        self._info: links.WorkerInfo | None = None
        self._lost: links.Lost | None = None
        # A gateway that does not read stops here, then its socket fills, then the worker drops it.
        self._events: asyncio.Queue[links.Event] = asyncio.Queue(UNREAD_EVENTS)
        self._unheard = 0  # looks in a row that heard nothing; while this process stands still, none is made
        self._is_suspect = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        worker: links.WorkerInfo,
        key: str,
        context: zmq.asyncio.Context,
        codec: Codec,
        timeout_s: float = 30.0,
        patience: wire.LinkTimings = wire.PATIENCE,
    ) -> WorkerLink:
        """Greet a worker, as its launch has it, and wait for its welcome; `key` is the gateways'.

        Raises BadInput if it refuses or does not answer, as it does where a key is wrong.
        """
        link = cls(worker, key, context, codec, patience)
        try:
            link._info = await asyncio.wait_for(link._greet(), timeout_s)
        except BaseException as error:
            await link.close()
            if isinstance(error, TimeoutError):
                raise BadInput(f"worker at {worker.endpoint}: no answer within {timeout_s:g} s") from None
            raise
        loop = asyncio.get_running_loop()
        link._tasks = [loop.create_task(t) for t in (link._read(), link._notice_end(), link._keep_alive())]
        return link

    @property
    def info(self) -> links.WorkerInfo:
        assert self._info is not None
        return self._info

    async def add(self, request: EngineRequest) -> None:
        if self._lost is None:
            frames = self._codec.encode(request)
            segment = wire.pack(request.request_id)
            await self._socket.send_multipart([wire.ADD, segment, *frames], copy=False)

    async def abort(self, segments: Sequence[str]) -> None:
        if self._lost is None:
            await self._socket.send_multipart([wire.ABORT, wire.pack(list(segments))])

    async def load_adapter(self, adapter: Adapter) -> None:
        if self._lost is None:
            await self._socket.send_multipart([wire.ADAPTER, wire.pack(adapter)])

    async def ask_cached(self) -> None:
        if self._lost is None:
            await self._socket.send_multipart([wire.CACHED])

    async def receive(self) -> links.Event:
        if self._lost is not None and self._events.empty():
            return self._lost
        return await self._events.get()

    async def close(self) -> None:
        if self._lost is None:
            self._lost = links.Lost("closed")
            with suppress(Again):  # where the worker was never reached, or did not let this gateway in
                await self._socket.send_multipart([wire.BYE], flags=Flag.DONTWAIT)
        await cancel_all(self._tasks)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=GOODBYE_MS)

    async def _greet(self) -> links.WorkerInfo:
        await self._socket.send_multipart(wire.hello(self._codec.version))
        while True:
            kind, *frames = await self._socket.recv_multipart()
            if kind == wire.LOST:
                raise BadInput(f"worker at {self._endpoint}: {wire.unpack(frames[0])}")
            if kind == wire.WELCOME:
                return wire.noun_from(frames[0], links.WorkerInfo)

    async def _read(self) -> None:
        while True:
            kind, *frames = await self._socket.recv_multipart(copy=False)
            if self._lost is not None:
                return  # it was given up, and its requests are elsewhere
            self._unheard = 0
            if self._is_suspect:
                self._is_suspect = False
                await self._events.put(links.Silence(is_over=True))
            event = self._event(kind.bytes, frames)
            if event is not None:
                await self._events.put(event)
            if isinstance(event, links.Lost):
                self._lost = event
                return

    def _event(self, kind: bytes, frames: Sequence[Any]) -> links.Event | None:
        if kind == wire.OUTPUTS:
            return links.Outputs(self._codec.outputs(frames))
        if kind == wire.LOAD:
            return wire.noun_from(frames[0].bytes, links.Telemetry)
        if kind == wire.CACHED:
            return wire.noun_from(frames[0].bytes, CacheChange)
        if kind == wire.ADAPTERS:
            return wire.noun_from(frames[0].bytes, links.Adapters)
        if kind == wire.REFUSED:
            segment, reason = wire.unpack(frames[0].bytes)
            return links.SegmentRefused(segment, reason)
        if kind == wire.LOST:
            return links.Lost(wire.unpack(frames[0].bytes))
        return None

    async def _notice_end(self) -> None:
        """Report a broken connection as a lost worker; ZMQ itself would reconnect without notice."""
        await self._monitor.recv_multipart()
        await self._lose("its process, or the connection to it, is gone")

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self.patience.alive_every_s)
            with suppress(Again):  # its queue is full: whether it is heard is looked at all the same
                await self._socket.send_multipart([wire.ALIVE], flags=Flag.DONTWAIT)
            self._unheard += 1
            silent_s = self._unheard * self.patience.alive_every_s
            if silent_s > self.patience.silence_s:
                await self._lose(f"silent for {silent_s:.0f} s")
                return
            if silent_s > self.patience.suspect_s and not self._is_suspect:
                self._is_suspect = True
                await self._events.put(links.Silence(is_over=False))

    async def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = links.Lost(reason)
            await self._events.put(self._lost)
