"""A move of one request from worker to worker: its stage, its budget, its outcome, its pace, its engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from controlplane.migration.move import CLOSED, Happened, Stage, step
from controlplane.snapshot import Pace
from controlplane.types import RequestId, WorkerId
from dataplane.live.engine_api.kv_messages import Control, CopyRate, Transfer
from dataplane.live.engine_api.link import EngineLink, WorkerInfo
from dataplane.live.engine_api.messages import EngineRequest, SegmentOutput
from dataplane.live.engine_api.segment import control_request

Mode = Literal["live", "hand-over", "stop-and-copy", "recompute"]
LOOK_S = 0.1  # how often a waiting copy looks whether both sides are still there


@dataclass(frozen=True, slots=True)
class Running:
    """A request as FleetCore holds it; `output_token_ids` is the live list, which grows."""

    request: EngineRequest
    segment: str
    worker: WorkerId
    output_token_ids: Sequence[int]

    @property
    def tokens(self) -> int:
        """Prompt and outputs so far."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class MoveBudget:
    """How much moving is allowed at once.

    `per_worker` bounds the moves a worker takes part in, except hand-overs. It takes `handovers` of those at
    a time, as fast as it can. `bytes_per_s` is what one worker's pre-copies take together (0: no bound).
    `share` is the part of a core's time they work for, unless a copy would then not end in time. `stage_s` is
    how long one pre-copy may take, a wait for room on the target included.
    """

    per_worker: int = 2
    handovers: int = 8
    bytes_per_s: float = 0.0
    share: float = 1.0
    stage_s: float = 10.0

    def pace(self, size: float) -> CopyRate:
        """How fast a pre-copy of `size` bytes may go: it ends within half of `stage_s`, or its request would
        go on making tokens faster than they are copied."""
        bytes_per_s = max(0.0, self.bytes_per_s) / self.per_worker
        return CopyRate(bytes_per_s, self.share, 2 * size / self.stage_s)


@dataclass(slots=True)
class MoveRecord:
    """One move's record. Bytes are those of whole blocks taken from the source; times are wall-clock seconds.

    `downtime_s` runs from the cut-over to the target's first token; the source may have decoded on in it.
    `why` it was begun; `reason` of how it went. `hurried`: copied as fast as it can be, whatever the budget.
    """

    id: str
    request: RequestId
    source: WorkerId | None
    target: WorkerId
    mode: Mode
    started_s: float
    stage: Stage = Stage.PENDING
    stages: list[int] = field(default_factory=list)  # tokens brought by each pre-copy
    cached_tokens: int = 0  # of these, those that the target had cached: they were not sent
    copied_bytes: int = 0  # of the others
    copy_s: float = 0.0  # that they took, their waits for room included
    tail_tokens: int = 0
    tail_bytes: int = 0
    downtime_s: float | None = None
    finished_s: float | None = None
    reason: str = ""
    why: str = ""
    hurried: bool = False

    @property
    def bytes(self) -> int:
        """All that was taken from the source."""
        return self.copied_bytes + self.tail_bytes

    @property
    def moved(self) -> bool:
        return self.stage is Stage.DONE

    @property
    def outcome(self) -> str:
        """done, aborted, lost, or the open stage's name."""
        return self.stage.name.lower().replace("_", "-")

    def take(self, happened: Happened, reason: str = "") -> None:
        """Walk one step of the protocol."""
        self.stage = step(self.stage, happened)
        if reason:
            self.reason = reason
        if self.stage in CLOSED:
            self.finished_s = time.time()


class MovePaces:
    """What finished moves have shown: `usual` of any two workers, `pairs` of each (source, target)."""

    def __init__(self) -> None:
        self.usual = Pace()
        self.pairs: dict[tuple[WorkerId, WorkerId], Pace] = {}

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, and with it what moves to and from it have shown."""
        self.pairs = {pair: pace for pair, pace in self.pairs.items() if worker not in pair}

    def learn(self, move: MoveRecord) -> None:
        """Take a move that went through into the pace of its pair, and of all."""
        if (
            move.mode != "live"
            or not move.moved
            or move.source is None
            or not move.copied_bytes
            or move.downtime_s is None
        ):
            return
        bytes_per_s = move.copied_bytes / max(move.copy_s, 1e-6)
        pair = (move.source, move.target)
        # A pair begins with what the others have shown.
        before = self.pairs.get(pair, replace(self.usual, moves=min(self.usual.moves, 1)))
        self.pairs[pair] = before.after(bytes_per_s, move.downtime_s)
        self.usual = self.usual.after(bytes_per_s, move.downtime_s)


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
