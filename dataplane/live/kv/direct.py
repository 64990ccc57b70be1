"""One-copy transport of KV bytes: reading the memory of another process of the machine, at a limited rate.

A `Bypass` is a way for a payload around the connection on which it is asked for. This module has the
kernel's, `process_vm_readv` (Linux). It needs nothing of the process that is read, whose core may be busy
computing, and takes half the work of a socket. The kernel allows it between processes of one user, unless a
policy forbids it (Yama's ptrace_scope, a container's seccomp profile); then the socket carries the bytes.

The kernel itself says from the socket which process to read (`peer`): a number that was sent could mean
another process, in another container.

On a host whose cores are the accelerator a copy lengthens steps: it takes its processor time from the engines
that compute there. Bytes per second show little of that, since the time a byte takes depends on the machine.
So a copy, by memory or by socket, counts the processor time it used. It pauses (`Pacer`) until that is a
small share of the time that has passed.

On a GPU host cores idle, and one thread copies slower than the bus. There a few threads read the slices of a
large piece at once, unless its copy has a bound: then the thread that pauses is the one that reads.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dataplane.live.engine_api.kv_messages import UNBOUND, CopyRate
from dataplane.live.kv.memory import KvMemory

log = logging.getLogger(__name__)

Places = NDArray[np.uint64]  # [runs, 2]: address and bytes of each, as the kernel's iovec has them
PIECE = 1 << 20  # bytes per call, between two looks at the pace; more at once is no cheaper
SLICE = 4 << 20  # bytes per call of a thread that reads while others do; smaller reads are not cut
MAX_RUNS = 1024  # per call, Linux' IOV_MAX
MAX_PLACES = 32_768  # runs of bytes; more are sent
MEMORY = "process memory"
# EFAULT: pinned pages that some drivers and sandboxes do not let another process read.
_REFUSALS = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EFAULT)
_libc: Any = ctypes.CDLL(None, use_errno=True)


class Share:
    """The time that the copies of one process have used together; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = float("-inf")

    def wait_s(self, now_s: float, worked_s: float, share: float) -> float:
        """Seconds to pause after work of `worked_s` that ended now."""
        with self._lock:
            self._free_s = max(self._free_s, now_s - worked_s) + worked_s / share
            return self._free_s - now_s


class Pacer:
    """The pauses of one copy, made in the thread that copies."""

    def __init__(self, pace: CopyRate, share: Share) -> None:
        self._pace, self._share = pace, share
        self._began_s, self._worked_s = time.monotonic(), time.thread_time()

    @property
    def is_bound(self) -> bool:
        """Whether there is anything to pause for."""
        return self._pace.bytes_per_s > 0 or self._pace.share < 1

    def wait(self, done: int) -> None:
        """Pause before the first piece and after each; `done` are the bytes copied so far."""
        pace = self._pace
        if not self.is_bound:
            return
        now_s, worked_s = time.monotonic(), time.thread_time()
        elapsed_s = now_s - self._began_s
        rest_s = 0.0
        if pace.bytes_per_s > 0:
            rest_s = done / pace.bytes_per_s - elapsed_s
        if pace.share < 1:
            rest_s = max(rest_s, self._share.wait_s(now_s, worked_s - self._worked_s, pace.share))
        if pace.least_bytes_per_s > 0:
            rest_s = min(rest_s, done / pace.least_bytes_per_s - elapsed_s)
        if rest_s > 0:
            time.sleep(rest_s)
        self._worked_s = worked_s


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks of a reader's memory that are to be filled, and how fast; `timeout_s` bounds each wait."""

    memory: KvMemory
    blocks: Sequence[int]
    pacer: Pacer
    timeout_s: float


class Bypass(Protocol):
    """A way for the payload of a fetch around the connection, between two processes that both have it."""

    @property
    def way(self) -> str:
        """Its name, the same at both ends."""

    def reaches(self, connection: socket.socket) -> bool:
        """Whether the process at the other end may be reached this way, which is asked of the reader."""

    def offer(self, memory: KvMemory, blocks: Sequence[int]) -> tuple[bytes, Any]:
        """Where the blocks lie, empty if they are not to be had; and what must live until they are read."""

    def lend(self, connection: socket.socket) -> None:
        """The holder has told where they lie; return when the reader has something to say."""

    def take(self, connection: socket.socket, offer: bytes, copy: Copy) -> bool:
        """Fill the blocks; False where it cannot be done this way. Raises OSError if it has failed."""


class ProcessMemory:
    """The bypass between two processes of one host and user."""

    way = MEMORY

    def __init__(self) -> None:
        self._is_allowed = True  # until the kernel says no
        cores = len(os.sched_getaffinity(0))
        # Threads start with the first large read. They end when this object does.
        self._pool = ThreadPoolExecutor(min(4, cores // 4), "kv-read") if cores >= 8 else None

    def reaches(self, connection: socket.socket) -> bool:
        return self._is_allowed and peer(connection) != 0

    def offer(self, memory: KvMemory, blocks: Sequence[int]) -> tuple[bytes, Any]:
        views, wait = memory.read(blocks)
        if len(views) > MAX_PLACES:
            return b"", None
        for view in range(len(views)):
            wait(view)  # the reader will not ask
        return places(views).tobytes(), views

    def lend(self, connection: socket.socket) -> None:
        """The kernel needs nothing of who is read."""

    def take(self, connection: socket.socket, offer: bytes, copy: Copy) -> bool:
        views, commit = copy.memory.write(copy.blocks)
        source = np.frombuffer(offer, np.uint64).reshape(-1, 2)
        pool = None if copy.memory.layers[0].device.type == "cpu" else self._pool
        try:
            read(peer(connection), source, views, copy.pacer, pool)
        except NotAllowed as error:
            log.info("KV goes over sockets: this machine does not let processes read each other (%s)", error)
            self._is_allowed = False
            return False
        commit()
        return True


class NotAllowed(OSError):
    """This process may not read the other's memory; nothing was read."""


def places(views: Sequence[memoryview]) -> Places:
    """Where these views, writable ones, lie in this process."""
    addresses = [(ctypes.addressof(ctypes.c_char.from_buffer(v)), v.nbytes) for v in views]
    return np.array(addresses, np.uint64).reshape(-1, 2)


def peer(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket, 0 if it is not visible from here or no Unix socket."""
    return _credentials(connection)[0] if connection.family == socket.AF_UNIX else 0


def peer_user(connection: socket.socket) -> int:
    """The user whose process is at the other end of a Unix socket."""
    return _credentials(connection)[1]


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    """Process, user and group at the other end of a Unix socket."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))


def read(
    pid: int,
    source: Places,
    into: Sequence[memoryview],
    pacer: Pacer | None = None,
    pool: Executor | None = None,
) -> None:
    """Fill `into` with the bytes at `source` in process `pid`; both hold as many.

    A large read without a bound is cut into slices for the threads of `pool`. Raises NotAllowed before the
    first byte, and OSError if the process has ended or the places are not its own.
    """
    ours, theirs = _aligned(places(into), source)
    sizes = ours[:, 1]

    def fill(first: int, last: int) -> int:
        received, want = _readv(pid, ours[first:last], theirs[first:last]), int(sizes[first:last].sum())
        if received < 0:
            error = ctypes.get_errno()
            kind = NotAllowed if error in _REFUSALS and first == 0 else OSError
            raise kind(error, os.strerror(error))
        if received != want:
            raise OSError(f"{received} of {want} bytes could be read of process {pid}")
        return received

    pacer = pacer or Pacer(UNBOUND, Share())
    calls, done = _calls(sizes, PIECE), 0
    if pool is None or pacer.is_bound or sizes.sum() < SLICE:
        pacer.wait(done)
        for first, last in calls:
            done += fill(first, last)
            pacer.wait(done)
        return
    fill(*calls[0])  # alone: where the kernel refuses, nothing has been written
    slices = [pool.submit(fill, *each) for each in _calls(sizes, SLICE, calls[0][1])]
    wait(slices)  # of one that fails, too: no thread may write into `into` once this has ended
    while slices:  # by `pop`: an error that this frame refers to would keep `into`, a slot of a ring
        slices.pop().result()


def _readv(pid: int, ours: Places, theirs: Places) -> int:
    pointers = [ctypes.c_void_p(runs.ctypes.data) for runs in (ours, theirs)]
    count = ctypes.c_ulong(len(ours))
    call = _libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    return int(call(ctypes.c_int(pid), pointers[0], count, pointers[1], count, ctypes.c_ulong(0)))


def _aligned(target: Places, source: Places) -> tuple[Places, Places]:
    """Both sides, cut at each other's ends and at every PIECE: run i of one fills run i of the other."""
    ends = [np.cumsum(side[:, 1].astype(np.int64)) for side in (target, source)]
    total = int(ends[0][-1]) if len(ends[0]) else 0
    if not len(ends[1]) or int(ends[1][-1]) != total:
        raise OSError("as many bytes are needed on both sides")
    cuts = np.unique(np.concatenate([*ends, np.arange(PIECE, total, PIECE)]))
    starts = np.concatenate([[0], cuts[:-1]])
    sides = []
    for side, end in zip((target, source), ends, strict=True):
        run = np.searchsorted(end, starts, side="right")
        begin = end - side[:, 1].astype(np.int64)
        address = side[run, 0] + (starts - begin[run]).astype(np.uint64)
        sides.append(np.column_stack([address, (cuts - starts).astype(np.uint64)]))
    return sides[0], sides[1]


def _calls(sizes: NDArray[np.uint64], most: int, start: int = 0) -> list[tuple[int, int]]:
    """Runs [first, last) of each call, from run `start` on: at most `most` bytes and MAX_RUNS runs."""
    calls, first, size = [], start, 0
    for at, run in enumerate(sizes[start:].tolist(), start):
        if size + run > most or at - first == MAX_RUNS:
            calls.append((first, at))
            first, size = at, 0
        size += run
    if first < len(sizes):
        calls.append((first, len(sizes)))
    return calls
