"""A worker's end of a link, which says what a test makes it say."""

import asyncio
from dataclasses import asdict, replace

from plain_codec import PlainCodec

from controlplane.types import WorkerId
from dataplane.live.engine_api import wire
from dataplane.live.engine_api.link import Telemetry
from dataplane.live.engine_api.messages import SegmentOutput, StepOutputs
from dataplane.live.engine_api.wire import Door

FAR = WorkerId("far")
TELEMETRY = Telemetry(FAR, 0, 0, 0, 0, 0, 0, 0.0, 0, 4096, 0)


class FarWorker:
    """A worker's end of a link, which says what a test makes it say."""

    def __init__(self, gateways, info):
        self._door = Door("127.0.0.1", gateways)
        self._socket = self._door.socket
        self._socket.router_mandatory = 0  # it speaks on to gateways that have given it up
        self.info = replace(info, worker=FAR, endpoint=self._door.endpoint, link_key=self._door.key)
        self.segments = []
        self.has_segment = asyncio.Event()
        self._gateway = b""
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self):
        while True:
            self._gateway, kind, *frames = await self._socket.recv_multipart()
            if kind == wire.HELLO:
                await self.say(wire.WELCOME, wire.pack(asdict(self.info)))
            elif kind == wire.ADD:
                self.segments.append(wire.unpack(frames[0]))
                self.has_segment.set()

    async def say(self, *frames):
        await self._socket.send_multipart([self._gateway, *frames])

    async def tokens(self, *tokens):
        batch = StepOutputs(outputs=[SegmentOutput(self.segments[0], list(tokens))])
        await self.say(wire.OUTPUTS, *PlainCodec().encode(batch))

    async def load(self):
        await self.say(wire.LOAD, wire.pack(asdict(TELEMETRY)))

    def close(self):
        self._reader.cancel()
        self._door.close(linger_ms=0)
