"""A measurement file that grows: a CSV of steps, and beside it the environment and the progress as JSON.

`M.csv` is only ever appended to, one visit to a grid point at a time. `M.csv.json` has the environment, how
often each point was visited and the CSV's length after the last visit; anything beyond that length was being
written when the process ended, and is cut off before the measurement continues.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput
from tokenfleet.files import write_files

if TYPE_CHECKING:
    from dataplane.live.engine_api.step_trace import Step

SCHEMA = "tokenfleet.measurements/3"


class MeasurementFile:
    """The two files at a path; opening them raises BadInput unless they are new or of this environment."""

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path, self.beside = path, beside(path)
        self._environment = environment
        self.visits: dict[str, int] = {}
        self._bytes = 0
        if self.beside.exists():
            self._resume()
        elif path.exists():
            raise BadInput(f"{path}: is there already, without {self.beside.name}; give another --out")

    def add(self, point: str, steps: Sequence[Step], at_s: float) -> None:
        """Append the steps of one visit to a point, which began at `at_s` (Unix time)."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._bytes == 0:
            columns = [f.name for f in fields(steps[0])]
            writer.writerow([*columns, "point", "repeat", "at_s"])
        visits = self.visits.get(point, 0) + 1
        for step in steps:
            values = [f"{v:.7g}" if isinstance(v, float) else v for v in astuple(step)]
            writer.writerow([*values, point, visits, f"{at_s:.3f}"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
        self._bytes += len(text.getvalue().encode())
        self.visits[point] = visits
        state = {
            "schema": SCHEMA,
            "environment": self._environment,
            "bytes": self._bytes,
            "visits": self.visits,
        }
        write_files({self.beside: json.dumps(state, indent=1) + "\n"})

    def _resume(self) -> None:
        state = read_beside(self.path)
        theirs = state["environment"]
        for name in sorted({*theirs, *self._environment}):
            here, there = self._environment.get(name), theirs.get(name)
            if here != there:
                raise BadInput(
                    f"{self.path}: {name}: was measured with {there!r}, this engine has {here!r};"
                    " give another --out"
                )
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < state["bytes"]:
            raise BadInput(f"{self.path}: has {size} bytes, {self.beside.name} says {state['bytes']}")
        if size > state["bytes"]:
            os.truncate(self.path, state["bytes"])
        self.visits, self._bytes = dict(state["visits"]), int(state["bytes"])


def beside(path: Path) -> Path:
    """The path of a measurement file's environment."""
    return path.with_name(path.name + ".json")


def read_beside(path: Path) -> dict[str, Any]:
    """The environment file of measurements at `path`. Raises BadInput for a file of another form."""
    there = beside(path)
    try:
        state = json.loads(there.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{there}: cannot be read: {error}") from error
    good = (
        isinstance(state, dict)
        and state.get("schema") == SCHEMA
        and isinstance(state.get("environment"), dict)
        and isinstance(state.get("bytes"), int)
        and isinstance(state.get("visits"), dict)
    )
    if not good:
        raise BadInput(f"{there}: expected the {SCHEMA} file that `tokenfleet profile` writes")
    return dict(state)
