"""Changes of the fleet since a version, and the controller's mirror, which is kept up by them.

Each request has the number of its arrival and the version of its last change of place. An answer since a
version has the rows that are newer, and of all requests there are their numbers and their tokens, in columns:
a request that is not among the numbers has ended. So the gateway keeps no log that could be cut, and nothing
of its readers: an answer that is lost is asked for again, one that comes twice or late is older than the
mirror, and an empty mirror asks since 0, which is all there is. Versions are of one gateway's life, told by
its `book`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from controlplane.snapshot import Pace
from controlplane.types import ClassArrivals, ClassOutcomes, WorkerId

if TYPE_CHECKING:  # the controller's process, which reads rows, loads nothing of the gateway's
    from dataplane.live.engine_api.link import Telemetry
    from dataplane.live.gateway.connections import Attached
    from dataplane.live.gateway.request import Tracked
    from dataplane.live.pool.member import Member


class RequestRow(msgspec.Struct, frozen=True):
    """A request and its place; `worker` None while it waits. `number` counts arrivals.

    `fixed`: it cannot be moved from there. `cached`: tokens of it that other workers had cached as it came to
    its place, of those that had most.
    """

    number: int
    request_id: str
    worker: str | None
    prompt_tokens: int
    priority: int
    tpot_s: float
    fixed: bool = False
    cached: dict[str, int] = {}

    @classmethod
    def of(cls, t: Tracked, fixed: bool, cached: Mapping[WorkerId, int]) -> RequestRow:
        tpot_s = t.slo.tpot_s if t.kept_tpot_s is None else t.kept_tpot_s
        priority = t.ticket.priority
        return cls(t.number, t.id, t.worker, t.prompt_tokens, priority, tpot_s, fixed, dict(cached.items()))


class StepRow(msgspec.Struct, frozen=True):
    """A worker's last step, how many it has made, and the requests that wait in it."""

    steps: int
    waiting: int
    prefill_tokens: int
    sequences: int
    context_tokens: int
    step_s: float

    @classmethod
    def of(cls, load: Telemetry) -> StepRow:
        return cls(
            load.steps, load.waiting, load.prefill_tokens, load.sequences, load.context_tokens, load.step_s
        )


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker; `max_seqs` 0 while it starts, `last` None before it has told of a step."""

    worker: str
    kind: str
    state: str
    kv_tokens: int = 0
    max_seqs: int = 0
    kv_bytes_per_token: int = 0
    last: StepRow | None = None

    @classmethod
    def of(cls, member: Member, at: Attached | None) -> WorkerRow:
        if at is None:
            return cls(member.worker, member.kind, member.state)
        info = at.link.info
        return cls(
            member.worker,
            member.kind,
            member.state,
            info.kv_blocks * info.block_tokens,
            info.max_seqs,
            info.kv_bytes_per_token,
            None if at.telemetry is None else StepRow.of(at.telemetry),
        )


class MoveRow(msgspec.Struct, frozen=True):
    """A move under way."""

    request_id: str
    source: str | None
    target: str


class RefitRow(msgspec.Struct, frozen=True):
    """The step model that the refit of a kind has come to, after so many steps."""

    kind: str
    steps: int
    step: dict[str, Any]


class HeldRow(msgspec.Struct, frozen=True):
    """A request in line that may still be on time, by its number, and the seconds in which it must begin."""

    number: int
    left_s: float


class PaceRow(msgspec.Struct, frozen=True):
    """The pace of moves from one worker to another, or, without names, of all."""

    bytes_per_s: float
    pause_s: float
    moves: int
    source: str = ""
    target: str = ""

    @classmethod
    def of(cls, pace: Pace, source: str = "", target: str = "") -> PaceRow:
        return cls(round(pace.bytes_per_s, 1), round(pace.pause_s, 6), pace.moves, source, target)

    @property
    def pace(self) -> Pace:
        return Pace(self.bytes_per_s, self.pause_s, self.moves)


class Changes(msgspec.Struct, frozen=True):
    """The answer to `since` a version (0 = all there is).

    `numbers`, `output_tokens` and `expected_tokens` are of every request there is, by arrival; `requests`
    those that are new or have another place. `arrivals` and `outcomes` as DemandCount has them: counters;
    `usual` and `paces` as moves have shown them.
    """

    book: str
    since: int
    version: int
    numbers: list[int]
    output_tokens: list[int]
    expected_tokens: list[int]
    requests: list[RequestRow]
    workers: list[WorkerRow]
    moving: list[MoveRow]
    arrivals: list[ClassArrivals]
    wanted_workers: int
    wanted_kinds: dict[str, int]
    auto: bool
    cold_start_s: float
    drain_s: float
    outcomes: list[ClassOutcomes]
    refits: list[RefitRow]
    held: list[HeldRow]
    usual: PaceRow
    paces: list[PaceRow]


class Mirror:
    """The fleet as the last answer left it: `seen`, and the rows of all its requests by number."""

    def __init__(self) -> None:
        self.seen: Changes | None = None
        self.requests: dict[int, RequestRow] = {}

    @property
    def book(self) -> str:
        return "" if self.seen is None else self.seen.book

    @property
    def version(self) -> int:
        return 0 if self.seen is None else self.seen.version

    def take(self, told: Changes) -> bool:
        """Bring the mirror up to an answer; an older one changes nothing.

        False for one that does not join on to what is here: then all there is must be asked for.
        """
        is_same_life = told.book == self.book
        if is_same_life and told.version <= self.version:
            return True
        if told.since and (not is_same_life or told.since > self.version):
            return False
        rows = self.requests | {row.number: row for row in told.requests}
        if not told.since:
            rows = {row.number: row for row in told.requests}
        try:
            self.requests = {number: rows[number] for number in told.numbers}
        except KeyError:
            return False
        self.seen = told
        return True
