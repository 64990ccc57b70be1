"""The door of a worker: an encrypted ZMQ socket that takes the gateways of its fleet alone.

CURVE (RFC 26, in ZMQ itself) encrypts every link and makes both ends prove who they are. A fleet's gateways
share one key; its public half goes to each worker when it is launched. A worker makes its own, whose public
half comes back. So what Ray carries, between hosts in the clear unless its own TLS is on, is no secret.
"""

from __future__ import annotations

from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.constants import SocketOption, SocketType

from dataplane.live.engine_api import wire


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
        self.socket.setsockopt(SocketOption.SNDHWM, wire.QUEUED_BATCHES)
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
