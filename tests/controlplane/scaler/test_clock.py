"""A planned schedule as a floor by the clock."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaler.bounds import DAY_S, WEEK_S, ClockFloor, ScheduleInterval, by_the_day, since_begin_s

WEDNESDAY_14H = datetime(2026, 11, 25, 14, tzinfo=UTC).timestamp()


def test_time_is_since_midnight_or_since_mondays():
    assert since_begin_s(WEDNESDAY_14H, DAY_S) == 14 * 3600
    assert since_begin_s(WEDNESDAY_14H, WEEK_S) == 2 * DAY_S + 14 * 3600


def test_a_past_schedule_is_a_floor_at_the_same_time_of_day():
    past_s = datetime(2024, 5, 3, 13, tzinfo=UTC).timestamp()
    floor = by_the_day([(past_s, past_s + 3600, 2), (past_s + 3600, past_s + 7200, 5)])
    assert [floor.at(WEDNESDAY_14H + h * 3600) for h in (-2, -1, 0, 1)] == [0, 2, 5, 0]
    assert floor.at(WEDNESDAY_14H - 60, ahead_s=90.0) == 5, "a cold start early"
    assert floor.covered_s == 7200
    edges_s = floor.edges_s(WEDNESDAY_14H, ahead_s=60.0)
    assert [at_s - WEDNESDAY_14H for at_s in edges_s] == [3600, DAY_S - 3660, DAY_S - 60, DAY_S]


def test_the_busiest_day_counts_and_midnight_parts_nothing():
    night_s = datetime(2024, 5, 3, 23, tzinfo=UTC).timestamp()
    floor = by_the_day([(night_s, night_s + 7200, 3), (night_s + DAY_S, night_s + DAY_S + 7200, 4)])
    midnight_s = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert [floor.at(midnight_s + h * 3600) for h in (-2, -1, 0, 1)] == [0, 4, 4, 0]
    assert floor.at(midnight_s - 3660, ahead_s=60.0) == 4


def test_a_week_has_weekdays_and_sunday_is_before_monday():
    week = ClockFloor(WEEK_S, (ScheduleInterval(0.0, DAY_S, 6), ScheduleInterval(2 * DAY_S, 3 * DAY_S, 2)))
    days = [WEDNESDAY_14H + n * DAY_S for n in range(7)]
    assert [week.at(at_s) for at_s in days] == [2, 0, 0, 0, 0, 6, 0]
    sunday_s = WEDNESDAY_14H + 4 * DAY_S + 10 * 3600 - 30
    assert (week.at(sunday_s), week.at(sunday_s, ahead_s=60.0)) == (0, 6)


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(60, 100_000), st.integers(1, 9)), max_size=6),
    st.integers(0, 10_000_000),
    st.integers(0, 600),
)
def test_the_floor_is_the_highest_of_all_that_falls_on_the_time(spans, unix_s, ahead_s):
    floor = by_the_day([(start, start + length, n) for start, length, n in spans])
    seen = range(unix_s, unix_s + ahead_s + 1, 60)
    least = max((floor.at(float(at_s)) for at_s in seen), default=0)
    assert floor.at(float(unix_s), float(ahead_s)) >= least
    there = {n for _, _, n in spans}
    assert floor.at(float(unix_s), float(ahead_s)) in {0, *there}
