"""Prefill on top of cached context, on A100s: lone requests of LMBench's ShareGPT runs and the library."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from lone_requests import are_alone

from experiments.lib.ladders import BLOCK, ladder
from tokenfleet.profiles.accuracy import Run


def computed_and_cached(run: Run) -> np.ndarray:
    """Tokens of each prompt that earlier ones do not have, and that they have; shape [2, requests]."""
    prefixes, seen, cached = run.log.workload.prefixes, set(), []
    assert prefixes is not None
    for k, prompt in enumerate(run.log.workload.prompt_tokens):
        ids = prefixes.ids[prefixes.offsets[k] : prefixes.offsets[k + 1]].tolist()
        known = [one in seen for one in ids[: (int(prompt) - 1) // BLOCK]]
        cached.append(BLOCK * (known.index(False) if False in known else len(known)))
        seen.update(ids)
    return np.array([run.log.workload.prompt_tokens - cached, cached])


def lone(bench_data: Path, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of lone requests: tokens computed and cached, the step as measured and as the library has it."""
    runs = ladder(bench_data, name)
    worker, rows = runs.worker(), []
    for run in runs.runs:
        new, cached = computed_and_cached(run)
        said_s = worker.step.step_s(new, 0, 0, new**2 + 2 * new * cached)
        took_s = run.log.ttft_s - worker.frontend.seconds(new + cached)
        alone = are_alone(run)
        rows += [*zip(new[alone], cached[alone], took_s[alone], said_s[alone], strict=True)]
    new, cached, took_s, said_s = np.array(rows).T
    return new, cached, took_s, said_s


SWEEPS = pytest.mark.parametrize("name", ["apr29-root-sharegpt", "apr29-vllm-sharegpt"])


@SWEEPS
def test_a_lone_prompt_takes_as_long_as_the_tiles_that_it_fills(bench_data: Path, name: str) -> None:
    """A staircase: 4 ms and more from one tile of 128 tokens to the next, little within one."""
    new, _, took_s, _ = lone(bench_data, name)
    edges = (128, 192, 256, 320, 384, 448, 512)
    halves = [np.median(took_s[(new > low) & (new <= high)]) for low, high in pairwise(edges)]
    steps = np.diff(halves)
    assert min(steps[1], steps[3]) > 0.004
    assert max(steps[0], steps[2], steps[4]) < 0.0025


@SWEEPS
def test_the_library_is_amid_the_tiles(bench_data: Path, name: str) -> None:
    new, cached, took_s, said_s = lone(bench_data, name)
    inner = (new >= 128) & (new < 512)
    ratio = (took_s / said_s)[inner]
    assert inner.sum() > 100
    assert 1.0 < np.median(ratio) < 1.08
    third = np.quantile(cached[inner], (1 / 3, 2 / 3))
    little, much = ratio[cached[inner] <= third[0]], ratio[cached[inner] >= third[1]]
    assert abs(np.median(much) - np.median(little)) < 0.04  # attention to what is cached is not what is short
