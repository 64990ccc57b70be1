"""Seconds per GB that staged KV takes off a strided cache and onto it, over one torch copy of the same bytes.

The cache has keys and values first, as FlashAttention has it, so that no block lies in one piece.
Rounds of all are taken in turns; each figure is the median of its rounds. With a GPU the cache is on it.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from dataplane.live.kv.memory import StagedMemory
from experiments.lib.results import bar, flags, show

LAYERS, BLOCKS, MOVED, ROUNDS, QUICK_ROUNDS = 4, 2048, 512, 9, 3
MOST = 1.5
TOKENS, HEADS, HEAD_BYTES = 16, 8, 256


def main() -> int:
    asked = flags(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (2, BLOCKS, TOKENS, HEADS, HEAD_BYTES)
    layers = [torch.zeros(shape, dtype=torch.uint8, device=device).transpose(0, 1) for _ in range(LAYERS)]
    memory, order = StagedMemory(layers), random.Random(0)
    gb = MOVED * memory.block_bytes / 1e9
    scattered, adjacent = order.sample(range(BLOCKS), MOVED), list(range(MOVED))
    host = [torch.empty((MOVED, *t.shape[1:]), dtype=torch.uint8) for t in layers]

    def copy() -> None:
        for tensor, part in zip(layers, host, strict=True):
            part.copy_(tensor[:MOVED])

    def pieces(blocks: list[int]) -> list[list[int]]:
        return [blocks[at : at + memory.piece_blocks] for at in range(0, MOVED, memory.piece_blocks)]

    def read(blocks: list[int]) -> None:
        for piece in pieces(blocks):
            views, wait = memory.read(piece)
            for view in range(len(views)):
                wait(view)

    def write(blocks: list[int]) -> None:
        for piece in pieces(blocks):
            memory.write(piece)[1]()
        memory.finish()

    ways: dict[str, Callable[[], None]] = {
        "one torch copy": copy,
        "read, adjacent blocks": lambda: read(adjacent),
        "read, scattered blocks": lambda: read(scattered),
        "write, scattered blocks": lambda: write(scattered),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(QUICK_ROUNDS if asked.quick else ROUNDS):
        for name, way in ways.items():
            began_s = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began_s)
    one_s = statistics.median(times["one torch copy"])
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rows = [
        {"name": name, "seconds per GB": taken / gb, "over one copy": taken / one_s}
        for name, taken in medians.items()
    ]
    bars = {f"{row['name']}, over one copy": bar(row["over one copy"], MOST) for row in rows[1:]}
    return show("kv_staging", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
