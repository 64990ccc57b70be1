"""Write a file whole or not at all.

The bytes go to a temporary file beside the target, are forced to disk and renamed over it; whatever ends
the writing early (a full disk, Ctrl-C) leaves the target as it was and no temporary file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from controlplane.errors import BadInput


def refuse_to_replace(path: Path, overwrite: bool) -> None:
    """Raise BadInput if `path` cannot become a file, or is one and `overwrite` was not asked for."""
    if path.is_dir():
        raise BadInput(f"{path}: is a folder; expected the name of a file to write")
    if path.exists() and not path.is_file():
        raise BadInput(f"{path}: not a regular file; expected the name of a file to write")
    if path.exists() and not overwrite:
        raise BadInput(f"{path}: exists already; give another name or --overwrite")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}")


@contextmanager
def whole_file(path: Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """A file to write bytes to, which becomes `path` when the block ends without an error.

    Raises BadInput if the target may not be replaced or the system refuses a write.
    """
    refuse_to_replace(path, overwrite)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from error
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp makes files only their owner can read
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError):
            part.unlink()
