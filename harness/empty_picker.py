"""An external processor that passes everything on and decides nothing: the least that a picker can cost.

    python -m harness.empty_picker PORT

It speaks HTTP/2 and Envoy's messages as `tokenfleet pick` does, in full duplex, in the same loop. Envoy
chooses the servers, round robin.
"""

from __future__ import annotations

import asyncio
import sys

from tokenfleet.pick import messages as wire
from tokenfleet.pick.frames import Handler, Send
from tokenfleet.pick.http2 import Connection


class PassOn:
    """One request: each message is answered at once."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def receive(self, data: bytes) -> None:
        message = wire.parsed("ProcessingRequest", data)
        if message.observability_mode:  # a copy: Envoy reads no reply
            return
        for stage in ("response_body", "request_body"):
            if message.HasField(stage):
                body = getattr(message, stage)
                for piece in wire.body_pieces(stage, body.body, body.end_of_stream):
                    self._send(piece)
                return
        for stage in ("request_headers", "response_headers", "response_trailers", "request_trailers"):
            if message.HasField(stage):
                self._send(wire.go_on(stage))

    def closed(self) -> None: ...


class Healthy:
    """A health check: always serving."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def receive(self, data: bytes) -> None:
        self._send(wire.wire().HealthCheckResponse(status=1).SerializeToString())

    def closed(self) -> None: ...


def handler(path: str, send: Send) -> Handler:
    """The handler of a call."""
    return Healthy(send) if path == wire.CHECK else PassOn(send)


async def serve(port: int) -> None:
    """Serve until stopped."""
    server = await asyncio.get_running_loop().create_server(lambda: Connection(handler), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
