"""Real files: of load tools, LiteLLM, OpenTelemetry and published traces. `samples` holds parts of them.

vLLM 0.32, guidellm 0.8.1, aiperf 0.13.0 and LiteLLM 1.110 each sent a few requests to one vLLM server on a
CPU; the spans are that server's, as OTLP's JSON. inference-perf 0.7.0 sent its own to an emulated fleet.
`vidur.csv` begins microsoft/vidur `8e54dd5c` (MIT), data/processed_traces/splitwise_conv.csv, made from
Azure's hour (CC-BY-4.0). `splitwise.csv` is traces/test_trace.csv of Mutinifni/splitwise-sim
`37808801` (MIT).
"""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkout import BENCH_DATA, ROOT

from controlplane.errors import BadInput
from tokenfleet.traces import read_trace
from tokenfleet.traces.container import open_container
from tokenfleet.traces.formats import FORMATS
from tokenfleet.traces.tools import TOOLS

SAMPLES = Path(__file__).parent / "samples"
SAMPLE = {  # format, requests, prompt tokens, output tokens, and whether arrivals are dates
    "vllm_bench.json": ("vllm-bench", 4, 240, 48, False),
    "guidellm.json": ("guidellm", 4, 276, 48, True),
    "aiperf.jsonl": ("aiperf", 4, 240, 55, True),
    "inference_perf.json": ("inference-perf", 4, 188, 51, False),
    "litellm.jsonl": ("litellm", 6, 114, 48, True),
    "otlp.jsonl": ("otlp", 6, 360, 72, True),
}
PUBLISHED = {  # format: file, requests, prompt tokens, output tokens
    "splitwise": (SAMPLES / "splitwise.csv", 3, 8192, 56),
    "vidur": (SAMPLES / "vidur.csv", 6, 2212, 324),
    "azure": (BENCH_DATA / "azure/AzureLLMInferenceTrace_conv_2023.csv", 19_366, 22_361_870, 4_088_665),
    "mooncake": (BENCH_DATA / "mooncake/synthetic_trace.jsonl", 3_993, 61_194_628, 595_432),
    "vllm-log": (
        BENCH_DATA / "vllm_logs/rtx_pro_6000_llama-3.1-8b/requests.jsonl", 300, 257_239, 195_753,
    ),
    "weka": (BENCH_DATA / "weka/requests.parquet", 9_017, 1_043_026_329, 3_827_857),
}  # fmt: skip


def objects_of(name):
    text = (SAMPLES / name).read_text()
    if name.endswith(".jsonl"):
        return [json.loads(one) for one in text.splitlines()]
    whole = json.loads(text)
    return whole if isinstance(whole, list) else [whole]


@pytest.mark.parametrize("name", SAMPLE)
def test_what_a_tool_wrote_is_read(name):
    form, requests, prompts, outputs, dated = SAMPLE[name]
    trace = read_trace(SAMPLES / name)
    work = trace.workload
    assert (trace.format, work.requests, trace.warnings) == (form, requests, [])
    assert (work.prompt_tokens.sum(), work.output_tokens.sum()) == (prompts, outputs)
    assert work.arrival_s[0] == 0.0
    assert 0.3 < work.arrival_s[-1] < 60.0
    assert (trace.clock_start_s is not None) == dated


@pytest.mark.parametrize("form", PUBLISHED)
def test_what_was_published_is_read(form, request):
    path, *counts = PUBLISHED[form]
    if path.parent != SAMPLES:
        request.getfixturevalue("bench_data")
    trace = read_trace(path)
    work = trace.workload
    assert trace.format == form
    assert [work.requests, work.prompt_tokens.sum(), work.output_tokens.sum()] == counts


def test_formats_without_a_real_file_are_known():
    known = {form.name for form in FORMATS} | {tool.name for tool in TOOLS} | {"history"}
    real = set(PUBLISHED) | {form for form, *_ in SAMPLE.values()}
    assert known - real == {"burstgpt", "history", "plain"}
    assert len(real) == 12


@pytest.mark.parametrize("name", SAMPLE)
def test_packed_indented_or_in_an_array_it_is_the_same(name, tmp_path):
    text, objects = (SAMPLES / name).read_text(), objects_of(name)
    expected = read_trace(SAMPLES / name).workload
    for form, content in {
        "gz": gzip.compress(text.encode()),
        "indented": "\n".join(json.dumps(one, indent=2) for one in objects).encode(),
        "array": json.dumps(objects).encode(),
    }.items():
        (tmp_path / form).write_bytes(content)
        np.testing.assert_array_equal(read_trace(tmp_path / form).workload.arrival_s, expected.arrival_s)


def test_answers_carry_their_times():
    for name, fields in {
        "vllm_bench.json": 2,
        "guidellm.json": 2,
        "aiperf.jsonl": 2,
        "inference_perf.json": 2,
        "otlp.jsonl": 2,
    }.items():
        table = open_container(SAMPLES / name).table
        times = table.select("ttft_s", "tpot_s").cast(float)
        assert times.null_count().sum_horizontal().item() == 0
        assert len(times.columns) == fields
        assert (times["ttft_s"] > times["tpot_s"]).all()
        assert times["ttft_s"].max() < 1.0


def one(tmp_path, value):
    (tmp_path / "one").write_text(json.dumps(value))
    return tmp_path / "one"


def test_an_array_of_plain_objects_is_a_table(tmp_path):
    rows = [{"arrival_s": 2 * n, "prompt_tokens": 5 + n, "output_tokens": 1, "tenant": "a"} for n in range(3)]
    trace = read_trace(one(tmp_path, rows))
    assert (trace.format, trace.workload.prompt_tokens.tolist()) == ("plain", [5, 6, 7])
    assert trace.tenants == ("a",)


def test_rows_of_spend_logs_have_dates(tmp_path):
    row = {"spend": 0.1, "prompt_tokens": 8, "completion_tokens": 4, "startTime": "2026-11-02T10:00:00Z"}
    later = row | {"startTime": "2026-11-02T12:00:01+02:00", "status": "failure"}
    last = row | {"startTime": "2026-11-02 10:00:02.5"}
    trace = read_trace(one(tmp_path, [row, later, last]))
    assert (trace.format, trace.empty_outputs) == ("litellm", 1)
    assert trace.workload.arrival_s.tolist() == [0.0, 2.5]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ttfts": [0.1]}, "object 1 of a file of vllm-bench: cannot be used"),
        ({"start_times": None}, "object 1 of a file of vllm-bench: cannot be used"),
        ({"input_lens": [60, None, 60, 60]}, "row 2: prompt_tokens: no value, expected a whole number"),
        ({"output_lens": ["x", 1, 1, 1]}, "object 1 of a file of vllm-bench: cannot be used"),
    ],
)
def test_a_damaged_report_is_refused_by_its_place(tmp_path, change, said):
    report = json.loads((SAMPLES / "vllm_bench.json").read_text()) | change
    with pytest.raises(BadInput, match=said):
        read_trace(one(tmp_path, report))


def test_a_report_without_its_requests_says_what_is_missing(tmp_path):
    """`vllm bench serve` writes lists of requests only with --save-detailed."""
    report = json.loads((SAMPLES / "vllm_bench.json").read_text())
    del report["start_times"]
    with pytest.raises(BadInput, match="run vllm bench serve with --save-result --save-detailed"):
        read_trace(one(tmp_path, report))


def test_spans_without_token_counts_say_what_is_missing(tmp_path):
    spans = (SAMPLES / "otlp.jsonl").read_text().replace("gen_ai.usage", "http.usage")
    (tmp_path / "one").write_text(spans)
    (tmp_path / "two").write_text('{"resourceSpans": []}')
    for path in (tmp_path / "one", tmp_path / "two"):
        with pytest.raises(BadInput, match=r"objects of otlp: no span has gen_ai\.usage token counts"):
            read_trace(path)


@pytest.mark.parametrize("name", SAMPLE)
def test_two_formats_in_one_file_are_refused_by_their_place(name, tmp_path):
    other = "otlp.jsonl" if name != "otlp.jsonl" else "litellm.jsonl"
    told = f"object {len(objects_of(name)) + 1}: of {SAMPLE[other][0]}, the objects before it are of"
    (tmp_path / "two").write_text("\n".join(map(json.dumps, objects_of(name) + objects_of(other))))
    with pytest.raises(BadInput, match=f"{told} {SAMPLE[name][0]}"):
        read_trace(tmp_path / "two")
    (tmp_path / "two").write_text("\n".join(map(json.dumps, [*objects_of(name), {"arrival_s": 1}])))
    with pytest.raises(BadInput, match=f"expected an object of {SAMPLE[name][0]}, which has "):
        read_trace(tmp_path / "two")


@pytest.mark.parametrize("who", ["(APIServer pid=7) ", ""])
def test_vllm_s_log_has_no_token_counts_and_says_where_they_are(who, tmp_path):
    line = (
        f"{who}INFO 11-25 21:02:11 [request_logger.py:65] Received request chatcmpl-1: params: SamplingParams"
    )
    (tmp_path / "vllm.log").write_text(f"{line}(n=1, seed=None), lora_request: None.\n" * 3)
    with pytest.raises(BadInput, match="vLLM's log, which has no token counts; expected its spans"):
        read_trace(tmp_path / "vllm.log")


PAGE = (ROOT / "docs" / "traces.md").read_text()
EXAMPLES = dict(re.findall(r"^`([\w-]+)`\n\n```\n(.+?)\n```$", PAGE, re.M | re.S))


def test_the_page_has_an_example_of_each_format():
    known = {form.name for form in FORMATS} | {tool.name for tool in TOOLS} | {"history"}
    assert set(EXAMPLES) == known
    assert len(known) == 15


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_format_is_read_as_that(name, tmp_path):
    (tmp_path / "one").write_text(EXAMPLES[name] + "\n")
    trace = read_trace(tmp_path / "one")
    assert trace.format == name
    assert trace.workload.requests >= 1
