"""The Kubernetes objects that exports write, as strict models, and the check of every object.

Pinned to apps/v1, v1, policy/v1, rbac.authorization.k8s.io/v1 and networking.k8s.io/v1. Custom objects are
those of keda.sh/v1alpha1 (KEDA 2.17) and monitoring.coreos.com/v1. Only the fields that are used stand here,
each as strict as its API; any other field is an error. A RayCluster is held against KubeRay's own schema
(harness/crd_schemas.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]  # DNS-1123 label
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
]
Labels = dict[LabelKey, LabelValue]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Name
    namespace: Name | None = None
    labels: Labels = {}
    annotations: dict[LabelKey, str] = {}


class PodMetadata(Strict):
    labels: Labels = {}
    annotations: dict[LabelKey, str] = {}


class SecretKey(Strict):
    name: Name
    key: str
    optional: bool = False


class FieldKey(Strict):
    fieldPath: Literal["status.podIP"]


class FromSource(Strict):
    secretKeyRef: SecretKey | None = None
    fieldRef: FieldKey | None = None


class Env(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str | None = None
    valueFrom: FromSource | None = None


class ContainerPort(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,15}$")]
    containerPort: Port


class Resources(Strict):
    requests: dict[LabelKey, Quantity] = {}
    limits: dict[LabelKey, Quantity] = {}


class Mount(Strict):
    name: Name
    mountPath: Annotated[str, Field(pattern=r"^/")]
    readOnly: bool = False
    subPath: str | None = None


class HttpGet(Strict):
    path: str
    port: str | int


class Probe(Strict):
    httpGet: HttpGet
    initialDelaySeconds: Annotated[int, Field(ge=0)] = 0
    periodSeconds: Annotated[int, Field(ge=1)] = 10
    timeoutSeconds: Annotated[int, Field(ge=1)] = 1
    failureThreshold: Annotated[int, Field(ge=1)] = 3


class SecurityContext(Strict):
    allowPrivilegeEscalation: bool | None = None
    runAsNonRoot: bool | None = None
    runAsUser: int | None = None
    fsGroup: int | None = None
    readOnlyRootFilesystem: bool | None = None
    capabilities: dict[Literal["drop", "add"], list[str]] | None = None
    seccompProfile: dict[Literal["type"], str] | None = None


class Container(Strict):
    name: Name
    image: Annotated[str, Field(min_length=1)]
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[Env] = []
    ports: list[ContainerPort] = []
    resources: Resources | None = None
    volumeMounts: list[Mount] = []
    startupProbe: Probe | None = None
    readinessProbe: Probe | None = None
    livenessProbe: Probe | None = None
    securityContext: SecurityContext | None = None


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""
    sizeLimit: Quantity | None = None


class ClaimSource(Strict):
    claimName: Name


class ConfigMapSource(Strict):
    name: Name


class Volume(Strict):
    name: Name
    emptyDir: EmptyDir | None = None
    persistentVolumeClaim: ClaimSource | None = None
    configMap: ConfigMapSource | None = None


class Toleration(Strict):
    key: str
    operator: Literal["Exists", "Equal"]
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class PodSpec(Strict):
    containers: Annotated[list[Container], Field(min_length=1)]
    nodeSelector: Labels = {}
    tolerations: list[Toleration] = []
    volumes: list[Volume] = []
    terminationGracePeriodSeconds: Annotated[int, Field(ge=0)] | None = None
    securityContext: SecurityContext | None = None
    automountServiceAccountToken: bool | None = None
    serviceAccountName: Name | None = None


class PodTemplate(Strict):
    metadata: PodMetadata = PodMetadata()
    spec: PodSpec


class Selector(Strict):
    matchLabels: Labels


class Strategy(Strict):
    type: Literal["Recreate", "RollingUpdate"]


class DeploymentSpec(Strict):
    replicas: Annotated[int, Field(ge=0)]
    selector: Selector
    strategy: Strategy | None = None
    template: PodTemplate


class DeploymentObject(Strict):
    apiVersion: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Metadata
    spec: DeploymentSpec


class ServicePort(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,15}$")]
    port: Port
    targetPort: str | int


class ServiceSpec(Strict):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    selector: Labels
    ports: list[ServicePort]


class Service(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["Service"]
    metadata: Metadata
    spec: ServiceSpec


class ConfigMap(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$")], str]


class ClaimSpec(Strict):
    accessModes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]]
    resources: Resources


class Claim(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: ClaimSpec


Duration = Annotated[str, Field(pattern=r"^([0-9]+(ms|s|m|h|d))+$")]


class BudgetSpec(Strict):
    """Of pods that no Deployment owns: a number that must stay is all that Kubernetes takes."""

    minAvailable: Annotated[int, Field(ge=0)]
    selector: Selector


class PodDisruptionBudget(Strict):
    apiVersion: Literal["policy/v1"]
    kind: Literal["PodDisruptionBudget"]
    metadata: Metadata
    spec: BudgetSpec


class ServiceAccount(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["ServiceAccount"]
    metadata: Metadata


Verb = Literal["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"]


class RoleRule(Strict):
    apiGroups: Annotated[list[str], Field(min_length=1)]
    resources: Annotated[list[str], Field(min_length=1)]
    resourceNames: list[str] | None = None
    verbs: Annotated[list[Verb], Field(min_length=1)]


class Role(Strict):
    apiVersion: Literal["rbac.authorization.k8s.io/v1"]
    kind: Literal["Role"]
    metadata: Metadata
    rules: Annotated[list[RoleRule], Field(min_length=1)]


class RoleReference(Strict):
    apiGroup: Literal["rbac.authorization.k8s.io"]
    kind: Literal["Role", "ClusterRole"]
    name: Name


class Subject(Strict):
    kind: Literal["ServiceAccount"]
    name: Name
    namespace: Name | None = None


class RoleBinding(Strict):
    apiVersion: Literal["rbac.authorization.k8s.io/v1"]
    kind: Literal["RoleBinding"]
    metadata: Metadata
    roleRef: RoleReference
    subjects: Annotated[list[Subject], Field(min_length=1)]


class Peer(Strict):
    podSelector: dict[Literal["matchLabels"], Labels] | None = None
    namespaceSelector: dict[Literal["matchLabels"], Labels] | None = None


class AllowedPort(Strict):
    port: Port
    protocol: Literal["TCP", "UDP"] = "TCP"


class Ingress(Strict):
    from_: list[Peer] | None = Field(None, alias="from")
    ports: list[AllowedPort] | None = None


class NetworkPolicySpec(Strict):
    podSelector: Selector
    policyTypes: list[Literal["Ingress", "Egress"]]
    ingress: list[Ingress]


class NetworkPolicy(Strict):
    apiVersion: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: NetworkPolicySpec


class ScaleTarget(Strict):
    apiVersion: Literal["apps/v1"]
    kind: Literal["Deployment", "StatefulSet"]
    name: Name


class PrometheusMetadata(Strict):
    serverAddress: Annotated[str, Field(pattern=r"^https?://")]
    query: Annotated[str, Field(min_length=1)]
    threshold: Annotated[str, Field(pattern=r"^[1-9]\d*$")]
    ignoreNullValues: Literal["true", "false"]


class PrometheusTrigger(Strict):
    type: Literal["prometheus"]
    metricType: Literal["AverageValue", "Value"]
    metadata: PrometheusMetadata


class ScalerMetadata(Strict):
    """What KEDA itself reads, and what it passes on: `model`, `workerType`."""

    scalerAddress: Annotated[str, Field(pattern=r"^\S+:\d+$")]
    model: str
    workerType: str = ""


class ExternalTrigger(Strict):
    type: Literal["external", "external-push"]
    metricType: Literal["AverageValue", "Value"]
    metadata: ScalerMetadata


Trigger = Annotated[PrometheusTrigger | ExternalTrigger, Field(discriminator="type")]


class ScalingPolicy(Strict):
    type: Literal["Percent", "Pods"]
    value: Annotated[int, Field(ge=1)]
    periodSeconds: Annotated[int, Field(ge=1, le=1800)]


class ScalingRules(Strict):
    stabilizationWindowSeconds: Annotated[int, Field(ge=0, le=3600)]
    tolerance: Quantity
    policies: Annotated[list[ScalingPolicy], Field(min_length=1)]


class Behavior(Strict):
    scaleUp: ScalingRules
    scaleDown: ScalingRules


class HpaConfig(Strict):
    behavior: Behavior


class Advanced(Strict):
    horizontalPodAutoscalerConfig: HpaConfig


class Fallback(Strict):
    """KEDA 2.16's; it acts on triggers of AverageValue alone."""

    failureThreshold: Annotated[int, Field(ge=1)]
    replicas: Annotated[int, Field(ge=0)]
    behavior: Literal["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]


class ScaledObjectSpec(Strict):
    scaleTargetRef: ScaleTarget
    minReplicaCount: Annotated[int, Field(ge=0)]
    maxReplicaCount: Annotated[int, Field(ge=1)]
    pollingInterval: Annotated[int, Field(ge=1)]
    fallback: Fallback
    advanced: Advanced
    triggers: Annotated[list[Trigger], Field(min_length=1)]


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


class ScrapeEndpoint(Strict):
    port: str
    path: str
    interval: Duration


class ServiceMonitorSpec(Strict):
    selector: Selector
    endpoints: list[ScrapeEndpoint]


class ServiceMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["ServiceMonitor"]
    metadata: Metadata
    spec: ServiceMonitorSpec


AnyObject = Annotated[
    DeploymentObject
    | Service
    | ConfigMap
    | Claim
    | PodDisruptionBudget
    | NetworkPolicy
    | ScaledObject
    | ServiceAccount
    | Role
    | RoleBinding
    | PrometheusRule
    | ServiceMonitor,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(AnyObject)


def checked_object(content: dict[str, Any]) -> dict[str, Any]:
    """`content`, if it is an object as its API takes it; pydantic's ValidationError is a fault of ours."""
    _ADAPTER.validate_python(content)
    return content
