"""Constraints (b) to (e) against the same formulas in plain Python, on made-up ledgers."""

from dataclasses import replace
from math import ceil, exp, inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_ledgers import NOW_S, At, Held, ledger_of, requests, rest_of, workers
from made_profiles import made_profile

from controlplane.perfmodel.coefficients import coefficient_row
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Frontend
from controlplane.perfmodel.step import Hinge, StepModel
from controlplane.placement.constraints import (
    FIRST_ROOM,
    LONG_WAIT_S,
    ROOM,
    USE_B,
    USE_C,
    USE_D,
    USE_E,
    fits,
    harm,
    room_left,
    yields_at,
    yields_to,
)
from controlplane.placement.ledger import DECODE_ONLY, PREFILL_ONLY
from controlplane.placement.outlook import ALL_TIME, failing, kv_peak, prefill_lasts_s, spare_s
from controlplane.placement.policies import PlacementSettings
from controlplane.types import EngineMode, Slo

GENEROUS_S = 1e6


def step_s(at: At, sequences: int, context: float) -> float:
    return float(at.profile.step.step_s(0, sequences, context))


def naive_prefill(at: At, asked: Held) -> tuple[float, float]:
    """When the asked request's prefill could begin, and how long all that waits with it then takes."""
    tokens = asked.prompt + asked.tokens
    work = sum(h.prompt + h.tokens for h in at.waiting) - at.begun_tokens + tokens
    start_s = max(at.boundary_s, NOW_S)
    if at.profile.engine.mode != EngineMode.CHUNKED:
        return start_s, float(at.profile.prefill.prefill_s(work, tokens**2))
    context = sum(h.prompt + h.tokens for h in at.decoding)
    step, left, lasts_s = at.profile.step, work, 0.0
    for _ in range(naive_steps(at, work)):
        chunk = min(left, max(at.profile.engine.max_batched_tokens - len(at.decoding), 1))
        lasts_s += float(step.step_s(chunk, len(at.decoding), context))
        left -= chunk
    return start_s, lasts_s + step.per_prefill_sum_sq_s * tokens**2


def naive_steps(at: At, work: float) -> int:
    if at.profile.engine.mode != EngineMode.CHUNKED:
        return 1
    return ceil(work / max(at.profile.engine.max_batched_tokens - len(at.decoding), 1))


def naive_harm_of_d(at: At, asked: Held) -> float:
    start_s, lasts_s = naive_prefill(at, asked)
    work = sum(h.prompt + h.tokens for h in at.waiting) - at.begun_tokens + asked.prompt + asked.tokens
    now_step_s = step_s(at, len(at.decoding), sum(h.prompt + h.tokens for h in at.decoding))
    total = 0.0
    for h in at.decoding:
        tokens = h.tokens + at.gains
        saved_s = h.tpot_s * (tokens - 1) - (start_s - h.first_s)
        if at.profile.engine.mode == EngineMode.CHUNKED:
            saved_s += h.tpot_s * naive_steps(at, work)
        later_s = (h.tpot_s - now_step_s) * max(rest_of(h) - 1, 1)

        def fails(deficit_s: float, later_s: float = later_s) -> float:
            if deficit_s <= 0:
                return 0.0
            return 1.0 if later_s <= 0 else 1 - exp(-deficit_s / later_s)

        total += fails(lasts_s - saved_s) - fails(-saved_s)
    return total


def naive_kv_peak(at: At, asked: Held) -> int:
    everyone = [*at.held, asked]
    last = max(rest_of(h) for h in everyone)
    return max(sum(h.prompt + h.tokens + n for h in everyone if rest_of(h) >= n) for n in range(1, last + 1))


@given(st.integers(1, 6000), st.integers(0, 200), st.integers(0, 50_000))
def test_a_chunked_prefill_lasts_as_long_as_its_steps_with_their_hinges(work, decoding, context):
    dearer = (Hinge("prefill_tokens", 300, 2e-4), Hinge("prefill_tokens", 90, 1e-4))
    hinges = (*dearer, Hinge("experts", 60, 1e-4))
    model = StepModel(0.01, 1e-4, 1e-3, 1e-6, 1e-8, hinges=hinges, per_prefill_step_s=0.002)
    limits = EngineLimits(mode=EngineMode.CHUNKED, max_batched_tokens=512, max_seqs=256)
    k = coefficient_row(made_profile(model, KvModel(1_000_000, 16, 1), limits))
    budget, begun, lasts_s = 512 - decoding, 0, 0.0
    while begun < work:
        chunk = min(budget, work - begun)
        lasts_s += model.step_s(chunk, decoding, context, (begun + chunk) ** 2 - begun**2)
        begun += chunk
    assert isclose(prefill_lasts_s(k, work, work, 0, decoding, context), lasts_s, rel_tol=1e-9)


def knobs_of(only: str, theta: float = 0.5, gamma: float = 1.0):
    row = PlacementSettings(theta=theta, gamma=gamma).row()
    row[[USE_B, USE_C, USE_D, USE_E]] = [name in only for name in "bcde"]
    return row


def asked_harm(at: At, asked: Held, knobs, ttft_s: float = GENEROUS_S, late: bool = False) -> float:
    led, r = ledger_of([at], asked, NOW_S - 0.01, ttft_s)
    return float(harm(led, knobs, 0, r, 0, NOW_S, late, inf))


@given(workers(), requests(decoding=False), st.floats(0, 1))
def test_b_allows_a_decode_step_within_the_tightest_tpot(at, asked, theta):
    everyone = [*at.held, asked]
    context = sum(h.prompt + h.tokens for h in everyone) + theta * sum(rest_of(h) for h in everyone)
    longest_s = step_s(at, len(everyone), context)
    # One that the worker does not keep even for its request alone is lost, and binds no other.
    target_s = min([asked.tpot_s, *(h.tpot_s for h in at.held if h.tpot_s >= step_s(at, 1, 0.0))])
    if isclose(longest_s, target_s, rel_tol=1e-9):
        return
    allowed = longest_s <= target_s and len(everyone) <= at.profile.engine.max_seqs
    assert (asked_harm(at, asked, knobs_of("b", theta)) < inf) == allowed


@given(workers(), requests(decoding=False), st.floats(0.001, 0.5), st.sampled_from([0.0, 0.02]))
def test_c_allows_a_first_token_at_the_client_within_the_ttft(at, asked, ttft_s, frontend_s):
    start_s, lasts_s = naive_prefill(at, asked)
    wait_s = start_s + lasts_s - (NOW_S - 0.01) + frontend_s + 1e-5 * asked.prompt
    at = replace(at, profile=replace(at.profile, frontend=Frontend(frontend_s, 1e-5)))
    if isclose(wait_s, ttft_s, rel_tol=1e-9) or len(at.held) >= at.profile.engine.max_seqs:
        return
    assert (asked_harm(at, asked, knobs_of("c"), ttft_s) < inf) == (wait_s <= ttft_s)
    assert asked_harm(at, asked, knobs_of("c"), ttft_s, late=True) < inf


@given(workers(), requests(decoding=False))
def test_d_counts_the_failures_to_expect_among_those_decoding(at, asked):
    if len(at.held) >= at.profile.engine.max_seqs:
        return
    expected = naive_harm_of_d(at, asked)
    assert isclose(asked_harm(at, asked, knobs_of("d")), expected, rel_tol=1e-9, abs_tol=1e-12)


@given(workers(), requests(decoding=False), st.floats(0, 2))
def test_d_stops_counting_past_what_is_tolerated(at, asked, most):
    led, r = ledger_of([at], asked, NOW_S, GENEROUS_S)
    counted = harm(led, knobs_of("d"), 0, r, 0, NOW_S, False, most)
    full = asked_harm(at, asked, knobs_of("d"))
    assert counted == (full if full <= most else inf)


@given(workers(), requests(decoding=False))
def test_what_is_left_to_spare_is_the_least_saved_less_the_prefill(at, asked):
    led, r = ledger_of([at], asked, NOW_S, GENEROUS_S)
    start_s, lasts_s = naive_prefill(at, asked)
    saved_s = [h.tpot_s * (h.tokens + at.gains - 1) - (start_s - h.first_s) for h in at.decoding]
    work = sum(h.prompt + h.tokens for h in at.waiting) - at.begun_tokens + asked.prompt + asked.tokens
    earned = naive_steps(at, work) if at.profile.engine.mode == EngineMode.CHUNKED else 0
    left_s = [s + earned * h.tpot_s - lasts_s for s, h in zip(saved_s, at.decoding, strict=True) if s >= 0]
    if any(abs(s) < 1e-9 for s in saved_s):
        return
    assert isclose(spare_s(led, 0, r, 0, NOW_S), min(left_s, default=ALL_TIME), rel_tol=1e-6, abs_tol=1e-9)


@given(workers(), requests(decoding=False))
def test_e_peak_is_that_of_going_step_by_step(at, asked):
    led, r = ledger_of([at], asked, NOW_S, GENEROUS_S)
    assert kv_peak(led, 0, r, inf) == naive_kv_peak(at, asked)


@given(workers(), requests(decoding=False), st.integers(0, 400), st.floats(0.2, 1.5))
def test_e_peak_is_past_a_limit_as_told_by_the_step_of_an_earlier_peak(at, asked, later, share):
    led, r = ledger_of([at], asked, NOW_S, GENEROUS_S)
    peak = naive_kv_peak(at, asked)
    led.workers[0]["peak_step"] = led.workers[0]["step"] + later
    found = kv_peak(led, 0, r, share * peak)
    assert (found > share * peak) == (peak > share * peak)
    assert found <= peak


@given(workers(), requests(decoding=False), st.floats(0.05, 1))
def test_e_allows_a_peak_within_gamma_of_capacity(at, asked, gamma):
    if len(at.held) >= at.profile.engine.max_seqs:
        return
    blocks = at.profile.kv.capacity_tokens // at.profile.kv.block_tokens
    limit = gamma * blocks * at.profile.kv.block_tokens
    alone = not at.held
    allowed = alone or naive_kv_peak(at, asked) <= limit
    assert (asked_harm(at, asked, knobs_of("e", gamma=gamma)) < inf) == allowed


@given(workers(roles=(DECODE_ONLY,)), requests(decoding=False))
def test_a_decode_worker_is_not_asked_about_prefill(at, asked):
    at.held = at.decoding
    at.begun_tokens = 0
    if len(at.held) < at.profile.engine.max_seqs:
        assert asked_harm(at, asked, knobs_of("cd"), ttft_s=1e-9) == 0.0


@given(workers(roles=(PREFILL_ONLY,)), requests(decoding=False))
def test_a_prefill_worker_is_asked_about_prefill_only(at, asked):
    assert asked_harm(at, asked, knobs_of("bde", gamma=0.01)) == 0.0


@given(workers(), requests(decoding=False), st.booleans())
def test_a_worker_fits_when_it_does_no_harm(at, asked, late):
    led, r = ledger_of([at], asked, NOW_S, 0.3)
    knobs = PlacementSettings().row()
    assert fits(led, knobs, 0, r, 0, NOW_S, late) == (harm(led, knobs, 0, r, 0, NOW_S, late, inf) <= 0.0)


@given(workers(), requests(decoding=False), st.floats(0.005, 0.2), st.floats(0, 1))
def test_work_that_yields_leaves_its_share_of_a_worker_to_the_tighter_class(at, asked, tight_s, waited):
    led, r = ledger_of([at], asked, NOW_S - waited * GENEROUS_S, GENEROUS_S)
    room = room_left((1 - waited) * GENEROUS_S, GENEROUS_S) - 1e-9
    knobs = PlacementSettings().row()
    plain = harm(led, knobs, 0, r, 0, NOW_S, True, inf)
    led.requests["yields_tpot_s"][r] = led.requests["yields_most_tpot_s"][r] = tight_s
    found = harm(led, knobs, 0, r, 0, NOW_S, True, inf)
    row = led.workers[0]
    sequences = int(row["decoding"] + row["queued"]) + 1
    assert found >= plain
    if sequences == 1 or step_s(at, 1, 0.0) > tight_s:
        assert found == plain  # an idle worker is nobody's last, and one too slow for it none at all
    elif found < inf:
        held = row["context"] + row["queued_context"] + asked.prompt + asked.tokens
        assert sequences <= (1 - room) * at.profile.engine.max_seqs
        assert step_s(at, sequences, float(held)) <= (1 - room) * tight_s + 1e-12
        assert row["queued_tokens"] <= 0


@given(st.floats(0, 1e6), st.floats(-1e5, 1e6))
def test_the_longer_work_may_still_wait_the_more_room_it_leaves_and_a_fifth_at_last(ttft_s, left_s):
    room = room_left(left_s, ttft_s)
    assert ROOM <= room <= FIRST_ROOM
    assert room <= room_left(left_s + 0.1 * ttft_s, ttft_s)
    if ttft_s <= LONG_WAIT_S or left_s <= 0:
        assert room == ROOM
    elif left_s >= ttft_s:
        assert room == FIRST_ROOM


def test_a_class_yields_to_those_whose_ttft_is_a_tenth_of_its_own():
    chat, code, batch = Slo(0.4, 0.03), Slo(3.9, 0.02), Slo(40.0, 0.2)
    assert [yields_to(slo, (chat, code, batch)) for slo in (chat, code, batch)] == [
        (0, 0),
        (0, 0),
        (0.02, 0.03),
    ]


@pytest.mark.parametrize(("tightest_s", "left_s"), [(0.02, 0.02), (0.004, 0.03), (0.0, 0.0), (-0.02, 0.0)])
def test_room_is_left_to_the_classes_that_a_worker_is_fast_enough_for(tightest_s, left_s):
    profile = made_profile(StepModel(0.01, 1e-4, 1e-4, 1e-7), KvModel(100_000))
    led, r = ledger_of([At(profile)], Held(100, 40), NOW_S, GENEROUS_S)
    led.requests["yields_tpot_s"][r], led.requests["yields_most_tpot_s"][r] = tightest_s, 0.03
    assert yields_at(led, 0, r) == left_s
    if tightest_s < 0.01:
        led.requests["yields_most_tpot_s"][r] = 0.009
        assert yields_at(led, 0, r) == 0.0


def test_a_target_that_a_worker_cannot_keep_binds_nobody_else_there():
    profile = made_profile(StepModel(0.01, 1e-4, 1e-4, 1e-7), KvModel(100_000))
    for tpot_s, is_bound in ((0.0105, True), (0.009, False)):
        lost = Held(100, 40, tokens=5, decoding=True, first_s=NOW_S - 1.0, tpot_s=tpot_s)
        led, r = ledger_of([At(profile, [lost])], Held(3000, 40, tpot_s=0.05), NOW_S, GENEROUS_S)
        assert (harm(led, knobs_of("b"), 0, r, 0, NOW_S, False, inf) == inf) == is_bound


def test_the_chance_to_fail_grows_with_the_deficit_from_0_to_1():
    chances = [failing(deficit_s, 0.2) for deficit_s in (-1.0, 0.0, 0.01, 0.1, 1.0, 100.0)]
    assert chances[0] == chances[1] == 0.0
    assert chances == sorted(chances)
    assert isclose(chances[-1], 1.0)
    assert failing(0.01, 0.0) == 1.0


@given(workers(), requests(decoding=False), st.sampled_from([0.0, 1e-12, 0.003]))
def test_to_stop_counting_at_the_first_that_may_fail_changes_no_answer(at, asked, step_in_s):
    led, r = ledger_of([replace(at, boundary_s=NOW_S + step_in_s)], asked, NOW_S, GENEROUS_S)
    counted = harm(led, knobs_of("d"), 0, r, 0, NOW_S, False, inf)
    assert (harm(led, knobs_of("d"), 0, r, 0, NOW_S, False, 0.0) == inf) == (counted > 0.0)
