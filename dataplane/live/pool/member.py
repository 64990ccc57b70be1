"""A worker of a fleet from the decision to launch it until it is gone, and the host it runs on.

Its life is the table NEXT. Clients of the control API see three of its states: starting, serving, draining.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Literal, Protocol

from controlplane.errors import IllegalStep
from controlplane.types import WorkerId
from dataplane.live.engine_api.link import EngineLink
from dataplane.live.engine_api.notices import Notice
from dataplane.processes.keeper import PAUSES

WorkerState = Literal["starting", "serving", "draining"]


class Life(StrEnum):
    """The states of a worker."""

    STARTING = auto()
    TRIED = auto()  # started by a rollout, and it serves once it has passed the gate
    SERVING = auto()
    DRAINING = auto()  # requests leave it as they fit elsewhere; it may be taken back
    RETIRING = auto()  # a rollout replaces it; a rollout that fails takes it back
    EVACUATING = auto()  # it must be empty by a deadline; another is wanted in its place
    DRAINED = auto()  # nothing runs on it any more, and its engine ends
    RETIRED = auto()
    EVACUATED = auto()
    ENDING = auto()  # no member any more; its GPUs are taken until its processes have ended
    GONE = auto()


class LifeEvent(StrEnum):
    """The events of a worker's life."""

    READY = auto()
    FAILED = auto()  # to start
    GIVEN_UP = auto()  # before it was ready
    DRAIN = auto()
    RETIRE = auto()
    EVACUATE = auto()
    STAY = auto()  # taken back
    EMPTIED = auto()
    LOST = auto()
    ENDED = auto()


At, On = Life, LifeEvent
NEXT: Mapping[Life, Mapping[LifeEvent, Life]] = {
    At.STARTING: {On.READY: At.SERVING, On.FAILED: At.ENDING, On.GIVEN_UP: At.ENDING},
    # One that is lost before its gate stays, until its launch notices and fails.
    At.TRIED: {On.READY: At.SERVING, On.FAILED: At.ENDING, On.GIVEN_UP: At.ENDING, On.LOST: At.TRIED},
    At.SERVING: {
        On.DRAIN: At.DRAINING, On.RETIRE: At.RETIRING, On.EVACUATE: At.EVACUATING, On.LOST: At.ENDING,
    },
    At.DRAINING: {
        On.STAY: At.SERVING, On.EVACUATE: At.EVACUATING, On.EMPTIED: At.DRAINED, On.LOST: At.ENDING,
    },
    At.RETIRING: {On.STAY: At.SERVING, On.EMPTIED: At.RETIRED, On.LOST: At.ENDING},
    At.EVACUATING: {On.EMPTIED: At.EVACUATED, On.LOST: At.ENDING},
    At.DRAINED: {On.ENDED: At.GONE, On.LOST: At.ENDING},
    At.RETIRED: {On.ENDED: At.GONE, On.LOST: At.ENDING},
    At.EVACUATED: {On.ENDED: At.GONE, On.LOST: At.ENDING},
    At.ENDING: {On.ENDED: At.GONE},
    At.GONE: {},
}  # fmt: skip
# What clients see; every other state is `draining`.
SHOWN: Mapping[Life, WorkerState] = {
    At.STARTING: "starting", At.TRIED: "starting", At.SERVING: "serving",
}  # fmt: skip
REPLACED = {At.RETIRING, At.EVACUATING, At.RETIRED, At.EVACUATED}  # others are wanted in their places
EMPTY = {At.DRAINED, At.RETIRED, At.EVACUATED}


def step(life: Life, event: LifeEvent) -> Life:
    """The state after an event. Raises IllegalStep for what the table does not list."""
    try:
        return NEXT[life][event]
    except KeyError:
        raise IllegalStep(f"a worker: {event} while {life}") from None


class Host(Protocol):
    """Where workers run: Ray, or this process for the emulated engine."""

    async def launch(
        self, worker: WorkerId, kind: str, revision: Revision, say: Callable[[str], None]
    ) -> EngineLink:
        """Start a worker of a kind; return when its engine answers. `say` gets each phase of the start.

        Raises RuntimeError with its reason.
        """

    def room(self, kind: str) -> str | None:
        """Why no further worker of a kind can be started; None where one can."""

    async def stop(self, worker: WorkerId) -> None:
        """End a worker and all its processes; nothing happens for one that is gone."""

    async def is_healthy(self, worker: WorkerId) -> bool:
        """Whether its process still answers."""

    async def notices(self, source: str | None) -> Mapping[WorkerId, Notice]:
        """The workers whose machines have notice to go away, from Ray or from `source`."""

    async def leave_node(self, address: str, seconds: float) -> None:
        """Start nothing more on the node at an address, which goes away."""

    async def adopt(self, workers: Collection[WorkerId]) -> Mapping[WorkerId, Adopted]:
        """Take over these workers of an earlier core; others, and those that do not serve, end."""

    async def close(self) -> None:
        """End everything this host has started."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker that an earlier core has left, and the segments that were under way on it."""

    link: EngineLink
    segments: Sequence[str]


@dataclass(frozen=True, slots=True)
class Revision:
    """The model and the engine flags that workers start with; `settings` are vLLM's arguments of both.

    A fleet begins with number 1; each update has the next.
    """

    number: int
    model: str
    flags: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The first name that requests give for the model."""
        names = self.settings.get("served_model_name") or (self.model,)
        return names if isinstance(names, str) else str(names[0])

    def named(self) -> Revision:
        """It without the settings, which follow from the rest."""
        return Revision(self.number, self.model, self.flags)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a worker, or a start that failed, and what follows; as a sentence, too.

    `go_on`, `failed`: how many of its requests do; None where it has not served. `serving`: the workers left.
    `pause_s`: until another is started, None where none is wanted. `early`: how many workers of its kind in a
    row, with it, ended within PAUSES.young_s.
    """

    cause: str
    worker_kind: str
    go_on: int | None
    failed: int
    serving: int
    pause_s: float | None
    early: int

    def __str__(self) -> str:
        said, some = [self.cause], "1 request goes" if self.go_on == 1 else f"{self.go_on} requests go"
        if self.go_on == 0 and not self.failed:
            said.append("it had no requests")
        elif self.go_on:
            said.append(f"{some} on {'elsewhere' if self.serving else 'once another worker serves'}")
        if self.failed:
            said.append(f"{self.failed} request{'s' * (self.failed > 1)} failed")
        if self.pause_s is None:
            said.append("no other is wanted in its place")
        elif not self.pause_s:
            said.append("a new worker is starting")
        elif self.early == 1:
            said.append(f"a new worker starts in {self.pause_s:g} s")
        else:
            lasted = f"lasted less than {PAUSES.young_s:g} s"
            said.append(f"{self.early} workers of type {self.worker_kind} in a row {lasted}")
            said.append(f"the next starts in {self.pause_s:g} s")
        return "; ".join(said)


@dataclass(slots=True, eq=False)
class Member:
    """A worker of the cluster, from the decision to launch it until it is gone.

    `task`: the work that its state takes. `until_s`: when one that is evacuated must be empty (monotonic
    clock). `replaces`: the lost worker in whose place it was launched.
    """

    worker: WorkerId
    kind: str
    life: Life
    since_s: float
    reason: str
    revision: int
    phase: str = "starting the process"  # of its start
    task: asyncio.Task[None] | None = None
    until_s: float | None = None
    replaces: WorkerId | None = None

    @property
    def state(self) -> WorkerState:
        return SHOWN.get(self.life, "draining")

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs on it any more, and its engine is about to end."""
        return self.life in EMPTY

    @property
    def is_replaced(self) -> bool:
        """Whether it leaves for good, and another is wanted in its place."""
        return self.life in REPLACED

    def happens(self, event: LifeEvent) -> None:
        """Take the step that its life takes on an event."""
        self.life = step(self.life, event)

    def stop_work(self) -> None:
        """End what its state took."""
        if self.task is not None:
            self.task.cancel()
