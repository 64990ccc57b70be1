"""Step times while moves read and write blocks: replays of a CUDA graph, alone and with moves.

A step is a few matrix products and an attention over a cache, captured as vLLM captures a decode step. The
case `pinning` allocates pinned memory meanwhile, which the product does at its start only. `stalls_ms` is how
late a thread that sleeps a millisecond at a time wakes: what an event loop in the same process would feel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from dataplane.live.kv.memory import StagedMemory
from experiments.gpu.bench import SHAPES, TINY, Bench, Result, caches, quantiles, verdict

STEPS, QUICK_STEPS, LAYERS, QUICK_LAYERS = 2000, 5, 24, 1
LIMIT_S = 20.0  # of a case: on an H100 one was not over after three minutes
PINNED_BYTES = 1 << 30
CASES = {"alone": (0, False), "1 move": (1, False), "8 moves": (8, False), "pinning": (0, True)}


def measure(bench: Bench) -> Result:
    step, rows = engine_step(bench), []
    memory = StagedMemory(caches(bench, bench.pick(SHAPES[0], TINY), "LBNHC", bench.pick(1024, 16)))
    for name, (moves, pins) in CASES.items():
        if pins and not bench.is_gpu:
            continue
        done = [0]
        with ExitStack() as beside:
            late = beside.enter_context(stalls())
            for _ in range(moves):
                beside.enter_context(beside_steps(partial(move, memory, done)))
            if pins:
                beside.enter_context(beside_steps(pin))
            taken, began_s = [], time.perf_counter()
            while len(taken) < bench.pick(STEPS, QUICK_STEPS) and time.perf_counter() - began_s < LIMIT_S:
                memory.step_begins()
                step_began_s = time.perf_counter()
                step()
                bench.sync()
                taken.append(time.perf_counter() - step_began_s)
            rate = done[0] / (time.perf_counter() - began_s) / 1e9
        row: dict[str, Any] = {
            "case": name,
            "steps": len(taken),
            "moved_gb_per_s": rate,
            "stalls_ms": 1e3 * max(late, default=0.0),
        }
        rows.append(row | quantiles(taken))
    slowed = rows[2]["p50_ms"] / rows[0]["p50_ms"] - 1
    checks = {
        "eight moves lengthen the median step by less than a tenth": verdict(bench.is_gpu, slowed < 0.1)
    }
    return Result("the pause of a move, and what it costs other requests", rows, checks)


def engine_step(bench: Bench) -> Callable[[], None]:
    """A decode step of a made model: a graph's replay on a GPU."""
    width, batch, context = bench.pick(4096, 64), bench.pick(64, 2), bench.pick(2048, 32)
    dtype = torch.bfloat16 if bench.is_gpu else torch.float32
    made = {"device": bench.device, "dtype": dtype}
    weights = [torch.randn(width, width, **made) for _ in range(bench.pick(LAYERS, QUICK_LAYERS))]
    x, query = torch.randn(batch, width, **made), torch.randn(batch, 8, 1, 64, **made)
    keys = torch.randn(batch, 8, context, 64, **made)

    def compute() -> None:
        hidden = x
        for weight in weights:
            hidden = torch.tanh(hidden @ weight)
            scaled_dot_product_attention(query, keys, keys)

    if not bench.is_gpu:
        return compute
    compute()
    bench.sync()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


def move(memory: StagedMemory, done: list[int]) -> None:
    """A source's and a target's part of one piece."""
    blocks = range(min(memory.piece_blocks, 32))
    memory.enter_thread()
    views, wait = memory.read(blocks)
    for view in range(len(views)):
        wait(view)
    memory.write(blocks)[1]()
    memory.finish()
    done[0] += 2 * len(blocks) * memory.block_bytes


def pin() -> None:
    """Pin a gigabyte and give it back to the driver."""
    torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    torch._C._host_emptyCache()


@contextmanager
def beside_steps(work: Callable[[], None]) -> Iterator[None]:
    """Do this again and again in a thread."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def stalls() -> Iterator[list[float]]:
    """How late each nap of a millisecond ended."""
    late: list[float] = []

    def nap() -> None:
        began_s = time.perf_counter()
        time.sleep(0.001)
        late.append(time.perf_counter() - began_s - 0.001)

    with beside_steps(nap):
        yield late
