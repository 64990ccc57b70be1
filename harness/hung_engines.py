"""Engines stopped for good under streams: how soon a served fleet notices, and what its clients see.

A round stops one process of the busiest vLLM worker by SIGSTOP: its engine or, where the worker has several
ranks, the last of these alone. Nothing resumes it. Tokens must be those of a round without a fault.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import psutil

from harness.served import Server, Stream, begun, session, stream

STREAMS, TOKENS = 24, 300
LOOK_S, NEVER_S = 0.05, 300.0


@dataclass(frozen=True, slots=True)
class Hang:
    """An engine that was stopped, with how many streams on it, and what followed.

    `noticed_s` runs from the signal to the fleet's event, which says `why`. `same`: the streams that were
    whole and had the tokens of an undisturbed round.
    """

    process: str
    running: int
    noticed_s: float
    why: str
    same: int


def undisturbed_round(server: Server) -> list[list[int]]:
    """The tokens of a round's streams where nothing is stopped."""

    async def story() -> list[list[int]]:
        async with session() as http:
            return [got.token_ids for got in await asyncio.gather(*_begin(http, server))]

    return asyncio.run(story())


def hung(server: Server, expected: list[list[int]]) -> Hang:
    """Play a round, once at least two workers serve."""
    while len(server.workers()) < 2:
        time.sleep(10 * LOOK_S)
    return asyncio.run(_round(server, expected))


async def _round(server: Server, expected: list[list[int]]) -> Hang:
    async with session() as http:
        tasks = _begin(http, server)
        await begun(server, STREAMS, tasks)
        victim = max(await asyncio.to_thread(server.workers), key=lambda w: w["requests"])
        process = part_of(victim["pid"])
        name = process.name()
        process.suspend()
        stopped_s = time.monotonic()
        why = ""
        while not why and time.monotonic() - stopped_s < NEVER_S:
            await asyncio.sleep(LOOK_S)
            losses = (await asyncio.to_thread(server.ask, "GET", "/v1/fleet"))["losses"]
            gone = (one for one in losses if one["worker"] == victim["worker"] and one["kind"] == "lost")
            why = next((one["reason"] for one in gone), "")
        noticed_s = time.monotonic() - stopped_s
        got = await asyncio.gather(*tasks)
    same = sum(_is_whole(one) and one.token_ids == ids for one, ids in zip(got, expected, strict=True))
    return Hang(name, victim["requests"], noticed_s, why, same)


def _begin(http: Any, server: Server) -> list[asyncio.Task[Stream]]:
    asked = {"max_tokens": TOKENS, "return_token_ids": True}
    bodies = [asked | {"prompt": [7 + i] * 20} for i in range(STREAMS)]
    return [asyncio.create_task(stream(http, server.gateway, body)) for body in bodies]


def _is_whole(got: Stream) -> bool:
    return got.is_done and not got.error and got.tokens == len(got.token_ids) == TOKENS


def part_of(worker: int) -> psutil.Process:
    """The process of a worker that a round stops, by the worker's own."""
    below = psutil.Process(worker).children(recursive=True)
    ranks = [one for one in below if one.name().startswith("VLLM::Worker")]
    engines = [one for one in below if "EngineCore" in one.name()]
    return max(ranks or engines, key=lambda one: one.name())
