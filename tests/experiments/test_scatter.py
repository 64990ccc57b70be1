"""Scatter of an engine's steps, by lone requests of LMBench on an A100 with vLLM of spring 2025.

Nothing but the engine makes their tokens late. Each took some twenty steps, so a scatter of each step is
divided by four or five, and one that lasts for seconds is not.
"""

from pathlib import Path

import numpy as np
import pytest
from lone_requests import are_alone

from experiments.lib.ladders import ladder
from tokenfleet.profiles.fit_log import replay


@pytest.mark.parametrize("rate", [1, 2])
def test_lone_requests_take_the_same_time_per_token_throughout_a_run(bench_data: Path, rate: int) -> None:
    runs = ladder(bench_data, "apr29-root-short")
    run = runs.runs[rate]
    said, lone = replay(run.log, runs.worker()), are_alone(run)
    assert lone.sum() > 80
    off = np.log(run.log.tpot_s[lone] / said.tpot_s[lone])
    assert off.std() < 0.005
    assert np.abs(off - np.median(off)).max() < 0.03  # a stall of one step would be 0.05
    first, second = np.array_split(off, 2)
    assert abs(first.mean() - second.mean()) < 0.002
    late_s = run.log.ttft_s[lone] - said.ttft_s[lone]
    assert np.subtract(*np.quantile(late_s, (0.95, 0.05))) < 0.003
