"""Bounds of an HTTP connection: how many there are, how a request has to arrive, and how one ends.

Uvicorn by itself takes headers of any length at any pace. It keeps a connection that never sends anything. It
gives a client that has stopped reading half a minute to answer TLS' goodbye.

A body is read on where its request is answered already: a connection that is closed before it has come is
reset, and the answer lost. It has ARRIVAL_S for that, at any pace: a body may be endless.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

CONNECTIONS = 1 << 14  # of a server, open at once
HEAD_BYTES = 64 << 10  # of a request line and headers that come in pieces
ARRIVAL_S = 30.0  # a request has so long to arrive,
LEAST_BYTES_PER_S = 1024.0  # and as much longer as it has come at this pace
GOODBYE_S = 2.0  # that a TLS client has to close its side when the server stops
REFUSALS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class BoundedHttp(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # whichever parser is installed
    """Uvicorn's own protocol within the bounds."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._awaited: asyncio.TimerHandle | None = None
        self._since_s, self._bytes = 0.0, 0  # of the request that is arriving

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            self._refuse(503)
        else:
            self._await()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        was_whole = before is None or not before.more_body
        super().data_received(data)
        is_head = self.cycle is before and was_whole
        is_over = self.transport.is_closing() or self not in self.connections  # or it is a web socket now
        if is_over or (not is_head and not self.cycle.more_body):
            self._arrived()
            if not is_over and self.cycle is before and before.response_complete:  # it was answered first
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        else:
            self._await()
            self._bytes += len(data)
            if is_head and self._bytes > HEAD_BYTES:
                self._refuse(431)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self.cycle.more_body = False  # which uvicorn leaves where the answer came first

    def connection_lost(self, error: Exception | None) -> None:
        self._arrived()
        super().connection_lost(error)

    def shutdown(self) -> None:
        super().shutdown()
        if self.scheme == "https":
            self.loop.call_later(GOODBYE_S, self.transport.abort)

    def _await(self) -> None:
        """A request, or its rest, is to come; the time for it runs from its first byte, or from now."""
        if self._awaited is None:
            self._since_s, self._bytes = self.loop.time(), 0
            self._awaited = self.loop.call_later(ARRIVAL_S, self._look)

    def _arrived(self) -> None:
        if self._awaited is not None:
            self._awaited.cancel()
            self._awaited = None

    def _look(self) -> None:
        """Refuse a request that is late: not while the server itself reads no more, or still answers."""
        is_late = self.cycle is not None and self.cycle.more_body and self.cycle.response_complete
        paced_s = 0.0 if is_late else self._bytes / LEAST_BYTES_PER_S
        left_s = self._since_s + ARRIVAL_S + paced_s - self.loop.time()
        if self.flow.read_paused or (self._is_answering and not self.cycle.more_body):
            left_s = ARRIVAL_S
        if left_s > 0:
            self._awaited = self.loop.call_later(left_s, self._look)
        else:
            self._refuse(408)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int) -> None:
        """Close, with an answer unless another one has begun, or was given before its request was whole."""
        self._arrived()
        cycle = self.cycle
        if cycle is None or not cycle.response_started or not (cycle.more_body or self._is_answering):
            lines = [f"HTTP/1.1 {status} {REFUSALS[status]}", "connection: close", "content-length: 0"]
            self.transport.write("\r\n".join([*lines, "", ""]).encode())
        self.transport.close()
