"""`Operations`: what operators and the controller see of a fleet, and the verbs that they steer it by."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from controlplane.errors import BadInput
from controlplane.placement.ledger import NONE
from controlplane.placement.policies import MIGRATE
from controlplane.snapshot import Note, Scale
from controlplane.types import WorkerId
from dataplane.http.rules import Conflict, UnknownName
from dataplane.live.control import views
from dataplane.live.control.fleet_state import DemandCount, FleetState, MoveRow, RequestRow, WorkerRow, copied
from dataplane.live.control.settings import FleetSettings
from dataplane.live.control.step_times import StepTimes
from dataplane.live.control.updates import Updates
from dataplane.live.engine_api.processes import Estate, Tasks
from dataplane.live.gateway.events import Event, is_of_loss
from dataplane.live.gateway.fleet_core import FleetCore
from dataplane.live.gateway.metrics import Metrics
from dataplane.live.gateway.timeline import BUCKET_S
from dataplane.live.gateways.keeper import Gateways
from dataplane.live.ledger.request import Tracked
from dataplane.live.pool.pool import WorkerPool

LAST_DECISIONS = 100  # a drained worker's moves do not push out why it was drained
LAST_SCALING, LAST_LOSSES = 5, 10
PREEMPTED_S = 1.0  # without a token, while others of the worker get theirs: some ten steps
SCALING_KINDS = ("scale", "advice-scale", "correction", "limit")


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """The settings of a fleet as it starts, the address of its gateway, and the estate of its core."""

    settings: FleetSettings
    gateway: str
    estate: Estate | None = None


def _last(most: int, events: Iterable[Event], holds: Callable[[Event], bool]) -> list[dict[str, Any]]:
    return [event.as_json() for event in events if holds(event)][-most:]


def set_gauges(m: Metrics, core: FleetCore, states: Sequence[str], policy: str) -> None:
    """Bring the gauges of a fleet's workers up to date."""
    for state in ("starting", "serving", "draining"):
        m.workers.labels(state).set(states.count(state))
    m.waiting.set(len(core.admission))
    m.handovers_open.set(len(core.handovers))
    for at in core.attached():
        m.running.labels(at.worker).set(len(core.requests.on_worker(at.worker)))
        for what, tokens in asdict(core.placement.prefix_hits(at.worker)).items():
            m.prefix_tokens.labels(at.worker, what, policy).set(tokens)
        if at.telemetry is not None:
            load = at.telemetry
            m.context.labels(at.worker).set(load.context_tokens)
            m.kv_used.labels(at.worker).set(load.kv_used_blocks / max(1, load.kv_total_blocks))
            m.step_s.labels(at.worker).set(load.step_s)
            m.preemptions.labels(at.worker).set(load.preemptions)


def transport_view(core: FleetCore) -> dict[str, Any]:
    """The pace of moves, and `ways`: the bytes of KV that workers have fetched by each."""
    ways: Counter[str] = Counter()
    for at in core.attached():
        if at.telemetry is not None:
            ways.update(at.telemetry.kv_fetched)
    pairs = [
        {"source": source, "target": target} | views.pace_view(pace)
        for (source, target), pace in core.migrations.paces.pairs.items()
    ]
    return views.pace_view(core.migrations.paces.usual) | {"ways": dict(ways), "pairs": pairs}


def _kept_by(core: FleetCore, worker: WorkerId) -> dict[str, Any]:
    """A worker's LoRA adapters, and what it had cached of prompts."""
    placement = core.placement
    return {
        "adapters": sorted(core.adapters.of(worker)),
        "prefix_tokens": asdict(placement.prefix_hits(worker)),
        "cache_known": "told" if placement.tells_cached(worker) else "predicted",
    }


def _classes(core: FleetCore) -> list[dict[str, Any]]:
    """The SLO classes with their targets, and how many requests of each have met them."""
    return [
        {"name": one.name, **asdict(one.slo), "target": one.attainment} | core.metrics.attainment_of(one.name)
        for one in core.settings.classes
    ]


class Operations:
    """Verbs and views over one FleetCore and its cluster."""

    def __init__(
        self,
        facts: FleetFacts,
        core: FleetCore,
        cluster: WorkerPool,
        arrived: DemandCount,
        step_times: StepTimes,
        revised: Callable[[str, Sequence[str]], Mapping[str, Any]] = lambda model, flags: {},
        unmeasured: Mapping[str, str] | None = None,
        gateways: Gateways | None = None,
    ) -> None:
        self.facts, self.core, self.cluster = facts, core, cluster
        self.settings, self.metrics, self.events = facts.settings, core.metrics, core.events
        self.arrived, self.step_times, self._unmeasured = arrived, step_times, unmeasured or {}
        self._gateways, self._estate = gateways, facts.estate
        before = {} if facts.estate is None else facts.estate.record.found
        self.core_number = 1 if facts.estate is None else facts.estate.number
        self.auto: bool = self.settings.autoscale is not None and before.get("auto", True)
        self._began_s = time.monotonic()
        self.updates = Updates(cluster, revised)
        self.needed: int | None = None  # of what the controller asks for
        self._moves, self.looked_s = Tasks(), 0.0  # when the controller last looked

    @property
    def is_ready(self) -> bool:
        """Whether a request will be served: by a worker, or by one that its arrival would launch."""
        scale = self.settings.autoscale
        at_zero = scale is not None and scale.low == 0 and self.auto and not self.settings.advisory
        return self.cluster.serving > 0 or at_zero

    # Views.

    @property
    def _policy(self) -> str:
        return self.settings.policy + (MIGRATE if self.settings.moves else "")

    def fleet(self) -> dict[str, Any]:
        """Workers, their load, what is moving, and the last decisions with their reasons."""
        attached = {at.worker: at for at in self.core.attached()}
        book, scale, types = self.core.requests, self.settings.autoscale, self.cluster.types
        shown = [
            views.worker_view(m, types[m.kind].role, attached.get(m.worker), book.on_worker(m.worker))
            | _kept_by(self.core, m.worker)
            for m in self.cluster.members()
        ]
        return {
            "schema": "tokenfleet.fleet/1",
            "name": self.cluster.revision.name,
            "model": self.cluster.revision.model,
            "flags": list(self.cluster.revision.flags),
            "update": self.updates.as_json(),
            "engine": self.settings.engine,
            "gateway": self.facts.gateway,
            "wanted_workers": self.cluster.wanted,
            "wanted_kinds": self.cluster.wanted_kinds,
            "share": self.share(),  # of the limits of a portfolio
            "max_workers": self.cluster.max_workers,
            "auto": self.auto,
            # The bounds within which the controller may decide; null where it was not asked to.
            "autoscale": None
            if scale is None
            else views.bounds_view(scale, time.time(), self.cluster.cold_start_s),
            "advisory": self.settings.advisory,
            "slo": asdict(self.core.settings.default_slo),
            "classes": _classes(self.core),
            "attainment_target": self.settings.attainment,
            "placement": {
                "policy": self._policy,
                # Without step times of every kind only KV and `max_num_seqs` bound what a worker takes.
                "by": "targets" if self.core.placement.goes_by_targets else "load",
                "step_times_known": self.core.placement.kinds.knows_step_times,
                "unmeasured": dict(self._unmeasured),
            },
            "attainment": self.metrics.attainment(),
            "lately": self.metrics.timeline.lately(self._began_s, time.monotonic()),
            "requests": {
                "running": sum(view["requests"] for view in shown),
                "waiting": len(self.core.admission),
            },
            "workers": shown,
            "core": {"pid": os.getpid(), "number": self.core_number},
            # Those in processes of their own.
            "gateways": [] if self._gateways is None else self._gateways.views(),
            "arrivals": [asdict(one) for one in self.arrived.arrivals()],
            "step_times": self.step_times.as_json(),
            "cold_start_s": round(self.cluster.cold_start_s, 3),
            "drain_s": round(self.cluster.drain_s, 3),
            # Why requests that run cannot be moved, and how many.
            "fixed": dict(Counter(filter(None, map(self.core.segments.why_fixed, book)))),
            "transport": transport_view(self.core),
            "moving": [views.move_view(move) for move in self.core.migrations.open.values()],
            "decisions": [event.as_json() for event in list(self.events)[-LAST_DECISIONS:]],
            "scaling": _last(LAST_SCALING, self.events, lambda e: e.kind in SCALING_KINDS),
            "losses": _last(LAST_LOSSES, self.events, is_of_loss),
        }

    def share(self) -> dict[str, Any]:
        """The input of a portfolio's broker, by kind: the share, and workers asked for, needed and held."""
        pool = self.cluster
        asked = needed = pool.asked_kinds
        if self.needed is not None and self.auto and len(asked) == 1:  # of a mix it counts no workers
            needed = {kind: min(n, self.needed) for kind, n in asked.items()}
        told = {"workers": pool.share, "asked": asked, "needed": needed, "held": pool.held}
        return told | {"cold_start_s": round(pool.cold_start_s, 3), "drain_s": round(pool.drain_s, 3)}

    def timeline(self, minutes: float) -> dict[str, Any]:
        """Throughput, latencies, attainment and errors of the last minutes, in buckets."""
        points = self.metrics.timeline.points(minutes, time.monotonic(), time.time())
        return {"bucket_s": BUCKET_S, "now_s": time.time(), "points": points}

    def state(self) -> FleetState:
        """The fleet at this instant, for the controller."""
        self.looked_s = time.monotonic()
        core, pool, moves = self.core, self.cluster, self.core.migrations
        workers, rows = core.placement.worker_rows, core.placement.request_rows
        sizes = {at.worker: at.link.info.kv_bytes_per_token for at in core.attached()}
        held = [(rows[t.id], round(left_s, 3)) for t, left_s in core.admission.held()]
        last_s: dict[WorkerId | None, float] = {}  # when each worker last gave a token
        for t in core.requests:
            last_s[t.worker] = max(t.last_token_s or 0.0, last_s.get(t.worker, 0.0))
        records, table = copied(core.placement.ledger)
        return FleetState(
            records,
            table,
            [
                WorkerRow(m.worker, m.kind, m.state, workers.get(m.worker, NONE), sizes.get(m.worker, 0))
                for m in pool.members()
            ],
            [RequestRow(t.id, rows[t.id], *self._ties(t, last_s)) for t in core.requests if t.id in rows],
            [MoveRow(m.request, m.source, m.target) for m in moves.open.values()],
            pool.asked_kinds,
            self.auto and not self.updates.reshapes,
            pool.cold_start_s,
            pool.drain_s,
            self.arrived.arrivals(),
            self.arrived.outcomes(),
            held,
            moves.paces.usual,
            [(*pair, pace) for pair, pace in moves.paces.pairs.items()],
            self.step_times.profiles(),
            self.step_times.believed(),
        )

    def _ties(self, tracked: Tracked, last_s: Mapping[Any, float]) -> tuple[bool, dict[WorkerId, int]]:
        """Whether a request cannot leave its place, and who else had it cached: looked up once a place.

        One that is preempted has no KV to copy.
        """
        if tracked.ties is None:
            elsewhere = self.core.placement.cached_elsewhere(tracked)
            tracked.ties = self.core.segments.why_fixed(tracked) is not None, elsewhere
        is_fixed, elsewhere = tracked.ties
        own_s = tracked.last_token_s if tracked.worker else None  # one in line has no worker
        return is_fixed or (own_s is not None and last_s[tracked.worker] - own_s > PREEMPTED_S), elsewhere

    def requests(self) -> list[dict[str, Any]]:
        """Every running and waiting request."""
        now_s = time.monotonic()
        return [
            views.request_view(tracked, now_s) | {"fixed": self.core.segments.why_fixed(tracked)}
            for tracked in self.core.requests
        ]

    def explain(self, name: str) -> dict[str, Any]:
        """A request, if it still runs, and every kept event about it. Raises UnknownName."""
        tracked = self.core.requests.find(name)
        about = self.events.about(tracked.id if tracked else name)
        if tracked is None and not about:
            raise UnknownName(f"request {name}: is not running, and no decision about it is kept")
        view = None if tracked is None else views.request_view(tracked, time.monotonic())
        return {"request": view, "decisions": [event.as_json() for event in about]}

    def migration(self, number: str) -> dict[str, Any]:
        """One migration by its id. Raises UnknownName."""
        move = self.core.migrations.find(number)
        if move is None:
            raise UnknownName(f"migration {number}: no such migration is kept")
        return views.move_view(move)

    def exposition(self) -> bytes:
        """The metrics, with gauges brought up to date."""
        set_gauges(self.metrics, self.core, [member.state for member in self.cluster.members()], self._policy)
        return self.metrics.exposition()

    # Verbs. All raise BadInput for what cannot be done.

    def scale(self, workers: int, kind: str | None, reason: str) -> None:
        """Fix the number of workers, of a `kind` where there are several; the controller lets go of it."""
        self.updates.check_no_reshape("scale")
        types = self.cluster.types
        named = types.only() if kind is None else types.checked_name(kind)
        self.cluster.scale({named: workers}, reason)
        self._decide_automatically(False)

    def allow(self, workers: Mapping[str, int]) -> dict[str, Any]:
        """Bound the workers of each kind by a share of what several models have, and tell what is so then."""
        if self.cluster.share is None:
            raise Conflict("share: this fleet is not one of a portfolio")
        self.cluster.allow(workers)
        return self.share()

    def scale_automatically(self) -> None:
        """Let the controller decide the number of workers again."""
        if self.settings.autoscale is None:
            raise BadInput("auto: this fleet was started without --autoscale MIN..MAX")
        self._decide_automatically(True)

    def _decide_automatically(self, auto: bool) -> None:
        self.auto = auto
        if self._estate is not None:
            self._estate.record.note(auto=auto)

    def evacuate(self, worker: str, seconds: float, reason: str) -> dict[str, Any]:
        """Empty a worker within `seconds`; what its requests are to do, counted."""
        plan = self.cluster.evacuate([WorkerId(worker)], seconds, reason)
        return {"worker": worker, "state": "draining", "deadline_s": seconds, "plan": views.plan_view(plan)}

    async def evacuate_node(self, address: str, seconds: float, reason: str) -> dict[str, Any]:
        """Empty every worker of the node at an address within `seconds`, and start none there any more.

        Raises BadInput where requests have nowhere to go.
        """
        here = self.cluster.at_address(address)
        plan = self.cluster.evacuate(here, seconds, reason)
        await self.cluster.host.leave_node(address, seconds)
        return {"node": address, "workers": here, "deadline_s": seconds, "plan": views.plan_view(plan)}

    def restart_gateways(self, finish_s: float) -> dict[str, Any]:
        """Begin to replace every gateway by a new process; how many there are. Raises UnknownName."""
        if self._gateways is None:
            raise UnknownName(
                "gateways: the only one is a part of the fleet's process; serve with --gateways 2 or more"
            )
        self._gateways.renew(finish_s)
        return {"gateways": self._gateways.count}

    async def migrate(self, name: str, target: str | None, reason: str) -> dict[str, Any]:
        """Begin a move and return its record; without a target the worker that it fits best is taken."""
        tracked = self.core.requests.find(name)
        if tracked is None:
            raise UnknownName(f"request {name}: is not running")
        if target is not None:
            if self.cluster.named(WorkerId(target)).state != "serving":
                raise BadInput(f"target {target}: is not serving")
            if tracked.worker == target:
                raise BadInput(f"target {target}: the request is there already")
        chosen = WorkerId(target) if target else self.core.placement.haven(tracked, time.monotonic())
        if chosen is None:
            raise BadInput(f"request {name}: no other worker has room for it")
        if not self.core.segments.may_continue(tracked, chosen):
            raise BadInput(f"target {chosen}: does not run the weights that the request began on")
        if tracked.id in self.core.migrations.open:
            raise BadInput(f"request {name}: is being moved already")
        self._moves.spawn(self.core.segments.move(tracked.id, chosen, reason))
        await asyncio.sleep(0)  # the move enters its record before its first wait
        move = self.core.migrations.open.get(tracked.id) or self.core.migrations.closed[-1]
        return views.move_view(move)

    # The controller's decisions: carried out, or only recorded where they are advice.

    def decide_scale(self, change: Scale, advisory: bool) -> None:
        if advisory:
            said: dict[str, Any] = {"workers": change.workers} | dict(change.facts)
            if change.kinds:
                said["kinds"] = dict(change.kinds)
            self._advise("scale", change.reason, **said)
            return
        self.updates.check_no_reshape("decision")
        if not self.auto:  # an operator fixed the number while this was being decided
            raise BadInput("decision: scale: the number of workers is an operator's now")
        kinds = change.kinds or {self.cluster.types.only(): change.workers}
        self.cluster.scale(kinds, change.reason, change.facts)

    def note(self, note: Note) -> None:
        """Record the controller's note about the fleet's size."""
        self.events.record(time.time(), note.kind, note.reason, **dict(note.facts))

    async def decide_migrate(self, name: str, target: str, reason: str, advisory: bool) -> None:
        if advisory:
            self._advise("migrate", reason, request_id=name, target=target)
        else:
            await self.migrate(name, target, reason)

    def _advise(self, kind: str, reason: str, **said: Any) -> None:
        self.events.record(time.time(), f"advice-{kind}", reason, **said)
