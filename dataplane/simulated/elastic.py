"""The slots of a simulated fleet whose size changes: launches, cold starts, drains, stops, and their cost.

The steps to a wanted number are scaler.reconcile's, as in the live plane. Limits of GPUs and dollars count
workers in any state, as there. A worker is paid for from its launch to its stop, so a cold start and a drain
cost what they take. The run's workers are slots: as many as may ever be there at once, of one kind or
several, taken in order. A kind is the type of a profile. Wanted numbers by kind are followed in each kind by
itself. One number is followed in all kinds together.

A worker that changes its role ends what it runs first: workers of split fleets move nothing here. Live ones
hand their requests over and change at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf

from controlplane.errors import BadInput
from controlplane.placement.batch import queue_first
from controlplane.placement.ledger import NONE, OFF, ROLES, SERVING
from controlplane.scaler.reconcile import Drain, Launch, Standing, Undrain, role_changes, steps_to
from controlplane.scaler.state import ScalingSettings
from controlplane.snapshot import DRAINING as DRAINS
from controlplane.snapshot import SERVING as SERVES
from controlplane.snapshot import STARTING as STARTS
from controlplane.snapshot import Note, Scale
from controlplane.types import WorkerId
from controlplane.worker_type import name_in_role
from dataplane.simulated.changes import change_worker, forget_kv
from dataplane.simulated.records import DRAIN, READY
from dataplane.simulated.run import RunState


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """`start`: workers that serve at the beginning. `cold_start_s`: launch to serving.

    A worker that is not ready after `start_limit_s` is given up.
    `start_kinds`: in place of `start`, how many of each kind. `usd_per_h`: of a worker, by kind.
    """

    start: int = 1
    cold_start_s: float = 60.0
    start_limit_s: float = 600.0
    start_kinds: Mapping[str, int] | None = None
    usd_per_h: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.start_kinds is not None and min(self.start_kinds.values(), default=0) < 0:
            raise BadInput(f"elastic fleet: start_kinds: must not be negative, got {dict(self.start_kinds)}")
        if self.start < 0 or not 0 <= self.cold_start_s < inf or not self.start_limit_s > 0:
            raise BadInput(f"elastic fleet: need start and cold_start_s of at least 0, got {self}")

    def ready_after_s(self, launch: int) -> float:
        """Seconds from a launch (0 = the first) to serving; inf where the worker never comes up."""
        return self.cold_start_s

    def drained(self, emptiest: int, serving: Collection[int]) -> int:
        """The slot that scaling in takes, of those that serve."""
        return emptiest


@dataclass(slots=True)
class Slot:
    """A worker that is there: its state and since when, when it was launched, when it is ready.

    `changes_role`: it ends what it runs, and then serves in another role. `launched_s` is when that began.
    """

    state: str
    since_s: float
    launched_s: float
    ready_s: float = inf
    changes_role: bool = False


@dataclass
class FleetRecord:
    """The fleet's history: (seconds, workers wanted, workers paid for) at every change, and the sums.

    `kinds`: seconds, and workers of each kind wanted, where they are named. `kind_s`: worker-seconds by kind.
    `usd`: of all that was paid for; None where a kind's price is not known.
    """

    changes: list[tuple[float, int, int]] = field(default_factory=list)
    worker_s: float = 0.0
    launches: int = 0
    drains: int = 0
    role_changes: int = 0
    reasons: list[tuple[float, str]] = field(default_factory=list)
    notes: list[tuple[float, Note]] = field(default_factory=list)
    kinds: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    kind_s: dict[str, float] = field(default_factory=dict)
    gpu_s: float = 0.0
    usd: float | None = None


class Elastic:
    """The slots of a run. Every method leaves ledger and engines consistent at `now_s`.

    `scaling`: whose limits hold, and its worker types.
    """

    def __init__(
        self, run: RunState, settings: ElasticSettings, scaling: ScalingSettings | None = None
    ) -> None:
        self._run, self._settings, self._scaling = run, settings, scaling
        self._profiles = [run.profiles[i] for i in run.ledger.workers["variant"].tolist()]
        roles = [ROLES[code] for code in run.ledger.workers["role"].tolist()]
        self.kinds = [name_in_role(p.type_name, r) for p, r in zip(self._profiles, roles, strict=True)]
        self._roles = dict(zip(self.kinds, run.ledger.workers["role"].tolist(), strict=True))
        self._hardware = {kind: p.type_name for kind, p in zip(self.kinds, self._profiles, strict=True)}
        first = self._first()
        self.slots: dict[int, Slot] = {}
        self.record = FleetRecord()
        self.wanted = len(first)
        self.wanted_kinds = dict.fromkeys(self.kinds, 0) | Counter(self.kinds[w] for w in first)
        self.drain_s = 0.0
        self._launched = 0
        for w in range(len(run.ledger.workers)):
            run.ledger.workers["status"][w] = SERVING if w in first else OFF
            if w in first:
                self.slots[w] = Slot(SERVES, 0.0, 0.0)
        self._note(0.0)

    @property
    def next_s(self) -> float:
        """When the next worker is ready; inf for none."""
        return min((s.ready_s for s in self.slots.values()), default=inf)

    @property
    def cold_start_s(self) -> float:
        return self._settings.cold_start_s

    def states(self) -> list[str | None]:
        """Each slot's state; None for one that is not in use."""
        there = self.slots
        return [there[w].state if w in there else None for w in range(len(self._run.ledger.workers))]

    def act(self, now_s: float) -> None:
        """Let those serve whose cold start is over."""
        for w, slot in self.slots.items():
            if slot.ready_s <= now_s:
                slot.state, slot.since_s, slot.ready_s = SERVES, now_s, inf
                change_worker(self._run.ledger, self._run.engines, self._run.cluster, w, READY)
                self._offer_soon(now_s)

    def scale(self, action: Scale, now_s: float) -> None:
        """Want another number from now on, or other numbers of each kind."""
        self.wanted = min(action.workers, len(self._run.ledger.workers))
        slots = Counter(self._hardware[kind] for kind in self.kinds)
        self.wanted_kinds = {kind: min(n, slots[self._hardware[kind]]) for kind, n in action.kinds.items()}
        if self.wanted_kinds:
            self.wanted = sum(self.wanted_kinds.values())
            self.record.kinds.append((now_s, dict(self.wanted_kinds)))
        self.record.reasons.append((now_s, action.reason))
        self._note(now_s)

    def follow(self, now_s: float, busy: frozenset[int]) -> None:
        """Take the steps to the wanted number; what is drained and at no end of a move stops."""
        if not self.wanted_kinds:
            self._follow(now_s, busy, self.wanted, None)
            return
        self._change_roles(now_s, busy)
        for kind in sorted(self._roles):
            self._follow(now_s, busy, self.wanted_kinds.get(kind, 0), kind)

    def _change_roles(self, now_s: float, busy: frozenset[int]) -> None:
        """Let workers that are wanted in another role take it, once they are empty."""
        standing = {kind: self._standing(kind, busy) for kind in sorted(self._roles)}
        wanted = {kind: self.wanted_kinds.get(kind, 0) for kind in standing}
        for worker, kind in role_changes(wanted, standing, self._hardware):
            w = int(worker)
            self._pay(w, now_s - self.slots[w].launched_s)
            self.kinds[w], self.slots[w] = kind, Slot(STARTS, now_s, now_s, changes_role=True)
            self.record.role_changes += 1
            change_worker(self._run.ledger, self._run.engines, self._run.cluster, w, DRAIN)
            self._offer_soon(now_s)
        for w, slot in self.slots.items():
            if slot.changes_role and not self._requests(w) + (w in busy):
                self._run.ledger.workers["role"][w] = self._roles[self.kinds[w]]
                slot.changes_role, slot.ready_s = False, now_s
            elif slot.changes_role:
                slot.since_s = now_s

    def _follow(self, now_s: float, busy: frozenset[int], wanted: int, kind: str | None) -> None:
        """The steps of one kind's slots, or (None) of all."""
        led = self._run.ledger
        standing = self._standing(kind, busy)
        serving = {int(s.worker) for s in standing if s.state == SERVES}
        for step in steps_to(wanted, standing, now_s, self._settings.start_limit_s, "the target"):
            if isinstance(step, Launch):
                for _ in range(step.workers):
                    self._launch(now_s, kind)
                continue
            w = int(step.worker)
            if isinstance(step, Drain):
                w = self._settings.drained(w, serving)
                serving.remove(w)
                self.slots[w].state, self.slots[w].since_s = DRAINS, now_s
                self.record.drains += 1
                change_worker(led, self._run.engines, self._run.cluster, w, DRAIN)
                self._offer_soon(now_s)
            elif isinstance(step, Undrain):
                self.slots[w].state, self.slots[w].since_s = SERVES, now_s
                change_worker(led, self._run.engines, self._run.cluster, w, READY)
                self._offer_soon(now_s)
            elif not self.slots[w].changes_role:
                self._stop(w, now_s)

    def _standing(self, kind: str | None, busy: frozenset[int]) -> list[Standing]:
        """The workers of one kind, or (None) of all."""
        return [
            Standing(WorkerId(str(w)), s.state, s.since_s, self._requests(w) + (w in busy))
            for w, s in self.slots.items()
            if kind is None or self.kinds[w] == kind
        ]

    def close(self, now_s: float) -> FleetRecord:
        """Pay for what is still there; the record."""
        for w, slot in self.slots.items():
            self._pay(w, now_s - slot.launched_s)
        self.slots.clear()
        prices = self._settings.usd_per_h
        if all(kind in prices for kind in self.record.kind_s):
            self.record.usd = sum(s * prices[kind] / 3600.0 for kind, s in self.record.kind_s.items())
        return self.record

    def _first(self) -> frozenset[int]:
        """The slots that serve at the beginning."""
        start, named = self._settings.start, self._settings.start_kinds
        if named is None:
            if start > len(self.kinds):
                raise BadInput(f"elastic fleet: start: {start} of {len(self.kinds)} workers at most")
            return frozenset(range(start))
        first: list[int] = []
        for kind, count in named.items():
            slots = [w for w, k in enumerate(self.kinds) if k == kind]
            if count > len(slots):
                raise BadInput(f"elastic fleet: start_kinds: {count} of {len(slots)} {kind} at most")
            first += slots[:count]
        return frozenset(first)

    def _pay(self, w: int, seconds: float) -> None:
        kind = self.kinds[w]
        self.record.worker_s += seconds
        self.record.kind_s[kind] = self.record.kind_s.get(kind, 0.0) + seconds
        self.record.gpu_s += seconds * self._profiles[w].tp_degree

    def _launch(self, now_s: float, kind: str | None) -> None:
        free = [w for w, of in enumerate(self.kinds) if w not in self.slots and (kind is None or of == kind)]
        if not free or self._beyond(self.kinds[free[0]]):
            return  # those that drain hold the rest; looked at again at the next heartbeat
        ready_s = now_s + self._settings.ready_after_s(self._launched)
        self.slots[free[0]] = Slot(STARTS, now_s, now_s, ready_s)
        self._launched += 1
        self.record.launches += 1
        self._note(now_s)

    def _beyond(self, kind: str) -> bool:
        """Whether one worker more of a kind breaks a limit."""
        scaling, held = self._scaling, Counter([kind, *(self.kinds[w] for w in self.slots)])
        return scaling is not None and scaling.mix.beyond(scaling.worker_types, held) is not None

    def _stop(self, w: int, now_s: float) -> None:
        slot = self.slots.pop(w)
        if slot.state == DRAINS:
            self.drain_s = now_s - slot.since_s
        self._run.ledger.workers["status"][w] = OFF
        forget_kv(self._run.ledger, self._run.engines, w)
        self._pay(w, now_s - slot.launched_s)
        self._note(now_s)

    def _requests(self, w: int) -> int:
        at = self._run.ledger.workers[w]
        loading = int(self._run.engines.workers["loading"][w])
        return int(at["running_n"]) + loading + int(queue_first(self._run.ledger, w) != NONE)

    def _offer_soon(self, now_s: float) -> None:
        clock = self._run.cluster.clock
        if self._run.cluster.queue.waiting:
            clock["offer_s"] = min(float(clock["offer_s"][0]), now_s + self._run.rules.offer_every_s)

    def _note(self, now_s: float) -> None:
        self.record.changes.append((now_s, self.wanted, len(self.slots)))
