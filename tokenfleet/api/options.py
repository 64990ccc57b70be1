"""Keyword arguments as a request: an option of a plan by its field name, as a value or as its flag's text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from controlplane.types import Slo
from tokenfleet.field_errors import nearest
from tokenfleet.planning.request import Option, PlanRequest, options, read_targets
from tokenfleet.service.forms import in_field_names
from tokenfleet.texts import as_text

Targets = Slo | str | Sequence[str]


def request_of(slo: Targets, **given: Any) -> PlanRequest:
    """The request that keyword arguments stand for; None is an option left out.

    `slo`: `"ttft=1.6s,tpot=75ms"`, an `Slo` in seconds, or a text for each class. Raises BadInput naming the
    argument.
    """
    known = {option.field: option for option in options() if option.field not in ("slo", "classes")}
    for name in given:
        if name not in known:
            raise BadInput(f"{name}: no such option{nearest(name, known)}")
    fields = {name: _value(known[name], value) for name, value in given.items() if value is not None}
    try:
        return PlanRequest(**_targets(slo), **fields).consistent()
    except BadInput as refusal:
        raise BadInput(in_field_names(str(refusal).replace("--slo", "slo"))) from None


def _targets(slo: Targets) -> dict[str, Any]:
    if isinstance(slo, Slo):
        return {"slo": slo}
    texts = [slo] if isinstance(slo, str) else list(slo)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise BadInput(f"slo: expected a text such as ttft=1.6s,tpot=75ms, got {slo!r}")
    return read_targets(texts)


def _value(option: Option, value: Any) -> Any:
    where = option.field
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if option.is_list:
        many = [value] if isinstance(value, str | Path | int) else list(value)
        return option.checked(tuple(_item(option, one, where) for one in many), where)
    return option.checked(_item(option, value, where), where)


def _item(option: Option, value: Any, where: str) -> Any:
    """One value in its option's type: texts are read as the command line reads them."""
    if isinstance(value, str) and option.kind not in ("word", "choice"):
        read = option.read(value, where)
        return read[0] if option.is_list else read
    if option.item is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if option.kind == "choice" and isinstance(value, str):
        return option.read(value, where)
    return value


def as_vary(axes: dict[str, Sequence[Any]]) -> list[str]:
    """Axes as the command line's `--vary` takes them: `rate=1,2`; `ttft` and `tpot` are of the targets."""
    return [f"{_key(name)}={','.join(map(as_text, values))}" for name, values in axes.items()]


def _key(name: str) -> str:
    return f"slo.{name}" if name in ("ttft", "tpot") else name.replace("_", "-")
