"""The port between decisions and a fleet: `DataPlane`, and the one round that both planes run.

    observe  →  decide  →  act  →  report

Only this module distinguishes the actions: a plane has one verb for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.control import State
from controlplane.snapshot import Action, Migrate, Note, Reassign, Scale, Snapshot

Decide = Callable[[State, Snapshot], tuple[State, list[Action]]]


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """The outcome of an action. `refused`: why it could not be begun; None: it was."""

    action: Action
    refused: str | None = None


class DataPlane(Protocol):
    """A fleet, live or simulated. A verb begins what it is asked, or returns why it cannot."""

    def observe(self) -> Snapshot:
        """The fleet now."""

    def migrate(self, move: Migrate) -> str | None:
        """Move a running request with its KV."""

    def reassign(self, move: Reassign) -> str | None:
        """Take a request that has not started to another worker's queue."""

    def scale(self, change: Scale) -> str | None:
        """Want another number of workers."""

    def note(self, note: Note) -> str | None:
        """Record what the scaler has to say."""

    def report(self, outcomes: Sequence[ActionOutcome]) -> None:
        """Record the outcomes of a round's actions, in their order."""


def run_round(plane: DataPlane, decide: Decide, state: State) -> State:
    """One heartbeat; the state for the next. Raises what `observe` raises, and has done nothing then."""
    state, actions = decide(state, plane.observe())
    plane.report([ActionOutcome(action, _begin(plane, action)) for action in actions])
    return state


def _begin(plane: DataPlane, action: Action) -> str | None:
    match action:
        case Migrate():
            return plane.migrate(action)
        case Reassign():
            return plane.reassign(action)
        case Scale():
            return plane.scale(action)
        case Note():
            return plane.note(action)
