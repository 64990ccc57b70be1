"""Requests from the files of load tools, LiteLLM and OpenTelemetry, as the columns of the plain format.

These files nest what a table has in columns. A reader turns one JSON object of a file into rows of COLUMNS.
A value is kept as written, so that the trace reader can quote a bad one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import polars as pl

from controlplane.errors import BadInput

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s")
Json = Mapping[str, Any]
Row = tuple[object, ...]  # values of COLUMNS
FAILED = (1, 0)  # tokens of a request without an answer; the trace reader drops it, and counts it


@dataclass(frozen=True, slots=True)
class Tool:
    """A program whose files hold requests: `has` are keys of each object in them."""

    name: str
    has: frozenset[str]
    rows: Callable[[Json], Iterable[Row]]
    nothing: str = ""  # why there may be no row, and what to do


def tool_of(keys: Iterable[str]) -> Tool | None:
    """The tool whose objects have these keys."""
    found = set(keys)
    return next((tool for tool in TOOLS if tool.has <= found), None)


def table_of(tool: Tool, documents: Iterable[Json], where: str) -> pl.DataFrame:
    """The requests of a file, as text columns COLUMNS. Raises BadInput for objects of another form."""
    rows: list[Row] = []
    number = 0
    for number, document in enumerate(documents, 1):
        if not tool.has <= document.keys():
            raise BadInput(f"{where}: object {number}: {_stranger(tool, document)}")
        try:
            rows += tool.rows(document)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
            what = f"misses {error}" if isinstance(error, KeyError) else f"cannot be used: {error}"
            raise BadInput(f"{where}: object {number} of a file of {tool.name}: {what}") from None
    if not rows and tool.nothing:
        raise BadInput(f"{where}: {number} objects of {tool.name}: {tool.nothing}")
    texts = [[None if value is None else str(value) for value in row] for row in rows]
    return pl.DataFrame(texts, schema=dict.fromkeys(COLUMNS, pl.String), orient="row")


def _stranger(tool: Tool, document: Json) -> str:
    """What an object is that is not of the file's tool."""
    other = tool_of(document)
    if other is not None:
        return f"of {other.name}, the objects before it are of {tool.name}; expected one format in a file"
    missing = ", ".join(sorted(tool.has - document.keys()))
    return f"expected an object of {tool.name}, which has {missing}"


def _vllm_bench(document: Json) -> Iterator[Row]:
    """`vllm bench serve --save-result --save-detailed`: one list for each quantity."""
    if "start_times" not in document:
        raise ValueError("it has no requests; run vllm bench serve with --save-result --save-detailed")
    lists = [document[name] for name in ("start_times", "input_lens", "output_lens", "ttfts", "itls")]
    for start_s, prompt, output, ttft_s, gaps_s in zip(*lists, strict=True):
        yield start_s, prompt, output, ttft_s, sum(gaps_s) / max(int(output) - 1, 1) if gaps_s else None


def _guidellm(document: Json) -> Iterator[Row]:
    """guidellm's JSON report: the requests of each of its benchmarks."""
    for benchmark in document["benchmarks"]:
        requests = benchmark["requests"]
        for one in (*requests["successful"], *(requests["incomplete"] or ())):
            answer = (
                _milliseconds(one, "time_to_first_token_ms"),
                _milliseconds(one, "inter_token_latency_ms"),
            )
            yield one["request_start_time"], one["prompt_tokens"], one["output_tokens"] or 0, *answer
        for one in requests["errored"] or ():
            yield one["request_start_time"], *FAILED, None, None


def _aiperf(document: Json) -> Iterator[Row]:
    """A line of aiperf's `profile_export.jsonl`. Requests of its warm-up are left out."""
    about, measured = document["metadata"], document["metrics"]
    if about.get("benchmark_phase") == "warmup":
        return
    start_s = about["request_start_ns"] / 1e9
    if document.get("error"):
        yield start_s, *FAILED, None, None
        return
    value = {name: one["value"] for name, one in measured.items()}
    answer = _milliseconds(value, "time_to_first_token"), _milliseconds(value, "inter_token_latency")
    yield start_s, value["input_sequence_length"], value["output_sequence_length"], *answer


def _inference_perf(document: Json) -> Iterator[Row]:
    """An entry of inference-perf's `per_request_lifecycle_metrics.json`; its times are those of a stopwatch.

    Tokens are the server's own count where it gave one.
    """
    start_s = document["start_time"]
    if document["error"]:
        yield start_s, *FAILED, None, None
        return
    told = document["info"]
    answer = told["response_metrics"] or {}
    usage: Json = answer.get("server_usage") or {}
    times_s: list[float] = answer.get("chunk_times") or []
    prompt = usage.get("prompt_tokens", told["input_tokens"])
    output = usage.get("completion_tokens", answer.get("output_tokens", 0))
    ttft_s = times_s[0] - start_s if times_s else None
    tpot_s = (times_s[-1] - times_s[0]) / max(int(output) - 1, 1) if len(times_s) > 1 else None
    yield start_s, prompt, output, ttft_s, tpot_s


def _litellm(document: Json) -> Iterator[Row]:
    """An object of LiteLLM's logging payload, or a row of its spend logs."""
    start_s = _unix_s(document["startTime"])
    if document.get("status") == "failure":
        yield start_s, *FAILED, None, None
        return
    first, end = (document.get(name) for name in ("completionStartTime", "endTime"))
    streamed = isinstance(start_s, float) and first and first != end
    first_s = _unix_s(first) if streamed else None
    ttft_s = first_s - start_s if isinstance(first_s, float) and isinstance(start_s, float) else None
    yield start_s, document["prompt_tokens"], document["completion_tokens"], ttft_s, None


SPAN_PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
SPAN_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
SPAN_TTFT = ("gen_ai.server.time_to_first_token", "gen_ai.latency.time_to_first_token")
SPAN_DECODE = ("gen_ai.latency.time_in_model_decode",)


def _spans(document: Json) -> Iterator[Row]:
    """OTLP's JSON: every span that counts a request's tokens, as vLLM and the GenAI conventions name them."""
    for resource in document["resourceSpans"]:
        for span in (span for scope in resource["scopeSpans"] for span in scope["spans"]):
            said = {one["key"]: next(iter(one["value"].values())) for one in span.get("attributes", ())}
            prompt, output = _first(said, SPAN_PROMPT), _first(said, SPAN_OUTPUT)
            if prompt is None or output is None:
                continue
            decode_s = _first(said, SPAN_DECODE)
            tpot_s = None if decode_s is None else float(decode_s) / max(int(output) - 1, 1)
            yield int(span["startTimeUnixNano"]) / 1e9, prompt, output, _first(said, SPAN_TTFT), tpot_s


def _first(values: Json, names: Iterable[str]) -> Any:
    return next((values[name] for name in names if name in values), None)


def _milliseconds(values: Json, name: str) -> float | None:
    """A time of the tool's in seconds; a tool has none for answers of one token or without a stream."""
    value = values.get(name)
    return None if value is None else float(value) / 1e3


def _unix_s(value: object) -> object:
    """Seconds since 1970 of a number or an ISO date (UTC where it has no zone); another value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        date = datetime.fromisoformat(value)
    except ValueError:
        return value
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


TOOLS = (
    Tool("vllm-bench", frozenset({"request_throughput", "total_input_tokens"}), _vllm_bench),
    Tool("guidellm", frozenset({"benchmarks", "metadata"}), _guidellm),
    Tool("aiperf", frozenset({"metadata", "metrics"}), _aiperf),
    Tool("inference-perf", frozenset({"start_time", "end_time", "info", "error"}), _inference_perf),
    Tool("litellm", frozenset({"startTime", "prompt_tokens", "completion_tokens"}), _litellm),
    Tool(
        "otlp", frozenset({"resourceSpans"}), _spans,
        "no span has gen_ai.usage token counts; export the spans of vLLM, or of a gateway that counts tokens",
    ),
)  # fmt: skip


def documents_of(text: str, where: str) -> Iterator[Json]:
    """The JSON objects of a text: one, an array of them, or one after another.

    Raises BadInput naming `where`, and the place, for a text that is none of these.
    """
    decoder, at = json.JSONDecoder(), 0
    text = text.removeprefix("\ufeff").strip()
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            line = text.count("\n", 0, at) + 1
            raise BadInput(f"{where}: line {line}: not JSON: {str(error).splitlines()[0][:200]}") from None
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict):
                raise BadInput(f"{where}: {str(one)[:40]!r}, expected a JSON object")
            yield one
        at = end
        while at < len(text) and text[at].isspace():
            at += 1
