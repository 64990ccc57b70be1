"""The data folder of a service: its jobs and plans, uploads, and a fleet's history.

DIR/tokenfleet.db   jobs, plans, what was served (SQLite)      DIR/uploads/   traces by content
DIR/history/        finished requests (Parquet)                DIR/runner.lock

The SQLite file's schema is brought up to date when it is opened; it is written one transaction at a time.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from controlplane.errors import BadInput

VARIABLE = "TOKENFLEET_DATA"
# One script for each version of the schema; a script that has been released is never changed.
VERSIONS = (Path(__file__).with_name("schema_1.sql").read_text(encoding="utf-8"),)
BUSY_S = 20.0


def default_data_folder() -> Path:
    """$TOKENFLEET_DATA, else the user's data folder as the XDG directories have it."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "tokenfleet"


def made_folder(folder: Path) -> Path:
    """`folder`, there and writable. Raises BadInput, one line."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise BadInput(f"--data: {folder}: cannot be written")
    except OSError as error:
        raise BadInput(f"--data: {folder}: cannot be made: {error.strerror}") from None
    return folder


class RunnerLock:
    """Held by the one process that runs the folder's jobs.

    The kernel releases it when that process ends, however it ends. So the process that gets it knows that a
    job still marked as running is not, without a clock or a lease that could be wrong.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "runner.lock"
        self._handle: int | None = None

    def take(self) -> bool:
        """Try to take the lock, without waiting; returns whether this process holds it."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._handle = handle
        return True

    def release(self) -> None:
        """Let another process take it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Database:
    """Two connections, shared by the threads of a process: one writes, one transaction at a time; one reads.

    A commit waits for the disk, for seconds where others write to it. A reader does not wait with it.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises BadInput where it is of a newer schema or no database."""
        self.path = path
        self._writing, self._reading = Lock(), Lock()
        try:
            self._writer = self._opened()
            # A reader never waits for a writer; every commit is on the disk before it is answered.
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.execute("PRAGMA synchronous = FULL")
            self._writer.execute("PRAGMA foreign_keys = ON")
            self._upgrade()
            self._reader = self._opened()
            self._reader.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            raise BadInput(f"{path}: cannot be opened as a database: {error}") from None

    def _opened(self) -> sqlite3.Connection:
        made = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        made.row_factory = sqlite3.Row
        return made

    def _upgrade(self) -> None:
        with self.transaction() as cursor:
            version = int(cursor.execute("PRAGMA user_version").fetchone()[0])
            if version > len(VERSIONS):
                raise BadInput(
                    f"{self.path}: schema {version}, this version knows {len(VERSIONS)};"
                    " use a newer tokenfleet, or another --data"
                )
            for script in VERSIONS[version:]:
                # Not executescript, which would commit what came before it.
                for statement in script.split(";"):
                    cursor.execute(statement)
            if version < len(VERSIONS):
                cursor.execute(f"PRAGMA user_version = {len(VERSIONS)}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        """All of it or nothing; no other process writes meanwhile."""
        with self._writing:
            cursor = self._writer.cursor()
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
            except BaseException:
                cursor.execute("ROLLBACK")
                raise
            cursor.execute("COMMIT")

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """The answer to a query that changes nothing, of what has been committed."""
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()
