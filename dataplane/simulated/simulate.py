"""The simulation of a fleet on a trace: which worker served each request, and when it had its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from controlplane.control import State
from controlplane.placement.policies import EXACT, Policy
from controlplane.port import Decide
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.control_loop import ControlSettings, drive
from dataplane.simulated.elastic import Elastic, ElasticSettings, FleetRecord
from dataplane.simulated.run import OFFER_EVERY_S, Outcome, RunOptions, RunState, WorkerSpec, prepare

__all__ = [
    "OFFER_EVERY_S",
    "ControlSettings",
    "ElasticSettings",
    "FleetRecord",
    "Outcome",
    "RunState",
    "WorkerSpec",
    "prepare",
    "simulate",
    "simulate_elastic",
]


def simulate(
    workload: Workload,
    workers: Sequence[WorkerSpec],
    slo: Slo | Sequence[Slo],
    policy: Policy | str = Policy.SPREAD,
    *,
    control: ControlSettings | None = None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Run `workload` on `workers` to the end and return the outcome of every request.

    `slo`: one, or one for each of the workload's SLO classes. `control`: what tick is told, and what moves
    cost, under a policy with `+migrate`. The options are those of `RunOptions`.
    """
    state = prepare(workload, workers, slo, policy, **options)
    if state.rules.policy != EXACT and not state.migrates:
        advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    else:
        drive(state, control)
    return state.outcome()


def simulate_elastic(
    workload: Workload,
    slots: Sequence[WorkerSpec],
    slo: Slo | Sequence[Slo],
    elastic: ElasticSettings,
    control: ControlSettings,
    policy: Policy | str = Policy.SPREAD,
    *,
    decide: Decide | None = None,
    state: State | None = None,
    **options: Unpack[RunOptions],
) -> tuple[Outcome, FleetRecord]:
    """Run `workload` on a fleet whose size `control.tick` decides; the outcome, and what the fleet was.

    `slots`: the workers there may be at once. `decide`: another brain, for comparison; `state`: what it
    remembers at the start (a forecast's history). The rest as in `simulate`. The fleet is paid for until the
    last request has arrived and all have finished.
    """
    run = prepare(workload, slots, slo, policy, **options)
    fleet = Elastic(run, elastic)
    drive(run, control, fleet, decide, state)
    return run.outcome(), fleet.close(float(run.cluster.clock["now_s"][0]))
