"""The SLO classes of a plan: the class of each request, and the cost of each class.

A rule of `--class` gives a request its class by tenant, key or priority. Else the trace's column
`slo_class` gives it. A request without a class has the plain targets.

**Cost.** A class costs what the fleet costs beyond the cheapest fleet for the other classes. Alone, it costs
what a fleet of its own would. Both are plans of that part of the requests, at the same confidence. The costs
alone add up to the cost of separate fleets. The shared fleet costs less to the extent that classes peak at
different times, fill each other's workers, or have time to wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.types import PLAIN_CLASS, SloClass
from controlplane.workload import Workload
from tokenfleet.planning.estimate import Estimate
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.request import PlanRequest
from tokenfleet.texts import due
from tokenfleet.traces import Trace

_RULED = ("tenant", "key", "priority")


@dataclass(frozen=True)
class ClassOfPlan:
    """The outcome of a class on the fleet, and its cost; a fleet is None where no plan found one.

    `without`: the cheapest fleet for all others; `alone`: for this class. `binds`: whether it is the first to
    miss its target one worker short. `runs_on`: the share of its requests on each worker type, most first.
    """

    of: SloClass
    requests: int
    on_trace: float
    estimate: Estimate | None
    without: Fleet | None = None
    alone: Fleet | None = None
    binds: bool = False
    runs_on: tuple[tuple[str, float], ...] = ()


def classed(trace: Trace, request: PlanRequest) -> Trace:
    """The trace with the request's classes as it orders them, those without one last. Raises BadInput."""
    workload, classes = trace.workload, request.slo_classes
    if not classes:
        if request.class_of:
            raise BadInput("--class: without targets; give each class its own with --slo NAME:ttft=…,tpot=…")
        present = [workload.slo_classes[i] for i in np.unique(workload.slo_class)]
        if len(present) > 1:
            each = " ".join(f"--slo {name}:ttft=…,tpot=…" for name in present)
            raise BadInput(f"{trace.name}: slo_class: {', '.join(present)} need targets each: {each}")
        of_one = replace(workload, slo_class=np.zeros(len(workload), np.int8), slo_classes=(PLAIN_CLASS,))
        return replace(trace, workload=of_one)
    names = [one.name for one in classes]
    place = {name: i for i, name in enumerate((*names, PLAIN_CLASS))}
    known = np.array([place.get(name, -1) for name in workload.slo_classes], np.int64)
    slo_class = known[workload.slo_class]
    for name, column, value in (rule.value for rule in request.class_of):
        if name not in names:
            raise BadInput(f"--class: {name}: without targets; give them with --slo {name}:ttft=…,tpot=…")
        slo_class = np.where(_matching(trace, column, value), place[name], slo_class)
    if (slo_class < 0).any():
        name = workload.slo_classes[workload.slo_class[np.argmax(slo_class < 0)]]
        raise BadInput(f"{trace.name}: slo_class: no targets for {name}; --slo {name}:ttft=…,tpot=…")
    if request.has_only_classes and (slo_class == len(names)).any():
        without = int((slo_class == len(names)).sum())
        raise BadInput(
            f"{trace.name}: {without} of {len(workload)} requests have no class; give one with --class, or"
            " targets with a plain --slo ttft=…,tpot=…"
        )
    return replace(trace, workload=replace(workload, slo_class=slo_class, slo_classes=(*names, PLAIN_CLASS)))


def _matching(trace: Trace, column: str, value: str) -> NDArray[np.bool_]:
    """Which requests a rule names. Raises BadInput for a rule that no trace could meet."""
    if column not in _RULED:
        raise BadInput(f"--class: {column}: one of {', '.join(_RULED)}")
    if column == "priority":
        if value not in ("high", "normal"):
            raise BadInput(f"--class: priority: high or normal, got {value}")
        return np.asarray((trace.workload.priority > 0) == (value == "high"))
    if value not in trace.tenants:
        raise BadInput(f"{trace.name}: no request is of {column} {value}, which --class names")
    return np.asarray(trace.tenant == trace.tenants.index(value))


def present(workload: Workload, request: PlanRequest, name: str) -> tuple[Workload, tuple[SloClass, ...]]:
    """The workload numbered by its classes, and these with targets that keep deadlines; () if all is plain.

    Raises BadInput for a class without requests, and for a deadline that its longest answer cannot keep.
    """
    if not request.slo_classes:
        return workload, ()
    plain = SloClass(PLAIN_CLASS, request.slo, request.attainment)
    classes = []
    for i, one in enumerate((*request.slo_classes, plain)):
        rows = workload.slo_class == i
        if rows.any():
            classes.append(due(one, int(workload.output_tokens[rows].max())))
        elif one is not plain:
            raise BadInput(f"{name}: no request is of class {one.name}, which has targets")
    return replace(workload, slo_classes=tuple(one.name for one in classes)), tuple(classes)


def in_shares(workload: Workload, request: PlanRequest, name: str) -> Workload:
    """The workload with as large a share of each class as is asked; the arrivals stay.

    Requests of classes that have too many give way to requests drawn from those that have too few. Raises
    BadInput for shares that cannot be, and where requests share prefixes or wait for others.
    """
    counts = np.bincount(workload.slo_class, minlength=len(request.slo_classes) + 1)
    more = (_asked(counts, request, name) - counts).tolist()
    if not any(more):
        return workload
    if workload.prefixes is not None or workload.sessions is not None:
        raise BadInput(
            "--slo: share: not for a trace whose requests share prefixes or sessions; leave it out"
        )
    rng, rows = np.random.default_rng([request.seed, 43]), np.arange(len(workload))
    of = [np.flatnonzero(workload.slo_class == c) for c in range(len(counts))]
    freed = [rng.choice(own, max(-n, 0), replace=False) for own, n in zip(of, more, strict=True)]
    drawn = [rng.choice(own, max(n, 0)) for own, n in zip(of, more, strict=True)]
    rows[np.concatenate(freed)] = rng.permutation(np.concatenate(drawn))
    columns = ("prompt_tokens", "output_tokens", "priority", "slo_class")
    return replace(workload, **{column: getattr(workload, column)[rows] for column in columns})


def _asked(counts: NDArray[np.int64], request: PlanRequest, name: str) -> NDArray[np.int64]:
    """[classes] the requests of each class; those without a share keep their proportions. Raises BadInput."""
    shares = np.array([*(one.traffic_share or 0.0 for one in request.slo_classes), 0.0])
    asked, left = shares > 0, 1.0 - float(shares.sum())
    if not asked.any():
        return counts
    if (missing := asked & (counts == 0)).any():
        of = request.slo_classes[int(missing.argmax())].name
        raise BadInput(f"{name}: no request is of class {of}, which has a share")
    rest = int(counts[~asked].sum())
    if left < -1e-9 or (left > 1e-9) != (rest > 0):
        expected = "below 1, since there are other classes" if rest else "1"
        raise BadInput(f"--slo: share: expected a sum of {expected}, got {1.0 - left:g}")
    exact = np.where(asked, shares, left * counts / max(rest, 1)) * counts.sum()
    return np.diff(np.round(np.cumsum(exact)), prepend=0.0).astype(np.int64)


def shares_asked(request: PlanRequest) -> list[str]:
    """A line for each class whose share of the requests is not the trace's."""
    asked = [one for one in request.slo_classes if one.traffic_share]
    return [
        f"{one.name}: {one.traffic_share:.4g} of the requests, as asked, not the trace's" for one in asked
    ]


def part(workload: Workload, classes: Sequence[int]) -> Workload:
    """The requests of some classes; `classes` are renumbered from 0 in their order."""
    chosen = workload.take(np.isin(workload.slo_class, classes))
    number = np.full(len(workload.slo_classes), -1, np.int64)
    number[list(classes)] = np.arange(len(classes))
    names = tuple(workload.slo_classes[c] for c in classes)
    return replace(chosen, slo_class=number[chosen.slo_class], slo_classes=names)


def separate_usd(classes: Sequence[ClassOfPlan]) -> float | None:
    """Dollars an hour of separate fleets; None where one is not known."""
    prices = [None if one.alone is None else one.alone.usd_per_hour for one in classes]
    return None if None in prices else sum(p for p in prices if p is not None)
