"""The KV transport: copies KV bytes from the rank that holds them to the rank that loads them.

It uses TCP between machines (`tcp://host:port`), within TLS, and Linux abstract Unix sockets on one
(`unix://name`, no file, no port). A server at a TCP address has such a socket as well, named after the
address. Abstract names are a host's own, so a reader that reaches it is on the same host.

One exchange on a connection, all integers big-endian:

    fetch   u32 length, msgpack [secret, segment, first, last, block_bytes, wait_s, pace, ways]
    answer  u32 length, msgpack [ok, reason, payload bytes, way, offer]
    then, if ok, the payload, and one byte: 1 if the blocks were the segment's own until the end

`ways` are those around the connection that the reader has (direct.py, nixl.py). If the answer names one of
them, no payload follows. The reader takes it itself from where the `offer` points, and sends a byte, 1 if it
could. After a 0 the payload comes all the same. The last byte is asked after the payload has been taken.

The reader pulls. A connection carries one fetch at a time and concurrent fetches take one connection each:
two fetches in one byte stream would wait for each other.

**TLS between hosts.** Both ends make the same certificate out of a worker's secret and accept no other. A
reader gets the secret over its encrypted link, together with what to fetch. So no certificate is handed
around or renewed: one lives as long as its worker. Ed25519 signs the same bytes the same way, so the secret
is the certificate. Session keys are fresh for each connection.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from dataplane.live.engine_api.kv_messages import UNBOUND, CopyRate
from dataplane.live.kv.direct import PIECE, Bypass, Copy, Pacer, ProcessMemory, Share, peer_user
from dataplane.live.kv.memory import BlockTables, KvMemory, Views

log = logging.getLogger(__name__)
MAX_VIEWS = 512  # per system call; Linux allows 1024
MAX_HEADER = 1 << 20
MAX_CONNECTIONS = 64
# The other host is gone after 30 s of silence, whether it is listened for or spoken to (ms).
TUNED = {socket.TCP_NODELAY: 1, socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
TUNED |= {socket.TCP_USER_TIMEOUT: 30_000}
HANDSHAKE_S = 5.0  # after which a connection that has not proven to be a reader's is closed
ALWAYS = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)  # clocks may be off
LOCAL_SOCKETS, SOCKETS = "local sockets", "TCP"


class FetchFailed(Exception):
    """The blocks could not be fetched; the message says why."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks [first, last) of a segment, from a server that asks for this secret."""

    secret: str = field(repr=False)
    segment: str
    first: int
    last: int
    wait_s: float = 2.0
    pace: CopyRate = UNBOUND


class SocketTransport:
    """Serves a rank's blocks, and fetches another's, with a pool of idle connections per server.

    KV goes over stream sockets, or by the first of the ways around them that both ends have. Readers must
    know `secret`.
    """

    def __init__(self, secret: str = "", bypasses: Sequence[Bypass] = ()) -> None:
        self._secret = secret
        self._bypasses = {each.way: each for each in (*bypasses, ProcessMemory())}
        self._idle: dict[tuple[str, str], list[socket.socket]] = {}
        self._lock = threading.Lock()
        self._share = Share()  # of all that this process copies

    def serve(self, address: str, tables: BlockTables, memory: KvMemory) -> Callable[[], None]:
        """Start to answer fetches at an address; returns what stops it."""
        with ExitStack() as undone:
            listeners = [undone.enter_context(_listen(at)) for at in (address, _on_this_host(address)) if at]
            undone.pop_all()
        threads = [
            threading.Thread(target=self._accept, args=(each, tables, memory), name="kv-serve", daemon=True)
            for each in listeners
        ]
        for thread in threads:
            thread.start()

        def stop() -> None:
            for listener in listeners:
                # Closing alone would leave the thread in accept, and the address in use.
                with suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)
                listener.close()
            for thread in threads:
                thread.join()  # until then the kernel keeps the address

        return stop

    def fetch(
        self, address: str, fetch: Fetch, memory: KvMemory, blocks: Sequence[int], timeout_s: float
    ) -> tuple[int, str]:
        """Fill these blocks; return the bytes moved and the last way they took. Raises FetchFailed."""
        try:
            connection = self._connect(address, fetch.secret, timeout_s)
            try:
                with _closed_if_it_fails(connection):  # in the middle of an answer, perhaps
                    moved = self._exchange_all(connection, fetch, memory, blocks, timeout_s)
            finally:
                memory.finish()  # of a fetch that fails, too: its blocks will be another's
        except (OSError, struct.error, msgspec.MsgspecError) as error:
            raise FetchFailed(f"{address}: {error}") from error
        with self._lock:
            self._idle.setdefault((address, fetch.secret), []).append(connection)
        return moved

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _connect(self, address: str, secret: str, timeout_s: float) -> socket.socket:
        with self._lock:
            idle = self._idle.get((address, secret))
            connection = idle.pop() if idle else None
        if connection is None:
            connection = _dial_nearest(address, secret, timeout_s)
        connection.settimeout(timeout_s)
        return connection

    def _exchange_all(
        self,
        connection: socket.socket,
        fetch: Fetch,
        memory: KvMemory,
        blocks: Sequence[int],
        timeout_s: float,
    ) -> tuple[int, str]:
        """Piece by piece: one is put into its blocks while the next is received."""
        moved, way = 0, ""
        for begin in range(0, max(1, len(blocks)), memory.piece_blocks):
            piece = blocks[begin : begin + memory.piece_blocks]
            first = fetch.first + begin
            asks = replace(fetch, first=first, last=first + len(piece))
            size, way = self._exchange(connection, asks, memory, piece, timeout_s)
            moved += size
        return moved, way

    def _exchange(
        self,
        connection: socket.socket,
        fetch: Fetch,
        memory: KvMemory,
        blocks: Sequence[int],
        timeout_s: float,
    ) -> tuple[int, str]:
        ways = [way for way, bypass in self._bypasses.items() if bypass.reaches(connection)]
        what = fetch.secret, fetch.segment, fetch.first, fetch.last, memory.block_bytes
        _send_header(connection, [*what, fetch.wait_s, astuple(fetch.pace), ways])
        ok, reason, size, way, offer = _receive_header(connection)
        if not ok:
            raise FetchFailed(reason)
        if size != len(blocks) * memory.block_bytes:
            raise ConnectionError(f"{size} bytes offered, {len(blocks) * memory.block_bytes} expected")
        pacer = Pacer(fetch.pace, self._share)
        is_taken = False
        if way:
            copy = Copy(memory, blocks, pacer, timeout_s)
            is_taken = self._bypasses[way].take(connection, offer, copy)
            connection.sendall(b"\x01" if is_taken else b"\x00")
        if not is_taken:
            way = SOCKETS if connection.family == socket.AF_INET else LOCAL_SOCKETS
            views, commit = memory.write(blocks)
            _receive_views(connection, views, pacer)
            commit()
        if _receive_exactly(connection, 1) != b"\x01":
            raise FetchFailed("the blocks changed while they were read")
        return int(size), way

    def _accept(self, listener: socket.socket, tables: BlockTables, memory: KvMemory) -> None:
        slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            if not slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._answer_all,
                args=(connection, tables, memory, slots),
                name="kv-answer",
                daemon=True,
            ).start()

    def _answer_all(
        self,
        connection: socket.socket,
        tables: BlockTables,
        memory: KvMemory,
        slots: threading.BoundedSemaphore,
    ) -> None:
        try:
            memory.enter_thread()
            _tune(connection)
            with sealed(connection, self._secret, HANDSHAKE_S) as reader:
                while True:
                    self._answer(reader, tables, memory)
        except (OSError, struct.error, msgspec.MsgspecError) as error:
            log.debug("a KV connection ended: %s", error)
        except RuntimeError as error:  # torch's: a copy off the device has failed
            log.error("KV cannot be read: %s", error)
        finally:
            slots.release()

    def _answer(self, connection: socket.socket, tables: BlockTables, memory: KvMemory) -> None:
        secret, segment, first, last, block_bytes, wait_s, pace, ways = _receive_header(connection)
        if not hmac.compare_digest(str(secret), self._secret):
            raise ConnectionError("wrong secret")
        if block_bytes != memory.block_bytes:
            reason = f"blocks of {memory.block_bytes} bytes here, {block_bytes} there"
            _send_header(connection, [False, reason, 0, "", b""])
            return
        grant = tables.grant(segment, first, last, wait_s)
        if grant is None:
            reason = f"no blocks [{first}, {last}) of {segment} here"
            _send_header(connection, [False, reason, 0, "", b""])
            return
        way, offer, kept = self._offer(ways, memory, grant.blocks)
        _send_header(connection, [True, "", len(grant.blocks) * memory.block_bytes, way, offer])
        if way:
            self._bypasses[way].lend(connection)
        if not way or _receive_exactly(connection, 1) != b"\x01":
            views, wait = memory.read(grant.blocks)
            _send_views(connection, views, wait, Pacer(CopyRate(*pace), self._share))
        del kept  # which the reader has read
        connection.sendall(b"\x01" if tables.holds(grant) else b"\x00")

    def _offer(self, ways: Sequence[str], memory: KvMemory, blocks: Sequence[int]) -> tuple[str, bytes, Any]:
        """The first of these ways that the blocks can be had by, empty for the connection; and `kept`."""
        for way in ways:
            if way in self._bypasses:
                offer, kept = self._bypasses[way].offer(memory, blocks)
                if offer:
                    return way, offer, kept
        return "", b"", None


def reserve_addresses(host: str, ranks: int) -> tuple[tuple[str, ...], Callable[[], None]]:
    """An address for each rank to serve at, and what to call once they do.

    On a loopback host these are abstract sockets, which need no reserving. Elsewhere they are ports. A bound
    socket that does not listen keeps each, so that nothing else takes it while the engine starts.
    """
    if host in ("127.0.0.1", "localhost", "::1"):
        name = f"tokenfleet-kv-{secrets.token_hex(8)}"
        return tuple(f"unix://{name}-{rank}" for rank in range(ranks)), lambda: None
    sockets = []
    for _ in range(ranks):
        keeper = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind((host, 0))
        sockets.append(keeper)

    def release() -> None:
        for keeper in sockets:
            keeper.close()

    return tuple(f"tcp://{host}:{keeper.getsockname()[1]}" for keeper in sockets), release


def _listen(address: str) -> socket.socket:
    scheme, place = _parse(address)
    if scheme == "tcp":
        host, port = place.rsplit(":", 1)
        # The launcher keeps the port reserved with a bound socket of its own until we are up.
        return socket.create_server((host, int(port)), backlog=MAX_CONNECTIONS, reuse_port=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _closed_if_it_fails(listener):
        listener.bind("\0" + place)
        listener.listen(MAX_CONNECTIONS)
    return listener


@contextmanager
def _closed_if_it_fails(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _on_this_host(address: str) -> str:
    """The Unix socket that a server at a TCP address also has; empty for other addresses."""
    scheme, place = _parse(address)
    return f"unix://tokenfleet-kv-{place}" if scheme == "tcp" else ""


def _dial_nearest(address: str, secret: str, timeout_s: float) -> socket.socket:
    beside = _on_this_host(address)
    if beside:
        with suppress(OSError):  # on another host, as a rule
            connection = _dial(beside, timeout_s)
            # Anyone may bind an abstract name: another user's process must not get the secret.
            if peer_user(connection) == os.getuid():
                return connection
            connection.close()
    return sealed(_dial(address, timeout_s), secret)


def _dial(address: str, timeout_s: float) -> socket.socket:
    scheme, place = _parse(address)
    if scheme == "tcp":
        host, port = place.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), timeout_s)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _closed_if_it_fails(connection):
            connection.settimeout(timeout_s)
            connection.connect("\0" + place)
    _tune(connection)
    return connection


def _parse(address: str) -> tuple[str, str]:
    scheme, separator, place = address.partition("://")
    if not separator or scheme not in ("tcp", "unix") or not place:
        raise ConnectionError(f"not a KV address: {address}")
    return scheme, place


def _tune(connection: socket.socket) -> None:
    """Send at once, and let a connection to a host that has gone without a word end: it takes up a thread."""
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in TUNED.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send_header(connection: socket.socket, fields: list[Any]) -> None:
    body = msgspec.msgpack.encode(fields)
    connection.sendall(struct.pack("!I", len(body)) + body)


def _receive_header(connection: socket.socket) -> Any:
    (length,) = struct.unpack("!I", _receive_exactly(connection, 4))
    if length > MAX_HEADER:
        raise ConnectionError(f"a header of {length} bytes")
    return msgspec.msgpack.decode(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    _receive_views(connection, [memoryview(buffer)])
    return bytes(buffer)


def _send_views(connection: socket.socket, views: Views, wait: Callable[[int], None], pacer: Pacer) -> None:
    sent = 0
    for number, view in enumerate(views):
        wait(number)
        for start in range(0, view.nbytes, PIECE):
            piece = view[start : start + PIECE]
            connection.sendall(piece)
            sent += piece.nbytes
            pacer.wait(sent)


def _receive_views(connection: socket.socket, views: Views, pacer: Pacer | None = None) -> None:
    at, offset, received = 0, 0, 0
    is_sealed = isinstance(connection, ssl.SSLSocket)  # which gives a record of 16 KiB at a time
    while at < len(views):
        if is_sealed:
            count = connection.recv_into(views[at][offset:])
        else:
            batch = [views[at][offset:], *views[at + 1 : at + MAX_VIEWS]]
            count = connection.recvmsg_into(batch)[0]
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        received += count
        if pacer is not None:
            pacer.wait(received)
        while count:
            rest = views[at].nbytes - offset
            if count < rest:
                offset += count
                break
            count -= rest
            at, offset = at + 1, 0


@lru_cache(maxsize=4096)
def contexts(secret: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of the end that serves and of the one that reads."""
    certificate, key = _identity(secret)
    serving, reading = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    serving.num_tickets = 0  # connections are kept, not resumed
    reading.check_hostname = False  # the certificate is of the worker, wherever it is
    file = os.memfd_create("tokenfleet-kv")  # OpenSSL reads keys from files, and this one is on no disk
    try:
        os.write(file, key + certificate)
        for context in (serving, reading):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(f"/proc/self/fd/{file}")
            context.load_verify_locations(cadata=certificate.decode())
    finally:
        os.close(file)
    return serving, reading


def sealed(connection: socket.socket, secret: str, accepted_within_s: float | None = None) -> socket.socket:
    """A connection within TLS, or unchanged if it does not leave the host. Raises OSError, and closes it.

    `accepted_within_s`: it was accepted, and its peer has this time to prove that it knows the secret.
    """
    if connection.family == socket.AF_UNIX:
        return connection
    serving, reading = contexts(secret)
    with _closed_if_it_fails(connection):
        if accepted_within_s is None:
            return reading.wrap_socket(connection)
        connection.settimeout(accepted_within_s)
        accepted = serving.wrap_socket(connection, server_side=True)
        accepted.settimeout(None)
        return accepted


def _identity(secret: str) -> tuple[bytes, bytes]:
    """Certificate and key in PEM, the same ones for the same secret."""
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret.encode(), b"tokenfleet kv", hashlib.sha256))
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokenfleet kv")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(who)
        .issuer_name(who)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(ALWAYS[0])
        .not_valid_after(ALWAYS[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), private
