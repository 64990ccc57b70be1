"""The loss of a core under 40 streams before two gateways, in rounds; each successor is the next victim.

In every round the core is killed with SIGKILL (`--hang`: stopped with SIGSTOP, and never let go on) while all
streams decode. Each stream's tokens are compared with those of an undisturbed run. A request that is sent at
the moment of the kill tells how long nothing was placed. Engines are emulated, and end with their core, so
that all requests are replayed on new ones; with `--real` two vLLM engines live on (fp32, a tiny model), and
must be the same processes after all rounds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from typing import Any

from experiments.lib.results import bar, flags, show
from harness.served import ENGINE_FLAGS, Server, Stream, begun, fleet, session, stream, tiny_model

STREAMS, TOKENS = 40, 600
EMULATED = ("--engine", "emulated", "--workers", "3")
REAL = ("--workers", "2")


async def undisturbed(server: Server) -> list[Stream]:
    async with session() as http:
        return list(await asyncio.gather(*(_stream(http, server, i, TOKENS) for i in range(STREAMS))))


async def disturbed(server: Server, sign: signal.Signals) -> tuple[list[Stream], float]:
    """The streams of a round, and the seconds until a request sent as the core is lost has its answer."""
    core = server.ask("GET", "/v1/fleet")["core"]
    async with session() as http:
        tasks = [asyncio.ensure_future(_stream(http, server, i, TOKENS)) for i in range(STREAMS)]
        await begun(server, STREAMS, tasks)
        os.kill(core["pid"], sign)
        lost_s = time.perf_counter()
        new = await _stream(http, server, STREAMS, 1)
        if new.error:
            raise SystemExit(f"a new request failed: {new.error}")
        placed_s = new.chunks_s[0] - lost_s
        got = list(await asyncio.gather(*tasks))
    after = server.ask("GET", "/v1/fleet")["core"]
    if after["number"] != core["number"] + 1:
        raise SystemExit(f"core {core['number']} was lost, and core {after['number']} is there")
    return got, placed_s


async def _stream(http: Any, server: Server, i: int, tokens: int) -> Stream:
    body = {"prompt": [(7 * i + k) % 2000 + 5 for k in range(20 + i)], "max_tokens": tokens}
    return await stream(http, server.gateway, body | {"return_token_ids": True})


def judged(expected: Stream, got: Stream) -> str:
    """What has become of a stream's tokens."""
    if got.error:
        return "ended in an error"
    if got.is_silently_cut or len(got.token_ids) < len(expected.token_ids):
        return "lost"
    if len(got.token_ids) > len(expected.token_ids):
        return "repeated"
    return "same" if (got.token_ids, got.content) == (expected.token_ids, expected.content) else "changed"


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--real", action="store_true", help="two vLLM engines instead of emulated ones")
    parser.add_argument("--hang", action="store_true", help="stop the core (SIGSTOP) instead of killing it")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    rounds = 2 if asked.quick else asked.rounds
    engines, engine_flags = (REAL, ENGINE_FLAGS) if asked.real else (EMULATED, ())
    rows: list[dict[str, Any]] = []
    with (
        tiny_model() as model,
        fleet(model, *engines, "--gateways", "2", engine_flags=engine_flags) as server,
    ):
        expected = asyncio.run(undisturbed(server))
        engines_before = [w["pid"] for w in server.workers()]
        gateways_before = [g["pid"] for g in server.ask("GET", "/v1/fleet")["gateways"]]
        for number in range(rounds):
            sign = signal.SIGSTOP if asked.hang else signal.SIGKILL
            got, placed_s = asyncio.run(disturbed(server, sign))
            ends = [judged(e, g) for e, g in zip(expected, got, strict=True)]
            row = {
                end: ends.count(end) for end in ("same", "lost", "changed", "repeated", "ended in an error")
            }
            gap_s = max(g.worst_gap_s for g in got)
            rows.append({"round": number} | row | {"placed again after s": placed_s, "longest gap s": gap_s})
        harmed = asked.real and [w["pid"] for w in server.workers()] != engines_before
        gone = [g["pid"] for g in server.ask("GET", "/v1/fleet")["gateways"]] != gateways_before
    wrong = {
        end: sum(row[end] for row in rows) for end in ("lost", "changed", "repeated", "ended in an error")
    }
    bars = {f"streams {end}": bar(count, 0) for end, count in wrong.items()}
    bars |= {"engines harmed": bar(harmed, 0), "gateways harmed": bar(gone, 0)}
    placed = [row["placed again after s"] for row in rows]
    bars["seconds without placement, median"] = bar(statistics.median(placed), 45.0 if asked.hang else 10.0)
    return show("core_loss", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
