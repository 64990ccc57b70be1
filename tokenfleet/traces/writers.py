"""The trace writers: plain (CSV, JSON lines, Parquet), Mooncake JSON lines, Azure CSV.

Plain keeps everything a trace holds: what requests share as `hash_ids` (in CSV with spaces between them), or
as sessions and system prompts where it follows from those. Mooncake counts whole milliseconds and keeps what
prompts share in whole blocks of 512 tokens. Azure carries arrival and lengths only, and writes dates (from
the trace's own clock, or from 1970-01-01 where it has none).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.prefixes import Sessions
from tokenfleet.files import whole_file
from tokenfleet.traces.container import Kind
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
    """Write `trace` to `path`, whole or not at all; `on_rows` gets the size of each batch of rows written.

    Raises BadInput if the suffix does not suit `form`, the file exists and `overwrite` is false, or the
    system refuses the write.
    """
    kind = kind_for(path, form)
    table = _table(trace, form)
    if kind is Kind.CSV and "hash_ids" in table.columns:
        table = table.with_columns(pl.col("hash_ids").cast(pl.List(pl.String)).list.join(" "))
    with whole_file(path, overwrite) as file:
        if kind is Kind.PARQUET:  # columnar: whole row groups, not lines
            buffer = io.BytesIO()
            table.write_parquet(buffer)
            file.write(buffer.getbuffer())
            on_rows(len(trace))
            return
        for start in range(0, len(trace), ROWS_AT_ONCE):
            part = table.slice(start, ROWS_AT_ONCE)
            file.write(_lines(part, kind, header=start == 0))
            on_rows(len(part))


def _lines(table: pl.DataFrame, kind: Kind, header: bool) -> bytes:
    text = io.BytesIO()
    if kind is Kind.CSV:
        table.write_csv(text, include_header=header)
    else:
        table.write_ndjson(text)
    return text.getvalue()


def _table(trace: Trace, form: str) -> pl.DataFrame:
    load = trace.workload
    if form == "mooncake":
        return pl.DataFrame(
            {
                "timestamp": np.rint(load.arrival_s * 1000).astype(np.int64),
                "input_length": load.prompt_tokens,
                "output_length": load.output_tokens,
                "hash_ids": _prompt_blocks(trace),
            }
        )
    if form == "azure":
        start_ns = round((trace.clock_start_s or 0.0) * 1e9)
        date = pl.Series(np.rint(load.arrival_s * 1e9).astype(np.int64) + start_ns).cast(pl.Datetime("ns"))
        return pl.DataFrame(
            {
                "TIMESTAMP": date.dt.strftime("%Y-%m-%d %H:%M:%S%.9f"),
                "ContextTokens": load.prompt_tokens,
                "GeneratedTokens": load.output_tokens,
            }
        )
    columns = {
        "arrival_s": pl.Series(load.arrival_s),
        "prompt_tokens": pl.Series(load.prompt_tokens),
        "output_tokens": pl.Series(load.output_tokens),
    }
    if load.priority.any():
        columns["priority"] = pl.Series(load.priority)
    if trace.tenants != ("default",):
        columns["tenant"] = pl.Series(np.array(trace.tenants, object)[trace.tenant])
    if load.slo_classes != ("default",):
        columns["slo_class"] = pl.Series(np.array(load.slo_classes, object)[load.slo_class])
    if load.sessions is not None:
        columns |= _turns(load.sessions)
    # A turn that waits for others than the one before says no more what its prompt continues.
    if load.prefixes is not None and (not trace.from_lengths or "after" in columns):
        columns["hash_ids"] = _lists(load.prefixes.offsets, load.prefixes.ids)
        columns["block_tokens"] = pl.Series(np.full(len(trace), load.prefixes.block_tokens))
    elif (systems := trace.systems) is not None:
        names = np.array([*systems.names, None], object)
        columns["system"] = pl.Series(names[systems.of].tolist(), dtype=pl.String)
        tokens = pl.Series(np.append(systems.tokens, 0)[systems.of])
        columns["system_tokens"] = pl.select(
            pl.when(pl.lit(pl.Series(systems.of >= 0))).then(tokens)
        ).to_series()
    return pl.DataFrame(columns)


def _turns(sessions: Sessions) -> dict[str, pl.Series]:
    """Sessions as columns: turns by number, and `after` where one waits for others than the one before."""
    line = np.lexsort((np.arange(len(sessions)), sessions.session))
    first = np.searchsorted(sessions.session[line], sessions.session)
    turn = np.empty(len(sessions), np.int64)
    turn[line] = np.arange(len(sessions))
    turn -= first
    known = sessions.session >= 0
    owner = np.repeat(np.arange(len(sessions)), np.diff(sessions.offsets))
    waits = np.diff(sessions.offsets) > 0
    columns = {
        "session": _or_none(sessions.session, known),
        "turn": _or_none(turn, known),
    }
    if (np.diff(sessions.offsets) > 1).any() or (turn[sessions.before] + 1 != turn[owner]).any():
        columns["after"] = (
            _lists(sessions.offsets, turn[sessions.before]).cast(pl.List(pl.String)).list.join(" ")
        )
    if waits.any():
        columns["think_s"] = _or_none(sessions.think_s, waits)
    return columns


def _or_none(values: NDArray[np.generic], known: NDArray[np.bool_]) -> pl.Series:
    """A column that is empty where nothing is known."""
    return pl.select(pl.when(pl.lit(pl.Series(known))).then(pl.lit(pl.Series(values)))).to_series()


def _lists(offsets: NDArray[np.int64], values: NDArray[np.int64]) -> pl.Series:
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    frame = pl.DataFrame({"row": rows, "value": values}).group_by("row", maintain_order=True).agg("value")
    every = pl.DataFrame({"row": np.arange(len(offsets) - 1)})
    return every.join(frame, on="row", how="left", maintain_order="left")["value"]


def _prompt_blocks(trace: Trace) -> pl.Series:
    """Names of each prompt's blocks; those past what it shares with others are its own."""
    blocks = -(-trace.workload.prompt_tokens // PREFIX_BLOCK_TOKENS)
    shared = np.zeros(len(blocks), np.int64)
    prefixes, named = trace.workload.prefixes, 0
    offsets = np.concatenate([[0], np.cumsum(blocks)])
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks)
    names = np.empty(offsets[-1], np.int64)
    if prefixes is not None and PREFIX_BLOCK_TOKENS % prefixes.block_tokens == 0:
        pieces = PREFIX_BLOCK_TOKENS // prefixes.block_tokens
        shared = np.minimum(
            np.diff(prefixes.offsets) // pieces, trace.workload.prompt_tokens // PREFIX_BLOCK_TOKENS
        )
        named = int(prefixes.ids.max(initial=-1)) + 1
        is_shared = place < np.repeat(shared, blocks)
        last = np.repeat(prefixes.offsets[:-1], blocks) + (place + 1) * pieces - 1  # stands for all before it
        names[is_shared] = prefixes.ids[last[is_shared]]
    else:
        is_shared = np.zeros(len(place), bool)
    names[~is_shared] = named + np.arange(np.count_nonzero(~is_shared))
    return _lists(offsets, names)
