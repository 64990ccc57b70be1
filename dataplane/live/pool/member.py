"""A worker of a fleet from the decision to launch it until it is gone, and the host it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from controlplane.types import WorkerId
from dataplane.live.engine_api.link import EngineLink
from dataplane.live.engine_api.notices import Notice

WorkerState = Literal["starting", "serving", "draining"]


class Host(Protocol):
    """Where workers run: Ray, or this process for the emulated engine."""

    async def launch(
        self, worker: WorkerId, kind: str, revision: Revision, say: Callable[[str], None]
    ) -> EngineLink:
        """Start a worker of a kind; return when its engine answers. `say` is told each phase of the start.

        Raises RuntimeError with its reason.
        """

    def room(self, kind: str) -> str | None:
        """Why no worker of a kind can be started beside those there are; None where one can."""

    async def stop(self, worker: WorkerId) -> None:
        """End a worker and all its processes; nothing happens for one that is gone."""

    async def is_healthy(self, worker: WorkerId) -> bool:
        """Whether its process still answers."""

    async def notices(self, source: str | None) -> Mapping[WorkerId, Notice]:
        """The workers whose machines are told to go away, by Ray or by `source`."""

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


@dataclass(slots=True, eq=False)
class Member:
    """A worker of the cluster, from the decision to launch it until it is gone."""

    worker: WorkerId
    kind: str
    state: WorkerState
    since_s: float
    reason: str
    revision: int
    phase: str = "starting its process"  # of its start
    task: asyncio.Task[None] | None = None
    is_tried: bool = False  # a rollout's new worker, before its gate
    is_leaving: bool = False  # evacuated or retired: does not count among the wanted any more
    until_s: float | None = None  # when an evacuated one must be empty (Unix time)
    is_stopping: bool = False  # drained, and past being taken back
