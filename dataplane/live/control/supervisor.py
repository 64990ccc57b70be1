"""The supervisor: the process of `tokenfleet serve` that keeps a core running, or those of several models.

It decides nothing, loads nothing, and writes the log of all. `tokenfleet serve` reads its flags, loads vLLM,
binds its sockets, and forks. The child becomes the fork server of cores and gateways, with all that loaded.
The parent becomes this program. So the next core begins within seconds, and waiting takes no memory.

A core that has served and then dies, or hangs for `silent_s` and is killed, gets a successor. One that ends
by itself ends the fleet. SIGTERM and SIGINT go on to the core. It is killed if it does not end, as where Ray
does not answer or a model compiles or loads for long. Then what is left below it is killed.

The fleets of several models have a core each and one more process before them, the front.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dataplane.live.engine_api.processes import FORKS, OWN_RAY, Pulse, descendants, race
from dataplane.processes import fork_server
from dataplane.processes.keeper import End, Inherited, Keeper, Pauses, Process, Spec, tell
from dataplane.startup import child_environment, log_to_stderr

log = logging.getLogger("tokenfleet.supervisor")
CORE, FRONT, SWEEP = "core", "front", "sweep"
RAY_PROGRAM = "dataplane.live.pool.own_ray"
INTERRUPTED = 130  # the exit code of a start that was interrupted
LOOK_S = 0.05
MEMORY, ROOM_BYTES = "/dev/shm", 32 << 20


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: `silent_s` of a core that hangs, or is stopped. `last_s` of one that was asked to end: its
    loop stops before its workers have; and of a successor that does not serve yet. `end_s` for what is below
    to end by itself."""

    silent_s: float = 30.0
    last_s: float = 60.0
    end_s: float = 15.0
    longest_pause_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Supervised:
    """What runs below a supervisor.

    `pulses`: the descriptor of each fleet's pulse by its name, "" for the only one; `front`: of the front's,
    where there is one. `has_own_ray`: a Ray of this machine is theirs. `sweeps`: the fork server has a job
    that ends the workers which a core has left on another one.
    """

    pulses: Mapping[str, int]
    front: int | None = None
    has_own_ray: bool = False
    sweeps: bool = False
    times: Times = Times()


def run_supervised(jobs: Mapping[str, fork_server.Job], settings: Supervised) -> None:
    """Serve forks of `jobs` below a supervisor, which takes this process's place; returns in a child.

    This process has started no pool of threads yet.
    """
    folder = Path(tempfile.mkdtemp(prefix="tokenfleet-", dir="/tmp"))  # a socket's path must be short
    signal.pthread_sigmask(signal.SIG_BLOCK, fork_server.SIGNS)
    taken, written = os.pipe()
    os.set_blocking(written, False)  # who logs waits for no disk: lines that find no room are lost
    stderr = os.dup(2)
    os.dup2(written, 2)
    if server := os.fork():
        for descriptor in (taken, stderr, *settings.pulses.values(), *filter(None, [settings.front])):
            os.set_inheritable(descriptor, True)
        words = json.dumps((server, str(folder), (taken, stderr), asdict(settings)))
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, "-m", __name__, words], child_environment())
    os.setpgrp()
    fork_server.ask_kernel(fork_server.PR_SET_PDEATHSIG, signal.SIGTERM)
    fork_server.serve_forks(folder / FORKS, jobs)


class EndSignals:
    """SIGTERM, SIGINT, and the end of the terminal: when it was first asked to end, and whether again."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.is_repeated = False
        self.changed = asyncio.Event()
        is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # below nohup
        for sign in (signal.SIGTERM, signal.SIGINT, *(() if is_kept else (signal.SIGHUP,))):
            asyncio.get_running_loop().add_signal_handler(sign, self._take)
        # A service manager may send SIGTERM to every process: what is passed on repeats no order.
        asyncio.get_running_loop().add_signal_handler(fork_server.PASSED_ON, self._take_first)

    def _take(self) -> None:
        self.is_repeated = self.since_s is not None
        self._take_first()

    def _take_first(self) -> None:
        self.since_s = self.since_s or time.monotonic()
        self.changed.set()


class Supervisor:
    """Runs a fleet to its end with `run`, once."""

    def __init__(
        self, name: str, settings: Supervised, shared: Path, orders: EndSignals, again: bool = False
    ) -> None:
        """`shared`: the folder of all fleets; `again`: this fleet was run before."""
        self._job = f"{CORE} {name}".strip()
        self._pulse, self._times = Pulse(settings.pulses[name]), settings.times
        self._sweeps, self._shared, self._orders, self._again = settings.sweeps, shared, orders, again
        self._number, self._code = 0, 0
        self._shown_s = self._silent_s = 0.0  # the core's last pulse, and how long this process has run since
        self._served = 0.0  # how many had served before this core

    async def run(self) -> int:
        """The last core's exit code."""
        # In memory: a gateway stands still while a disk takes none of its metrics.
        has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
        self._folder = Path(tempfile.mkdtemp(prefix="tokenfleet-", dir=MEMORY if has_room else "/tmp"))
        for name in (FORKS, OWN_RAY):
            (self._folder / name).symlink_to(self._shared / name)
        pauses = Pauses(longest_s=self._times.longest_pause_s)
        keeper = Keeper(Spec(self._begin, self._ended, pauses=pauses))
        try:
            await race(keeper.run(), self._watch(keeper))
            if self._code and self._sweeps:
                with suppress(OSError, TimeoutError):
                    own_ray = str(self._folder / OWN_RAY).encode()
                    sweeping = await fork_server.Forked.start(self._shared / FORKS, SWEEP, own_ray)
                    await asyncio.wait_for(sweeping.wait(), self._times.end_s)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._code

    async def _begin(self) -> fork_server.Forked:
        self._number, self._silent_s, self._served = self._number + 1, 0.0, self._pulse.served
        settings = {"number": self._number, "folder": str(self._folder), "again": self._again}
        return await fork_server.Forked.start(self._shared / FORKS, self._job, json.dumps(settings).encode())

    def _ended(self, end: End[fork_server.Forked]) -> bool:
        code = fork_server.LOST if end.code is None else end.code
        is_asked, has_served = self._orders.since_s is not None, self._pulse.served > 0
        if code == 0 or is_asked or not has_served:
            # One that was killed before it could answer has ended as by itself.
            interrupted = is_asked and not has_served and code < 0
            self._code = INTERRUPTED if interrupted else code if code >= 0 else 128 - code
            return False
        log.warning("core %d %s; another takes its place in %g s", self._number, end.why, end.pause_s)
        return True

    async def _watch(self, keeper: Keeper[fork_server.Forked]) -> None:
        """Pass on that the fleet is to end, and kill a core that hangs; returns where none runs by then."""
        asked: Process | None = None
        while True:
            core, is_asked = keeper.process, self._orders.since_s is not None
            if core is not None:
                if is_asked and asked is not core:
                    asked = core
                    tell(core, signal.SIGTERM)
                if self._is_over(self._orders.since_s):
                    tell(core, signal.SIGKILL)
            elif is_asked and self._pulse.served:
                return  # between two cores
            look_s = LOOK_S if is_asked else 1.0
            self._silent_s += look_s
            wait = asyncio.sleep(look_s) if is_asked else self._orders.changed.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(wait, look_s)

    def _is_over(self, asked_s: float | None) -> bool:
        if not self._pulse.served:  # no client has anything open there, and a model may load for long
            is_late = asked_s is not None and time.monotonic() > asked_s + self._times.end_s
            return is_late or self._orders.is_repeated
        if self._pulse.shown_s != self._shown_s:
            self._shown_s, self._silent_s = self._pulse.shown_s, 0.0
        serves = asked_s is None and self._pulse.served > self._served
        if self._silent_s <= (self._times.silent_s if serves else self._times.last_s):
            return False
        log.warning("the core has not run for %.0f s: it is killed", self._silent_s)
        self._silent_s = 0.0
        return True


class PortfolioSupervisor:
    """Runs the fleets of several models, and the front before them, until asked to end.

    One that ends before the front has shown that all serve ends them all; later another takes its place.
    """

    def __init__(self, settings: Supervised, front: Pulse, shared: Path, orders: EndSignals) -> None:
        self._settings, self._front, self._shared, self._orders = settings, front, shared, orders
        self._pauses = Pauses(longest_s=settings.times.longest_pause_s)
        self._failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """The exit code of the process that has ended them all; 0 where this one was asked to."""
        fleets = [asyncio.ensure_future(self._fleet(name)) for name in self._settings.pulses]
        begin = partial(fork_server.Forked.start, self._shared / FORKS, FRONT)
        front = Keeper(Spec(begin, partial(self._ended, "the front"), pauses=self._pauses))
        front.start()
        asked = asyncio.ensure_future(self._orders.changed.wait())
        await asyncio.wait((self._failed, asked), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            asked.cancel()
            return self._failed.result()
        # The front passes on what streams still say.
        await asyncio.gather(*fleets)
        return 0

    def _ended(self, name: str, end: End[Any]) -> bool:
        if self._orders.since_s is not None or self._failed.done():
            return False
        if not self._front.served:
            code = fork_server.LOST if end.code is None else end.code
            self._failed.set_result((code if code >= 0 else 128 - code) or 1)
            return False
        log.warning("%s %s; it is started again in %g s", name, end.why, end.pause_s)
        return True

    async def _fleet(self, name: str) -> None:
        """Run a fleet to its end, and again unless that ends them all."""
        pause_s, again = 0.0, False
        while True:
            began_s = time.monotonic()
            code = await Supervisor(name, self._settings, self._shared, self._orders, again).run()
            pause_s, again = self._pauses.after(pause_s, time.monotonic() - began_s), True
            if not self._ended(name, End(None, code, f"ended with {code}", pause_s)):
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._orders.changed.wait(), pause_s)
                return


async def supervise(settings: Supervised, shared: Path, server: int) -> int:
    """Run what is below to its end; an exit code. `server`: the fork server's id."""
    loop = asyncio.get_running_loop()
    orders, lost = EndSignals(), loop.create_future()

    def reap() -> None:
        """Take the ends of children, those among them whose parents have died."""
        if server in dict(fork_server.ended()) and not lost.done():
            lost.set_result(None)

    loop.add_signal_handler(signal.SIGCHLD, reap)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, fork_server.SIGNS)
    if settings.has_own_ray:
        _ray_keeper(shared / OWN_RAY, settings.times.longest_pause_s, orders).start()
    running = asyncio.ensure_future(_served(settings, shared, orders))
    await asyncio.wait((running, lost), return_when=asyncio.FIRST_COMPLETED)
    if lost.done():  # it ends after the last core where all were asked to end at once
        await asyncio.wait((running,), timeout=1.0 if orders.since_s is not None else 0.0)
    signal.pthread_sigmask(signal.SIG_BLOCK, fork_server.SIGNS)
    if running.done():
        return running.result()
    log.error("the fork server has died: the fleet ends")
    return fork_server.LOST


def _ray_keeper(own: Path, longest_pause_s: float, orders: EndSignals) -> Keeper[Inherited]:
    """Keeps the fleet's own Ray; `own` is there only while one runs, or could not be started."""

    async def begin() -> Inherited:
        words = (sys.executable, "-m", RAY_PROGRAM, str(own))
        return Inherited(os.posix_spawn(sys.executable, words, child_environment(), setpgroup=0))

    def ended(end: End[Inherited]) -> bool:
        own.unlink(missing_ok=True)
        if orders.since_s is None:
            log.warning("the fleet's Ray has ended; another starts in %g s", end.pause_s)
        return orders.since_s is None

    return Keeper(Spec(begin, ended, pauses=Pauses(longest_s=longest_pause_s)))


async def _served(settings: Supervised, shared: Path, orders: EndSignals) -> int:
    while not (shared / FORKS).exists():
        await asyncio.sleep(LOOK_S)
    if settings.front is not None:
        return await PortfolioSupervisor(settings, Pulse(settings.front), shared, orders).run()
    return await Supervisor("", settings, shared, orders).run()


def end_all(seconds: float) -> None:
    """Let what is below end, then kill it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, sign)
        until_s = time.monotonic() + seconds
        while descendants() and time.monotonic() < until_s:
            dict(fork_server.ended())
            time.sleep(LOOK_S)
    dict(fork_server.ended())


def pass_on(taken: int, stderr: int) -> None:
    """Write what all processes log, until the last has ended."""
    while said := os.read(taken, 1 << 16):
        with suppress(OSError):  # the terminal is gone
            os.write(stderr, said)


def main() -> int:
    """Supervise what the only argument says, in JSON."""
    log_to_stderr()
    # Those whose parent has died are ours to wait for.
    fork_server.ask_kernel(fork_server.PR_SET_CHILD_SUBREAPER, 1)
    server, folder, log_ends, settings = json.loads(sys.argv[1])
    settings["times"] = times = Times(**settings["times"])
    passing = threading.Thread(target=pass_on, args=log_ends, daemon=True)
    passing.start()
    try:
        code = asyncio.run(supervise(Supervised(**settings), Path(folder), server))
    finally:
        end_all(times.end_s)
        shutil.rmtree(folder, ignore_errors=True)
        os.dup2(log_ends[1], 2)
        passing.join(times.end_s)
    with suppress(OSError):  # the terminal is gone
        if code == INTERRUPTED:
            print("error: interrupted; nothing was written", file=sys.stderr)
        elif code == 0:
            seconds = time.time() - psutil.Process().create_time()  # as on all lines of `serve`
            print(f"{seconds:4.0f} s  stopped", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
