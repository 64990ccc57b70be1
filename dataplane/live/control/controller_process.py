"""The controller's process, as the core keeps it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from signal import SIGKILL, SIGTERM

from dataplane.live.control.settings import CONTROLLER_SETTINGS, ControllerSettings
from dataplane.live.gateway.events import EventLog
from dataplane.processes.keeper import End, Keeper, Pauses, Spec, program, told
from dataplane.processes.keeper import tell as signal_to

RESTART_AFTER_S = 2.0
END_S = 5.0
LOOK_S = 1.0
SILENT_S = 120.0  # its first round may compile

log = logging.getLogger("tokenfleet.core")


class ControllerProcess:
    """Keeps one controller running. It starts while workers do, and gets its settings later: what it loads
    then slows no request."""

    def __init__(self, events: EventLog) -> None:
        self._settings: asyncio.Future[ControllerSettings] = asyncio.get_running_loop().create_future()
        self._events, self._was_lost, self._is_renewed = events, False, False
        self._began_s = math.inf
        pauses = Pauses(RESTART_AFTER_S, RESTART_AFTER_S, math.inf)
        self._keeper = Keeper(Spec(self._begin, self._ended, self._decides, pauses=pauses))

    def start(self) -> None:
        """Begin to keep it running."""
        self._keeper.start()

    def tell(self, settings: ControllerSettings) -> None:
        """Let it begin to decide."""
        self._settings.set_result(settings)

    def renew(self, settings: ControllerSettings) -> None:
        """Let another, which begins in its place, decide by these."""
        self._settings = asyncio.get_running_loop().create_future()
        self._settings.set_result(settings)
        if self._keeper.process is not None:
            self._is_renewed = True
            signal_to(self._keeper.process, SIGTERM)

    async def watch(self, looked_s: Callable[[], float]) -> None:
        """Kill one that has looked at the fleet, at `looked_s`, and does not look again for SILENT_S."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._keeper.process is not None and self._began_s < looked_s() < time.monotonic() - SILENT_S:
                log.warning("the controller has not looked at the fleet for %.0f s: it is killed", SILENT_S)
                signal_to(self._keeper.process, SIGKILL)

    async def close(self) -> None:
        """End it."""
        await self._keeper.close(END_S)

    @property
    def pid(self) -> int | None:
        """The id of its process while there is one."""
        return None if self._keeper.process is None else self._keeper.process.pid

    async def _begin(self) -> asyncio.subprocess.Process:
        if self._was_lost:
            self._events.record(time.time(), "controller-start", "replaces the one that is gone")
        self._began_s = time.monotonic()
        return await program("dataplane.live.control.controller")

    async def _decides(self, process: asyncio.subprocess.Process) -> bool:
        told(process, CONTROLLER_SETTINGS.dump_json(await asyncio.shield(self._settings)))
        return True

    def _ended(self, end: End[asyncio.subprocess.Process]) -> bool:
        if self._is_renewed:
            self._is_renewed = False
            return True
        self._was_lost = True
        why = f"{end.why}; nothing is moved or scaled until it is back"
        self._events.record(time.time(), "controller-lost", why)
        return True
