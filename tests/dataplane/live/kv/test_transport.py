"""KV blocks over sockets: exact bytes, or a reported failure."""

import ctypes
import errno
import os
import secrets
import socket
import ssl
import struct
import threading
import warnings
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own deprecations
    torch = pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from dataplane.live.engine_api.kv_messages import CopyRate
from dataplane.live.kv import direct as kv_direct
from dataplane.live.kv import transport as kv_transport
from dataplane.live.kv.memory import BlockTables, DirectMemory, StagedMemory, kv_memory
from dataplane.live.kv.transport import (
    Fetch,
    FetchFailed,
    SocketTransport,
    _identity,
    contexts,
    reserve_addresses,
)

LAYERS, BLOCKS, SHAPE = 3, 12, (2, 4, 8)


def caches(dtype=torch.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (LAYERS, BLOCKS, *SHAPE, torch.empty(0, dtype=dtype).element_size()), np.uint8)
    return [torch.from_numpy(raw[i]).view(dtype).squeeze(-1).contiguous() for i in range(LAYERS)]


def bits(tensors, blocks):
    return [t[list(blocks)].contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


def forbid_direct(monkeypatch):
    """As a kernel policy does it."""

    def refuse(pid, ours, theirs):
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(kv_direct, "_readv", refuse)


@pytest.fixture(params=["direct", "unix", "tcp", "tcp on one host"])
def served(request, monkeypatch):
    """A transport, an address that serves `caches()`, and its tables."""
    host = "0.0.0.0" if request.param.startswith("tcp") else "127.0.0.1"
    if request.param == "unix":
        forbid_direct(monkeypatch)
    if request.param == "tcp":  # as from another host, where nobody has that name
        monkeypatch.setattr(kv_transport, "_on_this_host", lambda address: "")
    (address,), release = reserve_addresses(host, 1)
    address = address.replace("0.0.0.0", "127.0.0.1")
    source, tables = caches(), BlockTables()
    stop = SocketTransport("secret").serve(address, tables, kv_memory(source))
    release()
    transport = SocketTransport("secret")
    yield transport, address, tables, source
    stop()
    transport.close()


def fetch(transport, address, segment, first, last, memory, blocks, secret="secret", **options):
    options = {"wait_s": 0.05} | options
    moved, _ = transport.fetch(address, Fetch(secret, segment, first, last, **options), memory, blocks, 5.0)
    return moved


@pytest.mark.parametrize("memory", [DirectMemory, StagedMemory])
def test_the_bytes_that_arrive_are_the_bytes_that_were_sent(served, memory):
    transport, address, tables, source = served
    target = caches(seed=1)
    before = bits(target, [0, 1, 2, 6, 7, 8, 10, 11])
    tables.update({"s": [7, 2, 3, 11, 0]}, ())
    kind = memory(target)
    moved = fetch(transport, address, "s", 1, 5, kind, [5, 4, 9, 3])
    assert bits(target, [5, 4, 9, 3]) == bits(source, [2, 3, 11, 0])
    assert bits(target, [0, 1, 2, 6, 7, 8, 10, 11]) == before
    assert moved == 4 * kind.block_bytes


@pytest.mark.parametrize("pace", [CopyRate(1e6), CopyRate(share=0.5), CopyRate(1e6, 0.5, 1e7)])
def test_a_paced_fetch_brings_the_same_bytes(served, pace):
    transport, address, tables, source = served
    target = caches(seed=1)
    tables.update({"s": [1, 2]}, ())
    fetch(transport, address, "s", 0, 2, DirectMemory(target), [3, 4], pace=pace)
    assert bits(target, [3, 4]) == bits(source, [1, 2])


def test_an_unknown_segment_is_refused_and_the_connection_goes_on(served):
    transport, address, tables, source = served
    target = caches(seed=1)
    with pytest.raises(FetchFailed, match="no blocks"):
        fetch(transport, address, "nobody", 0, 1, DirectMemory(target), [0])
    tables.update({"s": [1]}, ())
    fetch(transport, address, "s", 0, 1, DirectMemory(target), [0])
    assert bits(target, [0]) == bits(source, [1])


def test_a_segment_that_has_ended_is_refused_without_waiting():
    tables = BlockTables()
    tables.update({"s": [1]}, ())
    tables.update({}, ["s"])
    assert tables.grant("s", 0, 1, wait_s=1e6) is None


def test_a_segment_may_be_asked_for_before_it_is_offered(served):
    transport, address, tables, source = served
    target = caches(seed=1)
    offer = threading.Timer(0.01, lambda: tables.update({"s": [6]}, ()))
    offer.start()
    fetch(transport, address, "s", 0, 1, DirectMemory(target), [0], wait_s=10.0)
    offer.join()
    assert bits(target, [0]) == bits(source, [6])


def test_blocks_that_were_given_away_during_the_read_fail_the_fetch(served):
    transport, _, tables, source = served

    class GivenAway(DirectMemory):
        def read(self, blocks):
            tables.update({"s": [1]}, ["s"])  # preempted, and resumed in the same blocks
            return super().read(blocks)

    (other,), _ = reserve_addresses("127.0.0.1", 1)
    tables.update({"s": [1]}, ())
    stop = SocketTransport("secret").serve(other, tables, GivenAway(source))
    with pytest.raises(FetchFailed, match="changed"):
        fetch(transport, other, "s", 0, 1, DirectMemory(caches(seed=1)), [0])
    stop()


def test_other_block_sizes_are_refused(served):
    transport, address, tables, _ = served
    tables.update({"s": [1]}, ())
    with pytest.raises(FetchFailed, match="bytes here"):
        fetch(transport, address, "s", 0, 1, DirectMemory(caches(torch.float32)), [0])


def test_a_wrong_secret_gets_nothing(served):
    transport, address, tables, _ = served
    tables.update({"s": [1]}, ())
    target = caches(seed=1)
    before = bits(target, range(BLOCKS))
    with pytest.raises(FetchFailed, match=r"closed|CERTIFICATE_VERIFY_FAILED|certificate"):
        fetch(transport, address, "s", 0, 1, DirectMemory(target), [0], secret="guess")
    assert bits(target, range(BLOCKS)) == before


@pytest.fixture
def far(monkeypatch):
    """A transport, an address on another host as it were, and the tables of who serves there."""
    monkeypatch.setattr(kv_transport, "_on_this_host", lambda address: "")
    (address,), release = reserve_addresses("0.0.0.0", 1)
    address = address.replace("0.0.0.0", "127.0.0.1")
    tables, transport = BlockTables(), SocketTransport()
    stop = SocketTransport("secret").serve(address, tables, kv_memory(caches()))
    release()
    yield transport, address, tables
    stop()
    transport.close()


def test_who_listens_between_two_hosts_reads_neither_the_secret_nor_what_is_moved(far, recorded):
    transport, address, tables = far
    tables.update({"a-segment": [1, 2, 3]}, ())
    port = int(address.rsplit(":", 1)[1])
    between, heard = recorded(port)
    target = caches(seed=1)
    fetch(transport, f"tcp://127.0.0.1:{between}", "a-segment", 0, 3, DirectMemory(target), [0, 1, 2])
    assert bits(target, [0, 1, 2]) == bits(caches(), [1, 2, 3])
    wire = b"".join(heard)
    assert len(wire) > sum(map(len, bits(target, [0, 1, 2])))
    for said in (b"secret", b"a-segment", *(block[:16] for block in bits(target, [0, 1, 2]))):
        assert said not in wire


def test_a_connection_to_a_host_that_has_gone_without_a_word_is_not_kept_for_ever(far):
    transport, address, tables = far
    tables.update({"s": [1]}, ())
    fetch(transport, address, "s", 0, 1, DirectMemory(caches(seed=1)), [0])
    ((connection,),) = transport._idle.values()
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_who_does_not_speak_tls_or_has_another_certificate_gets_nothing(far, monkeypatch):
    _, address, tables = far
    monkeypatch.setattr(kv_transport, "HANDSHAKE_S", 0.05)
    tables.update({"s": [1]}, ())
    at = "127.0.0.1", int(address.rsplit(":", 1)[1])
    ask = msgspec.msgpack.encode(["secret", "s", 0, 1, 0, 0.0, [0.0, 1.0, 0.0], False])
    for said in (struct.pack("!I", len(ask)) + ask, b""):  # in the clear, and not at all
        with socket.create_connection(at, 5.0) as plain:
            plain.sendall(said)
            answer = b""
            with suppress(ConnectionResetError):
                answer = plain.recv(1 << 16)
            assert len(answer) < 64  # an alert
            assert b"blocks" not in answer
    trusting, guessing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), contexts.__wrapped__("guess")[1]
    trusting.check_hostname = False
    for context in (trusting, guessing):
        context.verify_mode = ssl.CERT_NONE
        said = b""
        with suppress(OSError), context.wrap_socket(socket.create_connection(at, 5.0)) as stranger:
            stranger.sendall(struct.pack("!I", len(ask)) + ask)
            said = stranger.recv(1 << 16)
        assert said == b""


def test_both_ends_make_the_same_certificate_of_a_secret_and_no_other_one():
    assert _identity("a") == _identity("a")
    assert _identity("a") != _identity("b")


def test_nobody_at_the_address_is_a_failed_fetch():
    address = f"unix://nobody-{secrets.token_hex(8)}"
    with pytest.raises(FetchFailed):
        fetch(SocketTransport(), address, "s", 0, 1, DirectMemory(caches()), [0])


def test_readers_of_one_host_take_the_bytes_of_a_tcp_address_out_of_memory(served, monkeypatch):
    transport, address, tables, source = served
    reads, read = [], kv_direct.read
    monkeypatch.setattr(kv_direct, "read", lambda *given: (reads.append(given), read(*given)))
    target = caches(seed=1)
    tables.update({"s": [1]}, ())
    fetch(transport, address, "s", 0, 1, DirectMemory(target), [0])
    is_near = address.startswith("unix") or kv_transport._on_this_host(address) != ""
    assert (len(reads), bits(target, [0])) == (int(is_near), bits(source, [1]))


def test_another_user_under_a_servers_name_is_not_told_the_secret(monkeypatch):
    (address,), release = reserve_addresses("0.0.0.0", 1)
    address = address.replace("0.0.0.0", "127.0.0.1")
    told = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as impostor:
        impostor.bind("\0" + kv_transport._on_this_host(address).removeprefix("unix://"))
        impostor.listen()

        def listen():
            connection, _ = impostor.accept()
            with connection:
                told.append(connection.recv(1))

        listener = threading.Thread(target=listen)
        listener.start()
        source, tables = caches(), BlockTables()
        tables.update({"s": [1]}, ())
        with monkeypatch.context() as patch:
            patch.setattr(kv_transport, "_on_this_host", lambda address: "")  # its name is taken
            stop = SocketTransport("secret").serve(address, tables, kv_memory(source))
        release()
        monkeypatch.setattr(kv_transport, "peer_user", lambda connection: os.getuid() + 1)
        target, transport = caches(seed=1), SocketTransport("secret")
        fetch(transport, address, "s", 0, 1, DirectMemory(target), [0])
        listener.join()
        transport.close()
        stop()
    assert (told, bits(target, [0])) == ([b""], bits(source, [1]))


def test_noise_on_the_socket_does_not_stop_the_server(served):
    transport, address, tables, source = served
    scheme, place = address.split("://")
    family = socket.AF_UNIX if scheme == "unix" else socket.AF_INET
    at = "\0" + place if scheme == "unix" else (place.split(":")[0], int(place.split(":")[1]))
    with socket.socket(family, socket.SOCK_STREAM) as noise:
        noise.connect(at)
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    tables.update({"s": [1]}, ())
    target = caches(seed=1)
    fetch(transport, address, "s", 0, 1, DirectMemory(target), [0])
    assert bits(target, [0]) == bits(source, [1])


@given(st.permutations(range(BLOCKS)), st.integers(1, BLOCKS))
def test_both_memories_read_the_same_bytes_in_any_order(order, count):
    blocks, tensors = order[:count], caches()
    direct, staged = DirectMemory(tensors), StagedMemory(tensors)
    wanted = b"".join(bits(tensors, blocks))
    for memory in (direct, staged):
        views, wait = memory.read(blocks)
        for view in range(len(views)):
            wait(view)
        assert b"".join(views) == wanted


def test_caches_with_scattered_blocks_are_staged():
    strided = [torch.zeros(4, BLOCKS, 8).transpose(0, 1)]
    assert isinstance(kv_memory(strided), StagedMemory)
    assert isinstance(kv_memory(caches()), DirectMemory)


def test_an_address_is_free_again_when_its_server_has_stopped():
    (address,), release = reserve_addresses("0.0.0.0", 1)
    for _ in range(50):
        SocketTransport("secret").serve(address, BlockTables(), kv_memory(caches()))()
    release()


def test_a_server_that_cannot_have_both_its_addresses_keeps_neither():
    """It may share its TCP port with the process that reserved it, but not its name on this host."""
    (address,), release = reserve_addresses("0.0.0.0", 1)
    stop = SocketTransport("secret").serve(address, BlockTables(), kv_memory(caches()))
    with pytest.raises(OSError, match="in use"):  # and a socket that nobody closes is a warning, so an error
        SocketTransport("secret").serve(address, BlockTables(), kv_memory(caches()))
    stop()
    release()
