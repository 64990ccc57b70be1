"""The port between decisions and a fleet: `DataPlane`, and the one round that both planes run.

    observe  →  decide  →  act  →  report

Only this module distinguishes the actions: a plane has one verb for each.

`observe` makes the snapshot of a fleet from the ledger that its plane keeps: one function for both planes. A
plane names its workers, and says where in the ledger each has its row. What they carry is counted from the
ledger; their requests are listed when a rule asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.control import State
from controlplane.migration.loads import Listed, Table, load_of
from controlplane.perfmodel.step import StepModel
from controlplane.placement.ledger import NONE, Ledger
from controlplane.snapshot import (
    Action,
    HeldRequest,
    Migrate,
    Note,
    Reassign,
    RunningRequest,
    Scale,
    Snapshot,
    WorkerLoad,
)
from controlplane.types import RequestId, WorkerId

Decide = Callable[[State, Snapshot], tuple[State, list[Action]]]
Rename = Callable[[RunningRequest], RunningRequest]  # from its row's number to its own name


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


@dataclass(frozen=True, slots=True)
class LedgerWorker:
    """A worker, and its `row` in the ledger; NONE while it starts. `capacity_tokens` 0: not known yet."""

    row: int
    worker: WorkerId
    state: str
    kind: str = ""
    step: StepModel | None = None
    capacity_tokens: int = 0
    max_seqs: int = 1 << 30
    kv_bytes_per_token: float = 0.0


class _Renamed(Listed):
    """A worker's requests by the names that their plane has for them."""

    def __init__(self, ledger: Ledger, w: int, waiting: bool, count: int, rename: Rename) -> None:
        super().__init__(ledger, w, waiting, count)
        self._rename = rename

    def _list(self) -> list[RunningRequest]:
        if self._rows is None:
            self._rows = [self._rename(request) for request in super()._list()]
        return self._rows


def observe(
    ledger: Ledger, table: Table, places: Sequence[LedgerWorker], now_s: float, rename: Rename | None = None
) -> Snapshot:
    """The fleet at `now_s`, the ledger brought up to it before; `table`: its `loads`.

    Requests have the numbers of their rows as names, unless `rename` gives them others.
    """

    def listed(w: int, waiting: bool, count: int) -> Listed:
        return (
            Listed(ledger, w, waiting, count)
            if rename is None
            else _Renamed(ledger, w, waiting, count, rename)
        )

    rows, workers = table.tolist(), []
    for at in places:
        load = None if at.row == NONE else load_of(rows[at.row])
        workers.append(
            WorkerLoad(
                at.worker,
                at.state,
                at.capacity_tokens,
                () if load is None else listed(at.row, False, load.running),
                () if load is None else listed(at.row, True, load.waiting),
                at.step,
                at.max_seqs,
                load,
                at.kind,
                at.kv_bytes_per_token,
            )
        )
    return Snapshot(now_s, tuple(workers), len(workers))


def held_request(ledger: Ledger, r: int, left_s: float) -> HeldRequest:
    """A request in line that has so long until it must begin."""
    row = ledger.requests[r]
    tokens, still = int(row["prompt"] + row["key"]), max(int(row["predicted"] - row["key"]), 1)
    name, priority = RequestId(str(r)), int(row["priority"])
    return HeldRequest(
        RunningRequest(name, tokens, priority, int(row["key"]), still, float(row["tpot_s"])), left_s
    )
