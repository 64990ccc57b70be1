"""Files that are there whole or not at all: written beside their place, synced, then renamed into it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from controlplane.errors import BadInput


def write_files(contents: Mapping[Path, str]) -> None:
    """Write every text to its path; none of them appears unless all could be written.

    Folders are made as needed. Raises BadInput where the disk is full or a path cannot be written.
    """
    ready: list[tuple[str, Path]] = []
    path = Path()
    try:
        for path, text in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise BadInput(f"{path}: is a folder, expected a file")
            if path.exists() and not path.is_file():
                raise BadInput(f"{path}: not a regular file; expected the name of a file to write")
            handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            ready.append((beside, path))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(beside, 0o644)  # mkstemp makes files only their owner can read
        while ready:
            beside, path = ready[0]
            os.replace(beside, path)
            ready.pop(0)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        # Whatever ended the work (an error, Ctrl-C), nothing half-written stays behind.
        for beside, _ in ready:
            Path(beside).unlink(missing_ok=True)
