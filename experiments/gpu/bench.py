"""The device, caches as vLLM lays them out, and timing, which the parts of the GPU day share.

Without a GPU every part runs on CPU tensors of small size. That rehearses the script and measures nothing of
a GPU. A check that needs a stream is then `not applicable`; it never passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Verdict = Literal["passed", "failed", "not applicable"]
# Physical orders of layers, blocks, heads, positions and content, as vLLM names its layouts.
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC")
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a part runs. `is_quick`: small sizes and few rounds, as on a CPU."""

    device: torch.device
    is_quick: bool

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: Any, quick: Any) -> Any:
        """The size for this run."""
        return quick if self.is_quick else full

    def sync(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class Result:
    """What one part found. `turns`: the row of docs/limits-hardware.md that it replaces by a figure."""

    turns: str
    rows: Sequence[Mapping[str, Any]]
    checks: Mapping[str, Verdict] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shape:
    """A rank's KV cache: `heads` and `content` (bytes of keys and values) of a token in a layer."""

    name: str
    layers: int
    heads: int
    content: int


SHAPES = (
    Shape("8B, TP 1, bf16", 32, 8, 512),
    Shape("70B, TP 8, bf16", 80, 1, 512),
    Shape("DeepSeek (MLA), bf16", 61, 1, 1152),
)
TINY = Shape("tiny", 2, 2, 64)


def bench_here(quick: bool = False) -> Bench:
    """The first GPU, or else the CPU with small sizes."""
    has_gpu = torch.cuda.is_available()
    return Bench(torch.device("cuda:0" if has_gpu else "cpu"), quick or not has_gpu)


def caches(bench: Bench, shape: Shape, layout: str, blocks: int) -> list[torch.Tensor]:
    """A view [blocks, heads, positions, content] of each layer over one buffer in this physical order."""
    sizes = dict(zip("LBHNC", (shape.layers, blocks, shape.heads, BLOCK_TOKENS, shape.content), strict=True))
    buffer = torch.zeros([sizes[each] for each in layout], dtype=torch.uint8, device=bench.device)
    return list(buffer.permute([layout.index(each) for each in "LBHNC"]).unbind(0))


def fill(layers: Sequence[torch.Tensor], seed: int) -> None:
    """Fill caches with bytes that another process can make again."""
    made = torch.Generator().manual_seed(seed)
    for layer in layers:
        layer.copy_(torch.randint(0, 255, layer.shape, dtype=torch.uint8, generator=made))


def seconds(bench: Bench, work: Callable[[], Any], rounds: int) -> list[float]:
    """The time of each round, with the device idle before and after."""
    taken = []
    for _ in range(rounds):
        bench.sync()
        began_s = time.perf_counter()
        work()
        bench.sync()
        taken.append(time.perf_counter() - began_s)
    return taken


def quantiles(taken: Sequence[float]) -> dict[str, float]:
    """Median and p99 in milliseconds."""
    ordered = sorted(taken)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50_ms": 1e3 * statistics.median(ordered), "p99_ms": 1e3 * p99}


def verdict(applies: bool, ok: bool) -> Verdict:
    """A check's verdict."""
    if not applies:
        return "not applicable"
    return "passed" if ok else "failed"
