"""A fleet on KubeRay: one Ray cluster with as many GPUs as the plan has, and `tokenfleet serve` on its head.

The head holds the first worker's GPUs too, since the gateway's vLLM looks for a GPU on the host where it
starts. Requests reach it through a Service of the export's own: KubeRay derives the name of its Service from
a cluster name that it generates.
"""

from __future__ import annotations

import shlex
from typing import Any

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerGroup
from tokenfleet.export.deployment import Deployment, product
from tokenfleet.export.kubernetes import checked_object

RAY_VERSION = "2.60.0"
PORT, CONTROL_PORT = 8000, 8001
KEYS = "tokenfleet-keys"  # the Secret with api-key and control-key
MEMORY_PER_GPU_GI = 64
CORES_PER_GPU = 8


def kuberay(fleet: Deployment, name: str, image: str) -> list[dict[str, Any]]:
    """The RayJob and the Service. Raises BadInput for a fleet that one `serve` cannot run."""
    if any(group.role != "any" for group in fleet.groups):
        raise BadInput("kuberay: `tokenfleet serve` has no separate prefill and decode workers yet")
    first, *others = fleet.groups
    rest = [(first, first.workers - 1), *((group, group.workers) for group in others)]
    labels = {"app.kubernetes.io/name": "tokenfleet", "app.kubernetes.io/instance": name}
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "entrypoint": shlex.join(serve_words(fleet)),
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
                        "spec": _pod(first, _head(first, image)),
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
    return [checked_object(job), checked_object(service)]


def serve_words(fleet: Deployment) -> list[str]:
    """`tokenfleet serve` for the fleet, reachable from other machines; its keys come by the environment."""
    words = ["tokenfleet", "serve", "--model", fleet.weights]
    first = fleet.groups[0].worker_type
    if len(fleet.groups) == 1 and first.usd_per_h is None and not first.reclaims_per_h:
        words += ["--workers", str(fleet.workers), "--tp", str(first.tp_degree)]
    else:
        words += [word for group in fleet.groups for word in ("--kind", _kind(group))]
    words += ["--slo", fleet.slo_text, "--max-workers", str(fleet.workers)]
    words += ["--host", "0.0.0.0", "--port", str(PORT)]
    words += ["--control-host", "0.0.0.0", "--control-port", str(CONTROL_PORT)]
    flags = [_engine_flags(fleet, group) for group in fleet.groups]
    # Engines of one fleet get the same flags: those of the group that was planned with the least.
    least = min(flags, key=lambda words: [int(word) for word in words if word.isdigit()])
    return [*words, *(["--", *least] if least else [])]


def _kind(group: WorkerGroup) -> str:
    """The group as `--kind` takes it, with price and reclaims where they are known."""
    t, workers = group.worker_type, group.workers
    text = f"gpu={t.gpu},tp={t.tp_degree},workers={workers},max={workers}"
    text += "" if t.usd_per_h is None else f",usd={t.usd_per_h:.6g}"
    return text + (f",reclaims={t.reclaims_per_h:g}" if t.reclaims_per_h else "")


def _engine_flags(fleet: Deployment, group: WorkerGroup) -> list[str]:
    """vLLM's flags for what the plan assumed of the group's engine."""
    engine = fleet.engine_of(group)
    if engine is None:
        return []
    batched, seqs = engine.max_batched_tokens, engine.max_seqs
    return ["--max-num-batched-tokens", str(batched), "--max-num-seqs", str(seqs)]


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


def _dns(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")[:50]
