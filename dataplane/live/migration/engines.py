"""`EngineCalls`: the requests of its own that a move sends to engines, and their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from controlplane.types import RequestId, WorkerId
from dataplane.live.engine_api.kv_messages import Control, Transfer
from dataplane.live.engine_api.link import EngineLink, WorkerInfo
from dataplane.live.engine_api.messages import EngineRequest, SegmentOutput
from dataplane.live.engine_api.segment import control_request
from dataplane.live.migration.move import Running

LOOK_S = 0.1  # how often a waiting copy looks whether both sides are still there


class MovableFleet(Protocol):
    """What a move needs of FleetCore; the package docstring states each duty."""

    def running(self, request: RequestId) -> Running | None: ...

    def link(self, worker: WorkerId) -> EngineLink | None: ...

    async def cut_over(
        self, request: RequestId, target: WorkerId, transfer: Transfer
    ) -> asyncio.Future[bool]: ...


class CopyFailed(Exception):
    """A pre-copy did not succeed; the message says why."""


class EngineCalls:
    """The engines of a fleet, as its moves reach them; an answer may take `stage_s`."""

    def __init__(self, fleet: MovableFleet, stage_s: float) -> None:
        self._fleet, self._stage_s = fleet, stage_s
        self._answers: dict[str, asyncio.Future[SegmentOutput]] = {}

    def info(self, worker: WorkerId) -> WorkerInfo:
        """Facts of a worker; raises CopyFailed for one that is gone."""
        link = self._fleet.link(worker)
        if link is None:
            raise CopyFailed(f"{worker} is gone")
        return link.info

    def claim(self, output: SegmentOutput) -> None:
        """Take an output whose segment begins with `LOADER_PREFIX`."""
        arrival = self._answers.get(output.request_id)
        if arrival is not None and output.finish_reason is not None and not arrival.done():
            arrival.set_result(output)

    async def answer(
        self, check: Callable[[], bool], worker: WorkerId, name: str, request: EngineRequest
    ) -> SegmentOutput:
        """The last output of a request of ours; `check` raises what ends the wait, or says to be patient."""
        check()
        link = self._fleet.link(worker)
        assert link is not None  # just checked
        arrival: asyncio.Future[SegmentOutput] = asyncio.get_running_loop().create_future()
        self._answers[name] = arrival
        deadline_s = time.monotonic() + self._stage_s
        try:
            await link.add(request)
            while True:
                await asyncio.wait([arrival], timeout=LOOK_S)
                if arrival.done():
                    return arrival.result()
                if check():
                    deadline_s = time.monotonic() + self._stage_s
                if time.monotonic() > deadline_s:
                    raise CopyFailed(f"{worker} had no room, or no time, in {self._stage_s:g} s")
        finally:
            del self._answers[name]

    async def release(self, move: str, of: EngineRequest, worker: WorkerId, segment: str) -> None:
        """Let a worker free the blocks that a segment holds."""
        link = self._fleet.link(worker)
        if link is not None:
            name = f"{move}-release-{segment}"
            await link.add(control_request(of, name, Control("release", segment)))

    async def end(self, worker: WorkerId, segment: str) -> None:
        """Abort a segment."""
        link = self._fleet.link(worker)
        if link is not None:
            await link.abort([segment])
