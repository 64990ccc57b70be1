"""Models with windows of attention and a prefix cache: each group of layers takes blocks of the pool."""

from dataclasses import replace

import numpy as np
import pytest

from controlplane.perfmodel.coefficients import coefficient_row, most_window_blocks, window_start
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.prefixes import Prefixes
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from harness import ROOT
from tokenfleet.profiles.library import read_profile

SLO = Slo(1000.0, 1000.0)
LLAMA_4 = ROOT / "profiles" / "h100-sxm" / "llama-4-scout-17b-16e-fp8_tp2.yaml"


def with_windows(profile: Profile, groups: int, tokens: int, is_chunk: bool = False) -> Profile:
    kv = replace(profile.kv, request_tokens=groups * tokens, window_tokens=tokens, window_is_chunk=is_chunk)
    return replace(profile, kv=kv, engine=replace(profile.engine, max_batched_tokens=10**6))


def unlike(n: int, prompt: int, output: int, block: int) -> Workload:
    """Requests at once that share nothing, for a worker that caches prefixes."""
    each = prompt // block
    ids = np.arange(n * each, dtype=np.int64)
    prefixes = Prefixes(block, np.arange(n + 1) * each, ids)
    return Workload(np.zeros(n), np.full(n, prompt), np.full(n, output), prefixes=prefixes)


def seated(profile: Profile, workload: Workload) -> int:
    """Requests that a worker runs in its first step."""
    outcome = simulate(workload, [WorkerSpec(profile)], SLO, "jsq")
    assert outcome.complete
    return int((outcome.first_token_s == outcome.first_token_s.min()).sum())


def test_a_request_takes_a_block_in_every_group_for_each_block_of_its_tokens() -> None:
    profile = read_profile(LLAMA_4)
    assert profile.kv.window_groups == 3
    profile = replace(profile, engine=replace(profile.engine, max_batched_tokens=10**6))
    blocks = profile.kv.capacity_tokens // 16
    # 24,576 tokens for each request, as counted before, would seat 30.
    assert seated(profile, unlike(200, 2033, 15, 16)) == blocks // (4 * 128) == 97


@pytest.mark.parametrize("is_chunk", [False, True])
def test_long_requests_give_back_what_their_windows_leave(is_chunk: bool) -> None:
    """Once decoding, a request holds its window alone, so the worker seats more than whole requests."""
    profile = with_windows(read_profile(LLAMA_4), 3, 256, is_chunk)
    profile = replace(profile, kv=replace(profile.kv, capacity_tokens=16 * 1024))
    workload = unlike(12, 2001, 600, 16)
    outcome = simulate(workload, [WorkerSpec(profile)], SLO, "jsq")
    assert outcome.complete
    ends = np.sort(outcome.finish_s)
    at_once = max(int((outcome.first_token_s <= t).sum() - (ends < t).sum()) for t in outcome.first_token_s)
    assert 1024 // (4 * 126) == 2 < at_once <= 1024 // 126


def test_states_of_a_token_are_no_windows() -> None:
    kv = KvModel(1600, request_tokens=500, window_tokens=1)
    assert kv.window_groups == 0
    assert kv.held([1, 100]).tolist() == [501, 600]


def test_what_a_window_reaches() -> None:
    """A window of 64 tokens: the next token attends to the 63 before it; a chunk begins at a multiple."""
    profile = read_profile(LLAMA_4)
    sliding = coefficient_row(with_windows(profile, 1, 64))
    assert [window_start(sliding, n) for n in (0, 63, 78, 79, 95)] == [0, 0, 0, 1, 2]
    chunked = coefficient_row(with_windows(profile, 1, 64, True))
    assert [window_start(chunked, n) for n in (0, 63, 64, 127, 128)] == [0, 0, 4, 4, 8]
    assert most_window_blocks(chunked) <= most_window_blocks(sliding)


def test_of_a_chunk_half_is_held_on_the_mean_and_nothing_at_least() -> None:
    kv = with_windows(read_profile(LLAMA_4), 3, 100, True).kv
    assert kv.held([50, 400]).tolist() == [200, 550]
    assert kv.held_at_least([50, 400], [60, 500]).tolist() == [200, 400]
    assert with_windows(read_profile(LLAMA_4), 3, 100).kv.held([50, 400]).tolist() == [200, 700]
