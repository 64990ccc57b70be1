"""The KV memory of a worker whose profile is composed, and what requests hold of it by an engine's steps.

A composed worker has what its weights and vLLM's profiling run leave.

aiconfigurator-core knows the bytes of weights and of KV. Two things that it leaves out are added here. Of a
mixture it counts one embedding; the engine holds two, unless they are tied. It counts experts in MXFP4 as 4
bits; the engine keeps a scale of 8 bits for each 32 weights as well, and widens experts to a multiple of 256.
What else an engine takes is in `controlplane.perfmodel.engine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.engine import GIB, EngineLimits, KvModel, step_token_bytes, taken_bytes
from controlplane.perfmodel.least_squares import check_distinct, solved
from controlplane.perfmodel.samples import StepSamples

UTILIZATION = 0.9  # vLLM's default share of GPU memory up to 0.2x; since then 0.92
BLOCK_TOKENS = 16
FAR = 32768  # tokens past which every window is full
SMALLEST_KV = 8192  # a worker with less KV than this serves no useful batch
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TAKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
MXFP4_BYTES = 0.5 + 1 / 32  # of a weight: 4 bits, and its share of a scale
EXPERT_WIDTHS = 256  # an expert's width is a multiple of it
KV_OFF = 0.05  # a larger relative difference between measured KV and the arithmetic is named
# What PyTorch reports of a card. It is less than nvidia-smi shows, and no whole GiB as in the tables.
VISIBLE_GIB = {
    "a100_sxm": 79.15,
    "h100_sxm": 79.10,
    "h200_sxm": 139.8,
    "b200_sxm": 178.35,
    "gb200": 184.31,
    "l40s": 44.40,
}


@dataclass(frozen=True, slots=True)
class KvUse:
    """Eq 1 fitted: tokens of KV in use = per_token · context tokens + per_request · requests.

    A block is `block_tokens`. `mean_relative`: the fit's error over `steps`. `off`: KV in use over what the
    worker's arithmetic has, less 1. `short`: the share of steps with less KV than their tokens fill.
    """

    per_token: float
    per_request: float
    mean_relative: float
    steps: int
    block_tokens: int
    off: float
    short: float

    def put_in(self, kv: KvModel) -> KvModel:
        """`kv` with this fit, and with a request's own KV where its arithmetic has none and misses some."""
        own = self.per_request - (self.block_tokens - 1) / 2
        if not kv.request_tokens and self.off > KV_OFF >= abs(self.per_token - 1) and own >= kv.block_tokens:
            kv = replace(kv, request_tokens=round(own), window_tokens=1)
        return replace(
            kv,
            measured_per_token=round(self.per_token, 4),
            measured_per_request=round(self.per_request, 2),
            measured_error=round(self.mean_relative, 4),
        )

    def texts(self, bytes_per_token: int) -> list[str]:
        """Sentences on the fit and the arithmetic; its `bytes_per_token` may be 0, not known."""
        half = (self.block_tokens - 1) / 2
        fit = (
            f"KV (Eq 1): {self.per_token:.3f} tokens in use for each token of context, {self.per_request:.1f}"
            f" for each request (half a block: {half:g}); mean error {100 * self.mean_relative:.1f} % over"
            f" {self.steps:,} steps that only decode"
        )
        if bytes_per_token:
            own = self.per_token * bytes_per_token
            fit += f"; {own:,.0f} bytes for each token, by arithmetic {bytes_per_token:,}"
        if abs(self.off) > KV_OFF:
            more = "more" if self.off > 0 else "less"
            return [fit, f"KV in use is {100 * abs(self.off):.0f} % {more} than by arithmetic: {self._why}"]
        steps = f"In {100 * self.short:.0f} % of these steps"
        few = f"{steps} requests shared cached blocks, which lowers KV in use"
        return [fit, few] if self.short > 0 else [fit]

    @property
    def _why(self) -> str:
        doublings = float(np.log2(max(self.per_token, 1e-3)))
        if round(doublings) and abs(doublings - round(doublings)) < KV_OFF:
            block = self.block_tokens / 2.0 ** round(doublings)
            window = ", or layers keep only a window" * (self.off < 0)
            return f"blocks may have {block:g} tokens (--block-tokens){window}"
        if self.off < 0:
            return "requests share cached blocks, or layers keep only a window or a chunk"
        return "requests hold KV beyond their tokens: states, or room for drafts"


def fit_kv(samples: StepSamples, kv: KvModel, robust: bool = False) -> KvUse:
    """Eq 1 by the steps that only decode. Raises BadInput where they do not tell its two coefficients."""
    blocks = np.zeros(len(samples)) if samples.kv_blocks is None else samples.kv_blocks
    rows = (samples.prefill_tokens == 0) & (blocks > 0)
    decode, used = samples.take(rows), blocks[rows] * kv.block_tokens
    sequences, tokens = decode.sequences, decode.context_tokens + decode.sequences  # with those of the step
    columns = np.column_stack([tokens, sequences])
    check_distinct(columns, decode, ["KV per token", "KV per request"])
    fit = solved(columns, used, robust)
    held = sequences * (kv.held(tokens / sequences) + (kv.block_tokens - 1) / 2)
    error, off, short = np.abs(columns @ fit / used - 1).mean(), used.sum() / held.sum() - 1, used < tokens
    figures = *fit.tolist(), float(error), len(decode), kv.block_tokens, float(off), float(short.mean())
    return KvUse(*figures)


def whole_number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these fields that holds a whole number; 0 where none does."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)


def kv_memory(
    model: str, system: str, modes: Mapping[str, Any], limits: EngineLimits, config: Mapping[str, Any]
) -> KvModel:
    """The KV memory of a worker at vLLM's default share of its GPUs. Raises BadInput or ProfileMissing."""
    from aiconfigurator_core.sdk.memory import KVCacheEstimator

    visible, gpus = int(VISIBLE_GIB.get(system, 0) * GIB), int(modes["tp_size"])
    stages = int(modes.get("pp_size", 1))
    worker = f"{Path(model).name} on {system} TP {gpus}"
    budget, seqs = limits.max_batched_tokens, limits.max_seqs
    try:
        memory = KVCacheEstimator.from_request(
            model, system, "vllm", "current", max_num_tokens=budget, max_batch_size=seqs, **modes
        ).breakdown
        token_bytes, own_bytes, window = _kv_bytes(memory, config)
    except Exception as error:
        raise BadInput(f"{worker}: KV: {str(error)[:200]}") from None
    card = visible or float(memory["gpu_memory_capacity_bytes"])
    weights = memory["weights_bytes"] + left_out_bytes(config, gpus * stages)
    widths = (config["vocab_size"], model_token_bytes(config, gpus))
    free = UTILIZATION * card - weights - taken_bytes(limits.version, gpus * stages, seqs, budget, *widths)
    # Each stage keeps its own layers of all tokens; the package counts those of all stages.
    tokens = int(free / token_bytes * stages)
    if tokens < SMALLEST_KV * stages:
        raise ProfileMissing(f"{worker}: its weights leave room for {max(tokens, 0)} KV tokens")
    own = round(own_bytes / token_bytes)
    kv = KvModel(tokens, BLOCK_TOKENS, round(token_bytes * gpus), visible, UTILIZATION if visible else 0.0)
    kv = replace(kv, vocabulary=widths[0], step_token_bytes=widths[1])
    if not own:
        return kv
    is_chunk = bool(config.get("attention_chunk_size"))
    return replace(kv, request_tokens=own, window_tokens=window, window_is_chunk=is_chunk)


def left_out_bytes(config: Mapping[str, Any], gpus: int) -> float:
    """Bytes of weights on each GPU that the package does not count."""
    experts = whole_number(config, EXPERTS)
    if not experts:
        return 0.0
    hidden = int(config["hidden_size"])
    more = 0.0 if config.get("tie_word_embeddings") else 2.0 * config["vocab_size"] * hidden
    if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
        width = int(config["intermediate_size"])
        held = -(-width // EXPERT_WIDTHS) * EXPERT_WIDTHS
        each = 3.0 * hidden * (held * MXFP4_BYTES - width * 0.5)
        more += int(config["num_hidden_layers"]) * experts * each
    return more / gpus


def model_token_bytes(config: Mapping[str, Any], gpus: int) -> int:
    """GPU bytes of one token in the profiling run's step: of the widest dense layer, or of its experts."""
    dense = whole_number(config, ("intermediate_size_mlp", "intermediate_size"))
    expert = whole_number(config, ("moe_intermediate_size", "intermediate_size"))
    taken = whole_number(config, TAKEN) if whole_number(config, EXPERTS) else 0
    return step_token_bytes(config["hidden_size"], max(dense, taken * expert) / gpus, taken)


def _kv_bytes(memory: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float, int]:
    """KV bytes of a GPU for each token of a long request, those of its windows and states, and the window.

    The package gives the tokens of one request that fit in a number of bytes. Llama 4's layers attend to a
    chunk, except every fourth. The package treats all of them as attending to the whole context.
    """
    tokens_in = memory["tokens_from_kv_bytes"]

    def bytes_of(tokens: int) -> float:
        low, high = 0.0, float(memory["kv_size_per_token_bytes"]) * tokens * 2
        for _ in range(60):  # the least bytes that hold a request of that many tokens
            middle = (low + high) / 2
            low, high = (low, middle) if tokens_in(middle) >= tokens else (middle, high)
        return high

    token_bytes = (bytes_of(2 * FAR) - bytes_of(FAR)) / FAR
    own_bytes = max(bytes_of(FAR) - token_bytes * FAR, 0.0)
    window = int(config.get("sliding_window") or config.get("sliding_window_size") or 0)
    if (chunk := config.get("attention_chunk_size")) and own_bytes < token_bytes:
        whole = 1.0 / int(config.get("no_rope_layer_interval") or 4)
        return token_bytes * whole, token_bytes * (1.0 - whole) * int(chunk), int(chunk)
    return token_bytes, own_bytes, window
