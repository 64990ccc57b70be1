import hypothesis.strategies as st
import pytest
from hypothesis import given

from controlplane.errors import BadInput
from dataplane.live.gateway.waiting_room import WaitingRoom, WaitingSettings


def names(room):
    return [waiting.what for waiting in room.in_order()]


def test_high_goes_ahead_of_normal_that_came_within_the_ageing_time():
    room = WaitingRoom(WaitingSettings(ageing_s=10.0))
    for name, priority, now_s in (("old", 0, 0.0), ("normal", 0, 11.0), ("high", 1, 12.0)):
        assert room.offer(name, priority, now_s) is None
    assert names(room) == ["old", "high", "normal"]


def test_a_full_room_refuses_a_normal_newcomer():
    room = WaitingRoom(WaitingSettings(max_requests=1))
    room.offer("first", 0, 0.0)
    assert room.offer("second", 0, 1.0) == "second"


def test_a_full_room_turns_away_its_youngest_normal_for_a_high_newcomer():
    room = WaitingRoom(WaitingSettings(max_requests=2))
    room.offer("first", 0, 0.0)
    room.offer("second", 0, 1.0)
    assert room.offer("high", 1, 2.0) == "second"
    assert names(room) == ["high", "first"]


def test_one_that_lost_its_place_comes_back_by_its_first_arrival_even_into_a_full_room():
    room = WaitingRoom(WaitingSettings(max_requests=1))
    room.offer("newcomer", 0, 5.0)
    room.readmit("replayed", 0, 1.0, 6.0)
    assert names(room) == ["replayed", "newcomer"]


def test_who_waits_too_long_is_taken_out_once():
    room = WaitingRoom(WaitingSettings(max_wait_s=3.0))
    room.offer("a", 0, 0.0)
    room.offer("b", 0, 2.0)
    assert room.overdue(3.0) == ["a"]
    assert room.overdue(3.0) == []
    assert len(room) == 1


def test_retry_after_follows_the_pace_at_which_places_come_free():
    room = WaitingRoom(WaitingSettings())
    for i in range(12):
        room.offer(i, 0, 0.0)
    for i, waiting in enumerate(room.in_order()[:4]):
        room.take(waiting, float(i))
    # Four left in four seconds, eight still wait and one more would.
    assert room.retry_after_s(4.0) == 9


@given(st.lists(st.tuples(st.integers(0, 1), st.floats(0, 100)), max_size=30), st.integers(0, 8))
def test_the_room_never_holds_more_than_it_may_and_loses_nobody(arrivals, most):
    room = WaitingRoom(WaitingSettings(max_requests=most))
    inside, turned_away = set(), set()
    for i, (priority, now_s) in enumerate(sorted(arrivals, key=lambda a: a[1])):
        out = room.offer(i, priority, now_s)
        inside.add(i)
        if out is not None:
            inside.remove(out)
            turned_away.add(out)
    assert len(room) <= most
    assert set(names(room)) == inside
    assert not inside & turned_away


def test_negative_settings_are_refused():
    with pytest.raises(BadInput):
        WaitingSettings(max_requests=-1)
