"""Prefill on top of cached context, on A100s: lone requests of LMBench's ShareGPT runs and the library."""

from pathlib import Path

import numpy as np
import pytest

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


def are_alone(run: Run) -> np.ndarray:
    """Whether no other request runs from 20 ms before a request until its first token; shape [requests]."""
    arrival_s, ends_s = run.log.workload.arrival_s, run.log.last_token_s
    alone = run.measured.copy()
    for k in np.flatnonzero(alone):
        others = (arrival_s < arrival_s[k] + run.log.ttft_s[k]) & ~(ends_s < arrival_s[k] - 0.02)
        alone[k] = others[np.arange(len(others)) != k].sum() == (others & ~run.measured).sum()
    return alone


@pytest.mark.parametrize("name", ["apr29-root-sharegpt", "apr29-vllm-sharegpt"])
def test_a_lone_prompt_takes_longer_by_its_own_tokens_not_by_cached_ones(bench_data: Path, name: str) -> None:
    runs = ladder(bench_data, name)
    step, front, rows = runs.worker().step, runs.worker().frontend, []
    for run in runs.runs:
        new, cached = computed_and_cached(run)
        step_s = step.step_s(new, 0, 0, new**2 + 2 * new * cached)
        ratio = (run.log.ttft_s - front.seconds(new + cached)) / step_s
        rows += [*zip(new[are_alone(run)], cached[are_alone(run)], ratio[are_alone(run)], strict=True)]
    new, cached, ratio = np.array(rows).T
    inner = (new >= 128) & (new < 512)
    assert inner.sum() > 100
    assert 1.18 < np.median(ratio[inner]) < 1.26
    third = np.quantile(cached[inner], (1 / 3, 2 / 3))
    little, much = ratio[inner & (cached <= third[0])], ratio[inner & (cached >= third[1])]
    assert np.median(much) < np.median(little) + 0.01  # attention to what is cached is not what is short
