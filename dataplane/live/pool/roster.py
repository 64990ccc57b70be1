"""The roster of a fleet's workers: who is there, how many are wanted, and both written down at every change.

In a portfolio the roster of a model has a *share*: of each kind the most workers whose GPUs it holds at any
moment. Those that start, leave, or are lost and not yet ended count as well. The share holds whatever is
asked for. So do a fleet's limits of GPUs and dollars.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.errors import BadInput
from controlplane.scaler.mix import MixSettings, label
from controlplane.snapshot import Facts
from controlplane.types import WorkerId
from dataplane.http.rules import UnknownName
from dataplane.live.engine_api.processes import Record
from dataplane.live.gateway.events import EventLog
from dataplane.live.pool.fleet_types import FleetTypes
from dataplane.live.pool.member import Life, LifeEvent, Member, Revision, WorkerState


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """What a core's successor must know of a worker."""

    kind: str
    life: Life
    reason: str
    revision: int
    until_s: float | None


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """What a core's successor must know of its workers. `next`: the number of the next one."""

    next: int
    wanted: dict[str, int]
    asked: dict[str, int]
    share: dict[str, int] | None
    cold_start_s: float
    drain_s: float
    weights: str
    revision: Revision
    members: dict[WorkerId, MemberRecord]


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """What a core's successor must know of a rollout, to go on with it."""

    is_open: bool
    revision: Revision
    before: Revision
    cause: str
    replaced: int
    only: WorkerId | None
    finish_s: float


class Roster:
    """The workers of a fleet, and the wanted number of each kind.

    `record`: where it writes down what a successor must know. `share`: the most workers of each kind there
    may be at any moment; None for as many as are asked for. `limits`: of all kinds together.
    """

    def __init__(
        self,
        types: FleetTypes,
        max_workers: int,
        events: EventLog,
        revision: Revision,
        share: Mapping[str, int] | None = None,
        record: Record | None = None,
    ) -> None:
        self.limits = MixSettings()
        self.types, self.max_workers, self.events = types, max_workers, events
        self.revision = revision  # of those launched from now on
        self.share = None if share is None else dict(share)
        self.asked_kinds = self.wanted_kinds = dict.fromkeys(types.names, 0)
        self.surge: Counter[str] = Counter()  # more than the wanted, by kind, while one replaces another
        self.cold_start_s = 0.0  # what the last launch took, and
        self.drain_s = 0.0  # the last drain
        self.weights = ""  # of the last worker that served
        self._there: dict[WorkerId, Member] = {}
        self._next = 0  # worker's number
        self._record_file, self._writes = record, True

    # Who is there.

    def members(self) -> Iterator[Member]:
        """All but those that only have to end."""
        return iter([m for m in self._there.values() if m.life is not Life.ENDING])

    def find(self, worker: WorkerId) -> Member | None:
        member = self._there.get(worker)
        return None if member is None or member.life is Life.ENDING else member

    def named(self, worker: WorkerId) -> Member:
        """A worker that is there. Raises UnknownName for another."""
        if (member := self.find(worker)) is None:
            names = ", ".join(m.worker for m in self.members()) or "none"
            raise UnknownName(f"worker {worker}: no such worker, there are: {names}")
        return member

    def state_of(self, worker: WorkerId) -> WorkerState | None:
        member = self.find(worker)
        return None if member is None else member.state

    def number_in(self, state: WorkerState, kind: str | None = None) -> int:
        """How many workers, of all kinds or of one, are in a state."""
        return sum(m.state == state and kind in (None, m.kind) for m in self.members())

    @property
    def serving(self) -> int:
        return self.number_in("serving")

    @property
    def starting(self) -> int:
        return self.number_in("starting")

    def lacks(self, kind: str) -> bool:
        """Whether fewer workers of a kind start or serve than are wanted."""
        here = self.number_in("starting", kind) + self.number_in("serving", kind)
        return here < self.wanted_kinds.get(kind, 0) + self.surge[kind]

    @property
    def held(self) -> Counter[str]:
        """The workers whose GPUs are taken, by kind: those that start, serve or leave, or have to end."""
        return Counter(member.kind for member in self._there.values())

    def has_room(self, kind: str) -> bool:
        """Whether its share leaves room for one worker more of a kind."""
        return self.share is None or self.held[kind] < self.share[kind]

    def beyond(self, kind: str) -> str | None:
        """Why share or limits leave no room for one worker more of a kind; None where they do."""
        if not self.has_room(kind):
            return f"its share of the portfolio, {label(self.share or {})}, leaves no room for another"
        return self.limits.beyond(self.types, self.held + Counter([kind]))

    # Lives.

    def enroll(
        self, kind: str, reason: str, revision: int | None = None, life: Life = Life.STARTING
    ) -> Member:
        """A worker that is to be launched."""
        self._next += 1
        member = self._enter(WorkerId(f"w{self._next - 1}"), kind, reason, revision, life)
        self.tell("launch", reason, worker=member.worker, worker_kind=kind)
        return member

    def _enter(
        self, worker: WorkerId, kind: str, reason: str, revision: int | None, life: Life = Life.STARTING
    ) -> Member:
        number = self.revision.number if revision is None else revision
        self._there[worker] = Member(worker, kind, life, time.monotonic(), reason, number)
        return self._there[worker]

    def become(self, member: Member, event: LifeEvent, reason: str, **facts: object) -> None:
        """Take a worker to its next state, and say so."""
        member.happens(event)
        member.since_s, member.reason = time.monotonic(), reason
        self.tell(member.state, reason, worker=member.worker, **facts)

    def ended(self, member: Member) -> None:
        """Nothing of a worker is left."""
        member.happens(LifeEvent.ENDED)
        self._there.pop(member.worker, None)

    # How many are wanted.

    @property
    def wanted(self) -> int:
        """How many workers of all kinds."""
        return sum(self.wanted_kinds.values())

    def checked(self, kinds: Mapping[str, int]) -> dict[str, int]:
        """The numbers, in the kinds' order. Raises BadInput for an unknown kind or beyond a limit."""
        for name in kinds:
            self.types.checked_name(name)
        for t in self.types:
            if t.limit is not None and kinds[t.name] > t.limit:
                raise BadInput(f"workers: {t.name}: at most {t.limit}, got {kinds[t.name]}")
        self.types.check_roles(kinds)
        workers = sum(kinds.values())
        if min(kinds.values()) < 0 or workers > self.max_workers:
            raise BadInput(f"workers: must be from 0 to {self.max_workers} (--max-workers), got {workers}")
        return {name: kinds[name] for name in self.types.names}

    def shared(self, asked: Mapping[str, int]) -> dict[str, int]:
        """What of these numbers the share allows."""
        return {kind: n if self.share is None else min(n, self.share[kind]) for kind, n in asked.items()}

    def want(self, asked: Mapping[str, int], reason: str, facts: Facts | None = None) -> None:
        """Set the numbers asked for and, as far as the share allows, wanted; an event says what changes."""
        before, was = self.wanted, self.wanted_kinds
        self.asked_kinds, self.wanted_kinds = dict(asked), self.shared(asked)
        if self.wanted_kinds != was:
            details: dict[str, object] = {"workers": self.wanted, "before": before}
            if len(self.types) > 1:
                details["kinds"] = dict(self.wanted_kinds)
            details |= {str(part): said for part, said in (facts or {}).items()}
            self.tell("scale", reason, **details)

    # Events and records.

    def tell(self, kind: str, reason: str, **facts: object) -> None:
        """Record an event, and write down what has changed with it."""
        self.events.record(time.time(), kind, reason, **facts)
        self.note()

    def note(self, **facts: Any) -> None:
        """Write down what a successor must know, `facts` with it."""
        if self._record_file is None or not self._writes:
            return
        members = {
            m.worker: MemberRecord(m.kind, m.life, m.reason, m.revision, m.until_s) for m in self.members()
        }
        times = self.cold_start_s, self.drain_s
        revision = self.revision.named()
        kinds = dict(self.wanted_kinds), dict(self.asked_kinds)
        pool = PoolRecord(self._next, *kinds, self.share, *times, self.weights, revision, members)
        self._record_file.note(pool=pool, **facts)
