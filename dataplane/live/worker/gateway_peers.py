"""The gateways connected to a worker: the segments of each, and the outputs queued for it.

A gateway's queue is bounded. A full queue means that the gateway is too slow or dead, and an engine cannot
wait for one of its clients. So the gateway is disconnected: it gets `lost`, and its segments are aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from zmq.constants import Flag
from zmq.error import Again, ZMQError

from dataplane.live.engine_api import wire
from dataplane.live.engine_api.messages import Codec, StepOutputs

log = logging.getLogger(__name__)
Frames = Sequence[Any]
RETRY_S = 0.005


class GatewayPeer:
    """One connected gateway."""

    def __init__(self, name: bytes, socket: Any) -> None:
        self.name = name
        self.unheard = 0  # beats in a row of the worker that heard nothing of it
        self.segments: set[str] = set()
        self.overrun = False
        self._queue: asyncio.Queue[Frames] = asyncio.Queue(wire.QUEUED_BATCHES)
        self.sender = asyncio.get_running_loop().create_task(self._send(socket))

    def offer(self, frames: Frames) -> None:
        """Queue a message; a full queue marks the peer as overrun."""
        try:
            self._queue.put_nowait(frames)
        except asyncio.QueueFull:
            self.overrun = True

    async def _send(self, socket: Any) -> None:
        while True:
            frames = await self._queue.get()
            is_sent = False
            while not is_sent:  # never inside the socket, where one slow peer would stop them all
                try:
                    await socket.send_multipart([self.name, *frames], flags=Flag.DONTWAIT, copy=False)
                    is_sent = True
                except Again:
                    await asyncio.sleep(RETRY_S)
                except ZMQError as error:
                    log.info("gateway %s is gone: %s", self.name.hex(), error)
                    self.overrun = True
                    return


class GatewayPeers:
    """All connected gateways of one worker."""

    def __init__(self, socket: Any, abort: Callable[[list[str]], Awaitable[None]], codec: Codec) -> None:
        self._socket = socket
        self._abort = abort
        self._peers: dict[bytes, GatewayPeer] = {}
        self._owner: dict[str, GatewayPeer] = {}
        self._left: list[str] = []
        self._codec = codec

    def __len__(self) -> int:
        """Segments under way."""
        return len(self._owner)

    @property
    def has_gateways(self) -> bool:
        return bool(self._peers)

    def take_left(self) -> list[str]:
        """The segments that were under way when their gateways were lost, since they were last asked for."""
        left, self._left = self._left, []
        return left

    def get(self, name: bytes) -> GatewayPeer | None:
        return self._peers.get(name)

    async def welcome(self, name: bytes, info: bytes) -> None:
        """Connect a gateway."""
        if name not in self._peers:
            self._peers[name] = GatewayPeer(name, self._socket)
        self._peers[name].offer([wire.WELCOME, info])

    def admit(self, peer: GatewayPeer, segment: str) -> None:
        """Register a segment as this gateway's."""
        self._owner[segment] = peer
        peer.segments.add(segment)

    async def abort(self, peer: GatewayPeer, segments: Iterable[str]) -> None:
        """End the segments that belong to this gateway; those of others are left alone."""
        mine = [s for s in segments if s in peer.segments]
        for segment in mine:
            self._forget(peer, segment)
        if mine:
            await self._abort(mine)

    async def deliver(self, batch: StepOutputs) -> None:
        """Queue a step's outputs for the gateways of their segments, and its statistics for all."""
        outputs: dict[GatewayPeer, list[Any]] = {}
        for output in batch.outputs:
            peer = self._owner.get(output.request_id)
            if peer is None:
                continue  # aborted, or its gateway left
            outputs.setdefault(peer, []).append(output)
            if output.finish_reason is not None:
                self._forget(peer, output.request_id)
        for peer in tuple(self._peers.values()):
            batch.outputs = outputs.get(peer, [])
            if batch.outputs or batch.scheduler_stats is not None:
                peer.offer([wire.OUTPUTS, *self._codec.encode(batch)])
            if peer.overrun:
                await self.drop(peer, "it did not take its outputs in time")

    def offer_all(self, frames: Frames) -> None:
        """Queue a message for every gateway."""
        for peer in self._peers.values():
            peer.offer(frames)

    def silent(self, beat_s: float) -> list[GatewayPeer]:
        """Gateways not heard of for too long, at a beat. While this process stands still, none is due."""
        for gateway in self._peers.values():
            gateway.unheard += 1
        return [g for g in self._peers.values() if g.unheard * beat_s > wire.PATIENCE.silence_s]

    async def drop(self, peer: GatewayPeer, reason: str) -> None:
        """Disconnect a gateway and end its segments; an empty reason means that it closed the link."""
        self._peers.pop(peer.name, None)
        peer.sender.cancel()
        if reason:
            self._left += peer.segments
        await self.abort(peer, tuple(peer.segments))
        if reason:
            try:
                await asyncio.wait_for(
                    self._socket.send_multipart([peer.name, wire.LOST, wire.pack(reason)]), 0.5
                )
            except (ZMQError, TimeoutError):
                log.info("gateway %s could not be notified: %s", peer.name.hex(), reason)

    async def dismiss_all(self, reason: str) -> None:
        """Disconnect every gateway."""
        for peer in tuple(self._peers.values()):
            await self.drop(peer, reason)

    def _forget(self, peer: GatewayPeer, segment: str) -> None:
        peer.segments.discard(segment)
        self._owner.pop(segment, None)
