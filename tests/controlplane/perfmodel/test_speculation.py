"""Speculation's step times against steps that verify drafts, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.perfmodel.coefficients import coefficient_row, decode_base_s
from controlplane.perfmodel.profile import Profile, speculating
from controlplane.perfmodel.speculation import Speculation, paces, pays_up_to
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome, WorkerSpec, simulate
from tokenfleet.profiles.form import parse_profile, profile_text
from tokenfleet.profiles.library import find_profiles

DRAFTS = Speculation((0.8, 0.6, 0.4), 0.0005, 0.0004)
LOOSE = Slo(1e6, 1e6)


def llama() -> Profile:
    (profile,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    return replace(profile, engine=replace(profile.engine, steps_ahead=0.0))  # as the engine below


def step_by_step(profile: Profile, drafts: Speculation, work: Workload, seed: int) -> np.ndarray:
    """[requests, 2] TTFT and TPOT of an engine that verifies each draft by chance, in endless memory."""
    rng, step = np.random.default_rng(seed), profile.step
    shares = np.array(drafts.acceptance)
    left, held = np.maximum(work.output_tokens - 1, 0), work.prompt_tokens.astype(float)
    first, finish = np.full(len(work), np.nan), np.full(len(work), np.nan)
    running: list[int] = []
    now_s, sent = 0.0, 0
    while sent < len(work) or running:
        if not running and sent < len(work):
            now_s = max(now_s, float(work.arrival_s[sent]))
        new = []
        while sent < len(work) and work.arrival_s[sent] <= now_s:
            new.append(sent)
            sent += 1
        prompts = work.prompt_tokens[new].astype(float)
        wide = (1 + drafts.drafted) * len(running)
        lasts_s = float(step.step_s(prompts.sum(), wide, held[running].sum(), (prompts**2).sum()))
        if running or new:
            lasts_s += drafts.round_s + drafts.draft_s * drafts.drafted
        now_s += lasts_s
        made = 1 + (rng.random(len(running))[:, None] < shares).sum(axis=1)
        for r, tokens in zip(running, made, strict=True):
            left[r] -= tokens
            held[r] += tokens
            if left[r] <= 0:
                finish[r] = now_s
        first[new] = now_s
        running = [r for r in [*running, *new] if left[r] > 0]
    ttft_s = first - work.arrival_s + profile.frontend.seconds(work.prompt_tokens)
    return np.column_stack([ttft_s, (finish - first) / np.maximum(work.output_tokens - 1, 1)])


def traffic(rate: float, n: int = 1500) -> Workload:
    rng = np.random.default_rng(3)
    prompt = np.clip(rng.lognormal(6, 0.6, n), 10, 2000).astype(np.int64)
    output = np.clip(rng.lognormal(5, 0.5, n), 20, 900).astype(np.int64)
    return Workload(np.cumsum(rng.exponential(1 / rate, n)), prompt, output)


def simulated(profile: Profile, work: Workload) -> Outcome:
    return simulate(work, [WorkerSpec(profile)], LOOSE, "round-robin", prefix_caching=False)


@pytest.mark.parametrize("rate", [2.0, 12.0])
def test_a_simulated_engine_that_speculates_is_as_fast_as_one_that_verifies_each_draft(rate: float) -> None:
    plain, work = llama(), traffic(rate)
    plain = replace(plain, engine=replace(plain.engine, max_batched_tokens=65536))
    real = step_by_step(plain, DRAFTS, work, seed=0)
    ours = simulated(speculating(plain, DRAFTS), work)
    without = simulated(plain, work)
    assert np.mean(ours.tpot_s) == pytest.approx(np.mean(real[:, 1]), rel=0.03)
    for q in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(ours.tpot_s, q) == pytest.approx(np.quantile(real[:, 1], q), rel=0.05)
    assert np.mean(ours.ttft_s) == pytest.approx(np.mean(real[:, 0]), rel=0.1)
    assert np.mean(without.tpot_s) > 1.5 * np.mean(real[:, 1])  # so that the above says something


def test_what_chance_does_to_a_request_is_what_drawing_each_draft_does() -> None:
    rng = np.random.default_rng(0)
    for gaps in (1, 10, 150):
        left, steps = np.full(8000, gaps), np.zeros(8000)
        while (left > 0).any():
            made = 1 + (rng.random(8000)[:, None] < np.array(DRAFTS.acceptance)).sum(axis=1)
            steps += left > 0
            left -= np.where(left > 0, made, 0)
        exact = steps * DRAFTS.tokens_per_step / gaps
        drawn = paces(DRAFTS, np.full(8000, gaps + 1), rng)
        assert drawn.mean() == pytest.approx(exact.mean(), rel=0.02)
        assert drawn.std() == pytest.approx(exact.std(), rel=0.12, abs=1e-9)
    assert paces(DRAFTS, np.array([1]), rng) == pytest.approx([1.0])


def test_a_verified_token_costs_what_the_tables_say_of_it() -> None:
    """70B on four H100s: aiconfigurator-core 0.12.0's steps of 4b sequences of a quarter of the context."""
    (plain,) = find_profiles("llama-3.1-70b", ["h100-sxm"], [4])
    faster = speculating(plain, Speculation((0.8, 0.6, 0.4)))
    batch = np.array([1.0, 8.0, 32.0, 64.0, 128.0, 256.0])
    whole_ms = faster.step.step_s(0, batch, batch * 1024) * 2.8e3
    tables_ms = np.array([15.16, 16.61, 19.67, 25.59, 41.27, 74.27]) + 1e3 * plain.source.host_s
    assert np.abs(whole_ms / tables_ms - 1).max() < 0.1


def test_speculation_stops_paying_where_verification_costs_more_than_it_saves() -> None:
    plain = llama()
    poor = speculating(plain, Speculation((0.3, 0.1, 0.03), 0.001))
    most = pays_up_to(plain.step, poor.step, plain.engine.max_seqs, 1024)
    assert 0 <= most < plain.engine.max_seqs
    rich = speculating(plain, Speculation((0.9, 0.8)))
    assert pays_up_to(plain.step, rich.step, plain.engine.max_seqs, 1024) == plain.engine.max_seqs
    never = speculating(plain, Speculation((0.01,), 0.01))
    assert pays_up_to(plain.step, never.step, plain.engine.max_seqs, 1024) == 0


@examples(60)
@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6),
    draft_s=st.floats(0, 0.01),
    round_s=st.floats(0, 0.01),
    model=st.sampled_from(
        [("llama-3.1-8b", "a100", 1), ("deepseek-v3", "h200", 8), ("gpt-oss-20b", "h100", 1)]
    ),
)
def test_any_speculation_fits_a_profiles_places_and_file_and_is_monotone(
    shares: list[float], draft_s: float, round_s: float, model: tuple[str, str, int]
) -> None:
    name, gpu, tp = model
    (plain,) = find_profiles(name, [gpu], [tp])
    drafts = Speculation(tuple(sorted(shares, reverse=True)), draft_s, round_s)
    faster = speculating(plain, drafts)
    row = coefficient_row(faster)
    batch = np.arange(1.0, plain.engine.max_seqs + 1)
    seconds = faster.step.step_s(0, batch, 0)
    assert (np.diff(seconds) >= -1e-12).all()
    assert seconds[0] >= plain.step.base_s / drafts.tokens_per_step
    assert [decode_base_s(row, b) for b in (1.0, 77.0)] == pytest.approx(faster.step.step_s(0, [1, 77], 0))
    assert parse_profile(profile_text(faster), "made") == faster


def test_what_is_no_speculation_is_refused() -> None:
    for shares in ((), (0.0,), (1.1,), (0.5, 0.6), (float("nan"),)):
        with pytest.raises(BadInput, match="acceptance"):
            Speculation(shares)
    with pytest.raises(BadInput, match="round_s: must be a number of at least 0, got -1"):
        Speculation((0.8,), 0.0, -1.0)
    with pytest.raises(BadInput, match="already"):
        speculating(speculating(llama(), DRAFTS), DRAFTS)
