"""The planning of one family of scenarios: the function that every process, local or remote, runs.

A *family* are scenarios of the same requests, targets, policy, engine mode and seed. They differ in what
needs no simulation of its own, so one process plans them and remembers its replays. A replay is a function of
requests, workers, targets, policy, seed and draw; prices, confidence and what else is on offer are none of
its arguments. So scenarios that differ only there share their replays, and their plans are those that each
would have alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controlplane.errors import ControlPlaneError
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
