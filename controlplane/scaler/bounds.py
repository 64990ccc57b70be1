"""Bounds of the number of workers, and a floor by the clock: the fewest at each time of day or week, in UTC.

A planned schedule becomes a floor: each of its intervals at the same time of day, and of a trace of a week
and more on the same weekday too. Where days of the trace differ at a time of day the highest counts. Times
that the schedule does not cover have no floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from controlplane.errors import BadInput
from controlplane.scaler.forecast import NEAR, ForecastSettings
from controlplane.scaler.mix import MixSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.types import ClassArrivals, Slo, SloClass
from controlplane.worker_type import WorkerType

DAY_S, WEEK_S = 86_400.0, 604_800.0
ANY_SLO = Slo(1.0, 1.0)  # a line's lengths are compared within each class, at its own targets
BIN_S = 10.0
HAIR_S = 0.001  # past an edge of the floor, whatever was rounded
BINS_A_HOLD = 6  # a fall is seen in a few bins, so a short hold asks for short ones
_MONDAY_S = 3 * DAY_S  # 1970 began on a Thursday, three days after a Monday


@dataclass(frozen=True, slots=True)
class ScheduleInterval:
    """A time with a constant number of workers."""

    start_s: float
    end_s: float
    workers: int


@dataclass(frozen=True, slots=True)
class ClockFloor:
    """The fewest workers in intervals that repeat every `period_s`: DAY_S or WEEK_S. They may overlap.

    Their times are seconds since midnight, or since Monday's (UTC).
    """

    period_s: float
    intervals: tuple[ScheduleInterval, ...]

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
    found: list[ScheduleInterval] = []
    for start_s, end_s, workers in spans:
        begin_s = since_begin_s(start_s, DAY_S)
        last_s = begin_s + min(end_s - start_s, DAY_S)
        found.append(ScheduleInterval(begin_s, min(last_s, DAY_S), workers))
        if last_s > DAY_S:
            found.append(ScheduleInterval(0.0, last_s - DAY_S, workers))
    return ClockFloor(DAY_S, tuple(found))


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Bounds of the number of workers, and how it follows demand.

    `low` 0 lets an idle fleet have none. `line`: Eq 7's slope (workers per request a second) and intercept,
    as a plan learned them; None takes them from what a worker can do. `hold_s`: how long fewer must be
    enough before workers are drained. `learned_at`: the mean prompt and output tokens that `line` holds for;
    it follows those that arrive. `max_gpus`, `budget_usd_per_h`: limits of all workers together.
    `attainment`: the share of requests that is to be in time, of those without a class of their own.
    `most_kinds`: the most workers of each type, where they are bounded. `floor`: the fewest by the clock.
    """

    low: int
    high: int
    line: tuple[float, float] | None = None
    hold_s: float = 80.0
    learned_at: tuple[float, float] | None = None
    max_gpus: int | None = None
    budget_usd_per_h: float | None = None
    attainment: float = 0.99
    most_kinds: Mapping[str, int] = field(default_factory=dict)
    floor: ClockFloor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.high < 1:
            raise BadInput(
                f"autoscale: need 0 <= MIN <= MAX and MAX of at least 1, got {self.low}..{self.high}"
            )

    @property
    def limits(self) -> MixSettings:
        """The limits of all workers together."""
        return MixSettings(max_gpus=self.max_gpus, budget_usd_per_h=self.budget_usd_per_h)

    def fewest(self, unix_s: float, cold_start_s: float = 0.0) -> int:
        """The fewest workers at a Unix time; the floor counts a cold start early."""
        floor = 0 if self.floor is None else self.floor.at(unix_s, cold_start_s)
        return min(max(self.low, floor), self.high)

    def next_fewest(self, unix_s: float, cold_start_s: float = 0.0) -> tuple[float, int] | None:
        """When the fewest workers change next, and to how many; None where they never do."""
        now = self.fewest(unix_s, cold_start_s)
        edges = () if self.floor is None else self.floor.edges_s(unix_s, cold_start_s)
        after = ((at_s, self.fewest(at_s + HAIR_S, cold_start_s)) for at_s in edges)
        return next((one for one in after if one[1] != now), None)

    def settings(
        self,
        worker_types: tuple[WorkerType, ...],
        classes: tuple[SloClass, ...] = (),
        fewest: int | None = None,
    ) -> ScalingSettings:
        """How a fleet of these types follows demand; each with its profile, where there is one by now.

        `fewest`: by the clock, in place of `low`.
        """
        slope, intercept = self.line or (None, None)
        low = self.low if fewest is None else fewest
        most = self.most_kinds
        worker_types = tuple(
            replace(t, limit=min(most[t.name], most[t.name] if t.limit is None else t.limit))
            if t.name in most
            else t
            for t in worker_types
        )
        return ScalingSettings(
            TargetSettings(slope, intercept, low, self.high, to_zero=low == 0),
            StabilizationWindow(0.0, self.hold_s),
            bin_s=max(min(BIN_S, self.hold_s / BINS_A_HOLD), 1.0),
            ahead=ForecastSettings(),
            near=NEAR,
            learned_at=None if self.learned_at is None else ClassArrivals(ANY_SLO, 1.0, *self.learned_at),
            worker_types=worker_types,
            mix=self.limits,
            attainment=self.attainment,
            classes=classes,
        )
