"""The control loop in simulated time: advance to the next heartbeat, then run a round of the port.

Decisions are those of `controlplane.control.tick`, as in the live plane. The exact policy's placement has a
heartbeat of its own here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, nextafter

import numpy as np

from controlplane.control import Settings, State, tick
from controlplane.errors import BadInput
from controlplane.migration.drain import BRING_S, Bring, Text, next_off, pulled_along, warmed
from controlplane.migration.loads import kept_at, kept_everywhere
from controlplane.migration.move import Price
from controlplane.migration.overload import ShedSettings
from controlplane.migration.usage import worker_views
from controlplane.perfmodel.profile import Profile
from controlplane.placement.exact import HEARTBEAT_S, place_together, waiting_line
from controlplane.placement.ledger import DECODING, DRAINING, NONE, OFF, SERVING, Floats, Ints, Ledger, view
from controlplane.placement.policies import BEST_FIT, EXACT, PlacementSettings
from controlplane.placement.queue import begin_round, leave, offer_late
from controlplane.port import ActionOutcome, Decide, run_round
from controlplane.snapshot import SERVING as SERVES
from controlplane.snapshot import Cached, Migrate, Note, Pace, Reassign, Scale, Snapshot, Transport
from controlplane.types import WorkerId
from dataplane.simulated.beats import limits_of, next_beat_s, pass_beats
from dataplane.simulated.cluster import advance, place_held, view_all
from dataplane.simulated.engine import arrive, count_miss
from dataplane.simulated.kv import bring
from dataplane.simulated.migration import Moves
from dataplane.simulated.moving import look_again
from dataplane.simulated.observe import held_requests, observe
from dataplane.simulated.records import Cluster, Engines, Rules
from dataplane.simulated.run import RunState

FIXED_S = 0.01  # the fixed cost of a move, in seconds of a request


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Settings of the control loop: those of `tick`, its heartbeat, and the price of a move.

    `tick` None: as the placement policy has it. `bytes_per_s` None: copies take no time. A profile that does
    not say how many bytes a token's KV has is copied at once too.
    """

    tick: Settings | None = None
    beat_s: float = 0.25
    bytes_per_s: float | None = 2.4e9
    slowdown: float = 0.02

    def __post_init__(self) -> None:
        if not self.beat_s > 0:
            raise BadInput(f"control: need beat_s > 0, got {self}")

    def price(self, profile: Profile) -> Price:
        """The price of moves off a worker of this profile."""
        per_token = 0.0 if self.bytes_per_s is None else float(profile.kv.bytes_per_token)
        return Price(per_token, self.bytes_per_s or 1.0, FIXED_S, self.slowdown)

    @property
    def transport(self) -> Transport:
        """The pace that decisions reckon with: the true one."""
        return Transport(Pace(self.bytes_per_s or inf, FIXED_S), slowdown=self.slowdown)


MOST_TEXTS = 1024  # of what has ended, the last


class Bringing:
    """Cache transfers for workers that leave or come; one at a time from a source, without slowing any."""

    def __init__(self, run: RunState, prices: Sequence[Price]) -> None:
        self._run, self._prices = run, prices
        self._status = run.ledger.workers["status"].copy()
        self._left: dict[int, deque[Bring]] = {}  # by source
        self._at_s: dict[int, float] = {}
        self.tokens = 0  # brought so far

    @property
    def next_s(self) -> float:
        """When the next copy is complete; inf for none."""
        return min(self._at_s.values(), default=inf)

    @property
    def sources(self) -> frozenset[int]:
        return frozenset(self._left)

    def act(self, now_s: float) -> None:
        """Let the copies be found that are complete at `now_s`, and begin the next."""
        ledger, engines = self._run.ledger, self._run.engines
        for source in [w for w, at_s in self._at_s.items() if at_s <= now_s]:
            copy = self._left[source].popleft()
            target, r = int(copy.target), copy.text.number
            tokens = min(copy.tokens, int(kept_at(ledger, source, r)[0]))
            status = ledger.workers["status"]
            is_there = tokens > 0 and status[source] != OFF and status[target] == SERVING
            view(ledger, target, now_s)
            if is_there and bring(ledger, engines, target, r, tokens):
                self.tokens += copy.lacks
                look_again(ledger, engines, target, now_s)
            self._next(source, now_s)

    def look(self, states: Sequence[str | None] | None, now_s: float) -> None:
        """Plan for the workers that drain, or serve, since the last look."""
        ledger = self._run.ledger
        before, now = self._status, ledger.workers["status"].copy()
        self._status = now
        leaving = np.flatnonzero((now == DRAINING) & (before == SERVING)).tolist()
        coming = np.flatnonzero((now == SERVING) & (before == OFF)).tolist()
        if ledger.caches.tokens == 0 or not (leaving or coming):
            return
        seen = observe(ledger, self._run.profiles, now_s, frozenset(), frozenset(), states)
        views = {int(v.id): v for v in worker_views(seen.workers) if v.worker.state == SERVES}
        for w in leaving:
            targets = [views[t] for t in views if self._alike(t, w)]
            self._begin(pulled_along(self._texts(), WorkerId(str(w)), targets, self._tokens(w)), now_s)
        for w in coming:
            others = [views[t].id for t in views if t != w and self._alike(t, w)]
            if w in views:
                self._begin(warmed(self._texts(), views[w], others, self._tokens(w)), now_s)

    def _texts(self) -> Iterator[Text]:
        """What has ended last, first."""
        ledger, finish_s = self._run.ledger, self._run.engines.requests["finish_s"]
        ended = np.flatnonzero(np.isfinite(finish_s))
        for r in ended[np.argsort(-finish_s[ended], kind="stable")][:MOST_TEXTS].tolist():
            row, held = ledger.requests[r], ledger.caches.requests[r]
            blocks = min(int(held["listed"]), int(row["prompt"] + row["key"] - 1) // ledger.caches.tokens)
            ids = ledger.caches.ids[held["begins"] : held["begins"] + blocks].tolist()
            kept = kept_everywhere(ledger, r)

            def cached(worker: WorkerId, kept: Ints = kept) -> Cached:
                return Cached(int(kept[int(worker)]))

            yield Text(r, ledger.caches.tokens, ids, cached)

    def _alike(self, a: int, b: int) -> bool:
        of = self._run.ledger.workers
        return bool(of["variant"][a] == of["variant"][b] and of["role"][a] == of["role"][b])

    def _tokens(self, w: int) -> float:
        """As many as are copied in the time that there is."""
        price = self._price(w)
        return BRING_S * price.bytes_per_s / price.bytes_per_token if price.bytes_per_token else inf

    def _price(self, w: int) -> Price:
        return self._prices[int(self._run.ledger.workers["variant"][w])]

    def _begin(self, copies: Sequence[Bring], now_s: float) -> None:
        for copy in copies:
            self._left.setdefault(int(copy.source), deque()).append(copy)
        for source in self._left.keys() - self._at_s.keys():
            self._next(source, now_s)

    def _next(self, source: int, now_s: float) -> None:
        if self._left[source]:
            price = self._price(source)
            self._at_s[source] = now_s + price.fixed_s + price.copy_s(self._left[source][0].lacks)
        else:
            del self._left[source]
            self._at_s.pop(source, None)


class SimulatedPlane:
    """A run's engines behind the port, at the clock's present time; the fleet keeps its size."""

    follows_size = False  # whether the number of workers is decided, too

    def __init__(self, run: RunState, control: ControlSettings) -> None:
        self.run, self.control = run, control
        prices = [control.price(profile) for profile in run.profiles]
        self.moves, self.bringing = Moves(run, prices), Bringing(run, prices)
        settings = settings_of(run, control)
        acts = settings.moves is not None or settings.shed is not None
        self._promises = (settings.shed or ShedSettings()) if acts else None  # of drains; None: they wait
        self.refusals: Counter[str] = Counter()

    @property
    def now_s(self) -> float:
        return float(self.run.cluster.clock["now_s"][0])

    @property
    def next_s(self) -> float:
        """When a copy or a move goes on; inf for none."""
        return min(self.moves.next_s, self.bringing.next_s)

    def act(self, now_s: float) -> None:
        """Do what is due at `now_s`, all that happened before it being done."""
        if self.bringing.next_s == now_s:
            self.bringing.act(now_s)
        else:
            self.moves.act(now_s)
            self._drain(now_s)

    def observe(self) -> Snapshot:
        """The fleet now."""
        run, now_s = self.run, self.now_s
        view_all(run.ledger, run.engines, now_s)
        moving = frozenset(move.request for move in self.moves.open)
        snapshot = observe(run.ledger, run.profiles, now_s, moving, self.moves.busy(), self.states())
        snapshot = replace(snapshot, transport=self.control.transport)
        if run.cluster.queue.waiting:
            held = held_requests(run.ledger, run.cluster.queue, now_s)
            snapshot = replace(snapshot, held=held)
        return snapshot

    def migrate(self, move: Migrate) -> str | None:
        return self.moves.migrate(move, self.now_s)

    def reassign(self, move: Reassign) -> str | None:
        return self.moves.reassign(move, self.now_s)

    def scale(self, change: Scale) -> str | None:
        return "the fleet does not change its size"

    def note(self, note: Note) -> str | None:
        return None

    def report(self, outcomes: Sequence[ActionOutcome]) -> None:
        """Count what was refused, by why; draining workers go on, what was begun takes its first steps."""
        self.count(outcomes)
        self.bring()

    def count(self, outcomes: Sequence[ActionOutcome]) -> None:
        """Count what was refused, and let draining workers go on."""
        self.refusals.update(outcome.refused for outcome in outcomes if outcome.refused is not None)
        self._drain(self.now_s)

    def bring(self) -> None:
        """Plan the caches that go along with workers that leave or come."""
        self.bringing.look(self.states(), self.now_s)

    def states(self) -> list[str | None] | None:
        """Each worker's state, where it is not the ledger's."""
        return None

    def _drain(self, now_s: float) -> None:
        """Let those leave draining workers whose turn it is."""
        ledger, moves = self.run.ledger, self.moves
        leaving = np.flatnonzero((ledger.workers["status"] == DRAINING) & (ledger.workers["decoding"] > 0))
        if self._promises is None or not len(set(leaving.tolist()) - moves.busy()):
            return
        view_all(ledger, self.run.engines, now_s)
        none: frozenset[int] = frozenset()
        seen = observe(ledger, self.run.profiles, now_s, none, none, self.states())
        views = {view.id: view for view in worker_views(seen.workers)}
        serving = [view for view in views.values() if view.worker.state == SERVES]
        for w in leaving.tolist():
            source = views[WorkerId(str(w))].worker
            here = {
                r.request: r for r in source.requests if ledger.requests["phase"][int(r.request)] == DECODING
            }
            busy = {WorkerId(str(end)) for end in moves.busy()}
            while went := next_off(self._promises, source, list(here.values()), lambda _: [serving], busy):
                r, taker = went
                move = Migrate(r.request, source.worker, taker.id, f"{source.worker} is draining")
                begin = moves.migrate if taker.worker.kind == source.kind else moves.compute_anew
                refused = begin(move, now_s)
                if refused is None:
                    break
                self.refusals[refused] += 1
                del here[r.request]  # it stays until the next look


def drive(plane: SimulatedPlane, decide: Decide | None = None, state: State | None = None) -> None:
    """Run to the end by heartbeats.

    `decide`: in place of tick, for comparison. `state`: what it remembers at the start.
    """
    run, control = plane.run, plane.control
    state, settings = state or State(), settings_of(run, control)
    limits = None if decide else _limits(plane, settings)
    decide = decide or partial(tick, settings)
    ledger, engines, clock = run.ledger, run.engines, run.cluster.clock
    place_s = HEARTBEAT_S if run.rules.policy == EXACT else inf
    tick_s = control.beat_s if run.migrates or plane.follows_size else inf
    while not _is_over(run):
        if limits is not None and plane.next_s == inf:
            tick_s, more = pass_beats(ledger, engines, run.cluster, run.rules, limits, control.beat_s, tick_s)
            state = run_round(plane, decide, state)
            tick_s = _next_beat_s(plane, tick_s)
            if _has_ended(plane, more):
                break
            continue
        now_s = min(plane.next_s, place_s, tick_s)
        if now_s == plane.next_s < inf:
            # Up to, not including: an engine must not pass the boundary at which a request leaves or joins.
            advance(ledger, engines, run.cluster, run.rules, nextafter(now_s, -inf))
            clock["now_s"] = now_s
            plane.act(now_s)
            continue
        more = advance(ledger, engines, run.cluster, run.rules, now_s)
        clock["now_s"] = now_s
        if now_s == place_s:
            _place_together(ledger, engines, run.cluster, run.rules, run.profiles[0], run.settings)
            place_s = now_s + HEARTBEAT_S
        if now_s == tick_s:
            state = run_round(plane, decide, state)
            tick_s = _next_beat_s(plane, now_s)
        if _has_ended(plane, more):
            break


def _next_beat_s(plane: SimulatedPlane, now_s: float) -> float:
    """The next heartbeat; a fleet that keeps its size and has nothing to do waits for the next arrival."""
    if plane.follows_size:
        return now_s + plane.control.beat_s
    run = plane.run
    return next_beat_s(run.ledger, run.engines, run.cluster, now_s, plane.control.beat_s)


def _has_ended(plane: SimulatedPlane, is_more: bool) -> bool:
    """Whether nothing is left to happen: no arrival, no step, no move and no change of size."""
    return not is_more and not plane.moves.open and not plane.follows_size


def settings_of(run: RunState, control: ControlSettings) -> Settings:
    """Those of tick; where none are given, as the placement policy has it."""
    return control.tick or Settings.of_policy(run.policy, run.settings)


def _limits(plane: SimulatedPlane, settings: Settings) -> Floats | None:
    """Limits by which heartbeats that move nothing are passed in compiled code; None where all are run."""
    if settings.shed is None or settings.moves is not None or not plane.run.migrates or plane.follows_size:
        return None
    return None if plane.run.rules.policy == EXACT else limits_of(settings.shed)


def _is_over(run: RunState) -> bool:
    """Whether every request has finished, or too many have missed."""
    if run.engines.total["misses"][0] > run.rules.max_misses:
        return True
    if len(run.arrived) < len(run.workload):
        return False
    return not np.isnan(run.engines.requests["finish_s"]).any()


def _place_together(
    ledger: Ledger,
    engines: Engines,
    cluster: Cluster,
    rules: Rules,
    profile: Profile,
    settings: PlacementSettings,
) -> None:
    """Place the requests held now; those that find no place stay held."""
    if not cluster.queue.waiting:
        return
    now_s = float(cluster.clock["now_s"][0])
    view_all(ledger, engines, now_s)
    line, lost = waiting_line(ledger, cluster.queue, now_s)
    for r in lost.tolist():
        count_miss(engines, r)
    serving = np.flatnonzero(ledger.workers["status"] == SERVING)
    placed, _ = place_together(ledger, line, serving, profile, settings, now_s)
    for r, w in placed:
        leave(ledger, cluster.queue, r)
        arrive(ledger, engines, w, r, now_s, False)
    begin_round(cluster.queue)
    while (r := offer_late(ledger, cluster.queue)) != NONE:
        place_held(ledger, engines, cluster, rules._replace(policy=BEST_FIT), r)
