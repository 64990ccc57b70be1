"""One scenario: a plan request with some options changed, and the plan that answers it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from tokenfleet.planning.inputs import Bias, gather
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Inputs
from tokenfleet.traces import Trace
from tokenfleet.whatif.axes import Changes


@dataclass(frozen=True)
class Task:
    """A scenario ready to be planned, by whichever process: nothing in it is read from a file any more."""

    number: int
    workload: Workload
    worker_types: tuple[WorkerType, ...]
    question: PlanRequest
    inputs: Inputs
    scheduled: bool


@dataclass(frozen=True)
class Scenario:
    """A cell of the grid: what was changed, how to ask for it alone, and its plan or why there is none.

    `plan` is the same whether it was made now, elsewhere, or last week.
    """

    changes: Changes
    command: str
    plan: PlanFile | None
    error: str = ""

    @property
    def feasible(self) -> bool:
        return self.plan is not None and self.plan.feasible


def prepared(
    number: int, trace: Trace, request: PlanRequest, scheduled: bool, bias: Bias | None, today: date | None
) -> Task:
    """The planner's inputs for a trace as read. Raises BadInput or ProfileMissing."""
    gathered = gather(trace, request, bias, today)
    return Task(number, gathered.workload, gathered.worker_types, request, gathered.inputs, scheduled)
