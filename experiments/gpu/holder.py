"""A process that holds KV for the parts of the GPU day: it serves blocks, and lends a pinned buffer.

    python -m experiments.gpu.holder ADDRESS SHAPE BLOCKS

It prints one line of JSON once it serves, and ends with its standard input.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dataplane.live.kv.direct import places
from dataplane.live.kv.memory import BlockTables, StagedMemory
from dataplane.live.kv.transport import SocketTransport
from experiments.gpu.bench import SHAPES, TINY, Shape, bench_here, caches, fill

SECRET, SEGMENT, SEED, LAYOUT = "gpu-day", "trial", 1, "LBNHC"


def serve(address: str, shape: Shape, blocks: int) -> dict[str, Any]:
    """Serve the blocks in this process; what a reader must know of it, the lent buffer included."""
    bench = bench_here()
    layers = caches(bench, shape, LAYOUT, blocks)
    fill(layers, SEED)
    bench.sync()
    memory, tables = StagedMemory(layers), BlockTables()
    tables.update({SEGMENT: list(range(blocks))}, ())
    SocketTransport(SECRET).serve(address, tables, memory)
    views, wait = memory.read(range(min(memory.piece_blocks, blocks)))
    for view in range(len(views)):
        wait(view)
    kept.append(views)
    digest = hashlib.sha256(b"".join(views)).hexdigest()
    return {
        "pid": os.getpid(),
        "places": places(views).tolist(),
        "sha256": digest,
        "device": str(bench.device),
    }


kept: list[Any] = []  # what another process reads must stay where it is


@contextmanager
def holder(address: str, shape: Shape, blocks: int) -> Iterator[dict[str, Any]]:
    """A holder in a process of its own; what it printed."""
    command = [sys.executable, "-m", "experiments.gpu.holder", address, shape.name, str(blocks)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


if __name__ == "__main__":
    shape = next(shape for shape in (*SHAPES, TINY) if shape.name == sys.argv[2])
    print(json.dumps(serve(sys.argv[1], shape, int(sys.argv[3]))), flush=True)
    sys.stdin.read()
    os._exit(0)  # its threads listen for ever
