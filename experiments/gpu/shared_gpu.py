"""Step times of two and three processes on one GPU: a plan takes n engines to be n times as slow as one.

    python -m experiments.gpu.shared_gpu

A process prints a line once it is ready. Then it takes a number of steps for each line of its input, and
prints their times. All run by time slices, unless MPS was started before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from experiments.gpu.bench import Bench, Result, bench_here, quantiles, verdict
from experiments.gpu.interference import engine_step

STEPS, QUICK_STEPS, PROCESSES, QUICK_PROCESSES = 1000, 20, 3, 2
SLACK = 1.1  # of n engines over n times one


def measure(bench: Bench) -> Result:
    count = bench.pick(PROCESSES, QUICK_PROCESSES)
    command = [sys.executable, "-m", "experiments.gpu.shared_gpu"]
    engines = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for engine in engines:
            answer(engine)
        rows = [together(bench, engines[:n]) for n in range(1, count + 1)]
    finally:
        for engine in engines:
            engine.communicate()
    alone = rows[0]["p50_ms"]
    for row in rows:
        row["times_alone"] = row["p50_ms"] / alone
    ok = all(row["times_alone"] <= SLACK * row["processes"] for row in rows)
    return Result(
        "n engines on one GPU are n times as slow",
        rows,
        {"no slower than planned": verdict(bench.is_gpu, ok)},
    )


def together(bench: Bench, engines: list[subprocess.Popen[str]]) -> dict[str, Any]:
    """All of these processes take steps at once."""
    for engine in engines:
        assert engine.stdin is not None
        engine.stdin.write(f"{bench.pick(STEPS, QUICK_STEPS)}\n")
        engine.stdin.flush()
    taken = [one for engine in engines for one in answer(engine)]
    return {"processes": len(engines), "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ} | quantiles(taken)


def answer(engine: subprocess.Popen[str]) -> Any:
    assert engine.stdout is not None
    return json.loads(engine.stdout.readline())


def main() -> None:
    bench = bench_here()
    step = engine_step(bench)
    print("[]", flush=True)
    for line in sys.stdin:
        taken = []
        for _ in range(int(line)):
            began_s = time.perf_counter()
            step()
            bench.sync()
            taken.append(time.perf_counter() - began_s)
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
