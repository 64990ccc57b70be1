"""The Ray that a core has joined: a cluster's, or the fleet's own, whose place another takes when it ends.

Ray ends a process that asks it something when its daemon is gone. So a core leaves an own Ray that has ended
before it joins the next, and nothing is asked of Ray in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import ray

from controlplane.errors import BadInput
from dataplane.live.engine_api.processes import Tasks, cancel_all

log = logging.getLogger("tokenfleet.ray")
OWN_RAY_S, LOOK_S, AGAIN_S = 180.0, 0.05, 5.0
NAMESPACE = "tokenfleet-"
Result = TypeVar("Result")


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
                    await asyncio.sleep(AGAIN_S)


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
