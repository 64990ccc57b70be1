"""An engine that hangs is noticed in time, and one that works is left alone, by a clock of numbers."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.types import WorkerId
from dataplane.live.engine_api.step_trace import StepTrace
from dataplane.live.worker.failures import (
    CEILING_S,
    COMPUTES_S,
    FLOOR_S,
    STEPS,
    WATCH_FROM_S,
    WATCHED_S,
    EngineSilence,
)

# Between two looks of a worker: a second, and more where others have the cores.
EVERY_S = st.floats(0.5, 4.0)
STEP_S = st.floats(1e-4, 1e3) | st.just(float("inf"))
ENGINE, RANK = 17, 18


def looks(every_s: float, from_s: float = 0.0, until_s: float = 2 * CEILING_S) -> Iterator[float]:
    """The seconds of silence at each look."""
    silent_s = from_s
    while silent_s < until_s:
        silent_s += every_s
        if silent_s >= WATCH_FROM_S:
            yield silent_s


def noticed_s(
    every_s: float,
    cores: float,
    ordinary_s: float,
    is_on_cpu: bool = True,
    is_stopped: bool = False,
    from_s: float = 0.0,
) -> float:
    """The silence until an engine counts as hung that uses this many cores."""
    silence = EngineSilence(is_on_cpu)
    for now_s in looks(every_s, from_s):
        used_s = {ENGINE: 100.0 + cores * now_s, RANK: 3.0}
        if silence.is_hung(now_s, 0.0, used_s, is_stopped, ordinary_s):
            return now_s
    return float("inf")


def in_time_s(every_s: float) -> float:
    """12 s by a look each second; 15 s by one in two."""
    return max(FLOOR_S + 2 * every_s, WATCH_FROM_S + WATCHED_S + 3 * every_s)


def trace_of(*steps_s: float) -> StepTrace:
    trace, now_s = StepTrace(WorkerId("w0"), 100), 0.0
    load = dict.fromkeys(
        ("prefill_tokens", "context_tokens", "prefill_sum_sq", "prefill_sequences", "kv_blocks"), 0
    )
    for step_s in steps_s:
        now_s += step_s
        trace.add(load | {"sequences": 4}, step_s, now_s, 4, 0, 0.1)
    return trace


@given(EVERY_S, st.floats(0, 64), STEP_S, st.booleans(), st.booleans())
def test_no_engine_hangs_before_the_floor_and_each_does_after_the_ceiling(
    every_s, cores, ordinary_s, is_on_cpu, is_stopped
):
    after_s = noticed_s(every_s, cores, ordinary_s, is_on_cpu, is_stopped)
    assert FLOOR_S < after_s <= CEILING_S + 2 * every_s


@given(EVERY_S, STEP_S, st.floats(0, 0.009))
def test_an_engine_on_cpus_that_uses_none_is_noticed_at_the_floor_whatever_its_steps_were(
    every_s, ordinary_s, cores
):
    assert noticed_s(every_s, cores, ordinary_s) <= in_time_s(every_s)


@given(EVERY_S, STEP_S, st.floats(0, 64), st.booleans())
def test_a_stopped_process_is_noticed_at_the_floor_though_other_ranks_spin(
    every_s, ordinary_s, cores, is_on_cpu
):
    assert noticed_s(every_s, cores, ordinary_s, is_on_cpu, is_stopped=True) <= in_time_s(every_s)


@given(EVERY_S, STEP_S, st.floats(0.02, 64))
def test_an_engine_that_computes_on_cpus_has_many_steps_time_and_two_minutes_at_least(
    every_s, ordinary_s, cores
):
    """A step compiles, 2,048 tokens take long, or other processes leave it a fiftieth of a core."""
    after_s = noticed_s(every_s, cores, ordinary_s)
    assert min(max(COMPUTES_S, STEPS * ordinary_s), CEILING_S) < after_s


@pytest.mark.parametrize("odd_s", [0.5, 4.6, 30.0, 300.0])
def test_one_odd_step_does_not_put_off_the_notice_of_an_engine_that_hangs(odd_s):
    """Ten of the longest step ever were the limit once: 46 s after one of 4.6 s, for good."""
    steps = [0.02] * 50
    usual, odd = trace_of(*steps), trace_of(*steps, odd_s, *steps)
    late = trace_of(*steps, odd_s)  # the last step before the engine hangs
    for is_on_cpu in (True, False):
        after_s = {noticed_s(1.0, 0.0, one.ordinary_s, is_on_cpu) for one in (usual, odd, late)}
        assert after_s == {FLOOR_S + 2.0}


@given(EVERY_S, st.floats(0.0, 9.0), st.floats(FLOOR_S, 1e4), st.booleans(), st.booleans())
def test_a_worker_that_was_itself_stopped_looks_again_before_it_judges(
    every_s, from_s, away_s, is_on_cpu, is_stopped
):
    """The outputs that came meanwhile are not read yet."""
    silence = EngineSilence(is_on_cpu)
    for now_s in looks(every_s, until_s=from_s):
        if now_s <= FLOOR_S:
            assert not silence.is_hung(now_s, 0.0, {ENGINE: 1.0}, is_stopped, 0.02)
    now_s = from_s + away_s
    assert not silence.is_hung(now_s, 0.0, {ENGINE: 1.0}, is_stopped, 0.02)
    assert not silence.is_hung(now_s + every_s, now_s, {ENGINE: 1.0}, is_stopped, 0.02)


@given(EVERY_S, st.floats(0.0, 60.0), st.floats(0.02, 8.0))
def test_an_engine_that_hangs_in_the_middle_of_a_step_is_noticed_once_it_uses_no_cpu(every_s, until_s, cores):
    silence = EngineSilence(is_on_cpu=True)
    for now_s in looks(every_s):
        used_s = {ENGINE: cores * min(now_s, until_s)}
        if silence.is_hung(now_s, 0.0, used_s, False, 0.02):
            assert now_s > max(FLOOR_S, until_s)
            assert now_s <= max(in_time_s(every_s), until_s + WATCHED_S + 3 * every_s)
            return
    pytest.fail("it was never noticed")


def test_a_process_that_begins_or_ends_meanwhile_is_work():
    """A compiler is one."""
    silence = EngineSilence(is_on_cpu=True)
    assert not silence.is_hung(4.0, 0.0, {ENGINE: 1.0}, False, 0.02)
    for now_s in (11.0, 12.0, 13.0):
        assert not silence.is_hung(now_s, 0.0, {ENGINE: 1.0, 99: 0.0}, False, 0.02)
    for now_s in (14.0, 19.0):
        assert not silence.is_hung(now_s, 0.0, {ENGINE: 1.0}, False, 0.02)
    assert silence.is_hung(20.0, 0.0, {ENGINE: 1.0}, False, 0.02)


def test_silence_that_an_output_ends_is_forgotten():
    silence = EngineSilence(is_on_cpu=True)
    assert not silence.is_hung(4.0, 0.0, {ENGINE: 1.0}, False, 0.02)
    for now_s in (12.0, 17.5, 18.0):
        assert not silence.is_hung(now_s, 7.9, {ENGINE: 1.0}, False, 0.02)
    assert silence.is_hung(19.0, 7.9, {ENGINE: 1.0}, False, 0.02)
