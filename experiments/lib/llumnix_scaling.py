"""Llumnix' auto-scaling (OSDI '24, Figures 14 and 15) in the simulated plane.

The published scaler, INFaaS++ and Llumnix under it, as the artifact has it: every 10 s (from 100 s on) the
fleet's freeness F, Σ (free blocks less blocks that wait) / Σ requests. Below x instances are added, as if
empty, until F is x, and no more before those have started; where one drains it is taken back instead. When F
without one instance is above y, the last one is drained, if none drains: until it is empty it counts as one
request, with all its free blocks (and keeps the next from draining: without migration, for minutes). [x, y] =
[10, 60] blocks in Figure 14 and [x, x + 50] in Figure 15; 8 instances at the start, 1 to 16. An instance's
start is a restart of its worker, no machine's: `START_S` is assumed, the artifact has no number.

Ours is `control.tick` whole: its moves, and its rule by load, which runs where no line is known. Instances
are added at once to keep KV held and waiting below a share of what they have (`FILLS`), and taken away when
fewer would have done for `HOLD_S`. As many at a time as it takes.

Instances are paid for from their launch until they are empty, in all three; the average is over the time from
the start to the last finish.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from controlplane.control import Settings, State, tick
from controlplane.port import Decide
from controlplane.scaler.load import LoadSettings
from controlplane.snapshot import DRAINING, STARTING, Action, Scale, Snapshot
from controlplane.workload import Workload
from dataplane.simulated.elastic import ElasticSettings
from dataplane.simulated.elastic_run import simulate_elastic
from dataplane.simulated.simulate import ControlSettings, WorkerSpec
from experiments.lib.llumnix import (
    BEAT_S,
    BLOCK,
    INFAAS,
    OURS,
    SLO,
    WORKERS,
    Curves,
    System,
    a10,
    llumnix,
    metrics,
    our_moves,
    workload,
)
from experiments.lib.resume import Parts

START_S = 10.0
EVERY_S, FIRST_S = 10.0, 100.0
START = 8
RATES = (2.0, 2.2, 2.4, 2.6, 2.8, 3.0)
CVS = (2.0, 3.0, 4.0, 5.0, 6.0)
LOWS = (5.0, 25.0, 45.0, 65.0, 85.0)
LOW, HIGH = 10.0, 60.0
FILLS = (0.8, 0.9, 1.0, 1.1, 1.2)
HOLD_S = 10.0
STILL = Settings(moves=None, shed=None)
ALIKE = ElasticSettings(START, START_S)
INSTANCES, P99 = "Avg instances", "Prefill P99 s"
Curve = list[tuple[float, float]]  # (instances, P99 prefill latency)
Points = dict[tuple[str, str, float, str], float]


def by_freeness(settings: Settings, low: float, high: float) -> Decide:
    """Moves by tick, the number of instances by the published rule; thresholds in blocks a request."""
    checked = [FIRST_S]

    def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
        state, actions = tick(settings, state, seen)
        if seen.now_s - checked[0] < EVERY_S:
            return state, actions
        checked[0] = seen.now_s
        wanted = instances_wanted(seen, low, high)
        if wanted != seen.wanted:
            actions = [*actions, Scale(wanted, "freeness")]
        return state, actions

    return decide


def instances_wanted(seen: Snapshot, low: float, high: float) -> int:
    """One check of the published scaler."""
    there = [w for w in seen.workers if w.state != STARTING]
    starts = len(there) < len(seen.workers)
    drains = any(w.state == DRAINING for w in there)
    each = max((w.capacity_tokens for w in there), default=0) / BLOCK
    loads = [w.counted() for w in there]
    running = sum(1 if w.state == DRAINING else load.running for w, load in zip(there, loads, strict=True))
    waiting = sum(load.waiting for load in loads)
    free = len(there) * each - sum(load.held_tokens for load in loads) / BLOCK
    wait = sum(load.waiting_tokens for load in loads) / BLOCK
    if running + waiting and (free - wait) / (running + waiting) < low:
        if starts:
            return seen.wanted
        wanted = len(there)
        while not drains and (free - wait) / (running + waiting) < low and wanted < WORKERS:
            wanted, free = wanted + 1, free + each
        return wanted
    requests = running + (waiting > 0)
    after = (max(free - each, 0.0) - wait) / requests if requests else math.inf
    return seen.wanted - 1 if after > high and not drains and len(there) > 1 else seen.wanted


class LastFirst(ElasticSettings):
    """Scaling in takes the last instance, whatever it holds."""

    def drained(self, emptiest: int, serving: Collection[int]) -> int:
        return max(serving)


def scaled(system: System, trace: Workload, low: float, high: float) -> dict[str, float]:
    """The metrics of one run under the published scaler, the average number of instances among them."""
    control = system.control or ControlSettings(STILL, beat_s=BEAT_S, errors=False)
    elastic = LastFirst(START, START_S)
    return measured(system, trace, control, elastic, by_freeness(control.tick or STILL, low, high))


def measured(
    system: System, trace: Workload, control: ControlSettings, elastic: ElasticSettings, decide: Decide | None
) -> dict[str, float]:
    """The figures' metrics of one run; `decide` None: tick's own rule."""
    outcome, record = simulate_elastic(
        trace,
        [WorkerSpec(a10())] * WORKERS,
        SLO,
        elastic,
        control,
        system.policy,
        decide=decide,
        settings=system.settings,
    )
    return metrics(outcome) | {INSTANCES: record.worker_s / outcome.end_s}


def ours(fill: float) -> ControlSettings:
    """Ours: tick's rule by load, aiming at so much of the KV, and its moves."""
    moves = our_moves()
    load = LoadSettings(1, WORKERS, high=fill, low=0.95 * fill, rise_s=0.0, hold_s=HOLD_S)
    return replace(moves, tick=replace(moves.tick or STILL, load=load))


def averaged(runs: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every metric over repeats."""
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


@dataclass(frozen=True)
class Runs:
    """One traffic (L-L at a rate and CV), its seeds, and where the runs of it are kept."""

    rate_rps: float
    cv: float
    seeds: range
    parts: Parts

    def under(self, system: System, low: float, high: float) -> dict[str, float]:
        """A published system under the published scaler."""
        return averaged(
            [
                self._part(
                    seed, f"{system.name} {low:g}-{high:g}", partial(scaled, system, low=low, high=high)
                )
                for seed in self.seeds
            ]
        )

    def by_fill(self, fills: Iterable[float]) -> dict[float, dict[str, float]]:
        """The figures' metrics of ours by how full it keeps its instances."""
        return {
            fill: averaged(
                [self._part(seed, f"ours {fill:g}", partial(_ours_at, fill=fill)) for seed in self.seeds]
            )
            for fill in fills
        }

    def _part(self, seed: int, says: str, run: Callable[[Workload], dict[str, float]]) -> dict[str, float]:
        name = f"scaling {self.rate_rps:g} CV {self.cv:g} seed {seed} {says}"
        found: dict[str, float] = self.parts.part(
            name, lambda: run(workload("L-L", self.rate_rps, seed, self.cv))
        )
        return found


def _ours_at(trace: Workload, fill: float) -> dict[str, float]:
    return measured(OURS, trace, ours(fill), ALIKE, None)


def figure_14(
    rates: Iterable[float], cvs: Iterable[float], fills: Sequence[float], seeds: range, parts: Parts
) -> tuple[Points, dict[tuple[str, float], Curve]]:
    """L-L under Poisson arrivals at several rates, and Gamma at 2.0 a second; the curves of ours beside it.

    Among the points ours is at the fill in the middle.
    """
    points: Points = {}
    curves: dict[tuple[str, float], Curve] = {}
    asked = [("Poisson(rate)", rate, rate, 1.0) for rate in rates]
    asked += [("Gamma(CV)", cv, 2.0, cv) for cv in cvs]
    for row, x, rate, cv in asked:
        runs = Runs(rate, cv, seeds, parts)
        for system in (INFAAS, llumnix("L-L")):
            seen = runs.under(system, LOW, HIGH)
            points |= {(row, metric, x, system.name): y for metric, y in seen.items()}
        own = runs.by_fill(fills)
        curves[row, x] = [(one[INSTANCES], one[P99]) for one in own.values()]
        middle = own[fills[len(fills) // 2]]
        points |= {(row, metric, x, "ours"): y for metric, y in middle.items()}
        print(f"Figure 14: {row} {x:g} done", file=sys.stderr)
    return points, curves


def figure_15(
    lows: Sequence[float], fills: Sequence[float], seeds: range, parts: Parts
) -> tuple[Points, dict[str, Curve]]:
    """L-L, Gamma with CV 2 at 2.0 a second: P99 prefill latency and instances by threshold, ours by fill."""
    points: Points = {}
    runs = Runs(2.0, 2.0, seeds, parts)
    for low in lows:
        for system in (INFAAS, llumnix("L-L")):
            seen = runs.under(system, low, low + 50.0)
            for metric in (P99, INSTANCES):
                points["threshold", metric, low, system.name] = seen[metric]
        print(f"Figure 15: threshold {low:g} done", file=sys.stderr)
    own = runs.by_fill(fills)
    middle = own[fills[len(fills) // 2]]
    points |= {("threshold", m, low, "ours"): middle[m] for low in lows for m in (P99, INSTANCES)}
    curves = {name: curve(points, name) for name in ("INFaaS++", "Llumnix")}
    return points, curves | {"ours": [(one[INSTANCES], one[P99]) for one in own.values()]}


def curve(points: Curves, system: str) -> Curve:
    """A system's curve in Figure 15."""
    lows = sorted({key[2] for key in points if key[3] == system})
    return [(points["threshold", INSTANCES, x, system], points["threshold", P99, x, system]) for x in lows]


def published_15(curves: Curves) -> Curves:
    """Figure 15's points (P99 over instances) by threshold, as `figure_15` has them."""
    found: Points = {}
    for (row, _, x, series), y in curves.items():
        low = float(row.removeprefix("threshold=").split()[0])
        found["threshold", INSTANCES, low, series] = x
        found["threshold", P99, low, series] = y
    return found


def instances_at(line: Curve, p99_s: float) -> float | None:
    """The fewest instances at which a curve is no worse than this P99, between its points (log of P99).

    Where every point is better: those of the cheapest point, at which fewer might do. None where none is.
    """
    points = sorted(line)
    if points[0][1] <= p99_s:
        return points[0][0]
    for (n, p), (m, q) in pairwise(points):
        if q <= p99_s < p:
            return n + (math.log(p99_s) - math.log(p)) / (math.log(q) - math.log(p)) * (m - n)
    return None
