"""What one placement costs: a single call from Python, and many inside compiled code.

    python benchmarks/assign.py [--quick] [--format table|json]

The ledger is a real one: Aladdin's Llama-2 13B workers on A100s, ShareGPT lengths, simulated for a while at
0.83 requests a second for each worker (some 85 % of what they can do) or at 1.1 (more than that: nobody
fits, so every worker is looked at to the end). Then the next arrivals are assigned, without being placed.
"cached": every prompt begins with 1,024 tokens that all share and goes on with as many of one of four
sessions a worker, in blocks of 16 that the workers cache.
Wall time is what a caller waits, and counts what else the machine did meanwhile; thread time does not.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.placement.assign import assign
from controlplane.placement.constraints import SettingsRow
from controlplane.placement.ledger import ANY_PHASE, NONE, Floats, Ledger
from controlplane.placement.policies import POLICY_CODE, PlacementSettings, Policy
from controlplane.prefixes import Prefixes
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.simulate import RunState, WorkerSpec, prepare
from experiments.lib.fewest_workers import CASES, Lengths, sharegpt
from experiments.lib.public_data import SHAREGPT
from experiments.lib.results import bar, flags, show

BARS_US = {120: 200.0, 1000: 1000.0}
CACHED_BAR_US = 300.0  # at 1,000 workers
SHARED, SESSIONS = 64, 4  # blocks of a prefix; sessions a worker
LOADS = {"0.83 rps each": 100 / 120, "1.1 rps each": 1.1}
POLICIES = (Policy.SPREAD, Policy.SLACK_FIT, Policy.BEST_FIT, Policy.JSQ)
WARM_S = 40.0
BATCH = 200  # arrivals assigned on one state of the ledger


@compiled
def assign_many(
    led: Ledger, policy: int, settings: SettingsRow, first: int, last: int, now_s: float, draw: Floats
) -> int:
    """Assign requests `first` to `last`; return how many found a worker."""
    placed = 0
    for r in range(first, last):
        if assign(led, policy, settings, r, now_s, False, ANY_PHASE, draw) != NONE:
            placed += 1
    return placed


def in_sessions(load: Workload, sessions: int, seed: int) -> Workload:
    """The load with prefixes in front of its prompts: one that all share, then one of so many."""
    session = np.random.default_rng(seed).integers(sessions, size=len(load))
    own = (session[:, None] + 1) * SHARED + np.arange(SHARED)
    ids = np.concatenate([np.tile(np.arange(SHARED), (len(load), 1)), own], axis=1)
    offsets = np.arange(len(load) + 1) * 2 * SHARED
    prompts = load.prompt_tokens + 2 * SHARED * 16
    return replace(load, prompt_tokens=prompts, prefixes=Prefixes(16, offsets, ids.ravel()))


def busy_fleet(
    workers: int, rate: float, states: int, lengths: Lengths, seed: int, cached: bool = False
) -> RunState:
    """A fleet some time into its load, with enough arrivals still to come."""
    requests = round(rate * (WARM_S + states)) + BATCH
    load = lengths.poisson(rate, requests, seed)
    run = prepare(
        in_sessions(load, SESSIONS * workers, seed) if cached else load,
        [WorkerSpec(CASES[0].profile)] * workers,
        CASES[0].slo,
        Policy.SPREAD,
        predictor=lengths.table(),
        seed=seed,
    )
    advance(run.ledger, run.engines, run.cluster, run.rules, WARM_S)
    return run


def measure(run: RunState, policy: Policy, states: int) -> dict[str, float]:
    """Times in µs, over `states` instants a fifth of a second apart."""
    settings, code, draw = PlacementSettings().row(), POLICY_CODE[policy], np.array([0.3, 0.6])
    wall, thread, batch, placed = [], [], 0, 0
    for _ in range(states):
        now_s = float(run.cluster.clock["now_s"][0]) + 0.2
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        view_all(run.ledger, run.engines, now_s)
        first = int(np.searchsorted(run.workload.arrival_s, now_s, "right"))
        coming = run.ledger.requests["arrival_s"][first : first + BATCH]
        to_come_s = coming.copy()
        coming[:] = now_s  # as if they had just arrived
        for r in range(first, first + BATCH):
            began, began_thread = perf_counter_ns(), thread_time_ns()
            assign(run.ledger, code, settings, r, now_s, False, ANY_PHASE, draw)
            thread.append(thread_time_ns() - began_thread)
            wall.append(perf_counter_ns() - began)
        began_thread = thread_time_ns()
        placed += assign_many(run.ledger, code, settings, first, first + BATCH, now_s, draw)
        batch += thread_time_ns() - began_thread
        coming[:] = to_come_s
    count = states * BATCH
    return {
        "placed": placed / count,
        "mean": _us(np.mean(wall)),
        "p50": _us(np.quantile(wall, 0.5)),
        "p99": _us(np.quantile(wall, 0.99)),
        "thread p99": _us(np.quantile(thread, 0.99)),
        "compiled mean": _us(batch / count),
    }


def _us(ns: float | NDArray[np.float64]) -> float:
    return round(float(ns) / 1e3, 1)


def main() -> int:
    asked = flags(__doc__, SHAREGPT).parse_args()
    lengths = sharegpt(asked.data)
    states = 5 if asked.quick else 40
    rows: list[dict[str, Any]] = []
    bars = {}
    for workers, limit in BARS_US.items():
        for load, each in LOADS.items():
            for policy in POLICIES:
                run = busy_fleet(workers, each * workers, states, lengths, asked.seed)
                measure(run, policy, 1)  # compiles, and warms the caches
                row = {"workers": workers, "load": load, "policy": policy.value}
                rows.append(row | measure(run, policy, states))
                if policy == Policy.SPREAD:
                    name = f"{workers} workers, {load}, spread with all constraints: p99 in µs of"
                    bars[f"{name} thread time"] = bar(rows[-1]["thread p99"], limit)
                    bars[f"{name} wall time"] = bar(rows[-1]["p99"], limit)
    for load, each in LOADS.items():
        run = busy_fleet(1000, each * 1000, states, lengths, asked.seed, cached=True)
        measure(run, Policy.SPREAD, 1)
        row = {"workers": 1000, "load": f"{load}, cached", "policy": Policy.SPREAD.value}
        rows.append(row | measure(run, Policy.SPREAD, states))
        name = f"1000 workers, {load}, cached, spread with all constraints: p99 in µs of"
        bars[f"{name} thread time"] = bar(rows[-1]["thread p99"], CACHED_BAR_US)
    return show("assign (times in µs)", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
