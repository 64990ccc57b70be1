"""KV memory of a worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from experiments.lib.published_models import ModelShape, kv_capacity_tokens

LLAMA_8B = ModelShape(32, 8, 128, 8.03e9, 2, 131072)
LLAMA_70B = ModelShape(80, 8, 128, 70.554e9)
GIB = 1024**3


def test_bytes_per_token_are_those_of_the_published_models() -> None:
    assert LLAMA_8B.kv_bytes_per_token() == 131072
    assert ModelShape(40, 40, 128, 13e9).kv_bytes_per_token() == 819200
    assert LLAMA_70B.kv_bytes_per_token(8) == 327680
    # Beyond the number of KV heads each GPU still keeps a whole one.
    assert LLAMA_70B.kv_bytes_per_token(16) == 2 * 327680


@pytest.mark.parametrize(
    ("shape", "gpu_gib", "tp", "published"),
    [
        (LLAMA_8B, 79.1, 1, 432_992),
        (LLAMA_8B, 139.8, 1, 882_732),
        (LLAMA_70B, 79.1, 4, 454_016),
        (LLAMA_70B, 139.8, 2, 370_583),
    ],
)
def test_capacities_are_near_another_tools_estimates(
    shape: ModelShape, gpu_gib: float, tp: int, published: int
) -> None:
    mine = kv_capacity_tokens(shape, gpu_gib * GIB, tp, 0.9, 2.5 * GIB)
    assert mine == pytest.approx(published, rel=0.05)
    assert mine % 16 == 0


@given(st.integers(1, 7), st.floats(20.0, 200.0))
def test_more_gpus_and_more_memory_never_hold_less(tp: int, gib: float) -> None:
    here = kv_capacity_tokens(LLAMA_70B, gib * GIB, tp)
    assert kv_capacity_tokens(LLAMA_70B, gib * GIB, tp + 1) >= here
    assert kv_capacity_tokens(LLAMA_70B, 1.1 * gib * GIB, tp) >= here


def test_a_model_that_does_not_fit_holds_nothing() -> None:
    assert kv_capacity_tokens(LLAMA_70B, 80 * GIB, 1) == 0
    with pytest.raises(BadInput, match="memory_utilization"):
        kv_capacity_tokens(LLAMA_70B, 80 * GIB, 1, 1.5)
    with pytest.raises(BadInput, match="layers"):
        ModelShape(0, 8, 128, 1e9)
