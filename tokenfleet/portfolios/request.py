"""The portfolio file: models with their traces and targets, and the limits that they share.

    schema: tokenfleet.portfolio/1
    limits: {gpus: {h100: 16, a100: 32}, max-gpus: 40, budget-usd-per-h: 90, spot-share: 0.5,
      zones: {east-a: {h100: 8, a100: 32}, east-b: {h100: 16}}, models-per-gpu: 2}
    defaults: {gpu: [h100, a100], confidence: 0.95}
    models:
    - {name: chat, trace: chat.csv, model: llama-3.1-70b, slo: {ttft: 1.6s, tpot: 75ms}}
    - {name: code, trace: [mon.csv, tue.csv], model: llama-3.1-8b, slo: "ttft=400ms,tpot=30ms",
       rate-scale: 2, spot: [no, yes], reclaims-per-h: 0.05, cold-start: 5m, zones: [east-a]}
    - {name: support, adapter-of: chat, trace: support.csv}

A model's fields, and `defaults`, are the flags of `tokenfleet plan` without their dashes. A model also has
`zones`, those it may be in (all, where none are given). With `spot: [no, yes]` it may be on demand or on
spot. A model is in one zone, since its requests move among its workers. Zones have the GPUs that are named
there and no others. With `models-per-gpu: 2` (or 4; 1 where it is left out) up to that many workers of small
models are on one GPU. A LoRA adapter has a trace and nothing else: its model's workers serve it, within its
model's targets. Paths are from the file's folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from controlplane.errors import BadInput, ControlPlaneError
from tokenfleet.field_errors import fault_line, nearest, parse_yaml, read_text
from tokenfleet.planning.plan_file import SCHEMA as PLAN_SCHEMA
from tokenfleet.planning.plan_file import PlanFile, parse_plan
from tokenfleet.planning.request import Option, PlanRequest, options, read_targets
from tokenfleet.profiles.library import canonical_gpus
from tokenfleet.texts import as_text

if TYPE_CHECKING:
    from controlplane.scaler.shares import Limits

SCHEMA = "tokenfleet.portfolio/1"
MOST_MODELS = 500
Find = Callable[[str], Path]  # a file by the name that the portfolio has for it
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_ZONE = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"  # Ray's labels end so, too


@dataclass(frozen=True, slots=True)
class AdapterTraffic:
    """A LoRA adapter of a model, and its requests, which the model's fleet serves."""

    name: str
    traces: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model to plan for: its requests, what is asked of their fleet, its zones and its adapters.

    `asked`: two requests where the fleet may be on demand or on spot. `zones`: where it may be (None: any).
    """

    name: str
    traces: tuple[Path, ...]
    asked: tuple[PlanRequest, ...]
    zones: tuple[str, ...] | None = None
    adapters: tuple[AdapterTraffic, ...] = ()


@dataclass(frozen=True)
class Portfolio:
    """Models, and what all of them may take together.

    The limits are GPUs by type, all GPUs, dollars an hour and the share of GPUs on spot (None: no limit).
    `zones`: GPUs by zone and type; none: one place without an end. `models_per_gpu`: workers on one GPU.
    """

    models: tuple[Model, ...]
    gpus: Mapping[str, int]
    max_gpus: int | None = None
    budget_usd_per_h: float | None = None
    spot_share: float | None = None
    zones: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    models_per_gpu: int = 1


_Gpus = dict[str, Annotated[int, Field(ge=0, le=1_000_000)]]


class _Limits(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, alias_generator=lambda name: name.replace("_", "-")
    )

    gpus: _Gpus = {}
    zones: dict[Annotated[str, Field(pattern=_ZONE)], _Gpus] = {}
    spot_share: Annotated[float, Field(ge=0, le=1, strict=False, allow_inf_nan=False)] | None = None
    max_gpus: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    models_per_gpu: Literal[1, 2, 4] = 1
    budget_usd_per_h: Annotated[float, Field(gt=0, le=1e9, strict=False, allow_inf_nan=False)] | None = None


class _PortfolioPart(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(pattern=_NAME)]
    trace: str | Annotated[list[str], Field(min_length=1, max_length=100)]
    zones: Annotated[list[str], Field(min_length=1, max_length=100)] | None = None
    adapter_of: str | None = Field(None, alias="adapter-of")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    form: Literal["tokenfleet.portfolio/1"] = Field(alias="schema")
    models: Annotated[list[_PortfolioPart], Field(min_length=1, max_length=MOST_MODELS)]
    limits: _Limits = _Limits()
    defaults: dict[str, Any] = {}


class _PlannedAdapter(BaseModel):
    name: Annotated[str, Field(pattern=_NAME)]


class _PlannedModel(BaseModel):
    name: Annotated[str, Field(pattern=_NAME)]
    zone: Annotated[str, Field(pattern=_ZONE)] | None = None
    adapters: list[_PlannedAdapter] = []
    spot: bool | None = None
    on_demand_workers: Annotated[int, Field(ge=0)] = 0
    constant_usd_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    plan: dict[str, Any]


class _PlannedLimit(BaseModel):
    name: str
    most: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Planned(BaseModel):
    """Fields that are not named here are for people and programs that know them."""

    form: Literal["tokenfleet.portfolio-plan/1"] = Field(alias="schema")
    models: Annotated[list[_PlannedModel], Field(min_length=1, max_length=MOST_MODELS)]
    limits: list[_PlannedLimit] = []


@dataclass(frozen=True)
class PlannedPortfolio:
    """The plan of each model, by name, its zone where it has one, and the limits of all.

    `adapters`: the names of each model's. `on_demand`: the most workers of each model that are on demand;
    infinity for a model on demand. `on_demand_usd_per_h`: what they cost more, where others are on spot.
    """

    plans: Mapping[str, PlanFile]
    limits: Limits
    zone_of: Mapping[str, str]
    adapters: Mapping[str, tuple[str, ...]]
    on_demand: Mapping[str, float]
    on_demand_usd_per_h: Mapping[str, float]


def read_planned_portfolio(path: Path) -> PlannedPortfolio:
    """A portfolio's plan, for those who serve it. Raises BadInput naming the file and the field."""
    planned = _planned(path)
    plans: dict[str, PlanFile] = {}
    zone_of: dict[str, str] = {}
    adapters = {model.name: tuple(one.name for one in model.adapters) for model in planned.models}
    _check_names([*(model.name for model in planned.models), *chain(*adapters.values())], path)
    for i, model in enumerate(planned.models):
        plans[model.name] = parse_plan(model.plan, f"{path}: models.{i}.plan")
        if model.zone is not None:
            zone_of[model.name] = model.zone
        if not plans[model.name].feasible:
            raise BadInput(f"{path}: models.{i}.plan: found no fleet, so there is none to run")
    limits = _limits({limit.name: limit.most for limit in planned.limits}, plans, zone_of, path)
    return PlannedPortfolio(plans, limits, zone_of, adapters, *_on_demand(planned, plans, path))


def _on_demand(
    planned: _Planned, plans: Mapping[str, PlanFile], path: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """The workers on demand of the models whose `spot` is known, and their extra cost. Raises BadInput."""
    on_demand: dict[str, float] = {}
    more_usd: dict[str, float] = {}
    for i, model in enumerate(planned.models):
        plan, n = plans[model.name], model.on_demand_workers
        if model.spot is not None:
            on_demand[model.name] = n if model.spot else math.inf
        if not (model.spot and n):
            continue
        if n > plan.workers:
            expected = f"expected at most the plan's {plan.workers}, got {n}"
            raise BadInput(f"{path}: models.{i}.on_demand_workers: {expected}")
        if model.constant_usd_per_hour is None or plan.usd_per_hour is None:
            raise BadInput(
                f"{path}: models.{i}.constant_usd_per_hour: missing; some of its workers are on spot"
            )
        more_usd[model.name] = max(0.0, model.constant_usd_per_hour - plan.usd_per_hour)
    return on_demand, more_usd


def _limits(
    most: Mapping[str, float], plans: Mapping[str, PlanFile], zone_of: Mapping[str, str], path: Path
) -> Limits:
    """The limits by their names. Raises BadInput for those that are not known or cannot be held."""
    from controlplane.scaler.shares import Limits  # loads pulp

    by_zone = {name: n for name, n in most.items() if name.startswith("zones.")}
    if by_zone and (nowhere := plans.keys() - zone_of.keys()):
        raise BadInput(f"{path}: models: {min(nowhere)}: zone: missing, and limits have {min(by_zone)}")
    gpus = {name.removeprefix("gpus."): int(n) for name, n in most.items() if name.startswith("gpus.")}
    # The plan holds the share on spot: it records for each model whether it is on spot.
    known = {f"gpus.{gpu}" for gpu in gpus} | {"max-gpus", "budget-usd-per-h", "spot-share"}
    if unknown := sorted(most.keys() - known - by_zone.keys()):
        raise BadInput(f"{path}: limits: {unknown[0]}: no such limit, expected {', '.join(sorted(known))}")
    # Of GPUs that no model there is planned on there is no limit to hold.
    taken = sorted({(zone, part.gpu) for name, zone in zone_of.items() for part in plans[name].fleet})
    zones = {at: int(by_zone[name]) for at in taken if (name := f"zones.{at[0]}.{at[1]}") in by_zone}
    max_gpus = int(most["max-gpus"]) if "max-gpus" in most else None
    return Limits(gpus, max_gpus, most.get("budget-usd-per-h"), zones)


def _planned(path: Path) -> _Planned:
    try:
        document = json.loads(read_text(path))
    except (ValueError, RecursionError):
        how = f"tokenfleet portfolio {path} --output-dir out"
        raise BadInput(f"{path}: is no JSON; a portfolio file is planned first: `{how}`") from None
    form = document.get("schema") if isinstance(document, dict) else None
    if form == PLAN_SCHEMA:
        raise BadInput(f"{path}: is the plan of one model; give it as --plan")
    if form != "tokenfleet.portfolio-plan/1":
        raise BadInput(f"{path}: schema: expected tokenfleet.portfolio-plan/1, got {str(form)[:40]!r}")
    try:
        return _Planned.model_validate(document, strict=True)
    except ValidationError as error:
        raise BadInput(fault_line(str(path), error)) from None


def read_portfolio(path: Path) -> Portfolio:
    """The portfolio in a file. Raises BadInput naming the file, the model and the field."""
    return portfolio_of(read_text(path), str(path), path.parent.joinpath)


def sent_portfolio(text: str, find: Find) -> Portfolio:
    """The portfolio in a text from outside, in which an alias may stand for any number of others."""
    with suppress(yaml.YAMLError):
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise BadInput("portfolio: has aliases (*name), which are not taken here")
    return portfolio_of(text, "portfolio", find)


def portfolio_of(text: str, path: str, find: Find) -> Portfolio:
    """The portfolio in the text of a file; `find` gives the files that it names, or raises BadInput.

    Raises BadInput naming `path`, the model and the field.
    """
    file = parse_yaml(text, path, _File, f"not a portfolio: expected `schema: {SCHEMA}` and its fields")
    _check_names([model.name for model in file.models], path)
    limits, models = file.limits, [model for model in file.models if model.adapter_of is None]
    for model in models:
        if unknown := [zone for zone in model.zones or () if zone not in limits.zones]:
            raise BadInput(f"{path}: models: {model.name}: zones: {unknown[0]}: not among limits.zones")
    found = [_model(f"{path}: models: {model.name}", model, path, file.defaults, find) for model in models]
    adapters = _adapters(path, models, [model for model in file.models if model.adapter_of is not None], find)
    return Portfolio(
        tuple(replace(model, adapters=adapters[model.name]) for model in found),
        _by_type(limits.gpus, f"{path}: limits.gpus"),
        limits.max_gpus,
        limits.budget_usd_per_h,
        limits.spot_share,
        {zone: _by_type(gpus, f"{path}: limits.zones.{zone}") for zone, gpus in limits.zones.items()},
        limits.models_per_gpu,
    )


def _check_names(names: Sequence[str], path: str | Path) -> None:
    """Raise BadInput where two models or adapters have one name."""
    if again := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise BadInput(f"{path}: models: {again} is given twice")


def _adapters(
    path: str, models: Sequence[_PortfolioPart], adapters: Sequence[_PortfolioPart], find: Find
) -> dict[str, tuple[AdapterTraffic, ...]]:
    """The adapters of each model. Raises BadInput for one of no model here, and for settings of its own."""
    of_model: dict[str, tuple[AdapterTraffic, ...]] = {model.name: () for model in models}
    for one in adapters:
        where, base = f"{path}: models: {one.name}", one.adapter_of or ""
        if base not in of_model:
            raise BadInput(f"{where}: adapter-of: {base}: no such model here{nearest(base, of_model)}")
        if own := [*(one.model_extra or {}), *(["zones"] if one.zones else [])]:
            raise BadInput(f"{where}: {own[0]}: an adapter is served as {base} is; leave it out")
        of_model[base] += (AdapterTraffic(one.name, _traces(where, one, find)),)
    return of_model


def _traces(where: str, model: _PortfolioPart, find: Find) -> tuple[Path, ...]:
    try:
        return tuple(map(find, [model.trace] if isinstance(model.trace, str) else model.trace))
    except BadInput as refusal:
        raise BadInput(f"{where}: trace: {refusal}") from None


def _by_type(named: Mapping[str, int], where: str) -> dict[str, int]:
    """GPUs by the names that profiles have for their types."""
    gpus: dict[str, int] = {}
    for name, most in named.items():
        (gpu, *_) = canonical_gpus(name)
        if gpu in gpus:
            raise BadInput(f"{where}: {name}: {gpu} is given twice")
        gpus[gpu] = most
    return gpus


def _model(where: str, model: _PortfolioPart, path: str, defaults: dict[str, Any], find: Find) -> Model:
    fields = model.model_extra or {}
    spot = {"spot": True} if _is_either(fields.get("spot", defaults.get("spot"))) else {}
    values = _read(f"{path}: defaults", defaults | (spot if "spot" in defaults else {}), find)
    values |= _read(where, fields | (spot if "spot" in fields else {}), find)
    if missing := next((o for o in options() if o.is_required and o.field not in values), None):
        raise BadInput(f"{where}: {missing.flag}: missing; {missing.about.help}")
    try:
        request = PlanRequest(**values).consistent()
    except ControlPlaneError as refusal:
        raise BadInput(f"{where}: {refusal}") from None
    on_demand = (replace(request, spot=False, reclaims_per_h=None),) if spot else ()
    zones = None if model.zones is None else tuple(model.zones)
    return Model(model.name, _traces(where, model, find), (*on_demand, request), zones)


def _is_either(spot: Any) -> bool:
    """Whether a model may be on demand or on spot: `spot: [no, yes]`."""
    return isinstance(spot, list) and sorted(map(str, spot)) == ["False", "True"]


def _read(where: str, fields: Mapping[str, Any], find: Find) -> dict[str, Any]:
    """Fields of a model, or the defaults, as those of a request. Raises BadInput."""
    flags = {option.flag: option for option in options() if option.field != "classes"}
    values: dict[str, Any] = {}
    for key, value in fields.items():
        flag = str(key).replace("_", "-")
        if flag not in flags:
            raise BadInput(f"{where}: {key}: no such flag of `tokenfleet plan`{nearest(flag, flags)}")
        try:
            values |= _values(flags[flag], value, find)
        except BadInput as refusal:
            fault = str(refusal).removeprefix(f"--{flag}: ")
            raise BadInput(f"{where}: {key}: {fault}") from None
    return values


def _values(option: Option, value: Any, find: Find) -> dict[str, Any]:
    """A setting as fields of a request; YAML's mappings and lists stand for the text of a flag."""
    listed = value if isinstance(value, list) else [value]
    if option.field == "slo":
        return read_targets(list(map(as_text, listed)))
    if option.kind == "file":
        paths = [find(str(one)) for one in listed]
        return {option.field: option.checked(tuple(paths) if option.is_list else paths[0])}
    return {option.field: option.read(as_text(value))}
