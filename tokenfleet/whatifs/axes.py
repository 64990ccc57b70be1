"""The axes and scenarios of a what-if grid: `--vary rate=0.5,1,2 --vary slo.ttft=400ms,800ms` makes six.

An axis is a *promise* (to clients), a *choice* (how to keep it) or a *circumstance* (not ours to choose).
Scenarios compete only in the same circumstances. `slo.NAME.ttft`, `.tpot` and `.attainment` are those of a
class; `slo.NAME.share` is its share of the requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, Literal

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from tokenfleet.field_errors import nearest
from tokenfleet.planning.inputs import Bias, gather
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.planning.request import Kind, Option, PlanRequest, Role, options, read_targets
from tokenfleet.planning.result import Inputs
from tokenfleet.texts import Parsed, parse_duration_s
from tokenfleet.traces import Trace

MOST_SCENARIOS = 200

Changes = dict[str, str]
Value = float | int | str | bool


@dataclass(frozen=True, slots=True)
class GridAxis:
    """One thing to vary: its role, what a person calls it, and the option or options that it sets.

    `part` is what it sets of an SLO, where it sets that; `of_class` the class whose it is.
    """

    role: Role
    name: str
    options: tuple[Option, ...]
    part: Literal["", "ttft", "tpot", "attainment", "share"] = ""
    of_class: str = ""

    @property
    def kind(self) -> Kind:
        """How its values read."""
        return "duration" if self.part in ("ttft", "tpot") else self.options[0].kind

    def read(self, text: str, where: str) -> Any:
        """A value of its options. Raises BadInput naming where."""
        if self.kind != "duration" or not self.part:
            return self.options[0].read(text, where)
        seconds = parse_duration_s(text, where)
        if not seconds > 0:
            raise BadInput(f"{where}: must be positive, got {text}")
        return seconds

    def fields(self, request: PlanRequest, value: Any) -> dict[str, Any]:
        """The fields of a request that a value sets."""
        if self.of_class:
            return _of_class(request, self.of_class, self.part, value)
        if self.part:
            return {"slo": replace(request.slo, **{f"{self.part}_s": value})}
        return {option.field: value for option in self.options}


def _axes() -> dict[str, GridAxis]:
    """An axis for every option, by its key; one for each target, and one for both lengths."""
    by_key = {option.key: option for option in options()}
    slo = by_key.pop("slo")
    del by_key["classes"], by_key["class"]
    both = by_key["lengths.prompt"], by_key["lengths.output"]
    return {
        key: GridAxis(option.about.role, option.about.name, (option,)) for key, option in by_key.items()
    } | {
        "lengths": GridAxis("circumstance", "prompt and output lengths", both),
        "slo.ttft": GridAxis("promise", "TTFT", (slo,), "ttft"),
        "slo.tpot": GridAxis("promise", "TPOT", (slo,), "tpot"),
    }


def _of_class(request: PlanRequest, name: str, part: str, value: float) -> dict[str, Any]:
    """The fields of a request whose class `name` has another target or share. Raises BadInput."""
    names = [one.value.name for one in request.classes]
    if name not in names:
        known = f"one of {', '.join(names)}" if names else "--slo NAME:ttft=…,tpot=… gives one"
        raise BadInput(f"slo.{name}.{part}: no such class{nearest(name, names)}; {known}")
    unit = "s" if part in ("ttft", "tpot") else ""
    texts = [one.text for one in request.classes]
    _, _, targets = texts[names.index(name)].partition(":")
    kept = [target for target in targets.split(",") if target.partition("=")[0].strip().lower() != part]
    texts[names.index(name)] = f"{name}:{','.join([*kept, f'{part}={value!r}{unit}'])}"
    plain = read_targets(texts)
    return plain if request.has_only_classes else {"classes": plain["classes"]}


AXES = _axes()
_OF_CLASS = re.compile(r"slo\.(?P<name>.+)\.(?P<part>ttft|tpot|attainment|share)")
# Axes that say the same thing twice: together it would be unclear which one holds.
_CLASHES = (("lengths", "lengths.prompt"), ("lengths", "lengths.output"))


def axis_of(key: str) -> GridAxis:
    """The axis of a key. Raises BadInput, one line."""
    if of_class := _OF_CLASS.fullmatch(key):
        name, part = of_class.groups()
        title = part.upper() if part in ("ttft", "tpot") else part
        role: Role = "circumstance" if part == "share" else "promise"
        return GridAxis(role, f"{title} of {name}", AXES["attainment"].options, part, name)  # type: ignore[arg-type]
    if key not in AXES:
        raise BadInput(f"--vary: {key}: cannot be varied{nearest(key, AXES)}; one of {', '.join(AXES)}")
    return AXES[key]


def grid(varies: Sequence[str]) -> list[Changes]:
    """Every combination of the values in `KEY=V1,V2,…`. Raises BadInput, one line."""
    axes: dict[str, list[str]] = {}
    for vary in varies:
        key, values = _values(vary)
        if key in axes:
            raise BadInput(f"--vary: {key}: given twice")
        axes[key] = values
    if not axes:
        raise BadInput("--vary: nothing to vary; for example --vary rate=0.5,1,2")
    for first, second in _CLASHES:
        if first in axes and second in axes:
            raise BadInput(f"--vary: {first} and {second} exclude each other")
    cells = math.prod(len(values) for values in axes.values())
    if cells > MOST_SCENARIOS:
        raise BadInput(f"--vary: {cells} scenarios, at most {MOST_SCENARIOS}")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _values(vary: str) -> tuple[str, list[str]]:
    """An axis and its values, which are all different. Raises BadInput."""
    key, equals, values = vary.partition("=")
    key = key.strip()
    axis_of(key)
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not listed:
        raise BadInput(f"--vary: {key}: expected {key}=VALUE,VALUE,…, got {vary!r}")
    meant = [checked(key, value) for value in listed]
    if len(set(meant)) < len(meant):
        again = next(v for i, v in enumerate(listed) if meant[i] in meant[:i])
        raise BadInput(f"--vary: {key}: {again} is given twice")
    return key, listed


def checked(key: str, value: str) -> Value:
    """The value that a word of the grid stands for. Raises BadInput naming the key."""
    read = axis_of(key).read(value, f"--vary: {key}")
    if isinstance(read, tuple):
        return read[0] if len(read) == 1 else "+".join(map(str, read))
    return str(read) if isinstance(read, Path | Parsed) else read


def changed(request: PlanRequest, changes: Changes) -> PlanRequest:
    """`request` with the changes of a cell. Raises BadInput where one has no meaning with the others."""
    after = request
    for key, text in changes.items():
        axis = axis_of(key)
        if axis.part and not axis.of_class and request.has_only_classes:
            raise BadInput(f"{key}: each class has targets of its own, which --slo NAME:… gives")
        after = replace(after, **axis.fields(after, axis.read(text, f"--vary: {key}")))
    if after.reclaims_per_h is not None and not after.spot:
        if "reclaims" in changes:
            raise BadInput("reclaims: only spot workers are interrupted")
        after = replace(after, reclaims_per_h=None)  # of the grid's spot scenarios, not of this one
    if after.spot and "spot" in changes and after.reclaims_per_h is None:
        raise BadInput(
            "spot: how often are workers interrupted? Give --reclaims-per-h, or vary reclaims: a spot fleet"
            " without standby workers does not hold the target"
        )
    return after


def is_numeric(key: str) -> bool:
    """Whether steps along an axis have a width."""
    return axis_of(key).kind in ("duration", "number", "count")


@dataclass(frozen=True)
class Task:
    """A scenario ready to be planned, by whichever process: nothing in it is read from a file any more."""

    number: int
    workload: Workload
    worker_types: tuple[WorkerType, ...]
    request: PlanRequest
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
