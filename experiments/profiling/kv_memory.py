"""KV memory as predicted beside the figure that vLLM logged at its start.

    python experiments/profiling/kv_memory.py [--format table|json]

Each row is a published start of an engine: `Available KV cache memory` or `GPU KV cache size`, with the
limits that it ran with. `law` takes the engine's share of memory, less weights of the published
configuration, less `controlplane.perfmodel.engine.py`. `library` is the shipped profile with the
row's limits, release and share of memory, where there is one of the model on that GPU. GiB are of one GPU.
Errors are of KV memory.

The numbers of the law come from the rows of `development`. The others judge it; none was left out after a
look at its error. Limits that a source does not state are vLLM's defaults, and marked with `?`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from controlplane.errors import ControlPlaneError
from controlplane.perfmodel.engine import GIB, step_token_bytes, taken_bytes
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import find_profiles

MEDIAN, WORST = 0.03, 0.06


@dataclass(frozen=True)
class Model:
    """The part of a configuration that decides memory. `intermediate`: of a token's experts together."""

    weights_gib: float
    vocabulary: int
    hidden: int
    intermediate: int
    experts: int = 0  # that a token is sent to


@dataclass(frozen=True)
class Start:
    """An engine's start. `gpu`: the library's name, and what PyTorch reports of the card in GiB."""

    model: str
    gpu: tuple[str, float]
    gpus: int
    version: str
    share: float
    seqs: int
    budget: int
    kv_gib: float  # of one GPU
    source: str
    note: str = ""


# GiB of weights: parameters of the published configuration by their bytes. FP8 leaves embeddings at 16 bits.
# MXFP4 is 4.25 bits, of experts widened from 2,880 to 3,072.
MODELS = {
    "llama-3.1-8b": Model(8.030e9 * 2 / GIB, 128_256, 4096, 14_336),
    "llama-3.1-70b-fp8": Model((68.453e9 + 2.101e9 * 2) / GIB, 128_256, 8192, 28_672),
    "qwen3-0.6b": Model(0.596e9 * 2 / GIB, 151_936, 1024, 3072),
    "qwen3-8b": Model(8.191e9 * 2 / GIB, 151_936, 4096, 12_288),
    "qwen3-32b": Model(32.762e9 * 2 / GIB, 151_936, 5120, 25_600),
    "qwen2.5-7b": Model(7.616e9 * 2 / GIB, 152_064, 3584, 18_944),
    "qwen3-30b-a3b": Model(30.532e9 * 2 / GIB, 151_936, 2048, 6144, 8),
    "qwen3-30b-a3b-fp8": Model((29.91e9 + 0.622e9 * 2) / GIB, 151_936, 2048, 6144, 8),
    "qwen3-235b-a22b-fp8": Model((233.85e9 + 1.245e9 * 2) / GIB, 151_936, 4096, 12_288, 8),
    "qwen3-next-80b": Model(79.67e9 * 2 / GIB, 151_936, 2048, 5632, 10),
    "gpt-oss-20b": Model(13.44, 201_088, 2880, 11_520, 4),
    "gpt-oss-120b": Model(64.6, 201_088, 2880, 11_520, 4),
    "mistral-small-24b": Model(24.01e9 * 2 / GIB, 131_072, 5120, 32_768),
    "llava-v1.6-mistral-7b": Model(7.566e9 * 2 / GIB, 32_064, 4096, 14_336),
}
H100, H200, A100, L40S = ("h100-sxm", 79.18), ("h200-sxm", 139.81), ("a100-sxm", 79.14), ("l40s", 44.40)
RTX = ("rtx-pro-6000", 101_976_440_832 / GIB)
LLM_D = "llm-d/llm-d-benchmark config_explorer/empirical-vllm-memory-results.md"
SIM = "casys-kaist/LLMServingSim bench/examples/RTXPRO6000"
DEVELOPMENT = (
    Start("llama-3.1-8b", H100, 1, "0.11.0", 0.9, 1024, 8192, 51.38, LLM_D, "?"),
    Start("qwen3-0.6b", H100, 1, "0.11.0", 0.9, 1024, 8192, 64.45, LLM_D, "?"),
    Start("llama-3.1-70b-fp8", H100, 2, "0.11.0", 0.9, 1024, 8192, 32.00, LLM_D, "?"),
    Start("gpt-oss-20b", H100, 1, "0.11.0", 0.9, 1024, 8192, 50.28, LLM_D, "?"),
    Start("llava-v1.6-mistral-7b", H100, 1, "0.10.2", 0.9, 1024, 16_384, 55.15, "a notebook's log", "images"),
    Start("llama-3.1-8b", ("a100-40gb", 39.39), 1, "0.10.1", 0.9, 256, 2048, 19.25, "a server's log"),
    Start("qwen2.5-7b", ("44.4 GiB", 44.40), 1, "0.22.0", 0.95, 128, 2048, 26.32, "a test's log"),
    Start("llama-3.1-8b", RTX, 1, "0.28.0", 0.92, 128, 2048, 574_608 * 131_072 / GIB, SIM),
)
JUDGED = (
    Start("qwen3-32b", H100, 2, "0.11.0", 0.9, 1024, 8192, 34.49, LLM_D, "?"),
    Start("qwen3-32b", H100, 1, "0.11.0", 0.9, 1024, 8192, 4.45, LLM_D, "?"),
    Start("gpt-oss-120b", H100, 1, "0.11.0", 0.95, 1024, 8192, 3.33, LLM_D, "?"),
    Start("mistral-small-24b", H100, 1, "0.11.0", 0.95, 1024, 8192, 28.20, LLM_D, "? images"),
    Start("qwen3-next-80b", H200, 2, "0.10.2", 0.9, 1024, 8192, 44.59, "a server's log"),
    Start(
        "llama-3.1-8b", ("rtx-a6000", 47.40), 1, "0.11.0", 0.9, 256, 2048, 26.44, "a report of KV sizes", "?"
    ),
    Start("llama-3.1-8b", A100, 1, "0.6.0", 0.9, 256, 512, 54.93, "a book's example", "?"),
    Start("qwen3-30b-a3b-fp8", L40S, 2, "0.10.2", 0.95, 256, 2048, 25.91, "a server's log"),
    Start("qwen3-235b-a22b-fp8", H100, 4, "0.9.2", 0.9, 1024, 8192, 8.11, "vllm-project/vllm#21348", "?"),
    Start("qwen3-8b", H100, 1, "0.19.1", 0.9, 1024, 8192, 53.54, "a server's log", "?"),
    Start("qwen3-32b", RTX, 2, "0.28.0", 0.92, 128, 2048, 462_144 * 131_072 / GIB, SIM),
    Start("qwen3-30b-a3b", RTX, 1, "0.28.0", 0.92, 128, 2048, 605_104 * 98_304 / GIB, SIM, "experts on two"),
)


def law_gib(start: Start) -> float:
    """KV memory of one GPU by the law."""
    model = MODELS[start.model]
    held = 2 if start.note == "experts on two" else start.gpus  # attention is small beside its experts
    weights = model.weights_gib / held
    if held > start.gpus:
        weights += (1.24e9 + 0.622e9) / GIB  # half of what each GPU holds whole: attention and embeddings
    token = step_token_bytes(model.hidden, model.intermediate / start.gpus, model.experts)
    taken = taken_bytes(start.version, held, start.seqs, start.budget, model.vocabulary, token)
    return start.share * start.gpu[1] - weights - taken / GIB


def library_gib(start: Start) -> float | None:
    """KV memory of one GPU by the shipped profile; None where there is none."""
    try:
        profile = find_profiles(start.model, [start.gpu[0]], [start.gpus])[0]
    except ControlPlaneError:
        return None
    if not profile.kv.gpu_memory_bytes:
        return None
    profile = profile.with_kv(start.share, None).with_engine(
        max_batched_tokens=max(start.budget, start.seqs), max_seqs=start.seqs, version=start.version
    )
    return profile.kv.capacity_tokens * profile.kv.bytes_per_token / start.gpus / GIB


def row_of(start: Start, part: str) -> dict[str, Any]:
    law, library = law_gib(start), library_gib(start)
    return {
        "part": part,
        "engine": f"{start.model} {start.gpu[0]} TP{start.gpus} vLLM {start.version}",
        "limits": f"{start.share:g}, {start.seqs}, {start.budget}{' ' * bool(start.note)}{start.note}",
        "logged_gib": round(start.kv_gib, 2),
        "law_gib": round(law, 2),
        "law_off": round(law / start.kv_gib - 1, 4),
        "library_off": None if library is None else round(library / start.kv_gib - 1, 4),
    }


def main() -> int:
    asked = flags(__doc__).parse_args()
    rows = [row_of(start, "development") for start in DEVELOPMENT]
    rows += [row_of(start, "judged") for start in JUDGED]
    judged = sorted(abs(row["law_off"]) for row in rows if row["part"] == "judged")
    median = (judged[(len(judged) - 1) // 2] + judged[len(judged) // 2]) / 2
    bars = {"judged: median": bar(median, MEDIAN), "judged: worst": bar(judged[-1], WORST)}
    return show("kv_memory", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
