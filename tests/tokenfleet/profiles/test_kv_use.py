"""Eq 1: the KV that requests hold, fitted to the steps of made engines, and its sentences."""

from dataclasses import asdict

import numpy as np
import pytest
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.samples import StepSamples
from tokenfleet.profiles.kv_memory import KvUse, fit_kv

KV = KvModel(440_176, 16, 131_072)


def batches(seed: int = 0, steps: int = 400) -> list[NDArray[np.int64]]:
    """The contexts of the requests that decode, step by step."""
    rng = np.random.default_rng(seed)
    return [rng.integers(20, rng.choice([300, 4000]), rng.integers(1, 129)) for _ in range(steps)]


def samples(contexts: list[NDArray[np.int64]], blocks: list[float]) -> StepSamples:
    """Steps that decode, and as many that prefill and must not count."""
    n = len(contexts)
    decoding, held = np.array([len(c) for c in contexts]), np.array([c.sum() for c in contexts])
    zeros = np.zeros(n)
    return StepSamples(
        np.concatenate([zeros, zeros + 512]),
        np.concatenate([decoding, decoding]),
        np.concatenate([held, held]),
        np.full(2 * n, 0.01),
        kv_blocks=np.concatenate([blocks, zeros + 9_999]),
    )


def whole(tokens: NDArray[np.int64], block: int) -> int:
    return int(np.ceil((tokens + 1) / block).sum())


@pytest.mark.parametrize(("per_token", "per_request"), [(1.0, 7.5), (0.6, 40.0), (1.3, 0.0)])
def test_a_made_line_with_noise_is_recovered(per_token: float, per_request: float) -> None:
    made, rng = batches(1), np.random.default_rng(2)
    line = [per_token * (c.sum() + len(c)) + per_request * len(c) for c in made]
    noisy = np.array(line) / 16 * np.exp(0.02 * rng.standard_normal(len(made)))
    use = fit_kv(samples(made, noisy.tolist()), KV)
    assert use.per_token == pytest.approx(per_token, rel=0.01)
    assert use.per_request == pytest.approx(per_request, abs=2.0)
    assert use.mean_relative == pytest.approx(0.016, abs=0.004)  # of a normal error of 2 %
    assert use.steps == len(made)


@pytest.mark.parametrize("block", [16, 32, 128])
def test_whole_blocks_cost_a_request_half_a_block_and_differ_in_nothing_from_arithmetic(block: int) -> None:
    made = batches(block)
    kv = KvModel(440_176, block, 131_072)
    use = fit_kv(samples(made, [whole(c, block) for c in made]), kv)
    assert use.per_token == pytest.approx(1.0, abs=0.005)
    assert use.per_request == pytest.approx((block - 1) / 2, abs=0.1 * block)
    assert abs(use.off) < 0.005
    (said,) = use.texts(kv.bytes_per_token)
    assert f"(half a block: {(block - 1) / 2:g})" in said
    assert "bytes for each token, by arithmetic 131,072" in said
    put = use.put_in(kv)
    assert (put.request_tokens, put.measured_per_token) == (0, round(use.per_token, 4))


def test_a_wrong_block_size_is_named() -> None:
    made = batches()
    use = fit_kv(samples(made, [whole(c, 32) for c in made]), KV)
    _, why = use.texts(0)
    assert why.startswith("KV in use is 5")
    assert "less than by arithmetic" in why
    assert "blocks may have 32 tokens (--block-tokens)" in why
    use = fit_kv(samples(made, [whole(c, 8) for c in made]), KV)
    assert "more than by arithmetic: blocks may have 8 tokens (--block-tokens)" in use.texts(0)[1]


def test_states_that_a_request_holds_besides_are_in_the_profile() -> None:
    made = batches()
    use = fit_kv(samples(made, [whole(c, 16) + 20 * len(c) for c in made]), KV)
    assert "requests hold KV beyond their tokens" in use.texts(0)[1]
    put = use.put_in(KV)
    assert put.window_tokens == 1
    assert put.request_tokens == pytest.approx(320, abs=16)
    assert float(put.held(1000)) == pytest.approx(1320, abs=16)
    again = fit_kv(samples(made, [whole(c, 16) + 20 * len(c) for c in made]), put)
    assert abs(again.off) < 0.01
    assert again.put_in(put).request_tokens == put.request_tokens


def test_windows_of_the_profile_count_in_its_arithmetic_and_their_lack_is_said() -> None:
    windowed = KvModel(440_176, 16, 131_072, request_tokens=1024, window_tokens=1024)
    made = batches()
    blocks = [whole(c, 16) + whole(np.minimum(c, 1023), 16) for c in made]
    assert abs(fit_kv(samples(made, blocks), windowed).off) < 0.05
    few = fit_kv(samples(made, [whole(c, 16) for c in made]), windowed)
    assert few.off < -0.2
    assert "requests share cached blocks, or layers keep only a window" in few.texts(0)[1]


def test_shared_prefixes_lower_the_kv_of_a_token_and_are_said() -> None:
    made = batches()
    shared = [whole(c, 16) - 3 * (len(c) - 1) for c in made]  # a prompt of 48 tokens that all begin with
    use = fit_kv(samples(made, shared), KV)
    assert use.short > 0.5
    assert "requests shared cached blocks, which lowers KV in use" in use.texts(0)[1]
    assert use.put_in(KV).request_tokens == 0


def test_steps_that_do_not_tell_are_refused() -> None:
    made = batches(steps=3)
    with pytest.raises(BadInput, match="3 different batches, at least 4 are needed for 2 coefficients"):
        fit_kv(samples(made, [1.0, 2.0, 3.0]), KV)
    alike = [np.full(n, 99) for n in range(1, 9)]
    with pytest.raises(BadInput, match="KV per token and KV per request cannot be told apart"):
        fit_kv(samples(alike, [float(whole(c, 16)) for c in alike]), KV)
    unknown = samples(made, [0.0, 0.0, 0.0]).take(np.arange(3))
    with pytest.raises(BadInput, match="0 different batches"):
        fit_kv(unknown, KV)
    assert set(asdict(KvUse(1, 2, 0.1, 9, 16, 0.0, 0.0))) >= {"per_token", "per_request", "mean_relative"}
