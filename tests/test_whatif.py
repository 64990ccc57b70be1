"""What-ifs: the grid, its refusals, and what a step costs."""

import json
from pathlib import Path

import pytest
from planning_builders import poisson, worker
from test_plan_command import save

from controlplane.errors import BadInput
from tokenfleet.cli import main
from tokenfleet.profile_files import write_profile
from tokenfleet.whatif import grid


def test_the_grid_is_every_combination_in_the_order_given() -> None:
    assert grid(["rate=1,2", "slo.ttft=400ms, 1s"]) == [
        {"rate": "1", "slo.ttft": "400ms"},
        {"rate": "1", "slo.ttft": "1s"},
        {"rate": "2", "slo.ttft": "400ms"},
        {"rate": "2", "slo.ttft": "1s"},
    ]


@pytest.mark.parametrize(
    ("varies", "says"),
    [
        ([], "nothing to vary"),
        (["rates=1"], "did you mean rate"),
        (["rate"], "expected rate=VALUE"),
        (["rate=1", "rate=2"], "given twice"),
        (["rate=fast"], "expected a number"),
        (["rate=0"], "must be positive"),
        (["tp=1.5"], "whole number"),
        (["slo.tpot=30"], "no unit"),
        (["rate=" + ",".join("1" * 20), "tp=" + ",".join("1" * 20)], "400 scenarios, at most 200"),
    ],
)
def test_a_wrong_grid_is_refused_in_one_line(varies: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        grid(varies)


def test_rates_and_targets_are_planned_and_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(poisson(requests=400), tmp_path / "trace.csv")
    write_profile(worker(), tmp_path / "worker.yaml")
    (tmp_path / "prices.yaml").write_text(
        "schema: tokenfleet.prices/1\n"
        'prices: [{gpu: made-gpu, on_demand: 2.5, date: 2026-01-01, source: "made"}]\n'
    )
    words = ["whatif", "--trace", f"{tmp_path}/trace.csv", "--slo", "ttft=500ms,tpot=30ms"]
    words += ["--profile", f"{tmp_path}/worker.yaml", "--prices", f"{tmp_path}/prices.yaml"]
    words += ["--attainment", "0.95", "--vary", "rate=1,3", "--vary", "slo.tpot=5ms,30ms"]
    assert main([*words, "--format", "json", "--output-dir", f"{tmp_path}/out"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "tokenfleet.whatif/1"
    cells = {(s["changes"]["rate"], s["changes"]["slo.tpot"]): s["plan"] for s in said["scenarios"]}
    assert cells[1.0, 0.03]["workers"] < cells[3.0, 0.03]["workers"]
    assert not cells[1.0, 0.005]["feasible"]
    (step,) = said["marginal"]["rate"]
    assert step["gpus"] == cells[3.0, 0.03]["gpus"] - cells[1.0, 0.03]["gpus"]
    assert step["per_unit"] == pytest.approx(step["gpus"] * 2.5 / 2.0)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["whatif.html", "whatif.json"]


def test_what_cannot_be_planned_keeps_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(poisson(requests=300), tmp_path / "trace.csv")
    words = ["whatif", "--trace", f"{tmp_path}/trace.csv", "--slo", "ttft=500ms,tpot=30ms", "--tp", "1"]
    words += ["--model", "llama-3.1-8b", "--attainment", "0.95", "--vary", "gpu=h1000,h100"]
    assert main([*words, "--format", "json"]) == 0
    unknown, known = json.loads(capsys.readouterr().out)["scenarios"]
    assert "h1000" in unknown["error"]
    assert unknown["plan"] is None
    assert known["plan"]["feasible"]
