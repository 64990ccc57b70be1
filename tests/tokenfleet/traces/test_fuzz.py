"""Whatever bytes a file holds, reading it gives a trace or one clear refusal."""

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from tokenfleet.cli.trace import as_tables
from tokenfleet.traces import read_trace
from tokenfleet.traces.check import as_json, check
from tokenfleet.traces.formats import SHARED

NAMES = (
    *("arrival_s", "prompt_tokens", "output_tokens", "priority", "tenant", "slo_class"),
    *("TIMESTAMP", "ContextTokens", "GeneratedTokens", "timestamp", "input_length", "output_length"),
    *("hash_ids", "__row", "__blank", "__fault_0", "__bad_turn"),
    *("session", "turn", "after", "think_s", "block_tokens", "system", "system_tokens", "ttft_s", "tpot_s"),
)
SAMPLES = Path(__file__).parent / "samples"
COLUMNS = st.sampled_from(["", *NAMES])
CELLS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "",
            '"',
            "1",
            "2.5",
            "NaN",
            "16",
            "0 1",
            "[0, 1]",
            "-0",
            "high",
            "2023-11-16 18:15:46.68",
            "2262-12-31 00:00:00",
        ]
    ),
    st.text(max_size=8),
)


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "fuzzed"


def reads_or_refuses(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    refusal, trace = "", None
    try:
        trace = read_trace(file)
    except BadInput as refused:
        refusal = str(refused)
    if trace is None:
        assert refusal.startswith(str(file))
        assert len(refusal.splitlines()) == 1
        return
    assert len(trace) > 0
    checkup = check(trace)
    assert as_json(checkup, {})["requests"] == len(trace)
    assert list(as_tables(checkup, {}))


@given(st.binary(max_size=300))
@example(b"PAR1" + b"\x00" * 40 + b"PAR1")
@example(b"{" * 5000)
@example(b'{"a":' * 50_000)
@example(b"\xef\xbb\xbf")
def test_any_bytes(file: Path, content: bytes) -> None:
    reads_or_refuses(file, content)


@given(st.lists(COLUMNS, min_size=1, max_size=7), st.lists(st.lists(CELLS, max_size=8), max_size=6))
def test_any_csv(file: Path, columns: list[str], rows: list[list[str]]) -> None:
    lines = [",".join(columns), *(",".join(row) for row in rows)]
    reads_or_refuses(file, "\n".join(lines).encode(errors="surrogatepass"))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(st.dictionaries(COLUMNS, JSON, max_size=6), max_size=5), st.binary(max_size=10))
def test_any_json_lines(file: Path, rows: list[dict[str, object]], rest: bytes) -> None:
    reads_or_refuses(file, "\n".join(json.dumps(row) for row in rows).encode() + rest)


TOLD = st.sampled_from(
    [
        *("benchmarks", "requests", "successful", "errored", "incomplete", "request_start_time", "metadata"),
        *("metrics", "request_start_ns", "value", "input_lens", "output_lens", "ttfts", "itls", "startTime"),
        *("resourceSpans", "scopeSpans", "spans", "attributes", "key", "start_times", "completion_tokens"),
        *("prompt_tokens", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
        *("start_time", "end_time", "info", "error", "response_metrics", "server_usage", "chunk_times"),
    ]
)
NESTED = st.recursive(
    JSON, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TOLD, inner, max_size=5), max_leaves=20
)


@given(st.lists(st.dictionaries(TOLD, NESTED, min_size=1, max_size=6), max_size=3), st.booleans())
def test_any_nested_json(file: Path, objects: list[dict[str, object]], array: bool) -> None:
    text = json.dumps(objects, indent=1) if array else "\n".join(json.dumps(one) for one in objects)
    reads_or_refuses(file, text.encode())


KINDS = st.sampled_from(
    [pl.Int64, pl.Float32, pl.String, pl.Boolean, pl.Date, pl.Duration, pl.Binary, pl.Null]
)


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=20),
    KINDS,
    st.sampled_from(["arrival_s", "prompt_tokens", "output_tokens", "priority", "tenant", *SHARED]),
    st.booleans(),
)
def test_any_parquet(file: Path, values: list[int], kind: pl.DataType, column: str, nested: bool) -> None:
    good: dict[str, Any] = {"arrival_s": sorted(values)}
    good |= {"prompt_tokens": values, "output_tokens": values, "tenant": values}
    if column in ("turn", "after", "think_s"):
        good |= {"session": ["a"] * len(values), "turn": range(len(values))}
    if column in ("hash_ids", "block_tokens"):
        good |= {"hash_ids": [[1]] * len(values), "block_tokens": [16] * len(values)}
    if column.startswith("system"):
        good |= {"system": ["s"] * len(values), "system_tokens": [0] * len(values)}
    binary = kind == pl.Binary
    odd = pl.Series([b"\xff"] * len(values)) if binary else pl.Series(values).cast(kind, strict=False)
    table = pl.DataFrame(good).with_columns(odd.alias(column))
    if nested:
        table = table.with_columns(pl.concat_list(column))
    table.write_parquet(file)
    reads_or_refuses(file, file.read_bytes())


def good_files() -> dict[str, bytes]:
    plain = pl.DataFrame(
        {
            "arrival_s": [0.0, 0.5, 1.5],
            "prompt_tokens": [10, 20, 30],
            "output_tokens": [5, 6, 7],
            "priority": ["high", None, "normal"],
            "tenant": ["a", "b", "a"],
        }
    )
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1,2\n2023-11-16 18:15:47+00:00,3,4\n"
    )
    parquet = io.BytesIO()
    plain.write_parquet(parquet)
    talk = (
        "arrival_s,prompt_tokens,output_tokens,session,turn,after,think_s,system,system_tokens\n"
        "0,40,9,a,0,,,s,32\n5,60,9,a,1,0,2.5,s,32\n6,60,9,a,2,0 1,2.5,,\n"
    )
    hashed = (
        '{"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 9, "input_length": 1700, "output_length": 9, "hash_ids": [0, 1, 3, 4]}\n'
    )
    return {
        "talk": talk.encode(),
        "hashed": hashed.encode(),
        "csv": plain.write_csv().encode(),
        "jsonl": plain.write_ndjson().encode(),
        "parquet": parquet.getvalue(),
        "azure": azure.encode(),
    } | {sample.name: sample.read_bytes() for sample in SAMPLES.iterdir()}


GOOD = good_files()


@given(
    st.sampled_from(sorted(GOOD)),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=4),
    st.integers(0, 20_000),
)
def test_a_good_file_damaged_anywhere(
    file: Path, name: str, changes: list[tuple[int, int]], cut: int
) -> None:
    content = bytearray(GOOD[name])
    for at, byte in changes:
        content[at % len(content)] = byte
    reads_or_refuses(file, bytes(content[: cut or None]))
