"""A floor by the clock: the fewest workers at each time of the day or of the week, in UTC.

A planned schedule becomes one: each of its intervals at the same time of day, and of a trace of a week and
more on the same weekday too. Where days of the trace differ at a time of day the highest counts. Times that
the schedule does not cover have no floor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DAY_S, WEEK_S = 86_400.0, 604_800.0
_MONDAY_S = 3 * DAY_S  # 1970 began on a Thursday, three days after a Monday


@dataclass(frozen=True, slots=True)
class FloorInterval:
    """The fewest workers from `start_s` to `end_s`, seconds since midnight or since Monday's (UTC)."""

    start_s: float
    end_s: float
    workers: int


@dataclass(frozen=True, slots=True)
class ClockFloor:
    """Intervals that repeat every `period_s`: DAY_S or WEEK_S. They may overlap."""

    period_s: float
    intervals: tuple[FloorInterval, ...]

    def at(self, unix_s: float, ahead_s: float = 0.0) -> int:
        """The fewest workers at a Unix time; those wanted within `ahead_s`, a cold start, count already."""
        begin_s = since_begin_s(unix_s, self.period_s)
        end_s = begin_s + min(ahead_s, self.period_s)
        return max(
            (
                one.workers
                for one in self.intervals
                for turn_s in (0.0, self.period_s)
                if one.start_s + turn_s <= end_s and begin_s < one.end_s + turn_s
            ),
            default=0,
        )

    def edges_s(self, unix_s: float, ahead_s: float = 0.0) -> list[float]:
        """The Unix times within a period from now at which the floor may change, in order."""
        begin_s = since_begin_s(unix_s, self.period_s)
        edges = {edge for one in self.intervals for edge in (one.start_s - ahead_s, one.end_s)}
        waits_s = ((edge - begin_s) % self.period_s or self.period_s for edge in edges)
        return sorted(unix_s + wait_s for wait_s in waits_s)

    @property
    def clock(self) -> str:
        """What of the clock counts."""
        return "time of day" if self.period_s == DAY_S else "weekday and time of day"

    @property
    def covered_s(self) -> float:
        """Seconds of a period for which there is a floor."""
        covered, until_s = 0.0, 0.0
        for one in sorted(self.intervals, key=lambda i: i.start_s):
            covered += max(one.end_s - max(one.start_s, until_s), 0.0)
            until_s = max(until_s, one.end_s)
        return covered


def since_begin_s(unix_s: float, period_s: float) -> float:
    """Seconds since midnight, or of a week since Monday's (UTC)."""
    return (unix_s + _MONDAY_S) % period_s


def by_the_day(spans: Iterable[tuple[float, float, int]]) -> ClockFloor:
    """The floor of intervals in Unix time, each at its time of day; one across midnight becomes two."""
    found: list[FloorInterval] = []
    for start_s, end_s, workers in spans:
        begin_s = since_begin_s(start_s, DAY_S)
        last_s = begin_s + min(end_s - start_s, DAY_S)
        found.append(FloorInterval(begin_s, min(last_s, DAY_S), workers))
        if last_s > DAY_S:
            found.append(FloorInterval(0.0, last_s - DAY_S, workers))
    return ClockFloor(DAY_S, tuple(found))
