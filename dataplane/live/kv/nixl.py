"""KV by NIXL: a rank reads another's blocks, by number, out of registered memory over what UCX finds there:
RDMA, NVLink, shared memory or TCP.

`NixlTransport` is a bypass (direct.py) of the connection on which a fetch is asked for and granted. An offer
carries the holder's agent, where its layers lie, and the numbers of the granted blocks, msgpack:

    [agent, metadata, kind of memory, layers, numbers]
    of each layer: [address, bytes of a block, stride, blocks, device]

Memory is registered once. A peer's layers are prepared once, one strided descriptor a layer, and a read then
names blocks of it. The holder asks whether its grant still holds after the reader has told that it is done:
NIXL itself sees no preemption.

A read from an unresponsive peer stays "in progress" for ever in NIXL. Once the peer responds again its bytes
arrive, even after the read has been released and the peer removed (NIXL 1.5.1; tests). So nothing is read
into the cache itself: reads go into slots, separate buffers on the cache's device, and are copied from there.
A read that has not ended in its time is given up with its slot. The slot is used again once NIXL says that
the read has ended; until then that peer is left to sockets.

NIXL's own progress thread would take a core of each rank. Without it both ends call into NIXL while a read
goes on: over TCP the holder's part of it is done there.

UCX takes no secret and encrypts nothing: what reaches its ports can read and write what is registered. So
where an engine serves its own host alone, UCX is kept to the loopback device, and between hosts NIXL is used
only where that was asked for.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, util
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput

if TYPE_CHECKING:  # who only asks whether NIXL is there need not load torch
    import torch

    from dataplane.live.kv.direct import Copy
    from dataplane.live.kv.memory import KvMemory

log = logging.getLogger(__name__)
NIXL = "NIXL"
Asked = Literal["auto", "nixl", "sockets"]
# The package is called nixl where its meta package is installed, else by its CUDA.
PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
PIECE = 16 << 20  # bytes of one read, and of a slot; RDMA takes them in a millisecond
SLOTS = 4  # reads at once
SOONEST_S, LATEST_S = 2e-5, 2e-3  # between two calls into NIXL
COMPARED, COMPARED_S = (4, 1024, 16 << 10), 10.0  # layers, blocks, bytes of one; the time of a copy
WORTH = 1.2  # times the speed of another way


Layers = Sequence[Sequence[int]]  # of each: address, bytes of a block, stride, blocks, device


@dataclass(frozen=True, slots=True)
class _Peer:
    """A holder whose layers are prepared."""

    name: str
    layers: Layers
    prepared: Any


@dataclass(frozen=True, slots=True)
class _Slot:
    """A buffer that is registered and prepared: `parts` of it for each layer's blocks."""

    layers: Layers
    parts: list[torch.Tensor]
    prepared: Any


@dataclass(frozen=True, slots=True)
class _Own:
    """A memory of ours that is registered. `flat`: its layers, each block a row of bytes."""

    layers: Layers
    kind: str
    flat: list[torch.Tensor]
    slots: Queue[_Slot]
    slot_blocks: int


class NixlTransport:
    """A rank's NIXL agent. `is_between_hosts`: peers on other hosts are reached too, in the clear."""

    way = NIXL

    def __init__(self, is_between_hosts: bool) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        if not is_between_hosts:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # which UCX reads as its agent is made
        api = import_module(f"{installed()}._api")
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)
        self._is_between_hosts = is_between_hosts
        self._agent = api.nixl_agent(f"tokenfleet-{uuid4().hex}", config)
        self._lock = threading.Lock()  # of what follows
        self._own: dict[int, _Own] = {}
        self._peers: dict[str, _Peer] = {}
        self._refused: set[str] = set()  # agents that sockets are left for
        self._given_up: list[tuple[_Own, _Slot, _Peer, Any]] = []

    def register(self, memory: KvMemory) -> _Own:
        """Register a memory, the first time. Raises BadInput where its blocks are no runs of bytes."""
        with self._lock:
            if (known := self._own.get(id(memory))) is None:
                known = self._own[id(memory)] = self._registered(memory)
        return known

    def _registered(self, memory: KvMemory) -> _Own:
        import torch

        layers = [_layer(tensor) for tensor in memory.layers]
        device = memory.layers[0].device
        kind = "DRAM" if device.type == "cpu" else "VRAM"
        # Layers may lie between each other; what they were allocated in does not.
        pools = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in memory.layers}
        self._agent.register_memory([(at, size, device.index or 0, "") for at, size in pools.items()], kind)
        flat = [
            tensor.as_strided((tensor.shape[0], size), (tensor.stride(0), 1))
            for tensor, (_, size, *_) in zip(memory.layers, layers, strict=True)
        ]
        slots, blocks = Queue[_Slot](), max(1, PIECE // memory.block_bytes)
        for _ in range(SLOTS):
            parts = [torch.empty((blocks, row.shape[1]), dtype=torch.uint8, device=device) for row in flat]
            places = [_layer(part) for part in parts]
            self._agent.register_memory([(at, size * n, gpu, "") for at, size, _, n, gpu in places], kind)
            slots.put(_Slot(places, parts, self._agent.prep_xfer_dlist("", _strided(places), kind)))
        return _Own(layers, kind, flat, slots, blocks)

    # As the holder

    def offer(self, memory: KvMemory, blocks: Sequence[int]) -> tuple[bytes, Any]:
        own = self.register(memory)
        memory.settle()
        told = [self._agent.name, self._agent.get_agent_metadata(), own.kind, own.layers, list(blocks)]
        return msgspec.msgpack.encode(told), None

    def lend(self, connection: socket.socket) -> None:
        began_s = time.monotonic()
        while not select.select([connection], [], [], 0)[0]:
            self._agent.get_new_notifs()
            time.sleep(_pause_s(began_s))

    # As the reader

    def reaches(self, connection: socket.socket) -> bool:
        return self._is_between_hosts or connection.family == socket.AF_UNIX

    def take(self, connection: socket.socket, offer: bytes, copy: Copy) -> bool:
        name, metadata, kind, layers, theirs = msgspec.msgpack.decode(offer)
        memory, blocks = copy.memory, copy.blocks
        own = self.register(memory)
        self._collect()
        if name in self._refused or [layer[1] for layer in layers] != [layer[1] for layer in own.layers]:
            return False
        try:
            peer = self._peer(name, metadata, kind, layers)
        except Exception as error:  # NIXL has a dozen kinds of its own, without a base
            log.warning("KV goes over sockets: NIXL does not reach a peer (%s)", error)
            self._refused.add(name)
            return False
        for begin in range(0, len(blocks), own.slot_blocks):
            copy.pacer.wait(begin * memory.block_bytes)
            piece = slice(begin, begin + own.slot_blocks)
            try:
                slot = own.slots.get(timeout=copy.timeout_s)
            except Empty:
                return False
            self._read(own, slot, peer, theirs[piece], copy.timeout_s)
            try:
                _copy(slot, own, memory, blocks[piece])
            finally:
                own.slots.put(slot)
        copy.pacer.wait(len(blocks) * memory.block_bytes)
        return True

    def _peer(self, name: str, metadata: bytes, kind: str, layers: Layers) -> _Peer:
        with self._lock:
            known = self._peers.get(name)
            if known is None or known.layers != layers:
                self._agent.add_remote_agent(metadata)
                known = _Peer(name, layers, self._agent.prep_xfer_dlist(name, _strided(layers), kind))
                self._peers[name] = known
        return known

    def _read(self, own: _Own, slot: _Slot, peer: _Peer, blocks: Sequence[int], timeout_s: float) -> None:
        """Read a peer's blocks into a slot, which is ours again only then. Raises OSError."""
        began_s = time.monotonic()
        handle = None
        try:
            numbers = _numbers(slot.layers, range(len(blocks))), _numbers(peer.layers, blocks)
            handle = self._agent.make_prepped_xfer(
                "READ", slot.prepared, numbers[0], peer.prepared, numbers[1]
            )
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() - began_s <= timeout_s:
                time.sleep(_pause_s(began_s))
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            self._give_up(own, slot, peer, handle)
            raise ConnectionError(f"NIXL: {error}") from error
        if state != "DONE":
            self._give_up(own, slot, peer, handle)
            raise TimeoutError(f"NIXL: no end within {timeout_s:g} s")
        self._agent.release_xfer_handle(handle)

    def _give_up(self, own: _Own, slot: _Slot, peer: _Peer, handle: Any) -> None:
        """Keep what a read may still write to until it has ended, and leave the peer to sockets meanwhile."""
        with self._lock:
            self._given_up.append((own, slot, peer, handle))
            self._refused.add(peer.name)

    def _collect(self) -> None:
        """Reuse the slots and peers whose reads have ended after all. A peer that is gone connects again."""
        with self._lock:
            waits, self._given_up = self._given_up, []
            for own, slot, peer, handle in waits:
                state = "ERR"
                if handle is not None:
                    with suppress(Exception):
                        state = self._agent.check_xfer_state(handle)
                if state == "PROC":
                    self._given_up.append((own, slot, peer, handle))
                    continue
                with suppress(Exception):
                    self._agent.release_xfer_handle(handle)
                if state != "DONE" and self._peers.pop(peer.name, None) is not None:
                    with suppress(Exception):
                        self._agent.remove_remote_agent(peer.name)
                own.slots.put(slot)
                self._refused.discard(peer.name)


def installed() -> str:
    """The name of NIXL's package here; empty if there is none."""
    return next((name for name in PACKAGES if util.find_spec(name) is not None), "")


def bypasses(asked: Asked, address: str, memory: KvMemory) -> list[NixlTransport]:
    """The ways around sockets that a rank at this address has in addition to its host's own.

    `auto`: NIXL within a host, for KV in GPUs; between host memories it loses to sockets. The memory is
    registered here: at the first move the engine's steps and the holder's time would wait for it. Raises
    BadInput where NIXL was asked for and is not to be had, or not for blocks of this layout.
    """
    is_on_gpu = memory.layers[0].device.type != "cpu"
    if asked == "sockets" or (asked == "auto" and not (is_on_gpu and installed())):
        return []
    try:
        around = NixlTransport(asked == "nixl" and address.startswith("tcp:"))
        around.register(memory)
        return [around]
    except Exception as error:  # NIXL has a dozen kinds of its own, without a base
        if asked == "nixl":
            raise BadInput(f"--kv-transport nixl: {error}") from error
        log.warning("KV goes over sockets: %s", error)
        return []


def check_installed(asked: Asked) -> None:
    """Raise BadInput where NIXL was asked for and is not there."""
    if asked == "nixl" and not installed():
        where = socket.gethostname()
        raise BadInput(f"--kv-transport nixl: not installed on {where}; pip install 'tokenfleet[nixl]'")


def compare() -> list[str]:
    """How fast KV goes between two processes of this host by each way, and which of them a fleet here takes.

    It forks: to be called in a process that has done nothing else. KV lies in GPUs where PyTorch sees some.
    """
    import torch

    from dataplane.live.engine_api.processes import exit_with_parent
    from dataplane.live.kv.memory import BlockTables, kv_memory
    from dataplane.live.kv.transport import Fetch, SocketTransport, reserve_addresses

    def memory(number: int) -> KvMemory:
        gpus = torch.cuda.device_count()
        where = f"cuda:{number % gpus}" if gpus else "cpu"
        return kv_memory([torch.ones(blocks, size, dtype=torch.uint8, device=where) for _ in range(layers)])

    (layers, blocks, size), rounds = COMPARED, 6
    (address,), _ = reserve_addresses("127.0.0.1", 1)
    told, tells = os.pipe()
    holder = os.fork()
    if not holder:
        exit_with_parent(os.getppid())
        tables = BlockTables()
        tables.update({"trial": list(range(blocks))[::-1]}, ())
        SocketTransport("", [NixlTransport(False)]).serve(address, tables, memory(0))
        os.write(tells, b"1")
        signal.pause()
    try:
        os.read(told, 1)
        own, asks, speeds = memory(1), Fetch("", "trial", 0, blocks), dict[str, float]()
        for around in ([], [NixlTransport(False)]):
            for _ in range(rounds):  # the first connects
                began_s = time.monotonic()
                moved, way = SocketTransport("", around).fetch(address, asks, own, range(blocks), COMPARED_S)
                speeds[way] = max(speeds.get(way, 0.0), moved / (time.monotonic() - began_s))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    taken = NIXL if own.layers[0].device.type != "cpu" else next(iter(speeds))
    best = max(speeds, key=lambda way: speeds[way])
    said = [f"{way} {speed / 1e9:.2f} GB/s" for way, speed in speeds.items()]
    said.append(f"--kv-transport auto takes {taken}")
    if speeds[best] > WORTH * speeds.get(taken, 0.0):
        said.append(f"{best} is faster: --kv-transport {'nixl' if best == NIXL else 'sockets'}")
    return said


def _layer(tensor: torch.Tensor) -> Sequence[int]:
    """Where a layer lies: address, bytes of a block, bytes from one block to the next, blocks, device."""
    block = tensor[0]
    dims = sorted(zip(block.stride(), block.shape, strict=True))
    span = 1
    for stride, size in dims:
        if size > 1 and stride != span:
            raise BadInput(f"NIXL: blocks of shape {tuple(block.shape)} do not lie in one piece")
        span *= size
    bytes_each = tensor.element_size()
    device = tensor.device.index or 0
    return [tensor.data_ptr(), span * bytes_each, tensor.stride(0) * bytes_each, tensor.shape[0], device]


def _strided(layers: Layers) -> NDArray[np.uint64]:
    """NIXL's form of them: address, bytes, device, stride and count of each layer's blocks."""
    rows = [(address, size, device, stride, blocks) for address, size, stride, blocks, device in layers]
    return np.array(rows, np.uint64)


def _numbers(layers: Layers, blocks: Sequence[int]) -> NDArray[np.int32]:
    """Numbers of these blocks of every layer, in the order that they are prepared in."""
    before = np.cumsum([0, *(layer[3] for layer in layers[:-1])])
    numbers: NDArray[np.int32] = (before[:, None] + np.asarray(blocks)[None, :]).ravel().astype(np.int32)
    return numbers


def _copy(slot: _Slot, own: _Own, memory: KvMemory, blocks: Sequence[int]) -> None:
    import torch

    from dataplane.live.kv.memory import as_words

    with memory.beside_steps():
        index = torch.tensor(list(blocks), device=own.flat[0].device)
        for rows, part in zip(own.flat, slot.parts, strict=True):
            as_words(rows).index_copy_(0, index, as_words(part[: len(blocks)]))


def _pause_s(began_s: float) -> float:
    """The next nap of a wait: short reads are seen at once, and long ones leave the core to others."""
    return min(max((time.monotonic() - began_s) / 50, SOONEST_S), LATEST_S)
