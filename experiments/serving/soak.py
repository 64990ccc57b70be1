"""A served fleet for hours: memory and descriptors of its processes, latency, and what is lost.

    python experiments/serving/soak.py [--quick] [--hours H] [--look S] [--seed N] [--format table|json]

`tokenfleet serve` with two gateways and three emulated workers takes streams at a steady rate. In the second
half the core and the controller are killed in turn, one a minute. A minute, or `--look` seconds, is one look
at every process: its own memory, which it shares with no other, open descriptors, streams that failed or
ended short, TTFT, a client's longest wait. `drift`: the last quarter of the first half over its second
quarter. The first fills caches.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from experiments.lib.results import bar, flags, show
from harness.served import Server, Stream, by_role, fleet, session, stream, tiny_model

LOOK_S, RPS, TOKENS = 60.0, 8.0, 64
FLEET = ("--engine", "emulated", "--workers", "3", "--gateways", "2")


async def sent(server: Server, seconds: float, rng: np.random.Generator) -> list[Stream]:
    """Streams begun at this rate for so long, to their end."""
    async with session() as http:
        running = []
        for gap_s in rng.exponential(1.0 / RPS, int(seconds * RPS)):
            body = {"prompt": rng.integers(5, 2000, int(rng.integers(1, 400))).tolist(), "max_tokens": TOKENS}
            running.append(asyncio.create_task(stream(http, server.gateway, body)))
            await asyncio.sleep(gap_s)
        return await asyncio.gather(*running)


async def soaked(server: Server, minutes: int, look_s: float, seed: int) -> list[dict[str, Any]]:
    """A row a look."""
    rng, rows = np.random.default_rng(seed), []
    for minute in range(minutes):
        running = asyncio.create_task(sent(server, look_s, rng))
        if killed := ("core", "controller")[minute % 2] if minute >= minutes // 2 else "":
            await asyncio.sleep(look_s / 2)
            by_role(server)[killed][0].kill()
        got = await running
        whole = [s for s in got if s.is_done and not s.error and s.tokens == TOKENS]
        row = {"minute": minute, "killed": killed, "streams": len(got), "lost": len(got) - len(whole)}
        row["longest, s"] = round(max((max(s.ttft_s, s.worst_gap_s) for s in whole), default=0.0), 1)
        ttft_s = np.quantile([s.ttft_s for s in whole], (0.5, 0.99)).round(3).tolist()
        row |= dict(zip(("TTFT p50, s", "TTFT p99, s"), ttft_s, strict=True))
        row["errors"] = sorted({s.error[:80] for s in got if s.error})
        for role, of in by_role(server).items():
            row[f"{role}, MB"] = round(sum(one.memory_full_info().uss for one in of) / 1e6, 1)
            row[f"{role}, descriptors"] = sum(one.num_fds() for one in of)
        rows.append(row)
        print(row, flush=True)
    return rows


def drift(rows: list[dict[str, Any]], column: str) -> float:
    """The fourth quarter's mean over the second's."""
    quarters = np.array_split([float(row.get(column, np.nan)) for row in rows], 4)
    return round(float(np.nanmean(quarters[3]) / np.nanmean(quarters[1])), 3)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--look", type=float, default=LOOK_S, help="seconds of a look (default: 60)")
    asked = parser.parse_args()
    minutes, look_s = (8, 3.0) if asked.quick else (int(asked.hours * 3600 / asked.look), asked.look)
    with tiny_model() as model, fleet(model, *FLEET, engine_flags=()) as server:
        rows = asyncio.run(soaked(server, minutes, look_s, asked.seed))
    calm = rows[: minutes // 2]
    columns = [name for name in calm[-1] if name.endswith((", MB", ", descriptors"))]
    drifts = {f"drift of {column}": bar(drift(calm, column), 1.05) for column in columns}
    return show("soak", rows, {"lost": bar(sum(row["lost"] for row in rows), 0)} | drifts, asked)


if __name__ == "__main__":
    raise SystemExit(main())
