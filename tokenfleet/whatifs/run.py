"""A grid from its flags to its scenarios: prepare, look up what is known, plan the rest, keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date

from controlplane.errors import BadInput, ControlPlaneError
from tokenfleet.traces import Trace
from tokenfleet.whatifs.axes import Changes
from tokenfleet.whatifs.cache import Cache
from tokenfleet.whatifs.scenario import Asked, Scenario, Task, changed, plan_command_line, prepared
from tokenfleet.whatifs.side_by_side import solved, solved_by_ray
from tokenfleet.whatifs.solve import Result, families

# Axes whose price shows in the schedule: when more traffic needs a worker, what a cold start costs.
_SCHEDULED = ("rate", "cold-start")


def planned(
    trace: Trace,
    asked: Asked,
    cells: Sequence[Changes],
    *,
    jobs: int = 1,
    ray: str | None = None,
    cache: Cache | None = None,
    today: date | None = None,
    told: Callable[[], None] = lambda: None,
) -> tuple[list[Scenario], list[str]]:
    """The scenarios of the cells, in their order, and the warnings of their inputs.

    `jobs` processors of this machine, or the Ray cluster at `ray`; the answer does not depend on which. Each
    result is kept in `cache` once it is there. `told` is called after each. Raises BadInput where no cell
    can be planned and all for the same reason.
    """
    cache = cache or Cache(None)
    scheduled = asked.cold_start_s is not None or any(key in cells[0] for key in _SCHEDULED)
    scenarios, tasks, warnings = _prepared(trace, asked, cells, scheduled, today)
    if not tasks and len({one.error for one in scenarios}) == 1:
        raise BadInput(scenarios[0].error)
    results: dict[int, Result] = {}
    for task in tasks:
        if (kept := cache.get(task)) is not None:
            results[task.number] = kept
    for _ in range(len(scenarios) - len(tasks) + len(results)):
        told()
    by_number = {task.number: task for task in tasks if task.number not in results}
    for number, result in _run(list(by_number.values()), jobs, ray):
        cache.put(by_number[number], result)
        results[number] = result
        told()
    cache.tidy()
    found = [
        replace(one, plan=results[i]["plan"], error=results[i]["error"]) if i in results else one
        for i, one in enumerate(scenarios)
    ]
    return found, warnings


def _prepared(
    trace: Trace, asked: Asked, cells: Sequence[Changes], scheduled: bool, today: date | None
) -> tuple[list[Scenario], list[Task], list[str]]:
    """Every scenario, with its reason where it cannot be planned, and the tasks of those that can."""
    scenarios, tasks = [], []
    warnings: dict[str, None] = {}
    for number, changes in enumerate(cells):
        command = ""
        try:
            after = changed(asked, changes)
            command = plan_command_line(after)
            task = prepared(number, trace, after, scheduled, today)
        except ControlPlaneError as refusal:
            scenarios.append(Scenario(changes, command, None, str(refusal)))
        else:
            scenarios.append(Scenario(changes, command, None))
            tasks.append(task)
            warnings.update(dict.fromkeys(task.inputs.warnings))
    return scenarios, tasks, sorted(warnings)


def _run(tasks: Sequence[Task], jobs: int, ray: str | None) -> Iterator[tuple[int, Result]]:
    if not tasks:
        return
    if ray is None:
        yield from solved(families(tasks), jobs)
    else:
        yield from solved_by_ray(families(tasks), ray)
