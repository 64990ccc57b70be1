"""A fleet on KubeRay: a Ray cluster whose pods hold GPUs, and `serve --plan` as a Deployment that joins it.

The gateway's pod is a Ray node with the GPUs of the first worker, since vLLM's front end looks for a GPU
where it starts. Ray's head has no GPU. It is ready without the fleet, which could not start otherwise. Pods
reach each other at their own addresses, on ports that the system chooses. Before a pod ends, the control API
evacuates its workers within the pod's grace period.
"""

from __future__ import annotations

import shlex
from typing import Any

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerGroup
from dataplane.live.engine_api import RAY_VERSION
from tokenfleet.export.deployment import CONTROL_PORT, PLAN, PORT, Deployment, dns_name, serve_words

FOLDER = "/etc/tokenfleet"  # of the plan's file
HOME = "/var/lib/tokenfleet"  # of what is downloaded and compiled
MOST_CONFIG_BYTES = 1_000_000
KEYS = "tokenfleet-keys"  # the Secret with api-key, control-key, auth_token (Ray's) and, if wanted, hf-token
MEMORY_PER_GPU_GI, SHM_PER_GPU_GI = 64, 8
CORES_PER_GPU = 8
HEAD_CORES, HEAD_MEMORY_GI = 2, 8
GCS_PORT, NODE_PORT = 6379, 6380
STREAMS_S, EVACUATE_S, GRACE_S = 60, 120, 30  # the last: what ends the processes afterwards
NODES_WAIT = "30m"  # until the cluster's pods have their machines
Object = dict[str, Any]


def kuberay(fleet: Deployment, name: str, image: str) -> list[Object]:
    """Every object of the fleet. Raises BadInput for a plan that is too large for a ConfigMap."""
    if len(fleet.document) > MOST_CONFIG_BYTES:
        raise BadInput(f"kuberay: the plan has {len(fleet.document)} bytes, a ConfigMap {MOST_CONFIG_BYTES}")
    first, *others = fleet.groups
    pods = [(first, first.workers - 1), *((group, group.workers) for group in others)]
    pods = [(group, count) for group, count in pods if count]
    plan = _object("v1", "ConfigMap", f"{name}-plan", name) | {"data": {PLAN: fleet.document}}
    service = _object("v1", "Service", name, name) | {
        "spec": {
            "selector": _labels(name, "gateway"),
            "ports": [
                {"name": "openai", "port": PORT, "targetPort": "openai"},
                {"name": "control", "port": CONTROL_PORT, "targetPort": "control"},
            ],
        }
    }
    cluster = _object("ray.io/v1", "RayCluster", name, name) | {
        "spec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token", "secretName": KEYS},
            "headGroupSpec": _head(name, image),
            "workerGroupSpecs": [_worker_pods(fleet, group, count, name, image) for group, count in pods],
        }
    }
    budgets = [_budget(name, "ray-head", 1), _budget(name, "gateway", 1)]
    if pods:
        budgets.append(_budget(name, "worker", sum(count for _, count in pods) - 1))
    return [plan, cluster, _gateway(fleet, first, name, image), service, *budgets, _doors(name)]


def _object(version: str, kind: str, own: str, name: str) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": own, "labels": _labels(name)}}


def _labels(name: str, part: str | None = None) -> dict[str, str]:
    """The labels of a fleet's objects, or of one part's pods. KubeRay sets app.kubernetes.io/name itself."""
    labels = {"app.kubernetes.io/part-of": "tokenfleet", "app.kubernetes.io/instance": name}
    return labels if part is None else labels | {"app.kubernetes.io/component": part}


# Pods


def _head(name: str, image: str) -> Object:
    """Ray's head, which computes nothing."""
    amounts = {"cpu": str(HEAD_CORES), "memory": f"{HEAD_MEMORY_GI}Gi"}
    container = _container("ray-head", image, amounts) | _probes(GCS_PORT)
    container["ports"] = [{"name": "gcs-server", "containerPort": GCS_PORT}]
    pod = _pod(container, SHM_PER_GPU_GI)
    started = {"num-cpus": "0", "include-dashboard": "false", "disable-usage-stats": "true"}
    template = {"metadata": {"labels": _labels(name, "ray-head")}, "spec": pod}
    return {"rayStartParams": started, "template": template}


def _worker_pods(fleet: Deployment, group: WorkerGroup, count: int, name: str, image: str) -> Object:
    """The pods of a group's workers, a worker each; they are evacuated before they end."""
    container = _container("ray-worker", image, _amounts(group)) | _probes(NODE_PORT)
    control = f"http://{name}:{CONTROL_PORT}"
    evacuate = f'tokenfleet fleet --control {control} evacuate --node "$POD_IP" --deadline {EVACUATE_S}s'
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", evacuate]}}}
    container["env"] += [
        _secret("TOKENFLEET_CONTROL_KEY", "control-key"),
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    pod = _gpu_pod(fleet, group, container) | {"terminationGracePeriodSeconds": EVACUATE_S + GRACE_S}
    return {
        "groupName": dns_name(group.worker_type.name, 50),
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {"node-manager-port": str(NODE_PORT), "disable-usage-stats": "true"},
        "template": {"metadata": {"labels": _labels(name, "worker")}, "spec": pod},
    }


def _gateway(fleet: Deployment, group: WorkerGroup, name: str, image: str) -> Object:
    """The gateway, as a node of the cluster with the first worker's GPUs."""
    amounts = _amounts(group)
    head = f"{name}-head-svc:{GCS_PORT}"
    join = f"ray start --address {head} --num-cpus {amounts['cpu']} --num-gpus {group.worker_type.gpus}"
    # The ingress or mesh has the certificate that clients know, renews it, and encrypts between pods; probes,
    # the preStop hook and Prometheus ask in plain HTTP.
    own = ["--insecure", "--nodes-wait", NODES_WAIT, "--shutdown-wait", f"{STREAMS_S}s"]
    serve = shlex.join(serve_words(fleet, f"{FOLDER}/{PLAN}", own))
    script = f"until ray health-check --address {head}; do sleep 2; done; {join} && exec {serve}"
    container = _container("gateway", image, amounts)
    container["command"] = ["/bin/bash", "-c", script]
    container["env"] += [
        _secret("VLLM_API_KEY", "api-key"),
        _secret("TOKENFLEET_CONTROL_KEY", "control-key"),
        # What KubeRay gives to the pods that are its own.
        {"name": "RAY_AUTH_MODE", "value": "token"},
        _secret("RAY_AUTH_TOKEN", "auth_token"),
        {"name": "RAY_ADDRESS", "value": "auto"},
    ]
    container["ports"] = [
        {"name": "openai", "containerPort": PORT},
        {"name": "control", "containerPort": CONTROL_PORT},
    ]
    health: Object = {"httpGet": {"path": "/health", "port": "openai"}}
    # Machines come and models load for minutes; until then neither of the others counts.
    container["startupProbe"] = health | {"periodSeconds": 10, "failureThreshold": 360}
    container["readinessProbe"] = health | {"periodSeconds": 5, "timeoutSeconds": 3}
    container["livenessProbe"] = health | {"periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6}
    container["volumeMounts"].append({"name": "plan", "mountPath": FOLDER, "readOnly": True})
    pod = _gpu_pod(fleet, group, container) | {"terminationGracePeriodSeconds": STREAMS_S + GRACE_S}
    pod["volumes"].append({"name": "plan", "configMap": {"name": f"{name}-plan"}})
    labels = _labels(name, "gateway")
    return _object("apps/v1", "Deployment", name, name) | {
        "spec": {
            "replicas": 1,
            # It starts and stops its workers. A second one at the same time would look for taken GPUs.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
    }


def _container(name: str, image: str, amounts: dict[str, str]) -> Object:
    return {
        "name": name,
        "image": image,
        "env": [
            _secret("HF_TOKEN", "hf-token"),
            {"name": "HOME", "value": HOME},  # vLLM, Triton and FlashInfer keep what they compile there
            {"name": "PYTHONHASHSEED", "value": "0"},  # so that all engines name a prefix alike
            {"name": "RAY_worker_niceness", "value": "0"},
        ],
        "resources": {"requests": amounts, "limits": amounts},
        # Ranks of a tensor-parallel worker talk through shared memory.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "home", "mountPath": HOME}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _pod(container: Object, shm_gi: int) -> Object:
    return {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001},
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gi}Gi"}},
            {"name": "home", "emptyDir": {}},
        ],
    }


def _gpu_pod(fleet: Deployment, group: WorkerGroup, container: Object) -> Object:
    pod = _pod(container, SHM_PER_GPU_GI * group.worker_type.gpus)
    pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if fleet.home_claim:  # else each start downloads and compiles again, for minutes
        pod["volumes"][-1] = {"name": "home", "persistentVolumeClaim": {"claimName": fleet.home_claim}}
    label = fleet.product(group)
    if label is not None:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": label}
    return pod


def _amounts(group: WorkerGroup) -> dict[str, str]:
    gpus = group.worker_type.gpus
    return {
        "cpu": str(CORES_PER_GPU * gpus),
        "memory": f"{MEMORY_PER_GPU_GI * gpus}Gi",
        "nvidia.com/gpu": str(gpus),
    }


def _probes(port: int) -> Object:
    """Whether Ray's own process takes connections; KubeRay's own probes ask a dashboard that is not there."""
    probe: Object = {"tcpSocket": {"port": port}, "periodSeconds": 10, "timeoutSeconds": 3}
    return {
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": probe,
        "livenessProbe": probe | {"failureThreshold": 6},
    }


def _secret(variable: str, key: str) -> Object:
    source = {"name": KEYS, "key": key, "optional": key == "hf-token"}
    return {"name": variable, "valueFrom": {"secretKeyRef": source}}


# What surrounds them


def _budget(name: str, part: str, least: int) -> Object:
    """At least `least` pods of a part stay while nodes drain, in the one form that KubeRay's pods take."""
    return _object("policy/v1", "PodDisruptionBudget", f"{name}-{part}", name) | {
        "spec": {"minAvailable": least, "selector": {"matchLabels": _labels(name, part)}}
    }


def _doors(name: str) -> Object:
    """Others reach the endpoint and the control API; links, KV and Ray are the fleet's own."""
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, name) | {
        "spec": {
            "podSelector": {"matchLabels": _labels(name)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": _labels(name)}}]},
                {"ports": [{"port": PORT, "protocol": "TCP"}, {"port": CONTROL_PORT, "protocol": "TCP"}]},
            ],
        }
    }
