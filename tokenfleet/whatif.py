"""What if? The same plan over a grid of changes: rate, targets, GPU, TP degree, policy, prices.

`--vary rate=0.5,1,2 --vary slo.ttft=400ms,800ms` makes six scenarios. Scenarios are planned one after the
other on the same threads, with the same seeds, so that their difference is the change's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from controlplane.errors import BadInput, ControlPlaneError
from tokenfleet.durations import parse_duration_s
from tokenfleet.nearest_names import nearest
from tokenfleet.plan_json import plan_json
from tokenfleet.planning.answer import Plan

SCHEMA = "tokenfleet.whatif/1"
MOST_SCENARIOS = 200
KEYS = ("rate", "slo.ttft", "slo.tpot", "attainment", "confidence", "gpu", "tp", "policy", "engine", "price")

Changes = dict[str, str]


@dataclass(frozen=True)
class Scenario:
    """One cell of the grid: what was changed, and the plan or why there is none."""

    changes: Changes
    plan: Plan | None
    error: str = ""


def grid(varies: Sequence[str]) -> list[Changes]:
    """Every combination of the values in `KEY=V1,V2,…`. Raises BadInput, one line."""
    axes: dict[str, list[str]] = {}
    for vary in varies:
        key, equals, values = vary.partition("=")
        key = key.strip()
        if key not in KEYS:
            raise BadInput(
                f"--vary: {key}: no such thing to vary{nearest(key, KEYS)}; one of {', '.join(KEYS)}"
            )
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not listed:
            raise BadInput(f"--vary: {key}: expected {key}=VALUE,VALUE,…, got {vary!r}")
        if key in axes:
            raise BadInput(f"--vary: {key}: given twice")
        for value in listed:
            checked(key, value)
        axes[key] = listed
    if not axes:
        raise BadInput("--vary: nothing to vary; for example --vary rate=0.5,1,2")
    cells = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(cells) > MOST_SCENARIOS:
        raise BadInput(f"--vary: {len(cells)} scenarios, at most {MOST_SCENARIOS}")
    return cells


def checked(key: str, value: str) -> float | int | str:
    """A value of the grid as what it stands for. Raises BadInput naming the key."""
    if key.startswith("slo."):
        return parse_duration_s(value, f"--vary: {key}")
    if key in ("rate", "attainment", "confidence", "price", "tp"):
        try:
            number = float(value)
        except ValueError:
            raise BadInput(f"--vary: {key}: expected a number, got {value!r}") from None
        if not 0.0 < number < float("inf"):
            raise BadInput(f"--vary: {key}: must be positive, got {value}")
        if key != "tp":
            return number
        if number != int(number):
            raise BadInput(f"--vary: tp: must be a whole number, got {value}")
        return int(number)
    return value


def scenarios(cells: Sequence[Changes], planned: Callable[[Changes], Plan]) -> list[Scenario]:
    """The plan of each cell; what cannot be planned (a GPU without a profile, say) keeps its reason."""
    found = []
    for changes in cells:
        try:
            found.append(Scenario(changes, planned(changes)))
        except ControlPlaneError as error:
            found.append(Scenario(changes, None, str(error)))
    return found


def whatif_json(found: Sequence[Scenario]) -> dict[str, Any]:
    """The JSON of `tokenfleet.whatif/1`."""
    return {
        "schema": SCHEMA,
        "scenarios": [
            {
                "changes": {key: checked(key, value) for key, value in s.changes.items()},
                "plan": plan_json(s.plan) if s.plan else None,
                "error": s.error or None,
            }
            for s in found
        ],
        "marginal": marginal(found),
    }


def marginal(found: Sequence[Scenario]) -> Mapping[str, list[dict[str, Any]]]:
    """For each numeric axis: what one step along it costs, the other changes held.

    `per_unit` is USD an hour (GPUs where a price is unknown) per unit of the axis; seconds for targets.
    """
    result: dict[str, list[dict[str, Any]]] = {}
    axes = list(found[0].changes) if found else []
    for key in axes:
        if isinstance(checked(key, found[0].changes[key]), str):
            continue
        groups: dict[tuple[tuple[str, str], ...], list[tuple[float, Plan]]] = {}
        for s in found:
            if s.plan is not None and s.plan.best is not None:
                others = tuple((k, v) for k, v in s.changes.items() if k != key)
                groups.setdefault(others, []).append((float(checked(key, s.changes[key])), s.plan))
        rows = []
        for others, points in sorted(groups.items()):
            points.sort(key=lambda point: point[0])
            for (x0, first), (x1, second) in pairwise(points):
                rows.append({"held": dict(others), "from": x0, "to": x1, **_step(first, second, x1 - x0)})
        if rows:
            result[key] = rows
    return result


def _step(first: Plan, second: Plan, width: float) -> dict[str, Any]:
    assert first.best is not None
    assert second.best is not None
    before, after = first.best.fleet, second.best.fleet
    usd = None
    if before.usd_per_hour is not None and after.usd_per_hour is not None:
        usd = after.usd_per_hour - before.usd_per_hour
    gpus = after.gpus - before.gpus
    rise = gpus if usd is None else usd
    return {
        "usd_per_hour": None if usd is None else round(usd, 4),
        "gpus": gpus,
        "per_unit": float(f"{rise / width:.6g}") if width else None,
    }
