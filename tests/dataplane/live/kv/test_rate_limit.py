"""A copy pauses as long as its pace asks, by a clock of the test's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_clock import Clock

pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from dataplane.live.engine_api.kv_messages import CopyRate
from dataplane.live.kv import direct as kv_pace
from dataplane.live.kv.direct import Pacer, Share


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(kv_pace, "time", clock)
    return clock


def copy(clock, pacer, pieces, piece_bytes=1e6, piece_s=0.001):
    """Seconds that a copy takes."""
    began_s = clock.now_s
    for piece in range(pieces):
        clock.work(piece_s)
        pacer.wait((piece + 1) * piece_bytes)
    return clock.now_s - began_s


def test_without_a_bound_there_is_no_rest(clock):
    assert copy(clock, Pacer(CopyRate(), Share()), 50) == pytest.approx(0.05)


def test_a_rate_is_kept(clock):
    assert copy(clock, Pacer(CopyRate(10e6), Share()), 50) == pytest.approx(5.0, rel=0.01)


def test_a_share_of_the_time_is_kept_whatever_a_byte_costs(clock):
    for piece_s in (0.001, 0.01):
        spent_s = copy(clock, Pacer(CopyRate(share=0.01), Share()), 100, piece_s=piece_s)
        assert 100 * piece_s / spent_s == pytest.approx(0.01, rel=0.01)


def test_the_tighter_bound_counts(clock):
    assert copy(clock, Pacer(CopyRate(10e6, share=0.5), Share()), 50) == pytest.approx(5.0, rel=0.01)
    assert copy(clock, Pacer(CopyRate(1e9, share=0.01), Share()), 50) == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize(
    "bound", [CopyRate(1e5, 1.0, 20e6), CopyRate(0.0, 0.001, 20e6), CopyRate(1e5, 0.001, 20e6)]
)
def test_a_copy_that_must_end_goes_faster_than_its_bounds(clock, bound):
    assert copy(clock, Pacer(bound, Share()), 100) == pytest.approx(5.0, rel=0.01)


def test_what_a_copy_waited_for_without_working_is_not_counted(clock):
    pacer = Pacer(CopyRate(share=0.5), Share())
    clock.now_s += 10.0
    clock.work(0.001)
    before_s = clock.now_s
    pacer.wait(1)
    assert clock.now_s - before_s == pytest.approx(0.001)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(1e-4, 0.1)), min_size=5, max_size=60))
def test_copies_at_once_keep_the_share_together(pieces):
    """Three threads, each resting as told: in any stretch no more work than the share and a piece of each."""
    share, free_s, now_s, worked_s = Share(), [0.0, 0.0, 0.0], 0.0, 0.0
    for thread, piece_s in pieces:
        now_s = max(now_s, free_s[thread]) + piece_s
        worked_s += piece_s
        free_s[thread] = now_s + share.wait_s(now_s, piece_s, 0.1)
    biggest = max(piece_s for _, piece_s in pieces)
    assert worked_s <= 0.1 * now_s + 3 * biggest + 1e-9
