"""Requests that one LMBench engine served and its file lacks: 70B on the k8s cluster, `short`.

In the first ten seconds of each run a request that comes alone takes a step of prefill. Later ones find the
engine amid a step, although no request of the file runs, and their tokens take longer.
"""

from pathlib import Path

import numpy as np
from lone_requests import are_alone
from numpy.typing import NDArray

from experiments.lib.ladders import ladder

EARLY_S, LATER_S = 10.0, 15.0
STEP_S = 0.05


def alone(bench_data: Path, name: str) -> dict[str, NDArray[np.float64]]:
    """TTFT and TPOT of lone requests, shape [2, requests], by when in their run they came."""
    rows: dict[str, list[NDArray[np.float64]]] = {"early": [], "later": []}
    for run in ladder(bench_data, name).runs:
        since_s = run.log.workload.arrival_s - run.log.workload.arrival_s[run.measured].min()
        both = np.array([run.log.ttft_s, run.log.tpot_s])
        lone = are_alone(run)
        rows["early"].append(both[:, lone & (since_s < EARLY_S)])
        rows["later"].append(both[:, lone & (since_s >= LATER_S)])
    return {when: np.concatenate(parts, axis=1) for when, parts in rows.items()}


def test_after_ten_seconds_a_lone_request_finds_the_engine_amid_a_step(bench_data: Path) -> None:
    early, later = alone(bench_data, "l70-k8s-vllm-short").values()
    assert early.shape[1] > 40
    assert later.shape[1] > 200
    low, high = np.quantile(later[0], (0.1, 0.9))
    assert np.subtract(*np.quantile(early[0], (0.75, 0.25))) < 0.3 * STEP_S
    assert 0.8 * STEP_S < high - low < 1.2 * STEP_S  # any moment of a step is as likely
    assert np.nanmedian(later[1]) > 1.05 * np.nanmedian(early[1])


def test_another_engine_of_the_same_harness_has_no_such_load(bench_data: Path) -> None:
    early, later = alone(bench_data, "apr29-root-short").values()
    assert abs(np.median(later[0]) - np.median(early[0])) < 0.001
    assert np.subtract(*np.quantile(later[0], (0.9, 0.1))) < 0.003
