"""A plan as the start of a closed loop."""

from datetime import UTC, datetime

import pytest
from made_plans import plan_json, plan_of_fleet

from controlplane.errors import BadInput
from controlplane.scaler.bounds import DAY_S, WEEK_S
from tokenfleet.planning.loop import expected_loop, planned_loop
from tokenfleet.planning.plan_file import parse_plan

NOON = datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp()
INPUTS = plan_json()["inputs"]


def plan(*workers, of=4, each_s=3600.0, **more):
    inputs = INPUTS | more.pop("inputs", {})
    spans = [{"start_s": i * each_s, "end_s": (i + 1) * each_s, "workers": n} for i, n in enumerate(workers)]
    return parse_plan(plan_json(of, schedule=spans, inputs=inputs, **more), "plan.json")


def test_without_dates_or_a_schedule_there_is_no_floor_and_one_worker_is_kept():
    for one in (plan(3, 4), plan()):
        loop = planned_loop(one)
        assert (loop.fewest, loop.most, loop.floor) == (1, 4, None)


def test_a_dated_schedule_is_a_floor_at_its_time_of_day():
    loop = planned_loop(plan(3, 4, inputs={"clock_start_unix_s": NOON}))
    assert (loop.fewest, loop.most) == (1, 4), "nothing is known of the other hours"
    assert [loop.floor.at(NOON + 20 * DAY_S + h * 3600) for h in range(-1, 3)] == [0, 3, 4, 0]


def test_a_whole_day_says_the_fewest():
    loop = planned_loop(plan(*[2] * 12, *[4] * 12, inputs={"clock_start_unix_s": NOON}))
    assert (loop.fewest, loop.floor.period_s) == (2, DAY_S)


def test_a_trace_that_was_sped_up_takes_its_own_time_of_the_clock():
    loop = planned_loop(plan(3, 4, each_s=1800.0, inputs={"clock_start_unix_s": NOON, "rate_scale": 2.0}))
    assert [loop.floor.at(NOON + h * 3600 + 1) for h in range(3)] == [3, 4, 0]


def test_the_floor_leaves_out_the_margin_for_step_times_that_a_running_fleet_measures():
    phases = [
        {
            "start_s": 0.0,
            "end_s": 7200.0,
            "requests": 9,
            "rate_rps": r,
            "prompt_tokens": 9,
            "output_tokens": 9,
        }
        for r in (10.0, 40.0)
    ]
    line = {
        "workers_per_rps": 0.1,
        "intercept": 0.5,
        "r2": 1.0,
        "points": [],
    }  # 4.5 at the busiest, 9 planned
    inputs = {"clock_start_unix_s": NOON, "phases": phases}
    floors = {}
    for of in (4, 9):
        schedule = [min(n, of) for n in (2, 4, 6, 9)]
        floor = planned_loop(plan(*schedule, of=of, inputs=inputs, demand_line=line)).floor
        floors[of] = [floor.at(NOON + h * 3600) for h in range(4)]
    assert floors == {4: [2, 4, 4, 4], 9: [1, 2, 3, 5]}, "a plan below its line keeps its schedule"
    days = {str(day): [5 + day % 2] * 8 for day in range(7)}
    week = plan(9, of=9, schedule_detail={"week": days}, inputs=inputs, demand_line=line)
    assert [planned_loop(week).floor.at(NOON + day * DAY_S) for day in range(2)] == [3, 3]


def test_a_week_keeps_its_weekdays():
    days = {str(day): [1 + day % 2] * 8 for day in range(7)}
    assert planned_loop(plan(2, schedule_detail={"week": days})).floor is None, "no dates, no weekdays"
    loop = planned_loop(plan(2, schedule_detail={"week": days}, inputs={"clock_start_unix_s": NOON}))
    assert loop.floor.period_s == WEEK_S
    assert [loop.floor.at(NOON + day * DAY_S) for day in range(7)] == [1, 2, 1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"schedule_detail": {"week": {"Monday": [1, 2]}}}, "schedule_detail.week: expected 7 days"),
        (
            {"schedule": [{"start_s": 5.0, "end_s": 5.0, "workers": 1}]},
            "schedule.0: end_s: expected more than 5",
        ),
        (
            {"schedule": [{"start_s": a, "end_s": a + 10.0, "workers": 1} for a in (0.0, 5.0)]},
            "schedule.1: start_s: expected at least 10, got 5",
        ),
    ],
)
def test_a_schedule_that_is_none_is_one_line(fields, says):
    with pytest.raises(BadInput, match=says):
        planned_loop(parse_plan(plan_json(4, **fields), "plan.json"))


def test_a_split_fleet_keeps_a_worker_of_each_role():
    parts = [
        {"gpu": "h100-sxm", "tp_degree": 2, "workers": n, "role": role, "usd_per_hour": 5.0}
        for role, n in (("prefill", 1), ("decode", 3))
    ]
    loop = planned_loop(parse_plan(plan_of_fleet(parts), "plan.json"))
    assert (loop.fewest, loop.most) == (2, 4)


def test_the_loop_is_expected_to_cost_what_the_schedule_does():
    assert expected_loop(plan()) is None
    loop = expected_loop(plan(1, 2, 4, 1))
    assert (loop.fewest_workers, loop.most_workers, loop.mean_workers) == (1, 4, 2.0)
    assert (loop.usd_per_hour, loop.saved_share, loop.cold_starts, loop.floor_by) == (2.5, 0.5, False, None)
    paid = {"paid": {"cold_start_s": 60.0, "worker_hours": 10.0, "usd_per_hour": 3.25}}
    loop = expected_loop(plan(1, 2, 4, 1, schedule_detail=paid, inputs={"clock_start_unix_s": NOON}))
    assert (loop.usd_per_hour, loop.saved_share, loop.cold_starts) == (3.25, 0.375, True)
    assert loop.floor_by == "time of day"
