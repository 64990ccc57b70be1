"""The closed loop in simulated time: advance to the next heartbeat, look, tick, act.

The brain is `controlplane.control.tick`, as it runs live. The exact policy's placement has a heartbeat of
its own here. With an `Elastic` the number of workers is the brain's, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, nextafter

import numpy as np

from controlplane.control import Scale, Settings, State, tick
from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings
from controlplane.migration.cost import Price
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import EXACT
from controlplane.placement.rebalance import DeviationTracker
from controlplane.snapshot import Snapshot
from controlplane.types import ClassArrivals
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.elastic import Decide, Elastic
from dataplane.simulated.heartbeat import HEARTBEAT_S, place_held
from dataplane.simulated.migration import Moves
from dataplane.simulated.observe import deviations, observe
from dataplane.simulated.run import RunState


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """What tick is told in a simulated run, how often it runs, and what a move takes there.

    `bytes_per_s` None: copies take no time. A profile that does not say how many bytes a token's KV has is
    copied at once too. `watermark`: the share of KV that counts as never free. `errors`: whether the errors
    of Algorithm 2 are kept and shown, where anything may move at all.
    """

    tick: Settings = field(default_factory=lambda: Settings(MoveSettings()))
    beat_s: float = 0.25
    bytes_per_s: float | None = 2.4e9
    fixed_s: float = 0.01
    slowdown: float = 0.02
    watermark: float = 0.0
    errors: bool = True

    def __post_init__(self) -> None:
        if not self.beat_s > 0 or not 0 <= self.watermark < 1:
            raise BadInput(f"control: need beat_s > 0 and 0 <= watermark < 1, got {self}")

    def price(self, profile: Profile) -> Price:
        """What moves off a worker of this profile take."""
        per_token = 0.0 if self.bytes_per_s is None else float(profile.kv.bytes_per_token)
        return Price(per_token, self.bytes_per_s or 1.0, self.fixed_s, self.slowdown)


@dataclass(slots=True)
class Watch:
    """What a heartbeat looks at beside the ledger, and remembers."""

    elastic: Elastic | None = None
    deviations: DeviationTracker | None = None
    arrived: int = 0


def drive(
    run: RunState,
    control: ControlSettings | None = None,
    elastic: Elastic | None = None,
    decide: Decide | None = None,
    state: State | None = None,
) -> Moves:
    """Run to the end by heartbeats; return what became of the moves.

    `decide`: another brain than tick, for comparison. `state`: what the brain remembers at the start.
    """
    told = control or ControlSettings()
    led, eng, clock = run.ledger, run.engines, run.cluster.clock
    moves = Moves(run, [told.price(profile) for profile in run.profiles])
    state = state or State()
    settings = told.tick
    decide = decide or (lambda state, seen: tick(settings, state, seen))
    acts = settings.moves is not None or settings.shed is not None
    watch = Watch(elastic, DeviationTracker() if told.errors and run.migrates and acts else None)
    place_s = HEARTBEAT_S if run.rules.policy == EXACT else inf
    tick_s = told.beat_s if run.migrates or elastic is not None else inf
    while not _all_done(run) and not _given_up(run):
        move_s = moves.next_s
        ready_s = inf if elastic is None else elastic.next_s
        if elastic is not None and ready_s <= min(place_s, tick_s, move_s):
            advance(led, eng, run.cluster, run.rules, nextafter(ready_s, -inf))
            clock["now_s"] = ready_s
            elastic.act(ready_s)
            continue
        if move_s <= min(place_s, tick_s):
            # Up to, not including: an engine must not pass the boundary at which a request leaves or joins.
            advance(led, eng, run.cluster, run.rules, nextafter(move_s, -inf))
            clock["now_s"] = move_s
            moves.act(move_s)
            continue
        now_s = min(place_s, tick_s)
        more = advance(led, eng, run.cluster, run.rules, now_s)
        clock["now_s"] = now_s
        if now_s == place_s:
            if clock["held_n"][0] > 0:
                place_held(led, eng, run.cluster, run.rules, run.profiles[0], run.slos[0], run.settings)
            place_s = now_s + HEARTBEAT_S
        if now_s == tick_s:
            state = _beat(run, told, state, moves, now_s, watch, decide)
            tick_s = now_s + told.beat_s if elastic is not None else _next_beat_s(run, now_s, told.beat_s)
        if not more and not moves.open and elastic is None:
            break
    return moves


def _beat(
    run: RunState,
    told: ControlSettings,
    state: State,
    moves: Moves,
    now_s: float,
    watch: Watch,
    decide: Decide,
) -> State:
    view_all(run.ledger, run.engines, now_s)
    moving = frozenset(move.request for move in moves.open)
    elastic = watch.elastic
    states = None if elastic is None else elastic.states()
    seen = observe(run.ledger, run.profiles, now_s, moving, moves.busy(), told.watermark, states)
    if watch.deviations is not None:
        seen = replace(seen, errors=deviations(watch.deviations, run.ledger))
    if elastic is not None:
        seen = _with_demand(run, watch, elastic, seen)
    state, actions = decide(state, seen)
    for action in actions:
        if not isinstance(action, Scale):
            moves.begin(action, now_s)
        elif elastic is not None:
            elastic.scale(action, now_s)
    if elastic is not None:
        elastic.follow(now_s, moves.busy())
    return state


def _with_demand(run: RunState, watch: Watch, elastic: Elastic, seen: Snapshot) -> Snapshot:
    """The snapshot with what arrived since the last one, with its lengths as predicted, and who waits."""
    before, arrived = watch.arrived, int(run.cluster.clock["arrived"][0])
    watch.arrived = arrived
    new = slice(before, arrived)
    classes = run.workload.slo_class[new]
    by_class = tuple(
        ClassArrivals(
            run.slos[c],
            int((classes == c).sum()),
            float(run.workload.prompt_tokens[new][classes == c].sum()),
            float(run.ledger.requests["predicted"][new][classes == c].sum()),
        )
        for c in np.unique(classes).tolist()
    )
    return replace(
        seen,
        wanted=elastic.wanted,
        arrivals=arrived - before,
        by_class=by_class,
        waiting_requests=int(run.cluster.clock["held_n"][0]),
        cold_start_s=elastic.cold_start_s,
        drain_s=elastic.drain_s,
        wanted_kinds=elastic.wanted_kinds,
    )


def _next_beat_s(run: RunState, now_s: float, beat_s: float) -> float:
    """The next heartbeat; not before the next arrival when the fleet has nothing to do."""
    arrived = int(run.cluster.clock["arrived"][0])
    idle = run.cluster.clock["held_n"][0] == 0 and np.isinf(run.engines.workers["next_s"]).all()
    if idle and arrived < len(run.workload):
        return max(float(run.workload.arrival_s[arrived]), now_s) + beat_s
    return now_s + beat_s


def _all_done(run: RunState) -> bool:
    """Whether every request has finished; the last to arrive are looked at only once all are here."""
    if int(run.cluster.clock["arrived"][0]) < len(run.workload):
        return False
    return not np.isnan(run.engines.requests["finish_s"]).any()


def _given_up(run: RunState) -> bool:
    return bool(run.engines.total["misses"][0] > run.rules.max_misses)
