"""The waiting queue against a plain list: the next request, the ones turned away, and that none is lost."""

from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.perfmodel.coefficients import coefficient_row
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.ledger import HELD, NONE, QUEUED, new_ledger
from controlplane.placement.lengths import LengthTable
from controlplane.placement.queue import (
    REFUSALS,
    QueueSettings,
    begin_round,
    goes_first,
    hold,
    leave,
    line_up,
    new_queue,
    next_offer_s,
    offer,
    offer_late,
    overdue,
    readmit,
    refuse,
    turned_away,
    yields,
)
from controlplane.types import EngineMode

PROFILE = Profile(
    "made",
    "made",
    1,
    StepModel(0.02, 1e-4, 1e-4, 1e-6),
    KvModel(60_000),
    EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=4096),
    Residuals(0, 0, 0, 0),
    Source("composed", "made up", "none", "2026-01-01"),
    PrefillModel(0.01, 1e-4),
)
NORMAL, HIGH = 0, 1


class Line:
    """A queue and the ledger it works on; requests by number, each told when it arrived."""

    def __init__(self, requests=40, **settings):
        self.led = new_ledger(
            np.stack([coefficient_row(PROFILE)]), np.zeros(1, int), requests, 8, LengthTable.constant(40.0)
        )
        self.led.requests["prompt"], self.led.requests["predicted"] = 100, 40
        self.led.requests["phase"] = QUEUED
        self.queue = new_queue(QueueSettings(**settings))

    def describe(self, r, priority, arrival_s, ttft_s=1e6, first_s=nan, yields_tpot_s=0.0):
        row = self.led.requests[r]
        row["priority"], row["arrival_s"], row["ttft_s"] = priority, arrival_s, ttft_s
        row["first_s"], row["yields_tpot_s"] = first_s, yields_tpot_s

    def come(self, r, priority=NORMAL, at_s=0.0, **facts):
        """A newcomer; the one turned away for it, or NONE."""
        self.describe(r, priority, at_s, **facts)
        out = int(turned_away(self.led, self.queue, r))
        if out not in (NONE, r):
            assert leave(self.led, self.queue, out)
        if out != r:
            hold(self.led, self.queue, r, at_s)
        return out

    def round(self, now_s=0.0, takes=lambda r: False):
        """Who is offered in a round, in order, and who has lost its TTFT in it."""
        offered, lost = [], []
        begin_round(self.queue)
        while (found := offer(self.led, self.queue, now_s))[0] != NONE:
            r = int(found[0])
            if found[1]:
                lost.append(r)
                continue
            offered.append(r)
            if takes(r):
                assert leave(self.led, self.queue, r)
            else:
                refuse(self.queue, r)
        return offered, lost

    def order(self, now_s=0.0):
        """Everybody in line, next first; the queue is empty afterwards."""
        return self.round(now_s, lambda r: True)[0]


def test_high_goes_ahead_of_normal_that_came_within_the_ageing_time():
    line = Line(ageing_s=10.0)
    for r, (priority, at_s) in enumerate([(NORMAL, 0.0), (NORMAL, 11.0), (HIGH, 12.0)]):
        line.come(r, priority, at_s)
    assert line.order() == [0, 2, 1]


def test_who_is_due_first_goes_first_and_loose_work_waits_for_tight():
    line = Line()
    for r, (at_s, ttft_s) in enumerate([(0.0, 3600.0), (1.0, 30.0), (2.0, 600.0), (3.0, 1.0), (3.5, 600.0)]):
        line.come(r, at_s=at_s, ttft_s=ttft_s)
    assert line.order(3.5) == [3, 1, 2, 4, 0]


def test_a_newcomer_goes_first_only_where_all_that_wait_are_due_after_it():
    line = Line()
    line.describe(9, NORMAL, 5.0, ttft_s=1.0)
    assert goes_first(line.led, line.queue, 9)
    line.come(0, at_s=0.0, ttft_s=60.0)
    assert goes_first(line.led, line.queue, 9)
    line.come(1, at_s=4.9, ttft_s=1.0)
    assert not goes_first(line.led, line.queue, 9)


def test_those_that_yield_are_offered_less_often():
    line = Line()
    line.come(0, at_s=0.0, ttft_s=21_600.0)
    assert next_offer_s(line.led, line.queue, 0.01) == 0.01
    line.led.requests["yields_tpot_s"][0] = 0.03
    assert next_offer_s(line.led, line.queue, 0.01) == 0.25
    line.come(1, at_s=1.0, ttft_s=1.0)
    assert next_offer_s(line.led, line.queue, 0.01) == 0.01


def test_work_that_yields_may_wait_as_long_as_its_target_lets_it():
    line = Line(max_wait_s=30.0)
    line.come(0, at_s=0.0, ttft_s=3600.0)
    assert overdue(line.led, line.queue, 30.0) == 0
    for yields_tpot_s in (0.03, -0.03):  # as long as it yields, and past its last chance
        line.led.requests["yields_tpot_s"][0] = yields_tpot_s
        assert overdue(line.led, line.queue, 3599.0) == NONE
        assert overdue(line.led, line.queue, 3600.0) == 0


def test_a_round_ends_when_enough_found_no_place_and_the_next_begins_anew():
    line = Line()
    for r in range(REFUSALS + 3):
        line.come(r, at_s=float(r))
    assert line.round() == (list(range(REFUSALS)), [])
    assert line.round(takes=lambda r: r == 1)[0] == list(range(REFUSALS + 1))
    assert line.order() == [0, 2, 3, 4, 5, 6]


def test_those_who_lost_their_ttft_go_behind_all_who_are_on_time():
    line = Line()
    for r in range(6):
        line.come(r, HIGH if r == 5 else NORMAL, at_s=0.1 * r, ttft_s=1.0)
    line.come(6, at_s=2.0, ttft_s=1e6)
    assert line.round(now_s=3.0) == ([6, 5, 0, 1], [5, 0, 1, 2, 3, 4])
    line.come(7, at_s=3.0, ttft_s=1e6)
    assert line.order(3.0) == [6, 7, 5, 0, 1, 2, 3, 4]


def test_hopeless_requests_at_the_head_do_not_use_up_the_refusals():
    line = Line()
    for r in range(2 * REFUSALS):
        line.come(r, at_s=0.0, ttft_s=0.5)
    line.come(20, at_s=1.0)
    offered, lost = line.round(now_s=1.0, takes=lambda r: r == 20)
    assert offered[0] == 20
    assert lost == list(range(2 * REFUSALS))


def test_a_request_that_has_its_first_token_is_never_late():
    line = Line()
    line.describe(0, NORMAL, 0.0, ttft_s=0.5, first_s=0.3)
    readmit(line.led, line.queue, 0, 9.0)
    line.come(1, at_s=9.0)
    assert line.round(now_s=10.0) == ([0, 1], [])


def test_those_that_lost_their_worker_come_back_by_their_first_arrival_even_into_a_full_queue():
    line = Line(max_requests=1)
    line.come(0, at_s=5.0)
    for r, at_s in ((1, 2.0), (2, 1.0), (3, 6.0)):
        line.describe(r, NORMAL, at_s)
        readmit(line.led, line.queue, r, 7.0)
    assert line.order() == [2, 1, 0, 3]


def test_a_full_queue_turns_away_the_newcomer_unless_one_of_lower_priority_waits():
    line = Line(max_requests=2)
    assert line.come(0, NORMAL, 0.0) == NONE
    assert line.come(1, NORMAL, 1.0) == NONE
    assert line.come(2, NORMAL, 2.0) == 2
    assert line.come(3, HIGH, 3.0) == 1
    assert line.come(4, HIGH, 4.0) == 0
    assert line.come(5, HIGH, 5.0) == 5
    assert line.order() == [3, 4]


def test_a_full_queue_turns_away_the_late_before_anybody_on_time():
    line = Line(max_requests=3)
    line.come(0, NORMAL, 0.0, ttft_s=0.5)
    line.come(1, HIGH, 0.0, ttft_s=0.5)
    line.come(2, NORMAL, 0.0)
    line.round(now_s=2.0)
    assert line.come(3, NORMAL, 2.0) == 0
    assert line.come(4, NORMAL, 2.0) == 4, "a high request keeps its place before a normal one"
    assert line.come(5, HIGH, 2.0) == 1
    assert line.come(6, HIGH, 2.0) == 3


def test_work_that_yields_takes_no_place_in_the_queue_until_it_is_late():
    line = Line(max_requests=1)
    for r in range(5):
        assert line.come(r, at_s=0.0, ttft_s=5.0, yields_tpot_s=0.03) == NONE
    assert line.come(5, at_s=1.0) == NONE
    assert line.come(6, at_s=1.0) == 6, "one that does not yield is there already"
    assert line.come(7, HIGH, at_s=1.0) == 5
    assert line.come(8, HIGH, at_s=1.0) == 8, "nothing of what waits would make room"
    lost = [line.round(now_s=6.0)[1] for _ in range(2)]
    assert sorted(lost[0] + lost[1]) == list(range(5))
    assert line.come(9, at_s=6.0) in range(5)


def test_who_waits_too_long_is_found_and_counts_anew_once_it_comes_back():
    line = Line(max_wait_s=3.0)
    line.come(0, at_s=0.0, ttft_s=0.5)
    line.come(1, at_s=2.0)
    line.round(now_s=2.5)  # 0 is late by now
    assert overdue(line.led, line.queue, 2.9) == NONE
    assert overdue(line.led, line.queue, 3.0) == 0
    leave(line.led, line.queue, 0)
    readmit(line.led, line.queue, 0, 3.0)
    assert overdue(line.led, line.queue, 4.9) == NONE
    assert overdue(line.led, line.queue, 5.0) == 1
    assert overdue(Line().led, Line().queue, inf) == NONE


def test_the_late_can_be_offered_by_themselves():
    line = Line()
    line.come(0, at_s=0.0, ttft_s=0.5)
    line.come(1, at_s=1.0)
    line.round(now_s=1.0)
    begin_round(line.queue)
    assert offer_late(line.led, line.queue) == 0
    refuse(line.queue, 0)
    assert offer_late(line.led, line.queue) == NONE


def test_one_that_does_not_wait_cannot_leave():
    line = Line()
    line.come(0)
    assert not leave(line.led, line.queue, 1)
    line.led.requests["phase"][2] = HELD  # on its way elsewhere
    assert not leave(line.led, line.queue, 2)
    assert leave(line.led, line.queue, 0)
    assert not leave(line.led, line.queue, 0)
    assert line.queue.waiting == 0


@pytest.mark.parametrize("settings", [{"max_requests": -1}, {"max_wait_s": 0.0}, {"ageing_s": -1.0}])
def test_negative_settings_are_refused(settings):
    with pytest.raises(BadInput, match="queue"):
        QueueSettings(**settings)


moves = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "come", "back", "gone", "round"]),
        st.integers(0, 1),
        st.sampled_from([0.5, 3.0, 1e6]),
        st.integers(0, 30),
        st.booleans(),
    ),
    max_size=40,
)


@given(moves, st.integers(0, 8))
def test_whatever_happens_the_line_is_that_of_a_plain_list(story, most):
    """`waits`: (late, entry) by request; sorted as the docstring of the queue says it."""
    line, now_s, ageing_s = Line(60, max_requests=most, ageing_s=2.0), 0.0, 2.0
    rows, waits = line.led.requests, {}
    fresh = iter(range(60))

    def rank(r):
        return round(float(rows["arrival_s"][r] + rows["ttft_s"][r]) - ageing_s * int(rows["priority"][r]), 9)

    for what, priority, ttft_s, pick, is_loose in story:
        now_s += 0.3
        if what == "come":
            r = next(fresh)
            counted = [i for i, (late, _) in waits.items() if late or not yields(line.led, i)]
            out = line.come(r, priority, now_s, ttft_s=ttft_s, yields_tpot_s=0.03 * is_loose)
            assert (out == NONE) == (is_loose or len(counted) < most)
            if out not in (NONE, r):
                assert out in counted
                late, _ = waits.pop(out)
                assert late or int(rows["priority"][out]) < priority
            if out != r:
                waits[r] = (False, now_s)
        elif what == "back":
            r = next(fresh)
            first_s = now_s if pick % 2 else nan
            line.describe(r, priority, now_s - 0.1 * pick, ttft_s, first_s, 0.03 * is_loose)
            readmit(line.led, line.queue, r, now_s)
            waits[r] = (False, now_s - 0.1 * pick)
        elif what == "gone" and waits:
            r = sorted(waits)[pick % len(waits)]
            assert leave(line.led, line.queue, r)
            del waits[r]
        elif what == "round":
            offered, lost = line.round(now_s)
            for r in lost:
                assert isnan(rows["first_s"][r])
                assert now_s + 0.02 > rows["arrival_s"][r] + rows["ttft_s"][r]
                waits[r] = (True, now_s)
            on_time = [r for r in waits if not waits[r][0]]
            assert [rank(r) for r in offered if r in on_time] == sorted(
                rank(r) for r in offered if r in on_time
            )
            assert len(offered) == min(len(waits), REFUSALS)
            if len(on_time) >= REFUSALS:
                assert set(offered) <= set(on_time)
        assert line.queue.waiting == len(waits)
    lined = np.empty(60, np.int64)
    n, m = line_up(line.led, line.queue, now_s, lined, np.empty(60, np.int64))
    ahead = lined[:n].tolist()
    assert [rank(r) for r in ahead] == sorted(rank(r) for r in ahead)
    everyone = line.order(now_s)
    assert everyone[:n] == ahead
    assert sorted(everyone) == sorted(waits)
    assert m == len(waits) - n - sum(late for late, _ in waits.values())
