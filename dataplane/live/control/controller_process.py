"""The controller's process, watched: started with the fleet, started again when it dies, ended with it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from dataplane.live.control.settings import CONTROLLER_SETTINGS, ControllerSettings
from dataplane.live.gateway.events import EventLog

RESTART_AFTER_S = 2.0
ROOT = str(Path(__file__).resolve().parents[3])  # our packages, also in a checkout that is not installed


class ControllerProcess:
    """Keeps one controller running; `pid` is its process while there is one."""

    def __init__(self, settings: ControllerSettings, events: EventLog) -> None:
        self._settings = settings
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
        self._process.stdin.write(CONTROLLER_SETTINGS.dump_json(self._settings))
        self._process.stdin.close()
        return await self._process.wait()
