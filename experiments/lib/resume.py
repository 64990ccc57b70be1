"""Finished parts of a long experiment in a folder, so that a script that was stopped goes on where it was.

A part is known by its name alone. The folder belongs to one state of the code and one set of flags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Parts:
    """The folder; None keeps nothing."""

    folder: Path | None = None

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work` (anything that JSON can hold), computed once."""
        found = self.read(name)
        return self.write(name, work()) if found is None else found

    def read(self, name: str) -> Any | None:
        """A part's result; None where it is not finished."""
        file = self._file(name)
        return None if file is None or not file.exists() else json.loads(file.read_text())

    def write(self, name: str, result: Any) -> Any:
        """Keep a part's result and return it; the file is there whole or not at all."""
        file = self._file(name)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".part")
            unfinished.write_text(json.dumps(result, default=float))
            unfinished.rename(file)
        return result

    def _file(self, name: str) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', name)}.json"
