"""Published model configurations, GPU memories, and the grids of predicted step times over them.

    §4.2   M_N   = N·m_gpu - m_model                              bytes for KV on a worker of N GPUs

M_N here also takes off what vLLM keeps for activations, CUDA graphs and communication on each GPU.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.samples import StepSamples
from tokenfleet.profiles.kernels import amid_tile


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The part of a model's configuration that decides its memory."""

    layers: int
    kv_heads: int
    head_dim: int
    parameters: float
    dtype_bytes: int = 2
    context_limit_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "parameters", "dtype_bytes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"model: {name}: must be positive, got {getattr(self, name)}")

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights, all GPUs of a worker together."""
        return self.parameters * self.dtype_bytes

    def kv_bytes_per_token(self, tp_degree: int = 1) -> int:
        """Bytes of KV per token of context over all GPUs: a key and a value per layer and KV head.

        With more GPUs than KV heads each GPU still keeps one head, so heads are held more than once.
        """
        heads = max(self.kv_heads, tp_degree)
        return 2 * self.layers * heads * self.head_dim * self.dtype_bytes


def kv_capacity_tokens(
    shape: ModelShape,
    gpu_bytes: float,
    tp_degree: int,
    memory_utilization: float = 0.9,
    other_bytes: float = 0.0,
    block_tokens: int = 16,
) -> int:
    """Tokens of KV a worker holds, in whole blocks; 0 when the model does not fit.

    `gpu_bytes` is what the driver reports of one GPU, `memory_utilization` vLLM's setting of that name,
    `other_bytes` what each GPU needs beside weights and KV.
    """
    if not 0 < memory_utilization <= 1:
        raise BadInput(f"kv: memory_utilization: must be in (0, 1], got {memory_utilization:g}")
    free = tp_degree * (gpu_bytes * memory_utilization - other_bytes) - shape.weight_bytes
    blocks = int(max(free, 0.0) // (shape.kv_bytes_per_token(tp_degree) * block_tokens))
    return blocks * block_tokens


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
SMALLEST_KV = 8192  # a worker with less KV than this serves nobody

# The grids hold kernel time. vLLM V1 with CUDA graphs adds scheduling, input preparation and sampling. On the
# H100 llm-d's decode intercept of Llama-3.1-8B, 6.97 ms, is 0.83 ms above the grid's 6.14. On the A100 the
# grid's kernels alone take as long as whole steps of LMBench's development ladders: 11.8 ms of 8B for 11.5 to
# 11.7 measured, 51.5 of 70B on two for 50 to 52.
HOST_S = {"a100-sxm": 0.0, "h100-sxm": 0.001, "h200-sxm": 0.001}
GRID_NAMES = {
    "llama-3.1-8b": "llama3.1-8b",
    "llama-3.1-70b": "llama3.1-70b",
    "qwen3-32b": "qwen3-32b",
    "llama-2-70b": "llama2-70b",
}
GRID_ENGINE = {"a100-sxm": "0.14.0", "h100-sxm": "0.24.0", "h200-sxm": "0.24.0"}
TP_DEGREES = (1, 2, 4, 8)


def capacity_tokens(model: str, gpu: str, tp_degree: int) -> int:
    """KV tokens of a worker by memory arithmetic; 0 when the model does not fit."""
    return kv_capacity_tokens(MODELS[model], GPU_BYTES[gpu], tp_degree, MEMORY_UTILIZATION, OTHER_BYTES)


def table_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def grid_samples(
    data: Path, model: str, gpu: str, tp_degree: int, capacity_tokens: int, host_s: float | None = None
) -> StepSamples:
    """A variant's grid as step samples, host time added (`host_s` instead of the GPU's).

    Rows longer than the model's context, and batches that the worker's KV cannot hold, are left out.
    """
    limit = MODELS[model].context_limit_tokens
    stem = f"{GRID_NAMES[model]}_{gpu.replace('-', '_')}"
    rows = []
    for row in table_rows(data / "aic_grid" / f"{stem}_prefill.csv"):
        n, length = int(row["n_seqs"]), int(row["seq_len"])
        if int(row["tp"]) == tp_degree and length <= limit:
            rows.append((amid_tile(n * length), 0, 0, float(row["latency_ms"]), n * length**2))
    for row in table_rows(data / "aic_grid" / f"{stem}_decode.csv"):
        batch, total = int(row["batch"]), int(row["total_context"])
        if int(row["tp"]) == tp_degree and total <= capacity_tokens and int(row["context"]) <= limit:
            rows.append((0, batch, total, float(row["latency_ms"]), 0))
    table = np.array(rows, float)
    step_s = table[:, 3] / 1e3 + (HOST_S[gpu] if host_s is None else host_s)
    return StepSamples(table[:, 0], table[:, 1], table[:, 2], step_s, table[:, 4])
