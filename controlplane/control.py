"""The fleet's decision, `tick`: a pure function of settings, state and a snapshot.

Four rules, each with a memory in `State` so that it does not act twice on one observation:

    room       what waits at the gateway is let in                                        migration.room
    shed       a worker whose TPOT or KV forecast broke gives to one with slack            migration.overload
    balance    without targets: the least free workers give to the most free               migration.balance
    scale      by demand where a line is known, else by load              scaler.autoscale, scaler.load
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.migration.balance import MoveSettings, balance
from controlplane.migration.overload import ShedSettings, shed
from controlplane.migration.room import make_room
from controlplane.migration.usage import Reading, WorkerView, worker_views
from controlplane.placement.policies import BY_TARGETS, PlacementSettings, Policy
from controlplane.scaler.autoscale import has_line, scale
from controlplane.scaler.load import LoadSettings, scale_by_load
from controlplane.scaler.pools import are_pools, load_of, scaling_of, seen_by, together
from controlplane.scaler.state import Scaling, ScalingSettings
from controlplane.scaler.target import Stabilized, may_give_back
from controlplane.snapshot import SERVING, Action, Move, Note, Scale, Snapshot
from controlplane.types import RequestId, WorkerId
from controlplane.worker_type import WorkerType


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of moving, shedding and scaling; None turns one off.

    `moves` balances by `usage.freeness`. It is None where requests are placed by targets: there a move must
    keep a promise or let in a request that waits at the gateway. `scaling` follows demand; `load` follows the
    load while demand does not say how many workers. The planes themselves empty draining workers.
    """

    moves: MoveSettings | None = MoveSettings()  # noqa: RUF009 - frozen
    shed: ShedSettings | None = ShedSettings()  # noqa: RUF009 - frozen
    load: LoadSettings | None = None
    scaling: ScalingSettings | None = None

    @staticmethod
    def of_policy(policy: Policy, placed: PlacementSettings) -> Settings:
        """Moves that pursue what a placement policy does: its targets, or else balance."""
        moves = None if policy in BY_TARGETS else MoveSettings(Reading(placed.headroom))
        return Settings(moves, ShedSettings(placed.theta, placed.gamma, headroom=placed.headroom))


@dataclass(frozen=True, slots=True)
class RecentMoves:
    """The latest moves: when a request last moved, and between which workers (source, target)."""

    requests: Mapping[RequestId, float] = field(default_factory=dict)
    pairs: Mapping[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)

    def within(self, rest_s: float, now_s: float) -> RecentMoves:
        """Those of the last `rest_s`."""
        return RecentMoves(
            {r: t for r, t in self.requests.items() if now_s - t < rest_s},
            {p: t for p, t in self.pairs.items() if now_s - t < rest_s},
        )


@dataclass(frozen=True, slots=True)
class State:
    """The state of `tick` between heartbeats: the load's recent demand, recent moves, the scaler's state.

    An empty state loses nothing but the time already waited in a stabilization window.
    """

    by_load: Stabilized | None = None
    recent: RecentMoves = field(default_factory=RecentMoves)
    scaling: Scaling = field(default_factory=Scaling)
    pools: Mapping[str, State] = field(default_factory=dict)  # of prefill and decode workers, by type

    @property
    def demand(self) -> Scaling:
        """The scaler's state that knows the demand: of pools any one's, since all see the same arrivals."""
        return next((pool.scaling for pool in self.pools.values()), self.scaling)

    @property
    def needed(self) -> int | None:
        """What the last moments ask for of the wanted number, which falls late; None: not known."""
        return self.scaling.needed

    @property
    def notes(self) -> tuple[Note, ...]:
        """What there is to say now."""
        return (*self.scaling.notes, *(note for pool in self.pools.values() for note in pool.scaling.notes))


def tick(settings: Settings, state: State, snapshot: Snapshot) -> tuple[State, list[Action]]:
    """The next state and what to do now, each action with its reason."""
    now_s, move_settings = snapshot.now_s, settings.moves or MoveSettings()
    recent = state.recent.within(move_settings.rest_s, now_s)
    workers, moves = _moves(settings, recent, snapshot, move_settings.reading)
    state, change = _size(settings, state, snapshot, workers)
    recent = RecentMoves(
        {**recent.requests, **{move.request: now_s for move in moves}},
        {**recent.pairs, **{(move.source, move.target): now_s for move in moves}},
    )
    actions: list[Action] = [*moves, *state.notes, *([] if change is None else [change])]
    return replace(state, recent=recent), actions


def _moves(
    settings: Settings, recent: RecentMoves, snapshot: Snapshot, reading: Reading
) -> tuple[list[WorkerView], list[Move]]:
    """The workers, each counted once, and the moves.

    A worker takes part in at most one move, those of waiting requests aside.
    """
    workers = worker_views(snapshot.workers, reading)
    resting = recent.requests.keys() | snapshot.moving
    promises = settings.shed or ShedSettings()
    moves: list[Move] = []

    def free() -> list[WorkerView]:
        """Serving workers that take part in no move."""
        ends = snapshot.busy.union(*((move.source, move.target) for move in moves))
        return [w for w in workers if w.id not in ends and w.worker.state == SERVING]

    if settings.shed is not None or settings.moves is not None:
        moves += make_room(promises, free(), snapshot.held, resting, recent.pairs, snapshot.transport)
    if settings.shed is not None:
        moves += shed(promises, free(), resting, recent.pairs, snapshot.transport)
    if settings.moves is not None:
        moves += balance(settings.moves, free(), resting, recent.pairs, snapshot.transport)
    return workers, moves


def _size(
    settings: Settings, state: State, snapshot: Snapshot, workers: Sequence[WorkerView]
) -> tuple[State, Scale | None]:
    """By demand where it says how many workers; else by load, unless an operator has fixed them."""
    if settings.scaling is not None and are_pools(settings.scaling.worker_types):
        return _size_pools(settings, settings.scaling, state, snapshot, workers)
    state = replace(state, scaling=replace(state.scaling, notes=()))
    types: tuple[WorkerType, ...] = ()
    if settings.scaling is not None:
        scaling, change = scale(settings.scaling, state.scaling, snapshot)
        state = replace(state, scaling=scaling)
        if change is not None or has_line(settings.scaling, scaling):
            return state, change
        types = settings.scaling.worker_types if settings.scaling.is_mix else ()
    if settings.load is None or snapshot.fixed is not None:
        return state, None
    used_tokens = sum(w.load.held_tokens + w.load.waiting_tokens for w in workers) + snapshot.waiting_tokens
    by_load, change = scale_by_load(settings.load, state.by_load, snapshot, used_tokens, types)
    is_fall = change is not None and change.workers < snapshot.wanted
    if is_fall and settings.scaling is not None and not may_give_back(snapshot):
        return state, None
    return replace(state, by_load=by_load), change


def _size_pools(
    settings: Settings,
    scaling: ScalingSettings,
    state: State,
    snapshot: Snapshot,
    workers: Sequence[WorkerView],
) -> tuple[State, Scale | None]:
    """Prefill and decode workers, each as a fleet of its own within the bounds of both."""
    states: dict[str, State] = {}
    changes: dict[str, Scale | None] = {}
    for pool in scaling.worker_types:
        own = replace(
            settings,
            load=None if settings.load is None else load_of(settings.load),
            scaling=scaling_of(scaling, pool),
        )
        before = state.pools.get(pool.name, State(scaling=state.scaling))
        here = [w for w in workers if w.worker.kind == pool.name]
        states[pool.name], changes[pool.name] = _size(own, before, seen_by(pool, snapshot), here)
    return replace(state, pools=states), together(scaling, snapshot, changes)
