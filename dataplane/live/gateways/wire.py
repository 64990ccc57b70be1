"""The wire between a fleet's core and its gateways: messages of frames on a Unix stream socket.

Requests and outputs travel in vLLM's own msgpack encoding, everything else as msgpack of plain values. Both
ends run on one machine as one user. They find each other in a folder that only that user can enter, so
nothing more is asked of a peer that connects. A gateway or a core that dies ends the stream. A core's
successor listens at the same address. Gateways greet it and claim again what they had claimed. They add again
what is open there, with its tokens so far, and ask again what was not answered.

    gateway → core   hello    [wire version, vllm version, name]
                     add      NewRequest, EngineRequest (vLLM's frames)
                     abort    [[request, …], whether its client has left]
                     abandon  ticket: its client has left
                     give up  why: all its requests end in an error that says so
                     ask      [number, verb, arguments]; an answer follows
                     claimed  {name: digest}, first of all to a core's successor: what it has claimed
                     pulse    every PULSE_S: it runs
    core → gateway   welcome  Welcome
                     tickets  [TicketNews, …]: what the fleet has written on tickets, before the outputs
                     outputs  StepOutputs (vLLM's frames)
                     closing  why no request is let in any more
                     retire   seconds: accept no connection, and end once what is open has ended
                     answer   [number, value, error]

A message is a kind (one byte), a number of frames (one byte), their lengths, and the frames.

Gateways also share settings, the table of their loads, and a file of counts.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from pydantic import TypeAdapter

from controlplane.types import SloClass
from dataplane.http.keys import ApiKey
from dataplane.live.gateway.settings import GatewaySettings

WIRE_VERSION = 3
pack = msgspec.msgpack.encode  # plain values as a frame
PULSE_S = 5.0
MOST_FRAME_BYTES = 1 << 30
MOST_GATEWAYS = 128  # at once, those that leave among them
WRITE_EVERY_S = 1.0
NOT_ACCEPTING = (1 << 31) - 1  # vLLM's own mark, in place of a number of connections


class MessageType(IntEnum):
    """What a message is."""

    HELLO, ADD, ABORT, ABANDON, GIVE_UP, ASK = range(1, 7)
    WELCOME, TICKETS, OUTPUTS, CLOSING, RETIRE, ANSWER = range(7, 13)
    CLAIMED, PULSE = range(13, 15)


class NewRequest(msgspec.Struct, array_like=True, frozen=True):
    """What the core needs of an HTTP request in addition to the engine's request, and when it was sent.

    `ticket` counts the gateway's tickets. `sent_s`: when it came to the door, by the machine's clock.
    `tokens`: its output so far, of one that an earlier core was given, and `first_s` when it had its first.
    """

    ticket: int
    id: str
    key: str
    ttft_s: float
    tpot_s: float
    priority: int
    sent_s: float
    session: str
    tokens: list[int] | None = None
    first_s: float | None = None
    slo_class: str = ""
    traceparent: str = ""


class TicketNews(msgspec.Struct, array_like=True, frozen=True):
    """What the fleet has written on a ticket; as `request.Ticket` has it."""

    ticket: int
    worker: str | None = None
    refused: str | None = None
    retry_after_s: int = 0
    failure: str | None = None


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway needs of the fleet before it serves; `refused` is why it is not welcome, or empty.

    `core`: the number of this core in its fleet's life.
    """

    refused: str
    slots: int
    kv_blocks: int
    ttft_s: float
    tpot_s: float
    closing: str
    core: int
    classes: tuple[SloClass, ...] = ()


def message(kind: MessageType, *frames: Any) -> list[Any]:
    """A message as buffers to be written one after another."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    return [struct.pack(f"<BB{len(frames)}I", kind, len(frames), *sizes), *frames]


async def next_message(reader: asyncio.StreamReader) -> tuple[MessageType, Sequence[memoryview]]:
    """The next message. Raises EOFError at the end of the stream, ValueError for what is no message."""
    try:
        kind, count = await reader.readexactly(2)
        sizes = struct.unpack(f"<{count}I", await reader.readexactly(4 * count))
        if sum(sizes) > MOST_FRAME_BYTES:
            raise ValueError(f"wire: a message of {sum(sizes)} bytes")
        body = memoryview(await reader.readexactly(sum(sizes)))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise EOFError("the other end is gone") from error
    frames, at = [], 0
    for size in sizes:
        frames.append(body[at : at + size])
        at += size
    return MessageType(kind), frames


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of a gateway's process: first those that all share, then those that its keeper adds.

    `listening` and `loads` are descriptors, of the socket and of the table of loads. `index` is this
    gateway's place in that table. `core`: where the core listens; `metrics`: the folder of vLLM's metrics.
    """

    gateway: GatewaySettings
    keys: tuple[ApiKey, ...]
    page: str
    listening: int
    core: Path = Path()
    metrics: Path = Path()
    loads: int = -1
    name: str = ""
    index: int = 0


PROCESS_SETTINGS = TypeAdapter(ProcessSettings)


class Loads:
    """The connections of each gateway on a shared socket, in shared memory; a place without a gateway does
    not accept."""

    def __init__(self, descriptor: int) -> None:
        self._cells = memoryview(mmap.mmap(descriptor, 4 * MOST_GATEWAYS)).cast("i")
        self.has_left = False

    def __iter__(self) -> Iterator[int]:
        return iter(self._cells)

    def __getitem__(self, index: int) -> int:
        return self._cells[index]

    def __setitem__(self, index: int, load: int) -> None:
        self._cells[index] = NOT_ACCEPTING if self.has_left else load


class Unwritten:
    """What metrics have counted since it was last written to the file that they share with other gateways.

    vLLM counts several things for each token, and to write each takes seven times as long as to count it.
    """

    def __init__(self, written: Any) -> None:
        """`written`: the client library's class of a value in such a file."""
        self._written, self._lock = written, Lock()
        self._changed: set[Any] = set()

    def value(self) -> Any:
        """A class of values that are written later."""
        written, changed, lock = self._written, self._changed, self._lock

        class Value(written):  # type: ignore[misc, valid-type]
            def inc(self, amount: float) -> None:
                with lock:
                    self._value += amount
                    changed.add(self)

        return Value

    def write(self) -> None:
        """Write what has changed."""
        with self._lock:
            changed = self._changed.copy()
            self._changed.clear()
        for value in changed:
            self._written.inc(value, 0.0)

    async def keep_written(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self.write()
