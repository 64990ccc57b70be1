"""A fleet as values of vLLM's production-stack chart (0.1.x): one modelSpec for each group of workers.

The chart's router knows neither step times nor targets: only a plan that was proven with round-robin
placement is written.
"""

from __future__ import annotations

from typing import Any

from controlplane.errors import BadInput
from controlplane.placement.policies import Policy
from tokenfleet.export.deployment import Deployment, dns_name
from tokenfleet.export.kuberay import CORES_PER_GPU, MEMORY_PER_GPU_GI

IMAGE, TAG = "vllm/vllm-openai", "v0.32.0"


def spec_name(fleet: Deployment, number: int) -> str:
    """The name of a group's modelSpec, and part of the name of its Deployment."""
    worker_type = fleet.groups[number].worker_type
    return f"{dns_name(worker_type.gpu or 'gpu', 30)}-tp{worker_type.tp_degree}"


def production_stack(fleet: Deployment) -> dict[str, Any]:
    """The chart's values. Raises BadInput for a fleet planned with another placement than its router's."""
    _check_policy(fleet)
    specs = []
    for number, group in enumerate(fleet.groups):
        config: dict[str, Any] = {"enableChunkedPrefill": True, "enablePrefixCaching": True}
        gpus, engine, label = group.worker_type.gpus, group.worker_type.profile.engine, fleet.product(group)
        config["tensorParallelSize"] = gpus
        config["maxNumSeqs"] = engine.max_seqs
        config["extraArgs"] = ["--max-num-batched-tokens", str(engine.max_batched_tokens)]
        if share := group.worker_type.profile.kv.gpu_memory_utilization:
            config["extraArgs"] += ["--gpu-memory-utilization", f"{share:g}"]
        spec: dict[str, Any] = {
            "name": spec_name(fleet, number),
            "repository": IMAGE,
            "tag": TAG,
            "modelURL": fleet.weights,
            "replicaCount": group.workers,
            "requestCPU": CORES_PER_GPU * gpus,
            "requestMemory": f"{MEMORY_PER_GPU_GI * gpus}Gi",
            "requestGPU": gpus,
            "vllmConfig": config,
        }
        if label is not None:
            spec["nodeSelectorTerms"] = [
                {"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": [label]}]}
            ]
        specs.append(spec)
    return {
        "servingEngineSpec": {"enableEngine": True, "modelSpec": specs},
        "routerSpec": {"enableRouter": True, "routingLogic": "roundrobin"},
    }


def _check_policy(fleet: Deployment) -> None:
    kind = "production-stack"
    if fleet.unserved is not None:
        raise BadInput(f"{kind}: {fleet.unserved}")
    if any(group.role != "any" for group in fleet.groups):
        raise BadInput(f"{kind}: prefill and decode workers need the chart's own KV transfer set-up")
    if (policy := fleet.plan.policy) != Policy.ROUND_ROBIN:
        raise BadInput(
            f"{kind}: its router places requests round-robin, and the fleet was planned with {policy}:"
            f" plan with --policy {Policy.ROUND_ROBIN}, or export kuberay or systemd"
        )
