"""Processes of a host and tasks of a process: who ends with whom, what is left to a successor, memory, cores.

Workers share a host's cores out by abstract Unix sockets. Their names belong to the host and go with the
process that holds them. So a share is free again when its worker has ended, however it ended.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from controlplane.errors import BadInput

Result = TypeVar("Result")

log = logging.getLogger(__name__)
GRACE_S = 5.0
# vLLM and Ray send no usage statistics. vLLM's log goes to stderr, where `worker.failures` looks for the
# reason of a failed start: stdout is for our one line.
QUIET = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # a line of ours has the cause
}
PULSE_BYTES = 16
RECORD_VERSION = 3  # of what a core writes down for its successor
TURNS = 64  # workers that may come to hold one share of the cores
SEGMENTS = "/dev/shm/psm_"  # as Python's multiprocessing.shared_memory, and so vLLM, names them


class Tasks(set[asyncio.Task[Any]]):
    """What something has under way in the background, each task until it ends."""

    def spawn(self, work: Awaitable[Result]) -> asyncio.Task[Result]:
        """Begin it; asyncio itself would let go of a task that no other place holds."""
        task: asyncio.Task[Result] = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks; returns once they have ended."""
    under_way = tuple(tasks)
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)


async def race(*works: Awaitable[Any]) -> None:
    """Return once one of these has ended, or raise what it raised; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        await cancel_all(tasks)


def exit_with_parent(pid: int) -> None:
    """End this process when its parent, of that id, does, even if that was killed and could not say so.

    vLLM's engine and rank processes are children of the worker's; without this a `kill -9` of the worker
    would leave them running, with their memory and their ports.
    """
    try:
        parent = os.pidfd_open(pid) if os.getppid() == pid else None
    except OSError as error:
        if error.errno != errno.ESRCH:
            return  # this kernel has no pidfd
        parent = None

    def wait() -> None:
        if parent is not None:  # else it is gone already
            select.select([parent], [], [])
        unlink(shared_memory([os.getpid()]))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()


class EndsWithParent(dict[str, Any]):
    """Settings whose reader, another process, ends when its parent does: from the moment it has read them.

    An engine reads its configuration before it loads a model. One that began to watch only afterwards would
    outlive a worker that dies meanwhile, and keep its GPU.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (dict(self), os.getpid())


def _received(settings: dict[str, Any], sender: int) -> EndsWithParent:
    if sender != os.getpid():  # else it was copied
        exit_with_parent(sender)
    return EndsWithParent(settings)


# In a core's folder: the file in which the fleet's own Ray says where it is, and the fork server's socket.
OWN_RAY, FORKS = "own-ray", "forks"


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole, or not at all."""
    beside = path.with_suffix(".new")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


class Record:
    """What a core writes down for its successor, in a file that is always whole; `found` is what one left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = msgspec.json.decode(path.read_text()) if path.exists() else {}
        self._now = self.found | {"version": RECORD_VERSION}

    def part(self, name: str, kind: type[Result]) -> Result | None:
        """What an earlier core has left under a name, if anything. Raises BadInput for another version."""
        if name not in self.found:
            return None
        if (version := self.found.get("version", 1)) != RECORD_VERSION:
            expected = f"expected {RECORD_VERSION}, got {version}; start the fleet again"
            raise BadInput(f"{self._path}: version: {expected}")
        return msgspec.convert(self.found[name], kind)

    def note(self, **facts: Any) -> None:
        """Write what is so from now on: plain values, and dataclasses by their fields."""
        if any(self._now.get(name) != fact for name, fact in facts.items()):
            self._now |= facts
            try:
                replace_text(self._path, msgspec.json.encode(self._now).decode())
            except OSError as error:  # a full disk must not end what serves
                log.error("a successor of this core would not know %s: %s", ", ".join(facts), error)


class Pulse:
    """What cores show their supervisor, in memory they share: that one has served, and that one runs."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the memory of a pulse that another process has made."""
        self.descriptor = os.memfd_create("tokenfleet-pulse") if descriptor is None else descriptor
        if descriptor is None:
            os.truncate(self.descriptor, PULSE_BYTES)
        self._shared = memoryview(mmap(self.descriptor, PULSE_BYTES)).cast("d")

    def serves(self) -> None:
        """This core serves: from now on another takes the place of one that dies."""
        self._shared[1] += 1.0

    async def show(self) -> None:
        """This core's loop runs, until cancelled."""
        while True:
            self._shared[0] = time.monotonic()
            await asyncio.sleep(1.0)

    @property
    def served(self) -> float:
        """How many cores have served."""
        return self._shared[1]

    @property
    def shown_s(self) -> float:
        """When a core last showed that it runs."""
        return self._shared[0]


@dataclass(frozen=True, slots=True)
class Estate:
    """What is there before a core and outlives it: `number` cores have been, with this one.

    `folder`: for this user alone. `listening`, `control`: the bound sockets of clients and of operators.
    `loads`: the descriptor of the table of gateways' loads.
    """

    number: int
    folder: Path
    listening: socket.socket
    control: socket.socket
    loads: int
    record: Record
    pulse: Pulse


def descendants(of: int | None = None) -> list[int]:
    """The ids of all processes below one, by default this."""
    import psutil  # of the live packages: `serve` names them where they are missing

    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(of).children(recursive=True)]
    return []


def free_memory_bytes() -> int:
    """The memory that this machine can still give."""
    return 1024 * int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0])


def cpu_s(processes: Iterable[int]) -> dict[int, float]:
    """Processor seconds that each of these processes has used, all its threads together."""
    spent: dict[int, float] = {}
    for pid in processes:
        with suppress(OSError):  # it has ended meanwhile
            # The kernel's own number for a process' clock, as clock_getcpuclockid(3) makes it.
            spent[pid] = time.clock_gettime((~pid << 3) | 2)
    return spent


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """The named shared memory that these processes have mapped."""
    segments: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            segments |= {Path(line.split()[-1]) for line in lines if f" {SEGMENTS}" in line}
    return segments


def unlink(segments: Iterable[Path]) -> None:
    """Remove named shared memory; what is gone already is no error."""
    for segment in segments:
        segment.unlink(missing_ok=True)


class Cores:
    """The cores of this node that a worker has claimed, for as long as its process lives."""

    def __init__(self, ranks: int, shares: int, fleet: str, cores: Sequence[int] | None = None) -> None:
        """Claim one of `shares` equal parts of the node's cores for each rank; `fleet` is its secret.

        Where there are more cores than parts, the first is left to what is no engine. It would compute there
        anyway, and every step of an engine waits for the slowest of its threads.
        """
        cores = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
        cores = cores[1:] if len(cores) > shares else cores
        width = max(1, len(cores) // max(1, shares))
        cut = [cores[i : i + width] for i in range(0, len(cores) - width + 1, width)]
        self._claims: list[socket.socket] = []
        name = f"tokenfleet-cores-{hashlib.sha256(fleet.encode()).hexdigest()[:16]}"
        taken = [cut[self._claim(name, len(cut))] for _ in range(ranks)]
        self.binding = "|".join(",".join(map(str, share)) for share in taken)

    def _claim(self, name: str, shares: int) -> int:
        """Take the first share that is free in the first turn: a worker launched late finds the gap."""
        for turn in range(TURNS):
            for share in range(shares):
                claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                try:
                    claim.bind(f"\0{name}-{share}-{turn}")
                except OSError:
                    claim.close()
                else:
                    self._claims.append(claim)
                    return share
        return 0


class RayDaemon:
    """The raylet that started this process. Without it the actor cannot be reached to end it."""

    def __init__(self, name: str = "raylet") -> None:
        parent = os.getppid()
        is_daemon = Path(f"/proc/{parent}/comm").read_text().strip() == name
        self._pid = parent if is_daemon else 0  # started by something else, its end is not ours to judge

    @property
    def is_gone(self) -> bool:
        return self._pid != 0 and os.getppid() != self._pid
