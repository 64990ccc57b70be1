"""Request history on disk: segments of JSON lines while they are written, Parquet files once they are full.

`requests-<Unix ns>-<pid>.jsonl` belongs to the process that holds its file lock. A segment without a lock
holder was left by a process that was killed, and the next process packs it. A row is a request that has
ended, from its arrival (Unix seconds) to its outcome; texts are never written. Every file reads as a trace
(`tokenfleet plan --trace`).

Where it is asked for, a row also says what its request shared with others: `hash_ids`, one for each full
block of BLOCK_TOKENS tokens of prompt and answer, and `session`. Both are BLAKE2b digests of 8 bytes, keyed
with a salt of the folder (`salt`, readable by its owner alone). Equal blocks and names have equal digests
within one history and in no other. Without the salt, a guess at one cannot be tested. An id stands for its
block and all before it. A request of 1,000 tokens takes 120 bytes more.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, TextIO

import numpy as np
import polars as pl

from controlplane.errors import BadInput

log = logging.getLogger(__name__)

SCHEMA: Mapping[str, type[pl.DataType] | pl.DataType] = {
    "arrival_s": pl.Float64,
    "prompt_tokens": pl.Int64,
    "output_tokens": pl.Int64,
    "priority": pl.String,
    "tenant": pl.String,
    "outcome": pl.String,
    "queued_s": pl.Float64,
    "ttft_s": pl.Float64,
    "tpot_s": pl.Float64,
    "ttft_target_s": pl.Float64,
    "tpot_target_s": pl.Float64,
    "slo_class": pl.String,
    "worker": pl.String,
    "moves": pl.Int64,
    "replays": pl.Int64,
    "model": pl.String,
    "session": pl.String,
    "hash_ids": pl.List(pl.UInt64),
    "block_tokens": pl.Int64,
}
MOST_UNWRITTEN = 10_000  # rows, while a disk stands still
SEGMENT_S = 600.0  # the age at which a segment is packed
LAST_FILES = 64  # that a start reads for the lengths of requests
BLOCK_TOKENS = 64
DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """Bounds of a history: `keep_days`, and at most `keep_bytes`. A segment is packed at a size or an age."""

    keep_days: float = 30.0
    keep_bytes: int = 1 << 30
    segment_rows: int = 20_000


class HistoryWriter:
    """Appends rows to the present segment, packs and deletes, all in a thread: a disk may stand still for
    seconds, and streams must not."""

    def __init__(self, folder: Path, limits: HistoryLimits) -> None:
        """Take over what killed writers left. Raises BadInput for a folder that cannot be written."""
        self._folder, self._limits = folder, limits
        self._segment: TextIO | None = None
        self._rows, self._opened_s = 0, 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._room = BoundedSemaphore(MOST_UNWRITTEN)
        self._is_behind = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise BadInput(f"--data: {folder}: cannot be written: {error.strerror}") from None
        self._thread.submit(self._tidy)

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row; who is killed loses those that the disk has not taken, at most MOST_UNWRITTEN."""
        self.later(self._add, row)

    def later(self, write: Callable[..., None], *given: Any) -> None:
        """Write in the thread, in this order; nothing while MOST_UNWRITTEN others wait for the disk."""
        if self._room.acquire(blocking=False):
            self._is_behind = False
            self._thread.submit(write, *given).add_done_callback(self._written)
        elif not self._is_behind:
            self._is_behind = True
            log.error("request history: %s takes no writes; what follows is left out", self._folder)

    def _written(self, write: Future[None]) -> None:
        self._room.release()
        if (error := write.exception()) is not None:
            log.error("request history: %s: a row is lost", self._folder, exc_info=error)

    def _add(self, row: Mapping[str, Any]) -> None:
        if self._segment is None:
            return
        try:
            full = self._rows >= self._limits.segment_rows
            if full or (self._rows and time.monotonic() - self._opened_s >= SEGMENT_S):
                self._segment.close()
                self._open()
                self._tidy()
            self._segment.write(json.dumps(row) + "\n")
            self._rows += 1
        except OSError as error:  # a full disk must not end a request
            log.error("request history ends here: %s: %s", self._folder, error.strerror)
            self._segment = None

    def close(self) -> None:
        """Write what waits, and pack what is there."""
        self._thread.shutdown()
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        self._tidy()

    def _open(self) -> None:
        stem = f"requests-{time.time_ns():019d}-{os.getpid()}"
        # Under the name that packers look for only once the lock is held: any process may remove an empty
        # segment without a lock.
        beside = self._folder / f"{stem}.opening"
        self._segment = beside.open("x", encoding="utf-8", buffering=1)
        fcntl.flock(self._segment, fcntl.LOCK_EX)
        os.rename(beside, self._folder / f"{stem}.jsonl")
        self._rows, self._opened_s = 0, time.monotonic()

    def _tidy(self) -> None:
        try:
            for path in sorted(self._folder.glob("requests-*.jsonl")):
                pack(path)
            let_go(self._folder, self._limits, time.time())
        except (OSError, pl.exceptions.PolarsError):
            log.exception("request history: %s cannot be packed", self._folder)


def pack(path: Path) -> None:
    """Pack a segment without a writer into a Parquet file: written under another name, then renamed."""
    try:
        segment = path.open("rb")
    except FileNotFoundError:
        return  # another process was faster
    with segment:
        try:
            fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        rows = _rows_of(segment.read())
        if len(rows):
            beside = path.with_suffix(".packing")
            with beside.open("wb") as file:
                rows.sort("arrival_s").write_parquet(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path.with_suffix(".parquet"))
        path.unlink(missing_ok=True)


def let_go(folder: Path, limits: HistoryLimits, now_s: float) -> None:
    """Remove packed segments, and days of the fleet's log and what was made of them, that are too old; then
    the oldest segments of what is too much."""
    for path in (*folder.glob("fleet-*.jsonl"), *folder.glob("gap-*.json")):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < now_s - limits.keep_days * 86_400:
                path.unlink()
    total = 0
    for path in sorted(folder.glob("requests-*.parquet"), reverse=True):
        with suppress(FileNotFoundError):
            facts = path.stat()
            total += facts.st_size
            if facts.st_mtime < now_s - limits.keep_days * 86_400 or total > limits.keep_bytes:
                path.unlink()


def read_history(
    folder: Path, start_s: float, end_s: float, columns: Sequence[str] = tuple(SCHEMA)
) -> pl.DataFrame:
    """The rows that arrived in [start_s, end_s), in order; segments still written are read, too.

    Names are categorical where `columns` (of SCHEMA, with `arrival_s`) are asked for: ten million rows of a
    month then take some 40 bytes each. Raises BadInput naming a file that cannot be read.
    """
    within = pl.col("arrival_s").is_between(start_s, end_s, closed="left")
    names = [name for name in columns if SCHEMA[name] == pl.String and len(columns) < len(SCHEMA)]
    read: list[str | pl.Expr] = [
        *(name for name in columns if name not in names),
        pl.col(names).cast(pl.Categorical),
    ]
    parts = [pl.DataFrame(schema=SCHEMA).select(read)]
    for path in _segments(folder):
        try:
            parts.append(_rows(path).filter(within).select(read).collect())
        except FileNotFoundError:
            continue  # let go of meanwhile
        except (OSError, pl.exceptions.PolarsError) as error:
            raise BadInput(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    return pl.concat(parts).sort("arrival_s")


def last_lengths(folder: Path, model: str, most: int) -> pl.DataFrame:
    """`prompt_tokens` and `output_tokens` of the model's last finished requests, oldest first.

    At most `most` rows, from no more than LAST_FILES: a start can wait for that. A file that cannot be read
    counts as none.
    """
    wanted = (pl.col("outcome") == "finished") & (pl.col("model") == model) & (pl.col("output_tokens") > 0)
    columns = "prompt_tokens", "output_tokens"
    parts: list[pl.DataFrame] = []
    rows = 0
    for path in sorted(_segments(folder), key=lambda path: path.stem, reverse=True)[:LAST_FILES]:
        with suppress(OSError, pl.exceptions.PolarsError):
            parts.append(_rows(path).filter(wanted).select(columns).collect())
            rows += len(parts[-1])
        if rows >= most:
            break
    none = pl.DataFrame(schema={name: SCHEMA[name] for name in columns})
    return pl.concat([none, *reversed(parts)]).tail(most)


def history_span(folder: Path) -> tuple[int, float | None, float | None]:
    """The number of rows, and the first and last arrival (Unix seconds), without reading the rows."""
    arrivals = [_rows(path).select("arrival_s") for path in _segments(folder)]
    if not arrivals:
        return 0, None, None
    column = pl.col("arrival_s")
    span = pl.concat(arrivals).select(n=pl.len(), first=column.min(), last=column.max()).collect().row(0)
    return int(span[0]), span[1], span[2]


class Digests:
    """Salted digests of what requests share; the salt is made with the folder's first history."""

    def __init__(self, folder: Path) -> None:
        """Raises BadInput for a folder that cannot be written."""
        path = folder / "salt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (
                suppress(FileExistsError),
                open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file,
            ):
                file.write(os.urandom(32))
            self._salt = path.read_bytes()
        except OSError as error:
            raise BadInput(f"--data: {path}: cannot be written: {error.strerror}") from None

    def name(self, name: str) -> str:
        """Of a session's name."""
        return hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES, key=self._salt).hexdigest()

    def blocks(self, token_ids: Sequence[int]) -> list[int]:
        """Of the full blocks of a sequence."""
        tokens = np.asarray(token_ids, np.uint32).tobytes()
        size, before, ids = BLOCK_TOKENS * 4, b"", []
        for start in range(0, len(tokens) - size + 1, size):
            text = before + tokens[start : start + size]
            before = hashlib.blake2b(text, digest_size=DIGEST_BYTES, key=self._salt).digest()
            ids.append(int.from_bytes(before))
        return ids


def _segments(folder: Path) -> list[Path]:
    """All files of requests, each segment once: those that may still be written first."""
    written = sorted(folder.glob("requests-*.jsonl"))
    names = {path.stem for path in written}
    return [*written, *(p for p in sorted(folder.glob("requests-*.parquet")) if p.stem not in names)]


def _rows(path: Path) -> pl.LazyFrame:
    """The rows of a segment, or of what it was packed into meanwhile."""
    if path.suffix == ".jsonl":
        with suppress(FileNotFoundError):
            return _rows_of(path.read_bytes()).lazy()
    return pl.scan_parquet(path.with_suffix(".parquet"), glob=False, schema=SCHEMA, missing_columns="insert")


def _rows_of(text: bytes) -> pl.DataFrame:
    """The rows of a segment. A killed writer leaves half a line at the end; that is no row."""
    whole = text[: text.rfind(b"\n") + 1]
    if not whole:
        return pl.DataFrame(schema=SCHEMA)
    return pl.read_ndjson(io.BytesIO(whole), schema=SCHEMA, ignore_errors=True)
