"""Without a step planned ahead, a step takes longer with a few sequences than with one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controlplane.perfmodel.profile import HOST
from experiments.lib.ladders import ladder
from tokenfleet.profiles.fit_log import replay

ROUNDS, APART_S = 15, 1e5


def seconds(served: np.ndarray, rows: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Seconds of a token alone, and what each other first token and each other sequence adds."""
    first_s, last_s = served
    terms, took_s = [], []
    for i in np.flatnonzero(rows & (output > 1)):
        both_s = np.clip(np.minimum(last_s, last_s[i]) - np.maximum(first_s, first_s[i]), 0.0, None)
        lasted_s, gaps = last_s[i] - first_s[i], output[i] - 1
        new = ((first_s > first_s[i]) & (first_s <= last_s[i])).sum()
        terms.append((1.0, new / gaps, np.nansum(both_s) / lasted_s - 1.0))
        took_s.append(lasted_s / gaps)
    x, y, weight = np.array(terms), np.array(took_s), np.ones(len(took_s))
    for _ in range(ROUNDS):  # late tokens weigh little
        found = np.linalg.lstsq(x * weight[:, None], y * weight, rcond=None)[0]
        off = np.abs(y - x @ found)
        weight = 1.0 / np.sqrt(np.maximum(off / np.median(off), 1.0))
    return found


@pytest.mark.parametrize("name", ["apr29-root-short", "apr29-llmd-short", "apr29-root-sharegpt"])
def test_each_other_sequence_takes_what_the_host_adds(bench_data: Path, name: str) -> None:
    """Without the term the simulated slope is much too small."""
    runs = ladder(bench_data, name)
    worker = runs.worker()
    step = replace(worker.step, hinges=tuple(one for one in worker.step.hinges if one != HOST))
    found = []
    for profile in (None, worker, replace(worker, step=step)):
        times, rows, output = [], [], []
        for at, run in enumerate(runs.runs):
            done = run.log if profile is None else replay(run.log, profile)
            last_s = run.log.last_token_s if profile is None else done.finish_s
            times.append(np.stack([done.first_token_s, last_s]) + APART_S * at)
            rows.append(run.measured)
            output.append(run.log.workload.output_tokens)
        found.append(seconds(np.concatenate(times, axis=1), np.concatenate(rows), np.concatenate(output)))
    real, ours, without = found
    assert abs(real[2] - ours[2]) < 0.7 * (real[2] - without[2])
