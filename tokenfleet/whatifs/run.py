"""The run of a grid from its options to its scenarios: prepare, look up the cache, plan the rest, keep it.

Families of scenarios run side by side: in this process, in processes of this machine, or as Ray tasks on
many. All three run `solve`, so their results are the same to the byte.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from controlplane.errors import BadInput, ControlPlaneError
from dataplane.startup import packages_path, use_kernel_cache
from tokenfleet.planning.inputs import Bias
from tokenfleet.planning.plan_file import PlanFile, parse_plan
from tokenfleet.planning.request import PlanRequest, command_line
from tokenfleet.traces import Trace
from tokenfleet.whatifs.axes import Changes, Scenario, Task, changed, prepared
from tokenfleet.whatifs.solve import Cache, Family, Result, families, solve

# Axes whose price shows in the schedule: when more traffic needs a worker, what a cold start costs.
_SCHEDULED = ("rate", "cold-start")


def planned(
    trace: Trace,
    request: PlanRequest,
    cells: Sequence[Changes],
    *,
    source: Sequence[str] = (),
    bias_of: Callable[[str], Bias] | None = None,
    jobs: int = 1,
    ray: str | None = None,
    cache: Cache | None = None,
    today: date | None = None,
    told: Callable[[], None] = lambda: None,
) -> tuple[list[Scenario], list[str]]:
    """The scenarios of the cells, in their order, and the warnings of their inputs.

    `source` is where the trace comes from, in the words of a command line; `bias_of` finds a kept plan's
    bias. `jobs` processors of this machine, or the Ray cluster at `ray`; the answer does not depend on
    which. Each result is kept in `cache` once it is there. `told` is called after each. Raises BadInput
    where no cell can be planned and all for the same reason.
    """
    cache = cache or Cache(None)
    scenarios, tasks, warnings = _prepared(trace, request, cells, source, bias_of, today)
    if not tasks and len({one.error for one in scenarios}) == 1:
        raise BadInput(scenarios[0].error)
    for _ in range(len(scenarios) - len(tasks)):
        told()
    results = results_of(tasks, jobs, ray, cache, told)
    found = [
        replace(one, plan=_read(results[i], one), error=results[i]["error"]) if i in results else one
        for i, one in enumerate(scenarios)
    ]
    return found, warnings


def results_of(
    tasks: Sequence[Task], jobs: int, ray: str | None, cache: Cache, told: Callable[[], None]
) -> dict[int, Result]:
    """The result of each task by its number, from the cache or planned and kept there; `told` after each."""
    results: dict[int, Result] = {}
    for task in tasks:
        if (kept := cache.get(task)) is not None:
            results[task.number] = kept
            told()
    by_number = {task.number: task for task in tasks if task.number not in results}
    for number, result in _run(list(by_number.values()), jobs, ray):
        cache.put(by_number[number], result)
        results[number] = result
        told()
    cache.tidy()
    return results


def _read(result: Result, one: Scenario) -> PlanFile | None:
    return None if result["plan"] is None else parse_plan(result["plan"], one.command)


def _prepared(
    trace: Trace,
    request: PlanRequest,
    cells: Sequence[Changes],
    source: Sequence[str],
    bias_of: Callable[[str], Bias] | None,
    today: date | None,
) -> tuple[list[Scenario], list[Task], list[str]]:
    """Every scenario, with its reason where it cannot be planned, and the tasks of those that can."""
    scheduled = request.cold_start_s is not None or any(key in cells[0] for key in _SCHEDULED)
    scenarios, tasks = [], []
    warnings: dict[str, None] = {}
    for number, changes in enumerate(cells):
        command = ""
        try:
            after = changed(request, changes)
            command = command_line(after, source)
            bias = bias_of(after.bias_from) if bias_of and after.bias_from else None
            task = prepared(number, trace, after, scheduled, bias, today)
        except ControlPlaneError as refusal:
            scenarios.append(Scenario(changes, command, None, str(refusal)))
        else:
            scenarios.append(Scenario(changes, command, None))
            tasks.append(task)
            warnings |= {w: None for w in task.inputs.warnings if w not in task.inputs.ages}
    return scenarios, tasks, sorted(warnings)


def _run(tasks: Sequence[Task], jobs: int, ray: str | None) -> Iterator[tuple[int, Result]]:
    if not tasks:
        return
    if ray is None:
        yield from solved(families(tasks), jobs)
    else:
        yield from solved_by_ray(families(tasks), ray)


FAMILIES_A_PROCESS = 2
RAY_LOCAL = "local"
INSTALL = "ray is not installed; pip install --no-deps -r requirements/live-cpu.txt"
_STOP_S = 5.0
_RAY_ATTEMPTS = 3  # it waits 30 s for its own start, too few on a busy machine


def solved(families: Sequence[Family], jobs: int) -> Iterator[tuple[int, Result]]:
    """Every task's number and result, in the order they are done, on `jobs` processors of this machine.

    A process has two families at least: with fewer, most processors would wait for the longest family, and
    each process has the simulator to load. Processors left over simulate in threads.
    """
    processes = max(min(jobs, len(families) // FAMILIES_A_PROCESS), 1)
    spread = [replace(family, threads=max(jobs // processes, 1)) for family in families]
    if processes <= 1:
        for family in spread:
            yield from solve(family)
    else:
        yield from _by_processes(spread, processes)


def _by_processes(families: Sequence[Family], processes: int) -> Iterator[tuple[int, Result]]:
    # A fork of this process would copy its threads' locks; the fork server has none.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    queue = list(families)
    workers: dict[Connection, ForkServerProcess] = {}
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()  # so that the pipe ends with the worker
            workers[ours] = worker
        for pipe in workers:
            pipe.send(queue.pop(0))
        busy = set(workers)
        while busy:
            for pipe in [one for one in wait(list(busy)) if isinstance(one, Connection)]:
                said = _heard(pipe, workers[pipe])
                if said is not None:
                    yield said
                elif queue:
                    pipe.send(queue.pop(0))
                else:
                    pipe.send(None)
                    busy.discard(pipe)
    finally:
        _end(workers)


def _heard(pipe: Connection, worker: ForkServerProcess) -> tuple[int, Result] | None:
    """The next result of a worker; None when its family is done. Raises RuntimeError when it failed."""
    try:
        kind, content = pipe.recv()
    except (EOFError, OSError):
        worker.join(_STOP_S)
        raise RuntimeError(
            f"a what-if process ended before its work was done (exit code {worker.exitcode});"
            " out of memory? Try fewer --jobs"
        ) from None
    if kind == "failed":
        raise RuntimeError(f"a what-if process failed:\n{content}")
    return content if kind == "result" else None


def _work(pipe: Connection) -> None:
    """Solve families until there is none; Ctrl-C is the parent's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_kernel_cache()
    with suppress(EOFError, BrokenPipeError, OSError):  # the parent is gone: so is the work
        while (family := pipe.recv()) is not None:
            try:
                for result in solve(family):
                    pipe.send(("result", result))
            except Exception:
                pipe.send(("failed", traceback.format_exc()))
                return
            pipe.send(("done", None))


def _end(workers: dict[Connection, ForkServerProcess]) -> None:
    for pipe, worker in workers.items():
        pipe.close()
        worker.join(0.0 if worker.is_alive() else _STOP_S)
        if worker.is_alive():
            worker.terminate()
    for worker in workers.values():
        worker.join(_STOP_S)
        if worker.is_alive():
            worker.kill()
            worker.join()
        worker.close()


def solved_by_ray(families: Sequence[Family], address: str) -> Iterator[tuple[int, Result]]:
    """The same on a Ray cluster at `address`, one processor a family; `local` starts one on this machine.

    Raises BadInput where Ray is not installed or no cluster answers there.
    """
    ray = _ray(address)
    try:
        # Streamed: each scenario comes back, and is kept, as soon as its plan is made.
        remote = ray.remote(num_cpus=1, num_returns="streaming", max_retries=0)(_solve_there)
        streams = [remote.remote(family) for family in families]
        while streams:
            (stream, *_), streams = ray.wait(streams, num_returns=1)
            with suppress(StopIteration):
                yield ray.get(next(stream))
                streams.append(stream)
    finally:
        ray.shutdown()


def _solve_there(family: Family) -> Iterator[tuple[int, Result]]:
    use_kernel_cache()
    yield from solve(family)


def _ray(address: str) -> Any:
    """Ray, connected. A cluster started here is not announced and leaves no token behind."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        import ray
    except ImportError:
        raise BadInput(f"--ray: {INSTALL}") from None
    options: dict[str, Any] = {
        "runtime_env": {"env_vars": {"PYTHONPATH": packages_path()}},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if address == RAY_LOCAL:
        options |= {"address": "local", "include_dashboard": False}
    else:
        options |= {"address": address}
    for attempt in range(_RAY_ATTEMPTS):
        try:
            ray.init(**options)
            break
        except Exception as error:  # Ray raises a bare Exception where its own start took too long
            ray.shutdown()
            slow = address == RAY_LOCAL and "timed out" in str(error)
            if attempt + 1 == _RAY_ATTEMPTS or not slow:
                raise BadInput(f"--ray: {address}: {' '.join(str(error).split())[:200]}") from None
    return ray
