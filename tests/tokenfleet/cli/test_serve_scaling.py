"""What a serving fleet takes from a plan: its line, the lengths that it holds for, and its price."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_plans import plan_json
from made_types import profile_of

from controlplane.errors import BadInput
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.line import at_lengths
from controlplane.scaler.traffic import Traffic
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerType
from tokenfleet.cli.serve_plan import autoscale_of
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
        return at_lengths(given, learned, PROFILE, seen).workers_per_rps

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
