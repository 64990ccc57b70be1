"""`tokenfleet fit` and its readers: tables, request logs, and bad input of every kind."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkout import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Frontend, Profile
from controlplane.perfmodel.step import StepModel
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from harness.log_errors import log_errors
from tokenfleet.cli.main import main
from tokenfleet.profiles.fit_log import fit_log, replay
from tokenfleet.profiles.library import read_profile
from tokenfleet.profiles.measurements import (
    RequestLog,
    is_request_log,
    read_measurements,
    read_request_log,
)

TRUTH = StepModel(0.009, 3e-5, 2e-5, 6e-8)


def table(path: Path, header: str = "prefill_tokens,sequences,context_tokens,step_s") -> Path:
    rows = [header]
    for p in (0, 256, 1024, 2048):
        for b in (0, 1, 16, 64, 128):
            for c in (256, 2048):
                if p + b:
                    rows.append(f"{p},{b},{b * c},{float(TRUTH.step_s(p, b, b * c)):.9f}")
    path.write_text("\n".join(rows) + "\n")
    return path


def fit(path: Path, out: Path, *more: str) -> int:
    words = [
        "fit",
        "--measurements",
        str(path),
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--output",
        str(out),
    ]
    return main([*words, *more])


def test_a_table_becomes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.yaml"
    assert fit(table(tmp_path / "m.csv"), out, "--tp", "1", "--format", "json") == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert answer["per_prefill_token_s"] == pytest.approx(3e-5, rel=1e-4)
    assert set(answer["error_within"]) == {"0.5", "0.9", "0.99"}
    assert "as in the shipped profile" in printed.err
    profile = read_profile(out)
    assert (profile.model, profile.gpu, profile.tp_degree) == ("llama-3.1-8b", "h100-sxm", 1)
    assert profile.step.base_s == pytest.approx(0.009, rel=1e-4)
    assert profile.source.kind == "measured"
    assert profile.residuals.max_relative < 1e-4
    assert profile.prefill is not None


@pytest.mark.parametrize(
    ("words", "ahead"),
    [
        ((), 0.0),
        (("--engine-version", "0.32.0"), 1.0),
        (("--engine-version", "0.8.5"), 0.0),
        (("--engine-version", "0.32.0", "--gpu", "cpu"), 0.0),
    ],
)
def test_a_vllm_that_plans_a_step_ahead_on_gpus_does_so_in_its_profile(
    tmp_path: Path, words: tuple[str, ...], ahead: float
) -> None:
    assert fit(table(tmp_path / "m.csv"), tmp_path / "p.yaml", "--kv-tokens", "1000", *words) == 0
    assert read_profile(tmp_path / "p.yaml").engine.steps_ahead == ahead


def test_a_table_is_shown_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(table(tmp_path / "m.csv"), tmp_path / "p.yaml", "--kv-tokens", "1000") == 0
    shown = capsys.readouterr().out
    assert "step time, per context token" in shown
    assert "error of 90 % of steps" in shown
    assert read_profile(tmp_path / "p.yaml").kv.capacity_tokens == 1000


def test_kv_that_requests_hold_is_fitted_said_and_kept_in_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = table(tmp_path / "m.csv"), tmp_path / "p.yaml"
    plain = path.read_text().splitlines()
    rows = [f"{plain[0]},kv_blocks"]
    for row in plain[1:]:
        _, decoding, context, _ = map(float, row.split(","))
        rows.append(f"{row},{(context + 9 * decoding) / 16:.2f}")
    path.write_text("\n".join(rows) + "\n")
    assert fit(path, out, "--format", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kv"]["per_token"] == pytest.approx(1.0, abs=1e-3)
    assert answer["kv"]["per_request"] == pytest.approx(8.0, abs=0.1)
    assert "131,072" in answer["says"][0]
    kv = read_profile(out).kv
    assert (kv.measured_per_token, kv.measured_per_request) == pytest.approx((1.0, 8.0), abs=0.1)
    assert (kv.bytes_per_token, kv.request_tokens) == (131_072, 0)
    assert fit(path, out, "--kv-tokens", "90000") == 0
    assert "KV (Eq 1): 1.000 tokens in use" in " ".join(capsys.readouterr().out.split())
    path.write_text("\n".join([rows[0], *(f"{row},0" for row in plain[1:])]) + "\n")
    assert fit(path, out) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "KV (Eq 1) is not fitted: measurements: 0 different batches" in said
    assert read_profile(out).kv.measured_per_token == 0.0


def test_an_unknown_gpu_takes_the_kv_it_was_seen_to_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.yaml"
    words = ["fit", "--measurements", str(table(tmp_path / "m.csv")), "--model", "mine", "--gpu", "tpu-9"]
    assert main([*words, "--output", str(out)]) == 0
    assert read_profile(out).kv.capacity_tokens == 128 * 2048
    assert "the most these measurements held" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ("prefill_tokens,sequences,context_tokens,step_s\n", "no rows below the header"),
        ("prefill_tokens,sequences,step_s\n1,1,1\n", "column context_tokens is missing"),
        ("[" * 100_000, "column prefill_tokens is missing; there are [[[[[[[[[["),
        ("prefill_tokens,sequences,context_tokens,step_s,wat\n1,1,1,1,1\n", "column 'wat'"),
        ("prefill_tokens,sequences,context_tokens,step_s\n1,1,1,fast\n", "row 1: step_s: must be a number"),
        ("prefill_tokens,sequences,context_tokens,step_s\n1,1,1\n", "row 1: step_s: must be a number"),
        (
            "prefill_tokens,sequences,context_tokens,step_s\n1,1,1,-2\n",
            "row 1: step_s: must be a number of",
        ),
        ("prefill_tokens,sequences,context_tokens,step_s\n0,0,1,2\n", "row 1: a step with neither"),
        ("prefill_tokens,sequences,context_tokens,step_s\n1,1,1,2\n", "1 different batches, at least 6"),
        (
            "prefill_tokens,sequences,context_tokens,step_s,kv_blocks\n0,1,9,1,1\n0,1,9,1,-3\n",
            "m: measurements: row 2: kv_blocks: must be a number of at least 0, got -3",
        ),
        (
            "prefill_tokens,sequences,context_tokens,step_s,kv_blocks\n0,1,9,1,\n",
            "m: row 1: kv_blocks: must be a number, got ''",
        ),
        ('{"arrival_s": 0}\n', "line 1: no first_token_ts"),
        ('{"arrival_s": 0\n', "line 1: not JSON"),
        (
            '{"arrival_s": 5, "first_token_s": 1, "finish_s": 2, "prompt_tokens": 1, "output_tokens": 1}\n',
            "before its arrival",
        ),
        (
            '{"arrival_s": "x", "first_token_s": 1, "finish_s": 2, "prompt_tokens": 1, "output_tokens": 1}\n',
            "arrival_s: must be a number",
        ),
        (
            '{"arrival_s": 0, "first_token_s": 1, "finish_s": 2, "prompt_tokens": 1, "output_tokens": 1}\n',
            "at least 30 are needed",
        ),
    ],
)
def test_bad_measurements_are_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    path, out = tmp_path / "m", tmp_path / "p.yaml"
    path.write_text(content)
    assert fit(path, out, "--kv-tokens", "100000") == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1
    assert not out.exists()


def test_contradictory_and_missing_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = table(tmp_path / "m.csv")
    assert fit(path, tmp_path / "p.yaml", "--measured-on", "yesterday") == 2
    assert fit(path, tmp_path / "p.yaml", "--format", "xml") == 2
    assert fit(path, tmp_path / "p.yaml", "--max-num-seqs", "4096", "--max-num-batched-tokens", "128") == 2
    assert fit(tmp_path / "none.csv", tmp_path / "p.yaml") == 2
    assert main(["fit", "--measurements", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") >= 5
    assert not (tmp_path / "p.yaml").exists()


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_measurements_or_one_clear_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fuzz"
    path.write_bytes(b"prefill_tokens,sequences,context_tokens,step_s\n" + content)
    for read in (read_measurements, read_request_log):
        said = ""
        try:
            read(path)
        except BadInput as error:
            said = str(error)
        assert "\n" not in said


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(
    st.lists(
        st.fixed_dictionaries(
            dict.fromkeys(
                ["arrival_s", "first_token_s", "finish_s", "prompt_tokens", "output_tokens"], values
            )
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_are_a_log_or_one_clear_line(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert is_request_log(path)
    said = ""
    try:
        read_request_log(path)
    except BadInput as error:
        said = str(error)
    assert "\n" not in said


def engine(step: StepModel) -> Profile:
    return made_profile(
        step, KvModel(300_000), EngineLimits("vllm", "", max_batched_tokens=1024, max_seqs=64)
    )


TRUE_ENGINE = engine(TRUTH)


def made_log(requests: int = 60, made_by: Profile = TRUE_ENGINE) -> RequestLog:
    rng = np.random.default_rng(5)
    workload = Workload(
        np.cumsum(rng.exponential(0.2, requests)),
        rng.integers(50, 2000, requests),
        rng.integers(20, 300, requests),
    )
    outcome = simulate(workload, [WorkerSpec(made_by)], Slo(1e9, 1e9), "round-robin")
    return RequestLog(workload, outcome.first_token_s, outcome.finish_s)


@pytest.mark.parametrize(
    ("sum_sq_s", "request_s"), [pytest.param(0.0, 0.0, marks=pytest.mark.nightly), (2e-8, 0.04)]
)
def test_a_log_made_by_the_simulator_gives_its_latencies_back(sum_sq_s: float, request_s: float) -> None:
    made_by = engine(replace(TRUTH, per_prefill_sum_sq_s=sum_sq_s))
    log = made_log(made_by=replace(made_by, frontend=Frontend(request_s)))
    even = np.arange(len(log.workload)) % 2 == 0
    profile = fit_log(log, engine(StepModel(0, 0, 0, 0)), even)
    errors = log_errors(log, replay(log, profile), ~even)
    assert errors.e2e_mape < 0.03
    assert errors.tpot_mape < 0.03
    assert abs(errors.ttft_mean) < 0.03
    assert abs(errors.ttft_p99) < 0.06
    assert profile.step.base_s == pytest.approx(TRUTH.base_s, rel=0.1)
    assert profile.residuals.held_out_mean is not None
    alone_s = profile.alone_ttfts_s([200, 1500])
    assert alone_s == pytest.approx(made_by.alone_ttfts_s([200, 1500]) + request_s, rel=0.1)


def test_the_true_model_replays_a_log_exactly() -> None:
    log = made_log()
    every = np.ones(len(log.workload), np.bool_)
    errors = log_errors(log, replay(log, engine(TRUTH)), every)
    assert (errors.e2e_mape, errors.tpot_mape, errors.ttft_p99) == (0.0, 0.0, 0.0)
    assert log.peak_tokens <= int((log.workload.prompt_tokens + log.workload.output_tokens).sum())


def test_a_request_no_worker_holds_is_refused() -> None:
    log = made_log(40)
    small = engine(StepModel(0, 0, 0, 0))
    with pytest.raises(BadInput, match="is larger than the KV of 500"):
        fit_log(log, replace(small, kv=KvModel(500)))
    with pytest.raises(BadInput, match="at least 30"):
        fit_log(made_log(10), small)


def test_the_real_log_is_read_whole(bench_data: Path) -> None:
    log = read_request_log(bench_data / "vllm_logs" / "rtx_pro_6000_llama-3.1-8b" / "requests.jsonl")
    assert len(log.workload) == 300
    assert log.workload.arrival_s[0] == 0
    profile = read_profile(ROOT / "profiles" / "rtx-pro-6000" / "llama-3.1-8b_tp1.yaml")
    errors = log_errors(log, replay(log, profile), np.ones(300, np.bool_))
    assert errors.e2e_mape < 0.01
    assert errors.tpot_mape < 0.01
    assert abs(errors.ttft_p99) < 0.02


def test_two_steps_in_a_hundred_that_were_stopped_do_not_shift_a_fit_and_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(5)
    prefill, decoding = rng.choice([0, 256, 1024, 2048], 100), rng.choice([1, 16, 64, 128], 100)
    context = decoding * rng.choice([256, 2048], 100)
    step_s = TRUTH.step_s(prefill, decoding, context) * np.exp(0.02 * rng.standard_normal(100))
    step_s[[17, 63]] *= 5
    rows = zip(prefill, decoding, context, step_s, strict=True)
    lines = ["prefill_tokens,sequences,context_tokens,step_s", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "steps.csv").write_text("\n".join(lines) + "\n")
    off = {}
    for name, flags in (("noticed", ()), ("kept", ("--as-measured",)), ("robust", ("--robust",))):
        assert fit(tmp_path / "steps.csv", tmp_path / "p.yaml", *flags) == 0
        said = capsys.readouterr().err
        words = "Left out 2 of 100 steps, over 2.5 times as long as fitted: row 18, 64"
        assert (words in said) == (name == "noticed")
        model = read_profile(tmp_path / "p.yaml").step
        says_s = model.step_s(prefill, decoding, context)
        off[name] = float(np.mean(np.abs(says_s / TRUTH.step_s(prefill, decoding, context) - 1)))
    assert off["noticed"] < 0.01
    assert off["kept"] > 0.05
