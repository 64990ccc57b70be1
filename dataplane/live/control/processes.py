"""The processes of a fleet, kept running: the core by the supervisor, the controller by the core.

`tokenfleet serve` is the supervisor. It decides nothing and only waits: it holds what must outlive a core
(sockets, a folder, the fleet's own Ray), and forks one core after another from itself, with all modules
loaded, so that the next begins within seconds. A core that has served and then dies, or hangs for SILENT_S
and is killed, gets a successor, once its parent has seen its end. One that ends in its own time ends the
fleet. Told to end, the supervisor tells the core, and kills it if it hangs on its way, as where Ray does not
answer; what is left below it then is killed.
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
from collections.abc import Callable
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
    descendants,
)
from dataplane.live.gateway.events import EventLog

log = logging.getLogger("tokenfleet.supervisor")
RESTART_AFTER_S = 2.0
SILENT_S = 30.0  # of a core that hangs, or is stopped,
LAST_S = 60.0  # and of one that was told to end: its loop stops before its workers have
YOUNG_S, LONGEST_PAUSE_S = 30.0, 30.0
END_S = 15.0  # for what is below to end by itself
SIGNS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
ROOT = str(Path(__file__).resolve().parents[3])  # our packages, also in a checkout that is not installed


class Supervisor:
    """Runs a fleet to its end with `run`, once, in a process that has started no pool of threads yet.

    A core is forked from it, and threads do not come along: a pool that was used before would wait for ever.

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
        self._doors, self._run_core, self._own_ray = (listening, control), run_core, own_ray
        self._sweep = sweep
        self._pulse = Pulse()
        self._loads = os.memfd_create("tokenfleet-gateways")
        self._core = 0
        self._is_told = False

    def run(self) -> int:
        """Return the last core's exit code, once nothing of the fleet is left."""
        ask_kernel(PR_SET_CHILD_SUBREAPER, 1)  # gateways whose core has died are ours to wait for
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNS)
        gc.freeze()  # what is loaded stays shared with the cores
        folder = Path(tempfile.mkdtemp(prefix="tokenfleet-", dir="/tmp"))  # a socket's path must be short
        try:
            if self._own_ray is not None:
                self._fork(partial(_done, self._own_ray, folder / OWN_RAY))
            code = self._run_cores(folder)
            if code and self._sweep is not None:
                self._fork(partial(_done, self._sweep, folder / OWN_RAY))
                self._wait(END_S)
            return code
        finally:
            self._end_all()
            shutil.rmtree(folder, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNS)

    def _run_cores(self, folder: Path) -> int:
        number, pause_s = 0, 0.0
        while True:
            number += 1
            record = Record(folder / "record.json")
            estate = Estate(number, folder, *self._doors, self._loads, record, self._pulse)
            began_s = time.monotonic()
            self._core = self._fork(partial(self._run_core, estate))
            code = self._end_of_core()
            self._core = 0
            if code == 0 or self._is_told or not self._pulse.has_served:
                return code if code >= 0 else 128 - code
            is_young = time.monotonic() - began_s < YOUNG_S
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s + 1.0) if is_young else 0.0
            log.warning("core %d ended with %d; another takes its place in %g s", number, code, pause_s)
            self._pulse.still()
            if self._is_told_within(pause_s):
                return 0

    def _is_told_within(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while not self._is_told and time.monotonic() < until_s:
            self._wait(until_s - time.monotonic())
        return self._is_told

    def _fork(self, run: Callable[[], int]) -> int:
        """A process that runs this and ends; by its id."""
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
            os.setpgrp()  # Ctrl-C is for the supervisor, which tells the core
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNS)
            code = run()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _end_of_core(self) -> int:
        """Wait for it, pass on what we are told, and kill it once it hangs; its exit code."""
        while True:
            code = self._wait(1.0)
            if code is not None:
                return code
            if self._pulse.silent_s > (LAST_S if self._is_told else SILENT_S):
                log.warning("the core has not run for %.0f s: it is killed", self._pulse.silent_s)
                with suppress(ProcessLookupError):
                    os.kill(self._core, signal.SIGKILL)

    def _wait(self, seconds: float) -> int | None:
        """Wait so long for signals, and take them; the core's exit code where it has ended."""
        told = signal.sigtimedwait(SIGNS, max(0.0, seconds))
        if told is not None and told.si_signo != signal.SIGCHLD:
            self._is_told = True
            if self._core:
                with suppress(ProcessLookupError):
                    os.kill(self._core, signal.SIGTERM)
        code = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._core:
                    code = os.waitstatus_to_exitcode(ended[1])
        return code

    def _end_all(self) -> None:
        """Let what is below end, then kill it."""
        for sign, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
            for pid in descendants():
                with suppress(ProcessLookupError):
                    os.kill(pid, sign)
            until_s = time.monotonic() + seconds
            while descendants() and time.monotonic() < until_s:
                self._wait(0.05)


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
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
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
            env=os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])},
        )
        assert self._process.stdin is not None
        # The settings carry a key, and other users can read a command line but no pipe.
        self._process.stdin.write(CONTROLLER_SETTINGS.dump_json(await asyncio.shield(self._settings)))
        self._process.stdin.close()
        return await self._process.wait()
