"""Reading traces: every format in every container, strict where it must be, lenient where it may be."""

import gzip
import json
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from controlplane.errors import BadInput
from tokenfleet.traces import merged, read_trace, read_traces

HEAD = "arrival_s,prompt_tokens,output_tokens"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def written(file: Path, text: str | bytes) -> Path:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


FORMATS = {
    "plain": f"{HEAD}\n0,10,20\n2.5,30,40\n",
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.0000000,10,20\n2023-11-16 18:15:48.5000000,30,40\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,10,20,30,Conversation log\n7.5,GPT-4,30,40,70,API log\n",
    "mooncake": '{"timestamp": 1000, "input_length": 10, "output_length": 20, "hash_ids": [1]}\n'
    '{"timestamp": 3500, "input_length": 30, "output_length": 40, "hash_ids": [1]}\n',
    "vllm-log": '{"request_id": "a", "input_toks": 10, "output_toks": 20, "arrival_time": 1777142838.5}\n'
    '{"request_id": "b", "input_toks": 30, "output_toks": 40, "arrival_time": 1777142841.0}\n',
    "history": f"request,{HEAD},worker,first_token_s,finish_s,preemptions,migrations\n"
    "0,0,10,20,3,0.5,1.5,0,0\n1,2.5,30,40,1,3.0,4.5,0,1\n",
}


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_is_found_by_its_content_and_read_alike(file: Path, form: str) -> None:
    trace = read_trace(written(file, FORMATS[form]))
    assert trace.format == form
    assert trace.workload.arrival_s.tolist() == [0.0, 2.5]
    assert trace.workload.prompt_tokens.tolist() == [10, 30]
    assert trace.workload.output_tokens.tolist() == [20, 40]
    assert trace.warnings == []


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("packer", ["gzip", "zstd"])
def test_a_text_may_be_packed(file: Path, form: str, packer: str) -> None:
    expected = read_trace(written(file, FORMATS[form]))
    packed = read_trace(written(file, packed_with(packer, FORMATS[form].encode())))
    assert packed.format == form
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        assert np.array_equal(getattr(packed.workload, name), getattr(expected.workload, name))


@pytest.mark.parametrize("packer", ["gzip", "zstd"])
@pytest.mark.parametrize("form", ["plain", "mooncake"])
def test_a_packed_stream_that_breaks_off_is_refused_wherever_it_does(
    file: Path, form: str, packer: str
) -> None:
    rows = "".join(
        f"{i},{i % 97 + 1},{i % 89 + 1}\n"
        if form == "plain"
        else json.dumps({"timestamp": i, "input_length": 7, "output_length": i % 89 + 1}) + "\n"
        for i in range(3000)
    )
    whole = packed_with(packer, ((f"{HEAD}\n" if form == "plain" else "") + rows).encode())
    assert len(read_trace(written(file, whole))) == 3000
    for size in (5, 40, len(whole) // 2, len(whole) - 3):
        with pytest.raises(BadInput) as refused:
            read_trace(written(file, whole[:size]))
        assert f"breaks off, or is no whole {packer} file" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("packer", ["gzip", "zstd"])
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (f"{HEAD}\n" + "0,1,1\n" * 700 + "0,1,1,1\n", "line 702: 4 fields, the header has 3"),
        ('{"timestamp": 0, "input_length": 7, "output_length": 1}\n' * 700 + "{NaN}\n", "line 701: not JSON"),
    ],
)
def test_a_fault_in_a_packed_text_is_named_by_its_line(file: Path, rows: str, says: str, packer: str) -> None:
    with pytest.raises(BadInput) as refused:
        read_trace(written(file, packed_with(packer, rows.encode())))
    assert says in str(refused.value)
    assert "breaks off" not in str(refused.value)


def packed_with(packer: str, text: bytes) -> bytes:
    if packer == "gzip":
        return gzip.compress(text)
    return subprocess.run(["zstd", "-c"], input=text, capture_output=True, check=True).stdout


def files_on_a_clock(tmp_path: Path, *starts: str) -> list[Path]:
    paths = []
    for number, start in enumerate(starts):
        first = datetime.fromisoformat(start)
        rows = [f"{first + timedelta(seconds=2 * i)},10,20" for i in range(600)]  # twenty minutes
        paths.append(tmp_path / f"part{number}.csv")
        paths[-1].write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return paths


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        (("2025-01-01 00:00:00", "2025-01-01 00:20:00", "2025-01-01 00:40:01"), None),
        (("2025-01-01 00:00:00", "2025-01-01 00:10:00"), "part1.csv begins 9.97 min before part0.csv ends"),
        (("2025-01-01 00:00:00", "2025-01-01 00:40:00"), "part1.csv begins 20 min after part0.csv ends"),
        (
            ("2025-01-01 00:20:00", "2025-01-01 00:00:00"),
            "part1.csv begins 20 min before part0.csv, which was",
        ),
    ],
)
def test_where_files_on_one_clock_overlap_leave_a_gap_or_go_back_one_line_says_it(
    tmp_path: Path, starts: tuple[str, ...], said: str | None
) -> None:
    trace = read_traces(files_on_a_clock(tmp_path, *starts))
    assert (np.diff(trace.workload.arrival_s) >= 0).all()
    assert [said in line for line in trace.warnings] == [True] if said else trace.warnings == []


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_may_come_in_any_container(file: Path, form: str) -> None:
    text = FORMATS[form].encode()
    table = pl.read_ndjson(text) if text.startswith(b"{") else pl.read_csv(text)
    expected = read_trace(written(file, text)).workload
    table.write_parquet(file)
    assert np.array_equal(read_trace(file).workload.arrival_s, expected.arrival_s)
    table.write_ndjson(file)
    assert np.array_equal(read_trace(file).workload.arrival_s, expected.arrival_s)
    if form != "mooncake":  # CSV has no lists
        table.write_csv(file, separator=";")
        assert np.array_equal(read_trace(file).workload.arrival_s, expected.arrival_s)


@pytest.mark.parametrize(
    "stamps",
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.009930+00:00"),
        ("2024-05-10T00:00:00Z", "2024-05-10T02:00:01+02:00"),
        ("2024-05-10 00:00:00", "2024-05-10 00:00:01.000"),
        ("2024-05-09 23:59:59 -01:00", "2024-05-10 01:00:00"),
    ],
)
def test_dates_are_read_in_the_spellings_of_2023_and_2024(file: Path, stamps: tuple[str, str]) -> None:
    rows = "\n".join(f"{stamp},10,20" for stamp in stamps)
    trace = read_trace(written(file, f"TimeStamp,context_tokens,Generated Tokens\n{rows}\n"))
    assert trace.workload.arrival_s.tolist() == [0.0, 1.0]


def test_dates_keep_their_hundred_nanoseconds(file: Path) -> None:
    stamps = ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.6805901")
    rows = "\n".join(f"{stamp},10,20" for stamp in stamps)
    trace = read_trace(written(file, f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n"))
    assert trace.workload.arrival_s.tolist() == [0.0, 1e-7]
    assert trace.clock_start_s == pytest.approx(1700158546.68059)


def test_parquet_dates_are_read_as_dates(file: Path) -> None:
    stamps = pl.Series(["2024-05-10 00:00:00", "2024-05-10 00:00:03"]).str.to_datetime()
    table = pl.DataFrame({"TIMESTAMP": stamps, "ContextTokens": [1, 2], "GeneratedTokens": [3, 4]})
    table.write_parquet(file)
    assert read_trace(file).workload.arrival_s.tolist() == [0.0, 3.0]


def test_priority_tenant_and_class_are_kept(file: Path) -> None:
    rows = "0,1,1,high,acme,chat\n1,1,1,,zeta,\n2,1,1,0,acme,batch\n3,1,1,Normal,acme,chat\n"
    trace = read_trace(written(file, f"{HEAD},priority,tenant,slo_class\n{rows}"))
    assert trace.workload.priority.tolist() == [1, 0, 0, 0]
    assert trace.tenants == ("acme", "zeta")
    assert trace.tenant.tolist() == [0, 1, 0, 0]
    assert trace.workload.slo_classes == ("chat", "default", "batch")
    assert trace.workload.slo_class.tolist() == [0, 1, 2, 0]


def test_rows_out_of_order_are_sorted_with_a_warning_and_ties_keep_their_order(file: Path) -> None:
    trace = read_trace(written(file, f"{HEAD}\n2,1,1\n0,2,1\n2,3,1\n0,4,1\n"))
    assert trace.workload.arrival_s.tolist() == [0, 0, 2, 2]
    assert trace.workload.prompt_tokens.tolist() == [2, 4, 1, 3]
    assert trace.out_of_order == 2
    assert "sorted" in trace.warnings[0]


def test_requests_that_returned_nothing_are_dropped_with_a_warning(file: Path) -> None:
    trace = read_trace(written(file, f"{HEAD}\n0,1,0\n1,2,5\n"))
    assert trace.workload.prompt_tokens.tolist() == [2]
    assert trace.empty_outputs == 1
    assert "returned no tokens: 1" in trace.warnings[0]


def test_blank_rows_and_unknown_further_columns_are_passed_over_with_a_warning(file: Path) -> None:
    trace = read_trace(written(file, f"{HEAD},colour\n0,1,1,red\n\n1,1,1,blue\n\n"))
    assert len(trace) == 2
    assert trace.blank_rows == 2
    assert any("blank rows: 2" in warning for warning in trace.warnings)
    assert any("colour" in warning for warning in trace.warnings)


def test_a_plain_trace_keeps_its_start_and_a_clock_does_not(file: Path) -> None:
    assert read_trace(written(file, f"{HEAD}\n3,1,1\n10,1,1\n")).workload.arrival_s.tolist() == [3, 10]
    late = read_trace(written(file, f"{HEAD}\n1700000000,1,1\n1700000005,1,1\n"))
    assert late.workload.arrival_s.tolist() == [0, 5]
    assert late.clock_start_s == 1_700_000_000
    assert not late.warnings
    offset = read_trace(written(file, f"{HEAD}\n3000,1,1\n3005,1,1\n"))
    assert offset.clock_start_s is None
    assert "counted from the first arrival" in offset.warnings[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty file"),
        ("\n \n", "empty file"),
        (HEAD, "no requests"),
        (f"{HEAD}\n0,1,0\n", "1 requests, all without output"),
        (f"{HEAD}\n0,1,1\nnan,1,1\n", "row 2: arrival_s: 'nan', expected seconds"),
        (f"{HEAD}\n0,1,1\n\ninf,1,1\n", "row 3: arrival_s: 'inf'"),
        (f"{HEAD}\n-1,1,1\n", "row 1: arrival_s: '-1'"),
        (f"{HEAD}\n,1,1\n", "row 1: arrival_s: no value"),
        (f"{HEAD}\n0,-5,1\n", "row 1: prompt_tokens: '-5'"),
        (f"{HEAD}\n0,0,1\n", "row 1: prompt_tokens: '0', expected a whole number of tokens from 1"),
        (f"{HEAD}\n0,1.5,1\n", "row 1: prompt_tokens: '1.5'"),
        (f"{HEAD}\n0,1,-1\n", "row 1: output_tokens: '-1'"),
        (f"{HEAD}\n0,1,many\n", "row 1: output_tokens: 'many'"),
        (f"{HEAD}\n0,1,1e12\n", "row 1: output_tokens: '1e12'"),
        (f"{HEAD}\n0,1\n", "row 1: output_tokens: no value"),
        (f"{HEAD}\n0,1,1,1\n", "line 2: 4 fields, the header has 3"),
        (f"{HEAD},priority\n0,1,1,urgent\n", "row 1: priority: 'urgent', expected high or normal"),
        (f"{HEAD},arrival_s\n0,1,1,1\n", "column 'arrival_s' is twice"),
        ("arrival_s,prompt_tokens\n0,1\n", "a plain trace also has output_tokens"),
        ("when,what\n0,1\n", "columns found: 'when', 'what'; expected those of one of: azure: TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n5,1,1\n", "row 1: TIMESTAMP: '5', expected a date"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n9999-01-01 00:00:00,1,1\n", "expected a date"),
        ('{"timestamp": 0, "input_length": 1}\n', "a mooncake trace also has output_length"),
        ('{"timestamp": null, "input_length": 1, "output_length": 1}\n', "row 1: timestamp: no value"),
        ('{"timestamp": [1], "input_length": 1, "output_length": 1}\n', "row 1: timestamp: '[1]'"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timest', "line 2: not JSON"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"x": NaN}', "line 2: not JSON: NaN"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[1]\n', "expected a JSON object"),
        ("[]", "an empty array"),
        ("[1]", "'1', expected a JSON object"),
        ('[{"arrival_s": 0}', "line 1: not JSON"),
        ('[{"arrival_s": 0, "prompt_tokens": 1}]', "a plain trace also has output_tokens"),
        (b"PAR1 and then nothing", "cannot be read"),
        (b"\x1f\x8b\x08", "no whole gzip file"),
        (b"BZh91AY", "packed with bzip2; unpack it first"),
        (HEAD.encode("utf-16"), "binary"),
        (f"{HEAD}\n".encode() + b"\xff\xfe,1,1\n", "utf-8"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_that_names_it(
    file: Path, text: str | bytes, said: str
) -> None:
    with pytest.raises(BadInput) as refused:
        read_trace(written(file, text))
    assert str(refused.value).startswith(str(file))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.csv", "no such file"), (tmp_path, "not a regular file")):
        with pytest.raises(BadInput, match=said):
            read_trace(path)


@pytest.mark.parametrize("name", ["a[1].jsonl", "b*.csv", "c ?.parquet"])
def test_a_name_is_never_taken_for_a_pattern(tmp_path: Path, name: str) -> None:
    table = pl.DataFrame({"arrival_s": [0.0], "prompt_tokens": [1], "output_tokens": [1]})
    {"l": table.write_ndjson, "v": table.write_csv, "t": table.write_parquet}[name[-1]](tmp_path / name)
    assert len(read_trace(tmp_path / name)) == 1


def test_traces_with_dates_are_merged_on_their_clock(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    one = written(tmp_path / "1", f"{head}2023-11-16 18:00:00,1,1\n2023-11-16 18:00:10,2,1\n")
    two = written(tmp_path / "2", f"{head}2023-11-16 18:00:04,3,1\n2023-11-16 18:00:12,4,1\n")
    both = read_traces([two, one])
    assert both.workload.arrival_s.tolist() == [0, 4, 10, 12]
    assert both.workload.prompt_tokens.tolist() == [1, 3, 2, 4]
    assert both.warnings == []


def test_traces_of_different_years_are_overlaid(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    one = written(tmp_path / "1", f"{head}2023-11-16 18:00:00,1,1\n2023-11-16 18:00:10,2,1\n")
    two = written(tmp_path / "2", f"{head}2024-05-10 00:00:00,3,1\n2024-05-10 00:00:04,4,1\n")
    both = read_traces([one, two])
    assert both.workload.prompt_tokens.tolist() == [1, 3, 4, 2]
    assert "overlaid" in both.warnings[0]


def test_relative_traces_are_overlaid_and_their_classes_united(tmp_path: Path) -> None:
    one = written(tmp_path / "1", f"{HEAD},slo_class,tenant\n0,1,1,chat,a\n5,2,1,batch,b\n")
    two = written(tmp_path / "2", f"{HEAD},slo_class,tenant\n1,3,1,batch,a\n6,4,1,code,c\n")
    both = merged([read_trace(one), read_trace(two)])
    assert both.workload.arrival_s.tolist() == [0, 1, 5, 6]
    classes = [both.workload.slo_classes[index] for index in both.workload.slo_class]
    assert classes == ["chat", "batch", "batch", "code"]
    assert [both.tenants[index] for index in both.tenant] == ["a", "a", "b", "c"]


def test_no_file_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match="no file"):
        read_traces([])


def test_the_public_azure_hour_reads_as_published(bench_data: Path) -> None:
    workload = read_trace(bench_data / "azure" / "AzureLLMInferenceTrace_conv_2023.csv").workload
    assert len(workload) == 19366
    assert workload.rate_rps == pytest.approx(5.53, abs=0.01)
    assert workload.prompt_tokens.mean() == pytest.approx(1154.7, abs=0.1)
    assert workload.output_tokens.max() == 1000


def test_the_public_mooncake_trace_reads_as_published(bench_data: Path) -> None:
    path = bench_data / "mooncake" / "synthetic_trace.jsonl"
    workload = read_trace(path).workload
    with path.open() as lines:
        first = json.loads(next(lines))
    assert len(workload) == 3993
    assert workload.prompt_tokens[0] == first["input_length"]
    assert workload.duration_s == pytest.approx(1022.025)
