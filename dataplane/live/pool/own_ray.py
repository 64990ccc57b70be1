"""Ray: the one that a core has joined, and a fleet's own on this machine, which is a program of this module.

The program starts Ray, writes its address, and ends with its parent. It only waits, so this module imports
nothing of weight but Ray. The supervisor runs it as
`python -m dataplane.live.pool.own_ray FILE`. The file gets Ray's address, or an empty line and then the
reason why there is none. It ends once one of Ray's daemons has ended, and the supervisor starts it again.

A core joins a cluster's Ray, or its own, whose place another takes when it ends. Ray ends a process that asks
it something when its daemon is gone. So a core leaves an own Ray that has ended before it joins the next, and
nothing is asked of Ray in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray

from controlplane.errors import BadInput
from dataplane.live.engine_api.processes import Tasks, cancel_all, replace_text
from dataplane.processes.fork_server import PR_SET_PDEATHSIG, ask_kernel
from dataplane.startup import log_to_stderr

log = logging.getLogger("tokenfleet.ray")
OWN_RAY_S, LOOK_S, REJOIN_S = 180.0, 0.05, 5.0
NAMESPACE = "tokenfleet-"
Result = TypeVar("Result")
STARTS = 3
DAEMONS = {"gcs_server", "raylet"}
AGAIN_S = 30.0  # the cores have read by then why there is none
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours travels through it; Ray's least is 75 MiB


class RayEnded(RuntimeError):
    """The fleet's own Ray has ended, and what ran there with it."""


class JoinedRay:
    """Joined by a fleet's core with `join`; `is_there` is set while Ray can be asked.

    `own`: the file in which the fleet's own Ray says where it is. `on_end` is called where it has ended.
    """

    def __init__(self, own: Path, on_end: Callable[[], None]) -> None:
        self.is_own = "RAY_ADDRESS" not in os.environ
        self.is_there = asyncio.Event()
        self._own, self._on_end = own, on_end
        self._calls, self._following = Tasks(), Tasks()

    async def join(self) -> None:
        """Join it, and from now on the own one that takes its place. Raises BadInput where there is none."""
        address = await self._join()
        if self.is_own:
            self._following.spawn(self._follow(address))

    async def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What this returns, which asks Ray. Raises RayEnded where Ray ends before it has."""
        call = self._calls.spawn(work)
        try:
            return await call
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if here is not None and here.cancelling():
                raise
            raise RayEnded("Ray has ended") from None

    async def close(self) -> None:
        """Leave it."""
        await cancel_all(self._following)
        await asyncio.to_thread(ray.shutdown)

    async def _join(self) -> str:
        address = os.environ.get("RAY_ADDRESS") or await _address_of(self._own)
        await asyncio.to_thread(connect, address, self._own)
        # Ray has put its own in its place, which writes addresses of its code to stderr.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        self.is_there.set()
        return address

    async def _follow(self, address: str) -> None:
        while True:
            while _said(self._own) == address:
                await asyncio.sleep(LOOK_S)
            self.is_there.clear()
            self._on_end()
            await cancel_all(self._calls)
            await asyncio.to_thread(ray.shutdown)
            while not self.is_there.is_set():
                try:
                    address = await self._join()
                except BadInput as error:
                    log.warning("no worker can start: %s", error)
                    await asyncio.sleep(REJOIN_S)


def connect(address: str, own: Path) -> None:
    """Join the cluster at `address`, in the namespace of the fleet. Raises BadInput with Ray's reason."""
    namespace = NAMESPACE + own.parent.name
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BadInput(f"RAY_ADDRESS: no Ray cluster at {address}: {error}") from error


def _said(own: Path) -> str:
    with suppress(OSError):
        return own.read_text()
    return ""


async def _address_of(own: Path) -> str:
    """Where the fleet's own Ray is, once it is up. Raises BadInput with what hinders it."""
    until_s = time.monotonic() + OWN_RAY_S
    while not (said := _said(own)):
        if time.monotonic() > until_s:
            raise BadInput(f"Ray: did not start within {OWN_RAY_S:g} s")
        await asyncio.sleep(LOOK_S)
    address, _, why = said.partition("\n")
    if why:
        raise BadInput(f"Ray: {why}")
    return address


def keep_own_ray(own: Path) -> int:
    """Run a local Ray until SIGTERM, or until a daemon of it ends; the exit code.

    The file `own` says where it is, or what has hindered it. At the end its processes are killed: Ray would
    wait several seconds for them, and what is left on it sees it.
    """
    said = ""
    for attempt in range(1, STARTS + 1):
        try:
            said = _start(own.parent / "ray")
            break
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            ray.shutdown()  # its processes are slow to come up on a busy host; what did come up ends here
            said = f"\ndid not start in {attempt} attempts: {error}"
            log.warning("Ray did not start (%s); trying again", error)
    asked, (waking, woken) = [], os.pipe()

    def end(sign: int, _: object) -> None:
        asked.append(sign)
        os.write(woken, b"\0")

    signal.signal(signal.SIGTERM, end)
    daemons = {os.pidfd_open(one.pid): one.name() for one in _children() if one.name() in DAEMONS}
    replace_text(own, said)
    lost, _, _ = select.select([waking, *daemons], [], [], None if daemons else AGAIN_S)
    if daemons and not asked:
        log.warning("Ray's %s has died, and its workers end", " and ".join(daemons[one] for one in lost))
    for process in _children():  # not the workers below them, which end by themselves
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return 0 if asked else 1


def _children() -> list[psutil.Process]:
    return list(psutil.Process().children())


def _start(folder: Path) -> str:
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="WARNING",
        _temp_dir=str(folder),
        # A worker has an environment and so a process of its own. By default Ray also keeps an idle process
        # for each core: 80 MB and half a percent of a core each.
        _system_config={"prestart_worker_first_driver": False},
    )
    return str(ray.get_runtime_context().gcs_address)


def main() -> None:
    """Run it; the file is the only argument."""
    log_to_stderr()
    ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
    os._exit(keep_own_ray(Path(sys.argv[1])))  # Ray's own end would wait for its daemons


if __name__ == "__main__":
    main()
