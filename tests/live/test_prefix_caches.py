"""The simulated prefix cache does as vLLM's own scheduler, step by step, whose events tell what is cached."""

import pytest
import quiet_vllm  # noqa: F401  # first

from harness.driven_vllm import SIZES, UNLIKE, compared, seats

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's imports: not ours to fail on
]


@pytest.mark.parametrize("size", SIZES)
def test_every_step_hit_and_eviction_is_that_of_vllm(size: str) -> None:
    row = compared(size, cases=4, seed=1)
    assert {what: row[what] for what in UNLIKE} == dict.fromkeys(UNLIKE, 0)
    assert row["cached tokens"] > 1000
    assert row["evicted blocks"] > 0 or size == "roomy"
    assert row["preemptions"] > 0 or size != "tight"


@pytest.mark.parametrize("size", SIZES)
def test_as_many_requests_run_at_once_as_at_vllm_where_layers_have_windows(size: str) -> None:
    row = seats(size, cases=1, seed=1)
    assert row["most at once otherwise"] == 0 or size == "tight"
    assert row["most at once off"] <= 1
    assert size != "roomy" or row["steps planned otherwise"] == 0
    assert row["preemptions"] > 0 or size != "tight"
    assert row["mean at once"] == pytest.approx(1.0, abs=0.05)
