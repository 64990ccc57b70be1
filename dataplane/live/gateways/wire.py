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
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from controlplane.types import SloClass

WIRE_VERSION = 3
PULSE_S = 5.0
MOST_FRAME_BYTES = 1 << 30


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


def pack(value: Any) -> bytes:
    """Plain values as a frame."""
    return msgspec.msgpack.encode(value)


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
