"""GB/s of `StagedMemory` by model, layout and length, beside one copy of as many bytes over the bus.

The first read of a memory is timed by itself, because it may allocate. `pinned_mib` is what torch has pinned
in the process after the round; a fixed amount shows that nothing is pinned in service.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from dataplane.live.kv.memory import StagedMemory
from experiments.gpu.bench import (
    BLOCK_TOKENS,
    LAYOUTS,
    SHAPES,
    TINY,
    Bench,
    Result,
    caches,
    fill,
    seconds,
    verdict,
)

TOKENS, QUICK_TOKENS, ROUNDS, QUICK_ROUNDS = (512, 2048, 8192, 32_768), (64, 128), 5, 2


def measure(bench: Bench) -> Result:
    rows, is_exact = [], True
    for shape in bench.pick(SHAPES, (TINY,)):
        for layout in LAYOUTS:
            most = max(bench.pick(TOKENS, QUICK_TOKENS)) // BLOCK_TOKENS
            layers = caches(bench, shape, layout, most + 8)
            fill([layer[:4] for layer in layers], 3)
            memory = StagedMemory(layers)
            for tokens in bench.pick(TOKENS, QUICK_TOKENS):
                rows.append(
                    {"model": shape.name, "layout": layout, "tokens": tokens} | one(bench, memory, tokens)
                )
            is_exact &= moves_exactly(memory)
            del layers, memory
    bus = bus_rate(bench)
    checks = {"bytes come back as they were": verdict(True, is_exact)}
    return Result("KV copied off a GPU", [*rows, *bus], checks)


def one(bench: Bench, memory: StagedMemory, tokens: int) -> dict[str, Any]:
    """Rates of reads and writes of so many tokens, in pieces as a move has them."""
    blocks = [(7 * n) % (tokens // BLOCK_TOKENS) for n in range(tokens // BLOCK_TOKENS)]
    rounds, size = bench.pick(ROUNDS, QUICK_ROUNDS), len(blocks) * memory.block_bytes
    pieces = [blocks[at : at + memory.piece_blocks] for at in range(0, len(blocks), memory.piece_blocks)]

    def read() -> None:
        for piece in pieces:
            views, wait = memory.read(piece)
            for view in range(len(views)):
                wait(view)

    def write() -> None:
        for piece in pieces:
            memory.write(piece)[1]()
        memory.finish()

    read_s, write_s = seconds(bench, read, rounds), seconds(bench, write, rounds)
    return {
        "bytes": size,
        "first_read_s": read_s[0],
        "read_gb_per_s": size / statistics.median(read_s[1:]) / 1e9,
        "first_write_s": write_s[0],
        "write_gb_per_s": size / statistics.median(write_s[1:]) / 1e9,
        "pinned_mib": pinned_mib(bench),
    }


def moves_exactly(memory: StagedMemory) -> bool:
    """Whether two blocks, read and written elsewhere, are the same there."""
    read, wait = memory.read([0, 3])
    came = []
    for number, view in enumerate(read):
        wait(number)
        came.append(bytes(view))
    views, commit = memory.write([1, 2])
    for view, content in zip(views, came, strict=True):
        view[:] = content
    commit()
    memory.finish()
    return all(torch.equal(layer[[1, 2]], layer[[0, 3]]) for layer in memory.layers)


def pinned_mib(bench: Bench) -> float | None:
    """MiB that torch's host allocator has pinned in this process."""
    if not bench.is_gpu:
        return None
    return float(torch.cuda.memory.host_memory_stats()["allocated_bytes.current"] / 2**20)


def bus_rate(bench: Bench) -> list[dict[str, Any]]:
    """One copy each way between pinned memory and the device."""
    size = bench.pick(1 << 30, 1 << 22)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=bench.is_gpu)
    there = torch.empty(size, dtype=torch.uint8, device=bench.device)
    ways = {"device to host": lambda: host.copy_(there), "host to device": lambda: there.copy_(host)}
    return [
        {"model": f"one copy, {way}", "bytes": size, "gb_per_s": size / min(seconds(bench, copy, 5)) / 1e9}
        for way, copy in ways.items()
    ]
