"""The job runner: runs the queued jobs of a data folder, a few at a time, each in a killable process.

Of several services on one folder, the one that holds its lock runs the jobs; the others only take orders,
and one of them takes over when it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.errors import ControlPlaneError
from dataplane.processes.keeper import helper
from tokenfleet.service.data_folder import RunnerLock
from tokenfleet.service.jobs import PORTFOLIO, Claimed, Jobs
from tokenfleet.service.uploads import Uploads

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2  # for jobs and cancellations that came through another process
PROGRAM = "tokenfleet.service.job_process"


@dataclass(slots=True)
class _Running:
    """A job's task, and why it is being ended, where it is."""

    task: asyncio.Task[None]
    ending: str = ""


class JobRunner:
    """`running()` runs jobs while it is entered; on leaving, unfinished ones are put back in the queue."""

    def __init__(self, folder: Path, jobs: Jobs, uploads: Uploads, parallel: int) -> None:
        self._jobs, self._uploads, self._parallel = jobs, uploads, parallel
        self._folder, self._lock = folder, RunnerLock(folder)
        self._running: dict[str, _Running] = {}
        self._threads = max(1, (os.cpu_count() or 1) // parallel)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run jobs until left."""
        keeper = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            keeper.cancel()
            tasks = [one.task for one in self._running.values()]
            for one in self._running.values():
                self._end(one, "released")
            await asyncio.gather(keeper, *tasks, return_exceptions=True)
            self._lock.release()

    async def _keep(self) -> None:
        while not self._lock.take():
            await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.to_thread(self._jobs.requeue)
        while True:
            try:
                await self._begin_and_cancel()
            except sqlite3.Error:  # a full disk, say: what waits is begun once it can be noted
                log.exception("plan jobs cannot be kept")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _begin_and_cancel(self) -> None:
        while len(self._running) < self._parallel:
            claimed = await asyncio.to_thread(self._jobs.claim)
            if claimed is None:
                break
            self._running[claimed.id] = _Running(asyncio.create_task(self._run(claimed)))
        for name in await asyncio.to_thread(self._jobs.to_cancel) if self._running else ():
            if name in self._running:
                self._end(self._running[name], "cancelled")

    def _end(self, one: _Running, why: str) -> None:
        if not one.ending:
            one.ending = why
            one.task.cancel()

    async def _run(self, job: Claimed) -> None:
        """One attempt, from its process' start to the row that says how it ended."""
        try:
            await self._attempt(job)
        finally:
            self._running.pop(job.id)

    async def _attempt(self, job: Claimed) -> None:
        plan, error = None, None
        state, text = "failed", "failed"
        try:
            async with asyncio.timeout(job.timeout_s):
                plan, error = await self._answer(job)
            if plan is not None:
                state, text = "done", "done"
        except TimeoutError:
            error = f"it took longer than {job.timeout_s:g} s"
        except asyncio.CancelledError:
            if self._running[job.id].ending != "cancelled":
                await asyncio.to_thread(self._jobs.release, job)
                return
            state, text = "cancelled", "cancelled"
        except (ControlPlaneError, OSError, ValueError) as refusal:
            error = " ".join(str(refusal).split())
        await asyncio.to_thread(self._jobs.finish, job, state, text, plan, error)

    async def _answer(self, job: Claimed) -> tuple[str | None, str | None]:
        """The job's plan as JSON text, or its error; its process ends with this call."""
        question = {
            "question": job.question,
            "trace_path": str(self._uploads.path(job.upload)),
            "trace_name": (await asyncio.to_thread(self._uploads.find, job.upload))["name"],
            "threads": self._threads,
            "data": str(self._folder),
        }
        if PORTFOLIO in job.question:
            uploads = {name: one["upload"] for name, one in job.question["traces"].items()}
            paths = {name: self._uploads.path(one).absolute() for name, one in uploads.items()}
            question["traces"] = {name: str(path) for name, path in paths.items()}
        async with helper(PROGRAM, line=json.dumps(question).encode() + b"\n") as process:
            assert process.stdout is not None
            async for line in process.stdout:
                message: dict[str, Any] = json.loads(line)
                if "plan" in message:
                    return json.dumps(message["plan"]), None
                if "error" in message:
                    return None, str(message["error"])
                await asyncio.to_thread(
                    self._jobs.advance, job, message["progress"], message["says"], message["simulations"]
                )
            return None, _how_it_ended(await process.wait())


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by signal {-code}; this happens when memory runs out"
    return f"its process ended with code {code}; the service's log has more"
