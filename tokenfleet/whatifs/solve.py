"""The planning of one family of scenarios, which every process, local or remote, runs; and its cache.

A *family* are scenarios of the same requests, targets, policy, engine mode and seed. They differ in what
needs no simulation of its own, so one process plans them and remembers its replays. A replay is a function of
requests, workers, targets, policy, seed and draw; prices, confidence and what else is on offer are none of
its arguments. So scenarios that differ only there share their replays, and their plans are those that each
would have alone.

The cache has one file for each planned scenario, named by a digest of everything that its plan depends on.
That is the requests, the workers and prices on offer, the request with its seed, and the planner's own
source. A file is there whole or not at all, so an interrupted grid continues where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from controlplane.errors import ControlPlaneError
from tokenfleet.files import keep_newest, write_files
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.request import placement_settings
from tokenfleet.planning.search import Replayer, workload_digest
from tokenfleet.planning.threads import open_threads
from tokenfleet.report.plan_json import plan_json
from tokenfleet.whatifs.axes import Task

Result = dict[str, Any]  # {"plan": tokenfleet.plan/1 or None, "error": str}


@dataclass(frozen=True)
class Family:
    """Tasks that share their replays, and the threads they may simulate on."""

    tasks: tuple[Task, ...]
    threads: int = 1


def families(tasks: Sequence[Task]) -> list[Family]:
    """Tasks by what their replays depend on; those that simulate longest first, so that none is left last."""
    groups: dict[object, list[Task]] = {}
    for task in tasks:
        request = task.request
        modes = tuple(sorted({str(t.profile.engine.mode) for t in task.worker_types}))
        key = (
            workload_digest(task.workload),
            request.slo,
            task.inputs.classes,
            request.policy,
            placement_settings(request),
            request.seed,
            modes,
        )
        groups.setdefault(key, []).append(task)
    # Workers, and with them events, grow with the rate.
    ranked = sorted(groups.values(), key=lambda of: (-of[0].workload.rate_rps * len(of), of[0].number))
    # One workload among them all is sent to a process only once.
    return [Family(tuple(replace(task, workload=of[0].workload) for task in of)) for of in ranked]


def solve(family: Family) -> Iterator[tuple[int, Result]]:
    """The number and the result of each task, as soon as ready. A task without a plan has its reason."""
    replayer = Replayer()
    with open_threads(family.threads) as threads:
        for task in family.tasks:
            try:
                plan = make_plan(
                    task.workload,
                    task.worker_types,
                    task.request,
                    task.inputs,
                    threads,
                    explained=False,
                    scheduled=task.scheduled,
                    replayer=replayer,
                )
            except ControlPlaneError as refusal:
                yield task.number, {"plan": None, "error": str(refusal)}
            else:
                yield task.number, {"plan": plan_json(plan), "error": ""}


SCHEMA = "tokenfleet.scenario/1"
MOST_FILES = 4000  # some 20 kB each
_PACKAGES = Path(__file__).resolve().parents[2]
# What a plan's numbers come from. The command line, the reports and the live plane have no say in them.
_SOURCES = (
    "controlplane/**/*.py",
    "dataplane/simulated/*.py",
    "tokenfleet/planning/*.py",
    "tokenfleet/whatifs/solve.py",
)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A digest of the planner's source: another planner's answers are not taken for this one's."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGES.glob(pattern)):
            digest.update(path.relative_to(_PACKAGES).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(task: Task) -> str:
    """The digest of all that decides a task's result; warnings are only shown, so they have no part in it."""
    inputs = task.inputs
    parts = (
        code_digest(),
        workload_digest(task.workload),
        repr(task.worker_types),
        repr(task.request),
        repr(replace(inputs, warnings=(), ages=())),
        repr(task.scheduled),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Cache:
    """Results in a folder; without one it knows nothing and keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @property
    def is_kept(self) -> bool:
        """Whether it has a folder."""
        return self._folder is not None

    def get(self, task: Task) -> Result | None:
        """The result of a task planned before; None where there is none, or what is there cannot be read."""
        if self._folder is None:
            return None
        key = key_of(task)
        try:
            kept = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(kept, dict) or kept.get("schema") != SCHEMA or kept.get("key") != key:
            return None
        result: Result = {"plan": kept.get("plan"), "error": kept.get("error", "")}
        if result["plan"] is not None:
            # Of today, not of then: a price list or a profile may have grown old since.
            of = {"warnings": list(task.inputs.warnings), "ages": list(task.inputs.ages)}
            result["plan"]["inputs"] |= of
        return result

    def put(self, task: Task, result: Result) -> None:
        """Keep a result. Raises BadInput where the folder cannot be written."""
        if self._folder is None:
            return
        key = key_of(task)
        write_files({self._path(key): json.dumps({"schema": SCHEMA, "key": key, **result})})

    def tidy(self) -> None:
        """Drop the oldest files beyond `MOST_FILES`."""
        if self._folder is None or not self._folder.is_dir():
            return
        keep_newest(self._folder.glob("*/*.json"), MOST_FILES)

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key[2:]}.json"
