"""What both planes keep or decide by the same code, fed the same story, comes out the same."""

import numpy as np
import pytest
from made_replies import fleet, request, worker

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.ledger import DECODING, DONE, generated
from controlplane.placement.rebalance import DeviationTracker
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.live.control.snapshot_builder import SnapshotBuilder
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.observe import deviations, loads
from dataplane.simulated.simulate import WorkerSpec, prepare

PROFILE = Profile(
    "made",
    "made",
    1,
    step=StepModel(0.02, 1e-4, 1e-3, 1e-5),
    prefill=PrefillModel(0.01, 2e-4),
    kv=KvModel(1_000_000, 16, 1),  # room for all: nobody is preempted
    engine=EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=512, max_seqs=256),
    residuals=Residuals(0.0, 0.0, 0.0, 0),
    source=Source("composed", "made up", "none", "2026-01-01"),
)


def as_replies(led):
    """The ledger as GET /v1/fleet and GET /v1/requests would tell of it."""
    workers = [worker(str(w), int(step)) for w, step in enumerate(led.workers["step"])]
    requests = [
        request(
            str(r),
            None if row["worker"] < 0 else str(row["worker"]),
            int(generated(led, r)) if row["phase"] == DECODING else 0,
            int(row["predicted"]),
        )
        for r, row in enumerate(led.requests)
        if row["phase"] != DONE
    ]
    return fleet(*workers), requests


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_both_planes_see_the_same_errors_of_algorithm_2(seed, factor):
    rng = np.random.default_rng(seed)
    n = 80
    load = Workload(np.sort(rng.uniform(0, 8, n)), rng.integers(1, 300, n), rng.integers(2, 150, n))
    predicted = np.maximum(load.output_tokens * factor * rng.lognormal(0, 0.5, n), 1).astype(np.int64)
    run = prepare(
        load, [WorkerSpec(PROFILE)] * 3, Slo(1.0, 0.1), "jsq", settings=None, predictor=None,
        predicted_tokens=predicted, seed=seed, transfer_s=0.0, patience=4.0, max_misses=None,
    )  # fmt: skip
    tracker, live = DeviationTracker(), SnapshotBuilder()
    seen = 0
    for now_s in np.arange(0.1, 14, 0.1):
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        view_all(run.ledger, run.engines, now_s)
        loads(run.ledger)  # renews outlived predictions, as every look of the control loop does
        errors = deviations(tracker, run.ledger)
        assert errors == live.snapshot(*as_replies(run.ledger), now_s).errors
        seen += any(e.sequences for e in errors.values())
    assert seen > 20
