"""Decode of models with more KV heads than tables have: by the tables' own rows, and on a measured run."""

import importlib.util

import numpy as np
import pytest

from tokenfleet.profiles.library import find_profiles

# A public run of vLLM 0.11.0 with Llama-2-7B on one 80 GB GPU, 21 January 2026, traced by the engine:
# inference-sim/inference-sim@e7a4aa37, eval/ground_truth/jan21-llama7b-train-1 (traces.json, vllm.log).
# Its first eleven requests were sent one by one, no fit has seen them. Prompt, output tokens, decode seconds.
ALONE = (
    (1527, 500, 3.2923),
    (1493, 500, 3.3240),
    (1566, 500, 3.3508),
    (2542, 500, 3.3940),
    (1547, 381, 2.5229),
    (2099, 238, 1.6339),
    (1379, 500, 3.3046),
    (1440, 500, 3.2844),
    (1839, 500, 3.2489),
    (1979, 120, 0.7731),
    (3096, 500, 3.3676),
)
KV_LOGGED = 119_008  # tokens, with 256 sequences and 4,096 tokens a step
needs_tables = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


def test_llama_2_decodes_alone_as_a_measured_engine_does() -> None:
    (profile,) = find_profiles("llama-2-7b", ["h100"], [1])
    engine = profile.with_engine(None, 4096, 256, 0.0, "0.11.0")  # which shows the host's time
    prompt, output, seconds = np.array(ALONE).T
    step_s = engine.step.step_s(0, 1, prompt + output / 2)
    error = step_s * (output - 1) / seconds - 1
    assert 0.0 < error.mean() < 0.08  # 0.196 with heads counted in proportion
    assert error.max() < 0.1
    assert engine.kv.capacity_tokens == pytest.approx(KV_LOGGED, rel=0.005)


class Heads:
    """An engine whose attention is a launch of 5, then a unit for each 8 of (sequence, head)."""

    def __init__(self, heads: int, launches: int) -> None:
        self.heads, self.launches = heads, launches

    def _attention(self, batch: int) -> float:
        return 5.0 * self.launches + batch * self.heads / 8

    def run_static_per_op(self, *, batch_size: int, isl: int, osl: int) -> list[list[tuple[str, float]]]:
        return [[], [("generation_attention", self._attention(batch_size)), ("generation_gemm", 9.0)]]

    def predict_decode_latency(self, batch: int, context: int, osl: int) -> float:
        return self._attention(batch) + 9.0


def test_more_heads_take_one_launch() -> None:
    from tokenfleet.profiles.kernels import Kernels, SplitHeads

    tables, right = Heads(32, launches=4), Kernels(Heads(32, launches=1), 1, 1.0)
    counted = Kernels(tables, 1, 1.0, heads=SplitHeads(Heads(8, launches=1), 4))
    for batch in (1, 7, 64):
        assert counted.decode_s(batch, 100) == pytest.approx(right.decode_s(batch, 100))
        assert Kernels(tables, 1, 1.0).decode_s(batch, 100) > right.decode_s(batch, 100)


@needs_tables
@pytest.mark.parametrize(
    ("gpu", "version"), [("a100_sxm", "0.14.0"), ("h100_sxm", "0.24.0"), ("h200_sxm", "0.24.0")]
)
def test_tables_of_four_heads_are_those_of_eight_at_half_the_batch(gpu: str, version: str) -> None:
    """In the tables' own measurements: the rule by which more heads are counted."""
    import polars as pl

    spec = importlib.util.find_spec("aiconfigurator_core")
    assert spec is not None
    assert spec.submodule_search_locations
    place = f"{spec.submodule_search_locations[0]}/systems/data/{gpu}/attention/vllm/{version}"
    rows = pl.read_parquet(f"{place}/generation_attention_perf.parquet").filter(
        pl.col("num_heads") == pl.col("num_key_value_heads"),
        pl.col("head_dim") == 128,
        pl.col("kv_cache_dtype") == "bfloat16",
    )
    rows = rows.filter(pl.col("window_size") == 0) if "window_size" in rows.columns else rows
    rows = rows.with_columns(
        pairs=pl.col("batch_size") * pl.col("num_heads"), context=pl.col("isl") + pl.col("step")
    )
    four, eight = (rows.filter(pl.col("num_heads") == heads) for heads in (4, 8))
    both = four.join(eight, on=["pairs", "context"])
    error = np.abs(both["latency"].to_numpy() / both["latency_right"].to_numpy() - 1)
    assert len(error) > 100
    assert error.mean() < 0.045
