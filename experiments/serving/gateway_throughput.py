"""What the gateway costs: one fleet of two workers against two plain vLLM servers that are fed directly.

The same engines on the same cores, closed-loop streams of 64 prompt and 100 output tokens. The sides take
turns, round by round, so that whatever else the machine does falls on all; a ratio is the median over rounds.
One more round has 500 streams at once on the fleet alone.

Two kinds of plain server: `plain` as vLLM starts on a CPU, with the rank in a process of its own, and
`plain, one process`, with the rank inside the engine's process. The fleet's workers are of the second kind
(vLLM's default on a GPU, ours on a CPU too), so that the first ratio is what a user gains or loses and the
second is what the gateway alone costs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from experiments.lib.results import bar, flags, show
from harness.served import Stream, fleet, plain_server, session, stream, tiny_model

REQUESTS, HELD = {1: 4, 16: 32, 64: 96}, 500  # of a quick round by streams at once; streams held
PLAIN = {"plain": False, "plain, one process": True}
OUTPUT_TOKENS = 100
IDLE_SPIN_S = 1.5  # vLLM's ranks spin for a second after their last step, on the cores of the other side


async def load(
    urls: Sequence[str], streams: int, requests: int, rng: np.random.Generator
) -> dict[str, float]:
    """Tokens a second and the median TTFT of `requests` requests, `streams` at a time, urls in turn."""
    prompts = iter([(i, rng.integers(5, 2000, 64).tolist()) for i in range(requests)])
    done: list[Stream] = []
    async with session() as http:

        async def client() -> None:
            for i, prompt in prompts:
                body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}
                done.append(await stream(http, urls[i % len(urls)], body))

        began_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(streams)))
        lasted_s = time.perf_counter() - began_s
    failed = [s.error or "incomplete" for s in done if s.error or s.tokens != OUTPUT_TOKENS]
    if failed:
        raise SystemExit(f"{len(failed)} of {requests} streams failed: {failed[0]}")
    gaps = [b - a for s in done for a, b in zip(s.chunks_s, s.chunks_s[1:], strict=False)]
    return {
        "tokens_per_s": requests * OUTPUT_TOKENS / lasted_s,
        "ttft_ms": 1e3 * statistics.median(s.ttft_s for s in done),
        "itl_ms": 1e3 * statistics.median(gaps),
    }


def main() -> int:
    asked = flags(__doc__).parse_args()
    rounds = 2 if asked.quick else 5
    rng = np.random.default_rng(asked.seed)
    cores = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    bars = {}
    with ExitStack() as stack:
        model = stack.enter_context(tiny_model())
        sides: dict[str, list[str]] = {}
        for side, is_one_process in PLAIN.items():
            servers = [plain_server(model, cores[i % len(cores)], is_one_process) for i in range(2)]
            sides[side] = [stack.enter_context(server).gateway for server in servers]
        sides["fleet"] = [stack.enter_context(fleet(model, "--workers", "2")).gateway]
        for urls in sides.values():
            asyncio.run(load(urls, 8, 16, rng))
        for streams in REQUESTS:
            requests = REQUESTS[streams] * (1 if asked.quick else 2)
            got: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for turn in range(rounds):
                for side in sides if turn % 2 == 0 else reversed(sides):
                    time.sleep(IDLE_SPIN_S)
                    got[side].append(asyncio.run(load(sides[side], streams, requests, rng)))
            for side, rounds_of_side in got.items():
                medians = {k: statistics.median(r[k] for r in rounds_of_side) for k in rounds_of_side[0]}
                rows.append({"streams": streams, "side": side, **medians})
            for side in PLAIN:
                pairs = zip(got["fleet"], got[side], strict=True)
                ratio = statistics.median(f["tokens_per_s"] / p["tokens_per_s"] for f, p in pairs)
                bars[f"throughput against {side} at {streams} streams"] = bar(ratio, 0.95, True)
        if not asked.quick:
            held = asyncio.run(load(sides["fleet"], HELD, HELD, rng))
            rows.append({"streams": HELD, "side": "fleet", **held})
    return show("gateway_throughput", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
