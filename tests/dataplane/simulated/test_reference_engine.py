"""The judge itself, against cases small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile
from reference_engine import ReferenceResult, simulate_split, simulate_worker

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.types import EngineMode

# Binary fractions: the sums below are exact.
STEP = StepModel(base_s=1.0, per_prefill_token_s=0.125, per_sequence_s=0.25, per_context_token_s=0.0625)
PREFILL = PrefillModel(base_s=2.0, per_token_s=0.5)


def a_profile(
    mode: EngineMode, kv: int = 1000, block: int = 1, budget: int = 100, seqs: int = 8, step: StepModel = STEP
) -> Profile:
    return made_profile(
        step, KvModel(kv, block), EngineLimits(mode=mode, max_batched_tokens=budget, max_seqs=seqs), PREFILL
    )


def the_times(results: list[ReferenceResult]) -> list[tuple[float, float, int]]:
    return [(r.first_token_s, r.finish_s, r.preemptions) for r in results]


PREFILL_FIRST = EngineMode.PREFILL_FIRST
CHUNKED = EngineMode.CHUNKED
SPLIT = EngineMode.SPLIT


def test_a_lone_prefill_first_request_is_one_prefill_and_then_decode_steps():
    # Prefill 2 + 0.5·4 = 4, from 10 to 14; decode at context 5 and 6: 1.25 + 0.3125, 1.25 + 0.375.
    results = simulate_worker(a_profile(PREFILL_FIRST), [10.0], [4], [3])
    assert the_times(results) == [(14.0, 14.0 + 1.5625 + 1.625, 0)]


def test_a_one_token_output_finishes_with_its_prefill():
    assert the_times(simulate_worker(a_profile(PREFILL_FIRST), [0.0], [4], [1])) == [(4.0, 4.0, 0)]
    assert the_times(simulate_worker(a_profile(CHUNKED), [0.0], [4], [1])) == [(1.5, 1.5, 0)]


def test_an_arrival_during_a_step_waits_for_its_end_and_then_stalls_the_decoding():
    # A: 0..4, decode 4..5.5625 (context 5); B came at 4.5: prefill 5.5625 + 3 = 8.5625.
    # Then both decode: 1 + 0.5 + (6 + 3)/16 = 2.0625 and both are done.
    results = simulate_worker(a_profile(PREFILL_FIRST), [0.0, 4.5], [4, 2], [3, 2])
    assert the_times(results) == [(4.0, 10.625, 0), (8.5625, 10.625, 0)]


def test_an_arrival_at_the_boundary_is_in_time():
    # Both in one prefill: 2 + 0.5·4 after A's alone; B and C arrive as A's prefill ends at 4.
    results = simulate_worker(a_profile(PREFILL_FIRST), [0.0, 4.0, 4.0], [4, 2, 2], [1, 1, 1])
    assert the_times(results) == [(4.0, 4.0, 0), (8.0, 8.0, 0), (8.0, 8.0, 0)]


def test_a_prefill_batch_stops_at_the_first_prompt_past_the_token_limit():
    # Limit 5: [3] alone (3 + 4 > 5), then [4, 1]; the 1 may not overtake the 4.
    results = simulate_worker(a_profile(PREFILL_FIRST, budget=5), [0.0] * 3, [3, 4, 1], [1, 1, 1])
    assert [r.finish_s for r in results] == [3.5, 8.0, 8.0]


def test_a_prompt_past_the_token_limit_goes_alone():
    results = simulate_worker(a_profile(PREFILL_FIRST, budget=5), [0.0, 0.0], [8, 1], [1, 1])
    assert [r.finish_s for r in results] == [6.0, 8.5]


def test_seats_are_limited():
    # One seat: the second waits until the first has decoded to its end.
    results = simulate_worker(a_profile(PREFILL_FIRST, seqs=1), [0.0, 0.0], [4, 4], [2, 1])
    assert the_times(results) == [(4.0, 5.5625, 0), (9.5625, 9.5625, 0)]


def test_high_priority_overtakes_those_that_wait():
    results = simulate_worker(
        a_profile(PREFILL_FIRST, seqs=1), [0.0, 1.0, 2.0], [4, 4, 4], [1, 1, 1], [0, 0, 1]
    )
    assert [r.finish_s for r in results] == [4.0, 12.0, 8.0]


def test_prefill_first_admission_keeps_a_block_for_everyone_inside():
    # Held 3 by A; B needs 2 + 1, and 1 more for A: 7 is enough, 6 is not.
    enough = simulate_worker(a_profile(PREFILL_FIRST, kv=7), [0.0, 0.0], [2, 2], [2, 1])
    short = simulate_worker(a_profile(PREFILL_FIRST, kv=6), [0.0, 0.0], [2, 2], [2, 1])
    assert enough[1].first_token_s == 4.0
    assert short[0].finish_s == 3.0 + 1.25 + 3 / 16
    assert short[1].first_token_s == short[0].finish_s + 3.0


def test_prefill_first_preempts_the_newest_when_kv_is_short():
    # Capacity 8. Both prefilled at 4 (2 + 0.5·4), holding 3 + 3. Decode: want 8, context 6, 1.875 -> 5.875.
    # Then 4 + 4 want 10: B is preempted; A decodes alone (context 4, 1.5) to 7.375 and is done.
    # B: prefill of 2 + 2 tokens, 4 s, to 11.375: its third token; decode alone at context 5: 1.5625.
    results = simulate_worker(a_profile(PREFILL_FIRST, kv=8), [0.0, 0.0], [2, 2], [3, 4])
    assert the_times(results) == [(4.0, 7.375, 0), (4.0, 12.9375, 1)]


def test_blocks_are_held_whole():
    # Block 4, 5 blocks. After the prefill 2 + 2 blocks held with room for 4 tokens each... 5 + 5 want 2 + 2.
    # Admission: 2 held + blocks(5) = 2 + 1 for the running one = 5, just fits; with 19 tokens (4 blocks) not.
    fits = simulate_worker(a_profile(PREFILL_FIRST, kv=20, block=4), [0.0, 0.0], [4, 4], [2, 2])
    short = simulate_worker(a_profile(PREFILL_FIRST, kv=19, block=4), [0.0, 0.0], [4, 4], [2, 2])
    assert fits[1].first_token_s == fits[0].first_token_s == 6.0
    assert short[1].first_token_s == 4.0 + 1.5625 + 4.0


def test_a_request_larger_than_the_memory_runs_alone():
    for mode in (PREFILL_FIRST, CHUNKED):
        results = simulate_worker(a_profile(mode, kv=4), [0.0, 0.0], [9, 1], [3, 1])
        assert results[0].preemptions == results[1].preemptions == 0
        assert results[1].first_token_s > results[0].finish_s


def test_a_lone_chunked_request_is_cut_to_the_budget():
    # Budget 8, prompt 20: chunks 8, 8, 4 -> 2 + 2 + 1.5; then one decode at context 21.
    results = simulate_worker(a_profile(CHUNKED, budget=8), [0.0], [20], [2])
    assert the_times(results) == [(5.5, 5.5 + 1.25 + 21 / 16, 0)]


def test_chunks_add_up_to_the_square_of_the_prompt():
    step = StepModel(0.0, 0.0, 0.0, 0.0, per_prefill_sum_sq_s=1.0)
    results = simulate_worker(a_profile(CHUNKED, budget=8, step=step), [0.0], [20], [1])
    assert results[0].finish_s == 400.0


def test_chunked_decoding_goes_on_beside_a_prefill():
    # A (prompt 4) 0..1.5. B (prompt 10) came at 1: step 2 holds A's decode and 7 of B's tokens (budget 8):
    # 1 + 0.875 + 0.25 + 5/16 = 2.4375 -> 3.9375. Step 3: A's decode at 6 and B's last 3:
    # 1 + 0.375 + 0.25 + 0.375 = 2 -> 5.9375, A has three tokens and B one.
    results = simulate_worker(a_profile(CHUNKED, budget=8), [0.0, 1.0], [4, 10], [3, 1])
    assert the_times(results) == [(1.5, 5.9375, 0), (5.9375, 5.9375, 0)]


def test_chunked_fills_the_budget_from_the_queue():
    # Budget 8: A's 6 and 2 of B's 5 in the first step, B's other 3 and C's 4 in the second (A has finished).
    results = simulate_worker(a_profile(CHUNKED, budget=8), [0.0] * 3, [6, 5, 4], [1, 1, 1])
    assert [r.finish_s for r in results] == [2.0, 2.0 + 1.875, 2.0 + 1.875]


def test_chunked_preempts_the_newest_and_admits_nobody_in_that_step():
    # Capacity 8, both of prompt 2: step 1, 4 tokens, 1.5 s, holding 3 + 3. Step 2: b 2, context 6, 1.875
    # -> 3.375, holding 4 + 4 = 8. Step 3: A wants a fifth: B goes; A alone at context 4, 1.5 -> 4.875, done.
    # Step 4: B is prefilled anew (2 + 2 tokens, 1.5 s) -> 6.375: its third token. Step 5: context 5, 1.5625.
    results = simulate_worker(a_profile(CHUNKED, kv=8), [0.0, 0.0], [2, 2], [3, 4])
    assert the_times(results) == [(1.5, 4.875, 0), (1.5, 7.9375, 1)]


def test_a_chunked_request_that_finds_no_block_is_preempted_itself():
    # Blocks of 4, 3 blocks. A: 4 tokens in, then 5 (2 blocks); B: 2 tokens in, 3, 4 (1 block), then a fifth
    # token would need a second block: B, the newest, preempts itself while A decodes on.
    results = simulate_worker(a_profile(CHUNKED, kv=12, block=4), [0.0, 0.0], [4, 2], [4, 4])
    assert [r.preemptions for r in results] == [0, 1]
    # Steps: 1.75; b 2, C 8: 2.0; then B wants blocks(5) -> preempted, A alone at 6: 1.625; A at 7: 1.6875.
    assert results[0].finish_s == 1.75 + 2.0 + 1.625 + 1.6875
    # B came back in A's last step? Its 4 tokens need blocks(5) = 2, A holds 2 of 3: it waits for A's end.
    assert results[1].finish_s == results[0].finish_s + 1.5 + (1.25 + 5 / 16)


def test_split_hands_a_prefill_over_to_decode():
    # Prefill 4 in 1.5, then 0.5 of transfer, then decode at contexts 5 and 6.
    p = a_profile(SPLIT)
    results = simulate_split(p, p, [0.0], [4], [3], [0], [0], transfer_s=0.5)
    assert the_times(results) == [(1.5, 2.0 + 1.5625 + 1.625, 0)]


def test_a_split_decode_worker_is_not_stalled_by_prefills():
    # B's prefill runs 3..4.25 on the prefill worker; A decodes 1.5..3.0625..4.6875, and B after it.
    p = a_profile(SPLIT)
    results = simulate_split(p, p, [0.0, 0.0], [4, 2], [3, 2], [0, 0], [0, 0])
    assert the_times(results)[0][0] == 1.75  # both prompts in one step
    alone = simulate_split(p, p, [0.0, 3.0], [4, 2], [3, 2], [0, 0], [0, 0])
    assert the_times(alone) == [(1.5, 4.6875, 0), (4.25, 4.6875 + 1.25 + 3 / 16, 0)]


requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 6), st.integers(0, 1)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("mode", [PREFILL_FIRST, CHUNKED])
@given(requests=requests, kv=st.integers(4, 40), block=st.integers(1, 4), seqs=st.integers(1, 4))
def test_every_request_finishes_and_no_clock_runs_backwards(mode, requests, kv, block, seqs):
    arrival, prompt, output, priority = map(list, zip(*sorted(requests), strict=True))
    profile = a_profile(mode, kv=max(kv, block), block=block, budget=8, seqs=seqs)
    results = simulate_worker(profile, arrival, prompt, output, priority)
    for a, p, o, r in zip(arrival, prompt, output, results, strict=True):
        assert a < r.first_token_s <= r.finish_s
        least = float(STEP.step_s(0, 1, p + 1))  # the cheapest decode step there is for it
        assert r.finish_s - r.first_token_s >= (o - 1) * least - 1e-9


@pytest.mark.parametrize("mode", [PREFILL_FIRST, CHUNKED])
@given(requests=requests)
def test_ample_memory_never_preempts(mode, requests):
    arrival, prompt, output, priority = map(list, zip(*sorted(requests), strict=True))
    results = simulate_worker(a_profile(mode, kv=200), arrival, prompt, output, priority)
    assert np.sum([r.preemptions for r in results]) == 0
