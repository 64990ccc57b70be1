"""A fleet in which no request can move: heartbeats without rules end as those with them do."""

from dataclasses import replace
from typing import Any

import numpy as np
from made_moves import profile

from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.control_loop import ControlSettings
from dataplane.simulated.simulate import WorkerSpec, is_still, prepare, simulate

COLUMNS = ("worker", "first_token_s", "finish_s", "preemptions", "migrations", "busy_s")


def crowd(seed: int) -> Workload:
    """Requests that wait at the gateway, and whose lengths are hard to predict."""
    rng = np.random.default_rng(seed)
    n = 300
    arrival_s = np.cumsum(rng.exponential(0.1, n))
    return Workload(arrival_s, rng.integers(1, 400, n), rng.integers(1, 300, n))


def test_heartbeats_without_rules_end_as_those_with_them() -> None:
    """With `control` given every rule is asked at every heartbeat; without it none is."""
    slo, waited, differs = Slo(1.0, 0.1), 0, 0
    for seed in range(9):
        workload, one = crowd(seed), profile(capacity=4096)
        workers = [WorkerSpec(one), WorkerSpec(replace(one, gpu="other"))]
        how: dict[str, Any] = {"max_misses": 20} if seed % 3 == 0 else {}
        how["predicted_tokens"] = np.maximum(workload.output_tokens * 3 // 10, 1)
        quick = simulate(workload, workers, slo, "spread+migrate", **how)
        asked = simulate(workload, workers, slo, "spread+migrate", control=ControlSettings(), **how)
        for name in COLUMNS:
            assert getattr(quick, name).tobytes() == getattr(asked, name).tobytes(), (seed, name)
        assert quick.migrations.sum() == 0
        waited += int((quick.first_token_s - workload.arrival_s > 0.5).sum())
        plain = simulate(workload, workers, slo, "spread", **how)
        differs += plain.worker.tobytes() != quick.worker.tobytes()
    assert waited > 20, "nothing waits, so no heartbeat is looked at"
    assert differs, "heartbeats have no say in where requests go"


def test_requests_can_move_where_two_workers_are_alike_or_one_goes_or_balance_moves_them() -> None:
    workload, one = crowd(0), profile(capacity=4096)
    other = replace(one, gpu="other")
    cases = {
        True: [("spread+migrate", [WorkerSpec(one), WorkerSpec(other)])],
        False: [
            ("spread", [WorkerSpec(one), WorkerSpec(other)]),
            ("jsq+migrate", [WorkerSpec(one), WorkerSpec(other)]),
            ("spread+migrate", [WorkerSpec(one), WorkerSpec(one)]),
            ("spread+migrate", [WorkerSpec(one), WorkerSpec(other, drain_s=1.0)]),
            ("spread+migrate", [WorkerSpec(one), WorkerSpec(other, ready_s=1.0)]),
            ("spread+migrate", [WorkerSpec(one), WorkerSpec(other, fails_s=((1.0, 2.0),))]),
        ],
    }
    for expected, runs in cases.items():
        for policy, workers in runs:
            assert is_still(prepare(workload, workers, Slo(1.0, 0.1), policy), workers) is expected
