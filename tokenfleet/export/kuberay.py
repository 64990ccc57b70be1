"""A fleet on KubeRay: a Ray cluster whose pods hold GPUs, and `serve --plan` as a Deployment that joins it.

The gateway's pod is a Ray node with the GPUs of the first worker, since vLLM's front end looks for a GPU
where it starts. Ray's head has no GPU. It is ready without the fleet, which could not start otherwise. Pods
reach each other at their own addresses, on ports that the system chooses. Before a pod ends, the control API
evacuates its workers within the pod's grace period.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from string import Template
from typing import Any

from controlplane.errors import BadInput
from controlplane.worker_type import WorkerGroup
from dataplane.live.engine_api import RAY_VERSION
from tokenfleet.export.deployment import CONTROL_PORT, PLAN, PORT, Deployment, dns_name, serve_words
from tokenfleet.field_errors import load_yaml

OBJECTS = Path(__file__).with_name("kuberay.yaml")  # a template
FOLDER = "/etc/tokenfleet"  # of the plan's file
HOME = "/var/lib/tokenfleet"  # of what is downloaded and compiled
MOST_CONFIG_BYTES = 1_000_000
KEYS = "tokenfleet-keys"  # the Secret with api-key, control-key, auth_token (Ray's) and, if wanted, hf-token
MEMORY_PER_GPU_GI, SHM_PER_GPU_GI = 64, 8
CORES_PER_GPU = 8
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
    made = _filled(fleet, first, first.workers, name, image)
    plan = _object("v1", "ConfigMap", f"{name}-plan", made) | {"data": {PLAN: fleet.document}}
    cluster = _object("ray.io/v1", "RayCluster", name, made) | {
        "spec": {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token", "secretName": KEYS},
            "headGroupSpec": made["head"],
            "workerGroupSpecs": [_filled(fleet, *of, name, image)["worker"] for of in pods],
        }
    }
    budgets = [_budget(name, "ray-head", 1, made), _budget(name, "gateway", 1, made)]
    if pods:
        budgets.append(_budget(name, "worker", sum(count for _, count in pods) - 1, made))
    return [plan, cluster, made["gateway"], made["service"], *budgets, made["doors"]]


def _filled(fleet: Deployment, group: WorkerGroup, count: int, name: str, image: str) -> Object:
    """The template's objects and parts for `count` workers of a group."""
    gpus, label = group.worker_type.gpus, fleet.product(group)
    cores, head = CORES_PER_GPU * gpus, f"{name}-head-svc:{GCS_PORT}"
    control = f"http://{name}:{CONTROL_PORT}"
    evacuate = f'tokenfleet fleet --control {control} evacuate --node "$POD_IP" --deadline {EVACUATE_S}s'
    join = f"ray start --address {head} --num-cpus {cores} --num-gpus {gpus}"
    # The ingress or mesh has the certificate that clients know, renews it, and encrypts between pods; probes,
    # the preStop hook and Prometheus ask in plain HTTP.
    own = ["--insecure", "--nodes-wait", NODES_WAIT, "--shutdown-wait", f"{STREAMS_S}s"]
    serve = shlex.join(serve_words(fleet, f"{FOLDER}/{PLAN}", own))
    script = f"until ray health-check --address {head}; do sleep 2; done; {join} && exec {serve}"
    # Without a claim each start downloads and compiles again, for minutes.
    claim = f"persistentVolumeClaim: {{claimName: {json.dumps(fleet.home_claim)}}}"
    text = Template(OBJECTS.read_text(encoding="utf-8")).substitute(
        name=name,
        image=json.dumps(image),
        keys=KEYS,
        folder=FOLDER,
        home_path=HOME,
        home=claim if fleet.home_claim else "emptyDir: {}",
        node_selector=""
        if label is None
        else f"nodeSelector: {{nvidia.com/gpu.product: {json.dumps(label)}}}",
        group=dns_name(group.worker_type.name, 50),
        count=count,
        cpu=cores,
        memory=f"{MEMORY_PER_GPU_GI * gpus}Gi",
        gpus=gpus,
        shm=f"{SHM_PER_GPU_GI * gpus}Gi",
        port=PORT,
        control_port=CONTROL_PORT,
        gcs_port=GCS_PORT,
        node_port=NODE_PORT,
        evacuate=json.dumps(evacuate),
        serve=json.dumps(script),
        worker_grace_s=EVACUATE_S + GRACE_S,
        gateway_grace_s=STREAMS_S + GRACE_S,
    )
    filled: Object = load_yaml(text, OBJECTS.name)
    return filled


def _object(version: str, kind: str, own: str, made: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": own, "labels": made["labels"]}}


def _budget(name: str, part: str, least: int, made: Object) -> Object:
    """At least `least` pods of a part stay while nodes drain, in the one form that KubeRay's pods take."""
    labels = made["labels"] | {"app.kubernetes.io/component": part}
    return _object("policy/v1", "PodDisruptionBudget", f"{name}-{part}", made) | {
        "spec": {"minAvailable": least, "selector": {"matchLabels": labels}}
    }
