"""A fleet as values of vLLM's production-stack chart (0.1.x): one modelSpec for each group of workers."""

from __future__ import annotations

from typing import Any

from controlplane.errors import BadInput
from tokenfleet.export.deployment import Deployment
from tokenfleet.export.kuberay import CORES_PER_GPU, MEMORY_PER_GPU_GI

IMAGE, TAG = "vllm/vllm-openai", "v0.32.0"


def spec_name(fleet: Deployment, number: int) -> str:
    """The name of a group's modelSpec, and part of the name of its Deployment."""
    group = fleet.groups[number]
    gpu = "".join(c if c.isalnum() else "-" for c in group.gpu.lower()).strip("-")[:30]
    return f"{gpu}-tp{group.gpus}"


def production_stack(fleet: Deployment) -> dict[str, Any]:
    """The chart's values. Raises BadInput for split fleets, whose KV transfer the chart sets up otherwise."""
    if any(group.role != "any" for group in fleet.groups):
        raise BadInput("production-stack: prefill and decode workers need the chart's own KV transfer set-up")
    specs = []
    for number, group in enumerate(fleet.groups):
        config: dict[str, Any] = {"enableChunkedPrefill": True, "enablePrefixCaching": True}
        config["tensorParallelSize"] = group.gpus
        if group.max_seqs is not None:
            config["maxNumSeqs"] = group.max_seqs
        if group.max_batched_tokens is not None:
            config["extraArgs"] = ["--max-num-batched-tokens", str(group.max_batched_tokens)]
        spec: dict[str, Any] = {
            "name": spec_name(fleet, number),
            "repository": IMAGE,
            "tag": TAG,
            "modelURL": fleet.weights,
            "replicaCount": group.workers,
            "requestCPU": CORES_PER_GPU * group.gpus,
            "requestMemory": f"{MEMORY_PER_GPU_GI * group.gpus}Gi",
            "requestGPU": group.gpus,
            "vllmConfig": config,
        }
        if group.product is not None:
            spec["nodeSelectorTerms"] = [
                {
                    "matchExpressions": [
                        {"key": "nvidia.com/gpu.product", "operator": "In", "values": [group.product]}
                    ]
                }
            ]
        specs.append(spec)
    return {
        "servingEngineSpec": {"enableEngine": True, "modelSpec": specs},
        "routerSpec": {"enableRouter": True, "routingLogic": "roundrobin"},
    }
