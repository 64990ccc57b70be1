"""First tokens of requests that a load generator sends together: the more there are, the later all are."""

from pathlib import Path

import numpy as np
import pytest

from experiments.lib.ladders import ladder
from tokenfleet.profiles.fit_log import replay

TOGETHER_S = 0.02


@pytest.mark.parametrize(
    ("name", "pair_s", "six_s"), [("apr29-root-short", 0.004, 0.042), ("apr29-llmd-short", 0.010, 0.072)]
)
def test_the_more_are_sent_at_once_the_later_all_of_them_are(
    bench_data: Path, name: str, pair_s: float, six_s: float
) -> None:
    runs = ladder(bench_data, name)
    run = runs.runs[-1]
    late_s = (run.log.ttft_s - replay(run.log, runs.worker()).ttft_s)[run.measured]
    sent_s = run.log.workload.arrival_s[run.measured]
    group = np.concatenate([[0], np.cumsum(np.diff(sent_s) > TOGETHER_S)])
    size = np.bincount(group)[group]
    alone_s = np.median(late_s[size == 1])
    assert np.median(late_s[size == 2]) - alone_s == pytest.approx(pair_s, abs=0.003)
    assert np.median(late_s[(size >= 6) & (size <= 8)]) - alone_s == pytest.approx(six_s, abs=0.008)
    slowest = np.argsort(-run.log.ttft_s[run.measured])[: len(late_s) // 100 + 1]
    assert np.mean(size[slowest] >= 6) > 0.85
    assert np.mean(size >= 6) < 0.05
    # A launch is stamped before the generator builds its request, so that stamps tell what building takes.
    assert np.median(np.diff(sent_s)[np.diff(group) == 0]) == pytest.approx(0.0016, abs=0.0003)
