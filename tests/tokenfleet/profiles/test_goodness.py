"""A calibration shows how well it fits: misfit that no number removes is refused, or adds uncertainty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Frontend, Profile, with_times
from controlplane.perfmodel.step import StepModel
from controlplane.perfmodel.uncertainty import draw_profile
from controlplane.prefixes import Prefixes
from controlplane.workload import Workload
from tokenfleet.profiles.fit_log import calibrated, replay
from tokenfleet.profiles.goodness import BOUNDS, goodness_of
from tokenfleet.profiles.measurements import RequestLog

BLOCK = 16
ASSUMED = made_profile(
    StepModel(0.02, 4e-5, 2e-4, 2e-7),
    KvModel(40_000, BLOCK),
    EngineLimits(max_batched_tokens=1024, max_seqs=64),
)
REQUESTS = 400
DRAWS = 24


def load(seed: int, rate_rps: float, shared: float = 0.0) -> Workload:
    """Requests at this rate; of such a share of each prompt's blocks one of 12 groups has had all."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(64, 1500, REQUESTS), rng.integers(10, 160, REQUESTS)
    lists, own = [], 10_000
    for tokens in prompt:
        blocks, group = int(tokens) // BLOCK, int(rng.integers(12))
        common = int(shared * blocks)
        lists.append(np.concatenate([1000 * group + np.arange(common), own + np.arange(blocks - common)]))
        own += blocks
    _, ids = np.unique(np.concatenate(lists), return_inverse=True)
    prefixes = Prefixes(BLOCK, np.concatenate([[0], np.cumsum([len(one) for one in lists])]), ids)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, REQUESTS))
    return Workload(arrival_s, prompt, output, prefixes=prefixes if shared else None)


def served(work: Workload, engine: Profile, workers: int, caches: bool, policy: str) -> RequestLog:
    """The log that such engines would have written."""
    blank = RequestLog(work, work.arrival_s, work.arrival_s)
    done = replay(blank, engine, workers, caches, policy)
    return RequestLog(work, done.first_token_s, done.finish_s)


def kv(tokens: int) -> Profile:
    return replace(ASSUMED, kv=replace(ASSUMED.kv, capacity_tokens=tokens))


# What the engines were, beside what is assumed: 40,000 tokens of KV, 64 seats, requests in turn.
WRONG = {
    "KV half as large": (kv(20_000), 1, 6.0, 0.0, True, "round-robin"),
    "KV a third as large": (kv(13_000), 1, 5.0, 0.0, True, "round-robin"),
    "KV three times as large": (kv(120_000), 1, 11.0, 0.0, True, "round-robin"),
    "seats": (ASSUMED.with_engine(max_seqs=12), 1, 5.0, 0.0, True, "round-robin"),
    "a foreign cache": (ASSUMED, 1, 9.0, 0.7, True, "round-robin"),
    "a foreign cache, half of each prompt": (ASSUMED, 1, 8.0, 0.5, True, "round-robin"),
    "no cache": (ASSUMED, 1, 6.0, 0.7, False, "round-robin"),
    "random placement on four": (ASSUMED, 4, 28.0, 0.0, True, "random"),
    "random placement on two": (ASSUMED, 2, 14.0, 0.0, True, "random"),
    "the least-loaded of two drawn": (ASSUMED, 4, 30.0, 0.0, True, "least-request"),
}


def assumed_log(log: RequestLog, wrong: str) -> RequestLog:
    """The log as read; the blocks of a foreign cache are unknown."""
    if "foreign" not in wrong:
        return log
    work = log.workload
    return replace(log, workload=Workload(work.arrival_s, work.prompt_tokens, work.output_tokens))


@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_step_time_explains_is_refused_or_within_the_doubt(wrong: str) -> None:
    engine, workers, rate_rps, shared, caches, policy = WRONG[wrong]
    real = with_times(engine, 1.1, 1.15)
    learn, later = (
        assumed_log(served(load(seed, rate_rps, shared), real, workers, caches, policy), wrong)
        for seed in (1, 2)
    )
    everything = np.ones(REQUESTS, np.bool_)
    made, _, fit = calibrated(learn, ASSUMED, everything, workers)
    if fit.is_refused:
        with pytest.raises(BadInput, match=r"mine.jsonl: does not fit: .* possible cause: "):
            fit.refuse("mine.jsonl")
        return
    rng = np.random.default_rng(3)
    drawn = [replay(later, draw_profile(made, rng), workers) for _ in range(DRAWS)]
    for name in ("e2e_s", "tpot_s"):
        said = [float(np.nanmean(d.finish_s - d.arrival_s if name == "e2e_s" else d.tpot_s)) for d in drawn]
        assert min(said) <= np.nanmean(getattr(later, name)) <= max(said), (name, fit)


@pytest.mark.parametrize("seed", range(4))
def test_a_log_that_step_times_explain_fits_and_widens_nothing(seed: int) -> None:
    real = replace(with_times(ASSUMED, 0.85, 1.3), frontend=Frontend(0.008))
    learn = served(load(seed, 5.0, 0.5), real, 1, True, "round-robin")
    made, _, fit = calibrated(learn, ASSUMED, np.ones(REQUESTS, np.bool_))
    assert not fit.is_refused
    assert fit.doubt < 0.02, fit
    fit.refuse("mine.jsonl")
    assert made.residuals.unseen_relative < 0.1


def test_noise_of_single_requests_is_no_misfit() -> None:
    log = served(load(5, 5.0), ASSUMED, 1, True, "round-robin")
    chance = np.random.default_rng(0).lognormal(0.0, 0.1, REQUESTS)
    noisy = replace(log, last_token_s=log.first_token_s + (log.last_token_s - log.first_token_s) * chance)
    fit = goodness_of(noisy, replay(log, ASSUMED), np.ones(REQUESTS, np.bool_))
    assert not fit.is_refused
    assert fit.doubt < 0.1


def test_the_part_that_is_furthest_off_is_named() -> None:
    log = served(load(6, 5.0), ASSUMED, 1, True, "round-robin")
    late = np.where(log.workload.prompt_tokens > 1000, 2.0, 0.0)
    off = RequestLog(log.workload, log.first_token_s + late, log.last_token_s + late)
    fit = goodness_of(off, replay(log, ASSUMED), np.ones(REQUESTS, np.bool_))
    assert fit.is_refused
    assert fit.misfit["TTFT"] > BOUNDS["TTFT"]
    assert fit.misfit["TPOT"] < 1e-9
    assert "the longest prompts is" in fit.text or "the slowest tenth" in fit.text
