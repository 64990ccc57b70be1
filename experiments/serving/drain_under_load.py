"""A worker drained under load: its streams move, with their KV, and no client notices.

Every stream is compared with the same request's undisturbed one: greedy, so equal text and usage mean that
no token was lost, repeated or changed. `--quick` runs on emulated engines.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from experiments.lib.results import bar, flags, show
from harness.served import ENGINE_FLAGS, Server, begun, fleet, session, stream, tiny_model

OUTPUT_TOKENS = 400


async def drain(server: Server, streams: int, rng: np.random.Generator) -> dict[str, Any]:
    """Drain one of the workers while `streams` streams run; what came of it."""
    bodies = [
        {"prompt": rng.integers(5, 2000, int(n)).tolist(), "max_tokens": OUTPUT_TOKENS}
        for n in rng.integers(20, 200, streams)
    ]
    async with session() as http:
        expected = await asyncio.gather(*(stream(http, server.gateway, body) for body in bodies))
        running = [asyncio.create_task(stream(http, server.gateway, body)) for body in bodies]
        await begun(server, streams, running)
        workers = await asyncio.to_thread(server.workers)
        leaving = workers[0]
        began_s = time.monotonic()
        await asyncio.to_thread(server.ask, "POST", f"/v1/workers/{leaving['worker']}/drain")
        while leaving["worker"] in [w["worker"] for w in (await _view(server))["workers"]]:
            await asyncio.sleep(0.01)
        lasted_s = time.monotonic() - began_s
        got = await asyncio.gather(*running)
    view = await _view(server)
    moved = [d for d in view["decisions"] if d["kind"] == "migrate"]
    return {
        "streams": streams,
        "on the drained worker": leaving["requests"],
        "failed": sum(bool(s.error) for s in got),
        "lost or repeated": sum(
            not s.error and s.content != e.content for s, e in zip(got, expected, strict=True)
        ),
        "drain_s": lasted_s,
        "moves among the last decisions": len(moved),
        "worst gap_ms": 1e3 * max(s.worst_gap_s for s in got),
        "worst gap undisturbed_ms": 1e3 * max(s.worst_gap_s for s in expected),
    }


async def _view(server: Server) -> Any:
    return await asyncio.to_thread(server.ask, "GET", "/v1/fleet")


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--streams", type=int, default=50)
    asked = parser.parse_args()
    engine = ("--engine", "emulated") if asked.quick else ()
    engine_flags = () if asked.quick else ENGINE_FLAGS
    with tiny_model() as model, fleet(model, "--workers", "2", *engine, engine_flags=engine_flags) as server:
        row = asyncio.run(drain(server, asked.streams, np.random.default_rng(asked.seed)))
    bars = {
        "failed streams": bar(row["failed"], 0),
        "streams with lost or repeated tokens": bar(row["lost or repeated"], 0),
    }
    return show("drain_under_load", [row], bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
