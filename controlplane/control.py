"""The fleet's decision, `tick`: a pure function of settings, state and a snapshot.

Four rules, each with a memory in `State` so that it does not act twice on one observation:

    room       what waits at the gateway is let in                                        migration.overload
    shed       a worker whose TPOT or KV forecast broke gives to one with slack            migration.overload
    balance    without targets: the least free workers give to the most free               migration.balance
    scale      by demand where a line is known, else by load              scaler.autoscale, scaler.load

Prefill and decode workers are sized apart: each pool by a line of its own, from the same arrivals. A pool is
scaled as a fleet of one type would be, by its own workers and its own wanted number. What waits at
the gateway counts for prefill and not for decode, since only prompts wait there. Requests with a late first
token correct the line of prefill; those that were slow after it correct that of decode. The bounds are of
both pools together. Where they allow fewer than both want, each gets its share, and at least one worker.

A change of role needs no start. So a pool that grows takes workers that the other has not needed for a while,
on the same hardware. It does not wait for that pool's stabilization window, which saves starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from controlplane.migration.balance import MoveSettings, balance
from controlplane.migration.move import MoveTerms
from controlplane.migration.overload import ShedSettings, make_room, shed
from controlplane.migration.usage import Reading, WorkerView, worker_views
from controlplane.placement.policies import BY_TARGETS, PlacementSettings, Policy
from controlplane.scaler.autoscale import scale
from controlplane.scaler.load import LoadSettings, scale_by_load
from controlplane.scaler.state import Scaling, ScalingSettings, has_line
from controlplane.scaler.target import Stabilized
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
    terms = MoveTerms(recent.requests.keys() | snapshot.moving, recent.pairs, snapshot.transport)
    promises = settings.shed or ShedSettings()
    moves: list[Move] = []

    def free() -> list[WorkerView]:
        """Serving workers that take part in no move."""
        ends = snapshot.busy.union(*((move.source, move.target) for move in moves))
        return [w for w in workers if w.id not in ends and w.worker.state == SERVING]

    if settings.shed is not None or settings.moves is not None:
        moves += make_room(promises, free(), snapshot.held, terms)
    if settings.shed is not None:
        moves += shed(promises, free(), terms)
    if settings.moves is not None:
        moves += balance(settings.moves, free(), terms)
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
    if is_fall and settings.scaling is not None and not snapshot.may_give_back:
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
    return replace(state, pools=states), together(scaling, snapshot, changes, states)


def are_pools(types: Sequence[WorkerType]) -> bool:
    """Whether a fleet's types are prefill and decode workers, and not one of these pools alone."""
    return len(types) > 1 and any(t.role != "any" for t in types)


def scaling_of(settings: ScalingSettings, pool: WorkerType) -> ScalingSettings:
    """How one pool follows demand; the other keeps a worker. A line of the whole fleet is not its."""
    target = replace(settings.target, workers_per_rps=None, intercept=None, low=1, to_zero=False)
    if target.high is not None:
        target = replace(target, high=max(target.high - 1, 1))
    alike = [t for t in settings.worker_types if t.hardware == pool.hardware]
    limit = limit_of(alike)
    pool = replace(pool, limit=None if limit is None else limit - len(alike) + 1)
    return replace(settings, target=target, learned_at=None, worker_types=(pool,))


def limit_of(types: Sequence[WorkerType]) -> int | None:
    """The most workers that all these types may have together; None where one has no limit."""
    limits = [t.limit for t in types if t.limit is not None]
    return sum(limits) if len(limits) == len(types) else None


def load_of(settings: LoadSettings) -> LoadSettings:
    """How one pool follows its load."""
    return replace(settings, least=1, most=max(settings.most - 1, 1))


def seen_by(pool: WorkerType, snapshot: Snapshot) -> Snapshot:
    """The part of a snapshot that concerns one pool."""
    wanted = snapshot.wanted_kinds.get(pool.name, 0)
    is_decode = pool.role == "decode"
    return replace(
        snapshot,
        workers=tuple(w for w in snapshot.workers if w.kind == pool.name),
        wanted=wanted,
        wanted_kinds={},
        waiting_tokens=0 if is_decode else snapshot.waiting_tokens,
        waiting_requests=0 if is_decode else snapshot.waiting_requests,
        fixed=None if snapshot.fixed is None else wanted,
        outcomes=tuple(replace(o, met=o.tpot_met if is_decode else o.ttft_met) for o in snapshot.outcomes),
    )


def together(
    settings: ScalingSettings,
    snapshot: Snapshot,
    changes: Mapping[str, Scale | None],
    states: Mapping[str, State],
) -> Scale | None:
    """One change of the pools' own, within the fleet's bounds; None where the wanted numbers stay.

    A pool gives nothing back while requests wait for the other, but it may give workers to it.
    """
    there = {name: snapshot.wanted_kinds.get(name, 0) for name in changes}
    told = {name: change for name, change in changes.items() if change is not None}
    wanted = there | {name: change.workers for name, change in told.items()}
    if snapshot.waiting_requests:
        wanted = {name: max(n, there[name]) for name, n in wanted.items()}
    wanted = _with_roles_changed(settings, snapshot.now_s, there, wanted, states)
    first, limit = settings.worker_types[:1], limit_of(settings.worker_types)
    one = replace(settings, worker_types=tuple(replace(t, limit=limit) for t in first)).limits
    counts = within(wanted, max(settings.target.low, len(wanted)), one.high)
    if counts == there:
        return None
    workers, facts = sum(counts.values()), next((dict(change.facts) for change in told.values()), {})
    if workers == sum(there.values()):  # a change of roles costs nothing
        facts.pop("cost", None)
    reasons = "; ".join(f"{name}: {change.reason}" for name, change in told.items())
    return Scale(workers, reasons or "the fleet's bounds", facts, counts)


def _with_roles_changed(
    settings: ScalingSettings,
    now_s: float,
    there: Mapping[str, int],
    wanted: Mapping[str, int],
    states: Mapping[str, State],
) -> dict[str, int]:
    """The numbers, where a pool that grows takes from one that keeps workers for its window alone."""
    counts = dict(wanted)
    for taker, giver in permutations(settings.worker_types, 2):
        more = wanted[taker.name] - there[taker.name]
        if more > 0 and counts[giver.name] == there[giver.name] and taker.hardware == giver.hardware:
            counts[giver.name] -= min(more, _spare(settings, states[giver.name].scaling, now_s))
    return counts


def _spare(settings: ScalingSettings, state: Scaling, now_s: float) -> int:
    """The workers that a pool has not needed for two bins of the counts, so for one whole bin at least."""
    stable = state.stabilized
    if stable is None or stable.below_since_s is None or now_s - stable.below_since_s < 2 * settings.bin_s:
        return 0
    return stable.wanted - max(stable.most_below, 1)


def within(wanted: Mapping[str, int], low: int, high: int | None) -> dict[str, int]:
    """The counts nearest to `wanted` in its proportions, with a sum in low..high and each at least 1."""
    total = max(sum(wanted.values()), 1)
    bound = max(min(max(total, low), math.inf if high is None else high), len(wanted))
    if bound == total:
        return {name: max(n, 1) for name, n in wanted.items()}
    exact = {name: n * bound / total for name, n in wanted.items()}
    counts = {name: max(int(share), 1) for name, share in exact.items()}
    by_rest = sorted(counts, key=lambda name: (counts[name] - exact[name], name))
    while sum(counts.values()) < bound:
        counts[by_rest[0]] += 1
        by_rest = by_rest[1:] + by_rest[:1]
    while sum(counts.values()) > bound:
        counts[max(counts, key=lambda name: counts[name])] -= 1
    return counts
