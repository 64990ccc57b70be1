"""The trace writers: plain (CSV, JSON lines, Parquet), Mooncake JSON lines, Azure CSV.

Plain keeps everything a trace holds. Mooncake and Azure carry arrival and lengths only: Mooncake counts
whole milliseconds, Azure writes dates (from the trace's own clock, or from 1970-01-01 where it has none).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from controlplane.errors import BadInput
from tokenfleet.files import whole_file
from tokenfleet.traces.formats import Kind
from tokenfleet.traces.trace import Trace

ROWS_AT_ONCE = 50_000
PREFIX_BLOCK_TOKENS = 512  # Mooncake names each 512-token block of a prompt
SUFFIXES = {".csv": Kind.CSV, ".jsonl": Kind.JSONL, ".ndjson": Kind.JSONL, ".parquet": Kind.PARQUET}
WRITTEN = {
    "plain": (Kind.CSV, Kind.JSONL, Kind.PARQUET),
    "mooncake": (Kind.JSONL,),
    "azure": (Kind.CSV,),
}


def kind_for(path: Path, form: str) -> Kind:
    """The kind of file the suffix asks for. Raises BadInput if `form` is not written as that."""
    if form not in WRITTEN:
        raise BadInput(f"--to: {form!r}, expected one of {', '.join(WRITTEN)}")
    kind = SUFFIXES.get(path.suffix.lower())
    if kind not in WRITTEN[form]:
        fit = ", ".join(suffix for suffix, kind in SUFFIXES.items() if kind in WRITTEN[form])
        raise BadInput(f"{path}: suffix {path.suffix!r}, expected one of {fit} for a {form} trace")
    return kind


def write_trace(
    trace: Trace,
    path: Path,
    form: str = "plain",
    overwrite: bool = False,
    on_rows: Callable[[int], object] = lambda rows: None,
) -> None:
    """Write `trace` to `path`, whole or not at all; `on_rows` is told of each batch of rows written.

    Raises BadInput if the suffix does not suit `form`, the file exists and `overwrite` is false, or the
    system refuses the write.
    """
    kind = kind_for(path, form)
    with whole_file(path, overwrite) as file:
        if kind is Kind.PARQUET:  # columnar: whole row groups, not lines
            buffer = io.BytesIO()
            _table(trace, form, 0, len(trace)).write_parquet(buffer)
            file.write(buffer.getbuffer())
            on_rows(len(trace))
            return
        for start in range(0, len(trace), ROWS_AT_ONCE):
            rows = min(ROWS_AT_ONCE, len(trace) - start)
            file.write(_lines(_table(trace, form, start, rows), kind, header=start == 0))
            on_rows(rows)


def _lines(table: pl.DataFrame, kind: Kind, header: bool) -> bytes:
    text = io.BytesIO()
    if kind is Kind.CSV:
        table.write_csv(text, include_header=header)
    else:
        table.write_ndjson(text)
    return text.getvalue()


def _table(trace: Trace, form: str, start: int, rows: int) -> pl.DataFrame:
    part = trace.workload.take(slice(start, start + rows))
    if form == "mooncake":
        return pl.DataFrame(
            {
                "timestamp": np.rint(part.arrival_s * 1000).astype(np.int64),
                "input_length": part.prompt_tokens,
                "output_length": part.output_tokens,
                "hash_ids": _own_blocks(trace, start, rows),
            }
        )
    if form == "azure":
        start_ns = round((trace.clock_start_s or 0.0) * 1e9)
        date = pl.Series(np.rint(part.arrival_s * 1e9).astype(np.int64) + start_ns).cast(pl.Datetime("ns"))
        return pl.DataFrame(
            {
                "TIMESTAMP": date.dt.strftime("%Y-%m-%d %H:%M:%S%.9f"),
                "ContextTokens": part.prompt_tokens,
                "GeneratedTokens": part.output_tokens,
            }
        )
    columns = {
        "arrival_s": pl.Series(part.arrival_s),
        "prompt_tokens": pl.Series(part.prompt_tokens),
        "output_tokens": pl.Series(part.output_tokens),
    }
    if trace.workload.priority.any():
        columns["priority"] = pl.Series(part.priority)
    if trace.tenants != ("default",):
        columns["tenant"] = pl.Series(np.array(trace.tenants, object)[trace.tenant[start : start + rows]])
    if part.slo_classes != ("default",):
        columns["slo_class"] = pl.Series(np.array(part.slo_classes, object)[part.slo_class])
    return pl.DataFrame(columns)


def _own_blocks(trace: Trace, start: int, rows: int) -> list[list[int]]:
    """Block names that no two requests share: what prefixes they had in common is not known."""
    blocks = -(-trace.workload.prompt_tokens // PREFIX_BLOCK_TOKENS)
    last = np.cumsum(blocks)
    return [
        list(range(int(end - count), int(end)))
        for end, count in zip(last[start : start + rows], blocks[start : start + rows], strict=True)
    ]
