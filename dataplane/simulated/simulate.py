"""The simulation of a fleet on a trace: which worker served each request, and when it had its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.control import State
from controlplane.placement.decide import PATIENCE
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import EXACT, PlacementSettings, Policy
from controlplane.port import Decide
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.control_loop import ControlSettings, drive
from dataplane.simulated.elastic import Elastic, ElasticSettings, FleetRecord
from dataplane.simulated.run import OFFER_EVERY_S, Outcome, RunState, WorkerSpec, prepare

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
    settings: PlacementSettings | None = None,
    predictor: LengthTable | None = None,
    predicted_tokens: NDArray[np.int64] | None = None,
    seed: int = 0,
    transfer_s: float = 0.0,
    patience: float = PATIENCE,
    max_misses: int | None = None,
    control: ControlSettings | None = None,
) -> Outcome:
    """Run `workload` on `workers` to the end and return what became of every request.

    `slo`: one, or one for each of the workload's SLO classes. `predictor` guesses output lengths (by
    default: learned from the workload's own lengths, the planner's situation); `predicted_tokens` [requests]
    overrides its first guess, for experiments with misprediction. `transfer_s`: KV hand-over in split mode.
    `patience`: a request the policy holds back is placed regardless after this many of its TTFT targets.
    `max_misses`: stop once more requests have missed, when only a yes or no is wanted. `control`: what
    tick is told, and what moves cost, under a policy with `+migrate`.
    """
    state = prepare(
        workload,
        workers,
        slo,
        policy,
        settings=settings,
        predictor=predictor,
        predicted_tokens=predicted_tokens,
        seed=seed,
        transfer_s=transfer_s,
        patience=patience,
        max_misses=max_misses,
    )
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
    settings: PlacementSettings | None = None,
    predictor: LengthTable | None = None,
    predicted_tokens: NDArray[np.int64] | None = None,
    seed: int = 0,
    patience: float = PATIENCE,
) -> tuple[Outcome, FleetRecord]:
    """Run `workload` on a fleet whose size `control.tick` decides; the outcome, and what the fleet was.

    `slots`: the workers there may be at once. `decide`: another brain, for comparison; `state`: what it
    remembers at the start (a forecast's history). The rest as in `simulate`. The fleet is paid for until the
    last request has arrived and all have finished.
    """
    run = prepare(
        workload,
        slots,
        slo,
        policy,
        settings=settings,
        predictor=predictor,
        predicted_tokens=predicted_tokens,
        seed=seed,
        transfer_s=0.0,
        patience=patience,
        max_misses=None,
    )
    fleet = Elastic(run, elastic)
    drive(run, control, fleet, decide, state)
    return run.outcome(), fleet.close(float(run.cluster.clock["now_s"][0]))
