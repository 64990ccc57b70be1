"""The scaler's counts on disk: a controller that starts again forecasts from the days before it.

Written when a bin closes, whole beside its place and then renamed into it: a controller killed at any time
leaves the file of some moments ago. Counts by bin, no requests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from controlplane.scaler.state import Scaling, ScalingSettings, resumed, to_keep

SCHEMA = "tokenfleet.demand/1"


class DemandFile:
    """The file, for one controller at a time; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._bins: list[int] | None = None

    def read(self, settings: ScalingSettings | None, now_s: float) -> Scaling:
        """The scaler's state as far as the file knows it; an empty one where it does not, with the reason."""
        if self._path is None or settings is None or not self._path.exists():
            return Scaling()
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
            if said["schema"] != SCHEMA:
                raise BadInput(f"schema: expected {SCHEMA}, got {said['schema']}")
            return resumed(settings, said["kept"], max(time.time() - float(said["unix_s"]), 0.0), now_s)
        except (OSError, ValueError, KeyError, TypeError, BadInput) as error:
            print(f"controller: {self._path}: the demand before is not known: {error}", file=sys.stderr)
            return Scaling()

    def write(self, state: Scaling, now_s: float) -> None:
        """Keep the state's bins, if one has closed since the last time. A full disk ends nothing else."""
        pasts = [outlook.past for outlook in (state.far, state.soon)]
        bins = [0 if past is None else past.first_bin + len(past.closed) for past in pasts]
        if self._path is None or bins == self._bins:
            return
        self._bins = bins
        said: dict[str, Any] = {"schema": SCHEMA, "unix_s": time.time(), "kept": to_keep(state, now_s)}
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(said), encoding="utf-8")
            os.replace(beside, self._path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            print(f"controller: {self._path}: cannot be written: {error.strerror}", file=sys.stderr)
