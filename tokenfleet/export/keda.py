"""A ScaledObject of KEDA that follows `tokenfleet advise`, for the Deployment of a plan's workers.

The trigger asks Prometheus for the advice. Its metric is the wanted number of replicas at a target of 1 by
AverageValue, so the HorizontalPodAutoscaler wants that number. Two of its own rules are switched off. It
ignores changes within a tenth, which swallows steps of one above 10 replicas. It holds a fall for 300 s,
which the advice has done already.

Without an advice (the gauge is missing, Prometheus does not answer) KEDA keeps the plan's whole fleet, or
what there is if that is more.
"""

from __future__ import annotations

from typing import Any

from controlplane.errors import BadInput
from tokenfleet.advise.gauges import WANTED
from tokenfleet.export.deployment import Deployment
from tokenfleet.export.production_stack import spec_name

ADVISE_PORT = 9105
POLL_S = 15
FAILURES = 4  # polls without an answer, before KEDA keeps to the plan


def bounds(fleet: Deployment) -> tuple[int, int]:
    """The fewest replicas that the plan's schedule has, and the plan's own."""
    return max(min((s.workers for s in fleet.schedule), default=fleet.workers), 1), fleet.workers


def advise_words(fleet: Deployment) -> list[str]:
    """The `tokenfleet advise` that the ScaledObject follows. Raises BadInput as `keda` does."""
    worker_type = _one_type(fleet)
    low, high = bounds(fleet)
    words = ["tokenfleet", "advise", "dns:SERVICE:8000", "--model", fleet.model]
    words += ["--gpu", str(worker_type.gpu), "--tp", str(worker_type.tp_degree), "--slo", fleet.slo_text]
    words += ["--attainment", f"{fleet.attainment:g}", "--replicas", f"{low}..{high}"]
    words += ["--cold-start", f"{fleet.cold_start_s:g}s"]
    return [*words, "--listen", f"0.0.0.0:{ADVISE_PORT}"]


def keda(fleet: Deployment, release: str, prometheus: str) -> dict[str, Any]:
    """The ScaledObject for the Deployment of the production-stack release `release`.

    Raises BadInput for several types of worker, which an advice does not tell apart.
    """
    _one_type(fleet)
    name, (low, high) = f"{release}-{spec_name(fleet, 0)}", bounds(fleet)
    at_once: dict[str, Any] = {
        "stabilizationWindowSeconds": 0,
        "tolerance": "0",
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": POLL_S}],
    }
    model = fleet.weights.replace("\\", "\\\\").replace('"', '\\"')
    trigger = {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": prometheus,
            "query": f'max({WANTED}{{model="{model}"}})',
            "threshold": "1",
            "ignoreNullValues": "false",
        },
    }
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-deployment-vllm"}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": f"{name}-advice"},
        "spec": {
            "scaleTargetRef": target,
            "minReplicaCount": low,
            "maxReplicaCount": high,
            "pollingInterval": POLL_S,
            "fallback": {
                "failureThreshold": FAILURES,
                "replicas": high,
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {
                "horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": at_once, "scaleDown": at_once}}
            },
            "triggers": [trigger],
        },
    }


def _one_type(fleet: Deployment) -> Any:
    """The one type of worker that the fleet has."""
    if fleet.unserved is not None:
        raise BadInput(f"keda: {fleet.unserved}")
    if len(fleet.groups) > 1 or any(group.role != "any" for group in fleet.groups):
        raise BadInput("keda: the advice is for one type of worker; plan with one --gpu and one --tp")
    return fleet.groups[0].worker_type
