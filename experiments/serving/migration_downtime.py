"""How long does a client wait for the next token when its request is moved?

    python experiments/serving/migration_downtime.py [--model FOLDER] [--quick] [--seed N]
        [--format table|json]

A model with 32 KB of KV per token, in bfloat16; one request at a time is moved between two real vLLM
engines: live (pre-copy while it decodes), by stop-and-copy, and by recomputing on the target. Downtime runs
from the cut-over to the target's first token. A decode step is the median gap between tokens at the source,
just before. `equal` counts streams that are those without a move.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.lib.results import bar, flags, show
from harness.two_workers import A, B, Pair, on_two_workers

LENGTHS, QUICK_LENGTHS = (256, 1024, 2048, 4096, 7800), (256, 2048)
TURNS, QUICK_TURNS = 7, 3
MODES = ("live", "stop-and-copy", "recompute")
SLOW_TURNS = 3  # of the modes whose downtime is long
BEFORE, AFTER = 25, 35  # tokens decoded before the move, and at least after it began
AFTER_OF_MODEL = 400  # a GPU decodes faster than it copies a gigabyte
SLACK_S = 0.010


async def measure(
    pair: Pair, length: int, mode: str, turns: int, seed: int, after: int = AFTER
) -> dict[str, Any]:
    """Move a request of `length` prompt tokens `turns` times, each time afresh."""
    prompt = np.random.default_rng((seed, length)).integers(5, 2000, length).tolist()
    for _ in range(2):  # the second finds its prompt cached, as all that follow; in bfloat16 that counts
        plain = await pair.fleet.start(A, prompt, {"max_tokens": BEFORE + after})
        await plain.ended()
    downtimes, steps, gaps, copied, equal = [], [], [], [], 0
    for _ in range(turns):
        await pair.forget(B)
        stream = await pair.fleet.start(A, prompt, {"max_tokens": BEFORE + after})
        await stream.until(BEFORE)
        move = await pair.fleet.move(stream, B, mode)
        await stream.ended()
        if not move.moved or move.downtime_s is None:
            raise RuntimeError(f"{mode} at {length} tokens: {move.outcome}: {move.reason}")
        downtimes.append(move.downtime_s)
        before = np.diff(stream.times[5:BEFORE])
        steps.append(float(np.median(before)))
        gaps.append(float(np.max(np.diff(stream.times[BEFORE - 1 :]))))
        copied.append(move.bytes)
        equal += stream.tokens == plain.tokens
    step_s, downtime_s = float(np.median(steps)), float(np.median(downtimes))
    return {
        "tokens": length,
        "mode": mode,
        "moves": turns,
        "decode step (ms)": 1e3 * step_s,
        "downtime p50 (ms)": 1e3 * downtime_s,
        "downtime max (ms)": 1e3 * max(downtimes),
        "longest gap p50 (ms)": 1e3 * float(np.median(gaps)),
        "steps": downtime_s / step_s,
        "bar (ms)": 1e3 * (2 * step_s + SLACK_S) if mode == "live" else None,
        "copied (MB)": float(np.median(copied)) / 1e6,
        "equal": equal,
    }


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--model", default="", help="a model's folder, instead of the one made here")
    asked = parser.parse_args()
    lengths, turns = (QUICK_LENGTHS, QUICK_TURNS) if asked.quick else (LENGTHS, TURNS)

    async def story(pair: Pair) -> list[dict[str, Any]]:
        after = AFTER_OF_MODEL if asked.model else AFTER
        await measure(pair, 300, "live", 2, asked.seed + 1, after)  # connections, first steps after warm-up
        return [
            await measure(pair, length, mode, turns if mode == "live" else SLOW_TURNS, asked.seed, after)
            for length in lengths
            for mode in MODES
        ]

    memory: dict[str, float] = {"kv_cache_memory_bytes": 640 << 20}
    if asked.model:  # two of them may share a GPU
        memory = {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.45}
    rows = on_two_workers(story, fat=True, model=asked.model, dtype="bfloat16", max_model_len=8192, **memory)
    live = [r for r in rows if r["mode"] == "live"]
    bars = {}
    for row in live:
        name = f"live downtime at {row['tokens']} tokens (ms)"
        bars[name] = bar(row["downtime p50 (ms)"], row["bar (ms)"])
    short, long = live[0], live[-1]
    bars[f"steps at {long['tokens']} tokens over steps at {short['tokens']}"] = bar(
        long["steps"] / short["steps"], 2.0
    )
    for row in rows:
        fastest = next(r for r in live if r["tokens"] == row["tokens"])
        row["× live"] = row["downtime p50 (ms)"] / fastest["downtime p50 (ms)"]
        row["× shortest"] = row["downtime p50 (ms)"] / next(
            r["downtime p50 (ms)"] for r in rows if r["mode"] == row["mode"]
        )
    return show("migration_downtime", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
