"""`tokenfleet plan` from the command line: what it prints, writes and refuses."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from planning_builders import plan, poisson, save, worker

from controlplane.types import EngineMode
from tokenfleet.cli.main import main
from tokenfleet.profiles.library import write_profile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace and a profile."""
    save(poisson(requests=400), tmp_path / "trace.csv")
    write_profile(worker(), tmp_path / "worker.yaml")
    return tmp_path


def test_the_json_is_the_contract_s(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folder, "--format", "json", "--seed", "3") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "tokenfleet.plan/1"
    assert said["feasible"] is True
    assert said["fleet"][0]["gpu"] == "made-gpu"
    assert said["fleet"][0]["tp_degree"] == 1
    assert said["workers"] == said["gpus"] == said["fleet"][0]["workers"]
    assert said["policy"] == "spread+migrate"
    assert said["engine_mode"] == "chunked"
    attained = said["attainment"]
    assert attained["target"] == 0.95 <= attained["low"] <= attained["expected"] <= attained["high"]
    assert attained["confidence"] == 0.95
    for latency in (said["ttft_s"], said["tpot_s"]):
        assert latency["p50"] <= latency["p90"] <= latency["p99"]
    assert said["binding"] in ("ttft", "tpot", "kv", "prefill")
    assert said["binding_window_s"][0] < said["binding_window_s"][1]
    assert said["one_fewer"]["workers"] == said["workers"] - 1
    assert said["one_fewer"]["attainment"] < 0.95
    assert said["nearest_feasible"] is None
    assert set(said["demand_line"]) >= {"workers_per_rps", "intercept", "r2"}
    assert said["demand_line"]["mean_prompt_tokens"] > 0 < said["demand_line"]["mean_output_tokens"]
    assert said["schedule"][0]["start_s"] == 0
    assert {b["policy"] for b in said["baselines"]} == {"jsq", "p2c", "round-robin"}
    assert said["inputs"]["requests"] == 400
    assert said["inputs"]["seed"] == 3
    assert said["inputs"]["profiles"][0]["kind"] == "measured"


@pytest.mark.parametrize("verb", ["plan", "whatif", "simulate"])
def test_arrivals_in_milliseconds_since_1970_are_said_by_every_verb_that_plans(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    rows = "\n".join(f"{1_700_000_000_000 + 500 * i},100,20" for i in range(60))
    (folder / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    flags = {"plan": (), "whatif": ("--vary", "rate=1"), "simulate": ("--workers", "1")}[verb]
    files = ("--trace", str(folder / "trace.csv"), "--profile", str(folder / "worker.yaml"))
    main([verb, *files, "--slo", "ttft=500ms,tpot=30ms", *flags])
    assert re.search(
        r"warning: trace.csv: units: 0.00\d+ requests/s: arrivals begin at", capsys.readouterr().err
    )


def test_the_table_is_for_people_and_the_warnings_go_to_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder) == 0
    said = capsys.readouterr()
    assert re.search(r"^Recommended fleet +\d+x made-gpu TP1   \d+ GPUs?   no price known", said.out)
    assert "Why not fewer?" in said.out
    assert "warning: made-gpu: no price known" in said.err
    assert "warning" not in said.out


def test_the_folder_gets_both_files_and_the_report_needs_nothing_else(folder: Path) -> None:
    assert plan(folder, "--output-dir", f"{folder}/out/deep") == 0
    written = folder / "out/deep"
    assert sorted(p.name for p in written.iterdir()) == ["plan.json", "report.html"]
    assert json.loads((written / "plan.json").read_text())["feasible"] is True
    page = (written / "report.html").read_text()
    assert "http" not in page
    assert "<script" not in page
    assert len(page) < 600_000
    assert all(f'id="{name}"' in page for name in ("rate", "ttft", "tpot", "attainment", "cost"))
    assert 'name="viewport"' in page


def test_the_same_seed_writes_the_same_bytes(folder: Path) -> None:
    for name in ("one", "two"):
        assert plan(folder, "--output-dir", f"{folder}/{name}", "--jobs", "1" if name == "one" else "2") == 0
    for name in ("plan.json", "report.html"):
        assert (folder / "one" / name).read_bytes() == (folder / "two" / name).read_bytes()


def test_an_infeasible_target_exits_1_and_says_what_is_possible(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder, "--format", "json", slo="ttft=20ms,tpot=30ms") == 1
    said = json.loads(capsys.readouterr().out)
    assert said["feasible"] is False
    assert said["fleet"] == []
    assert "more workers do not help" in said["reason"]
    assert said["nearest_feasible"]["ttft_s"] > 0.02
    assert said["nearest_feasible"]["workers"] >= 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--slo", "ttft=0s,tpot=30ms"], "ttft: must be a positive duration"),
        (["--slo", "ttft=5,tpot=30ms"], "5 has no unit"),
        (["--gpu", "h100"], "--profile: says which workers"),
        (["--model", "llama-3.1-8b"], "--model says llama-3.1-8b"),
        (["--policy", "best"], "--policy: one of spread"),
        (["--rate-scale", "0"], "--rate-scale: must be above 0"),
        (["--window", "20..10"], "--window: the end must come after"),
        (["--window", "90000..90001"], "no requests between"),
        (["--attainment", "1"], "--attainment"),
        (["--budget-usd-per-h", "5"], "no price known for made-gpu"),
        (["--prices", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv"),
        (["--engine", "fast"], "--engine"),
        (["--jobs", "0"], "--jobs"),
        (["--colour"], "--colour"),
    ],
)
def test_bad_input_exits_2_with_one_line_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    before = sorted(folder.iterdir())
    assert plan(folder, "--output-dir", f"{folder}/out", *more) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in said.err
    assert said.err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_an_unknown_flag_names_those_that_have_its_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rate", "10"]) == 2
    said = "error: No such option: --rate (Possible options: --rate-scale, --request-rate)\n"
    assert capsys.readouterr().err == said
    assert main(["plan", "--trac", "t.csv"]) == 2
    assert "--trace" in capsys.readouterr().err


def test_an_unknown_gpu_or_model_lists_the_nearest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--trace", f"{folder}/trace.csv", "--slo", "ttft=1s,tpot=50ms"]
    assert main([*words, "--model", "llama-3.1-8b", "--gpu", "h1000"]) == 2
    assert "h100" in capsys.readouterr().err
    assert main([*words, "--model", "llama-3.1-9b"]) == 2
    assert "llama-3.1-8b" in capsys.readouterr().err
    assert main(words) == 2
    assert "--model: missing" in capsys.readouterr().err


def test_a_request_longer_than_the_context_is_counted_and_can_be_dropped(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(replace(worker(), context_limit_tokens=640), folder / "worker.yaml")
    assert plan(folder) == 2
    assert re.search(
        r"\d+ of 400 requests are longer than the model's context of 640", capsys.readouterr().err
    )
    assert plan(folder, "--drop-too-long", "--format", "json") == 0
    said = capsys.readouterr()
    assert "left out" in said.err
    assert json.loads(said.out)["inputs"]["requests"] < 400


def test_a_request_longer_than_every_kv_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(worker(kv=300), folder / "worker.yaml")
    assert plan(folder) == 2
    assert "the largest KV capacity on offer is 300" in capsys.readouterr().err


def test_a_config_file_sets_any_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "flags.yaml").write_text(
        f"trace: [{folder}/trace.csv]\nslo: {{ttft: 500ms, tpot: 30ms}}\nattainment: 0.95\n"
        f"profile: [{folder}/worker.yaml]\nformat: json\n"
    )
    assert main(["plan", "--config", f"{folder}/flags.yaml"]) == 0
    assert json.loads(capsys.readouterr().out)["attainment"]["target"] == 0.95


def test_ctrl_c_in_mid_search_exits_130_and_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenfleet.planning.search import Search

    replay, calls = Search.replay, 0

    def interrupted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return replay(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Search, "replay", interrupted)
    assert plan(folder, "--output-dir", f"{folder}/out") == 130
    assert not (folder / "out").exists()
    assert "interrupted" in capsys.readouterr().err


def test_a_full_disk_exits_2_and_leaves_nothing_half_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert plan(folder, "--output-dir", f"{folder}/out") == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_a_folder_that_cannot_be_written_is_told_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the trace was read")

    monkeypatch.setattr("tokenfleet.traces.read_traces", never)
    (folder / "file").write_text("")
    assert plan(folder, "--output-dir", f"{folder}/file/out") == 2
    assert "file/out/plan.json: cannot be written: Not a directory" in capsys.readouterr().err
    (folder / "out" / "report.html").mkdir(parents=True)
    assert plan(folder, "--output-dir", f"{folder}/out") == 2
    assert "report.html: is a folder; expected the name of a file to write" in capsys.readouterr().err
    assert list((folder / "out").iterdir()) == [folder / "out" / "report.html"]


def test_what_the_trace_doctor_would_warn_of_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = poisson(requests=400)
    save(replace(requests, arrival_s=requests.arrival_s * 1000), folder / "trace.csv")
    warning = "trace.csv: units: 0.0078 requests/s over 5.12e+04 s; in milliseconds it would be 7.8/s"
    assert plan(folder, "--format", "json") == 0
    said = capsys.readouterr()
    assert warning in said.err
    assert warning in json.loads(said.out)["inputs"]["warnings"]
    assert plan(folder, "--rate-scale", "1000") == 0
    assert "in milliseconds" not in capsys.readouterr().err
    words = ["simulate", "--trace", f"{folder}/trace.csv", "--profile", f"{folder}/worker.yaml"]
    assert main([*words, "--workers", "1", "--slo", "ttft=500ms,tpot=30ms"]) == 0
    assert warning in capsys.readouterr().err


def test_split_mode_needs_no_more_than_the_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(worker(mode=EngineMode.PREFILL_FIRST), folder / "worker.yaml")
    assert plan(folder, "--engine", "split", "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert {group["role"] for group in said["fleet"]} == {"prefill", "decode"}
