"""Llumnix' auto-scaling (OSDI '24, Figures 14 and 15) in the simulated plane.

The published scaler, both systems under it: every 10 s (from 100 s on) the fleet's freeness F, Σ (free blocks
less blocks that wait) / Σ requests over instances that do not drain; below x instances are added, as if
empty, until F is x; when F without one instance is above y, one is drained. [x, y] = [10, 60] blocks in
Figure 14 and [x, x + 50] in Figure 15; 8 instances at the start, 1 to 16. An instance's start is a restart of
its worker, no machine's: `START_S` is assumed, the artifact has no number. The average is over the time from
the start to the last finish.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from llumnix_setup import (
    BEAT_S,
    BLOCK,
    INFAAS,
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

from controlplane.control import Action, Scale, Settings, State, tick
from controlplane.snapshot import DRAINING, Snapshot
from controlplane.workload import Workload
from dataplane.simulated.cluster import ControlSettings, ElasticSettings, WorkerSpec, simulate_elastic
from dataplane.simulated.elastic import Decide

START_S = 10.0
EVERY_S, FIRST_S = 10.0, 100.0
START = 8
RATES = (2.0, 2.2, 2.4, 2.6, 2.8, 3.0)
CVS = (2.0, 3.0, 4.0, 5.0, 6.0)
LOWS = (5.0, 25.0, 45.0, 65.0, 85.0)
INSTANCES = "Avg instances"
Points = dict[tuple[str, str, float, str], float]


def by_freeness(settings: Settings, low: float, high: float) -> Decide:
    """Moves by tick, the number of instances by the published rule; thresholds in blocks a request."""
    checked = [FIRST_S - EVERY_S]

    def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
        state, actions = tick(settings, state, seen)
        if seen.now_s - checked[0] < EVERY_S:
            return state, actions
        checked[0] = seen.now_s
        there = [w for w in seen.workers if w.state != DRAINING]
        each = max((w.capacity_tokens for w in there), default=0) / BLOCK
        loads = [w.counted() for w in there]
        requests = sum(load.running + load.waiting for load in loads)
        used = sum(load.held_tokens + load.waiting_tokens for load in loads) / BLOCK
        count = len(there)
        wanted = count
        while requests and (wanted * each - used) / requests < low and wanted < WORKERS:
            wanted += 1
        if wanted == count and count > 1 and (not requests or ((count - 1) * each - used) / requests > high):
            wanted = count - 1
        if wanted != seen.wanted:
            actions = [*actions, Scale(wanted, "freeness")]
        return state, actions

    return decide


def scaled(system: System, trace: Workload, low: float, high: float) -> dict[str, float]:
    """The figures' metrics of one run, the average number of instances among them."""
    control = system.control or ControlSettings(Settings(moves=None, shed=None), beat_s=BEAT_S, errors=False)
    outcome, record = simulate_elastic(
        trace,
        [WorkerSpec(a10())] * WORKERS,
        SLO,
        ElasticSettings(START, START_S),
        control,
        system.policy,
        decide=by_freeness(control.tick, low, high),
        settings=system.settings,
    )
    return metrics(outcome) | {INSTANCES: record.worker_s / outcome.end_s}


def systems() -> tuple[System, ...]:
    return INFAAS, llumnix("L-L"), System("ours", "freeness+migrate", our_moves())


def averaged(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def figure_14(rates: Iterable[float], cvs: Iterable[float], seeds: range) -> Points:
    """L-L under Poisson arrivals at several rates, and Gamma at 2.0 a second."""
    points: Points = {}
    asked = [("Poisson(rate)", rate, rate, 1.0) for rate in rates]
    asked += [("Gamma(CV)", cv, 2.0, cv) for cv in cvs]
    for row, x, rate, cv in asked:
        traces = [workload("L-L", rate, seed, cv) for seed in seeds]
        for system in systems():
            seen = averaged([scaled(system, trace, 10.0, 60.0) for trace in traces])
            points |= {(row, metric, x, system.name): y for metric, y in seen.items()}
        print(f"Figure 14: {row} {x:g} done", file=sys.stderr)
    return points


def figure_15(lows: Iterable[float], seeds: range) -> Points:
    """L-L, Gamma with CV 2 at 2.0 a second: P99 prefill latency and instances by threshold."""
    points: Points = {}
    traces = [workload("L-L", 2.0, seed, 2.0) for seed in seeds]
    for low in lows:
        for system in systems():
            seen = averaged([scaled(system, trace, low, low + 50.0) for trace in traces])
            for metric in ("Prefill P99 s", INSTANCES):
                points["threshold", metric, low, system.name] = seen[metric]
        print(f"Figure 15: threshold {low:g} done", file=sys.stderr)
    return points


def published_15(curves: Curves) -> Curves:
    """Figure 15's points (P99 over instances) by threshold, as `figure_15` has them."""
    found: Points = {}
    for (row, _, x, series), y in curves.items():
        low = float(row.removeprefix("threshold=").split()[0])
        found["threshold", INSTANCES, low, series] = x
        found["threshold", "Prefill P99 s", low, series] = y
    return found


def instances_at(points: Curves, system: str, p99_s: float) -> float | None:
    """Instances at which a system's curve has this P99, between its points (log of P99); None outside."""
    lows = sorted({key[2] for key in points if key[3] == system})
    line = sorted(
        (points["threshold", INSTANCES, low, system], points["threshold", "Prefill P99 s", low, system])
        for low in lows
    )
    for (n, p), (m, q) in pairwise(line):
        if min(p, q) <= p99_s <= max(p, q) and p != q:
            share = (math.log(p99_s) - math.log(p)) / (math.log(q) - math.log(p))
            return n + share * (m - n)
    return None
