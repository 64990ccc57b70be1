"""Each rule of virtual usage, on and off, in simulation: headroom, room for what waits, consolidation.

    python experiments/planning/virtual_usage.py [--quick] [--resume FOLDER] [--format table|json]

The workers and targets of moves_in_overload.py, L-L lengths, three streams of 3,000 Poisson arrivals:

    headroom        3.6/s, a tenth of the requests at high priority; 0.4 of KV kept free beside them, or none
    room            4.1/s; moves for what waits at the gateway, or none
    consolidation   2/s; after a third of the arrivals 8 of 16 workers are drained, packed into the others, or
                    left until what they have ends

Decode times are means over requests of the time of a token after the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from controlplane.control import Settings, State, tick
from controlplane.placement.policies import PlacementSettings, Policy
from controlplane.snapshot import Action, Scale, Snapshot
from controlplane.workload import Workload
from dataplane.simulated.simulate import (
    ControlSettings,
    ElasticSettings,
    Outcome,
    WorkerSpec,
    simulate,
    simulate_elastic,
)
from experiments.lib.llumnix import WORKERS, workload
from experiments.lib.results import flags, show
from experiments.lib.without import without_consolidation, without_room
from experiments.planning.moves_in_overload import PROFILE, TARGETS

SEEDS = (1, 2, 3)
REQUESTS = 3000
FLEET = [WorkerSpec(PROFILE)] * WORKERS
HEADROOM = 0.4


def seen(outcome: Outcome, rows: np.ndarray) -> dict[str, float]:
    """What some of the requests got."""
    return {
        "requests": float(rows.sum()),
        "late": float((~outcome.met[rows]).sum()),
        "TTFT p99 s": float(np.percentile(outcome.ttft_s[rows], 99)),
        "decode ms": 1e3 * float(np.nanmean(outcome.tpot_s[rows])),
        "decode p99 ms": 1e3 * float(np.nanpercentile(outcome.tpot_s[rows], 99)),
    }


def headroom(on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    plain = workload("L-L", 3.6, seed, requests=requests)
    high = np.random.default_rng([seed, 13]).random(requests) < 0.1
    load = Workload(plain.arrival_s, plain.prompt_tokens, plain.output_tokens, high.astype(np.int64))
    kept = PlacementSettings(headroom=HEADROOM if on else 0.0)
    outcome = simulate(load, FLEET, TARGETS, "spread+migrate", settings=kept)
    return {"high": seen(outcome, high), "normal": seen(outcome, ~high)}


def room(on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    with without_room(not on):
        outcome = simulate(workload("L-L", 4.1, seed, requests=requests), FLEET, TARGETS, "spread+migrate")
    return {"all": seen(outcome, np.ones(requests, bool))}


def consolidation(on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    load = workload("L-L", 2.0, seed, requests=requests)
    at_s = float(load.arrival_s[requests // 3])
    settings = Settings.of_policy(Policy.SPREAD)

    def decide(state: State, snapshot: Snapshot) -> tuple[State, list[Action]]:
        state, actions = tick(settings, state, snapshot)
        if snapshot.now_s >= at_s and snapshot.wanted == WORKERS:
            actions.append(Scale(WORKERS // 2, "half are enough"))
        return state, actions

    with without_consolidation(not on):
        outcome, record = simulate_elastic(
            load, FLEET, TARGETS, ElasticSettings(WORKERS), ControlSettings(), "spread+migrate", decide=decide
        )
    gone_s = max((t for t, _, there in record.changes if there == WORKERS // 2), default=np.inf)
    return {"all": seen(outcome, np.ones(requests, bool)) | {"until 8 are gone s": gone_s - at_s}}


RULES: dict[str, Callable[[bool, int, int], dict[str, dict[str, float]]]] = {
    "headroom": headroom,
    "room": room,
    "consolidation": consolidation,
}


def run(asked: argparse.Namespace) -> int:
    seeds, requests = (SEEDS[:1], 800) if asked.quick else (SEEDS, REQUESTS)
    rows: list[dict[str, Any]] = []
    for rule, measure in RULES.items():
        for on in (False, True):
            runs = [
                asked.resume.part(f"{rule} {on} {seed} {requests}", partial(measure, on, seed, requests))
                for seed in seeds
            ]
            for group in runs[0]:
                means = {name: float(np.mean([one[group][name] for one in runs])) for name in runs[0][group]}
                rows.append({"rule": rule, "is on": on, "priority": group} | means)
    return show("virtual_usage", rows, {}, asked)


if __name__ == "__main__":
    sys.exit(run(flags(__doc__, resumes=True).parse_args()))
