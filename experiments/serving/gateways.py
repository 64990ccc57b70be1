"""Several gateways before one core, on emulated engines: deaths, cost, placement, and streams held.

`kills`: 60 clients at a time (two of three stream), each with an idempotency key, before 3 gateways; one of
them is killed with SIGKILL in every round. Only its own connections may break, and each client that tries
again with its key must get its whole answer, and the same answer under that key from then on.
`cost`: CPU seconds per request of core and gateways together (the emulated engines are in the core), with 1,
2 and 4 gateways at the same load, rounds in turn; and the time from the door, before a prompt is tokenized,
to a worker, for requests one after another.
`held`: streams open at once before 2 gateways, on engines with steps of seconds.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dataplane.http.server import allow_open_files
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from harness.served import MODEL, Server, Stream, begun, fleet, session, stream, tiny_model

LIBRARY = ROOT / "profiles" / "h100-sxm" / "llama-3.1-8b_tp1.yaml"
CLIENTS, TOKENS = 60, 300  # of a round of kills
LOAD_STREAMS, LOAD_TOKENS = 32, 100
SLOW_STEP_S, HELD_TOKENS = 4.0, 30  # of the engines that many streams are held on
TRIES = 20
COUNTS = {1: 1.0, 2: 1.35, 4: 1.6}  # gateways, and the CPU of a request that is wanted, over one's
EMULATED = ("--engine", "emulated", "--profile", str(LIBRARY))


@dataclass
class Answer:
    """What a client has got at last; `tries` it took, and whether it read a stream."""

    text: str
    tokens: int
    tries: int
    id: str = ""


def gateways(server: Server) -> list[dict[str, Any]]:
    return [g for g in server.ask("GET", "/v1/fleet")["gateways"] if g["state"] == "serving"]


async def whole(http: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str) -> Answer:
    """One completion that is not streamed; tried again, with its key, where the connection breaks."""
    asked = {"model": MODEL, "temperature": 0, "ignore_eos": True} | body
    for tries in range(1, TRIES + 1):
        try:
            async with http.post(
                f"{url}/v1/completions", json=asked, headers={"idempotency-key": key}
            ) as reply:
                if reply.status != 200:
                    raise SystemExit(f"HTTP {reply.status}: {await reply.text()}")
                got = await reply.json()
        except aiohttp.ClientConnectionError:
            continue
        return Answer(got["choices"][0]["text"], got["usage"]["completion_tokens"], tries, got["id"])
    raise SystemExit(f"no answer in {TRIES} tries")


async def streamed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """One stream, begun anew where its connection breaks."""
    for tries in range(1, TRIES + 1):
        got: Stream = await stream(http, url, body)
        if got.is_silently_cut:
            raise SystemExit("a stream was cut as if it were complete")
        if not got.error and got.is_done:
            return Answer(got.text, got.tokens, tries)
    raise SystemExit(f"no whole stream in {TRIES} tries: {got.error}")


async def kill_round(server: Server, number: int, kills: bool) -> tuple[list[Answer], dict[str, Any]]:
    """All clients at once; one gateway is killed once all decode."""
    keys = [f"round {number} client {i}" for i in range(CLIENTS)]
    bodies = [{"prompt": [7 + i] * 20, "max_tokens": TOKENS} for i in range(CLIENTS)]
    async with session() as http:
        tasks = [
            asyncio.ensure_future(
                whole(http, server.gateway, body, key) if i % 3 == 0 else streamed(http, server.gateway, body)
            )
            for i, (key, body) in enumerate(zip(keys, bodies, strict=True))
        ]
        lost = 0
        if kills:
            await begun(server, CLIENTS, tasks)
            victim = gateways(server)[number % 3]
            os.kill(victim["pid"], signal.SIGKILL)
            lost = victim["requests"]
        answers = list(await asyncio.gather(*tasks))
        again = [await whole(http, server.gateway, bodies[i], keys[i]) for i in range(0, CLIENTS, 3)]
    other = sum(a.id != b.id for a, b in zip(answers[::3], again, strict=True))
    broken = sum(a.tries > 1 for a in answers)
    return answers, {"part": "kills", "round": number, "victim had": lost, "broken": broken, "other": other}


def until(holds: Any) -> None:
    while not holds():
        time.sleep(0.1)


def kills(model: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = []
    with fleet(model, *EMULATED, "--workers", "3", "--gateways", "3", engine_flags=()) as server:
        expected, _ = asyncio.run(kill_round(server, -1, kills=False))
        workers = [w["pid"] for w in server.workers()]
        for number in range(rounds):
            until(lambda: len(gateways(server)) == 3)
            answers, row = asyncio.run(kill_round(server, number, kills=True))
            row["wrong"] = sum(a.text != b.text for a, b in zip(answers, expected, strict=True))
            until(lambda: not server.ask("GET", "/v1/requests")["requests"])
            rows.append(row)
        kinds = [d["kind"] for d in server.ask("GET", "/v1/fleet")["decisions"]]
        unharmed = [w["pid"] for w in server.workers()] == workers and "lost" not in kinds
    strangers = sum(max(0, row["broken"] - row["victim had"]) for row in rows)
    return rows, {
        "kills: connections broken that were not the killed gateway's": bar(strangers, 0),
        "kills: answers that are not what they are undisturbed": bar(sum(r["wrong"] for r in rows), 0),
        "kills: answers that are others when asked again": bar(sum(r["other"] for r in rows), 0),
        "kills: workers harmed": bar(not unharmed, 0),
    }


def cpu_s(server: Server) -> float:
    """CPU seconds of the core and its gateways so far."""
    fleet = server.ask("GET", "/v1/fleet")
    pids = [fleet["core"]["pid"], *(g["pid"] for g in fleet["gateways"])]
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def placed(server: Server) -> tuple[float, float]:
    """Requests that were placed so far, and the seconds that they waited for it."""
    with urllib.request.urlopen(f"{server.control}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    name = r"tokenfleet_queue_wait_seconds_{}\{{[^}}]*\}} (\S+)"
    count, total = (sum(map(float, re.findall(name.format(of), text))) for of in ("count", "sum"))
    return count, total


async def load(server: Server, streams: int, requests: int) -> None:
    prompts = iter([[i % 1000 + 5] * 64 for i in range(requests)])
    async with session() as http:

        async def client() -> None:
            for prompt in prompts:
                got = await stream(http, server.gateway, {"prompt": prompt, "max_tokens": LOAD_TOKENS})
                if got.error or got.tokens != LOAD_TOKENS:
                    raise SystemExit(f"a stream failed: {got.error}")

        await asyncio.gather(*(client() for _ in range(streams)))


def cost(model: Path, rounds: int, requests: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    per_request: dict[int, list[float]] = {count: [] for count in COUNTS}
    waits: dict[int, list[float]] = {count: [] for count in COUNTS}
    with ExitStack() as stack:
        sides = {
            count: stack.enter_context(
                fleet(model, *EMULATED, "--workers", "2", "--gateways", str(count), engine_flags=())
            )
            for count in COUNTS
        }
        for server in sides.values():
            asyncio.run(load(server, 8, 16))
        for turn in range(rounds):
            for count in COUNTS if turn % 2 == 0 else reversed(COUNTS):
                server = sides[count]
                before_s = cpu_s(server)
                asyncio.run(load(server, LOAD_STREAMS, requests))
                per_request[count].append((cpu_s(server) - before_s) / requests)
                before = placed(server)
                asyncio.run(load(server, 1, 5))
                after = placed(server)
                waits[count].append((after[1] - before[1]) / (after[0] - before[0]))
    rows, bars = [], {}
    for count in COUNTS:
        cpu_ms = 1e3 * statistics.median(per_request[count])
        wait_ms = 1e3 * statistics.median(waits[count])
        rows.append(
            {"part": "cost", "gateways": count, "CPU ms a request": cpu_ms, "door to worker ms": wait_ms}
        )
        if count > 1:
            pairs = zip(per_request[count], per_request[1], strict=True)
            ratio = statistics.median(several / one for several, one in pairs)
            bars[f"cost: CPU per request, {count} gateways over 1"] = bar(ratio, COUNTS[count])
            more_ms = wait_ms - rows[0]["door to worker ms"]
            bars[f"cost: door to worker, {count} gateways, ms more than 1"] = bar(more_ms, 0.3)
    return rows, bars


def slow_profile(folder: Path) -> Path:
    """The library's profile with steps of seconds, on which many streams make few tokens a second."""
    path = folder / "slow.yaml"
    path.write_text(re.sub(r"base_s: \S+", f"base_s: {SLOW_STEP_S}", LIBRARY.read_text(), count=1))
    return path


def held(model: Path, streams: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    allow_open_files()
    workers = str(-(-streams // 200))
    profile = str(slow_profile(model.parent))
    asked = ("--engine", "emulated", "--profile", profile, "--slo", "ttft=600s,tpot=60s")
    with fleet(model, *asked, "--workers", workers, "--gateways", "2", engine_flags=()) as server:
        return asyncio.run(_hold(server, streams))


async def _hold(server: Server, streams: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    most, per_gateway = 0, [0]
    async with session() as http:
        bodies = ({"prompt": [i % 1000 + 5] * 8, "max_tokens": HELD_TOKENS} for i in range(streams))
        tasks = [asyncio.ensure_future(stream(http, server.gateway, body)) for body in bodies]
        while not all(task.done() for task in tasks):
            view = await asyncio.to_thread(server.ask, "GET", "/v1/fleet")
            if view["requests"]["running"] > most:
                most, per_gateway = view["requests"]["running"], [g["requests"] for g in view["gateways"]]
            await asyncio.sleep(0.5)
        got = [task.result() for task in tasks]
    errors = sum(bool(s.error) or s.tokens != HELD_TOKENS for s in got)
    row = {"part": "held", "streams": streams, "at once": most, "by gateway": str(per_gateway)}
    return [row], {"held: streams at once": bar(most, streams, True), "held: errors": bar(errors, 0)}


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--part", choices=("kills", "cost", "held"), action="append", help="only this")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bars: dict[str, Any] = {}
    with tiny_model() as model:
        for part in asked.part or ("kills", "cost", "held"):
            if part == "kills":
                more, reached = kills(model, 2 if asked.quick else 20)
            elif part == "cost":
                more, reached = cost(model, 3 if asked.quick else 7, 96 if asked.quick else 320)
            else:
                more, reached = held(model, 500 if asked.quick else 5000)
            rows += more
            bars |= reached
    return show("gateways", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
