"""KV memory: the capacity of a worker.

    §4.2   M_N   = N·m_gpu - m_model                              bytes for KV on a worker of N GPUs

M_N here also takes off what vLLM keeps for activations, CUDA graphs and communication on each GPU. What a
request takes (Eq 1) is a token of KV per token of context in a paged engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.errors import BadInput


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
