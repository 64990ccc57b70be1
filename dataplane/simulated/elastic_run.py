"""A simulated run whose number of workers the decisions change.

The plane tells them what live fleets tell: arrivals and outcomes since the last look, what waits, how long a
start and a drain take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from controlplane.control import State
from controlplane.errors import BadInput
from controlplane.placement.ledger import NONE, Ints, Ledger, Records
from controlplane.placement.outlook import clients_s
from controlplane.placement.policies import Policy
from controlplane.placement.queue import Queue
from controlplane.port import ActionOutcome as Acted
from controlplane.port import Decide
from controlplane.snapshot import Note, Scale, Snapshot
from controlplane.types import ClassArrivals, ClassOutcomes, Slo
from controlplane.workload import Workload
from dataplane.simulated.control_loop import ControlSettings, SimulatedPlane, drive
from dataplane.simulated.elastic import Elastic, ElasticSettings, FleetRecord
from dataplane.simulated.outcome import Outcome
from dataplane.simulated.run import RunOptions, RunState, WorkerSpec, prepare


class OutcomeCount:
    """What became of a run's requests, by class. `rows`: those that ended between the last two looks."""

    def __init__(self, slos: Sequence[Slo]) -> None:
        self._slos, self._sums = slos, np.zeros((len(slos), 4), np.int64)
        self._arrived, self._open = 0, np.zeros(0, np.int64)
        self.rows = np.zeros(0, np.int64)

    def look(self, led: Ledger, jobs: Records, slo_class: Ints, arrived: Ints) -> tuple[ClassOutcomes, ...]:
        """The counters, once the requests `arrived`, in the order of their arrival, are there."""
        rows = np.concatenate([self._open, arrived[self._arrived :]])
        ended = ~np.isnan(jobs["finish_s"][rows])
        self._arrived, self._open, rows = len(arrived), rows[~ended], rows[ended]
        self.rows = rows
        request, job = led.requests[rows], jobs[rows]
        finish_s, gaps = job["finish_s"], job["output"] - 1
        served = np.isfinite(finish_s)  # others were turned away
        ttft_s = request["first_s"] + clients_s(led, rows) - request["arrival_s"]
        ttft_met = served & (ttft_s <= request["ttft_s"])
        tpot_s = np.where(served & (gaps > 0), (finish_s - request["first_s"]) / np.maximum(gaps, 1), 0.0)
        tpot_met = served & (tpot_s <= job["tpot_s"])
        for column, counted in enumerate((np.ones_like(served), ttft_met, tpot_met, ttft_met & tpot_met)):
            self._sums[:, column] += np.bincount(slo_class[rows[counted]], minlength=len(self._slos))
        return tuple(
            ClassOutcomes(slo, *sums) for slo, sums in zip(self._slos, self._sums.tolist(), strict=True)
        )


class ElasticPlane(SimulatedPlane):
    """A run's engines behind the port, which may be scaled."""

    follows_size = True

    def __init__(self, run: RunState, control: ControlSettings, elastic: Elastic) -> None:
        super().__init__(run, control)
        self.fleet = elastic
        self._arrived = 0  # by the last look
        self.ended = OutcomeCount(run.slos)

    @property
    def next_s(self) -> float:
        """Also when a worker becomes ready."""
        return min(self.fleet.next_s, super().next_s)

    def act(self, now_s: float) -> None:
        """Do what is due at `now_s`; workers that are ready come first."""
        if self.fleet.next_s == now_s:
            self.fleet.act(now_s)
        else:
            super().act(now_s)

    def observe(self) -> Snapshot:
        """The fleet now, with the latest arrivals, their predicted lengths, and the waiting requests."""
        snapshot, run, elastic = super().observe(), self.run, self.fleet
        arrived = run.arrived
        before, self._arrived = self._arrived, len(arrived)
        new = arrived[before:]
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
            snapshot,
            wanted=elastic.wanted,
            arrivals=self._arrived - before,
            by_class=by_class,
            waiting_tokens=int(held_tokens(run.ledger, run.cluster.queue)),
            waiting_requests=run.cluster.queue.waiting,
            cold_start_s=elastic.cold_start_s,
            drain_s=elastic.drain_s,
            wanted_kinds=elastic.wanted_kinds,
            outcomes=self.ended.look(run.ledger, run.engines.requests, run.workload.slo_class, arrived),
        )

    def scale(self, change: Scale) -> str | None:
        self.fleet.scale(change, self.now_s)
        return None

    def note(self, note: Note) -> str | None:
        self.fleet.record.notes.append((self.now_s, note))
        return None

    def report(self, outcomes: Sequence[Acted]) -> None:
        """As of any fleet; the steps to the wanted number come before the caches that go along."""
        self.count(outcomes)
        self.fleet.follow(self.now_s, self.moves.busy() | self.bringing.sources)
        self.bring()

    def states(self) -> list[str | None]:
        return self.fleet.states()


def simulate_elastic(
    workload: Workload,
    slots: Sequence[WorkerSpec],
    slo: Slo | Sequence[Slo],
    elastic: ElasticSettings,
    control: ControlSettings,
    policy: Policy | str = Policy.SPREAD,
    *,
    decide: Decide | None = None,
    brain: Callable[[ElasticPlane], Decide] | None = None,
    state: State | None = None,
    **options: Unpack[RunOptions],
) -> tuple[Outcome, FleetRecord]:
    """Run `workload` on a fleet whose size `control.tick` decides; the outcome, and what the fleet was.

    `slots`: the workers there may be at once. `decide`: another brain, for comparison; `brain` makes one
    that sees the plane too. `state`: what it remembers at the start (a forecast's history). The rest as in
    `simulate`. The fleet is paid for until the last request has arrived and all have finished.
    """
    if any(spec.profile.ranks is not None for spec in slots):
        raise BadInput("simulate: a fleet of workers of several ranks has one size")
    run = prepare(workload, slots, slo, policy, **options)
    fleet = Elastic(run, elastic, None if control.tick is None else control.tick.scaling)
    plane = ElasticPlane(run, control, fleet)
    drive(plane, decide if brain is None else brain(plane), state)
    return run.outcome(), fleet.close(float(run.cluster.clock["now_s"][0]))


def held_tokens(led: Ledger, queue: Queue) -> int:
    """The tokens of all that wait: prompts, and outputs that were made before a worker was lost."""
    tokens = 0
    for head in queue.head.tolist() if queue.waiting else ():
        r = head
        while r != NONE:
            row = led.requests[r]
            tokens += int(row["prompt"]) + int(row["key"])
            r = int(row["next"])
    return tokens
