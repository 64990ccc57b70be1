"""The trace formats, identified by their columns, in CSV, JSON lines or Parquet files, identified by content.

Column names are compared without case, spaces or punctuation, so `Context Tokens` is `ContextTokens`.

A file is opened as a polars lazy frame, so that only the few columns wanted are ever held. A text file's
columns arrive as text and are converted by the reader, which can then quote a bad value as it is written.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

import polars as pl

from controlplane.errors import BadInput

OPTIONAL = ("priority", "tenant", "slo_class")
SHARED = ("session", "turn", "after", "think_s", "hash_ids", "block_tokens", "system", "system_tokens")
ANSWERED = ("ttft_s", "tpot_s")  # when answers were complete
MOST_SHOWN = 12


class ArrivalUnit(StrEnum):
    """The unit of a format's arrival column."""

    DATE = "a date and time"
    SECONDS = "seconds"
    MILLISECONDS = "milliseconds"


@dataclass(frozen=True, slots=True)
class Format:
    """One published format by the names of its columns.

    `relative` says that arrivals count from a start chosen by the writer of the file, which is then kept.
    `also` are further columns without which it is not this format. `shared` are those, if they are there,
    that tell what requests share and wait for (traces/identity.py). `block_tokens` is the unit of its
    hash_ids, 0 where a column says it. `known` are further columns that a workload has no use for.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    clock: ArrivalUnit
    relative: bool = False
    also: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    block_tokens: int = 0
    known: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns without which it is not this format."""
        return self.arrival, self.prompt, self.output, *self.also


FORMATS = (
    Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", ArrivalUnit.DATE),
    Format(
        "burstgpt", "Timestamp", "Request tokens", "Response tokens", ArrivalUnit.SECONDS,
        known=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
    ),
    Format(
        "mooncake", "timestamp", "input_length", "output_length", ArrivalUnit.MILLISECONDS,
        shared=("hash_ids",), block_tokens=512,
    ),
    Format(
        "weka", "t_s", "input_tokens", "output_tokens", ArrivalUnit.SECONDS, relative=True,
        also=("session", "agent", "turn", "parent_agent", "parent_turn", "think_s", "hash_ids"),
        shared=("session", "agent", "turn", "parent_agent", "parent_turn", "think_s", "api_s", "hash_ids"),
        block_tokens=64, known=("ttft_s", "stream", "model"),
    ),
    Format(
        "vllm-log", "arrival_time", "input_toks", "output_toks", ArrivalUnit.SECONDS,
        known=("request_id", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"),
    ),
    Format(
        "plain", "arrival_s", "prompt_tokens", "output_tokens", ArrivalUnit.SECONDS, relative=True,
        shared=(*SHARED, *ANSWERED),
        known=(
            "request", "worker", "first_token_s", "finish_s", "preemptions", "migrations", "outcome",
            "cached_tokens", "ttft_target_s", "tpot_target_s", "moves", "replays", "model",
        ),
    ),
)  # fmt: skip
# What became of each request: `simulate --per-request` and a served fleet write it beside the plain columns.
HISTORY_COLUMNS = (("worker", "first_token_s", "finish_s"), ("worker", "ttft_s", "tpot_s", "outcome"))


@dataclass(frozen=True, slots=True)
class Match:
    """A file's columns as a format understands them; values are the file's own spellings."""

    format: Format
    name: str
    arrival: str
    prompt: str
    output: str
    optional: dict[str, str]
    shared: dict[str, str]
    ignored: tuple[str, ...]


def match(columns: Sequence[str], where: str) -> Match:
    """The format whose columns these are.

    Raises BadInput naming `where`, the columns found and those expected, if there is none.
    """
    spelled = {plain_name(column): column for column in columns}
    for form in FORMATS:
        if all(plain_name(column) in spelled for column in form.needed):
            return _matched(form, spelled)
    raise BadInput(f"{where}: {_unknown_columns(columns, spelled)}")


def _matched(form: Format, spelled: dict[str, str]) -> Match:
    arrival, prompt, output = (spelled[plain_name(column)] for column in form.needed[:3])
    told = {name: spelled[plain_name(name)] for name in form.shared if plain_name(name) in spelled}
    optional = {name: spelled[plain_name(name)] for name in OPTIONAL if plain_name(name) in spelled}
    expected = {plain_name(c) for c in (*form.needed, *form.known, *form.shared, *OPTIONAL)}
    history = form.name == "plain" and any(
        all(plain_name(c) in spelled for c in columns) for columns in HISTORY_COLUMNS
    )
    return Match(
        format=form,
        name="history" if history else form.name,
        arrival=arrival,
        prompt=prompt,
        output=output,
        optional=optional,
        shared=told,
        ignored=tuple(column for plain, column in spelled.items() if plain not in expected),
    )


def _unknown_columns(columns: Sequence[str], spelled: dict[str, str]) -> str:
    shown = ", ".join(repr(c[:40]) for c in columns[:MOST_SHOWN]) + (
        ", …" if len(columns) > MOST_SHOWN else ""
    )
    shared = {form: sum(plain_name(c) in spelled for c in form.needed) for form in FORMATS}
    most = max(shared.values())
    nearest = [form for form in FORMATS if shared[form] == most]
    expected = "; ".join(f"{form.name}: {', '.join(form.needed)}" for form in nearest)
    if len(nearest) == 1:
        missing = [c for c in nearest[0].needed if plain_name(c) not in spelled]
        return f"columns found: {shown}; a {nearest[0].name} trace also has {', '.join(missing)}"
    return f"columns found: {shown}; expected those of one of: {expected}"


def plain_name(column: str) -> str:
    """A column's name without case, spaces or punctuation."""
    return re.sub(r"[^a-z0-9]", "", column.lower())


ROW = "__row"  # index of a row in its file, counted from 0 and without the header
HEAD_BYTES = 1 << 16
HEAD_LINES = 100
LONGEST_LINE_BYTES = 1 << 24
UNREADABLE = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, RecursionError)

UNPACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # as they are read
PACKED = {
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}


class Kind(StrEnum):
    """The kind of file that holds the rows."""

    CSV = "csv"
    JSONL = "jsonl"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file that can be scanned, and the columns it has."""

    path: Path
    kind: Kind
    columns: tuple[str, ...]
    separator: str = ","
    packer: str = ""

    def scan(self, wanted: Sequence[str]) -> pl.LazyFrame:
        """The wanted columns and the row index ROW, read when collected."""
        if self.kind is Kind.CSV:
            frame = pl.scan_csv(
                self.path, separator=self.separator, infer_schema=False, row_index_name=ROW, glob=False
            )
            blank = ~pl.any_horizontal(pl.col(c).is_not_null() for c in self.columns)
            return frame.with_columns(blank.alias("__blank")).select(ROW, "__blank", *wanted)
        if self.kind is Kind.JSONL:
            schema = dict.fromkeys(wanted, pl.String)
            # scan_ndjson alone cannot be told that a * or [ in a path is only a character.
            source = self.path.read_bytes() if set("*?[") & set(str(self.path)) else self.path
            frame = pl.scan_ndjson(source, schema=schema, row_index_name=ROW)
        else:
            frame = pl.scan_parquet(self.path, row_index_name=ROW, glob=False).select(ROW, *wanted)
        return frame.with_columns(pl.lit(False).alias("__blank"))


def open_container(path: Path) -> TableFile:
    """Find what kind of file `path` is, and its columns.

    Raises BadInput if it is missing, empty, not a regular file, packed, or none of the three kinds.
    """
    try:
        if not path.exists():
            raise BadInput(f"{path}: no such file")
        if not path.is_file():
            raise BadInput(f"{path}: not a regular file; expected a CSV, JSON-lines or Parquet trace")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        return _by_content(path, head)
    except UNREADABLE as error:
        raise BadInput(f"{path}: cannot be read: {one_line(error)}") from error


def _by_content(path: Path, head: bytes) -> TableFile:
    for magic, packer in UNPACKED.items():
        if head.startswith(magic):
            try:
                lines = pl.read_lines(path, n_rows=HEAD_LINES, glob=False).to_series().to_list()
            except UNREADABLE as error:
                raise _broken(path, packer, error) from error
            return replace(_by_text(path, [line.encode() for line in lines]), packer=packer)
    for magic, packer in PACKED.items():
        if head.startswith(magic):
            raise BadInput(f"{path}: packed with {packer}; unpack it first, or pack it with gzip or zstd")
    if head.startswith(b"PAR1"):
        return TableFile(
            path, Kind.PARQUET, tuple(pl.scan_parquet(path, glob=False).collect_schema().names())
        )
    with path.open("rb") as file:
        return _by_text(path, [file.readline(LONGEST_LINE_BYTES) for _ in range(HEAD_LINES)])


def _by_text(path: Path, lines: Sequence[bytes]) -> TableFile:
    """What a text file is, by its first lines."""
    head = b"\n".join(lines)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise BadInput(f"{path}: empty file; expected a header and at least one request")
    if b"\x00" in head:
        raise BadInput(f"{path}: holds binary data; expected a CSV, JSON-lines or Parquet trace")
    if start.startswith(b"["):
        raise BadInput(f"{path}: a JSON array; expected JSON lines, one object a line")
    if start.startswith(b"{"):
        return TableFile(path, Kind.JSONL, _json_columns(path, lines))
    separator = _separator(start)
    frame = pl.scan_csv(path, separator=separator, infer_schema=False, glob=False)
    columns = tuple(frame.collect_schema().names())
    twice = [c for c in columns if "_duplicated_" in c and c.rsplit("_duplicated_", 1)[0] in columns]
    if twice:
        raise BadInput(f"{path}: column {twice[0].rsplit('_duplicated_', 1)[0]!r} is twice in the header")
    return TableFile(path, Kind.CSV, columns, separator)


def _separator(text: bytes) -> str:
    header = text.split(b"\n", 1)[0]
    return max(",;\t|", key=lambda mark: header.count(mark.encode()))


def _json_columns(path: Path, lines: Sequence[bytes]) -> tuple[str, ...]:
    """Every key of the first objects: an optional one may be missing from the first."""
    columns: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            columns.update(dict.fromkeys(_json_object(path, number, line)))
    return tuple(columns)


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no value of JSON's")


def _json_object(path: Path, number: int, line: bytes) -> dict[str, object]:
    try:
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        value = json.loads(text, parse_constant=_no_constant)  # polars reads no NaN either
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: line {number}: not JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: line {number}: {line[:40]!r}, expected a JSON object")
    return value


def blame(container: TableFile, error: BaseException) -> BadInput:
    """The first fault of a file that polars could not parse, found by reading it line by line."""
    path = container.path
    try:
        if container.kind is Kind.JSONL:
            for number, line in enumerate(_lines(container), 1):
                if line.strip():
                    _json_object(path, number, line)
        elif container.kind is Kind.CSV:
            text = (line.decode("utf-8-sig") for line in _lines(container))
            rows = csv.reader(text, delimiter=container.separator, strict=True)
            for row in rows:
                if len(row) > len(container.columns):
                    fields = f"{len(row)} fields, the header has {len(container.columns)}"
                    return BadInput(f"{path}: line {rows.line_num}: {fields}")
    except BadInput as found:
        return found
    except (OSError, ValueError, csv.Error) as found:
        return BadInput(f"{path}: cannot be parsed as {container.kind}: {one_line(found)}")
    return BadInput(f"{path}: cannot be parsed as {container.kind}: {one_line(error)}")


def _lines(container: TableFile) -> Iterator[bytes]:
    """A text's lines with their ends, unpacked. Raises BadInput where its packing is broken."""
    if not container.packer:
        with container.path.open("rb") as file:
            yield from file
        return
    try:
        lines = pl.read_lines(container.path, glob=False).to_series()
    except OSError as error:
        raise _broken(container.path, container.packer, error) from error
    yield from (f"{line}\n".encode() for line in lines)


def _broken(path: Path, packer: str, error: BaseException) -> BadInput:
    return BadInput(f"{path}: breaks off, or is no whole {packer} file: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """An error's own words, cut to one line."""
    words = str(error).strip().splitlines()
    return words[0][:200] if words else type(error).__name__
