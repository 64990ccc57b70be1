"""A simulated fleet whose size changes mid-run: launches with cold starts, drains, stops, and what they cost.

The steps to a wanted number are scaler.drain's, as in the live plane. A worker is paid for from its launch to
its stop, so a cold start and a drain cost what they take. The run's workers are slots: as many as may ever be
there at once, of one kind or several, taken in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from controlplane.control import State
from controlplane.errors import BadInput
from controlplane.placement.ledger import NONE, OFF, SERVING, queue_first
from controlplane.scaler.drain import Drain, Launch, Standing, Undrain, steps_to
from controlplane.snapshot import DRAINING as DRAINS
from controlplane.snapshot import SERVING as SERVES
from controlplane.snapshot import STARTING as STARTS
from controlplane.snapshot import Action, Scale, Snapshot
from controlplane.types import WorkerId
from dataplane.simulated.cluster_records import DRAIN, READY
from dataplane.simulated.loop import change_worker
from dataplane.simulated.state import RunState

Decide = Callable[[State, Snapshot], tuple[State, list[Action]]]


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """`start`: workers that serve at the beginning. `cold_start_s`: launch to serving.

    `never_ready`: launches (0 = the first) whose worker never comes up; it is given up after `start_limit_s`.
    `last_first`: scaling in takes the highest slot, whatever it holds, as some published systems do.
    """

    start: int = 1
    cold_start_s: float = 60.0
    start_limit_s: float = 600.0
    never_ready: frozenset[int] = frozenset()
    last_first: bool = False

    def __post_init__(self) -> None:
        if self.start < 0 or not 0 <= self.cold_start_s < inf or not self.start_limit_s > 0:
            raise BadInput(f"elastic fleet: need start and cold_start_s of at least 0, got {self}")


@dataclass(slots=True)
class Slot:
    """A worker that is there: its state and since when, when it was launched, when it is ready."""

    state: str
    since_s: float
    launched_s: float
    ready_s: float = inf


@dataclass
class FleetRecord:
    """What the fleet was: (seconds, workers wanted, workers paid for) at every change, and the sums."""

    changes: list[tuple[float, int, int]] = field(default_factory=list)
    worker_s: float = 0.0
    launches: int = 0
    drains: int = 0
    reasons: list[tuple[float, str]] = field(default_factory=list)


class Elastic:
    """The slots of a run. Every method leaves ledger and engines consistent at `now_s`."""

    def __init__(self, run: RunState, settings: ElasticSettings) -> None:
        if settings.start > len(run.ledger.workers):
            raise BadInput(
                f"elastic fleet: start: {settings.start} of {len(run.ledger.workers)} workers at most"
            )
        self._run, self._settings = run, settings
        self.slots: dict[int, Slot] = {}
        self.record = FleetRecord()
        self.wanted = settings.start
        self.drain_s = 0.0
        self._launched = 0
        for w in range(len(run.ledger.workers)):
            run.ledger.workers["status"][w] = SERVING if w < settings.start else OFF
            if w < settings.start:
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
        """Want another number from now on."""
        self.wanted = min(action.workers, len(self._run.ledger.workers))
        self.record.reasons.append((now_s, action.reason))
        self._note(now_s)

    def follow(self, now_s: float, busy: frozenset[int]) -> None:
        """Take the steps to the wanted number; what is drained and at no end of a move stops."""
        led = self._run.ledger
        standing = [
            Standing(WorkerId(str(w)), s.state, s.since_s, self._requests(w) + (w in busy))
            for w, s in self.slots.items()
        ]
        serving = sorted((w for w, s in self.slots.items() if s.state == SERVES), reverse=True)
        for step in steps_to(self.wanted, standing, now_s, self._settings.start_limit_s, "the target"):
            if isinstance(step, Launch):
                for _ in range(step.workers):
                    self._launch(now_s)
                continue
            w = int(step.worker)
            if isinstance(step, Drain):
                if self._settings.last_first:
                    w = serving.pop(0)
                self.slots[w].state, self.slots[w].since_s = DRAINS, now_s
                self.record.drains += 1
                change_worker(led, self._run.engines, self._run.cluster, w, DRAIN)
                self._offer_soon(now_s)
            elif isinstance(step, Undrain):
                self.slots[w].state, self.slots[w].since_s = SERVES, now_s
                change_worker(led, self._run.engines, self._run.cluster, w, READY)
                self._offer_soon(now_s)
            else:
                self._stop(w, now_s)

    def close(self, now_s: float) -> FleetRecord:
        """Pay for what is still there; the record."""
        for w in tuple(self.slots):
            self.record.worker_s += now_s - self.slots[w].launched_s
        self.slots.clear()
        return self.record

    def _launch(self, now_s: float) -> None:
        free = [w for w in range(len(self._run.ledger.workers)) if w not in self.slots]
        if not free:  # those that drain hold the rest; looked at again at the next heartbeat
            return
        stuck = self._launched in self._settings.never_ready
        ready_s = inf if stuck else now_s + self._settings.cold_start_s
        self.slots[free[0]] = Slot(STARTS, now_s, now_s, ready_s)
        self._launched += 1
        self.record.launches += 1
        self._note(now_s)

    def _stop(self, w: int, now_s: float) -> None:
        slot = self.slots.pop(w)
        if slot.state == DRAINS:
            self.drain_s = now_s - slot.since_s
        self._run.ledger.workers["status"][w] = OFF
        self.record.worker_s += now_s - slot.launched_s
        self._note(now_s)

    def _requests(self, w: int) -> int:
        at = self._run.ledger.workers[w]
        return int(at["running_n"]) + int(queue_first(self._run.ledger, w) != NONE)

    def _offer_soon(self, now_s: float) -> None:
        clock = self._run.cluster.clock
        if int(clock["held_n"][0]):
            clock["offer_s"] = min(float(clock["offer_s"][0]), now_s + self._run.rules.offer_every_s)

    def _note(self, now_s: float) -> None:
        self.record.changes.append((now_s, self.wanted, len(self.slots)))
