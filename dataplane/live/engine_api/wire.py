"""The wire between gateways and a worker: ZMQ multipart messages, the first frame naming the kind.

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

A worker's `Door` takes the gateways of its fleet alone. CURVE (RFC 26, in ZMQ itself) encrypts every link and
makes both ends prove who they are. A fleet's gateways share one key; its public half goes to each worker when
it is launched. A worker makes its own, whose public half comes back. So what Ray carries, between hosts in
the clear unless its own TLS is on, is no secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.constants import SocketOption, SocketType

from controlplane.errors import BadInput

WIRE_VERSION = 4
HELLO, ADD, ABORT, ALIVE, BYE = b"hello", b"add", b"abort", b"alive", b"bye"
WELCOME, OUTPUTS, LOAD, REFUSED, LOST = b"welcome", b"outputs", b"load", b"refused", b"lost"
ADAPTER, ADAPTERS, CACHED = b"adapter", b"adapters", b"cached"

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode  # plain values and dataclasses; plain values
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


def noun_from(frame: bytes, kind: type[Noun]) -> Noun:
    """A dataclass from its frame. Raises BadInput when the fields do not fit."""
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.MsgspecError as error:
        raise BadInput(f"wire: {kind.__name__}: {error}") from error


def hello(vllm_version: str) -> Sequence[bytes]:
    """A gateway's first message."""
    return (HELLO, pack([WIRE_VERSION, vllm_version]))


def new_key() -> str:
    """A private key of one end; ZMQ's own text of it."""
    return str(zmq.curve_keypair()[1].decode())


def public_key(key: str) -> str:
    """What the other end knows of a key."""
    return str(zmq.curve_public(key.encode()).decode())


def knock(socket: Any, key: str, door: str) -> None:
    """Prepare a gateway's socket for the door with this public key."""
    socket.curve_secretkey, socket.curve_publickey = key.encode(), public_key(key).encode()
    socket.curve_serverkey = door.encode()


class Door:
    """A bound ROUTER; `key` is its public key. Only holders of the gateways' key can talk to it."""

    def __init__(self, host: str, gateways: str) -> None:
        self._gateways = gateways.encode()
        self._context = context = zmq.asyncio.Context()
        self._keeper = AsyncioAuthenticator(context)
        self._keeper.start()
        self._keeper.configure_curve_callback("*", self)
        own = new_key()
        self.key = public_key(own)
        self.socket: Any = context.socket(SocketType.ROUTER)
        self.socket.setsockopt(SocketOption.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(SocketOption.SNDHWM, QUEUED_BATCHES)
        self.socket.curve_secretkey, self.socket.curve_publickey = own.encode(), self.key.encode()
        self.socket.curve_server = True
        self.endpoint = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"

    def let_in(self, gateways: str) -> None:
        """Open to the gateways with this public key alone."""
        self._gateways = gateways.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer that has proven to hold this key may come in; ZMQ's authenticator asks."""
        return key == self._gateways

    def close(self, linger_ms: int) -> None:
        """Close it, once what is on its way is sent or the time is over."""
        self._keeper.stop()
        self._context.destroy(linger=linger_ms)
