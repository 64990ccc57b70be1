"""Sweeps with the same load on the same model differ as measured: the least that a prediction errs by."""

from pathlib import Path

import numpy as np
import pytest

from experiments.lib.ladders import ladder
from experiments.profiling.accuracy import FIGURES
from tokenfleet.profiles.accuracy import figures_of

PAIRS = {  # medians over rates: whole times, TPOT, mean TTFT, its p99
    ("apr29-root-sharegpt", "apr29-vllm-sharegpt"): (0.003, 0.003, 0.007, 0.037),
    ("apr29-root-long", "apr29-vllm-long"): (0.008, 0.006, 0.020, 0.084),
    ("apr29-vllm-long", "l8-ocp-vllm-long-low"): (0.012, 0.012, 0.017, 0.027),
    ("apr29-root-long", "l8-ocp-vllm-long-low"): (0.005, 0.005, 0.016, 0.070),
    ("apr29-root-short", "l8-ocp-vllm-x2-short"): (0.005, 0.002, 0.008, 0.069),
}


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_sweeps_of_one_load_differ_by_chance(bench_data: Path, pair: tuple[str, str]) -> None:
    one, other = ({run.rate_rps: run for run in ladder(bench_data, name).runs} for name in pair)
    off = []
    for rate_rps in one.keys() & other.keys():
        both = [figures_of(run.log, run.measured) for run in (one[rate_rps], other[rate_rps])]
        off.append([abs(both[0][name][what] / both[1][name][what] - 1) for name, what in FIGURES])
    assert np.median(off, axis=0).tolist() == pytest.approx(PAIRS[pair], abs=0.0006)
