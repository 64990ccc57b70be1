"""What can be varied, and the grid of it: `--vary rate=0.5,1,2 --vary slo.ttft=400ms,800ms` is six scenarios.

An axis is a *promise* (what clients are told), a *choice* (how it is kept) or a *circumstance* (what is not
ours to choose). Scenarios compete only in the same circumstances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from controlplane.errors import BadInput
from controlplane.types import EngineMode
from tokenfleet.durations import parse_duration_s
from tokenfleet.field_errors import nearest

MOST_SCENARIOS = 200

Role = Literal["promise", "choice", "circumstance"]
Kind = Literal["duration", "share", "number", "count", "word", "switch", "file"]
Changes = dict[str, str]
Value = float | int | str | bool


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing to vary: its role, how its values read, and what a person calls it."""

    role: Role
    kind: Kind
    says: str
    zero: bool = False  # whether 0 means something


AXES: dict[str, Axis] = {
    "rate": Axis("circumstance", "number", "traffic"),
    "lengths": Axis("circumstance", "number", "prompt and output lengths"),
    "lengths.prompt": Axis("circumstance", "number", "prompt lengths"),
    "lengths.output": Axis("circumstance", "number", "output lengths"),
    "price": Axis("circumstance", "number", "prices"),
    "prices": Axis("circumstance", "file", "price list"),
    "cold-start": Axis("circumstance", "duration", "cold start", zero=True),
    "reclaims": Axis("circumstance", "number", "reclaims an hour of a spot worker", zero=True),
    "slo.ttft": Axis("promise", "duration", "TTFT"),
    "slo.tpot": Axis("promise", "duration", "TPOT"),
    "attainment": Axis("promise", "share", "attainment"),
    "confidence": Axis("promise", "share", "confidence"),
    "gpu": Axis("choice", "word", "GPU"),
    "tp": Axis("choice", "count", "TP degree"),
    "policy": Axis("choice", "word", "policy"),
    "engine": Axis("choice", "word", "engine mode"),
    "spot": Axis("choice", "switch", "spot"),
}
# Axes that say the same thing twice: together it would be unclear which one holds.
_CLASHES = (("lengths", "lengths.prompt"), ("lengths", "lengths.output"))


def grid(varies: Sequence[str]) -> list[Changes]:
    """Every combination of the values in `KEY=V1,V2,…`. Raises BadInput, one line."""
    axes: dict[str, list[str]] = {}
    for vary in varies:
        key, equals, values = vary.partition("=")
        key = key.strip()
        if key not in AXES:
            raise BadInput(
                f"--vary: {key}: no such thing to vary{nearest(key, AXES)}; one of {', '.join(AXES)}"
            )
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not listed:
            raise BadInput(f"--vary: {key}: expected {key}=VALUE,VALUE,…, got {vary!r}")
        if key in axes:
            raise BadInput(f"--vary: {key}: given twice")
        meant = [checked(key, value) for value in listed]
        if len(set(meant)) < len(meant):
            again = next(v for i, v in enumerate(listed) if meant[i] in meant[:i])
            raise BadInput(f"--vary: {key}: {again} stands there twice")
        axes[key] = listed
    if not axes:
        raise BadInput("--vary: nothing to vary; for example --vary rate=0.5,1,2")
    for first, second in _CLASHES:
        if first in axes and second in axes:
            raise BadInput(f"--vary: {first} and {second} exclude each other")
    cells = math.prod(len(values) for values in axes.values())
    if cells > MOST_SCENARIOS:
        raise BadInput(f"--vary: {cells} scenarios, at most {MOST_SCENARIOS}")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def checked(key: str, value: str) -> Value:
    """A value of the grid as what it stands for. Raises BadInput naming the key."""
    axis = AXES[key]
    if axis.kind == "duration":
        seconds = 0.0 if axis.zero and value == "0" else parse_duration_s(value, f"--vary: {key}")
        if seconds == 0.0 and not axis.zero:
            raise BadInput(f"--vary: {key}: must be positive, got {value}")
        return seconds
    if axis.kind in ("number", "share", "count"):
        return _number(key, axis, value)
    if axis.kind == "switch":
        if value.lower() not in ("yes", "no"):
            raise BadInput(f"--vary: {key}: expected yes or no, got {value!r}")
        return value.lower() == "yes"
    if key == "policy":
        from tokenfleet.planning.inputs import known_policy

        return known_policy(value)
    if key == "engine" and value not in list(EngineMode):
        raise BadInput(f"--vary: engine: one of {', '.join(EngineMode)}, got {value!r}")
    return value


def _number(key: str, axis: Axis, value: str) -> float | int:
    try:
        number = float(value)
    except ValueError:
        raise BadInput(f"--vary: {key}: expected a number, got {value!r}") from None
    if axis.zero and number == 0.0:
        return number
    if not 0.0 < number < math.inf:
        raise BadInput(f"--vary: {key}: must be positive, got {value}")
    if axis.kind == "share" and number >= 1.0:
        raise BadInput(f"--vary: {key}: must be below 1, got {value}")
    if axis.kind != "count":
        return number
    if number != int(number):
        raise BadInput(f"--vary: {key}: must be a whole number, got {value}")
    return int(number)


def is_numeric(key: str) -> bool:
    """Whether steps along an axis have a width."""
    return AXES[key].kind in ("duration", "share", "number", "count")
