"""Conversations on real workers that cache prefixes: hits, first tokens, and a worker that dies midway.

    python experiments/serving/conversations.py [--quick] [--only conversations|evictions] [--resume FOLDER]
        [--format table|json]

30 conversations of 6 turns begin with one system prompt of 1,000 tokens; a turn sends all that was said
before and some 60 tokens more, gets 24, and the next one follows after a think time. Three vLLM workers serve
them, under `spread` as it is, under `spread` in a gateway that does not know what its workers cache, and
under round-robin, with equal arrivals and tokens. The oracle gives each conversation to one worker for good:
the hits that its turns would have there, with memory for all of them.

Then once more under `spread`, with `kill -9` of a worker and a drain of another as the middle turns run.
Answers are compared with those of the first run (greedy).

`evictions`: the same conversations at three eighths of the memory, so that most of what is cached is evicted
again, with caches told by the engines' events, and predicted: `off` is by how many tokens of prompts what was
expected cached at placement and what the engine found differ, over all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from typing import Any

import numpy as np

from experiments.lib.results import bar, flags, show
from harness.served import ENGINE_FLAGS, Server, Stream, fleet, session, stream, tiny_model

CONVERSATIONS, TURNS, QUICK_CONVERSATIONS, QUICK_TURNS = 30, 6, 6, 3
WORKERS, BLOCK, SYSTEM, SAID, ANSWER = 3, 32, 1000, 60, 24
BEGIN_S, THINK_S = 2.0, 6.0  # between two conversations' beginnings; mean think time
# KV for 16,384 tokens of the wider model: what ten conversations hold, and some that run beside.
KV = ("--kv-cache-memory-bytes", str(1 << 30))
ENGINE = (*ENGINE_FLAGS, *KV, "--block-size", str(BLOCK), "--enable-prompt-tokens-details")
WITHOUT = ("-m", "experiments.lib.without_mirrors")
SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "spread": (("--policy", "spread"), ("-m", "tokenfleet")),
    "spread, caches not known": (("--policy", "spread"), WITHOUT),
    "round-robin": (("--policy", "round-robin"), ("-m", "tokenfleet")),
}
DYING = "spread, a worker killed, another drained"
TIGHT = ("--kv-cache-memory-bytes", str(3 << 27))
UNTOLD = ("--kv-events-config", '{"enable_kv_cache_events": false}')
EVICTING = {"evictions, caches told": TIGHT, "evictions, caches predicted": (*TIGHT, *UNTOLD)}


async def conversation(
    http: Any, server: Server, said: list[list[int]], waits_s: list[float], progress: list[int]
) -> list[tuple[int, Stream]]:
    """One conversation's turns: tokens of each prompt, and what came."""
    history: list[int] = []
    turns = []
    for words, wait_s in zip(said, waits_s, strict=True):
        await asyncio.sleep(wait_s)
        history = history + words
        body = {"prompt": history, "max_tokens": ANSWER, "return_token_ids": True}
        got = await stream(http, server.gateway, body)
        turns.append((len(history), got))
        history = history + got.token_ids
        progress[len(turns) - 1] += 1
    return turns


async def talked(server: Server, conversations: int, turns: int, seed: int, dies: bool) -> dict[str, Any]:
    """All conversations; the time to each first token, the answers, and what went wrong."""
    rng = np.random.default_rng(seed)
    system = rng.integers(5, 2000, SYSTEM).tolist()
    progress = [0] * turns
    async with session() as http:
        running = []
        for i in range(conversations):
            said = [rng.integers(5, 2000, int(n)).tolist() for n in rng.integers(SAID // 2, 2 * SAID, turns)]
            said[0] = system + said[0]
            waits_s = [i * BEGIN_S, *rng.exponential(THINK_S, turns - 1).tolist()]
            running.append(asyncio.create_task(conversation(http, server, said, waits_s, progress)))
        if dies:
            while progress[turns // 2] < conversations // 3 and not all(task.done() for task in running):
                await asyncio.sleep(0.05)
            serving = await asyncio.to_thread(server.workers)
            os.kill(int(serving[0]["pid"]), signal.SIGKILL)
            await asyncio.to_thread(server.ask, "POST", f"/v1/workers/{serving[1]['worker']}/drain")
        got = await asyncio.gather(*running)
    view = await asyncio.to_thread(server.ask, "GET", "/v1/fleet")
    told = [w["prefix_tokens"] for w in view["workers"]]
    return {
        "turns": [
            [(tokens, s.ttft_s if s.chunks_s else None, s.token_ids) for tokens, s in one] for one in got
        ],
        "failed": sum(bool(s.error) or len(s.token_ids) != ANSWER for one in got for _, s in one),
        "errors": sorted({s.error for one in got for _, s in one if s.error}),
        "prefix_tokens": {name: sum(t[name] for t in told) for name in ("queried", "hit", "off", "ideal")},
    }


def served(setting: str, conversations: int, turns: int, seed: int) -> dict[str, Any]:
    words, program = SETTINGS["spread" if setting == DYING or setting in EVICTING else setting]
    engine = (*ENGINE, *EVICTING.get(setting, ()))
    slo = ("--slo", "ttft=5s,tpot=500ms")
    with (
        tiny_model("--fat") as model,
        fleet(model, "--workers", str(WORKERS), *words, *slo, engine_flags=engine, program=program) as server,
    ):
        return asyncio.run(talked(server, conversations, turns, seed, setting == DYING))


def oracle(turns: list[list[tuple[int, float | None, list[int]]]]) -> float:
    """The hit rate where each conversation keeps to one worker, which forgets nothing."""
    queried = hit = 0
    for i, one in enumerate(turns):
        before = SYSTEM if i >= WORKERS else 0
        for tokens, _, answer in one:
            queried += tokens
            hit += min(before, tokens - 1) // BLOCK * BLOCK
            before = tokens + len(answer) - 1
    return hit / queried


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--only", choices=("conversations", "evictions"))
    asked = parser.parse_args()
    size = (QUICK_CONVERSATIONS, QUICK_TURNS) if asked.quick else (CONVERSATIONS, TURNS)
    rows: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    parts = {"conversations": (*SETTINGS, DYING), "evictions": tuple(EVICTING)}
    for setting in (s for part in parts if asked.only in (None, part) for s in parts[part]):
        part = asked.resume.part(
            f"{setting} {size} {asked.seed}", partial(served, setting, *size, asked.seed)
        )
        ttft_s = np.array([s for one in part["turns"] for _, s, _ in one if s is not None])
        told = part["prefix_tokens"]
        row = {
            "name": setting,
            "TTFT p50": float(np.median(ttft_s)),
            "TTFT p90": float(np.quantile(ttft_s, 0.9)),
        }
        for name, what in (("hit", "hit rate"), ("ideal", "ideal"), ("off", "off")):
            row[what] = told[name] / told["queried"] if told["queried"] else None
        row["failed"] = part["failed"]
        rows.append(row)
        found[setting] = part | row
    bars: dict[str, Any] = {}
    if asked.only != "evictions":
        bars |= judged(found, rows)
    if asked.only != "conversations":
        told, predicted = (found[setting]["off"] for setting in EVICTING)
        bars["tokens told wrong, over those predicted wrong"] = bar(told / predicted, 1.0)
    for setting, part in found.items():
        for error in part["errors"]:
            print(f"{setting}: {error}", file=sys.stderr)
    return show("conversations", rows, bars, asked)


def judged(found: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The bars of conversations that memory does not bind; adds the oracle and what changed to `rows`."""
    kept = [answer for one in found["spread"]["turns"] for _, _, answer in one]
    again = [answer for one in found[DYING]["turns"] for _, _, answer in one]
    changed = sum(a != b for a, b in zip(kept, again, strict=True))
    best = oracle(found["spread"]["turns"])
    rows.append({"name": "sticky oracle", "hit rate": best})
    rows.append({"name": "answers changed by the kill and the drain", "failed": changed})
    faster = found["spread"]["TTFT p90"] / found["spread, caches not known"]["TTFT p90"]
    return {
        "hit rate below the oracle's, points": bar(100 * (best - found["spread"]["hit rate"]), 3.0),
        "TTFT p90 over that of caches not known": bar(faster, 0.6),
        "turns failed": bar(sum(found[s]["failed"] for s in found), 0),
    }


if __name__ == "__main__":
    raise SystemExit(main())
