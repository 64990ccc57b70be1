"""`tokenfleet plan` without a trace: its flags, its questions, and what its answer says."""

import io
import json
import shlex
import sys

import pytest
from planning_builders import worker

import tokenfleet.cli.plan as verb
from tokenfleet.cli.main import main
from tokenfleet.cli.plan import asked_instead
from tokenfleet.profiles.library import write_profile


@pytest.fixture
def words(tmp_path):
    """A plan with one kind of worker."""
    write_profile(worker(), tmp_path / "worker.yaml")
    return [
        *("plan", "--slo", "ttft=5s,tpot=100ms", "--attainment", "0.9", "--confidence", "0.8"),
        *("--profile", f"{tmp_path}/worker.yaml", "--drop-too-long", "--prompt-scale", "0.1"),
    ]


def test_the_answer_names_what_was_assumed_and_the_range_of_workers(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*words, "--users", "8000", "--output-dir", str(tmp_path / "out")]) == 0
    assert "assumed; --requests-per-day replaces it" in capsys.readouterr().out
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["inputs"]["trace"] == "chat, 8,000 users"
    assert [row[0] for row in plan["inputs"]["assumed"]][:2] == ["Requests a day", "Busiest hour"]
    low, high = plan["workers_range"]
    assert 1 <= low <= plan["workers"] <= high
    says = dict(plan["says"])
    assert (low, high) == (1, 1)
    assert says["Range"].startswith("1 worker, once your own trace")
    assert "assumed (rate ±25 %)" in says["Traffic"]
    assert "recorded" not in says["SLO attainment"]
    assert plan["doubt"]["traffic"] == "assumed"
    tables = {table["title"]: table["rows"] for table in plan["tables"]}
    assert tables["Assumptions"] == plan["inputs"]["assumed"]
    assert tables["Where numbers come from"][0][2] == "assumed"


def test_without_a_terminal_the_refusal_names_users(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "error: --trace: missing; name a trace, or give --request-rate 10, --users 2000,"
        " or --since 1h for what this fleet has served\n"
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--users", "5", "--trace", "t.csv"), "--users: contradicts --trace; give one of them"),
        (("--growth", "0.1", "--since", "1h"), "--growth: contradicts --since; give one of them"),
        (("--trace", "t.csv", "--since", "1h"), "--since: contradicts --trace; give one of them"),
        (
            ("--prometheus", "http://a", "--request-rate", "1"),
            "--prometheus: contradicts --request-rate; give one of them",
        ),
        (("--selector", "{}", "--request-rate", "1"), "--selector: needs --prometheus too"),
        (
            ("--prompt-tokens", "9"),
            "--prompt-tokens: needs --users, --requests-per-day or --request-rate too",
        ),
        (("--users", "1", "--output-tokens", "0"), "--output-tokens: 0, expected more than 0, at most 1e+07"),
        (("--shape", "rag"), "--shape: needs --users, --requests-per-day or --request-rate too"),
        (("--users", "0"), "--users: 0, expected more than 0, at most 1e+10"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_in_a_line(words, capsys, more, told):
    assert main([*words, *more]) == 2
    assert capsys.readouterr().err == f"error: {told}\n"


def test_what_if_takes_a_rate_and_each_scenario_is_the_plan_of_its_command(words, tmp_path, capsys):
    drawn = ("--request-rate", "0.5", "--prompt-tokens", "800", "--seed", "3")
    more = ("--no-cache", "--policy", "spread", "--format", "json", "--vary", "rate=1,40")
    assert main(["whatif", *words[1:], *drawn, *more]) == 0
    small, large = json.loads(capsys.readouterr().out)["scenarios"]
    assert small["plan"]["workers"] < large["plan"]["workers"]
    for scenario in (small, large):
        assert main([*shlex.split(scenario["command"])[1:], "--format", "json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["inputs"]["trace"] == "chat, 0.5 req/s"
        assert (plan["workers"], plan["attainment"]) == (
            scenario["plan"]["workers"],
            scenario["plan"]["attainment"],
        )


def test_a_rate_is_simulated_on_one_worker(words, capsys):
    fleet = (
        "--profile",
        words[words.index("--profile") + 1],
        "--workers",
        "1",
        "--slo",
        "ttft=5s,tpot=100ms",
    )
    assert main(["simulate", "--request-rate", "0.5", *fleet, "--drop-too-long", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == pytest.approx(0.5 * 4_000, rel=0.1)


class Terminal(io.StringIO):
    """What a person types, or reads, in a terminal."""

    def isatty(self):
        return True


def test_a_terminal_asks_for_the_answers(words, monkeypatch):
    asked = []

    def noted(*given):
        asked.append(asked_instead(*given))
        return asked[0]

    monkeypatch.setattr(sys, "stdin", Terminal("rag\n300\n900\n2\n0.5\n700\n0\n"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(verb, "asked_instead", noted)
    assert main([*words, "--window", "0..0.001"]) == 1, "one request shows no target"
    (usage,) = asked
    assert (usage.shape, usage.a_day, usage.peak, usage.growth) == ("rag", 900, 2.0, 0.5)
    assert (usage.prompt_tokens, usage.output_tokens) == (700, None)
