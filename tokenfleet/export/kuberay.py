"""A fleet on KubeRay: one Ray cluster with as many GPUs as the plan has, and `serve --plan` on its head.

The head holds the first worker's GPUs too, since the gateway's vLLM looks for a GPU on the host where it
starts. Requests reach it through a Service of the export's own: KubeRay derives the name of its Service from
a cluster name that it generates.
"""

from __future__ import annotations

import shlex
from typing import Any

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerGroup
from dataplane.live.engine_api import RAY_VERSION
from tokenfleet.export.deployment import CONTROL_PORT, PLAN, PORT, Deployment, product, serve_words
from tokenfleet.export.kubernetes import checked_object

FOLDER = "/etc/tokenfleet"  # of the plan's file
MOST_CONFIG_BYTES = 1_000_000
KEYS = "tokenfleet-keys"  # the Secret with api-key and control-key
MEMORY_PER_GPU_GI = 64
CORES_PER_GPU = 8


def kuberay(fleet: Deployment, name: str, image: str) -> list[dict[str, Any]]:
    """The plan's ConfigMap, the RayJob and the Service. Raises BadInput for a plan that is too large."""
    if len(fleet.document) > MOST_CONFIG_BYTES:
        raise BadInput(f"kuberay: the plan has {len(fleet.document)} bytes, a ConfigMap {MOST_CONFIG_BYTES}")
    first, *others = fleet.groups
    rest = [(first, first.workers - 1), *((group, group.workers) for group in others)]
    labels = {"app.kubernetes.io/name": "tokenfleet", "app.kubernetes.io/instance": name}
    plan: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-plan", "labels": labels},
        "data": {PLAN: fleet.document},
    }
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "entrypoint": shlex.join(serve_words(fleet, f"{FOLDER}/{PLAN}")),
            "submissionMode": "K8sJobMode",
            # A fleet that ends by itself has failed: a new cluster is made for it, so many times.
            "backoffLimit": 10,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": "0.0.0.0"},
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": _with_plan(_pod(first, _head(first, image)), plan["metadata"]["name"]),
                    },
                },
                "workerGroupSpecs": [
                    {
                        "groupName": _dns(group.worker_type.name),
                        "replicas": count,
                        "minReplicas": count,
                        "maxReplicas": count,
                        "rayStartParams": {},
                        "template": {"spec": _pod(group, _ray(group, image, "ray-worker"))},
                    }
                    for group, count in rest
                    if count
                ],
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": labels | {"ray.io/node-type": "head"},
            "ports": [
                {"name": "openai", "port": PORT, "targetPort": "openai"},
                {"name": "control", "port": CONTROL_PORT, "targetPort": "control"},
            ],
        },
    }
    return [checked_object(one) for one in (plan, job, service)]


def _head(group: WorkerGroup, image: str) -> dict[str, Any]:
    container = _ray(group, image, "ray-head")
    container["env"] = [
        _secret("VLLM_API_KEY", "api-key"),
        _secret("TOKENFLEET_CONTROL_KEY", "control-key"),
        _secret("HF_TOKEN", "hf-token"),
        {"name": "RAY_ADDRESS", "value": "auto"},
    ]
    container["ports"] = [
        {"name": "openai", "containerPort": PORT},
        {"name": "control", "containerPort": CONTROL_PORT},
        {"name": "gcs-server", "containerPort": 6379},
        {"name": "dashboard", "containerPort": 8265},
        {"name": "client", "containerPort": 10001},
    ]
    return container


def _secret(variable: str, key: str) -> dict[str, Any]:
    source = {"name": KEYS, "key": key, "optional": key == "hf-token"}
    return {"name": variable, "valueFrom": {"secretKeyRef": source}}


def _ray(group: WorkerGroup, image: str, name: str) -> dict[str, Any]:
    gpus = group.worker_type.gpus
    amounts = {
        "cpu": str(CORES_PER_GPU * gpus),
        "memory": f"{MEMORY_PER_GPU_GI * gpus}Gi",
        "nvidia.com/gpu": str(gpus),
    }
    return {
        "name": name,
        "image": image,
        "env": [_secret("HF_TOKEN", "hf-token")],
        "resources": {"requests": amounts, "limits": amounts},
        # Ranks of a tensor-parallel worker talk through shared memory.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }


def _pod(group: WorkerGroup, container: dict[str, Any]) -> dict[str, Any]:
    shm = {"medium": "Memory", "sizeLimit": f"{8 * group.worker_type.gpus}Gi"}
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": shm}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    label = product(group)
    if label is not None:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": label}
    return pod


def _with_plan(pod: dict[str, Any], config: str) -> dict[str, Any]:
    """The pod with the plan's file in its first container."""
    pod["volumes"].append({"name": "plan", "configMap": {"name": config}})
    mount = {"name": "plan", "mountPath": FOLDER, "readOnly": True}
    pod["containers"][0]["volumeMounts"].append(mount)
    return pod


def _dns(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")[:50]
