"""`tokenfleet trace` as a person uses it."""

import json
from pathlib import Path

import pytest
from checkout import ROOT

from tokenfleet.cli import main as cli
from tokenfleet.traces import read_trace

SAMPLE = ROOT / "examples" / "sample_trace.csv"


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = cli.main(["trace", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_sample_trace_is_made_again_by_the_command_in_its_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "examples" / "README.md").read_text()
    command = readme.split("tokenfleet trace ", 1)[1].split("```", 1)[0].replace("\\\n", " ").split()
    command[command.index("--output") + 1] = str(tmp_path / "again.csv")
    assert run(capsys, *command)[0] == 0
    assert (tmp_path / "again.csv").read_bytes() == SAMPLE.read_bytes()


def test_the_sample_trace_is_fit_to_plan_from(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", SAMPLE, "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert found["schema"] == "tokenfleet.trace-check/1"
    assert found["requests"] == 18000
    assert found["warnings"] == 0
    assert {finding["name"] for finding in found["findings"]} >= {"order", "units", "bursts", "drift"}


def test_a_checkup_begins_with_its_verdict_and_prints_its_findings_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "check", SAMPLE)
    assert (code, err) == (0, "")
    ready = "sample_trace.csv is ready for planning: no warnings; 18,000 requests in 58.4 min, 5.14 req/s"
    assert out.splitlines()[0] == ready
    assert "█" in out
    assert "Fano" not in out
    assert len(out.partition("Traffic phase")[0].splitlines()) <= 6
    full = run(capsys, "check", SAMPLE, "--verbose")[1]
    assert full.startswith(out)
    assert "Fano index" in full
    rows = "".join(f"{i // 3 * 10},100,{10 + i}\n" for i in range(200))
    (tmp_path / "coarse.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    first, *rest = run(capsys, "check", tmp_path / "coarse.csv")[1].splitlines()
    warned = [line for line in rest if line.startswith("Warning")]
    assert first.startswith(f"coarse.csv may mislead a plan: {len(warned)} warnings; 200 requests in ")
    assert any("arrivals are whole multiples of 1 s" in line for line in warned)


def test_a_sick_trace_is_checked_with_exit_code_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sick.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n5,1,1\n0,1,0\n0,1,1\n")
    code, out, _ = run(capsys, "check", path, "--format", "json")
    assert code == 0
    found = json.loads(out)
    assert found["out_of_order"] == found["empty_outputs"] == 1
    assert found["gap_cv"] == 0.0
    assert found["fano"] == {"1s": None, "10s": None, "60s": None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "none.csv"], "none.csv: no such file"),
        (["check"], "'file'"),
        (["synth", "--arrivals", "poisson:1", "--lengths", "S", "--requests", "5"], "--output"),
        (
            ["synth", "--arrivals", "poisson:1", "--lengths", "Z", "--requests", "5", "--output", "o.csv"],
            "--lengths: 'Z'",
        ),
        (["convert", "none.csv", "o.csv"], "no such file"),
        (["convert", str(SAMPLE), "o.csv", "--to", "mooncake"], "expected one of .jsonl"),
        (["convert", str(SAMPLE), "o.csv", "--to", "vllm"], "--to"),
    ],
)
def test_bad_words_exit_2_with_one_line_and_write_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_synth_refuses_to_overwrite_before_it_draws_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.csv"
    path.write_text("mine")
    words = ["synth", "--arrivals", "poisson:1", "--lengths", "S", "--requests", "5", "--output", path]
    code, _, err = run(capsys, *words)
    assert (code, path.read_text()) == (2, "mine")
    assert "--overwrite" in err
    assert run(capsys, *words, "--overwrite")[0] == 0
    assert len(read_trace(path)) == 5


@pytest.mark.parametrize(("decimals", "places"), [(0, 0), (3, 3), (6, 6)])
def test_arrivals_are_rounded_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decimals: int, places: int
) -> None:
    path = tmp_path / "out.csv"
    words = ["--arrivals", "poisson:1", "--lengths", "S", "--requests", "50", "--decimals", str(decimals)]
    assert run(capsys, "synth", *words, "--output", path)[0] == 0
    arrival_s = read_trace(path).workload.arrival_s
    assert [round(time, places) for time in arrival_s] == arrival_s.tolist()


@pytest.mark.parametrize(
    ("to", "name"), [("plain", "o.parquet"), ("mooncake", "o.jsonl"), ("azure", "o.csv")]
)
def test_a_trace_survives_being_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, name: str
) -> None:
    code, out, err = run(capsys, "convert", SAMPLE, tmp_path / name, "--to", to)
    assert (code, out) == (0, "")
    assert "18,000 requests" in err
    before, after = read_trace(SAMPLE).workload, read_trace(tmp_path / name).workload
    assert after.arrival_s.tolist() == pytest.approx(before.arrival_s.tolist(), abs=1e-6)
    assert after.prompt_tokens.tolist() == before.prompt_tokens.tolist()
    assert after.output_tokens.tolist() == before.output_tokens.tolist()


@pytest.mark.parametrize("command", ["check", "synth", "convert"])
def test_every_command_shows_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"tokenfleet trace {command}" in out.split("Example:")[1]


def test_options_by_their_old_names_work_and_say_the_new_one(tmp_path, capsys):
    words = ["synth", "--arrivals", "poisson:1", "--lengths", "S", "--requests", "5"]
    for given in (["--out", f"{tmp_path}/a.csv"], [f"--out={tmp_path}/b.csv"]):
        assert cli.main(["trace", *words, *given]) == 0
        assert capsys.readouterr().err.startswith("note: --out is now --output\n")
    (tmp_path / "old.yaml").write_text(f"out: {tmp_path}/c.csv\n")
    assert cli.main(["trace", *words, "--config", f"{tmp_path}/old.yaml"]) == 0
    assert cli.main(["trace", *words, "--output", f"{tmp_path}/d.csv"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert len({(tmp_path / f"{name}.csv").read_text() for name in "abcd"}) == 1
