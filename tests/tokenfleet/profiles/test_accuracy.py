"""Predictions against measured runs: what files of runs may hold, and which errors come out."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Frontend, Profile, with_times
from controlplane.perfmodel.step import StepModel
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.cli.main import main
from tokenfleet.profiles.accuracy import accuracy_of, overall, read_ladder
from tokenfleet.profiles.library import write_profile

LIMITS = EngineLimits(max_batched_tokens=1024, max_seqs=64)
TRUTH = made_profile(StepModel(0.02, 1e-4, 2e-4, 1e-7), KvModel(20_000, 16), LIMITS)
NAMES = ("rate_rps", "arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s")
RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
SETTINGS = "schema: tokenfleet.runs/1\nrequests: runs.{}\nmodel: made\ngpu: made\n"


def measured(profile: Profile, rates: tuple[float, ...] = RATES) -> pl.DataFrame:
    """Rows of a load sweep as this profile's engine would have served it."""
    rows = []
    for n, rate in enumerate(rates):
        rng = np.random.default_rng(n)
        arrival_s = np.cumsum(rng.exponential(1 / rate, 80))
        prompt, output = rng.integers(50, 900, 80), rng.integers(2, 120, 80)
        done = simulate(
            Workload(arrival_s, prompt, output), [WorkerSpec(profile)], Slo(9e9, 9e9), "round-robin"
        )
        columns = (arrival_s, prompt, output, done.ttft_s, done.finish_s - arrival_s)
        rows += [
            dict(zip(NAMES, (rate, 1e6 + a, *more), strict=True)) for a, *more in zip(*columns, strict=True)
        ]
    return pl.DataFrame(rows)


def write(folder: Path, table: pl.DataFrame, form: str = "parquet", more: str = "") -> Path:
    path = folder / f"runs.{form}"
    {"csv": table.write_csv, "parquet": table.write_parquet, "jsonl": table.write_ndjson}[form](path)
    (folder / "runs.yaml").write_text(SETTINGS.format(form) + more)
    return folder / "runs.yaml"


@pytest.mark.parametrize("form", ["csv", "parquet", "jsonl"])
def test_runs_of_the_very_engine_are_predicted_without_error(tmp_path: Path, form: str) -> None:
    ladder = read_ladder(write(tmp_path, measured(TRUTH), form))
    found = accuracy_of(ladder, ladder.worker(TRUTH), calibrates=False)
    for errors in found["errors"].values():
        assert max(errors.values()) < 1e-6
    assert found["knee"]["rates_apart"] == 0
    assert found["knee"]["measured_rps"] in RATES
    assert found["judged"] == RATES.index(found["knee"]["measured_rps"]) + 1


def test_a_profile_that_is_too_fast_is_told_so_and_is_right_once_calibrated(tmp_path: Path) -> None:
    real = replace(with_times(TRUTH, 1.15, 1.2), frontend=Frontend(0.012))
    ladder = read_ladder(write(tmp_path, measured(real)))
    worker = ladder.worker(TRUTH)
    as_it_is, calibrated = (accuracy_of(ladder, worker, calibrates) for calibrates in (False, True))
    for name in ("ttft", "tpot", "e2e"):
        assert as_it_is["errors"][name]["mean"] > 0.1, name
        assert calibrated["errors"][name]["mean"] < 0.02, name
    assert all(row["errors"]["tpot"]["mean"] < 0 for row in as_it_is["rates"])
    assert calibrated["judged"] < as_it_is["judged"]
    assert overall([as_it_is, calibrated])["knees"]["ladders"] == 2
    assert overall([calibrated])["knees"] == {"ladders": 1, "met": 1, "within_one": 1}


def test_what_the_engines_had_is_taken_from_the_file(tmp_path: Path) -> None:
    more = "engine: {max_seqs: 8, kv_tokens: 4096, prefix_caching: false}\ngateway_s: 0.01\nworkers: 2\n"
    ladder = read_ladder(write(tmp_path, measured(TRUTH), more=more))
    worker = ladder.worker(replace(TRUTH, frontend=Frontend(0.005, 1e-6)))
    assert (worker.engine.max_seqs, worker.engine.max_batched_tokens) == (8, 1024)
    assert worker.kv.capacity_tokens == 4096
    assert worker.frontend == Frontend(0.015, 1e-6)
    fewer = read_ladder(write(tmp_path, measured(TRUTH), more="engine: {gpu_memory_utilization: 0.95}\n"))
    with pytest.raises(BadInput, match="give --kv-tokens"):
        fewer.worker(TRUTH)


def test_rows_without_times_warm_caches_and_are_not_judged(tmp_path: Path) -> None:
    table = measured(TRUTH, (1.0,)).with_columns(
        hash_ids=pl.lit("0 1 2"),
        ttft_s=pl.when(pl.int_range(pl.len()) < 5).then(None).otherwise(pl.col("ttft_s")),
    )
    ladder = read_ladder(write(tmp_path, table, "csv"))
    (run,) = ladder.runs
    assert run.measured.sum() == 75
    assert run.log.workload.prefixes.of(7).tolist() == [0, 1, 2]
    found = accuracy_of(ladder, ladder.worker(TRUTH), calibrates=False)
    assert found["rates"][0]["requests"] == 75
    assert found["errors"]["ttft"]["mean"] > 0.01  # 48 tokens of each prompt are cached now
    tokens = run.log.workload.prompt_tokens[5:].sum()
    assert found["rates"][0]["hits"] == pytest.approx(
        dict.fromkeys(("simulated", "allowed"), 75 * 48 / tokens)
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ttft_s": None}, "column ttft_s is missing"),
        ({"prompt_tokens": -5}, "row 1: prompt_tokens: must be at least 0, got -5"),
        ({"arrival_s": "soon"}, "arrival_s: must be numbers"),
        ({"output_tokens": 0}, "output_tokens must be at least 1"),
        ({"hash_ids": "a b"}, "row 1: hash_ids: expected whole numbers, got 'a b'"),
    ],
)
def test_a_wrong_table_is_named_with_row_and_column(
    tmp_path: Path, change: dict[str, object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (name, value), *_ = change.items()
    table = measured(TRUTH, (1.0,))
    table = table.drop(name) if value is None else table.with_columns(pl.lit(value).alias(name))
    assert main(["scorecard", "accuracy", str(write(tmp_path, table, "csv"))]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "runs.csv" in said
    assert said.count("\n") == 1


@given(st.text(max_size=200))
@examples(100)
def test_any_text_is_a_file_of_runs_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("runs") / "runs.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"runs\.yaml"):
        read_ladder(path)


def test_the_command_says_errors_as_it_is_and_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = write(tmp_path, measured(with_times(TRUTH, 1.1, 1.1)))
    write_profile(TRUTH, tmp_path / "truth.yaml")
    words = ["scorecard", "accuracy", str(runs), "--profile", str(tmp_path / "truth.yaml")]
    assert main([*words, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "tokenfleet.accuracy/1"
    assert [one["calibrated"] for one in told["runs"]] == [False, True]
    medians = {name: of["errors"]["tpot"]["mean"] for name, of in told["medians"].items()}
    assert medians["as it is"] == pytest.approx(0.09, abs=0.03)
    assert medians["calibrated"] < 0.02
    assert main(words) == 0
    table = capsys.readouterr().out
    error = f"mean TPOT {100 * medians['as it is']:.1f} %, mean TTFT "
    assert table.startswith(f"Median error, uncalibrated: {error}")
    assert "Median error, calibrated on the 3 lowest rates: " in table
    assert max(map(len, table.splitlines())) <= 80
