"""`tick`: what the fleet should do now, given what it looks like. Pure: a snapshot in, actions out.

Four rules, each with a memory in `State` so that it does not act twice on the same sight.

Move. The least free workers shed to the most free (migration.pairing), and draining ones are emptied.
Shed. A worker whose TPOT or KV forecast broke sheds to one with slack (migration.shedding).
Reassign. Requests that have not started follow Algorithm 2 (placement.rebalance), where the plane keeps
its errors, to workers at which no more prompts are ahead of them.
Scale. By demand (scaler.autoscale) where a line is known. Without one, or until there is one, by load: used
and waiting tokens over the capacity of the wanted workers. Above `high` for `rise_s` without a break, as many
are wanted as bring it down to `high`; below `low` for `hold_s`, as few as would have kept it in the middle
between the two all that time; within the bounds. Of several kinds the one cheapest for its KV capacity grows,
and the dearest of those shrinks whose going leaves the load below `high`. A snapshot without load figures
holds everything: absence of news is not idleness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings, Recent, Seen, look, plan_moves
from controlplane.migration.overload import ShedSettings, forecast_of, plan_shedding
from controlplane.placement.heartbeat import NewRequest
from controlplane.placement.rebalance import Reassign as Outcast
from controlplane.placement.rebalance import rebalance
from controlplane.scaler.autoscale import has_line, scale
from controlplane.scaler.counts import present, said, stepped
from controlplane.scaler.state import Scaling, ScalingSettings
from controlplane.scaler.target import Held, HoldSettings, hold
from controlplane.snapshot import (
    SERVING,
    Action,
    Load,
    Migrate,
    Reassign,
    RunningRequest,
    Scale,
    Snapshot,
    WorkerLoad,
)
from controlplane.types import RequestId, WorkerId

__all__ = [
    "Action",
    "Load",
    "Migrate",
    "Reassign",
    "RunningRequest",
    "Scale",
    "Settings",
    "Snapshot",
    "State",
    "WorkerLoad",
    "tick",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to move, shed (None: not at all) and scale.

    `scaling` follows demand. Without it `high` and `low` are shares of KV capacity (above 1: what waits may
    be as much more), and `bounds` None keeps the number of workers.
    """

    moves: MoveSettings | None = MoveSettings(pressure=0.6)  # noqa: RUF009 - frozen
    shed: ShedSettings | None = ShedSettings()  # noqa: RUF009 - frozen
    high: float = 0.75
    low: float = 0.3
    hold_s: float = 10.0
    rise_s: float = 10.0
    bounds: tuple[int, int] | None = None
    scaling: ScalingSettings | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise BadInput(f"control: need 0 <= low < high, got {self.low:g} and {self.high:g}")

    @property
    def rest_s(self) -> float:
        """How long a request that moved stays where it is."""
        return self.moves.rest_s if self.moves is not None else MoveSettings().rest_s


@dataclass(frozen=True, slots=True)
class State:
    """What tick remembers: what the load has asked for of late, what moved and between whom.

    An empty state loses nothing but the time already held.
    """

    by_load: Held | None = None
    moved_at_s: Mapping[RequestId, float] = field(default_factory=dict)
    pairs_at_s: Mapping[tuple[WorkerId, WorkerId], float] = field(default_factory=dict)
    scaling: Scaling = field(default_factory=Scaling)


def tick(settings: Settings, state: State, snapshot: Snapshot) -> tuple[State, list[Action]]:
    """The next state and what to do now, each action with its reason."""
    recent = Recent(
        {r: t for r, t in state.moved_at_s.items() if snapshot.now_s - t < settings.rest_s},
        {p: t for p, t in state.pairs_at_s.items() if snapshot.now_s - t < settings.rest_s},
    )
    seen = look(snapshot, settings.moves.reading if settings.moves is not None else MoveSettings().reading)
    moves = _moves(settings, recent, snapshot, seen)
    requests, pairs = dict(recent.requests), dict(recent.pairs)
    for move, source in moves:
        requests[move.request] = snapshot.now_s
        pairs[source, move.target] = snapshot.now_s
    actions: list[Action] = [move for move, _ in moves]
    by_load = state.by_load
    scaling = state.scaling
    change: Scale | None = None
    if settings.scaling is not None:
        scaling, change = scale(settings.scaling, scaling, snapshot)
    by_demand = settings.scaling is not None and (change is not None or has_line(settings.scaling, scaling))
    if settings.bounds is not None and not by_demand and snapshot.fixed is None:
        by_load, change = _by_load(settings, by_load, snapshot, seen)
    if change is not None:
        actions.append(change)
    return State(by_load, requests, pairs, scaling), actions


def _moves(
    settings: Settings, recent: Recent, snapshot: Snapshot, seen: Sequence[Seen]
) -> list[tuple[Migrate | Reassign, WorkerId]]:
    """Moves with their sources; a worker has a part in one of them at most."""
    moves: list[tuple[Migrate | Reassign, WorkerId]] = []
    if settings.moves is not None:
        moves += plan_moves(settings.moves, recent, snapshot, seen)
    if settings.shed is not None:
        taken = frozenset(w for move, source in moves for w in (source, move.target))
        moves += plan_shedding(settings.shed, recent, snapshot, seen, taken)
    if snapshot.errors:
        forecasts = settings.shed or ShedSettings()
        moved = {move.request for move, _ in moves}
        for kind in dict.fromkeys(s.worker.kind for s in seen):
            alike = [s for s in seen if s.worker.kind == kind]
            moves += _reassigned(forecasts, recent, snapshot, alike, moved)
    return moves


def _reassigned(
    forecasts: ShedSettings, recent: Recent, snapshot: Snapshot, seen: Sequence[Seen], moved: set[RequestId]
) -> list[tuple[Reassign, WorkerId]]:
    """Algorithm 2's moves among serving workers of known speed and one kind: one step model weighs them.

    An error alone is no harm: what waits stays where placement put it for as long as (b) and (e) hold there,
    and goes only where they go on holding with it.
    """
    serving = {s.worker.worker: s for s in seen if s.worker.state == SERVING and s.worker.step is not None}
    errors = {w: e for w, e in snapshot.errors.items() if w in serving}
    if len(errors) < 2:
        return []
    step = next(iter(serving.values())).worker.step
    assert step is not None
    waiting = {
        w: [
            (r.request, NewRequest(max(r.tokens, 1), max(r.remaining_tokens, 1)))
            for r in s.worker.waiting
            if r.request not in recent.requests and r.request not in snapshot.moving | moved
        ]
        for w, s in serving.items()
        if s.worker.waiting and forecast_of(s, forecasts).worst > 1.0
    }
    sizes = {r: size.prompt_tokens for queue in waiting.values() for r, size in queue}
    asked = {r.request: r for w in waiting for r in serving[w].worker.waiting}
    ahead: dict[RequestId, int] = {}
    for s in serving.values():
        tokens = 0
        for r in s.worker.waiting:
            ahead[r.request] = tokens
            tokens += r.tokens

    def may_take(request: RequestId, worker: WorkerId, earlier: Sequence[Outcast]) -> bool:
        s = serving[worker]
        came = sum(sizes[move.request] for move in earlier if move.target == worker)
        room = s.free_tokens - s.load.waiting_tokens - s.load.running
        # A balance of decode steps is no reason to wait longer for the first token.
        if came + sizes[request] > room or came + s.load.waiting_tokens > ahead[request]:
            return False
        return forecast_of(s, forecasts, asked[request]).worst <= 1.0

    weights = {w: e.weight_s(step) * 1e3 for w, e in errors.items()}
    return [
        (
            Reassign(
                m.request,
                m.source,
                m.target,
                f"{m.source} has {weights[m.source]:+.2f} ms a step more than planned,"
                f" {m.target} {weights[m.target]:+.2f}",
            ),
            m.source,
        )
        for m in rebalance(errors, waiting, step, may_take)
    ]


def _by_load(
    settings: Settings, held: Held | None, snapshot: Snapshot, seen: Sequence[Seen]
) -> tuple[Held | None, Scale | None]:
    assert settings.bounds is not None
    low, high = settings.bounds
    known = [s for s in seen if s.worker.state == SERVING]
    if not known:
        return held, None
    wanted = snapshot.wanted
    if not low <= wanted <= high:
        within = min(max(wanted, low), high)
        return None, _of_kinds(
            settings, snapshot, seen, within, f"{wanted} workers are outside {low}..{high}"
        )
    each = sum(s.worker.capacity_tokens for s in known) / len(known)
    used = sum(s.load.held_tokens + s.load.waiting_tokens for s in seen) + snapshot.waiting_tokens
    load = used / (each * wanted) if wanted else math.inf
    asked = wanted
    if load > settings.high:
        asked = math.ceil(used / (each * settings.high))
    elif load < settings.low:
        asked = min(math.ceil(used / (each * (settings.low + settings.high) / 2.0)), wanted - 1)
    if held is None or held.wanted != wanted:
        held = Held(wanted)
    asked = min(max(asked, low), high)
    held = hold(HoldSettings(settings.rise_s, settings.hold_s), held, asked, snapshot.now_s)
    if held.wanted == wanted:
        return held, None
    over, limit, for_s = ("above", settings.high, settings.rise_s)
    if held.wanted < wanted:
        over, limit, for_s = ("below", settings.low, settings.hold_s)
    why = f"load {load:.0%} has been {over} {limit:.0%} for {for_s:g} s"
    return held, _of_kinds(settings, snapshot, seen, held.wanted, why)


def _of_kinds(
    settings: Settings, snapshot: Snapshot, seen: Sequence[Seen], workers: int, why: str
) -> Scale | None:
    """So many workers; of several kinds, as near to that as limits and load let those come or go."""
    kinds = () if settings.scaling is None else settings.scaling.kinds
    if not kinds:
        return Scale(workers, why)
    known = [s.worker for s in seen if s.worker.state == SERVING]
    capacity = dict.fromkeys((k.kind for k in kinds), sum(w.capacity_tokens for w in known) / len(known))
    capacity |= {k.kind: float(k.speed.kv_capacity_tokens) for k in kinds if k.speed is not None}
    capacity |= {w.kind: float(w.capacity_tokens) for w in known}
    used = sum(s.load.held_tokens + s.load.waiting_tokens for s in seen) + snapshot.waiting_tokens

    def may_go(rest: Mapping[str, int]) -> bool:
        return used <= settings.high * sum(capacity.get(kind, 0.0) * n for kind, n in rest.items())

    there = present(snapshot.wanted_kinds)
    counts = stepped(kinds, capacity, there, workers, may_go)
    if counts == there:
        return None
    named = {k.kind: 0 for k in kinds} | counts
    return Scale(sum(counts.values()), f"{why}: {said(counts)}", kinds=named)
