"""Plan a family of scenarios: the one function that every process, here or elsewhere, runs.

A *family* are scenarios of the same requests, targets, policy, engine mode and seed. They differ in what
needs no simulation of its own, so they are planned by one process, which remembers its replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from controlplane.errors import ControlPlaneError
from tokenfleet.plan import make_plan
from tokenfleet.plan_json import plan_json
from tokenfleet.planning.threads import threads
from tokenfleet.whatifs.remembered import Memory, workload_digest
from tokenfleet.whatifs.scenario import Task

Result = dict[str, Any]  # {"plan": tokenfleet.plan/1 or None, "error": str}


@dataclass(frozen=True)
class Family:
    """Tasks that share their replays, and the threads they may simulate on."""

    tasks: tuple[Task, ...]
    threads: int = 1


def families(tasks: Sequence[Task]) -> list[Family]:
    """Tasks by what their replays depend on; those that simulate longest first, so that none is left last."""
    found: dict[object, list[Task]] = {}
    for task in tasks:
        asked = task.question
        modes = tuple(sorted({str(offer.profile.engine.mode) for offer in task.offers}))
        key = (workload_digest(task.workload), asked.slo, asked.policy, asked.seed, modes)
        found.setdefault(key, []).append(task)
    # Workers, and with them events, grow with the rate.
    ranked = sorted(found.values(), key=lambda of: (-of[0].workload.rate_rps * len(of), of[0].number))
    return [Family(_sharing(of)) for of in ranked]


def _sharing(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """The tasks with one workload among them all, which is then sent to a process only once."""
    return tuple(replace(task, workload=tasks[0].workload) for task in tasks)


def solve(family: Family) -> Iterator[tuple[int, Result]]:
    """The number and the result of each task, as soon as it is there. What has no plan has its reason."""
    memory = Memory()
    with threads(family.threads) as pool:
        for task in family.tasks:
            try:
                plan = make_plan(
                    task.workload,
                    task.offers,
                    task.question,
                    task.inputs,
                    pool,
                    explained=False,
                    scheduled=task.scheduled,
                    worlds_of=memory.worlds,
                )
            except ControlPlaneError as refusal:
                yield task.number, {"plan": None, "error": str(refusal)}
            else:
                yield task.number, {"plan": plan_json(plan), "error": ""}
