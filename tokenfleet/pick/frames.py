"""The parts of an HTTP/2 connection (RFC 9113): the numbers of its frames, and a stream's bytes."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tokenfleet.pick.hpack import literal

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
INITIAL_WINDOW, MAX_FRAME = 0x4, 0x5  # settings
MOST_WINDOW = (1 << 31) - 1
WINDOW = 16 << 20  # of a connection and of a stream, for what comes
FRAME_BYTES = 1 << 18
MOST_MESSAGE = 8 << 20
MOST_HEADER_BLOCK = 1 << 16
MOST_STREAMS = 1 << 20
NO_ERROR, PROTOCOL_ERROR, FLOW_ERROR, STREAM_CLOSED, FRAME_ERROR, COMPRESSION_ERROR = 0, 1, 3, 5, 6, 9
UNIMPLEMENTED, INVALID_ARGUMENT = 12, 3  # of gRPC
HEAD = struct.Struct(">HBBBI")  # length in two parts, type, flags, stream
PREFIX = struct.Struct(">?I")  # of a message: whether it is compressed, and its length
OWN_SETTINGS = struct.pack(">HIHIHI", 3, MOST_STREAMS, INITIAL_WINDOW, WINDOW, MAX_FRAME, FRAME_BYTES)
OPENING = b"\x88" + literal("content-type", "application/grpc")


class Handler(Protocol):
    """One call: it gets messages until it is closed."""

    def receive(self, data: bytes) -> None:
        """A message. Raises ValueError for one that cannot be read."""

    def closed(self) -> None:
        """The client has ended or dropped the call."""


Send = Callable[[bytes], None]
Handle = Callable[[str, Send], Handler | None]  # of a path; None where nothing is served there


class Broken(Exception):
    """The peer has broken the protocol; the connection ends with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"HTTP/2 error {code}")
        self.code = code


class Stream:
    """A call's bytes: those that came, and those that wait for the peer's window."""

    __slots__ = ("buffer", "handler", "has_begun", "is_ended", "taken", "waiting", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.handler: Handler | None = None
        self.buffer, self.taken = bytearray(), 0
        self.waiting: deque[bytes] = deque()
        self.has_begun = self.is_ended = False


def close(stream: Stream) -> None:
    """Tell a stream's handler that it is over."""
    handler, stream.handler = stream.handler, None
    if handler is not None:
        handler.closed()


def unpadded(payload: bytes, flags: int) -> bytes:
    """A frame's payload. Raises Broken for padding longer than itself."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Broken(PROTOCOL_ERROR)
    return payload[1 : len(payload) - payload[0]]
