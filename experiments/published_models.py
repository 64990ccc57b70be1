"""Published model configurations and GPU memories: what KV capacities are computed from."""

from __future__ import annotations

import csv
from pathlib import Path

from controlplane.perfmodel.kv import ModelShape, kv_capacity_tokens

GIB = 1024**3

# Published model configurations: layers, KV heads, head size, parameters; 16-bit weights and KV.
MODELS = {
    "llama-3.1-8b": ModelShape(32, 8, 128, 8.030e9, 2, 131072),
    "llama-3.1-70b": ModelShape(80, 8, 128, 70.554e9, 2, 131072),
    "qwen3-32b": ModelShape(64, 8, 128, 32.762e9, 2, 40960),
    "llama-2-7b": ModelShape(32, 32, 128, 6.738e9, 2, 4096),
    "llama-2-13b": ModelShape(40, 40, 128, 13.016e9, 2, 4096),
    "llama-2-70b": ModelShape(80, 8, 128, 68.977e9, 2, 4096),
    "bloom-176b": ModelShape(70, 112, 128, 176.247e9, 2, 2048),
}
# Memory the CUDA driver reports of one card.
GPU_BYTES = {
    "a100-sxm": 79.15 * GIB,
    "h100-sxm": 79.10 * GIB,
    "h200-sxm": 139.8 * GIB,
    "a100-80gb": 79.15 * GIB,
    "h100-80gb": 79.10 * GIB,
}
MEMORY_UTILIZATION = 0.9  # vLLM's default
OTHER_BYTES = 2.5 * GIB  # activations of an 8k-token step, CUDA graphs, NCCL, on each GPU


def capacity_tokens(model: str, gpu: str, tp_degree: int) -> int:
    """KV tokens of a worker by memory arithmetic; 0 when the model does not fit."""
    return kv_capacity_tokens(MODELS[model], GPU_BYTES[gpu], tp_degree, MEMORY_UTILIZATION, OTHER_BYTES)


def table_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
