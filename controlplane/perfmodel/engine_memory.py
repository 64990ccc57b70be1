"""GPU memory of vLLM that is neither weights nor KV, as its profiling run finds it.

That run computes one step of `max_batched_tokens` tokens and samples for `max_seqs` sequences. On each GPU:

    taken = ALWAYS + OUTSIDE + BETWEEN·(several GPUs) + GRAPHS
            + max(max_batched_tokens · bytes of a token's step, max_seqs · vocabulary · LOGIT)

Sampling decides on most engines. Up to vLLM 0.15 it sorts the logits, 37 bytes of each. Later releases do not
sort: 14 bytes. CUDA graphs count since 0.21. A mixture takes no more than a dense model of its vocabulary.
`experiments/profiling/kv_memory.py` has the engine logs behind each number, and those that judge them.
"""

from __future__ import annotations

import re

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
