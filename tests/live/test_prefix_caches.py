"""The simulated prefix cache does as vLLM's own scheduler, step by step, whose events tell what is cached."""

import pytest
import quiet_vllm  # noqa: F401  # first

from harness.driven_vllm import SIZES, UNLIKE, compared

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
