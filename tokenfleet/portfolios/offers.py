"""The fleets that the models of a portfolio could have: for each model and GPU type the planner's own.

Each model is planned by itself on every GPU type that it may have, on demand, on spot or both, with its
schedule. It is planned once more on all types that a zone has, which may give a mix. These plans, in each
zone that the model may be in, are the offers among which choose.py chooses.

Where the cheapest fleets of all models exceed a limit of GPUs, mixes are planned again with fewer of those.
Up to four numbers within the limit are tried, spread evenly, and none.

Where the share on spot is limited, there are more offers: the fleet planned on spot, with some of its workers
on demand. Those stay while others come and go. The fleet has as many standby workers, except while none of it
is on spot. Spot interruptions can take fewer of it, so it attains at least what its plan says.

Where several workers may be on a GPU, a model that one worker of one GPU serves is planned once more. Its
workers then have such a part of a GPU (Profile.shared), on demand: a spot interruption would take all that
are on it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from typing import NamedTuple

import numpy as np

from controlplane.errors import BadInput, ControlPlaneError, Infeasible
from controlplane.scaler.bounds import ScheduleInterval
from controlplane.worker_type import WorkerType
from tokenfleet.planning.fleet import Fleet, apportioned
from tokenfleet.planning.inputs import Gathered, gather, within_kv
from tokenfleet.planning.plan_file import PlanFile, parse_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.schedule import paid
from tokenfleet.portfolios.request import AdapterTraffic, Model, Portfolio
from tokenfleet.report.tables import gpu_text
from tokenfleet.traces import Trace, merged, read_traces
from tokenfleet.whatifs.axes import Task
from tokenfleet.whatifs.run import results_of
from tokenfleet.whatifs.solve import Cache

WORKERS_PER_GPU = (2, 4)  # that share one
MIXED = " + "  # between the GPU types of a mix
PARTLY_ON_DEMAND = 8  # numbers of a fleet's workers
FEWER_GPUS = 4  # numbers of a mix's GPUs of a scarce type


class GpuPurchase(NamedTuple):
    """A GPU type, how it is bought, and how many workers are on one.

    `gpu` has all types that a mix may be of. `on_demand`: the workers of a fleet on spot that are on demand.
    While as many or fewer serve, all are. `most`: a type, or "" for all, and its GPUs that a mix may have.
    """

    gpu: str
    is_spot: bool = False
    workers_per_gpu: int = 1
    on_demand: int = 0
    most: tuple[str, int] | None = None

    @property
    def gpus(self) -> list[str]:
        return self.gpu.split(MIXED)

    def __str__(self) -> str:
        part = f" x 1/{self.workers_per_gpu}" if self.workers_per_gpu > 1 else ""
        return f"{MIXED.join(map(gpu_text, self.gpus))}{part}{' on spot' if self.is_spot else ''}"


Without = dict[tuple[int, GpuPurchase], str]  # why a model, by its number, has no fleet of a kind of GPU


@dataclass(frozen=True)
class Made:
    """A model's fleet in one zone, and when it has how many workers.

    `on_demand_usd_per_h`: of a worker on demand, where some of a fleet on spot are on demand.
    """

    model: int
    kind: GpuPurchase
    zone: str | None
    plan: PlanFile
    fleet: Fleet
    stretches: tuple[ScheduleInterval, ...]
    on_demand_usd_per_h: float = 0.0

    @property
    def spares(self) -> int:
        """Standby workers: those beyond the ones that serve, for spot interruptions."""
        return 0 if self.plan.spares is None else self.plan.spares.workers

    def bought(self, workers: int) -> tuple[Counter[str], float, float]:
        """GPUs by type, those of them on spot, and dollars an hour when `workers` are planned.

        Standby workers are on spot, and there are none while all that serve are on demand.
        """
        on_demand = min(self.kind.on_demand, workers - self.spares) if self.kind.on_demand else 0
        fleet = apportioned(self.fleet, on_demand if on_demand == workers - self.spares else workers)
        gpus, usd = gpus_of(fleet), fleet.usd_per_hour or 0.0
        if not on_demand:
            return gpus, float(fleet.gpus * self.kind.is_spot), usd
        worker_type = self.fleet.groups[0].worker_type
        more_usd = self.on_demand_usd_per_h - (worker_type.usd_per_h or 0.0)
        return gpus, float(fleet.gpus - on_demand * worker_type.gpus), usd + on_demand * more_usd


def gpus_of(fleet: Fleet) -> Counter[str]:
    """The GPUs of a fleet by type."""
    gpus = Counter[str]()
    for group in fleet.groups:
        gpus[str(group.worker_type.gpu)] += group.gpus
    return gpus


@dataclass(frozen=True)
class PlanTasks:
    """The plans to make: each with its model's number and its GPU. Their numbers are their places.

    `bare`: the same of models that have adapters, without them, by model and GPU purchase. `adapters`: each
    one's share of its model's requests, by model. `parts`: by the number of another plan, the plans on parts
    of GPUs, to make where that plan has one GPU. They are listed by the workers on a GPU; a text says why
    there is none.
    """

    tasks: tuple[tuple[int, GpuPurchase, Task], ...]
    parts: Mapping[int, Mapping[int, Task | str]]
    warnings: tuple[str, ...]
    bare: Mapping[tuple[int, GpuPurchase], Task]
    adapters: Mapping[int, Mapping[str, float]]

    @property
    def count(self) -> int:
        """Plans to make at most."""
        return len(self.tasks) + sum(map(len, self.parts.values()))


def tasks_of(portfolio: Portfolio, today: date | None = None) -> PlanTasks:
    """A plan to make for each model and GPU type.

    Raises BadInput for a trace, a model or a price that is not known, and GPUs that no model may have.
    """
    tasks: list[tuple[int, GpuPurchase, Task]] = []
    parts: dict[int, dict[int, Task | str]] = {}
    warnings: dict[str, None] = {}
    bare: dict[tuple[int, GpuPurchase], Task] = {}
    adapters: dict[int, dict[str, float]] = {}
    for number, model in enumerate(portfolio.models):
        own = _read(model)
        of_adapters = {one.name: _read(one) for one in model.adapters}
        trace = merged([own, *of_adapters.values()])
        adapters[number] = {name: len(one) / len(trace) for name, one in of_adapters.items()}
        for request, gathered in _gathered(model, trace, today):
            inputs = gathered.inputs
            warnings |= {f"{model.name}: {w}": None for w in inputs.warnings if w not in inputs.ages}
            for gpu, types in _on_offer(portfolio, model, request, gathered).items():
                task = Task(len(tasks), gathered.workload, types, request, gathered.inputs, True)
                tasks.append((number, GpuPurchase(gpu, request.spot), task))
                parts[task.number] = {n: _on_parts(task, n) for n in _ways(portfolio, model, request, gpu)}
        for request, gathered in _gathered(model, own, today) if of_adapters else ():
            for gpu, types in _on_offer(portfolio, model, request, gathered).items():
                task = Task(len(bare), gathered.workload, types, request, gathered.inputs, False)
                bare[number, GpuPurchase(gpu, request.spot)] = task
    _check_wanted(portfolio, {kind.gpu for _, kind, _ in tasks})
    return PlanTasks(tuple(tasks), parts, tuple(warnings), bare, adapters)


def _ways(portfolio: Portfolio, model: Model, request: PlanRequest, gpu: str) -> list[int]:
    """The numbers of workers that may be on a GPU of the model, where they share it."""
    # Adapters take memory of a GPU that profiles do not know.
    is_whole = request.spot or bool(model.adapters) or MIXED in gpu
    return [n for n in WORKERS_PER_GPU if n <= portfolio.models_per_gpu and not is_whole]


def _on_parts(task: Task, workers_per_gpu: int) -> Task | str:
    """The task with workers that share their GPUs, or why there are none."""
    shared, why = [], ""
    for worker_type in task.worker_types:
        try:
            shared.append(worker_type.shared(workers_per_gpu))
        except BadInput as refusal:
            why = str(refusal)
    if not shared:
        return why
    try:
        usable, _ = within_kv(task.workload, shared, task.inputs.trace)
    except BadInput as refusal:
        return str(refusal)
    n = workers_per_gpu
    counted = f"{n} workers on a GPU take turns: each step is counted as {n} times as long"
    inputs = replace(task.inputs, warnings=(*task.inputs.warnings, counted))
    return replace(task, worker_types=usable, inputs=inputs)


def _on_offer(
    portfolio: Portfolio, model: Model, request: PlanRequest, gathered: Gathered
) -> dict[str, tuple[WorkerType, ...]]:
    """The types of worker that a model may have, by GPU and by those of a mix.

    Raises BadInput where one has no price.
    """
    offers: dict[str, tuple[WorkerType, ...]] = {}
    for gpu in sorted({t.gpu or "" for t in gathered.worker_types}):
        types = tuple(t for t in gathered.worker_types if t.gpu == gpu)
        if portfolio.gpus.get(gpu) == 0 or not _zones(portfolio, model, gpu):
            continue
        if types[0].usd_per_h is not None:
            offers[gpu] = types
        elif len(model.asked) == 1 or not request.spot:  # where it may be either, spot may have no price
            raise BadInput(f"{model.name}: no price known for {gpu}; give one with `prices`")
    together = _together({gpu: _zones(portfolio, model, gpu) for gpu in offers})
    return offers | {MIXED.join(gpus): tuple(t for g in gpus for t in offers[g]) for gpus in together}


def _together(zones: Mapping[str, Sequence[str | None]]) -> list[tuple[str, ...]]:
    """The types of GPU of each zone, where `zones` has those of each type; every set once."""
    every = sorted({zone for of in zones.values() for zone in of}, key=str)
    return list(dict.fromkeys(tuple(gpu for gpu, of in zones.items() if zone in of) for zone in every))


def _zones(portfolio: Portfolio, model: Model, *gpus: str) -> Sequence[str | None]:
    """The zones in which a model may have these types of GPU; one without a name where there are no zones."""
    if not portfolio.zones:
        return [None]
    may = portfolio.zones if model.zones is None else model.zones
    return [zone for zone in may if all(portfolio.zones[zone].get(gpu) for gpu in gpus)]


def _read(one: Model | AdapterTraffic) -> Trace:
    with _named(one):
        return read_traces(one.traces)


def _gathered(model: Model, trace: Trace, today: date | None) -> list[tuple[PlanRequest, Gathered]]:
    with _named(model):
        return [(request, gather(trace, request, None, today)) for request in model.asked]


def _check_wanted(portfolio: Portfolio, gpus: Set[str]) -> None:
    """Raise BadInput where limits have GPUs that no model may have."""
    limits = [("gpus", portfolio.gpus), *((f"zones.{zone}", most) for zone, most in portfolio.zones.items())]
    for name, by_gpu in limits:
        if unwanted := next((gpu for gpu, most in by_gpu.items() if most and gpu not in gpus), None):
            raise BadInput(f"limits.{name}: {unwanted}: no model may have it")


@contextmanager
def _named(model: Model | AdapterTraffic) -> Iterator[None]:
    """Name the model in what is refused."""
    try:
        yield
    except ControlPlaneError as refusal:
        raise BadInput(f"{model.name}: {refusal}") from None


def fleets_of(
    portfolio: Portfolio, asked: PlanTasks, jobs: int, cache: Cache, told: Callable[[], None] = lambda: None
) -> tuple[Sequence[Made], Without]:
    """The fleets that each model could have, in each zone that it may be in, and why there are no others.

    Raises Infeasible where a model has none.
    """
    made, without = _made_of(portfolio, asked.tasks, jobs, cache, told)
    fewer = list(_of_fewer_gpus(portfolio, asked, made))
    made += _made_of(portfolio, fewer, jobs, cache, lambda: None)[0]
    small = {(one.model, one.kind) for one in made if one.plan.gpus == 1}
    on_parts: list[tuple[int, GpuPurchase, Task]] = []
    for number, kind, task in asked.tasks:
        for n, part in asked.parts.get(task.number, {}).items() if (number, kind) in small else ():
            if isinstance(part, Task):
                part = replace(part, number=len(on_parts))
                on_parts.append((number, kind._replace(workers_per_gpu=n), part))
            else:
                without[number, kind._replace(workers_per_gpu=n)] = part
    for _ in range(asked.count - len(asked.tasks) - len(on_parts)):
        told()
    more, why_not = _made_of(portfolio, on_parts, jobs, cache, told)
    made, without = [*made, *more], without | why_not
    for number in sorted(set(range(len(portfolio.models))) - {one.model for one in made}):
        found = [f"{kind}: {why}" for (n, kind), why in without.items() if n == number]
        reasons = "; ".join(found) or "no zone has a GPU for it"
        name = portfolio.models[number].name
        raise Infeasible(f"{name}: no GPU on offer serves it within its targets ({reasons})")
    return [*made, *_partly_on_demand(made, asked, portfolio.spot_share)], without


def _of_fewer_gpus(
    portfolio: Portfolio, asked: PlanTasks, made: Sequence[Made]
) -> Iterator[tuple[int, GpuPurchase, Task]]:
    """Mixes to plan again with fewer GPUs, of a type or of all, where the cheapest fleets exceed a limit."""
    cheapest: dict[tuple[int, bool], Counter[str]] = {}
    for one in sorted(made, key=lambda one: one.fleet.cost, reverse=True):
        cheapest[one.model, one.kind.is_spot] = gpus_of(one.fleet) + Counter({"": one.fleet.gpus})
    taken = sum(({m: c for (m, _), c in cheapest.items()}).values(), Counter[str]())
    most = dict(portfolio.gpus) | ({} if portfolio.max_gpus is None else {"": portfolio.max_gpus})
    scarce = [gpu for gpu, n in most.items() if taken[gpu] > n]
    numbers = itertools.count()
    for model, kind, task in asked.tasks:
        has = cheapest.get((model, kind.is_spot), Counter[str]())
        for gpu in scarce if MIXED in kind.gpu else ():
            for n, fewer in _with_fewer(task, gpu, min(has[gpu] - 1, most[gpu])):
                yield model, kind._replace(most=(gpu, n)), replace(fewer, number=next(numbers))


def _with_fewer(task: Task, gpu: str, most: int) -> Iterator[tuple[int, Task]]:
    """The task with numbers up to `most` of the GPUs of a type, or of all, that leave two types to mix."""
    spread = np.rint(np.linspace(1, most, max(0, min(most, FEWER_GPUS)))).astype(int).tolist()
    for n in sorted({0, *spread} if gpu and most >= 0 else set(spread)):
        limited = (replace(t, limit=n // t.gpus) if gpu == t.gpu else t for t in task.worker_types)
        types = tuple(t for t in limited if t.limit != 0)
        request = task.request if gpu else replace(task.request, max_gpus=n)
        if len({t.gpu for t in types}) > 1:
            yield n, replace(task, worker_types=types, request=request)


def _partly_on_demand(made: Sequence[Made], asked: PlanTasks, spot_share: float | None) -> Iterator[Made]:
    """The fleets on spot with some of their workers on demand, where their model may be either.

    Without a limit of the share on spot none of them is cheaper than all on spot.
    """
    if spot_share is None or spot_share >= 1:
        return
    usd = {
        (number, worker_type.name): worker_type.usd_per_h
        for number, kind, task in asked.tasks
        for worker_type in task.worker_types
        if not kind.is_spot
    }
    for one in made:
        price = (
            usd.get((one.model, one.fleet.groups[0].worker_type.name))
            if one.kind.is_spot and len(one.fleet.groups) == 1
            else None
        )
        for workers in () if price is None else _workers_on_demand(one.fleet.workers, one.spares, spot_share):
            yield replace(one, kind=one.kind._replace(on_demand=workers), on_demand_usd_per_h=price or 0.0)


def _workers_on_demand(workers: int, spares: int, spot_share: float) -> list[int]:
    """How many of a fleet's workers may be on demand: not none, and not all that serve.

    In a large fleet every number would be more than the program needs. It takes eight that are spread evenly,
    and the least with which the fleet by itself keeps to the limit.
    """
    most = workers - spares - 1
    spread = {round(float(n)) for n in np.linspace(1, most, max(0, min(most, PARTLY_ON_DEMAND)))}
    least = math.ceil(workers * (1.0 - spot_share) - 1e-9)
    return sorted(n for n in spread | {least} if 0 < n <= most)


def _made_of(
    portfolio: Portfolio,
    tasks: Sequence[tuple[int, GpuPurchase, Task]],
    jobs: int,
    cache: Cache,
    told: Callable[[], None],
) -> tuple[list[Made], Without]:
    """The fleets of these plans in each of their zones, and why others have none."""
    made: list[Made] = []
    without: Without = {}
    results = results_of([task for _, _, task in tasks], jobs, None, cache, told)
    for number, kind, task in tasks:
        result, model = results[task.number], portfolio.models[number]
        plan = None if result["plan"] is None else parse_plan(result["plan"], f"{model.name} on {kind}")
        if plan is not None and plan.feasible:
            first = _of_plan(number, kind, plan)
            gpus = gpus_of(first.fleet)
            if len(gpus) > 1 or MIXED not in kind.gpu:  # else it is a fleet of one type, which is there
                made += [replace(first, zone=zone) for zone in _zones(portfolio, model, *gpus)]
        elif MIXED not in kind.gpu:
            without[number, kind] = result["error"] if plan is None else plan.reason or "no fleet"
    return made, without


def _of_plan(number: int, kind: GpuPurchase, plan: PlanFile) -> Made:
    scale = plan.inputs.rate_scale
    # In whole seconds, so that stretches of two traces that end together do so.
    wanted = [
        ScheduleInterval(round(s.start_s * scale), round(s.end_s * scale), s.workers) for s in plan.schedule
    ]
    wanted = [s for s in wanted if s.end_s > s.start_s]
    if wanted and plan.paid is not None:
        wanted = list(paid(wanted, plan.paid.cold_start_s).stretches)
    return Made(number, kind, None, plan, Fleet(plan.groups), tuple(wanted))
