"""`tokenfleet portfolio`: models that share limits, by day and by night, and what is refused."""

import json

import numpy as np
import pytest
from planning_builders import save, worker

from controlplane.workload import Workload
from tokenfleet.cli.main import main
from tokenfleet.planning.plan_file import read_plan
from tokenfleet.portfolio.request import read_portfolio
from tokenfleet.profiles.library import write_profile

PRICES = "schema: tokenfleet.prices/1\nprices:\n" + "".join(
    f'- {{gpu: {gpu}, on_demand: {usd}, date: 2026-01-01, source: "made"}}\n'
    for gpu, usd in (("made-gpu", 2.5), ("slow-gpu", 3.5))
)
FILE = """\
schema: tokenfleet.portfolio/1
limits: {limits}
defaults:
  {{slo: {{ttft: 500ms, tpot: 30ms}}, prices: prices.yaml, attainment: 0.95, profile: [fast.yaml, slow.yaml]}}
models:
- {{name: early, trace: early.csv}}
- {{name: late, trace: late.csv}}
"""


def busy(early):
    """A load that is twenty times as large in one half of two minutes as in the other."""
    rng = np.random.default_rng(3)
    loud, quiet = (0.0, 60.0) if early else (60.0, 0.0)
    arrival = np.sort(
        np.concatenate([rng.uniform(loud, loud + 60, 2000), rng.uniform(quiet, quiet + 60, 100)])
    )
    lengths = rng.integers(200, 600, len(arrival)), rng.integers(2, 120, len(arrival))
    return Workload(arrival, *lengths)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portfolio")
    for early in (True, False):
        save(busy(early), folder / ("early.csv" if early else "late.csv"))
    write_profile(worker(gpu="made-gpu"), folder / "fast.yaml")
    write_profile(worker(gpu="slow-gpu", slower=1.1), folder / "slow.yaml")
    (folder / "prices.yaml").write_text(PRICES)
    return folder


@pytest.fixture
def asked(folder, capsys, monkeypatch):
    """A function that plans the portfolio with these limits: the exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))  # each model is planned once for all tests

    def ask(limits, *words):
        file = folder / "portfolio.yaml"
        file.write_text(FILE.format(limits=limits))
        code = main(["portfolio", str(file), *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


@pytest.fixture
def planned(asked):
    def plan(limits):
        code, out, _ = asked(limits, "--format", "json")
        assert code == 0
        return json.loads(out)

    return plan


def peaks(plan, gpu):
    return [window[gpu] for window in plan["gpus"]]


def test_without_limits_each_model_has_the_gpus_it_would_have_alone(planned):
    plan = planned("{}")
    assert [model["gpu"] for model in plan["models"]] == ["made-gpu", "made-gpu"]
    assert plan["usd_per_hour"] == pytest.approx(plan["unlimited_usd_per_hour"])
    for model in plan["models"]:
        (other,) = model["others"]
        assert (other["gpu"], other["usd_per_hour"] > model["usd_per_hour"]) == ("slow-gpu", True)


def test_one_models_night_is_anothers_day(planned):
    alone = planned("{}")
    whole = sum(model["plan"]["gpus"] for model in alone["models"])
    at_once = max(peaks(alone, "made-gpu"))
    assert at_once < whole  # they are not busy together, so that fewer GPUs do
    plan = planned(f"{{gpus: {{made-gpu: {at_once}}}}}")
    assert plan["usd_per_hour"] == pytest.approx(alone["usd_per_hour"])
    assert plan["constant_usd_per_hour"] > sum(model["constant_usd_per_hour"] for model in alone["models"])


def test_a_scarce_gpu_goes_to_one_and_its_price_is_told(planned):
    free = planned("{}")
    scarce = max(peaks(free, "made-gpu")) - 1
    plan = planned(f"{{gpus: {{made-gpu: {scarce}}}}}")
    assert sorted(model["gpu"] for model in plan["models"]) == ["made-gpu", "slow-gpu"]
    assert all(count <= scarce for count in peaks(plan, "made-gpu"))
    (limit,) = plan["limits"]
    assert (limit["name"], limit["more"]) == ("gpus.made-gpu", 1)
    assert limit["saves_usd_per_hour"] == pytest.approx(plan["usd_per_hour"] - free["usd_per_hour"])


def test_limits_that_leave_no_choice_say_what_to_raise(asked):
    code, _, err = asked("{gpus: {made-gpu: 1, slow-gpu: 1}, max-gpus: 30}")
    assert code == 1
    assert "gpus.made-gpu 1 -> " in err
    assert "gpus.slow-gpu alone: gpus.slow-gpu 1 -> " in err
    assert "max-gpus alone: no rise is enough" in err


def test_each_models_plan_is_one_that_serve_reads(asked, folder):
    code, out, _ = asked("{max-gpus: 40}", "--output-dir", str(folder / "out"))
    assert code == 0
    assert "early.plan.json" in out
    whole = json.loads((folder / "out" / "portfolio.json").read_text())
    for model in whole["models"]:
        assert read_plan(folder / "out" / f"{model['name']}.plan.json").document == model["plan"]
    page = (folder / "out" / "portfolio.html").read_text()
    assert "GPUs over time" in page
    assert "early" in page


def test_a_models_classes_are_those_of_plan(folder):
    file = folder / "classes.yaml"
    slo = '["chat:ttft=400ms,tpot=30ms", "batch:ttft=9s,tpot=90ms,attainment=0.9"]'
    file.write_text(FILE.format(limits="{}").replace("{ttft: 500ms, tpot: 30ms}", slo))
    for model in read_portfolio(file).models:
        assert [one.name for one in model.request.slo_classes] == ["chat", "batch"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("portfolio/1", "portfolio/2", "schema"),
        ("name: late", "name: early", "models: early stands there twice"),
        ("early.csv", "none.csv", "early"),
        ("ttft: 500ms", "ttft: 500", "defaults: slo"),
        ("attainment: 0.95", "attainmint: 0.95", "did you mean attainment?"),
        ("attainment: 0.95", "attainment: 2", "defaults: attainment: must be above 0 and below 1, got 2"),
        ("slo: {ttft: 500ms, tpot: 30ms}, ", "", "models: early: slo: missing"),
        ("limits: {}", "limits: {gpus: {h300: 4}}", "limits.gpus: h300: no model may have it"),
        ("limits: {}", "limits: {gpus: {h100: 4, h100-sxm: 4}}", "h100-sxm stands there twice"),
        ("limits: {}", "limits: {max_gpus: -1}", "limits"),
        ("limits: {}", "limits: {budget-usd-per-h: 0}", "budget-usd-per-h"),
        ("models:\n", "models: []\nrest:\n", "models"),
        ("prices: prices.yaml, ", "", "no price known for made-gpu"),
        ("schema", "{", "not YAML"),
    ],
)
def test_what_is_no_portfolio_is_refused_in_one_line(folder, capsys, old, new, says):
    text = FILE.format(limits="{}")
    assert old in text
    file = folder / "faulty.yaml"
    file.write_text(text.replace(old, new))
    assert main(["portfolio", str(file), "--output-dir", str(folder / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not (folder / "none").exists()
