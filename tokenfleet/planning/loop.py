"""A plan as the start of a closed loop: the fewest and most workers, the schedule by the clock, the cost.

**Fewest.** A plan of N workers was proven for the trace's peak. Where its schedule covers a whole day, the
fewest are the least of it; else 1 of each role, since nothing is known of the other hours.

**Most.** What was planned, of each worker type: no more was proven to be needed, and no more may be there.

**The floor** has the schedule's ups and downs, but not the plan's margin for step times that may be wrong: a
running fleet measures its own. Its highest is what the plan's line has at the trace's busiest rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from controlplane.errors import BadInput
from controlplane.scaler.bounds import DAY_S, WEEK_S, ClockFloor, ScheduleInterval, by_the_day
from tokenfleet.planning.plan_file import ExpectedLoop, PlanFile

WEEKDAYS = 7
NEARLY = 0.98  # of a day is one: the last request comes before its end


@dataclass(frozen=True, slots=True)
class PlannedLoop:
    """The bounds of a plan's closed loop. `floor` None: the schedule cannot be mapped to the clock."""

    fewest: int
    most: int
    floor: ClockFloor | None


def planned_loop(plan: PlanFile) -> PlannedLoop:
    """The bounds of a plan. Raises BadInput for a schedule that is none."""
    floor = clock_floor(plan)
    fewest = len({part.role for part in plan.fleet})
    if floor is not None and floor.covered_s >= NEARLY * floor.period_s:
        fewest = max(fewest, min(one.workers for one in floor.intervals))
    return PlannedLoop(min(fewest, plan.workers), plan.workers, floor)


def clock_floor(plan: PlanFile) -> ClockFloor | None:
    """The plan's schedule by the clock; None where there is none, or its trace has no dates.

    Raises BadInput for intervals that overlap or end before they begin, and for a week that is none.
    """
    detail, began_s = plan.schedule_detail, plan.inputs.clock_start_unix_s
    _check(plan)
    share = needed_share(plan)
    week = () if detail is None or not detail.week else tuple(_week(list(detail.week.values()), share))
    if began_s is None or not plan.schedule:
        return None
    if week:
        return ClockFloor(WEEK_S, week)
    faster = plan.inputs.rate_scale  # the trace's time passes so much faster than the clock's
    return by_the_day(
        (began_s + s.start_s * faster, began_s + s.end_s * faster, math.ceil(share * s.workers))
        for s in plan.schedule
    )


def needed_share(plan: PlanFile) -> float:
    """What the busiest traffic needs by the plan's line, over what is planned; 1 where a mix has no line."""
    line = plan.demand_line if len(plan.fleet) == 1 else None
    if line is None or not plan.workers:
        return 1.0
    busiest_rps = max((one.rate_rps for one in plan.inputs.phases), default=plan.inputs.rate_rps or math.inf)
    return min((line.workers_per_rps * busiest_rps + line.intercept) / plan.workers, 1.0)


def _check(plan: PlanFile) -> None:
    for i, s in enumerate(plan.schedule):
        if s.end_s <= s.start_s:
            raise BadInput(f"--plan: schedule.{i}: end_s: expected more than {s.start_s:g}, got {s.end_s:g}")
    for i, (a, b) in enumerate(pairwise(plan.schedule)):
        if b.start_s < a.end_s:
            raise BadInput(
                f"--plan: schedule.{i + 1}: start_s: expected at least {a.end_s:g}, got {b.start_s:g}"
            )


def _week(rows: list[list[int]], share: float) -> Iterator[ScheduleInterval]:
    if len(rows) != WEEKDAYS or len({len(row) for row in rows}) > 1 or not rows[0]:
        raise BadInput(f"--plan: schedule_detail.week: expected {WEEKDAYS} days of as many cells each")
    cell_s = DAY_S / len(rows[0])
    for day, row in enumerate(rows):
        for cell, workers in enumerate(row):
            start_s = day * DAY_S + cell * cell_s
            yield ScheduleInterval(start_s, start_s + cell_s, math.ceil(share * workers))


def expected_loop(plan: PlanFile) -> ExpectedLoop | None:
    """The loop that serves the plan, and its expected cost over the trace; None where there is no schedule.

    It is the schedule's cost. The schedule knows the trace, and keeps the plan's margin in each window. A
    loop that sees arrivals alone takes some per cent more, or less where step times are as predicted and that
    margin is wide (docs/figures/planned-loop.md). Hours that the trace does not cover cost what they ask for.
    """
    seconds = sum(s.end_s - s.start_s for s in plan.schedule)
    if seconds <= 0 or plan.workers == 0:
        return None
    loop = planned_loop(plan)
    paid, hours = plan.paid, sum(s.workers * (s.end_s - s.start_s) for s in plan.schedule) / 3600.0
    is_paid = paid is not None and paid.worker_hours is not None
    if paid is not None and paid.worker_hours is not None:
        hours = paid.worker_hours
    mean = hours * 3600.0 / seconds
    usd = None if plan.usd_per_hour is None else plan.usd_per_hour * mean / plan.workers
    if paid is not None and paid.usd_per_hour is not None:
        usd = paid.usd_per_hour
    return ExpectedLoop(
        fewest_workers=loop.fewest,
        most_workers=loop.most,
        mean_workers=mean,
        usd_per_hour=usd,
        saved_share=1.0 - mean / plan.workers,
        cold_starts=is_paid,
        floor_by=None if loop.floor is None else loop.floor.clock,
    )
