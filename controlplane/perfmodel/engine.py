"""An engine: its batch limits, its KV memory, and its GPU memory that is neither weights nor KV.

vLLM's profiling run finds the latter. It computes one step of `max_batched_tokens` tokens, and samples for
`max_seqs` sequences. On each GPU:

    taken = ALWAYS + OUTSIDE + BETWEEN·(several GPUs) + GRAPHS
            + max(max_batched_tokens · bytes of a token's step, max_seqs · vocabulary · LOGIT)

Sampling decides on most engines. Up to vLLM 0.15 it sorts the logits, 37 bytes of each. Later releases do not
sort: 14 bytes. CUDA graphs count since 0.21. A mixture takes no more than a dense model of its vocabulary.
`experiments/profiling/kv_memory.py` has the engine logs behind each number, and those that judge them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.errors import BadInput
from controlplane.types import ABOVE_0, EngineMode

ASYNCHRONOUS_SINCE = (0, 14)  # vLLM's release that made asynchronous scheduling its default
MOST_STEPS_AHEAD = 4
GROUP_ROUNDING = 0.01  # of tokens in whole numbers

GIB = 1024**3
ALWAYS = 0.17 * GIB  # hidden states and buffers that live through the run
LOGIT_BYTES = {"sorted": 37.5, "unsorted": 14.0}  # of sampling, for each sequence and token of the vocabulary
UNSORTED_SINCE = (0, 16)
OUTSIDE = {"before": 0.13 * GIB, "since": 0.5 * GIB}  # CUDA's context and libraries, outside PyTorch
BETWEEN = 0.45 * GIB  # NCCL and custom all-reduce
GRAPHS = 0.7 * GIB
GRAPHS_SINCE = (0, 21)


def release_of(version: str) -> tuple[int, int] | None:
    """The release of a vLLM version; None where it names none, which is taken for the latest."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def step_token_bytes(hidden: int, intermediate: float, experts: int = 0) -> int:
    """GPU bytes of one token in the profiling run's step.

    `intermediate`: a GPU's part of the MLP's width. `experts`: those that a token is sent to.
    """
    return round(2 * (3 * intermediate + (4 + experts) * hidden))


def taken_bytes(
    version: str, gpus: int, max_seqs: int, max_batched_tokens: int, vocabulary: int, token_bytes: int
) -> float:
    """Bytes on each of a worker's GPUs that are neither weights nor KV."""
    release = release_of(version)
    unsorted = release is None or release >= UNSORTED_SINCE
    logits = max_seqs * vocabulary * LOGIT_BYTES["unsorted" if unsorted else "sorted"]
    taken = ALWAYS + max(logits, max_batched_tokens * token_bytes)
    taken += OUTSIDE["since" if unsorted else "before"] + (BETWEEN if gpus > 1 else 0.0)
    return taken + (GRAPHS if release is None or release >= GRAPHS_SINCE else 0.0)


@dataclass(frozen=True, slots=True)
class KvModel:
    """KV memory of a worker (Eq 1 is linear: a request holds one slot per token of context, in whole blocks).

    The engine takes the share `gpu_memory_utilization` of each GPU's `gpu_memory_bytes` (as its driver
    reports them); what weights, activations and graphs leave of that is `capacity_tokens`. 0: not known.

    Layers that attend to a window, and recurrent ones, keep no more of a longer request. Then a token is what
    it takes in the layers that keep all. A request holds up to `request_tokens` on top of its tokens: all of
    them from `window_tokens` on, fewer in proportion before. `window_is_chunk`: layers attend to the tokens
    since the last multiple of the window, as Llama 4's do.

    `vocabulary` and `step_token_bytes` are of the model. The memory of the engine's profiling run follows
    from them. 0: not known; then other limits do not change KV.

    `measured_per_token`, `measured_per_request`: Eq 1 as an engine's steps had it, in tokens of KV in use for
    each token of context and each request, and its mean relative error. For people to read. 0: not measured.
    """

    capacity_tokens: int = field(metadata=ABOVE_0)
    block_tokens: int = field(default=16, metadata=ABOVE_0)
    bytes_per_token: int = 0
    gpu_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.0
    request_tokens: int = 0
    window_tokens: int = 0
    vocabulary: int = 0
    step_token_bytes: int = 0
    window_is_chunk: bool = False
    measured_per_token: float = 0.0
    measured_per_request: float = 0.0
    measured_error: float = 0.0

    def __post_init__(self) -> None:
        if self.vocabulary < 0 or self.step_token_bytes < 0:
            raise BadInput(f"kv: vocabulary and step_token_bytes must be at least 0, got {self}")
        if self.request_tokens < 0 or self.window_tokens < 0:
            raise BadInput(f"kv: request_tokens and window_tokens must be at least 0, got {self}")
        if self.capacity_tokens < 1 or self.block_tokens < 1 or self.bytes_per_token < 0:
            raise BadInput(f"kv: capacity_tokens and block_tokens must be at least 1, got {self}")
        if self.gpu_memory_bytes < 0 or not 0 <= self.gpu_memory_utilization <= 1:
            raise BadInput(f"kv: gpu_memory_bytes and gpu_memory_utilization: got {self}")

    @property
    def window_groups(self) -> int:
        """Groups of layers with a window, each as large as that of those that keep all; 0 for states."""
        if self.window_tokens <= 1:
            return 0
        return math.ceil(self.request_tokens / self.window_tokens - GROUP_ROUNDING)

    def held(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """The part of `capacity_tokens` that a request takes, for each of these lengths in tokens."""
        n = np.asarray(tokens, float)
        return np.asarray(n + self.request_tokens * self._window_share(n, 0.5))

    def held_at_least(self, tokens: ArrayLike, until: ArrayLike) -> NDArray[np.float64]:
        """The least part that a request takes which grows from one length to another."""
        n, ends = np.asarray(tokens, float), np.asarray(until, float)
        least = np.where(self.window_is_chunk & (ends >= self.window_tokens), 0.0, self._window_share(n, 0.0))
        return np.asarray(n + self.request_tokens * least)

    def _window_share(self, tokens: NDArray[np.float64], of_a_chunk: float) -> NDArray[np.float64]:
        """The part of its windows that a request fills; of a chunk, on the mean, past the first."""
        share = np.minimum(tokens / max(self.window_tokens, 1), 1.0)
        return np.where(self.window_is_chunk & (share >= 1.0), of_a_chunk, share)

    def with_utilization(self, share: float, gpus: int) -> KvModel:
        """With another share of the memory of the worker's GPUs; weights and activations take what they took.

        Where that leaves no room a single block remains, which holds no request. Raises BadInput where it is
        not known what memory there is.
        """
        if not (self.gpu_memory_bytes and self.gpu_memory_utilization and self.bytes_per_token):
            raise BadInput("its profile does not say what memory its KV is from; give --kv-tokens")
        more = (share - self.gpu_memory_utilization) * self.gpu_memory_bytes * gpus
        return replace(self, capacity_tokens=self._tokens_with(more), gpu_memory_utilization=share)

    def with_limits(self, before: EngineLimits, after: EngineLimits, gpus: int) -> KvModel:
        """With what an engine of other limits or another release leaves, if the model is known."""
        known = self.vocabulary and self.gpu_memory_utilization and self.bytes_per_token
        if not known or before == after:
            return self
        less = self._taken_bytes(after, gpus) - self._taken_bytes(before, gpus)
        return replace(self, capacity_tokens=self._tokens_with(-less * gpus)) if less else self

    def _taken_bytes(self, limits: EngineLimits, gpus: int) -> float:
        """Bytes on each GPU that are neither weights nor KV."""
        sizes = (limits.max_seqs, limits.max_batched_tokens)
        return taken_bytes(limits.version, gpus, *sizes, self.vocabulary, self.step_token_bytes)

    def _tokens_with(self, more_bytes: float) -> int:
        """Tokens in whole blocks with more or less memory on all GPUs together; at least a block."""
        blocks = int(self.capacity_tokens + more_bytes / self.bytes_per_token) // self.block_tokens
        return max(blocks, 1) * self.block_tokens


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's software and its batch limits.

    `steps_ahead`: steps that it has planned when a request comes, which the request waits for: 1 where vLLM
    schedules asynchronously, as it does on GPUs since 0.14.
    """

    name: str = "vllm"
    version: str = ""
    mode: EngineMode = EngineMode.CHUNKED
    max_batched_tokens: int = field(default=2048, metadata=ABOVE_0)
    max_seqs: int = field(default=256, metadata=ABOVE_0)
    steps_ahead: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.steps_ahead <= MOST_STEPS_AHEAD:
            raise BadInput(
                f"engine: steps_ahead: must be from 0 to {MOST_STEPS_AHEAD}, got {self.steps_ahead:g}"
            )
        if self.max_batched_tokens < 1 or self.max_seqs < 1:
            raise BadInput("engine: max_batched_tokens and max_seqs must be at least 1")
        if self.mode == EngineMode.CHUNKED and self.max_batched_tokens < self.max_seqs:
            raise BadInput(
                f"engine: max_batched_tokens: {self.max_batched_tokens} is below max_seqs {self.max_seqs};"
                " a chunked step must hold a token for each sequence"
            )

    @property
    def first_steps(self) -> float:
        """Base times in a first token on a worker that serves: its own, half of another, those ahead."""
        return 0.0 if self.mode == EngineMode.PREFILL_FIRST else 1.5 + self.steps_ahead


def steps_ahead_of(version: str) -> float:
    """The steps that a vLLM of this version plans ahead on GPUs by default; with no version, the latest."""
    if (release := release_of(version)) is None:
        return 0.0 if version else 1.0
    return 1.0 if release >= ASYNCHRONOUS_SINCE else 0.0
