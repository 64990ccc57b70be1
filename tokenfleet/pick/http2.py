"""gRPC over HTTP/2 (RFC 9113), the server's side: streams of messages, over one connection of a gateway.

grpcio takes 170 to 255 µs for a message in and out; a picker gets one for every piece of every answer. This
takes what a data_received call brings, whole messages of many streams, and writes all replies at once.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

from tokenfleet.pick import frames
from tokenfleet.pick.frames import Broken, Handle, Stream, close, unpadded
from tokenfleet.pick.hpack import BadHeaders, HeaderDecoder, literal


class Connection(asyncio.Protocol):
    """One connection. `handle` gives the handler of a path; `on_open` and `on_lost` keep a list of them."""

    def __init__(
        self,
        handle: Handle,
        on_open: Callable[[Connection], None] = lambda one: None,
        on_lost: Callable[[Connection], None] = lambda one: None,
    ) -> None:
        self._handle, self._on_open, self._on_lost = handle, on_open, on_lost
        self._streams: dict[int, Stream] = {}
        self._headers = HeaderDecoder()
        self._input = b""  # of a frame that has not come whole
        self._out: list[bytes] = []
        self._has_preface = self._is_reading = self._is_flushing = False
        self._window, self._stream_window, self._most_frame = 65_535, 65_535, 16_384
        self._taken = 0
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, header block so far
        self._last = 0
        self._transport: asyncio.Transport | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._frame(frames.SETTINGS, 0, 0, frames.OWN_SETTINGS)
        self._frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", frames.WINDOW - 65_535))
        self._flush()
        self._on_open(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            close(stream)
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        self._is_reading = True
        try:
            data = self._input + data
            self._input = data[self._read(data) :]
        except Broken as error:
            self.end(error.code)
        except BadHeaders:
            self.end(frames.COMPRESSION_ERROR)
        finally:
            self._is_reading = False
            self._flush()

    def end(self, code: int = frames.NO_ERROR) -> None:
        """Say goodbye and close."""
        if self._transport is not None:
            self._frame(frames.GOAWAY, 0, 0, struct.pack(">II", self._last, code))
            self._flush()
            self._transport.close()

    # Frames that come.

    def _read(self, data: bytes) -> int:
        """Take the whole frames; return where they end."""
        at, size = 0, len(data)
        if not self._has_preface:
            if size < len(frames.PREFACE):
                return 0
            if not data.startswith(frames.PREFACE):
                raise Broken(frames.PROTOCOL_ERROR)
            self._has_preface, at = True, len(frames.PREFACE)
        while size - at >= 9:
            high, low, kind, flags, number = frames.HEAD.unpack_from(data, at)
            end = at + 9 + ((high << 8) | low)
            if end - at - 9 > frames.FRAME_BYTES:
                raise Broken(frames.FRAME_ERROR)
            if end > size:
                break
            self._take(kind, flags, number & frames.MOST_WINDOW, data[at + 9 : end])
            at = end
        return at

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block[0]):
            raise Broken(frames.PROTOCOL_ERROR)
        if kind == frames.DATA:
            self._data(number, flags, payload)
        elif kind == frames.HEADERS:
            block = unpadded(payload, flags)
            self._more_headers(number, flags, block[5:] if flags & frames.HAS_PRIORITY else block)
        elif kind == frames.CONTINUATION and self._block is not None:
            self._more_headers(number, flags, payload)
        elif kind == frames.RST_STREAM:
            if (stream := self._streams.pop(number, None)) is not None:
                close(stream)
        elif kind in (frames.SETTINGS, frames.PING):
            self._connection_frame(kind, flags, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._more_window(number, payload)
        elif kind in (frames.PUSH, frames.CONTINUATION):
            raise Broken(frames.PROTOCOL_ERROR)

    def _connection_frame(self, kind: int, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            return
        if kind == frames.SETTINGS:
            self._settings(payload)
        else:
            self._frame(frames.PING, frames.ACK, 0, payload)

    def _more_headers(self, number: int, flags: int, part: bytes) -> None:
        if self._block is None:
            self._block = number, flags, bytearray()
        _, first_flags, block = self._block
        block += part
        if len(block) > frames.MOST_HEADER_BLOCK:
            raise Broken(frames.PROTOCOL_ERROR)
        if flags & frames.END_HEADERS:
            self._block = None
            headers = self._headers.decoded(bytes(block))
            self._request(number, headers.get(":path", ""), bool(first_flags & frames.END_STREAM))

    def _request(self, number: int, path: str, is_ended: bool) -> None:
        stream = self._streams.get(number)
        if stream is None:
            if number % 2 == 0 or number <= self._last:
                raise Broken(frames.PROTOCOL_ERROR)
            self._last = number
            stream = self._streams[number] = Stream(self._stream_window)
            stream.handler = self._handle(path, lambda data: self.send(number, data))
            if stream.handler is None:
                self._finish(number, frames.UNIMPLEMENTED)
                return
        if is_ended:
            self._half_closed(number)

    def _data(self, number: int, flags: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken >= frames.WINDOW // 2:
            self._frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken))
            self._taken = 0
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last:
                raise Broken(frames.PROTOCOL_ERROR)
            return
        stream.taken += len(payload)
        if stream.taken >= frames.WINDOW // 2:
            self._frame(frames.WINDOW_UPDATE, 0, number, struct.pack(">I", stream.taken))
            stream.taken = 0
        try:
            self._messages(stream, unpadded(payload, flags) if flags & frames.PADDED else payload)
        except ValueError:
            self._finish(number, frames.INVALID_ARGUMENT)
            return
        if flags & frames.END_STREAM and number in self._streams:
            self._half_closed(number)

    def _messages(self, stream: Stream, data: bytes) -> None:
        """Hand on the whole messages that have come: a flag, four bytes of length, the message."""
        if stream.handler is None:  # it had sent its last message
            raise Broken(frames.STREAM_CLOSED)
        stream.buffer += data
        at, size = 0, len(stream.buffer)
        while size - at >= 5:
            is_compressed, length = frames.PREFIX.unpack_from(stream.buffer, at)
            if is_compressed or length > frames.MOST_MESSAGE:
                raise ValueError("a compressed message, or one too long")
            end = at + 5 + length
            if end > size:
                break
            stream.handler.receive(bytes(stream.buffer[at + 5 : end]))
            at = end
        del stream.buffer[:at]

    def _half_closed(self, number: int) -> None:
        """The client has sent its last message: the call is over once what waits is sent."""
        stream = self._streams[number]
        close(stream)
        stream.is_ended = True
        self._drain(number, stream)

    def _settings(self, payload: bytes) -> None:
        if len(payload) % 6:
            raise Broken(frames.FRAME_ERROR)
        for name, value in struct.iter_unpack(">HI", payload):
            if name == frames.INITIAL_WINDOW:
                more, self._stream_window = value - self._stream_window, value
                for number, stream in list(self._streams.items()):
                    stream.window += more
                    self._drain(number, stream)
            elif name == frames.MAX_FRAME:
                self._most_frame = min(max(value, 16_384), frames.FRAME_BYTES)
        self._frame(frames.SETTINGS, frames.ACK, 0, b"")

    def _more_window(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Broken(frames.FRAME_ERROR)
        more = int.from_bytes(payload, "big") & frames.MOST_WINDOW
        if number == 0:
            self._window += more
            if more == 0 or self._window > frames.MOST_WINDOW:
                raise Broken(frames.FLOW_ERROR)
            for one, stream in list(self._streams.items()):
                self._drain(one, stream)
        elif (stream_ := self._streams.get(number)) is not None:
            stream_.window += more
            self._drain(number, stream_)

    # What goes out.

    def send(self, number: int, message: bytes) -> None:
        """A message of a call; it waits where the peer's window is full."""
        stream = self._streams.get(number)
        if stream is None or stream.is_ended:
            return
        stream.waiting.append(frames.PREFIX.pack(False, len(message)) + message)
        self._drain(number, stream)

    def _drain(self, number: int, stream: Stream) -> None:
        if stream.waiting and not stream.has_begun:
            stream.has_begun = True
            self._frame(frames.HEADERS, frames.END_HEADERS, number, frames.OPENING)
        while stream.waiting:
            room = min(stream.window, self._window, self._most_frame)
            if room <= 0:
                return
            data = stream.waiting.popleft()
            if len(data) > room:
                stream.waiting.appendleft(data[room:])
                data = data[:room]
            stream.window -= len(data)
            self._window -= len(data)
            self._frame(frames.DATA, 0, number, data)
        if stream.is_ended:
            self._finish(number, 0)

    def _finish(self, number: int, status: int) -> None:
        """End a call with a gRPC status."""
        stream = self._streams.pop(number)
        close(stream)
        opening = b"" if stream.has_begun else frames.OPENING
        trailers = opening + literal("grpc-status", str(status))
        self._frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number, trailers)

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        length = len(payload)
        self._out.append(frames.HEAD.pack(length >> 8, length & 0xFF, kind, flags, number))
        self._out.append(payload)
        if not self._is_reading and not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        out, self._out = self._out, []
        if out and self._transport is not None:
            self._transport.write(b"".join(out))
