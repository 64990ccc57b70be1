"""Engine measurements: a table of steps (CSV), which grows while it is measured, or a request log (JSONL).

A table has one row a step: `prefill_tokens, sequences, context_tokens, step_s`. Optional columns are
`prefill_sum_sq`, `prefill_sequences`, and labels: `point` and `repeat` (of `tokenfleet profile`), or `worker`
and `kind`, its type (of a running fleet's `steps.csv`). `at_s` is optional too, Unix time: when that visit
began, or the step was over. So is `kv_blocks`: KV blocks in use, with those of the step's own tokens; 0 where
that is not known. A log has one request a line: its token counts and its arrival, first-token and last-token
times. Access logs have TTFT and E2E since the arrival instead. Names are Tokenfleet's or those of common
benchmarks.

`tokenfleet profile` appends to its table `M.csv` one visit to a grid point at a time. `M.csv.json` has the
environment, how often each point was visited and the CSV's length after the last visit. Anything beyond that
length was being written when the process ended: it is cut off before the measurement continues.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.samples import StepSamples, by_point, work_of
from controlplane.workload import Workload
from tokenfleet.field_errors import read_text
from tokenfleet.files import write_files
from tokenfleet.profiles.diagnostics import HostSpeed, host_speed

if TYPE_CHECKING:
    from dataplane.live.engine_api.link import Step


NEEDED = ("prefill_tokens", "sequences", "context_tokens", "step_s")
OPTIONAL = ("prefill_sum_sq", "prefill_sequences", "repeat", "worker", "kind", "point", "at_s", "kv_blocks")
LABELS = ("repeat", "worker", "kind", "point")  # not numbers to fit
LOG_FIELDS = {
    "arrival_s": ("queued_ts", "arrival_s", "arrival_time", "arrival_ts"),
    "first_token_s": ("first_token_ts", "first_token_s", "first_token_time"),
    "last_token_s": ("last_token_ts", "last_token_s", "finish_s", "finished_ts"),
    "prompt_tokens": ("input_toks", "prompt_tokens", "input_tokens", "num_prefill_tokens"),
    "output_tokens": ("output_toks", "output_tokens", "num_decode_tokens"),
}
SINCE_ARRIVAL = {  # as access logs have them
    "first_token_s": ("ttft_s", "ttft"),
    "last_token_s": ("e2e_s", "e2e_latency_s", "e2e_latency", "latency_s"),
}
SCHEMA = "tokenfleet.measurements/4"


@dataclass(frozen=True)
class RequestLog:
    """A real engine's requests, with times in seconds since the first arrival."""

    workload: Workload
    first_token_s: NDArray[np.float64]
    last_token_s: NDArray[np.float64]

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        return self.first_token_s - self.workload.arrival_s

    @property
    def e2e_s(self) -> NDArray[np.float64]:
        return self.last_token_s - self.workload.arrival_s

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """NaN for an output of one token."""
        gaps = self.workload.output_tokens - 1
        return np.where(gaps > 0, (self.last_token_s - self.first_token_s) / np.maximum(gaps, 1), np.nan)

    @property
    def peak_tokens(self) -> int:
        """Prompt and output tokens of the requests that decoded at once, at the fullest moment."""
        tokens = self.workload.prompt_tokens + self.workload.output_tokens
        when = np.concatenate([self.first_token_s, self.last_token_s])
        change = np.concatenate([tokens, -tokens])
        order = np.lexsort((-change, when))  # at one instant those that begin come before those that end
        return int(np.cumsum(change[order]).max())


def is_request_log(path: Path) -> bool:
    """Whether a file holds JSON lines rather than a table: found by content."""
    return read_text(path).lstrip()[:1] == "{"


def read_measurements(path: Path, tell: Callable[[HostSpeed], None] | None = None) -> StepSamples:
    """A table of steps. Raises BadInput naming the file, the line and the column.

    A designed grid's steps are one a batch (`by_point`). With `tell`, and times in the table, they are as at
    the machine's mean speed, and `tell` is given that speed. Otherwise they are as measured.
    """
    names, rows = _steps_table(path)
    if len(kinds := {row["kind"] for row in rows} if "kind" in names else ()) > 1:
        raise BadInput(
            f"{path}: kind: rows of {len(kinds)} worker types ({', '.join(sorted(kinds))}); keep one's"
        )
    column = {name: numbers(path, rows, name) for name in names if name not in LABELS}
    try:
        prefill, sequences, context, step_s = (column[name] for name in NEEDED)
        samples = StepSamples(
            prefill, sequences, context, step_s, _sum_sq(column), kv_blocks=column.get("kv_blocks")
        )
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    if "point" not in names or "repeat" not in names:
        return samples
    points, repeats = [row["point"] for row in rows], [row["repeat"] for row in rows]
    if tell is not None and "at_s" in column:
        speed = speed_of(samples, points, repeats, column["at_s"])
        samples = replace(samples, step_s=samples.step_s / speed.slowness)
        tell(speed)
    return by_point(samples, points, repeats)


def _steps_table(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns and rows of a table of steps; raises BadInput for a column that no step has."""
    names, rows = read_table(path, NEEDED)
    unknown = [name for name in names if name not in (*NEEDED, *OPTIONAL)]
    if unknown or len(set(names)) < len(names):
        odd = unknown[0] if unknown else "twice the same"
        raise BadInput(f"{path}: column {odd!r}: expected {', '.join((*NEEDED, *OPTIONAL))}")
    if not rows:
        raise BadInput(f"{path}: no rows below the header")
    return names, rows


def _sum_sq(column: dict[str, NDArray[np.float64]]) -> NDArray[np.float64] | None:
    if "prefill_sum_sq" in column or "prefill_sequences" not in column:
        return column.get("prefill_sum_sq")
    # Prompts of one length are assumed where only their number is known.
    return np.asarray(column["prefill_tokens"] ** 2 / np.maximum(column["prefill_sequences"], 1), float)


def read_table(path: Path, needed: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """A CSV table's columns and rows, all still text. Raises BadInput where a needed column is missing."""
    lines = read_text(path).splitlines()
    if not any(line.strip() for line in lines):
        raise BadInput(f"{path}: empty; expected columns {', '.join(needed)}")
    try:
        reader = csv.DictReader(lines, skipinitialspace=True, strict=True)
        names = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = names
        rows = list(reader)
    except csv.Error as error:
        raise BadInput(f"{path}: not a CSV table: {error}") from error
    missing = [name for name in needed if name not in names]
    if missing:
        raise BadInput(f"{path}: column {missing[0]} is missing; there are {_listed(names)}")
    return names, rows


def _listed(names: Sequence[str]) -> str:
    """The columns of a header, cut to a line: it may be no header at all."""
    text = ", ".join(names)
    return f"{text[:200]}…" if len(text) > 200 else text or "none"


def speed_of(
    samples: StepSamples, points: Sequence[str], repeats: Sequence[str], at_s: NDArray[np.float64]
) -> HostSpeed:
    """The machine's speed at each step of a designed grid; `at_s` is when the step's visit began."""
    batch = np.unique(work_of(samples, points), axis=0, return_inverse=True)[1].reshape(-1)
    labels = np.column_stack([np.unique(x, return_inverse=True)[1] for x in (points, repeats)])
    visit = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
    # Steps of a visit follow each other: the middle of each is after all before it.
    order = np.argsort(visit, kind="stable")
    ended = np.cumsum(samples.step_s[order])
    first = np.searchsorted(visit[order], visit[order])
    middle = np.empty(len(samples))
    middle[order] = ended - samples.step_s[order] / 2 - (ended - samples.step_s[order])[first]
    return host_speed(batch, visit, at_s + middle, samples.step_s)


def numbers(path: Path, rows: list[dict[str, Any]], name: str) -> NDArray[np.float64]:
    """A column of a table. Raises BadInput naming the row."""
    values = np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        with suppress(TypeError, ValueError):
            values[i] = float(row[name])
        if not math.isfinite(values[i]):
            raise BadInput(f"{path}: row {i + 1}: {name}: must be a number, got {row[name]!r:.60}")
    return values


def read_request_log(path: Path) -> RequestLog:
    """A request log, in order of arrival. Raises BadInput naming the file, the line and the field."""
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}: line {number}: not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise BadInput(f"{path}: line {number}: expected an object, got {str(entry)[:40]!r}")
        arrival_s = _field(path, number, entry, "arrival_s")
        rows.append([_field(path, number, entry, name, arrival_s) for name in LOG_FIELDS])
    if not rows:
        raise BadInput(f"{path}: no requests in it")
    table = np.array(sorted(rows), float)
    arrival, first, last = (table[:, k] - table[0, 0] for k in range(3))
    if (first < arrival).any() or (last < first).any():
        raise BadInput(f"{path}: a request's first token is before its arrival, or its last before its first")
    try:
        workload = Workload(arrival, table[:, 3].astype(np.int64), table[:, 4].astype(np.int64))
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    return RequestLog(workload, first, last)


def _field(path: Path, number: int, entry: dict[str, Any], name: str, arrival_s: float = 0.0) -> float:
    since = SINCE_ARRIVAL.get(name, ())
    for spelling in (*LOG_FIELDS[name], *since):
        if spelling in entry:
            value = entry[spelling]
            good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
            if not good or math.isnan(value):
                raise BadInput(f"{path}: line {number}: {spelling}: must be a number, got {value!r:.60}")
            return float(value) + (arrival_s if spelling in since else 0.0)
    raise BadInput(f"{path}: line {number}: no {' or '.join((*LOG_FIELDS[name], *since))} in it")


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
            raise BadInput(f"{path}: exists already, without {self.beside.name}; give another --output")

    def add(self, point: str, steps: Sequence[Step], at_s: float) -> None:
        """Append the steps of one visit to a point, which began at `at_s` (Unix time)."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._bytes == 0:
            writer.writerow([*steps[0]._fields[:-1], "point", "repeat", "at_s"])
        visits = self.visits.get(point, 0) + 1
        for step in steps:
            values = [f"{v:.7g}" if isinstance(v, float) else v for v in step[:-1]]  # without its age
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
                    " give another --output"
                )
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < state["bytes"]:
            raise BadInput(f"{self.path}: has {size} bytes, {self.beside.name} expects {state['bytes']}")
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
