"""The fork server: a process that has loaded what others need, and forks each of them from itself on demand.

A process forked from it begins within a moment and shares the loaded modules' memory with all others. A
program of its own would load vLLM for ten seconds into hundreds of megabytes. The server must stay free of
threads: they do not come along in a fork, and a pool that had some would wait for them for ever. So it only
waits, for orders on a Unix socket and for the ends of its children.

An order is a line, the job's name, and the job's settings up to the end of what the asker writes. The answer
is two lines: the process's id, and its exit code once it has ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

Job = Callable[[bytes], int]  # from its settings to its exit code
PASSED_ON = signal.SIGUSR1  # to the parent: the server got a SIGTERM that was meant for all
SIGNS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, PASSED_ON)
LOST = 70  # the exit code where the server has died and the process's own is unknown
ORDER_S = 5.0  # an asker has written its order long before
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def ask_kernel(option: int, value: int | bytes) -> None:
    """Call prctl(2); on a kernel without the option nothing happens."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def fork(name: str, run: Callable[[], int]) -> int:
    """Fork a process that runs this and exits with what it returns, or with its parent; return its id.

    Signals must be blocked by the caller.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ask_kernel(PR_SET_NAME, name.encode())
        ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
        os.setpgrp()  # Ctrl-C is for the first process, which tells the others
        signal.set_wakeup_fd(-1)
        for sign in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(sign, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNS)
        if os.getppid() == parent:  # else it has died before it could be followed
            code = run()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended() -> Iterator[tuple[int, int]]:
    """The ids and the exit codes of the children that have ended."""
    with suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            yield one[0], os.waitstatus_to_exitcode(one[1])


def serve_forks(at: Path, jobs: Mapping[str, Job]) -> None:
    """Fork a process for each order at the socket `at`, until SIGTERM. `SIGNS` must be blocked until now."""
    parent = os.getppid()
    gc.collect()
    gc.freeze()  # what is loaded stays shared with what is forked
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(at))
    listening.listen(64)
    waking, woken = os.pipe()
    for end in (waking, woken):
        os.set_blocking(end, False)
    over: list[int] = []

    def end_with_all(sign: int, _: object) -> None:
        """A SIGTERM is meant for all: this command line is the fleet's, so `pkill` finds it first."""
        over.append(sign)
        if os.getppid() == parent:
            os.kill(parent, PASSED_ON)

    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, end_with_all)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda sign, frame: None)
    askers: dict[int, socket.socket] = {}

    def alone(job: Job, settings: bytes) -> int:
        """Run a job with none of the server's own descriptors."""
        os.close(waking)
        os.close(woken)
        for one in (listening, *askers.values()):
            one.close()
        return job(settings)

    # Its own end, before that of its children, would be theirs; without its parent that is what is wanted.
    while not over or (askers and os.getppid() == parent):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNS)
        ready, _, _ = select.select([listening.fileno(), waking], [], [])
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNS)
        if waking in ready:
            os.read(waking, 1 << 16)
        for pid, code in ended():
            if (asker := askers.pop(pid, None)) is not None:
                _answer(asker, code)
                asker.close()
        if listening.fileno() in ready:
            asker, _ = listening.accept()
            name, _, settings = _order(asker).partition(b"\n")
            if (job := jobs.get(name.decode())) is None:
                asker.close()
                continue
            askers[-1] = asker  # so that the child closes it, too
            pid = fork(name.decode(), partial(alone, job, settings))
            askers[pid] = askers.pop(-1)
            _answer(asker, pid)


def _order(asker: socket.socket) -> bytes:
    asker.settimeout(ORDER_S)
    pieces = []
    with suppress(OSError):
        while piece := asker.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def _answer(asker: socket.socket, number: int) -> None:
    with suppress(OSError):  # the asker is gone
        asker.sendall(b"%d\n" % number)


class Forked:
    """A process that a fork server has forked for this one."""

    def __init__(self, pid: int, code: asyncio.Task[int]) -> None:
        self.pid, self._code = pid, code

    @classmethod
    async def start(cls, at: Path, job: str, settings: bytes = b"") -> Forked:
        """Order it from the server at `at`. Raises OSError where that has no such job, or is gone."""
        reader, writer = await asyncio.open_unix_connection(str(at))
        writer.write(job.encode() + b"\n" + settings)
        writer.write_eof()

        async def code() -> int:
            line = await reader.readline()
            writer.close()
            return int(line or LOST)

        pid = await reader.readline()
        if not pid:
            writer.close()
            raise OSError(f"the fork server has started no {job}")
        return cls(int(pid), asyncio.ensure_future(code()))

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.shield(self._code)

    def send_signal(self, sign: int) -> None:
        """Raises ProcessLookupError where it is gone."""
        if self.returncode is None:
            os.kill(self.pid, sign)
