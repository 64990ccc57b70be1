"""An update of three real vLLM workers under 24 streams, and one whose new workers never become healthy.

As one stream ends the next begins, so that 24 run from before the update to its end. Each is compared with
the same request's undisturbed run: greedy, so equal text and usage mean that no token was lost, repeated or
changed. The workers that serve are counted ten times a second. `--quick` runs on emulated engines.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from experiments.lib.results import bar, flags, show
from harness.served import ENGINE_FLAGS, Server, Stream, fleet, session, stream, tiny_model

STREAMS, TOKENS, WORKERS = 24, 600, 3
LESS_KV = ("--kv-cache-memory-bytes", str(256 << 20))
GOOD = (*ENGINE_FLAGS[:4], "--max-num-seqs", "128", *LESS_KV)
BAD = (*ENGINE_FLAGS[:4], "--max-num-seqs", "64", "--kv-cache-memory-bytes", "1000")  # not one block


async def updated(server: Server, engine_flags: tuple[str, ...], bodies: list[Any]) -> dict[str, Any]:
    """One update under streams, and what came of it."""
    ask = asyncio.to_thread
    over = asyncio.Event()
    async with session() as http:
        expected = await asyncio.gather(*(stream(http, server.gateway, body) for body in bodies))
        got: list[tuple[int, Stream]] = []

        async def client(number: int) -> None:
            while not over.is_set():
                got.append((number, await stream(http, server.gateway, bodies[number])))

        clients = [asyncio.create_task(client(number)) for number in range(len(bodies))]
        await ask(server.ask, "POST", "/v1/fleet/update", {"flags": list(engine_flags)})
        least = WORKERS
        while True:
            view = await ask(server.ask, "GET", "/v1/fleet")
            least = min(least, sum(w["state"] == "serving" for w in view["workers"]))
            if view["update"]["state"] not in ("running", "rolling-back"):
                break
            await asyncio.sleep(0.1)
        over.set()
        await asyncio.gather(*clients)
    view = await ask(server.ask, "GET", "/v1/fleet")
    update = view["update"]
    events = [d for d in view["decisions"] if d["kind"] == "update" and d["what"] == update["what"]]
    failed = sum(bool(s.error) for _, s in got)
    wrong = sum(not s.error and s.content != expected[number].content for number, s in got)
    return {
        "update": update["state"],
        "how": update["how"],
        "cause": update["cause"][:90],
        "streams": len(got),
        "failed": failed,
        "lost or repeated": wrong,
        "fewest serving": least,
        "lasted_s": events[-1]["at_s"] - events[0]["at_s"] if events else float("nan"),
        "worst gap_ms": 1e3 * max(s.worst_gap_s for _, s in got),
        "revisions": str(sorted({w["revision"] for w in view["workers"]})),
    }


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--rounds", type=int, default=1, help="of each of both updates")
    parser.add_argument("--stop-first", action="store_true", help="leave no room for one worker more")
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    bodies = [
        {"prompt": rng.integers(5, 2000, int(n)).tolist(), "max_tokens": TOKENS}
        for n in rng.integers(20, 400, STREAMS)
    ]
    emulated = ("--engine", "emulated") if asked.quick else ()
    most = ("--max-workers", str(WORKERS)) if asked.stop_first else ()
    rows = []
    for number in range(asked.rounds):
        for name, engine_flags in (("good", GOOD), *((("bad", BAD),) if not asked.quick else ())):
            part = f"{name} {number}{' stop-first' if asked.stop_first else ''}"
            row = asked.resume.read(part)
            if row is None:
                first = () if asked.quick else ENGINE_FLAGS
                start = ("--workers", str(WORKERS), *emulated, *most)
                with tiny_model() as model, fleet(model, *start, engine_flags=first) as server:
                    row = asked.resume.write(part, asyncio.run(updated(server, engine_flags, bodies)))
            rows.append({"new workers": name} | row)
    ends = [(row["new workers"], row["update"]) for row in rows]
    bars = {
        "failed streams": bar(sum(row["failed"] for row in rows), 0),
        "streams with lost or repeated tokens": bar(sum(row["lost or repeated"] for row in rows), 0),
        "fewest workers serving": bar(min(row["fewest serving"] for row in rows), WORKERS - 1, at_least=True),
        "updates that ended otherwise than they should": bar(
            sum(end not in (("good", "done"), ("bad", "rolled-back")) for end in ends), 0
        ),
    }
    return show("rolling_update", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
