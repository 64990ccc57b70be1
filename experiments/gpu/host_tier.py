"""Host memory below KV as vLLM sets it up on a GPU: one mapped region, registered, copied block by block.

On a GPU vLLM keeps the region in shared memory, fills it and registers it at the start. This measures the
seconds that this takes for each GiB, and the rate of copies of blocks both ways, alone and during steps. The
planner takes four fifths of the bus's data sheet (`DATA_SHEET`). vLLM's own copies run in part B.
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
DATA_SHEET = {"H100": 63.0, "H200": 63.0, "A100": 31.5, "L40S": 31.5, "B200": 63.0}  # GB/s each way
PLANNED_SHARE = 0.8


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
    sheet = None
    if bench.is_gpu:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        name = torch.cuda.get_device_name(bench.device)
        sheet = next((rate for gpu, rate in DATA_SHEET.items() if gpu in name), None)
    reached = min(rows[1]["load_gb_per_s"], rows[1]["store_gb_per_s"])
    ok = sheet is not None and reached >= PLANNED_SHARE * sheet
    checks = {"copies reach the planned share of the bus": verdict(sheet is not None, ok)}
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
