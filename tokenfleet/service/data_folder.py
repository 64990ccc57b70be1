"""The data folder of a service: its jobs and plans, uploads, and a fleet's history.

DIR/tokenfleet.db   jobs, plans, what was served (SQLite)      DIR/uploads/   traces by content
DIR/history/        finished requests (Parquet)                DIR/runner.lock
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from controlplane.errors import BadInput

VARIABLE = "TOKENFLEET_DATA"


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
