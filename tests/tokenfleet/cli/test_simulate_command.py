"""`tokenfleet simulate`: one fleet, its figures, and one row a request."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planning_builders import poisson, save, worker
from rich.console import Console

from controlplane.prefixes import Prefixes
from controlplane.types import Slo
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.cli.main import main
from tokenfleet.cli.simulate import requests_csv, simulation_json, simulation_table
from tokenfleet.profiles.library import write_profile


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
    assert "attainment" in capsys.readouterr().out


def test_what_was_cached_is_told_of_a_run_whose_requests_share() -> None:
    load = replace(poisson(requests=50), prompt_tokens=np.full(50, 100), output_tokens=np.full(50, 20))
    shared = replace(load, prefixes=Prefixes(16, np.arange(51) * 6, np.tile(np.arange(6), 50)))
    seen = simulate(shared, [WorkerSpec(worker())], Slo(0.5, 0.03), "jsq")
    header, first, *others = requests_csv(seen).splitlines()
    assert header.endswith(",cached_tokens")
    assert first.endswith(",0")
    assert all(row.endswith(",96") for row in others)
    rate = 49 * 96 / (50 * 100)
    assert simulation_json(seen, 0.0)["prefix_hit_rate"] == pytest.approx(rate)
    console = Console(record=True, file=io.StringIO())
    console.print(simulation_table(seen))
    assert "prefix hits" in console.export_text()
    without = simulate(load, [WorkerSpec(worker())], Slo(0.5, 0.03), "jsq")
    assert simulation_json(without, 0.0)["prefix_hit_rate"] is None


def test_prefix_caching_can_be_turned_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(folder, "--no-prefix-cache", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["prefix_hit_rate"] is None


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
        (["--max-seqs", "5000"], "max_batched_tokens"),
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
