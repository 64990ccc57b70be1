"""The custom Kubernetes objects we write, field by field, and the check of every object before it is written.

Pinned to ray.io/v1 (KubeRay 1.4), keda.sh/v1alpha1 (KEDA 2.17) and monitoring.coreos.com/v1; only the fields
that are used stand here, each as strict as its API.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from tokenfleet.export.kubernetes import (
    Claim,
    ConfigMap,
    DeploymentObject,
    Metadata,
    Name,
    PodTemplate,
    Selector,
    Service,
    Strict,
)

Duration = Annotated[str, Field(pattern=r"^([0-9]+(ms|s|m|h|d))+$")]
Cron = Annotated[str, Field(pattern=r"^([0-5]?\d) ([01]?\d|2[0-3]) \* \* (\*|[0-6](-[0-6])?)$")]


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroupSpec(Strict):
    groupName: Name
    replicas: Annotated[int, Field(ge=0)]
    minReplicas: Annotated[int, Field(ge=0)]
    maxReplicas: Annotated[int, Field(ge=0)]
    rayStartParams: dict[str, str]
    template: PodTemplate


class RayClusterSpec(Strict):
    rayVersion: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroupSpec]


class RayJobSpec(Strict):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode"]
    backoffLimit: Annotated[int, Field(ge=0)]
    shutdownAfterJobFinishes: bool
    rayClusterSpec: RayClusterSpec


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


class ScaleTarget(Strict):
    apiVersion: Literal["apps/v1"]
    kind: Literal["Deployment"]
    name: Name


class CronMetadata(Strict):
    timezone: str
    start: Cron
    end: Cron
    desiredReplicas: Annotated[str, Field(pattern=r"^[1-9]\d*$")]


class CronTrigger(Strict):
    type: Literal["cron"]
    metadata: CronMetadata


class ScaledObjectSpec(Strict):
    scaleTargetRef: ScaleTarget
    minReplicaCount: Annotated[int, Field(ge=0)]
    maxReplicaCount: Annotated[int, Field(ge=1)]
    pollingInterval: Annotated[int, Field(ge=1)]
    cooldownPeriod: Annotated[int, Field(ge=0)]
    triggers: Annotated[list[CronTrigger], Field(min_length=1)]


class ScaledObject(Strict):
    apiVersion: Literal["keda.sh/v1alpha1"]
    kind: Literal["ScaledObject"]
    metadata: Metadata
    spec: ScaledObjectSpec


class AlertOrRecord(Strict):
    expr: Annotated[str, Field(min_length=1)]
    record: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_:]*$")] | None = None
    alert: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]*$")] | None = None
    for_: Duration | None = Field(None, alias="for")
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class RuleGroup(Strict):
    name: str
    interval: Duration | None = None
    rules: Annotated[list[AlertOrRecord], Field(min_length=1)]


class RuleGroups(Strict):
    groups: list[RuleGroup]


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: RuleGroups


class Endpoint(Strict):
    port: str
    path: str
    interval: Duration


class ServiceMonitorSpec(Strict):
    selector: Selector
    endpoints: list[Endpoint]


class ServiceMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: ServiceMonitorSpec


AnyObject = Annotated[
    DeploymentObject | Service | ConfigMap | Claim | RayJob | ScaledObject | PrometheusRule | ServiceMonitor,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyObject)


def checked_object(content: dict[str, Any]) -> dict[str, Any]:
    """`content`, if it is an object as its API takes it; pydantic's ValidationError is a fault of ours."""
    _ADAPTER.validate_python(content)
    return content
