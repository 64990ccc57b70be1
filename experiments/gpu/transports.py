"""KV between two processes of this host by process memory, a Unix socket and TLS; reads of pinned pages.

A driver or a sandbox may refuse `process_vm_readv` of pinned pages. The first check reads such a buffer of
the holder by hand and says which error came. The product then falls back to a socket.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dataplane.live.kv import direct
from dataplane.live.kv.memory import StagedMemory
from dataplane.live.kv.transport import Fetch, SocketTransport, reserve_addresses
from experiments.gpu.bench import SHAPES, TINY, Bench, Result, caches, fill, verdict
from experiments.gpu.holder import LAYOUT, SECRET, SEED, SEGMENT, holder

TOKENS, QUICK_TOKENS, ROUNDS, QUICK_ROUNDS, LIMIT_S = 8192, 128, 7, 2, 30.0
THREADS = (1, 2, 4, 8)  # of the raw read


def measure(bench: Bench) -> Result:
    shape, blocks = bench.pick(SHAPES[0], TINY), bench.pick(TOKENS, QUICK_TOKENS) // 16
    (address,), release = reserve_addresses("0.0.0.0", 1)
    port = address.rpartition(":")[2]
    # A server at a TCP address has a Unix socket named after that address. Another spelling of it has none.
    ways = {"nearest": f"tcp://127.0.0.1:{port}", "TLS": f"tcp://localhost:{port}"}
    with holder(ways["nearest"], shape, blocks) as held:
        release()
        rows: list[dict[str, Any]] = [pinned_read(held, threads) for threads in THREADS]
        is_read = not any(row["error"] for row in rows)
        layers = caches(bench, shape, LAYOUT, blocks)
        memory, expected = (
            StagedMemory(layers),
            caches(Bench(torch.device("cpu"), True), shape, LAYOUT, blocks),
        )
        fill(expected, SEED)
        exact = True
        for name in ("nearest", "local socket", "TLS"):
            transport = SocketTransport(SECRET)
            if name == "local socket":
                transport._bypasses.clear()
            taken = []
            for _ in range(bench.pick(ROUNDS, QUICK_ROUNDS)):
                for layer in layers:
                    layer.zero_()
                asks = Fetch(SECRET, SEGMENT, 0, blocks)
                began_s = time.perf_counter()
                where = ways.get(name, ways["nearest"])
                size, way = transport.fetch(where, asks, memory, range(blocks), LIMIT_S)
                taken.append(time.perf_counter() - began_s)
                exact &= all((a.cpu() == b).all() for a, b in zip(layers, expected, strict=True))
            transport.close()
            rate = size / statistics.median(taken) / 1e9
            rows.append({"asked": name, "way": way, "bytes": size, "gb_per_s": rate, "first_s": taken[0]})
    checks = {
        "a pinned buffer of another process can be read": verdict(bench.is_gpu, is_read),
        "every way brings the same bytes": verdict(True, bool(exact)),
    }
    return Result("KV copied off a GPU", rows, checks)


def pinned_read(held: dict[str, Any], threads: int) -> dict[str, Any]:
    """Read the holder's staging buffer by the product's own call."""
    source = np.array(held["places"], np.uint64).reshape(-1, 2)
    into, error, taken = memoryview(bytearray(int(source[:, 1].sum()))), "", []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):  # the first also takes the buffer's pages, and starts the threads
            began_s = time.perf_counter()
            try:
                direct.read(held["pid"], source, [into], None, pool if threads > 1 else None)
            except OSError as refused:
                error = str(refused)
            taken.append(time.perf_counter() - began_s)
    if not error and hashlib.sha256(into).hexdigest() != held["sha256"]:
        error = "the bytes differ"
    return {
        "asked": f"process_vm_readv, {threads} threads",
        "bytes": into.nbytes,
        "gb_per_s": into.nbytes / statistics.median(taken) / 1e9,
        "error": error,
    }
