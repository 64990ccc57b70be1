"""Idempotency keys: a request that comes again under one `Idempotency-Key` is computed once.

The first request of a key runs; one that comes meanwhile waits for its end. Whole answers with status
200 are kept for KEPT_S and given again, within the bounds below. Where none was kept (a stream, a failure, a
client that had left, a gateway that died, an answer too large) the next in line runs. A key belongs to its
caller and its path; another body under it is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.types import Message, Receive, Send

from dataplane.http.rules import ReadAhead

KEPT_S = 600.0
MOST_BYTES, LARGEST_BYTES = 64 << 20, 1 << 20  # of all answers kept, and of one
LONGEST_KEY = 255


class StoredAnswer(msgspec.Struct, array_like=True, frozen=True):
    """A whole answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def size(self) -> int:
        """What it takes of memory, about."""
        return 512 + len(self.body) + sum(len(name) + len(value) for name, value in self.headers)


class OtherBody(Exception):
    """The key was used for a request with another body."""


class KeyClaims(Protocol):
    """Where keys are claimed: this process's answers, or those of the fleet's core."""

    async def claim(self, name: str, digest: bytes) -> StoredAnswer | None:
        """The answer that is kept under a name, waiting for one that is being made; None: make it.

        Raises OtherBody. A caller that gets None must `settle`.
        """

    async def settle(self, name: str, answer: StoredAnswer | None) -> None:
        """The request is over: keep its answer, or let the next in line run."""


@dataclass(slots=True)
class _UnderWay:
    """A request that runs; `holder` is who makes its answer."""

    digest: bytes
    holder: object
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Answers:
    """Requests under way and kept answers, by name; the oldest answers make room."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way: dict[str, _UnderWay] = {}
        self._kept: OrderedDict[str, tuple[bytes, StoredAnswer, float]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """Answers that are kept."""
        return len(self._kept)

    async def claim(self, name: str, digest: bytes, holder: object = None) -> StoredAnswer | None:
        """As `KeyClaims` says, for any `holder`."""
        while True:
            self._make_room()
            known, answer = self._find(name)
            if known is None:
                self._under_way[name] = _UnderWay(digest, holder)
                return None
            if known != digest:
                raise OtherBody
            if answer is not None:
                return answer
            await self._under_way[name].over.wait()

    async def settle(self, name: str, answer: StoredAnswer | None) -> None:
        running = self._under_way.pop(name, None)
        if running is None:
            return
        if answer is not None and answer.size <= LARGEST_BYTES:
            self._kept[name] = running.digest, answer, self._clock()
            self._bytes += answer.size
            self._make_room()
        running.over.set()

    async def release(self, holder: object) -> None:
        """The holder that was making these answers is gone: the next in line run."""
        for name in [name for name, running in self._under_way.items() if running.holder == holder]:
            await self.settle(name, None)

    def _find(self, name: str) -> tuple[bytes | None, StoredAnswer | None]:
        if name in self._under_way:
            return self._under_way[name].digest, None
        digest, answer, _ = self._kept.get(name, (None, None, 0.0))
        return digest, answer

    def _make_room(self) -> None:
        while self._kept:
            name, (_, answer, at_s) = next(iter(self._kept.items()))
            if at_s + KEPT_S > self._clock() and self._bytes <= MOST_BYTES:
                return
            self._bytes -= answer.size
            del self._kept[name]


class Recorder:
    """Send, remembering a whole answer that may be kept."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body: list[bytes] = []
        self._bytes = 0
        self._is_whole = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            piece = message.get("body", b"")
            self._bytes += len(piece)
            if self._bytes <= LARGEST_BYTES:
                self._body.append(piece)
            self._is_whole = not message.get("more_body", False)
        await self._send(message)

    def answer(self) -> StoredAnswer | None:
        """The answer, where it is one to be kept."""
        if self._start is None or not self._is_whole or self._bytes > LARGEST_BYTES:
            return None
        headers = [(bytes(name).lower(), bytes(value)) for name, value in self._start["headers"]]
        headers = [(name, value) for name, value in headers if name != b"connection"]  # that was this one's
        is_stream = dict(headers).get(b"content-type", b"").startswith(b"text/event-stream")
        if self._start["status"] != 200 or is_stream:
            return None
        return StoredAnswer(200, headers, b"".join(self._body))


async def answer_once(
    claims: KeyClaims,
    name: str,
    receive: Receive,
    send: Send,
    run: Callable[[Receive, Send], Awaitable[None]],
    has_left: Callable[[], bool],
) -> None:
    """Answer a request from what is kept under its name, or `run` it and keep its answer.

    Raises OtherBody. `has_left`: whether the client has gone away while it waited in line.
    """
    again = ReadAhead(receive)
    body = await again.body()
    if body is None:
        await run(again, send)
        return
    kept = await claims.claim(name, hashlib.sha256(body).digest())
    if kept is not None:
        headers = [*kept.headers, (b"idempotency-replayed", b"true")]
        await send({"type": "http.response.start", "status": kept.status, "headers": headers})
        await send({"type": "http.response.body", "body": kept.body})
        return
    recorder = Recorder(send)
    answer = None
    try:
        if not has_left():
            await run(again, recorder)
            answer = None if has_left() else recorder.answer()
    finally:
        await claims.settle(name, answer)
