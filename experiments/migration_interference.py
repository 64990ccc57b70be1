"""What do moves cost the requests that are not moved?

    python experiments/migration_interference.py [--quick] [--seed N] [--format table|json]

Bystanders decode on both of two real vLLM engines while one more request, with 32 KB of KV per token, is
moved to and fro between them. A move is compared with the stretch just before it, which has the same requests
on the same workers: mean gap between tokens from the move's begin to its cut-over, over mean gap before. So
the change of batch that a move is made for does not count, only the moving. But every context grows by a
token a step, so a later stretch is slower also when nothing moves: after each move comes a control, two such
stretches without one, and a move's ratio is divided by its control's (`uncorrected`: it is not). Pairs share
the machine's noise; the interval is of the median ratio, by bootstrap.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from results import bar, flags, show
from two_workers import A, B, Pair, on_two_workers

BYSTANDERS = 4  # on each worker
CONTEXT = 200
MOVES, QUICK_MOVES = 24, 8
LENGTHS, QUICK_LENGTHS = (1024, 4096), (1024,)
PACES = {"as fast as it goes": 0.0, "at most 100 MB/s": 100e6}
BAR = 1.02
BEFORE_STEPS = 20


def mean_gap_s(streams: list[Any], start_s: float, end_s: float) -> float:
    """Mean time between tokens of these streams whose gap ends within [start, end]."""
    gaps: list[float] = []
    for stream in streams:
        times = np.array(stream.times)
        inside = (times[1:] > start_s) & (times[1:] <= end_s)
        gaps += np.diff(times)[inside].tolist()
    return float(np.mean(gaps)) if gaps else float("nan")


async def measure(pair: Pair, length: int, moves: int, seed: int) -> NDArray[np.float64]:
    """[2 x moves, 2]: bystanders' token gaps, moving over not, and the same of its control; per worker."""
    rng = np.random.default_rng((seed, length))
    draw = lambda n: rng.integers(5, 2000, n).tolist()  # noqa: E731
    bystanders = {
        worker: [
            await pair.fleet.start(worker, draw(CONTEXT), {"max_tokens": 8000}) for _ in range(BYSTANDERS)
        ]
        for worker in (A, B)
    }
    mover = await pair.fleet.start(A, draw(length), {"max_tokens": 8000})
    await mover.until(BEFORE_STEPS)
    ratios: list[tuple[float, float]] = []

    async def still() -> float:
        """When a stretch of steps in which nothing moves began."""
        began_s = time.monotonic()
        await mover.until(len(mover.tokens) + BEFORE_STEPS)
        return began_s

    for turn in range(moves):
        still_s, begin_s = await still(), time.monotonic()
        move = await pair.fleet.move(mover, B if turn % 2 == 0 else A)
        cut_s = time.monotonic() - (move.downtime_s or 0.0)
        if not move.moved or move.downtime_s is None:
            raise RuntimeError(f"{move.outcome}: {move.reason}")
        await mover.until(len(mover.tokens) + 3)
        control_still_s, control_s = await still(), time.monotonic()
        control_cut_s = control_s + cut_s - begin_s
        while time.monotonic() < control_cut_s:
            await mover.until(len(mover.tokens) + 1)
        for streams in bystanders.values():
            moving = mean_gap_s(streams, begin_s, cut_s) / mean_gap_s(streams, still_s, begin_s)
            control = mean_gap_s(streams, control_s, control_cut_s)
            control /= mean_gap_s(streams, control_still_s, control_s)
            if np.isfinite(moving) and np.isfinite(control):
                ratios.append((moving, control))
    for stream in (mover, *bystanders[A], *bystanders[B]):
        await pair.fleet.abort(stream)
    await asyncio.gather(pair.forget(A), pair.forget(B))
    return np.array(ratios)


def interval(ratios: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def main() -> int:
    asked = flags(__doc__.splitlines()[0]).parse_args()
    moves = QUICK_MOVES if asked.quick else MOVES
    lengths = QUICK_LENGTHS if asked.quick else LENGTHS

    async def story(pair: Pair) -> list[dict[str, Any]]:
        rows = []
        for pace, bytes_per_s in PACES.items():
            # A worker takes part in two moves at most, which share its rate; here in one.
            pair = await pair.budgeted(bytes_per_s=2 * bytes_per_s)
            for length in lengths:
                ratios = await measure(pair, length, moves, asked.seed)
                together = ratios[:, 0] / ratios[:, 1]
                low, high = interval(together, asked.seed)
                rows.append(
                    {
                        "tokens": length,
                        "pace": pace,
                        "pairs": len(together),
                        "step time, moving over not (median)": float(np.median(together)),
                        "uncorrected": float(np.median(ratios[:, 0])),
                        "low": low,
                        "high": high,
                        "mean": float(together.mean()),
                    }
                )
        return rows

    rows = on_two_workers(
        story, fat=True, dtype="bfloat16", max_model_len=16000, kv_cache_memory_bytes=1280 << 20
    )
    bars = {
        f"step time at {r['tokens']} tokens, {r['pace']}": bar(r["step time, moving over not (median)"], BAR)
        for r in rows
    }
    return show("migration_interference", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
