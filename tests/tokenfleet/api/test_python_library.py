"""`import tokenfleet`: loaded at first use, the same answers as the command line, one-line errors."""

from __future__ import annotations

import ast
import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from checkout import ROOT

import tokenfleet as tf
from tokenfleet.api import inputs
from tokenfleet.cli import main as cli

SAMPLE = ROOT / "examples" / "sample_trace.csv"
NOTEBOOK = ROOT / "examples" / "first_plan.ipynb"
ASKED: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "slo": "ttft=1s,tpot=50ms",
    "gpus": ["h100"],
    "tps": 1,
    "rate_scale": 8,
    "window": "20m..22m",
}
FLAGS = [
    *("--trace", str(SAMPLE), "--model", "llama-3.1-8b", "--slo", "ttft=1s,tpot=50ms", "--format", "json"),
    *("--gpu", "h100", "--tp", "1", "--rate-scale", "8", "--window", "20m..22m"),
]


@pytest.fixture(scope="module")
def plan() -> tf.Plan:
    return tf.plan(SAMPLE, **ASKED)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert cli.main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_the_import_loads_no_simulator_and_no_tables() -> None:
    program = "import sys, tokenfleet; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"numpy", "numba", "polars", "pydantic", "typer"} & set(done.stdout.split())


def test_every_public_name_is_there_as_its_types_say() -> None:
    tree = ast.parse((ROOT / "tokenfleet" / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname: (node.module, alias.name)
        for node in ast.walk(checked)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(typed) == set(tf.__all__) - {"__version__"}
    for name, (module, attribute) in typed.items():
        assert getattr(tf, name) is getattr(sys.modules[str(module)], attribute)
    with pytest.raises(AttributeError, match="has no attribute 'plann'"):
        tf.plann  # noqa: B018


def test_a_plan_is_what_the_command_prints(plan: tf.Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "plan", *FLAGS) == json.loads(json.dumps(plan.document))


def test_a_plan_tells_its_fleet_its_price_and_its_bounds(plan: tf.Plan, tmp_path: Path) -> None:
    assert plan.feasible
    assert plan.fleet is not None
    assert (plan.fleet.workers, plan.fleet.gpus) == (plan.workers, plan.gpus)
    assert plan.fleet.usd_per_hour == pytest.approx(plan.usd_per_hour)
    reached = plan.attainment
    assert reached.lower_bound is not None
    assert reached.expected is not None
    assert 0.99 <= reached.lower_bound <= reached.expected <= 1.0
    first = plan.alternatives.row(0, named=True)
    assert (first["gpus"], first["lower_bound"]) == (plan.gpus, reached.lower_bound)
    origins = dict(plan.origins.select("input", "origin").iter_rows())
    assert (origins["Traffic"], origins["Step times, H100 TP1"]) == ("recorded", "predicted")
    assert repr(plan).startswith("Recommended fleet")
    assert "srcdoc=" in plan._repr_html_()
    plan.save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "plan.json").read_text()) == json.loads(json.dumps(plan.document))


def test_an_infeasible_question_is_an_answer_with_a_reason() -> None:
    plan = tf.plan(SAMPLE, **ASKED | {"slo": "ttft=1ms,tpot=50ms", "rate_scale": 1})
    assert (plan.feasible, plan.fleet) == (False, None)
    assert plan.reason
    assert len(plan.alternatives) == 0


def test_a_whatif_plans_each_combination_of_values(plan: tf.Plan) -> None:
    table = plan.whatif(rate=[4, 8], tpot=["30ms", "50ms"], keep=False).to_polars()
    assert table.columns[:2] == ["rate", "slo.tpot"]
    same = table.filter(pl.col("rate") == 8, pl.col("slo.tpot") == 0.05).row(0, named=True)
    assert (same["gpus"], same["lower_bound"]) == (plan.gpus, plan.attainment.lower_bound)
    assert table.filter(pl.col("rate") == 4)["gpus"].max() <= plan.gpus  # type: ignore[operator]


def test_a_simulation_is_what_the_command_prints(plan: tf.Plan, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {name: value for name, value in ASKED.items() if name not in ("gpus", "tps")}
    simulated = tf.simulate(SAMPLE, "2x h100 TP1", **fixed)
    said = printed(capsys, "simulate", "--workers", "2", *FLAGS)
    assert said | {"wall_s": 0} == json.loads(json.dumps(simulated.document)) | {"wall_s": 0}
    rows = simulated.requests
    assert len(rows) == said["requests"]
    assert rows["worker"].unique().sort().to_list() == [0, 1]
    assert plan.fleet is not None
    assert tf.simulate(SAMPLE, plan.fleet, **fixed).attainment == pytest.approx(
        plan.attainment.on_trace, abs=1e-6
    )


def test_a_fleet_may_have_workers_of_several_types() -> None:
    mixed = tf.simulate(
        SAMPLE, "1x h100 TP1 + 1x h200", model="llama-3.1-8b", slo="ttft=1s,tpot=50ms", window="0s..60s"
    )
    assert str(mixed.fleet) == "1 x h100-sxm TP1 + 1 x h200-sxm TP1"
    assert mixed.requests["worker"].n_unique() == 2


def test_a_saved_profile_plans_as_the_shipped_one(plan: tf.Plan, tmp_path: Path) -> None:
    mine = tf.Profile.find("llama-3.1-8b", "h100", 1).save(tmp_path / "mine.yaml")
    asked = {name: value for name, value in ASKED.items() if name not in ("gpus", "tps")}
    assert tf.plan(SAMPLE, **asked, profiles=[mine]).fleet.workers == plan.workers  # type: ignore[union-attr]


def test_a_trace_of_arrays_is_sorted_by_arrival(tmp_path: Path) -> None:
    trace = tf.Trace.of([2.0, 0.0], [30, 10], [3, 1])
    trace.save(tmp_path / "made.csv")
    again = tf.Trace.read(tmp_path / "made.csv").to_polars()
    assert again.equals(trace.to_polars())
    assert again["prompt_tokens"].to_list() == [10, 30]
    assert not trace.check().ok


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"attainment": 2.0}, "attainment: must be above 0 and below 1, got 2"),
        ({"rat_scale": 2.0}, "rat_scale: no such option (did you mean rate_scale"),
        ({"slo": "ttft=1s"}, "slo: tpot is missing in"),
        ({"gpu": ["h100"]}, "gpu: no such argument (did you mean gpus?)"),
        ({"slo": []}, "slo: expected a text such as ttft=1.6s,tpot=75ms, got []"),
        ({"gpus": "h9000"}, "h9000"),
        ({"max_gpus": "many"}, "max_gpus: expected a number, got 'many'"),
        ({"profiles": [tf.Profile.find("llama-3.1-8b", "h100", 1)]}, "has no file; save it"),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_it(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(tf.TokenfleetError) as refused:
        tf.plan(SAMPLE, **ASKED | changed)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_wrong_fleet_or_trace_is_one_line() -> None:
    with pytest.raises(tf.BadInput, match="fleet: expected a text such as 3x h100 TP1, got 'h100 x3'"):
        tf.Fleet.parse("h100 x3", model="llama-3.1-8b")
    with pytest.raises(tf.BadInput, match="trace: expected a Trace or paths of files, got int"):
        tf.plan(3, "llama-3.1-8b", slo="ttft=1s,tpot=50ms")  # type: ignore[arg-type]
    with pytest.raises(tf.BadInput, match=r"^requests_per_day: -1, expected more than 0"):
        tf.Trace.from_users(requests_per_day=-1)
    with pytest.raises(tf.BadInput, match="expected three columns of one length"):
        tf.Trace.of([0.0, 1.0], [1], [1])


def test_examples_in_docstrings_run() -> None:
    assert doctest.testmod(inputs).attempted > 5
    assert doctest.testmod(inputs).failed == 0


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert names["smaller"].attainment < 0.99 <= names["plan"].attainment.lower_bound
