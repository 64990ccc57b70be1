"""Host memory below KV as vLLM sets it up on a GPU: one mapped region, registered, copied block by block.

On a GPU vLLM keeps the region in shared memory, fills it and registers it at the start. This measures the
seconds that this takes for each GiB, and the rate of copies of blocks both ways, alone and during steps.
`kernel` reads scattered blocks by a Triton kernel, as vLLM does, and is held against what the planner takes
(`PLANNED`). vLLM's own copies run in part B.
"""

from __future__ import annotations

import mmap
import statistics
import time
from typing import Any

import torch

from experiments.gpu.bench import Bench, Result, seconds, verdict
from experiments.gpu.interference import beside_steps, engine_step

REGION_BYTES, QUICK_BYTES, BLOCK_BYTES, ROUNDS = 8 << 30, 4 << 20, 64 << 10, 5
PLANNED = {"H100": 47.0, "H200": 47.0, "A100": 25.0, "L40S": 25.0, "B200": 50.0}  # GB/s, profiles/library.py
SLACK = 0.95


def measure(bench: Bench) -> Result:
    size = bench.pick(REGION_BYTES, QUICK_BYTES)
    region, began_s = mmap.mmap(-1, size), time.perf_counter()
    host = torch.frombuffer(region, dtype=torch.uint8)
    host.zero_()
    populated_s = time.perf_counter() - began_s
    if bench.is_gpu:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))
    gib = size / 2**30
    registered_s = time.perf_counter() - began_s - populated_s
    rows: list[dict[str, Any]] = [
        {"step": "start", "populate_s_per_gib": populated_s / gib, "register_s_per_gib": registered_s / gib}
    ]
    rows += [copies(bench, host, "alone")]
    step = engine_step(bench)

    def steps() -> None:
        step()
        bench.sync()

    with beside_steps(steps):
        rows.append(copies(bench, host, "beside steps"))
    planned, reached = None, 0.0
    if bench.is_gpu:
        name, reached = torch.cuda.get_device_name(bench.device), kernel_rate(bench, host)
        rows.append({"step": "kernel", "load_gb_per_s": reached})
        planned = next((rate for gpu, rate in PLANNED.items() if gpu in name), None)
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    ok = planned is not None and reached >= SLACK * planned
    checks = {"blocks are read as fast as plans say": verdict(planned is not None, ok)}
    return Result("host memory below KV on a GPU (its rate)", rows, checks)


def copies(bench: Bench, host: torch.Tensor, case: str) -> dict[str, Any]:
    """Rates of loads and stores of scattered blocks, each a copy of its own."""
    count = len(host) // BLOCK_BYTES // 4
    rows = host[: 4 * count * BLOCK_BYTES].view(-1, BLOCK_BYTES)
    there = torch.zeros(count, BLOCK_BYTES, dtype=torch.uint8, device=bench.device)
    order = [(5 * n) % len(rows) for n in range(count)]
    stream = torch.cuda.Stream(bench.device) if bench.is_gpu else None

    def load() -> None:
        for at, block in enumerate(order):
            there[at].copy_(rows[block], non_blocking=True)

    def store() -> None:
        for at, block in enumerate(order):
            rows[block].copy_(there[at], non_blocking=True)

    with torch.cuda.stream(stream):
        taken = {"load": seconds(bench, load, ROUNDS), "store": seconds(bench, store, ROUNDS)}
    size = count * BLOCK_BYTES
    return {"step": case} | {f"{way}_gb_per_s": size / statistics.median(s) / 1e9 for way, s in taken.items()}


class _Host:
    """Registered host memory, as a kernel's pointer: Triton takes tensors of the device only."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.dtype, self.data_ptr = memory.dtype, memory.data_ptr


def kernel_rate(bench: Bench, host: torch.Tensor) -> float:
    """GB/s of a kernel that reads scattered blocks of host memory."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def gather(source, there, order, WORDS: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
        row, at = tl.program_id(0), tl.program_id(1) * PART + tl.arange(0, PART)
        block = tl.load(order + row)
        tl.store(there + row.to(tl.int64) * WORDS + at, tl.load(source + block * WORDS + at))

    words, part, count = BLOCK_BYTES // 8, 1024, len(host) // BLOCK_BYTES // 4
    there = torch.zeros(count, words, dtype=torch.int64, device=bench.device)
    order = torch.tensor([(5 * n) % (4 * count) for n in range(count)], device=bench.device)
    source = _Host(host.view(torch.int64))
    taken = seconds(
        bench, lambda: gather[(count, words // part)](source, there, order, words, part), ROUNDS + 1
    )
    return count * BLOCK_BYTES / statistics.median(taken[1:]) / 1e9
