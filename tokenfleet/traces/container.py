"""Files that hold a trace's rows, in CSV, JSON or Parquet, identified by content.

A file is opened as a polars lazy frame, so that only the few columns wanted are ever held. A text file's
columns arrive as text. The reader converts them, and can then quote a bad value as written.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import NoReturn

import polars as pl

from controlplane.errors import BadInput
from tokenfleet.traces.tools import COLUMNS, documents_of, table_of, tool_of

ROW = "__row"  # index of a row in its file, counted from 0 and without the header
HEAD_BYTES = 1 << 16
HEAD_LINES = 100
LONGEST_LINE_BYTES = 1 << 24
MOST_BYTES = 1 << 30  # of a file that is read whole
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
    OBJECTS = "JSON"  # objects that nest what they hold, or an array


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file that can be scanned, and the columns it has. `table` is what was made of objects, by `tool`."""

    path: Path
    kind: Kind
    columns: tuple[str, ...]
    separator: str = ","
    packer: str = ""
    tool: str = ""
    table: pl.DataFrame | None = None

    def scan(self, wanted: Sequence[str]) -> pl.LazyFrame:
        """The wanted columns and the row index ROW, read when collected."""
        if self.table is not None:
            frame = self.table.lazy().with_row_index(ROW).select(ROW, *wanted)
        elif self.kind is Kind.CSV:
            frame = pl.scan_csv(
                self.path, separator=self.separator, infer_schema=False, row_index_name=ROW, glob=False
            )
            blank = ~pl.any_horizontal(pl.col(c).is_not_null() for c in self.columns)
            return frame.with_columns(blank.alias("__blank")).select(ROW, "__blank", *wanted)
        elif self.kind is Kind.JSONL:
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
            return _by_text(path, [line.encode() for line in lines], packer)
    for magic, packer in PACKED.items():
        if head.startswith(magic):
            raise BadInput(f"{path}: packed with {packer}; unpack it first, or pack it with gzip or zstd")
    if head.startswith(b"PAR1"):
        return TableFile(
            path, Kind.PARQUET, tuple(pl.scan_parquet(path, glob=False).collect_schema().names())
        )
    with path.open("rb") as file:
        return _by_text(path, [file.readline(LONGEST_LINE_BYTES) for _ in range(HEAD_LINES)])


def _by_text(path: Path, lines: Sequence[bytes], packer: str = "") -> TableFile:
    """What a text file is, by its first lines."""
    head = b"\n".join(lines)
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise BadInput(f"{path}: empty file; expected a header and at least one request")
    if b"\x00" in head:
        raise BadInput(f"{path}: holds binary data; expected a CSV, JSON-lines or Parquet trace")
    if start.startswith(b"[") or (start.startswith(b"{") and _is_nested(start)):
        return _by_objects(TableFile(path, Kind.OBJECTS, (), packer=packer))
    if start.startswith(b"{"):
        return TableFile(path, Kind.JSONL, _json_columns(path, lines), packer=packer)
    if re.search(rb"^(\([\w:]+ pid=\d+\) )?(INFO|WARNING|DEBUG) \d\d-\d\d \d\d:", start, re.M):
        raise BadInput(
            f"{path}: vLLM's log, which has no token counts; expected its spans (--otlp-traces-endpoint)"
            " or its metrics (plan --prometheus)"
        )
    separator = _separator(start)
    frame = pl.scan_csv(path, separator=separator, infer_schema=False, glob=False)
    columns = tuple(frame.collect_schema().names())
    twice = [c for c in columns if "_duplicated_" in c and c.rsplit("_duplicated_", 1)[0] in columns]
    if twice:
        raise BadInput(f"{path}: column {twice[0].rsplit('_duplicated_', 1)[0]!r} is twice in the header")
    return TableFile(path, Kind.CSV, columns, separator, packer)


def _is_nested(start: bytes) -> bool:
    """Whether the first line is no whole object, or one of a tool's: then the file is read as objects."""
    try:
        first = json.loads(start.split(b"\n", 1)[0])
    except (ValueError, RecursionError):
        # An object over several lines: it begins with a bracket alone, or is whole in the lines read.
        if start.split(b"\n", 1)[0].strip() in (b"{", b"[") or len(start) >= LONGEST_LINE_BYTES:
            return True
        with suppress(ValueError, RecursionError):
            return isinstance(json.JSONDecoder().raw_decode(start.decode("utf-8", "replace"))[0], dict)
        return False
    return isinstance(first, dict) and tool_of(first) is not None


def _by_objects(file: TableFile) -> TableFile:
    """A file of nested objects or of an array, as a table. It is read whole."""
    if file.path.stat().st_size > MOST_BYTES:
        raise BadInput(f"{file.path}: JSON of over {MOST_BYTES >> 20} MiB; expected JSON lines for as much")
    where = str(file.path)
    documents = documents_of(b"".join(_lines(file)).decode("utf-8", "replace"), where)
    first = next(documents, None)
    if first is None:
        raise BadInput(f"{where}: an empty array; expected at least one request")
    every = chain((first,), documents)
    if (tool := tool_of(first)) is not None:
        return replace(file, columns=COLUMNS, table=table_of(tool, every, where), tool=tool.name)
    rows = [{name: _cell(value) for name, value in one.items()} for one in every]
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    table = pl.DataFrame(rows, schema=dict.fromkeys(columns, pl.String))
    return replace(file, columns=columns, table=table)


def _cell(value: object) -> str | None:
    """A value of an object as a text file has it."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


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
