"""The fleet log: the workers that a fleet had and its scaler's rule, on disk with its requests.

`fleet-<day>.jsonl`, one for each day (UTC), has two kinds of lines. `FleetSpec` is what the fleet is made of,
at the beginning of each file and where step times have changed. `Look` is its workers by state. A look holds
until the next one, for at most LASTS_S: after that the fleet's state is unknown. Times are Unix seconds. A
day takes some 400 kB; days go with the history's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import IO, Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput, ControlPlaneError
from controlplane.scaler.state import Scaling, ScalingSettings
from controlplane.snapshot import DRAINING, SERVING, STARTING, Snapshot
from controlplane.types import SloClass
from controlplane.worker_type import WorkerType

DAY_S = 86_400.0
LASTS_S = 75.0
EVERY_S = 60.0  # a look is written though nothing has changed
RULE_EVERY_S = 5.0  # and at most so often where only the rule has
STEPS_EVERY_S = 600.0
WINDOW_S = 300.0
SHORTEST_S = 60.0  # of a stretch of the log

Count = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class Ruled(msgspec.Struct, frozen=True, array_like=True):
    """The scaler's rule (scaler.state.Rule): the workers it asked for, its line, its bounds."""

    workers: Count
    slope: Number
    intercept: Number
    given_slope: Number
    low: Count
    high: Count | None


class Look(msgspec.Struct, frozen=True, tag="look", tag_field="what"):
    """The fleet at one time: by type the workers that start, serve and drain; the rule, where one decided.

    `fixed`: an operator fixed the number, or nothing scales this fleet.
    """

    at_s: float
    workers: dict[str, tuple[Count, Count, Count]]
    cold_start_s: Annotated[float, msgspec.Meta(ge=0)]
    fixed: bool
    rule: Ruled | None = None


def look_of(
    seen: Snapshot, at_s: float, settings: ScalingSettings | None, state: Scaling, fixed: bool = False
) -> Look:
    """The look for a snapshot at a Unix time. `state`: the scaler's after it; `settings` None: no rule."""
    of = Counter((w.kind, w.state) for w in seen.workers)
    counts = {kind: (of[kind, STARTING], of[kind, SERVING], of[kind, DRAINING]) for kind, _ in of}
    rule, ruled = state.rule, None
    if rule is not None and settings is not None:
        line, limits = (rule.line.workers_per_rps, rule.line.intercept), settings.limits
        ruled = Ruled(rule.workers, *line, rule.given_slope, limits.low, limits.high)
    return Look(at_s, counts, seen.cold_start_s, fixed, ruled)


class FleetSpec(msgspec.Struct, frozen=True, tag="fleet", tag_field="what"):
    """What a fleet is made of: its types with the step times known by now, and what is asked of it."""

    at_s: float
    types: tuple[WorkerType, ...]
    policy: str
    attainment: float
    classes: tuple[SloClass, ...] = ()


LINE: msgspec.json.Decoder[Look | FleetSpec] = msgspec.json.Decoder(Look | FleetSpec)


class FleetLog:
    """The log's writer, of one process at a time. A disk that is full ends the log and nothing else."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._day = ""
        self._look: Look | None = None
        self._fleet: FleetSpec | None = None

    def write(self, look: Look, fleet: FleetSpec) -> None:
        """Keep a look where it is news, and the fleet where its types are."""
        if self._folder is None:
            return
        try:
            is_new = self._open(self._folder, look.at_s)
            if is_new or self._fleet is None or _differ(self._fleet, fleet):
                self._add(fleet)
                self._fleet = fleet
            if is_new or self._look is None or _is_news(self._look, look):
                self._add(look)
                self._look = look
        except OSError as error:
            print(f"fleet log: ends here: {self._folder}: {error.strerror}", flush=True)
            self._folder = None

    def close(self) -> None:
        """End the log."""
        if self._file is not None:
            self._file.close()
        self._folder = self._file = None

    def _open(self, folder: Path, at_s: float) -> bool:
        """Open the day's file, if it is not; whether it was opened now. Half a line at its end goes."""
        day = day_of(at_s)
        if self._file is not None and day == self._day:
            return False
        if self._file is not None:
            self._file.close()
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"fleet-{day}.jsonl").open("a+b", buffering=0)
        file.seek(0)
        whole = file.read()
        file.truncate(whole.rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        self._file, self._day = file, day
        return True

    def _add(self, line: Look | FleetSpec) -> None:
        assert self._file is not None
        self._file.write(msgspec.json.encode(line) + b"\n")


def day_of(at_s: float) -> str:
    """The day (UTC) of a Unix time, as files are named."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d}"


def day_begin_s(day: str) -> float:
    """When a day begins. Raises BadInput for what is no day."""
    try:
        return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise BadInput(f"fleet log: {day!r} is no day such as 2026-11-22") from None


def _is_news(before: Look, now: Look) -> bool:
    passed_s = now.at_s - before.at_s
    if before.workers != now.workers or before.fixed != now.fixed or not 0 <= passed_s < EVERY_S:
        return True
    return before.rule != now.rule and passed_s >= RULE_EVERY_S


def _differ(before: FleetSpec, now: FleetSpec) -> bool:
    """Whether the fleet is made of something else, or its step times have been others for a while."""
    known = [[t.known_profile is None for t in fleet.types] for fleet in (before, now)]
    same = before.types == now.types and before.classes == now.classes and before.policy == now.policy
    return known[0] != known[1] or (not same and not 0 <= now.at_s - before.at_s < STEPS_EVERY_S)


def logged_days(folder: Path) -> list[str]:
    """The days that have a log, oldest first."""
    return sorted(path.stem.removeprefix("fleet-") for path in folder.glob("fleet-????-??-??.jsonl"))


def read_fleet_log(folder: Path, start_s: float, end_s: float) -> tuple[list[Look], list[FleetSpec]]:
    """The looks that tell of [start_s, end_s), and what the fleet was made of, both in order of time.

    Raises BadInput naming the line that cannot be read; half a line at a file's end is none.
    """
    looks: list[Look] = []
    fleets: list[FleetSpec] = []
    for day in logged_days(folder):
        begin_s = day_begin_s(day)
        if begin_s + DAY_S <= start_s - LASTS_S or begin_s >= end_s:
            continue
        for line in _lines(folder / f"fleet-{day}.jsonl"):
            if line.at_s >= end_s:
                continue
            if isinstance(line, FleetSpec):
                fleets.append(line)
            elif line.at_s >= start_s - LASTS_S:
                looks.append(line)
    return sorted(looks, key=lambda look: look.at_s), sorted(fleets, key=lambda fleet: fleet.at_s)


@dataclass(frozen=True)
class LogWindows:
    """The looks of a log, cut into windows: `pieces` are (window, look, seconds), `stretch` numbers the
    uninterrupted stretches of the log that windows are of."""

    windows: NDArray[np.float64]
    stretch: NDArray[np.int64]
    pieces: list[tuple[int, Look, float]]

    @classmethod
    def of(cls, looks: Sequence[Look], start_s: float, end_s: float) -> LogWindows:
        """Of the looks that tell of [start_s, end_s)."""
        stretches: list[list[tuple[float, float, Look]]] = []
        for look, next_s in zip(looks, [*(after.at_s for after in looks[1:]), end_s], strict=True):
            begin_s, until_s = max(look.at_s, start_s), min(look.at_s + LASTS_S, next_s, end_s)
            if until_s <= begin_s:
                continue
            if stretches and stretches[-1][-1][1] == begin_s:
                stretches[-1].append((begin_s, until_s, look))
            else:
                stretches.append([(begin_s, until_s, look)])
        windows: list[tuple[float, float]] = []
        numbers: list[int] = []
        pieces: list[tuple[int, Look, float]] = []
        for number, stretch in enumerate(s for s in stretches if s[-1][1] - s[0][0] >= SHORTEST_S):
            begin_s, until_s = stretch[0][0], stretch[-1][1]
            count = max(round((until_s - begin_s) / WINDOW_S), 1)
            edges = np.linspace(begin_s, until_s, count + 1)
            for from_s, to_s, look in stretch:
                first, last = np.searchsorted(edges, [from_s, to_s], side="right") - 1
                for w in range(int(first), min(int(last), count - 1) + 1):
                    seconds = min(to_s, edges[w + 1]) - max(from_s, edges[w])
                    if seconds > 0:
                        pieces.append((len(windows) + w, look, float(seconds)))
            windows += pairwise(edges.tolist())
            numbers += [number] * count
        return cls(np.array(windows).reshape(-1, 2), np.array(numbers, np.int64), pieces)

    @property
    def seconds(self) -> NDArray[np.float64]:
        return np.asarray(self.windows[:, 1] - self.windows[:, 0])


def _lines(path: Path) -> Sequence[Look | FleetSpec]:
    found: list[Look | FleetSpec] = []
    try:
        whole = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    for number, text in enumerate(whole[: whole.rfind(b"\n") + 1].splitlines(), 1):
        try:
            found.append(LINE.decode(text))
        except (msgspec.MsgspecError, ControlPlaneError, UnicodeDecodeError, ValueError) as error:
            raise BadInput(f"{path}: line {number}: {' '.join(str(error).split())[:200]}") from None
    return found
