"""The processes of a fleet, kept running: the core by the supervisor, the controller by the core.

`tokenfleet serve` is the supervisor. It decides nothing and only waits: it holds what must outlive a core
(sockets, a folder, the fleet's own Ray), and forks one core after another from itself, with all modules
loaded, so that the next begins within seconds. A core that has served and then dies, or hangs for SILENT_S
and is killed, gets a successor, once its parent has seen its end. One that ends in its own time ends the
fleet. Told to end, the supervisor tells the core, and kills it if it hangs on its way, as where Ray does not
answer, or compiles or loads for long as it starts; what is left below it then is killed.

Fleets of several models have a supervisor each, forked by the household from one process that has loaded all
modules, and one more process before them, their front.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import socket

from dataplane.live.control.settings import CONTROLLER_SETTINGS, ControllerSettings
from dataplane.live.engine_api.processes import (
    OWN_RAY,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Estate,
    Pulse,
    Record,
    ask_kernel,
    cancel_all,
    descendants,
    pause_s,
)
from dataplane.live.gateway.events import EventLog
from dataplane.startup import child_environment

log = logging.getLogger("tokenfleet.supervisor")
RESTART_AFTER_S = 2.0
SILENT_S = 30.0  # of a core that hangs, or is stopped,
LAST_S = 60.0  # and of one that was told to end: its loop stops before its workers have
END_S = 15.0  # for what is below to end by itself
SIGNS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


class Parent:
    """A process that forks others and waits for them; none outlives it.

    It has started no pool of threads yet: those do not come along, and one that was used before would wait
    for ever.
    """

    def __init__(self) -> None:
        self._is_told = self._is_told_again = False
        self._told_s = 0.0  # when it was first told

    def _pass_on(self) -> list[int]:
        """The processes that are told to end when this one is."""
        raise NotImplementedError

    def run(self) -> int:
        """Return an exit code, once nothing below is left."""
        ask_kernel(PR_SET_CHILD_SUBREAPER, 1)  # those whose parent has died are ours to wait for
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNS)
        gc.freeze()  # what is loaded stays shared with what is forked
        folder = Path(tempfile.mkdtemp(prefix="tokenfleet-", dir="/tmp"))  # a socket's path must be short
        try:
            return self._run(folder)
        finally:
            self._end_all()
            shutil.rmtree(folder, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNS)

    def _run(self, folder: Path) -> int:
        raise NotImplementedError

    def _fork(self, run: Callable[[], int]) -> int:
        """A process that runs this and ends; by its id."""
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
            os.setpgrp()  # Ctrl-C is for the first process, which tells the others
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNS)
            code = run()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _wait(self, seconds: float) -> dict[int, int]:
        """Wait so long for signals, and take them; the exit codes of the processes that have ended."""
        told = signal.sigtimedwait(SIGNS, max(0.0, seconds))
        if told is not None and told.si_signo != signal.SIGCHLD:
            if not self._is_told:
                self._told_s = time.monotonic()
            self._is_told, self._is_told_again = True, self._is_told
            for pid in self._pass_on():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        codes = {}
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
        return codes

    def _is_told_within(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while not self._is_told and time.monotonic() < until_s:
            self._wait(until_s - time.monotonic())
        return self._is_told

    def _end_all(self) -> None:
        """Let what is below end, then kill it."""
        for sign, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            for pid in descendants():
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
            until_s = time.monotonic() + seconds
            while descendants() and time.monotonic() < until_s:
                self._wait(0.05)


class Supervisor(Parent):
    """Runs a fleet to its end with `run`, once.

    `run_core(estate)` is a whole core and returns its exit code; `own_ray(file)` runs the fleet's own Ray,
    and `sweep(file)` ends the workers that a core has left on another one.
    """

    def __init__(
        self,
        listening: socket,
        control: socket,
        run_core: Callable[[Estate], int],
        own_ray: Callable[[Path], None] | None,
        sweep: Callable[[Path], None] | None,
    ) -> None:
        super().__init__()
        self._doors, self._run_core, self._own_ray = (listening, control), run_core, own_ray
        self._sweep = sweep
        self._pulse = Pulse()
        self._loads = os.memfd_create("tokenfleet-gateways")
        self._core = 0

    def _pass_on(self) -> list[int]:
        return [self._core] if self._core else []

    def _run(self, folder: Path) -> int:
        """The last core's exit code."""
        if self._own_ray is not None:
            self._fork(partial(_done, self._own_ray, folder / OWN_RAY))
        code = self._run_cores(folder)
        if code and self._sweep is not None:
            self._fork(partial(_done, self._sweep, folder / OWN_RAY))
            self._wait(END_S)
        return code

    def _run_cores(self, folder: Path) -> int:
        number, wait_s = 0, 0.0
        while True:
            number += 1
            record = Record(folder / "record.json")
            estate = Estate(number, folder, *self._doors, self._loads, record, self._pulse)
            began_s = time.monotonic()
            self._core = self._fork(partial(self._run_core, estate))
            code = self._end_of_core()
            self._core = 0
            if self._is_told and not self._pulse.has_served and code < 0:
                return 128 + signal.SIGINT  # as one that has ended by itself before it could answer
            if code == 0 or self._is_told or not self._pulse.has_served:
                return code if code >= 0 else 128 - code
            wait_s = pause_s(wait_s, time.monotonic() - began_s)
            log.warning("core %d ended with %d; another takes its place in %g s", number, code, wait_s)
            self._pulse.still()
            if self._is_told_within(wait_s):
                return 0

    def _end_of_core(self) -> int:
        """Wait for it, pass on what we are told, and kill it once it hangs; its exit code."""
        while True:
            codes = self._wait(1.0)
            if self._core in codes:
                return codes[self._core]
            if self._is_told and not self._pulse.has_served:  # no client has anything open there
                is_over = self._is_told_again or time.monotonic() - self._told_s > END_S
            elif is_over := self._pulse.silent_s > (LAST_S if self._is_told else SILENT_S):
                log.warning("the core has not run for %.0f s: it is killed", self._pulse.silent_s)
            if is_over:
                with suppress(ProcessLookupError):
                    os.kill(self._core, signal.SIGKILL)


class Household(Parent):
    """Runs the fleets of several models, by name, and the front before them, until it is told to end.

    Each is a process that is given the household's folder and returns its exit code. `own_ray(file)` runs the
    Ray that they share. A process that ends before the front has shown by `pulse` that all serve ends them
    all; later another takes its place.
    """

    def __init__(
        self,
        fleets: Mapping[str, Callable[[Path], int]],
        front: Callable[[Path], int],
        pulse: Pulse,
        own_ray: Callable[[Path], None] | None,
    ) -> None:
        super().__init__()
        self._fleets, self._pulse, self._own_ray = fleets, pulse, own_ray
        self._all = {**fleets, "the front": front}
        self._running: dict[int, tuple[str, float]] = {}  # names, and since when, by process
        self._pauses_s: dict[str, float] = {}

    def _pass_on(self) -> list[int]:
        return [pid for pid, (name, _) in self._running.items() if name in self._fleets]

    def _run(self, folder: Path) -> int:
        """The exit code of the process that has ended them all; 0 where this one was told to."""
        if self._own_ray is not None:
            self._fork(partial(_done, self._own_ray, folder / OWN_RAY))
        due = dict.fromkeys(self._all, 0.0)  # when each is to be started
        while not self._is_told:
            for name in [name for name, at_s in due.items() if at_s <= time.monotonic()]:
                del due[name]
                self._running[self._fork(partial(self._all[name], folder))] = name, time.monotonic()
            for pid, code in self._wait(1.0).items():
                if pid not in self._running:
                    continue
                name, began_s = self._running.pop(pid)
                if not self._pulse.has_served:
                    return (code if code >= 0 else 128 - code) or 1
                wait_s = pause_s(self._pauses_s.get(name, 0.0), time.monotonic() - began_s)
                log.warning("%s ended with %d; it is started again in %g s", name, code, wait_s)
                self._pauses_s[name], due[name] = wait_s, time.monotonic() + wait_s
        while self._pass_on():  # the front passes on what streams still say
            for pid in self._wait(1.0):
                self._running.pop(pid, None)
        return 0


def _done(work: Callable[[Path], None], file: Path) -> int:
    work(file)
    return 0


class ControllerProcess:
    """Keeps one controller running; `pid` is its process while there is one.

    It is started while workers are, and told later: what it loads then slows no request.
    """

    def __init__(self, events: EventLog) -> None:
        self._settings: asyncio.Future[ControllerSettings] = asyncio.get_running_loop().create_future()
        self._events = events
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    def start(self) -> None:
        """Begin to keep it running."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def tell(self, settings: ControllerSettings) -> None:
        """Let it begin to decide."""
        self._settings.set_result(settings)

    async def close(self) -> None:
        """End it."""
        if self._keeper is not None:
            await cancel_all((self._keeper,))
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            await self._process.wait()

    async def _keep(self) -> None:
        while True:
            try:
                why = f"ended with {await self._run()}"
            except OSError as error:
                why = f"could not be started: {error}"
            self._events.record(
                time.time(), "controller-lost", f"{why}; nothing is moved or scaled until it is back"
            )
            await asyncio.sleep(RESTART_AFTER_S)
            self._events.record(time.time(), "controller-start", "replaces the one that is gone")

    async def _run(self) -> int:
        """One controller until it ends; its exit code. Raises OSError when there can be none.

        It stays in our session: Linux may share the processors out by session (autogroups), and engines then
        kept a controller in a session of its own waiting for seconds (Linux 6.18).
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dataplane.live.control.controller",
            stdin=asyncio.subprocess.PIPE,
            env=child_environment(),
        )
        assert self._process.stdin is not None
        # The settings carry a key, and other users can read a command line but no pipe.
        self._process.stdin.write(CONTROLLER_SETTINGS.dump_json(await asyncio.shield(self._settings)))
        self._process.stdin.close()
        return await self._process.wait()
