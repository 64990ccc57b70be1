"""Made-up and converted traces: what is written reads back, whole or not at all."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.workload import Workload
from tokenfleet import files as whole_file_module
from tokenfleet.files import whole_file
from tokenfleet.traces import Trace, read_trace
from tokenfleet.traces import distributions as arrivals
from tokenfleet.traces.distributions import NAMED, PUBLISHED_SEED
from tokenfleet.traces.synth import length_mix_of, synthesise
from tokenfleet.traces.writers import write_trace


def some(requests: int = 200) -> Trace:
    return Trace("some", "plain", synthesise("gamma:5:2", "S-L", requests))


def rich() -> Trace:
    workload = replace(
        some(4).workload,
        priority=np.array([0, 1, 0, 1]),
        slo_class=np.array([0, 1, 1, 0]),
        slo_classes=("chat", "batch"),
    )
    return Trace("rich", "plain", workload, tenant=np.array([0, 1, 0, 1]), tenants=("a", "b"))


def same(one: Workload, other: Workload) -> bool:
    names = ("arrival_s", "prompt_tokens", "output_tokens", "priority")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_plain_trace_reads_back_as_it_was(tmp_path: Path, suffix: str) -> None:
    for trace in (some(), rich()):
        path = tmp_path / f"{trace.name}.{suffix}"
        write_trace(trace, path)
        back = read_trace(path)
        assert same(back.workload, trace.workload)
        assert back.warnings == []
        for column, names in (
            (back.workload.slo_class, back.workload.slo_classes),
            (back.tenant, back.tenants),
        ):
            mine = trace.workload.slo_classes if names is back.workload.slo_classes else trace.tenants
            index = trace.workload.slo_class if names is back.workload.slo_classes else trace.tenant
            assert [names[i] for i in column] == [mine[i] for i in index]


def test_mooncake_keeps_milliseconds_and_shares_no_prefix(tmp_path: Path) -> None:
    trace = some()
    path = tmp_path / "out.jsonl"
    write_trace(trace, path, "mooncake")
    back = read_trace(path)
    assert back.format == "mooncake"
    assert np.abs(back.workload.arrival_s - trace.workload.arrival_s).max() <= 0.0005001
    blocks = pl.read_ndjson(path)["hash_ids"]
    assert blocks.list.len().to_list() == np.ceil(trace.workload.prompt_tokens / 512).tolist()
    assert blocks.explode().n_unique() == blocks.list.len().sum()


def test_azure_dates_keep_the_clock(tmp_path: Path) -> None:
    trace = replace(some(), clock_start_s=1_700_158_546.5)
    path = tmp_path / "out.csv"
    write_trace(trace, path, "azure")
    back = read_trace(path)
    assert back.format == "azure"
    assert back.clock_start_s == pytest.approx(1_700_158_546.5, abs=1e-6)
    assert np.abs(back.workload.arrival_s - trace.workload.arrival_s).max() <= 2e-9


def test_a_batch_boundary_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, batches = tmp_path / "whole.csv", tmp_path / "batches.csv"
    write_trace(some(), whole)
    monkeypatch.setattr("tokenfleet.traces.writers.ROWS_AT_ONCE", 7)
    seen: list[int] = []
    write_trace(some(), batches, on_rows=seen.append)
    assert batches.read_bytes() == whole.read_bytes()
    assert sum(seen) == 200


@pytest.mark.parametrize(
    ("name", "form", "said"),
    [
        ("out.txt", "plain", "expected one of .csv, .jsonl, .ndjson, .parquet"),
        ("out", "plain", "suffix ''"),
        ("out.csv", "mooncake", "expected one of .jsonl"),
        ("out.csv", "vllm", "--to: 'vllm', expected one of plain, mooncake, azure"),
        ("none/out.csv", "plain", "no folder"),
    ],
)
def test_a_target_that_cannot_be_is_refused(tmp_path: Path, name: str, form: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        write_trace(some(), tmp_path / name, form)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("mine")
    with pytest.raises(BadInput, match="exists already"):
        write_trace(some(), path)
    assert path.read_text() == "mine"
    write_trace(some(), path, overwrite=True)
    assert len(read_trace(path)) == 200


def test_a_device_is_never_replaced() -> None:
    with pytest.raises(BadInput, match="not a regular file"), whole_file(Path(os.devnull), overwrite=True):
        pass
    assert Path(os.devnull).is_char_device()


def fails_after(writes: int, error: BaseException) -> Callable[..., object]:
    """An `os.fdopen` whose file takes `writes` writes and then fails."""
    really_open = os.fdopen

    class Failing:
        def __init__(self, handle: int) -> None:
            self.file = really_open(handle, "wb")
            self.left = writes

        def write(self, content: bytes) -> int:
            if self.left == 0:
                raise error
            self.left -= 1
            return self.file.write(content)

        def __enter__(self) -> "Failing":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    return lambda handle, mode: Failing(handle)


@pytest.mark.parametrize("before", [None, "mine"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_full_disk_or_an_interrupt_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, suffix: str, before: str | None
) -> None:
    path = tmp_path / f"out.{suffix}"
    if before:
        path.write_text(before)
    monkeypatch.setattr("tokenfleet.traces.writers.ROWS_AT_ONCE", 50)
    writes = 0 if suffix == "parquet" else 2
    monkeypatch.setattr(whole_file_module.os, "fdopen", fails_after(writes, error))
    expected = BadInput if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as ended:
        write_trace(some(), path, overwrite=True)
    if expected is BadInput:
        assert str(ended.value) == f"{path}: cannot be written: No space left on device"
    assert [p.name for p in tmp_path.iterdir()] == ([path.name] if before else [])
    if before:
        assert path.read_text() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_really_full_device_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def onto_full(handle: int, mode: str) -> object:
        os.close(handle)
        return open("/dev/full", mode)

    monkeypatch.setattr(whole_file_module.os, "fdopen", onto_full)
    monkeypatch.setattr(whole_file_module.os, "fchmod", lambda *_: None)
    with pytest.raises(BadInput, match="cannot be written: No space left on device"):
        write_trace(some(20_000), tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_published_workload_is_lengths_first_and_then_gaps_of_one_stream() -> None:
    rng = np.random.RandomState(PUBLISHED_SEED)
    prompts, outputs = NAMED["S"].prompt.draw(10_000, rng), NAMED["L"].output.draw(10_000, rng)
    made = synthesise("gamma:26:4", "S-L", 10_000)
    assert np.array_equal(made.prompt_tokens, prompts)
    assert np.array_equal(made.output_tokens, outputs)
    assert np.array_equal(made.arrival_s, arrivals.gamma(26, 4, 10_000, rng))


@given(
    st.sampled_from(["poisson:3", "gamma:3:0.5", "diurnal:1:3:60", "diurnal:0:3:60:2"]),
    st.sampled_from(["S", "S-L", "azure-conv", "azure-conv-S", "sharegpt-azure-conv", "fixed:7:9"])
    | st.sampled_from(["fixed:7", "uniform:2:9-fixed:3", "lognormal:100:1.5-L"]),
    st.integers(1, 50),
    st.integers(0, 2**32 - 1),
)
def test_same_words_same_trace(arrival_law: str, lengths: str, requests: int, seed: int) -> None:
    one, two = (synthesise(arrival_law, lengths, requests, seed) for _ in range(2))
    assert len(one) == requests
    assert same(one, two)


def test_each_side_of_a_mix_comes_from_its_name() -> None:
    mix = length_mix_of("sharegpt-azure-conv")
    assert mix.prompt is NAMED["sharegpt"].prompt
    assert mix.output is NAMED["azure-conv"].output
    prompts, outputs = length_mix_of("fixed:7:9").draw(3, np.random.default_rng(0))
    assert prompts.tolist() == [7, 7, 7]
    assert outputs.tolist() == [9, 9, 9]


@pytest.mark.parametrize(
    ("arrival_law", "lengths", "requests", "seed", "said"),
    [
        (
            "normal:3",
            "S",
            1,
            0,
            "--arrivals: 'normal:3', expected one of poisson:RATE, gamma:RATE:CV, diurnal",
        ),
        ("poisson", "S", 1, 0, "expected poisson:RATE"),
        ("poisson:x", "S", 1, 0, "RATE: 'x', expected a number"),
        ("poisson:0", "S", 1, 0, "rate: 0, expected a positive"),
        ("gamma:1:2:3", "S", 1, 0, "expected gamma:RATE:CV"),
        ("poisson:nan", "S", 1, 0, "expected a number"),
        ("poisson:1", "XL", 1, 0, "--lengths: 'XL', expected one of S, M, L, azure-conv"),
        ("poisson:1", "S-XL", 1, 0, "--lengths: 'S-XL'"),
        ("poisson:1", "fixed:0:5", 1, 0, "length: 0, expected at least 1"),
        ("poisson:1", "fixed:1e9", 1, 0, "length: 1e+09, expected at least 1 token, at most 100000000"),
        ("poisson:1", "fixed:1.5", 1, 0, "1.5, expected a whole number"),
        ("poisson:1", "lognormal:0:1", 1, 0, "mean: 0"),
        ("poisson:1", "uniform:9:3", 1, 0, "longest: 3"),
        ("poisson:1", "S", 0, 0, "--requests: 0"),
        ("poisson:1", "S", 1, -1, "--seed: -1"),
    ],
)
def test_words_without_meaning_are_refused(
    arrival_law: str, lengths: str, requests: int, seed: int, said: str
) -> None:
    with pytest.raises(BadInput) as refused:
        synthesise(arrival_law, lengths, requests, seed)
    assert said in str(refused.value)


@given(
    st.text("poissngamdiurlSMLf:-.0123456789", max_size=14), st.text("SMLxfixed:uniform-.019", max_size=14)
)
def test_any_words_give_a_trace_or_one_line(arrival_law: str, lengths: str) -> None:
    refusal = ""
    try:
        made = synthesise(arrival_law, lengths, 3)
        assert len(made) == 3
    except BadInput as refused:
        refusal = str(refused)
    assert "\n" not in refusal
