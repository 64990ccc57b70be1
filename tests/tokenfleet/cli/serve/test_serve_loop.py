"""`serve --plan` as a loop: its bounds, its floor by the clock, and what the start prints."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from made_plans import plan_json
from made_types import profile_of

from controlplane.control import Settings
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.autoscale import scale
from controlplane.scaler.bounds import Autoscale
from controlplane.scaler.state import Scaling
from controlplane.snapshot import Snapshot
from controlplane.worker_type import WorkerType
from dataplane.live.control.controller_process import CONTROLLER_SETTINGS, ControllerSettings
from dataplane.live.control.views import bounds_view
from tokenfleet.cli.main import main
from tokenfleet.cli.serve.flags import ServeFlags
from tokenfleet.cli.serve.loop import autoscale_asked, loop_lines
from tokenfleet.planning.plan_file import PlanFile, parse_plan

MODEL = "llama-3.1-8b"
HOUR_S = 3600.0
NOON_S = datetime(2024, 5, 3, 12, tzinfo=UTC).timestamp()  # of the trace
TODAY_S = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
LINE = {"workers_per_rps": 1.0, "intercept": 0.0, "r2": 0.99}
PROFILE = profile_of(StepModel(0.01, 1e-5, 1e-4, 1e-8), 400_000, 256)


def made(of: int = 4, counts: tuple[int, ...] = (2, 4, 1), began_s: float | None = NOON_S) -> dict[str, Any]:
    """A plan whose schedule has an hour of each of these counts."""
    spans = [
        {"start_s": i * HOUR_S, "end_s": (i + 1) * HOUR_S, "workers": workers}
        for i, workers in enumerate(counts)
    ]
    inputs = plan_json()["inputs"] | {"clock_start_unix_s": began_s}
    return plan_json(of, schedule=spans, demand_line=LINE, inputs=inputs)


def planned(**fields: Any) -> PlanFile:
    return parse_plan(made(**fields), "plan.json")


def loop_of(plan: PlanFile, **flags: Any) -> Autoscale | None:
    asked = ServeFlags(**({"model": [MODEL], "plan": Path("plan.json"), "engine": "emulated"} | flags))
    return autoscale_asked(asked, plan, {"h100-sxm TP1": plan.workers})


def test_a_plan_is_a_loop_between_its_fewest_and_its_workers() -> None:
    loop = loop_of(planned())
    assert loop is not None
    assert (loop.low, loop.high, loop.line) == (1, 4, (1.0, 0.0))
    assert loop.most_kinds == {"h100-sxm TP1": 4}
    assert [loop.fewest(TODAY_S + h * HOUR_S) for h in (-1, 0, 1, 2, 3)] == [1, 2, 4, 1, 1]


def test_fixed_keeps_the_count() -> None:
    assert loop_of(planned(), fixed=True) is None


@pytest.mark.parametrize("fields", [{"counts": ()}, {"began_s": None}])
def test_a_plan_without_a_schedule_or_dates_follows_demand_alone(fields: dict[str, Any]) -> None:
    plan = planned(**fields)
    loop = loop_of(plan)
    assert loop is not None
    assert (loop.low, loop.high, loop.floor) == (1, 4, None)
    said = list(loop_lines(plan, loop, are_own=True))
    assert said[0] == "autoscaling from 1 to 4 workers, 4 at the start; --fixed keeps 4"
    why = "its trace has no dates" if plan.schedule else "the plan has none"
    assert said[1] == f"no floor from the plan's schedule, since {why}: demand alone decides"
    assert len(said) == (3 if plan.schedule else 2)


def test_the_bounds_that_are_asked_for_keep_the_plans_floor() -> None:
    plan = planned()
    loop = loop_of(plan, autoscale="0..9")
    assert loop is not None
    assert (loop.low, loop.high, loop.most_kinds) == (0, 9, {})
    assert loop.fewest(TODAY_S + HOUR_S) == 4
    said = list(loop_lines(plan, loop, are_own=False))
    assert said[0] == "autoscaling from 0 to 9 workers, 4 at the start"
    assert said[1].startswith("floor: the plan's schedule by time of day (UTC); now, ")
    assert len(said) == 2


def test_a_floor_without_the_plans_margin_says_so() -> None:
    line = {"workers_per_rps": 0.0, "intercept": 2.0, "r2": 0.99}  # 2 where step times are as predicted
    plan = parse_plan(made() | {"demand_line": line}, "plan.json")
    loop = loop_of(plan)
    assert loop is not None
    begins = (
        "floor: the plan's schedule by time of day (UTC), without its margin for step times (at most 2); "
    )
    assert list(loop_lines(plan, loop, are_own=True))[1].startswith(begins)


def test_bounds_that_leave_one_number_are_said_to_keep_it() -> None:
    plan = planned()
    loop = loop_of(plan, autoscale="4..4")
    assert loop is not None
    said = list(loop_lines(plan, loop, are_own=False))
    assert said == ["autoscaling keeps 4 workers: its bounds leave no other number"]


@pytest.mark.parametrize(
    ("fields", "words", "says"),
    [
        ({}, ["--autoscale", "1..3"], "--autoscale: expected MIN..MAX around the plan's 4 workers, got 1..3"),
        ({}, ["--max-workers", "3"], "--max-workers: expected at least the plan's 4 workers, got 3"),
        ({}, ["--budget-usd-per-h", "2"], "--budget-usd-per-h: 2: the workers to start with cost $5 an hour"),
        ({}, ["--fixed", "--autoscale", "1..4"], "--fixed: keeps the number of workers and --autoscale"),
        ({}, ["--fixed", "--budget-usd-per-h", "9"], "--budget-usd-per-h: limits autoscaling"),
        ({"schedule": [{"start_s": 9.0, "end_s": 3.0, "workers": 1}]}, [], "--plan: schedule.0: end_s"),
        ({"schedule_detail": {"week": {"Monday": [1]}}}, [], "--plan: schedule_detail.week: expected 7 days"),
    ],
)  # fmt: skip
def test_what_no_loop_can_keep_to_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], words: list[str], says: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(made() | fields))
    given = ["--plan", str(tmp_path / "plan.json"), "--model", f"meta/{MODEL}", "--engine", "emulated"]
    assert main(["serve", *given, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")


def test_fixed_without_a_plan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", f"meta/{MODEL}", "--engine", "emulated", "--fixed"]) == 2
    assert "--fixed: without a plan nothing changes the number of workers" in capsys.readouterr().err


def test_the_api_says_the_floor_why_and_until_when() -> None:
    loop = loop_of(planned())
    assert loop is not None
    floor = bounds_view(loop, TODAY_S + 600.0, 60.0)["floor"]
    assert floor == {
        "workers": 2,
        "why": "the plan's schedule by time of day (UTC), each rise a cold start early",
        "until_unix_s": TODAY_S + HOUR_S - 60.0,
        "then_workers": 4,
    }
    night = bounds_view(loop, TODAY_S - 3 * HOUR_S, 60.0)["floor"]
    assert (night["workers"], night["until_unix_s"], night["then_workers"]) == (1, TODAY_S - 60.0, 2)
    assert bounds_view(replace(loop, floor=None), TODAY_S, 60.0)["floor"] is None
    flat = loop_of(planned(counts=(4,) * 24))
    assert flat is not None
    always = bounds_view(flat, TODAY_S, 60.0)["floor"]
    assert (always["workers"], always["until_unix_s"], always["then_workers"]) == (4, None, None)


def test_the_controller_follows_the_clock_over_its_pipe() -> None:
    types = (WorkerType.of(PROFILE),)
    settings = ControllerSettings("http://127.0.0.1:1", None, False, 1, types, autoscale=loop_of(planned()))
    told = CONTROLLER_SETTINGS.validate_json(CONTROLLER_SETTINGS.dump_json(settings))
    assert told == settings

    def low(unix_s: float) -> int:
        tick: Settings = told.tick({}, unix_s, 60.0)
        assert tick.scaling is not None
        assert tick.load is not None
        assert tick.load.least == tick.scaling.target.low
        return tick.scaling.target.low

    assert [low(TODAY_S + at_s) for at_s in (-HOUR_S, 0.0, HOUR_S - 61.0, HOUR_S - 59.0)] == [1, 2, 2, 4]


def test_the_fleet_falls_to_the_floor_and_rises_to_it_without_news_of_the_demand() -> None:
    """Little traffic from noon on, with a schedule of two workers, four and one."""
    loop = loop_of(planned())
    assert loop is not None
    types = (WorkerType.of(PROFILE),)
    loop = replace(loop, most_kinds={})
    state, wanted, seen = Scaling(), 4, {}
    for n in range(int(3.5 * HOUR_S / 10)):
        now_s = 10.0 * n
        is_counted = not 0.9 * HOUR_S < now_s < 1.1 * HOUR_S
        settings = loop.settings(types, fewest=loop.fewest(TODAY_S + now_s, 60.0))
        snapshot = Snapshot(now_s, (), wanted, arrivals=3.0 if is_counted and n else None, cold_start_s=60.0)
        state, change = scale(settings, state, snapshot)
        if change is not None:
            wanted = change.workers
            seen[now_s] = wanted
    assert list(seen.values()) == [2, 4, 1]
    fell_s, rose_s, last_s = seen
    assert fell_s < 600.0
    assert rose_s == HOUR_S - 60.0
    assert 2 * HOUR_S < last_s < 2 * HOUR_S + 600.0
