"""KV memory: the need of a request and the capacity of a worker.

    Eq 1   kv(t) = h·(prompt_tokens + generated_tokens) + j       tokens of KV memory
    §4.2   M_N   = N·m_gpu - m_model                              bytes for KV on a worker of N GPUs

In a paged engine h = 1 and j is the waste of the last, half-filled block: (block_tokens - 1) / 2 on average.
M_N here also takes off what vLLM keeps for activations, CUDA graphs and communication on each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from controlplane.errors import BadInput


@dataclass(frozen=True, slots=True)
class KvDemand:
    """Eq 1 with its two coefficients; `per_token` is KV tokens a token of context takes."""

    per_token: float = 1.0
    per_request: float = 0.0

    def kv_tokens(self, prompt_tokens: ArrayLike, generated_tokens: ArrayLike) -> NDArray[np.float64]:
        """KV tokens held by requests that have generated this much; arguments broadcast."""
        context = np.asarray(prompt_tokens, float) + np.asarray(generated_tokens, float)
        return np.asarray(self.per_token * context + self.per_request, float)


def block_demand(block_tokens: int) -> KvDemand:
    """Eq 1 of a paged engine, on average over where a request ends in its last block."""
    if block_tokens < 1:
        raise BadInput(f"kv: block_tokens: must be at least 1, got {block_tokens}")
    return KvDemand(1.0, (block_tokens - 1) / 2)


def fit_kv_demand(context_tokens: ArrayLike, kv_tokens: ArrayLike) -> KvDemand:
    """Eq 1 from observed requests: least squares on relative error, both coefficients at least 0.

    Raises BadInput with fewer than two different contexts.
    """
    context, held = np.asarray(context_tokens, float), np.asarray(kv_tokens, float)
    if context.shape != held.shape or len(np.unique(context)) < 2:
        raise BadInput("kv samples: at least two different context lengths are needed")
    if not (np.isfinite(held).all() and (held > 0).all() and np.isfinite(context).all()):
        raise BadInput("kv samples: context_tokens and kv_tokens must be finite, kv_tokens more than 0")
    rows = np.column_stack([context, np.ones_like(context)]) / held[:, None]
    (h, j), _ = nnls(rows, np.ones(len(held)))
    return KvDemand(float(h), float(j))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model's configuration decides its memory."""

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
