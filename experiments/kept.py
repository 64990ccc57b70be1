"""Results of a long experiment's parts, kept in a folder: run again, it goes on from there.

A part is known by its name alone. The folder belongs to one state of the code: whoever changes what a part
would say takes a new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """The folder; None keeps nothing."""

    folder: Path | None = None

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns (anything that JSON can hold), read where it is known, else made and kept."""
        if self.folder is None:
            return work()
        file = self.folder / f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', name)}.json"
        if file.exists():
            return json.loads(file.read_text())
        found = work()
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(found))
        unfinished.rename(file)  # a part is there whole or not at all
        return found
