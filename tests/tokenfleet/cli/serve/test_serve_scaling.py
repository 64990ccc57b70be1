"""A plan's parts that a serving fleet uses: its line, the lengths that it holds for, and its price."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_plans import plan_json
from made_types import profile_of

from controlplane.errors import BadInput
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.autoscale import scale
from controlplane.scaler.line import carried_over
from controlplane.scaler.state import Scaling
from controlplane.scaler.traffic import Traffic
from controlplane.snapshot import Snapshot
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerGroup, WorkerType
from dataplane.live.pool.fleet_types import FleetTypes
from tokenfleet.cli.serve.flags import ServeFlags
from tokenfleet.cli.serve.loop import autoscale_of, check_budget
from tokenfleet.planning.plan_file import PlanFile, read_plan

LINE = {"workers_per_rps": 0.5, "intercept": 0.4, "r2": 0.99}
LENGTHS = {"mean_prompt_tokens": 1000.0, "mean_output_tokens": 200.0}
PROFILE = profile_of(StepModel(0.01, 1e-5, 1e-4, 1e-8), 400_000, 256)
SLO = Slo(2.0, 0.05)


def plan(folder: Path, line: dict[str, Any] | None) -> PlanFile:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan_json(2, demand_line=line)))
    return read_plan(path)


def test_a_plans_line_is_taken_with_the_lengths_it_was_drawn_at(tmp_path: Path) -> None:
    taken = autoscale_of("1..8", "60s", plan(tmp_path, LINE | LENGTHS))
    assert (taken.line, taken.learned_at) == ((0.5, 0.4), (1000.0, 200.0))
    assert autoscale_of("1..8", "60s", plan(tmp_path, LINE | LENGTHS), as_is=True).line is None
    settings = taken.settings((WorkerType.of(PROFILE),))
    given, learned = settings.target.line, settings.learned_at
    assert given is not None
    assert learned is not None

    def slope(prompt: float, output: float) -> float:
        seen = Traffic((ClassArrivals(SLO, 1000.0, 1000 * prompt, 1000 * output),))
        return carried_over(given, learned, PROFILE, PROFILE, seen).workers_per_rps

    assert slope(1000, 200) == pytest.approx(0.5)
    assert slope(2000, 200) > 0.5 > slope(1000, 100)


def test_a_plan_that_does_not_say_its_lengths_has_a_line_all_the_same(tmp_path: Path) -> None:
    taken = autoscale_of("1..8", "60s", plan(tmp_path, LINE))
    assert (taken.line, taken.learned_at) == ((0.5, 0.4), None)
    assert taken.settings((WorkerType.of(PROFILE),)).learned_at is None
    assert autoscale_of("1..8", "60s", plan(tmp_path, None)).line is None


@pytest.mark.parametrize(
    "spoiled",
    [
        {"workers_per_rps": "many"},
        {"intercept": None},
        {"workers_per_rps": -1.0},
        {"mean_prompt_tokens": 0},
        {"mean_output_tokens": "long"},
    ],
)
def test_a_line_that_is_none_is_refused_with_its_file(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"plan\.json: demand_line\."):
        autoscale_of("1..8", "60s", plan(tmp_path, LINE | LENGTHS | spoiled))


def test_a_budget_holds_the_fleet_down_and_says_so_once() -> None:
    autoscale = autoscale_of("1..8", "60s", None, budget_usd_per_h=7.0)
    settings = autoscale.settings((WorkerType.of(PROFILE, usd_per_h=2.0),))
    settings = replace(settings, target=replace(settings.target, workers_per_rps=1.0, intercept=0.0))
    assert (settings.limits.high, settings.limits.limited_by) == (3, "the budget of $7/h")
    state, wanted, said, reasons = Scaling(), 1, [], []
    for n in range(120):
        rate = 5.0 if n < 40 else 0.5
        seen = Snapshot(5.0 * n, (), wanted, arrivals=5.0 * rate if n else None)
        state, change = scale(settings, state, seen)
        said += [(n, note) for note in state.notes]
        if change is not None:
            wanted = change.workers
            reasons.append(change.reason)
        assert wanted <= 3
    assert "but no more than 3 are allowed (the budget of $7/h)" in reasons[0]
    assert [note.kind for _, note in said] == ["limit", "limit"]
    assert "the budget of $7/h" in said[0][1].reason
    assert "allowed again" in said[1][1].reason
    assert wanted == 1


def test_a_budget_is_the_flags_else_the_plans(tmp_path: Path) -> None:
    planned = plan(tmp_path, LINE)
    assert autoscale_of("1..8", "60s", planned).budget_usd_per_h == planned.inputs.budget_usd_per_h
    assert autoscale_of("1..8", "60s", planned, budget_usd_per_h=4.5).budget_usd_per_h == 4.5
    assert autoscale_of("1..8", "60s", planned).attainment == planned.attainment.target


@pytest.mark.parametrize(
    ("usd", "flags", "says"),
    [
        (2.0, {"autoscale": None}, "give --autoscale"),
        (None, {}, "has no price"),
        (2.0, {"budget_usd_per_h": 3.9}, r"cost \$4 an hour"),
    ],
)
def test_a_budget_that_cannot_be_kept_to_is_refused(
    usd: float | None, flags: dict[str, Any], says: str
) -> None:
    asked = ServeFlags(["m"], **({"autoscale": "1..8", "budget_usd_per_h": 4.0} | flags))
    types = FleetTypes([WorkerGroup(WorkerType("h100-sxm", usd_per_h=usd), 2)])
    with pytest.raises(BadInput, match=says):
        check_budget(asked, types)
