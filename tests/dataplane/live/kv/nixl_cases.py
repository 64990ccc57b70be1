"""KV by NIXL between two processes: exact bytes, or a reported failure, and nothing that comes late.

test_nixl.py runs this.
"""

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own deprecations
    torch = pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from late_cuda import Cuda

from controlplane.errors import BadInput
from dataplane.live.kv import nixl
from dataplane.live.kv.memory import BlockTables, DirectMemory, StagedMemory, kv_memory
from dataplane.live.kv.nixl import NIXL, NixlTransport, bypasses, check_installed
from dataplane.live.kv.transport import Fetch, FetchFailed, SocketTransport, reserve_addresses

LAYERS, BLOCKS, SHAPE = 3, 64, (2, 8, 512)
needs_nixl = pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed (pip install nixl-cu12)")


def caches(seed):
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 255, (BLOCKS, *SHAPE), dtype=torch.uint8, generator=made) for _ in range(LAYERS)]


def hold(address, orders):
    """A holder of `caches(1)` as segment s, blocks backwards, in a process of its own."""

    class GivenAway(DirectMemory):
        def settle(self):
            if is_taken_away:
                tables.update({"s": table}, ["s"])  # preempted, and resumed in the same blocks

    is_taken_away, table, tables = False, list(range(BLOCKS))[::-1], BlockTables()
    tables.update({"s": table}, ())
    SocketTransport("secret", [NixlTransport(True)]).serve(address, tables, GivenAway(caches(1)))
    orders.send(None)
    while True:
        is_taken_away = orders.recv()
        orders.send(None)


def stop(pid):
    """Stop a process. `kill` returns while its threads may still run, for as long as a quick read takes."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    deadline_s = time.monotonic() + 60
    while any((each / "stat").read_text().rpartition(")")[2].split()[0] != "T" for each in threads):
        assert time.monotonic() < deadline_s, "the process does not stop"
        time.sleep(0.001)


class Holder:
    def __init__(self):
        (self.address,), _ = reserve_addresses("127.0.0.1", 1)
        self.orders, theirs = multiprocessing.Pipe()
        forks = multiprocessing.get_context("fork")
        self.process = forks.Process(target=hold, args=(self.address, theirs), daemon=True)
        self.process.start()

    def take_away(self, is_taken_away):
        self.orders.send(is_taken_away)
        self.orders.recv()


@pytest.fixture(scope="module")
def holders():
    """Three holders, forked before this process has an agent; TCP, where both ends have a part in a read."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = "tcp,self"
    there = [Holder() for _ in range(3)]
    for each in there:
        assert each.orders.poll(60)
        each.orders.recv()
    yield there
    for each in there:
        each.process.kill()
        each.process.join()
    del os.environ["UCX_TLS"]
    if before is not None:
        os.environ["UCX_TLS"] = before


@pytest.fixture(scope="module")
def reader(holders):
    transport = SocketTransport("secret", [NixlTransport(True)])
    yield transport
    transport.close()


def fetch(transport, holder, target, blocks, first=0, timeout_s=10.0):
    ask = Fetch("secret", "s", first, first + len(blocks), 0.05)
    return transport.fetch(holder.address, ask, target, blocks, timeout_s)


def held(target, blocks, first):
    there = [BLOCKS - 1 - (first + i) for i in range(len(blocks))]
    return all(torch.equal(own[blocks], of[there]) for own, of in zip(target.layers, caches(1), strict=True))


@needs_nixl
def test_blocks_are_read_by_number_and_no_others_are_touched(holders, reader):
    target, before = kv_memory(caches(2)), caches(2)
    blocks = [5, 9, 4, 63, 0]
    assert fetch(reader, holders[0], target, blocks, 7) == (5 * target.block_bytes, NIXL)
    assert held(target, blocks, 7)
    rest = [b for b in range(BLOCKS) if b not in blocks]
    assert all(torch.equal(own[rest], of[rest]) for own, of in zip(target.layers, before, strict=True))


@needs_nixl
def test_a_long_read_is_cut_into_pieces(holders, reader, monkeypatch):
    target = kv_memory(caches(2))
    monkeypatch.setattr(nixl, "PIECE", 3 * target.block_bytes)
    blocks = list(range(10))
    fetch(reader, holders[0], target, blocks)
    assert held(target, blocks, 0)


@needs_nixl
def test_blocks_that_were_given_away_during_the_read_fail_the_fetch(holders, reader):
    holders[0].take_away(True)
    with pytest.raises(FetchFailed, match="changed"):
        fetch(reader, holders[0], kv_memory(caches(2)), [1, 2])
    holders[0].take_away(False)
    assert fetch(reader, holders[0], kv_memory(caches(2)), [1, 2])[1] == NIXL


@needs_nixl
def test_a_silent_peer_s_read_ends_in_its_time_and_what_it_sends_later_arrives_nowhere(
    holders, reader, monkeypatch
):
    silent, target = holders[1], kv_memory(caches(2))
    fetch(reader, silent, target, [0])  # they are connected
    known = NixlTransport._peer

    def falls_silent(transport, *offer):
        stop(silent.process.pid)
        return known(transport, *offer)

    with monkeypatch.context() as patched:
        patched.setattr(NixlTransport, "_peer", falls_silent)
        with pytest.raises(FetchFailed, match=r"NIXL: no end within 1 s"):
            fetch(reader, silent, target, list(range(BLOCKS)), timeout_s=1.0)
    for layer in target.layers:
        layer.fill_(7)  # its blocks have other owners now
    os.kill(silent.process.pid, signal.SIGCONT)
    other = kv_memory(caches(2))
    for first in range(30):  # each of them lets NIXL see to all that arrives
        fetch(reader, holders[0], other, [1], first)
        way = fetch(reader, silent, other, [2], first)[1]
        assert held(other, [2], first)
    assert way == NIXL  # again
    assert all(bool((layer == 7).all()) for layer in target.layers)


@needs_nixl
def test_a_peer_that_dies_during_a_read_fails_it(holders, reader, monkeypatch):
    dies, target = holders[2], kv_memory(caches(2))
    fetch(reader, dies, target, [0])
    known = NixlTransport._peer

    def killed(transport, *offer):
        dies.process.kill()
        dies.process.join()
        return known(transport, *offer)

    monkeypatch.setattr(NixlTransport, "_peer", killed)
    with pytest.raises(FetchFailed):
        fetch(reader, dies, target, list(range(BLOCKS)), timeout_s=5.0)
    assert fetch(reader, holders[0], target, [3])[1] == NIXL


@needs_nixl
def test_where_a_peer_cannot_be_reached_sockets_carry_the_bytes(holders, reader, monkeypatch):
    target = kv_memory(caches(2))

    def unreachable(*offer):
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(NixlTransport, "_peer", unreachable)
    monkeypatch.setattr(reader._bypasses[NIXL], "_refused", set())
    for first in (0, 3):  # the second time it is known
        assert fetch(reader, holders[0], target, [8, 1], first)[1] == "local sockets"
        assert held(target, [8, 1], first)


@needs_nixl
def test_blocks_of_any_order_inside_are_runs_of_bytes_and_gaps_are_refused():
    whole = torch.zeros(4, 6, 2, 8, dtype=torch.bfloat16)
    assert nixl._layer(whole)[1:4] == [192, 192, 4]
    assert nixl._layer(whole.transpose(1, 2))[1:4] == [192, 192, 4]
    assert nixl._layer(whole[:, 2:4])[1:4] == [64, 192, 4]
    with pytest.raises(BadInput, match="do not lie in one piece"):
        nixl._layer(whole.transpose(0, 1))


def test_nixl_is_taken_for_gpus_or_where_it_was_asked_for(monkeypatch):
    made, registered = [], []

    class Agent:
        def __init__(self, is_between_hosts):
            made.append(is_between_hosts)

        def register(self, memory):
            registered.append(memory)

    monkeypatch.setattr(nixl, "NixlTransport", Agent)
    monkeypatch.setattr(nixl, "installed", lambda: "nixl_cu12")
    host, gpu = kv_memory(caches(1)), kv_memory([torch.empty(4, 2, 16, device="meta")])
    assert bypasses("auto", "tcp://10.0.0.1:1", host) == []
    assert bypasses("sockets", "tcp://10.0.0.1:1", gpu) == []
    assert len(bypasses("auto", "tcp://10.0.0.1:1", gpu)) == 1
    assert len(bypasses("nixl", "unix://name", host)) == 1
    assert len(bypasses("nixl", "tcp://10.0.0.1:1", host)) == 1
    assert made == [False, False, True]  # only an operator who asked for it reaches other hosts
    assert registered == [gpu, host, host]  # at the start: the first move does not wait for it
    monkeypatch.setattr(nixl, "installed", lambda: "")
    assert bypasses("auto", "tcp://10.0.0.1:1", gpu) == []
    with pytest.raises(BadInput, match=r"^--kv-transport nixl: not installed on \S+; pip install"):
        check_installed("nixl")


def test_nixl_steps_aside_at_the_start_where_blocks_do_not_lie_in_one_piece(monkeypatch):
    class Agent:
        def __init__(self, is_between_hosts):
            pass

        def register(self, memory):
            for tensor in memory.layers:
                nixl._layer(tensor)

    monkeypatch.setattr(nixl, "NixlTransport", Agent)
    monkeypatch.setattr(nixl, "installed", lambda: "nixl_cu12")
    apart = torch.empty(2, 4, 16, device="meta").transpose(0, 1)  # heads before blocks
    gpu = kv_memory([apart])
    assert bypasses("auto", "unix://name", gpu) == []
    with pytest.raises(BadInput, match=r"--kv-transport nixl: .*do not lie in one piece"):
        bypasses("nixl", "unix://name", gpu)


@needs_nixl
def test_a_gpu_s_blocks_are_offered_once_the_steps_before_are_computed(holders, reader):
    """With a stub of CUDA (test_memory.py), which computes late."""
    cuda = Cuda()
    memory = StagedMemory(caches(1), cuda)
    memory.step_begins()
    reader._bypasses[NIXL].offer(memory, [1])
    assert cuda.log == [("record", "engine"), ("synchronize", 0)]


@needs_nixl
def test_blocks_read_for_a_gpu_come_after_a_late_write_of_whoever_had_them(holders, reader):
    cuda, tensors = Cuda(), caches(2)
    memory = StagedMemory(tensors, cuda)
    cuda.launched.append(lambda: tensors[1][5].fill_(1))
    memory.step_begins()
    assert fetch(reader, holders[0], memory, [5], 9)[1] == NIXL
    assert held(memory, [5], 9)
    assert cuda.log[-1] == ("synchronize", "side")  # before anybody is told that they are there
