"""`tokenfleet simulate`: one fleet, its figures, and one row a request."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from planning_builders import poisson, save, worker

from tokenfleet.cli.main import main
from tokenfleet.cli.simulate import sessions_rows
from tokenfleet.profiles.library import write_profile

PRICES = """schema: tokenfleet.prices/1
prices:
- {gpu: made-gpu, on_demand: 2.0, date: 2026-11-01, source: made up}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace and a profile."""
    save(poisson(requests=200), tmp_path / "trace.csv")
    write_profile(worker(), tmp_path / "worker.yaml")
    return tmp_path


def simulated(folder: Path, *more: str) -> int:
    words = ["simulate", "--trace", f"{folder}/trace.csv", "--slo", "ttft=500ms,tpot=30ms"]
    return main([*words, "--profile", f"{folder}/worker.yaml", "--workers", "3", *more])


def test_the_json_is_the_contract_s(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(folder, "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "tokenfleet.simulation/1"
    assert said["requests"] == said["finished"] == 200
    assert set(said["ttft_s"]) == {"p50", "p90", "p99", "mean"}
    assert said["preemptions"] == said["migrations"] == 0
    assert 0.0 < said["utilisation"] <= 1.0
    assert said["wall_s"] >= 0.0
    assert said["prefix_hit_rate"] is None


def test_each_request_has_its_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(folder, "--per-request", f"{folder}/out/requests.csv", "--policy", "jsq") == 0
    header, *rows = (folder / "out/requests.csv").read_text().splitlines()
    columns = (
        "request,arrival_s,prompt_tokens,output_tokens,worker,first_token_s,finish_s,preemptions,migrations,"
        "cached_tokens"
    )
    assert header == columns
    table = [dict(zip(columns.split(","), row.split(","), strict=True)) for row in rows]
    assert len(table) == 200
    assert all(float(r["arrival_s"]) < float(r["first_token_s"]) <= float(r["finish_s"]) for r in table)
    assert {r["worker"] for r in table} == {"0", "1", "2"}
    assert {r["cached_tokens"] for r in table} == {""}  # the trace does not say what requests share
    assert "meets the target" in capsys.readouterr().out


def test_the_first_line_says_whether_the_fleet_meets_its_target_and_what_it_costs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "prices.yaml").write_text(PRICES)
    priced = ("--prices", f"{folder}/prices.yaml")
    assert simulated(folder, *priced) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    fleet = "3x made-gpu TP1 (3 GPUs, $6.00/h)"
    assert first == f"{fleet} meets the target: 100 % of 200 requests in SLO (target 99 %)"
    assert [line.split()[0] for line in rest] == ["TTFT", "TPOT"]
    assert simulated(folder, *priced, "--verbose") == 0
    assert "Preemptions" in capsys.readouterr().out
    words = ["simulate", "--trace", f"{folder}/trace.csv", "--profile", f"{folder}/worker.yaml"]
    assert main([*words, *priced, "--workers", "1", "--slo", "ttft=1ms,tpot=30ms"]) == 0
    first, ttft, *_ = capsys.readouterr().out.splitlines()
    missed = r"1x made-gpu TP1 \(1 GPU, \$2\.00/h\) misses the target: [\d.]+ % of 200 requests in SLO"
    assert re.match(missed, first)
    assert re.search(r"\(limit 1 ms, [1-9]\d* late\)", ttft)


def test_a_target_is_missed_where_one_class_misses_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{0.05 * i},60,50,{'high' if i % 10 == 0 else 'normal'}" for i in range(80)]
    (folder / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,priority", *rows]))
    words = ["simulate", "--trace", f"{folder}/trace.csv", "--profile", f"{folder}/worker.yaml"]
    words += ["--workers", "1", "--class", "urgent=priority:high", "--class", "rest=priority:normal"]
    words += ["--slo", "rest:ttft=5s,tpot=1s,attainment=0.9"]
    for ttft, verdict in (("5s", "meets"), ("1ms", "misses")):
        assert main([*words, "--slo", f"urgent:ttft={ttft},tpot=1s,attainment=0.9"]) == 0
        out = capsys.readouterr().out
        assert f"{verdict} the target" in out.splitlines()[0]
        assert "Class urgent" in out


def test_what_was_cached_is_told_of_a_trace_whose_requests_share(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}
    rows = [json.dumps(row | {"timestamp": 2000 * i}) + "\n" for i in range(10)]
    (folder / "shared.jsonl").write_text("".join(rows))
    (folder / "trace.csv").unlink()
    words = ("simulate", "--trace", f"{folder}/shared.jsonl", "--slo", "ttft=500ms,tpot=30ms")
    words += ("--profile", f"{folder}/worker.yaml", "--workers", "1")
    assert main([*words, "--per-request", f"{folder}/requests.csv", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["prefix_hit_rate"] == pytest.approx(0.9 * 1024 / 1100, abs=1e-6)
    header, first, *others = (folder / "requests.csv").read_text().splitlines()
    assert header.endswith(",cached_tokens")
    assert first.endswith(",0")
    assert all(line.endswith(",1024") for line in others)
    assert main([*words]) == 0
    assert "Prefix hit rate" in capsys.readouterr().out
    assert main([*words, "--no-prefix-cache", "--format", "json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["prefix_hit_rate"] is None
    assert without["ttft_s"]["p50"] > 1.5 * told["ttft_s"]["p50"]
    ignores = "--policy exact: ignores prefix caches"
    for policy, is_said in (("exact", True), ("spread", False)):
        assert main([*words, "--policy", policy]) == 0
        assert (ignores in capsys.readouterr().err) == is_said
    assert main([*words, "--policy", "exact", "--no-prefix-cache"]) == 0
    assert ignores not in capsys.readouterr().err


def test_host_memory_is_loaded_from_where_gpus_have_forgotten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"input_length": 1100, "output_length": 20, "hash_ids": [2 * (i % 40), 2 * (i % 40) + 1, 100 + i]}
        for i in range(80)
    ]
    lines = [json.dumps(row | {"timestamp": 2000 * i}) + "\n" for i, row in enumerate(rows)]
    (folder / "shared.jsonl").write_text("".join(lines))
    small = worker(kv=16_000)
    small = replace(small, kv=replace(small.kv, bytes_per_token=1024))
    write_profile(small, folder / "worker.yaml")
    words = ("simulate", "--trace", f"{folder}/shared.jsonl", "--slo", "ttft=500ms,tpot=30ms")
    words += ("--profile", f"{folder}/worker.yaml", "--workers", "1", "--format", "json")
    assert main([*words]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["prefix_hit_rate"] == 0.0
    assert "host_hit_rate" not in without
    host = ("--host-kv", "256MiB@25GB/s", "--per-request", f"{folder}/requests.csv")
    assert main([*words, *host]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["host_hit_rate"] == told["prefix_hit_rate"] == pytest.approx(0.5 * 1024 / 1100, abs=1e-6)
    assert told["ttft_s"]["mean"] < 0.8 * without["ttft_s"]["mean"]
    header, *rest = (folder / "requests.csv").read_text().splitlines()
    assert header.endswith(",cached_tokens,loaded_tokens")
    assert [line.rsplit(",", 1)[1] for line in rest] == ["0"] * 40 + ["1024"] * 40
    assert main([*words[:-2], *host]) == 0
    assert "loaded from host memory" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["64", "64GB", "0GiB", "64GiB@fast", "64GiB@0GB/s", "64GiB@", "-1GiB", ""])
def test_what_says_no_host_memory_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert simulated(folder, "--host-kv", text) == 2
    assert capsys.readouterr().err.startswith("error: --host-kv: expected memory of a worker")


def test_host_memory_is_refused_where_requests_share_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = worker()
    write_profile(replace(kept, kv=replace(kept.kv, bytes_per_token=1024)), folder / "worker.yaml")
    assert simulated(folder, "--host-kv", "64GiB") == 2
    assert "requests share no prefixes, so nothing would be loaded back" in capsys.readouterr().err


def test_split_mode_wants_to_know_how_many_prefill(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(folder, "--engine", "split") == 2
    assert "--prefill-workers" in capsys.readouterr().err
    assert simulated(folder, "--engine", "split", "--prefill-workers", "3") == 2
    assert simulated(folder, "--engine", "split", "--prefill-workers", "1", "--kv-latency", "5ms") == 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--workers", "0"], "--workers"),
        (["--policy", "best"], "--policy: one of"),
        (["--prefill-workers", "1"], "only with --engine split"),
        (["--max-num-seqs", "5000"], "max_batched_tokens"),
        (["--gpu", "h100"], "leave out --gpu"),
        (["--per-request", "/proc/none/requests.csv"], "cannot be written"),
    ],
)
def test_bad_input_exits_2_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    assert simulated(folder, *more) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_headroom_keeps_high_priority_requests_in_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{0.05 * i},60,200,{'high' if i % 10 == 0 else 'normal'}" for i in range(80)]
    head = "arrival_s,prompt_tokens,output_tokens,priority"
    (folder / "trace.csv").write_text("\n".join([head, *rows]) + "\n")

    def decode_ms(*more: str) -> float:
        asked = ("--policy", "freeness", "--per-request", f"{folder}/requests.csv", *more)
        assert simulated(folder, *asked) == 0
        high = pl.read_csv(f"{folder}/requests.csv").gather_every(10)
        return float((high["finish_s"] - high["first_token_s"]).mean()) / 199 * 1e3

    assert decode_ms("--priority-headroom", "0.9") < 0.9 * decode_ms()
    assert simulated(folder, "--priority-headroom", "1") == 2
    assert "--priority-headroom: must be at least 0 and at most 0.9, got 1" in capsys.readouterr().err


def test_a_stricter_placement_lets_requests_wait_longer_and_decode_faster(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{0.05 * i},200,400" for i in range(200)]
    (folder / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")

    def mean_s(*more: str) -> tuple[float, float]:
        assert simulated(folder, "--policy", "best-fit", "--format", "json", *more) == 0
        said = json.loads(capsys.readouterr().out)
        return said["ttft_s"]["mean"], said["tpot_s"]["mean"]

    loose, normal, strict = (mean_s("--strictness", name) for name in ("loose", "normal", "strict"))
    assert normal == mean_s()
    assert loose[0] < normal[0] < strict[0]
    assert loose[1] > normal[1] > strict[1]
    assert simulated(folder, "--strictness", "theta=2") == 2
    assert capsys.readouterr().err == "error: --strictness: theta: must be within 0 and 1, got 2\n"
    assert simulated(folder, "--strictness", "stern") == 2
    assert "--strictness: loose, normal, strict, or values as theta=1" in capsys.readouterr().err


@pytest.fixture
def talks(folder: Path) -> Path:
    """Chats of four turns in place of the trace."""
    words = "--arrivals poisson:1 --lengths fixed:100:20 --turns fixed:4 --think fixed:3 --requests 40"
    (folder / "trace.csv").unlink()
    assert main(["trace", "synth", *words.split(), "--output", f"{folder}/trace.csv"]) == 0
    return folder


def test_sessions_are_replayed_in_a_closed_loop_and_told(
    talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = f"{talks}/requests.csv"
    assert simulated(talks, "--per-request", rows, "--session-time", "1m", "--format", "json") == 0
    told = json.loads(capsys.readouterr().out)["sessions"]
    assert (told["sessions"], told["completed"], told["within_target"]) == (10, 10, 1.0)
    assert 9.0 < told["session_s"]["p50"] <= told["session_s"]["p90"] < 30.0
    sent = pl.read_csv(rows)
    recorded = pl.read_csv(talks / "trace.csv")
    last = recorded.with_columns(sent["arrival_s"].alias("sent_s"), sent["finish_s"]).sort("session", "turn")
    gaps = last.with_columns(pl.col("finish_s").shift(1).over("session").alias("before_s"))
    waited = gaps.filter(pl.col("turn") > 0).select(pl.col("sent_s") - pl.col("before_s")).to_series()
    assert waited.to_list() == pytest.approx([3.0] * 30, abs=1e-6)
    assert simulated(talks, "--per-request", rows, "--open-loop", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["sessions"]["completed"] == 10
    assert pl.read_csv(rows)["arrival_s"].to_list() == pytest.approx(recorded["arrival_s"].to_list())


def test_agents_finish_so_many_sessions_an_hour_at_a_price(
    talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (talks / "prices.yaml").write_text(PRICES)
    assert simulated(talks, "--agents", "2", "--prices", f"{talks}/prices.yaml", "--format", "json") == 0
    told = json.loads(capsys.readouterr().out)["sessions"]
    one_s = told["session_s"]["p50"]
    assert told["sessions_per_h"] == pytest.approx(2 * 3600 / one_s, rel=0.05)
    assert told["usd_per_session"] == pytest.approx(3 * 2.0 / told["sessions_per_h"])
    assert simulated(talks, "--agents", "2", "--prices", f"{talks}/prices.yaml") == 0
    captured = capsys.readouterr()
    assert "sessions/h, $" in captured.out
    assert "at most run at once" not in captured.err


@pytest.mark.parametrize(
    ("an_hour", "said"),
    [
        (17770.3, "17,770 sessions/h, $0.2 a session, with 3 at once"),
        (0.034, "0.034 sessions/h, $0.2 a session, with 3 at once"),
        (0.0, "unknown: no session ends with 3 at once"),
    ],
)
def test_a_throughput_is_never_rounded_to_none(an_hour: float, said: str) -> None:
    told = {"sessions": 4, "completed": 0, "turns_attainment": 1.0, "agents": 3}
    rows = dict(sessions_rows(told | {"sessions_per_h": an_hour, "usd_per_session": 0.2}, 0.9))
    assert rows["Throughput"] == said


def test_agents_without_sessions_to_run_are_said(talks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(talks, "--agents", "10") == 0
    assert "--agents" not in capsys.readouterr().err
    assert simulated(talks, "--agents", "2000") == 0
    assert "warning: --agents: 2,000; 10 at most run at once" in capsys.readouterr().err


def test_the_most_agents_hold_the_target_with_confidence_and_are_no_more_than_on_the_trace(
    talks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (talks / "trace.csv").unlink()
    words = "--arrivals poisson:1 --lengths fixed:600:40 --turns fixed:4 --think fixed:0.5 --requests 400"
    assert main(["trace", "synth", *words.split(), "--output", f"{talks}/trace.csv"]) == 0
    asked = ("--workers", "1", "--attainment", "0.9", "--session-time", "30s")

    def told(*more: str) -> dict[str, Any]:
        capsys.readouterr()
        assert simulated(talks, *asked, *more, "--format", "json") == 0
        return dict(json.loads(capsys.readouterr().out))

    whole = told("--most-agents")
    most = whole["most_agents"]
    assert 1 < most["agents"] <= most["on_trace"] < most["sessions"] == 100
    assert (most["target"], most["confidence"]) == (0.9, 0.95)
    assert most["target"] <= most["low"] <= most["expected"]
    assert whole["sessions"]["agents"] == most["agents"]
    for agents, holds in ((most["on_trace"], True), (most["on_trace"] + 1, False)):
        with_them = told("--agents", str(agents))
        attained = min(with_them["attainment"], with_them["sessions"]["within_target"])
        assert (attained >= most["target"]) == holds
    assert told("--most-agents", "--confidence", "0.5")["most_agents"]["agents"] >= most["agents"]
    assert simulated(talks, *asked, "--most-agents") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{most['agents']} concurrent sessions meet 90 % at 95 % confidence (" in said
    assert f"{most['on_trace']} on the recorded trace" in said


def test_the_most_agents_are_all_there_are_or_none(talks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--most-agents", "--attainment", "0.8", "--confidence", "0.8")
    assert simulated(talks, *asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "10 concurrent sessions meet 80 % at 80 % confidence (" in said
    assert "10 on the recorded trace, all sessions of the trace" in said
    assert simulated(talks, *asked, "--session-time", "1s") == 1
    assert "one agent alone attains 0.0000 on this fleet, below 0.8" in capsys.readouterr().err
    assert simulated(talks, "--most-agents") == 1
    assert "40 requests are too few to show 99 % at 95 % confidence: " in capsys.readouterr().err
    assert simulated(talks, "--most-agents", "--agents", "2") == 2
    assert "--most-agents: finds how many; leave out --agents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--agents", "2"), "--agents: the trace has no sessions"),
        (("--most-agents",), "--most-agents: the trace has no sessions"),
        (("--session-time", "2m"), "--session-time: the trace has no sessions"),
        (("--session-time", "2"), "--session-time"),
    ],
)
def test_what_needs_sessions_is_refused_without_any(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert simulated(folder, *words) == 2
    assert said in capsys.readouterr().err


def test_agents_are_never_in_an_open_loop(talks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(talks, "--agents", "2", "--open-loop") == 2
    assert "contradicts --agents" in capsys.readouterr().err


def test_kv_memory_is_the_engine_s_own_figure_or_from_its_share_of_memory(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated(folder, "--gpu-memory-utilization", "0.95") == 2
    said = capsys.readouterr().err
    assert "--gpu-memory-utilization: " in said
    assert "give --kv-tokens" in said
    assert said.count("\n") == 1
    assert simulated(folder, "--kv-tokens", "64") == 2  # holds no request
    assert "the worker's KV holds 64" in capsys.readouterr().err
    save(poisson(rate_rps=1.0, requests=300, prompt=1500, output=150), folder / "trace.csv")
    library = ["simulate", "--trace", f"{folder}/trace.csv", "--model", "llama-3.1-70b", "--gpu", "a100"]
    library += ["--tp", "2", "--workers", "1", "--slo", "ttft=2s,tpot=120ms", "--format", "json"]
    shares = []
    for more in ((), ("--gpu-memory-utilization", "0.95"), ("--kv-tokens", "45744")):
        assert main([*library, *more]) == 0
        shares.append(json.loads(capsys.readouterr().out)["attainment"])
    assert shares[0] < shares[1] - 0.2  # a queue that is not there at 0.95
    assert shares[1] == shares[2]


def test_weights_of_a_lower_precision_are_a_profile_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(poisson(rate_rps=1.0, requests=200, prompt=1500, output=150), folder / "trace.csv")
    asked = ["simulate", "--trace", f"{folder}/trace.csv", "--gpu", "h100", "--tp", "4", "--workers", "1"]
    asked += ["--slo", "ttft=2s,tpot=120ms", "--format", "json"]
    said = []
    for model in (
        ("--model", "meta-llama/Llama-3.1-70B-Instruct", "--precision", "fp8"),
        ("--model", "llama-3.1-70b-fp8", "--precision", "fp8"),
        ("--model", "llama-3.1-70b", "--precision", "bf16"),
        ("--model", "llama-3.1-70b"),
    ):
        assert main([*asked, *model]) == 0
        said.append(json.loads(capsys.readouterr().out)["tpot_s"])
    assert said[0] == said[1] != said[2] == said[3]
    assert main([*asked, "--model", "llama-3.1-70b", "--precision", "int3"]) == 2
    assert "no profile ships; nearest: llama-3.1-70b" in capsys.readouterr().err


def test_engines_that_speculate_are_faster_and_it_is_said_how_long_that_pays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tpot_s = {}
    for drafts in ("off", "0.8/0.6@1ms"):
        assert simulated(folder, "--speculate", drafts, "--format", "json") == 0
        said = capsys.readouterr()
        tpot_s[drafts] = json.loads(said.out)["tpot_s"]["mean"]
        assert ("2.4 tokens a step and saves time" in said.err) is (drafts != "off")
    assert 0.35 < tpot_s["0.8/0.6@1ms"] / tpot_s["off"] < 0.7  # 1 / 2.4, drafts and verification beside


@pytest.mark.parametrize("text", ["1.2", "0.5/0.6", "0.8/", "often", "0.8@1", "0.8@-1ms", ""])
def test_what_says_no_acceptance_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert simulated(folder, "--speculate", text) == 2
    assert capsys.readouterr().err.startswith("error: --speculate: ")
