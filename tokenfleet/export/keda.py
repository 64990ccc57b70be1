"""A ScaledObject of KEDA for each worker type, which follows `tokenfleet advise`: of a plan, or of an advice.

The trigger asks for the advice: by Prometheus, or by gRPC as KEDA's external scaler. Its metric is the wanted
number of replicas at a target of 1 by AverageValue, so the HorizontalPodAutoscaler wants that number. Two of
its own rules are switched off. It ignores changes within a tenth, which swallows steps of one above 10
replicas. It holds a fall for 300 s, which the advice has done already.

Without an advice (the gauge is missing, nothing answers) KEDA keeps `Followed.fallback`, or what there is if
that is more.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pydantic

from controlplane.errors import BadInput
from tokenfleet.advise.advice import ScaleTarget
from tokenfleet.advise.published import TYPE, WANTED
from tokenfleet.advise.view import SCHEMA
from tokenfleet.export.deployment import Deployment
from tokenfleet.export.production_stack import spec_name
from tokenfleet.planning.fleet import Fleet, apportioned
from tokenfleet.texts import host_port

ADVISE_PORT, SCALER_PORT = 9105, 6000
POLL_S = 15
FAILURES = 4  # polls without an answer, before KEDA keeps to the plan


@dataclass(frozen=True, slots=True)
class Followed:
    """What KEDA scales: the object, its model's name, floor, ceiling, and the replicas without advice.

    `worker_type`: the type whose advice is followed; empty where the advice names none.
    """

    target: ScaleTarget
    model: str
    low: int
    high: int
    fallback: int
    worker_type: str = ""


def followed_plan(
    fleet: Deployment, release: str, targets: Mapping[str, ScaleTarget] | None = None
) -> list[Followed]:
    """The plan's workers, each type by itself: `targets`, or Deployments of production-stack's `release`.

    `targets`: by the name of the type; "" where there is one. Raises BadInput.
    """
    stack = {
        name: ScaleTarget("Deployment", f"{release}-{spec_name(fleet, number)}-deployment-vllm")
        for number, name in enumerate(_types(fleet))
    }
    named = _of_each(targets or stack, stack)
    return [
        Followed(named[name], fleet.weights, low, group.workers, group.workers, name)
        for name, low, group in zip(stack, _floors(fleet), fleet.groups, strict=True)
    ]


def _of_each(targets: Mapping[str, ScaleTarget], types: Collection[str]) -> Mapping[str, ScaleTarget]:
    """The targets. Raises BadInput where they are not those of these types."""
    if targets.keys() != set(types):
        each = [f"{name}=deployment/NAME".lstrip("=") for name in types]
        asked = " ".join(f"--target {shlex.quote(one)}" for one in each)
        raise BadInput(f"--target: expected {asked}")
    if len({target.name for target in targets.values()}) < len(targets):
        raise BadInput("--target: one object cannot have workers of two types; name one for each type")
    return targets


class _OfType(pydantic.BaseModel):
    """The fields of an advice for a type that a ScaledObject needs."""

    replicas: int = pydantic.Field(ge=0)
    wanted_replicas: int | None = pydantic.Field(ge=0)
    floor: int = pydantic.Field(ge=0)
    ceiling: int | None = pydantic.Field(ge=1)
    worker_type: str | None = None


class _Advice(_OfType):
    """Those of the whole; `worker_types`: of a mixed fleet."""

    schema_: Literal["tokenfleet.advice/1"] = pydantic.Field(alias="schema")
    model: str = pydantic.Field(min_length=1)
    floor: int = pydantic.Field(ge=1)
    worker_types: list[_OfType] | None = None


def followed_advice(text: str, where: str, targets: Mapping[str, ScaleTarget]) -> list[Followed]:
    """The fleet of an advice, the last of `text`, as `advise --format json` prints it; each type by itself.

    `targets`: by the name of the type; "" where there is one. Raises BadInput.
    """
    told = [line for line in text.splitlines() if line.strip()]
    try:
        document = json.loads(told[-1] if told else "")
    except ValueError:
        raise BadInput(f"{where}: expected a document of `tokenfleet advise --format json`") from None
    try:
        advice = _Advice.model_validate(document)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "advice"
        raise BadInput(f"{where}: {field}: {first['msg']}; expected a document of {SCHEMA}") from None
    of_types = {one.worker_type or "": one for one in advice.worker_types or ()} or {"": advice}
    named = _of_each(targets, of_types)
    return [_followed(advice.model, one, where, named[name]) for name, one in of_types.items()]


def _followed(model: str, one: _OfType, where: str, target: ScaleTarget) -> Followed:
    if one.ceiling is None:
        raise BadInput(f"{where}: ceiling: missing; run advise with --replicas MIN..MAX, or max in --kind")
    fallback = min(max(one.wanted_replicas or 0, one.replicas, one.floor), one.ceiling)
    return Followed(target, model, one.floor, one.ceiling, fallback, one.worker_type or "")


def _floors(fleet: Deployment) -> list[int]:
    """The fewest workers of each type that the plan's schedule has; of one type, one at least."""
    if len(fleet.groups) == 1:
        return [_floor(fleet)]
    mix = Fleet(fleet.groups)
    stretches = [apportioned(mix, stretch.workers).groups for stretch in fleet.plan.schedule] or [
        fleet.groups
    ]
    counts = [{group.worker_type: group.workers for group in groups} for groups in stretches]
    return [min(of.get(group.worker_type, 0) for of in counts) for group in fleet.groups]


def _floor(fleet: Deployment) -> int:
    """The fewest workers that the plan's schedule has, one at least."""
    return max(min((s.workers for s in fleet.plan.schedule), default=fleet.plan.workers), 1)


def advise_words(fleet: Deployment, by_scaler: bool = False) -> list[str]:
    """The `tokenfleet advise` that the ScaledObjects follow. Raises BadInput as `followed_plan` does."""
    types, words = _types(fleet), ["tokenfleet", "advise"]
    for number, (group, low) in enumerate(zip(fleet.groups, _floors(fleet), strict=True)):
        gpu, tp = str(group.worker_type.gpu), str(group.worker_type.tp_degree)
        if len(types) == 1:
            words += ["dns:SERVICE:8000", "--gpu", gpu, "--tp", tp]
        else:
            servers = f"servers=dns:SERVICE-{spec_name(fleet, number)}:8000"
            words += ["--kind", f"gpu={gpu},tp={tp},min={low},max={group.workers},{servers}"]
    slo, attainment = fleet.promise
    targets = f"ttft={slo.ttft_s:g}s,tpot={slo.tpot_s:g}s"
    words += ["--model", fleet.model, "--slo", targets, "--attainment", f"{attainment:g}"]
    replicas, cold_start_s = f"{_floor(fleet)}..{fleet.plan.workers}", fleet.plan.cold_start_s
    words += ["--replicas", replicas, "--cold-start", f"{cold_start_s:g}s"]
    return [*words, *asked_at(by_scaler)]


def asked_at(by_scaler: bool) -> list[str]:
    """The flags by which `advise` answers KEDA's trigger."""
    return ["--scaler", f"0.0.0.0:{SCALER_PORT}"] if by_scaler else ["--listen", f"0.0.0.0:{ADVISE_PORT}"]


def keda(followed: Followed, prometheus: str, scaler: str | None = None) -> dict[str, Any]:
    """The ScaledObject. `scaler`: HOST:PORT of `advise --scaler`, asked instead of `prometheus`. BadInput."""
    at_once: dict[str, Any] = {
        "stabilizationWindowSeconds": 0,
        "tolerance": "0",
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": POLL_S}],
    }
    target = {"apiVersion": "apps/v1", "kind": followed.target.kind, "name": followed.target.name}
    trigger = _by_prometheus(followed, prometheus) if scaler is None else _by_scaler(followed, scaler)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": f"{followed.target.name.removesuffix('-deployment-vllm')}-advice"},
        "spec": {
            "scaleTargetRef": target,
            "minReplicaCount": followed.low,
            "maxReplicaCount": followed.high,
            "pollingInterval": POLL_S,
            "fallback": {
                "failureThreshold": FAILURES,
                "replicas": followed.fallback,
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {
                "horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": at_once, "scaleDown": at_once}}
            },
            "triggers": [trigger],
        },
    }


def _by_prometheus(followed: Followed, prometheus: str) -> dict[str, Any]:
    labels = {"model": followed.model} | ({"worker_type": of} if (of := followed.worker_type) else {})
    asked = ",".join(f"{label}={json.dumps(value, ensure_ascii=False)}" for label, value in labels.items())
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": prometheus,
            "query": f"max({WANTED}{{{asked}}})",
            "threshold": "1",
            "ignoreNullValues": "false",
        },
    }


def _by_scaler(followed: Followed, scaler: str) -> dict[str, Any]:
    """KEDA asks `advise --scaler` for the number, and is pushed whether the fleet is active."""
    host_port(scaler, "--scaler")
    metadata = {"scalerAddress": scaler, "model": followed.model}
    if followed.worker_type:
        metadata[TYPE] = followed.worker_type
    return {"type": "external-push", "metricType": "AverageValue", "metadata": metadata}


def _types(fleet: Deployment) -> list[str]:
    """The names by which an advice tells the fleet's worker types apart; "" of the only one. BadInput."""
    if fleet.unserved is not None:
        raise BadInput(f"keda: {fleet.unserved}")
    if any(group.role != "any" for group in fleet.groups):
        raise BadInput("keda: no advice is for prefill and decode workers; plan with --engine chunked")
    names = [group.worker_type.name for group in fleet.groups]
    if len(set(names)) < len(names):
        raise BadInput(f"keda: fleet: expected each worker type once, got {', '.join(names)}")
    return names if len(names) > 1 else [""]
