"""Atomic file writes: a file appears whole or not at all.

The bytes go to a temporary file in the target's folder, are forced to disk, and are renamed over the target.
When the writing ends early (a full disk, Ctrl-C), the target stays as it was and no temporary file is left.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from controlplane.errors import BadInput


def write_files(contents: Mapping[Path, str]) -> None:
    """Write every text to its path; none of them appears unless all could be written.

    Folders are made as needed; a failed write removes those it made. Raises BadInput where the disk is full
    or a path cannot be written.
    """
    made: list[Path] = []
    try:
        with ExitStack() as held:
            for path, text in contents.items():
                with _told_of(path):
                    made += [parent for parent in path.parents if not parent.exists()][::-1]
                    path.parent.mkdir(parents=True, exist_ok=True)
                file = held.enter_context(whole_file(path, overwrite=True))
                with _told_of(path):
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
    except BaseException:
        for folder in reversed(made):
            with suppress(OSError):  # another process may have put a file there
                folder.rmdir()
        raise


@contextmanager
def _told_of(path: Path) -> Iterator[None]:
    """Raise BadInput, in one line, for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from None


def refuse_unwritable(paths: Iterable[Path]) -> None:
    """Raise BadInput if one of the files could not be written, before the work whose result they take.

    Folders that are missing are tried in the nearest one that is there; nothing is left behind.
    """
    for path in paths:
        with _told_of(path):
            _refuse_no_file(path)
            folder = next(parent for parent in path.parents if parent.exists())
            with tempfile.TemporaryDirectory(prefix=f".{path.name[:100]}.", dir=folder):
                pass


def refuse_to_replace(path: Path, overwrite: bool) -> None:
    """Raise BadInput if `path` cannot become a file, or is one and `overwrite` was not asked for."""
    _refuse_no_file(path)
    if path.exists() and not overwrite:
        raise BadInput(f"{path}: exists already; give another name or --overwrite")
    if not path.parent.is_dir():
        raise BadInput(f"{path}: there is no folder {path.parent}")


def _refuse_no_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        kind = "is a folder" if path.is_dir() else "not a regular file"
        raise BadInput(f"{path}: {kind}; expected the name of a file to write")


@contextmanager
def whole_file(path: Path, overwrite: bool = False) -> Iterator[BinaryIO]:
    """A file to write bytes to, which becomes `path` when the block ends without an error.

    Raises BadInput if the target may not be replaced or the system refuses a write.
    """
    refuse_to_replace(path, overwrite)
    with _told_of(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", suffix=".part", dir=path.parent)
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(file.fileno(), 0o644)  # mkstemp makes files only their owner can read
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def cache_folder(name: str) -> Path:
    """The folder of that name in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tokenfleet" / name


def keep_newest(paths: Iterable[Path], most: int) -> None:
    """Remove the oldest of these files beyond `most`."""
    for path in sorted(paths, key=lambda path: path.stat().st_mtime)[:-most]:
        path.unlink(missing_ok=True)
