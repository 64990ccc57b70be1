"""The keeper of a process: it starts one, waits until it is ready, and replaces it when it ends.

Supervisor, portfolio, controller and gateways are kept by it, each by a `Spec`. Programs get their settings
through a pipe: settings may hold keys, and other users can read a command line but no pipe. A `helper` works
for one question and ends with the process that asked it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from dataplane.startup import child_environment

MAX_LINE_BYTES = 64 << 20


class Process(Protocol):
    """As much of asyncio's Process as a keeper needs."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, signal: int) -> None: ...


P = TypeVar("P", bound=Process)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses before a replacement: none after a life of `young_s`, else doubled from `first_s` on."""

    first_s: float = 1.0
    longest_s: float = 30.0
    young_s: float = 30.0

    def after(self, last_s: float, lived_s: float = 0.0) -> float:
        """The pause after a life of `lived_s`; `last_s` is the pause before that life."""
        return min(self.longest_s, max(self.first_s, 2 * last_s)) if lived_s < self.young_s else 0.0


PAUSES = Pauses()


@dataclass(frozen=True, slots=True)
class End(Generic[P]):
    """The end of a process: `code` is None where it was not ready; `why` reads after its name.

    `pause_s`: the time until the next one would be started.
    """

    process: P | None
    code: int | None
    why: str
    pause_s: float


async def _at_once(process: Process) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Spec(Generic[P]):
    """How a process is kept. `on_end` returns whether another is to take its place.

    `start` raises OSError where there can be none. `ready` returns once the process can be used, or False
    where it will not be: it is then killed, and counts as one that has ended.
    """

    start: Callable[[], Awaitable[P]]
    on_end: Callable[[End[P]], bool]
    ready: Callable[[P], Awaitable[bool]] = _at_once
    on_ready: Callable[[P], None] = lambda process: None
    pauses: Pauses = PAUSES


class Keeper(Generic[P]):
    """Keeps one process running; `process` is there while one runs."""

    def __init__(self, spec: Spec[P], process: P | None = None) -> None:
        """`process`: one that is ready already."""
        self.process = process
        self._spec = spec
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep it running."""
        self._keeping = asyncio.get_running_loop().create_task(self.run())

    async def close(self, grace_s: float) -> None:
        """Keep it no longer, and end it."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))
        if self.process is not None:
            await end(self.process, grace_s)

    async def run(self) -> None:
        """Return once no other is to take its place."""
        pause_s = 0.0
        while True:
            began_s = time.monotonic()
            code, why = await self._life()
            process, self.process = self.process, None
            pause_s = self._spec.pauses.after(pause_s, time.monotonic() - began_s)
            if not self._spec.on_end(End(process, code, why, pause_s)):
                return
            await asyncio.sleep(pause_s)

    async def _life(self) -> tuple[int | None, str]:
        """One process from its start, or from now where it runs, to its end."""
        if self.process is None:
            try:
                self.process = process = await self._spec.start()
            except OSError as error:
                return None, f"could not be started: {error}"
            if not await self._spec.ready(process):
                await end(process, 0.0)
                return None, "did not start"
            self._spec.on_ready(process)
        code = await self.process.wait()
        return code, f"ended with {code}"


def tell(process: Process, sign: int) -> None:
    """Send a signal to a process that may have ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(sign)


async def end(process: Process, grace_s: float) -> None:
    """Let a process end by itself within `grace_s`, then kill it; returns once it has ended."""
    if grace_s > 0:
        tell(process, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    tell(process, signal.SIGKILL)
    await process.wait()


class Inherited:
    """A process that another one has started."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError where it is gone."""
        self.pid = pid
        self.returncode: int | None = None
        self._fd = os.pidfd_open(pid)
        self._over = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.returncode = -1  # the kernel tells its parent alone
        self._over.set()

    async def wait(self) -> int:
        """Return once it has ended."""
        await self._over.wait()
        return -1

    def send_signal(self, sign: int) -> None:
        """Raises ProcessLookupError where it is gone."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._fd, sign)


# Programs.


async def program(module: str, *words: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a program of ours, whose stdin is a pipe. Raises OSError.

    It makes itself the leader of a process group, so that Ctrl-C does not reach it. It stays in our session,
    since Linux may share the processors out by session (autogroups). Engines then kept a controller in a
    session of its own waiting for seconds (Linux 6.18).
    """
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words),
        stdin=asyncio.subprocess.PIPE,
        env=child_environment(),
        limit=MAX_LINE_BYTES,
        **options,
    )


def told(process: asyncio.subprocess.Process, settings: bytes, stays_open: bool = False) -> None:
    """Write settings to a program's stdin; one that has ended meanwhile has an exit code to say so."""
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(settings)
        if not stays_open:
            process.stdin.close()


@asynccontextmanager
async def helper(module: str, *words: str, line: bytes = b"") -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that answers on stdout. It ends, with all of its group, when this context does.

    `line` is what it reads first. Its stdin stays open until then, so that `end_with_asker` ends it however
    this process ends.
    """
    process = await program(module, *words, stdout=asyncio.subprocess.PIPE)
    try:
        told(process, line, stays_open=True)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it may have others that work for it
        tell(process, signal.SIGKILL)  # it may lead no group yet
        await asyncio.shield(process.wait())


def end_with_asker() -> None:
    """Lead a process group from now on, and end with all of it once stdin is closed.

    The kernel closes the pipes of a process however that one ends.
    """
    with suppress(PermissionError):  # it leads a session
        os.setpgrp()

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)  # not `sys.stdin.read`, whose lock an interpreter that ends asks for
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-asker", daemon=True).start()
