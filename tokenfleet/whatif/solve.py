"""The planning of one family of scenarios: the function that every process, local or remote, runs.

A *family* are scenarios of the same requests, targets, policy, engine mode and seed. They differ in what
needs no simulation of its own, so one process plans them and remembers its replays. A replay is a function of
requests, workers, targets, policy, seed and draw; prices, confidence and what else is on offer are none of
its arguments. So scenarios that differ only there share their replays, and their plans are those that each
would have alone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np

from controlplane.errors import ControlPlaneError
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.plan_json import plan_json
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.replicates import AS_IT_IS, EVERYTHING, Doubted, Replicates
from tokenfleet.planning.threads import threads
from tokenfleet.whatif.axes import Task

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
        question = task.question
        modes = tuple(sorted({str(t.profile.engine.mode) for t in task.worker_types}))
        key = (
            workload_digest(task.workload),
            question.slo,
            task.inputs.classes,
            question.policy,
            question.priority_headroom,
            question.seed,
            modes,
        )
        groups.setdefault(key, []).append(task)
    # Workers, and with them events, grow with the rate.
    ranked = sorted(groups.values(), key=lambda of: (-of[0].workload.rate_rps * len(of), of[0].number))
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
                    task.worker_types,
                    task.question,
                    task.inputs,
                    pool,
                    explained=False,
                    scheduled=task.scheduled,
                    replicates_of=memory.replicates,
                )
            except ControlPlaneError as refusal:
                yield task.number, {"plan": None, "error": str(refusal)}
            else:
                yield task.number, {"plan": plan_json(plan), "error": ""}


MOST_BYTES = 300_000_000  # of outcomes kept by one process; the least recently used go first


def workload_digest(workload: Workload) -> str:
    """A digest that tells workloads apart by content."""
    digest = hashlib.sha256(repr(workload.slo_classes).encode())
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "priority", "slo_class"):
        digest.update(getattr(workload, name).tobytes())
    digest.update(b"" if workload.weight is None else workload.weight.tobytes())
    for shared in (workload.prefixes, workload.sessions):
        digest.update(b"none" if shared is None else b"known")
        for column in vars(shared).values() if shared is not None else ():
            digest.update(column.tobytes() if isinstance(column, np.ndarray) else repr(column).encode())
    return digest.hexdigest()


class Memory:
    """Outcomes by what they are a function of. Used from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._kept: OrderedDict[tuple[Any, ...], Outcome] = OrderedDict()
        self._most, self._bytes = most_bytes, 0
        self._lock = Lock()
        self.simulated = 0
        self.recalled = 0

    def replicates(
        self,
        workload: Workload,
        slo: Slo,
        policy: str,
        seed: int,
        predictor: LengthTable,
        told: Callable[[], None],
    ) -> Replicates:
        """The same as `Replicates` makes, with replays looked up here before they are simulated."""
        return _Remembering(workload, slo, policy, seed, predictor, told, memory=self)

    def get(self, key: tuple[Any, ...], most: float | None, simulate: Callable[[], Outcome]) -> Outcome:
        """The outcome of `key` when stopped past this share of misses; `simulate` makes it where it is new.

        A run that went to its end answers every question that it would not have been stopped by.
        """
        whole = (*key, None)
        with self._lock:
            found = self._kept.get((*key, most))
            if found is None and (ended := self._kept.get(whole)) is not None:
                within = most is None or ended.misses <= most * ended.workload.requests
                found = ended if within else None
            if found is not None:
                self.recalled += 1
                self._kept.move_to_end(whole if found.complete else (*key, most))
                return found
        outcome = simulate()
        with self._lock:
            self.simulated += 1
            self._keep(whole if outcome.complete else (*key, most), outcome)
        return outcome

    def _keep(self, key: tuple[Any, ...], outcome: Outcome) -> None:
        if key in self._kept:
            return
        self._kept[key] = outcome
        self._bytes += size_of(outcome)
        while self._bytes > self._most and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= size_of(oldest)


def size_of(outcome: Outcome) -> int:
    """Bytes of its columns, its workload's included."""
    workload = outcome.workload
    parts = (outcome, workload, workload.prefixes, workload.sessions)
    columns = [v for part in parts if part is not None for v in vars(part).values()]
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


@dataclass(frozen=True)
class _Remembering(Replicates):
    """Replicates whose replays are remembered."""

    memory: Memory = field(default_factory=Memory)

    @cached_property
    def _digest(self) -> str:
        return workload_digest(self.workload)

    def replay(
        self,
        fleet: Fleet,
        replicate: int = AS_IT_IS,
        *,
        workload: Workload | None = None,
        growth: float = 1.0,
        most_missed: float | None = None,
        doubted: frozenset[Doubted] = EVERYTHING,
    ) -> Outcome:
        groups = tuple(
            (repr(g.worker_type.profile), repr(g.worker_type.kv_link), g.role, g.workers)
            for g in fleet.groups
        )
        of = "" if workload is None else workload_digest(workload)
        drawn = frozenset() if replicate == AS_IT_IS else doubted
        targets = self.slo, self.classes, self.session_s
        asked = *targets, self.agents, growth, self.policy, self.settings, self.seed
        key = (self._digest, of, *asked, groups, replicate, drawn)

        def simulate() -> Outcome:
            return super(_Remembering, self).replay(
                fleet,
                replicate,
                workload=workload,
                growth=growth,
                most_missed=most_missed,
                doubted=doubted,
            )

        return self.memory.get(key, most_missed, simulate)
