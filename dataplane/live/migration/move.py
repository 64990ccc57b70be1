"""A move of one request from worker to worker: its stage, its budget, its outcome, and its pace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from controlplane.migration.move import CLOSED, Happened, Stage, step
from controlplane.snapshot import Pace
from controlplane.types import RequestId, WorkerId
from dataplane.live.engine_api.kv_messages import CopyRate
from dataplane.live.engine_api.messages import EngineRequest

Mode = Literal["live", "hand-over", "stop-and-copy", "recompute"]


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
