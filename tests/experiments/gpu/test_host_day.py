"""The GPU day on a user's host: its steps, its report, and its end where there is no GPU."""

import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from checkout import ROOT

from experiments.gpu import host_day
from experiments.gpu.host_day import Outcome, Step


def main_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["host_day", *map(str, words)])
    return host_day.main()


def test_without_a_gpu_it_ends_in_one_line_and_writes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(host_day, "gpu_names", list)
    assert main_of(monkeypatch, "--output", tmp_path / "day") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no GPU" in err
    assert not (tmp_path / "day").exists()


def test_every_script_of_the_day_is_there():
    day = host_day.steps(ROOT, "/models/llama", False, 8)
    scripts = [word for step in day for word in step.command if word.endswith(".py")]
    assert scripts
    assert all((ROOT / script).exists() for script in scripts)
    assert "two engines of TP 2" in {step.name for step in day}
    assert "two engines of TP 2" not in {s.name for s in host_day.steps(ROOT, "/models/llama", False, 3)}


def test_a_dry_day_writes_a_report_with_rows_of_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(host_day, "gpu_names", list)
    facts = [
        sys.executable,
        "-c",
        f"import json; open({str(tmp_path / 'call-1.json')!r}, 'w').write(json.dumps(",
    ]
    facts[-1] += "{'parts': {'facts': {'turns': 'the header', 'checks': {}}}}))"
    late = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    day = [Step("part A", "its calls", facts, 60), Step("late", "any GPU", late, 1.0)]
    monkeypatch.setattr(host_day, "steps", lambda *_: day)
    assert main_of(monkeypatch, "--dry", "--output", tmp_path) == 1  # a step ran past its limit
    told = (tmp_path / "report.md").read_text()
    assert "nothing here was measured on a GPU" in told
    assert "| late | any GPU | past its limit |" in told
    assert "| facts | the header | – | measured |" in told


def test_a_step_that_fails_shows_its_last_lines():
    told = host_day.report(
        [Outcome("a", "", 0, 1.0, ""), Outcome("doctor", "x", 1, 60.0, "stops: no driver")], [], "H100"
    )
    assert "| doctor | x | with code 1 | 1.0 |" in told
    assert "stops: no driver" in told
