"""The wire format between gateways and a worker: ZMQ multipart messages, the first frame naming the kind.

A worker binds a ROUTER, each gateway connects a DEALER. Requests and outputs travel in vLLM's own msgpack
encoding, so nothing is lost or copied by field; everything else is msgpack of plain values.

    gateway → worker   hello   [wire version, vllm version]
                       add     segment, EngineRequest (vLLM's frames)
                       abort   [segment, …]
                       adapter Adapter (vLLM's array): load it
                       cached  -, to be told all that is cached
                       alive   -
                       bye     -
    worker → gateway   welcome WorkerInfo as a map
                       outputs StepOutputs (vLLM's frames)
                       load    Telemetry as a map
                       refused [segment, reason]
                       adapters Adapters as a map
                       cached  CacheChange as a map: what changes, and all of it when asked
                       lost    reason

Both sides bound their queues. A worker that cannot deliver a gateway's outputs disconnects that gateway: it
aborts the gateway's segments and sends `lost`. A gateway whose worker's queue is full waits in `add`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from controlplane.errors import BadInput

WIRE_VERSION = 3
HELLO, ADD, ABORT, ALIVE, BYE = b"hello", b"add", b"abort", b"alive", b"bye"
WELCOME, OUTPUTS, LOAD, REFUSED, LOST = b"welcome", b"outputs", b"load", b"refused", b"lost"
ADAPTER, ADAPTERS, CACHED = b"adapter", b"adapters", b"cached"

QUEUED_BATCHES = 1024  # unsent outputs of one gateway, at the worker


@dataclass(frozen=True, slots=True)
class LinkTimings:
    """How often either end of a link says something, and how long the other waits for it.

    A worker that is silent for `suspect_s` gets no new requests. After `silence_s` it is given up.
    """

    alive_every_s: float = 1.0
    suspect_s: float = 2.5
    silence_s: float = 10.0


PATIENCE = LinkTimings()
Noun = TypeVar("Noun")


def pack(value: Any) -> bytes:
    """Plain values or a flat dataclass as msgpack."""
    return msgspec.msgpack.encode(value)


def unpack(frame: bytes) -> Any:
    """The plain values of a frame."""
    return msgspec.msgpack.decode(frame)


def noun_from(frame: bytes, kind: type[Noun]) -> Noun:
    """A dataclass from its frame. Raises BadInput when the fields do not fit."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.MsgspecError as error:
        raise BadInput(f"wire: {kind.__name__}: {error}") from error


def hello(vllm_version: str) -> Sequence[bytes]:
    """A gateway's first message."""
    return (HELLO, pack([WIRE_VERSION, vllm_version]))
