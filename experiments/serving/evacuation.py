"""Workers evacuated by a deadline under long streams: what the clients got, and whether it was in time.

Emulated rounds: 64 streams of 8,000 tokens on one of four workers (Llama-3.1 8B on an H200, as profiled; a
network of 2 GB/s a copy) that must be empty within 10 s. An emulated engine's token is a hash of all before
it, so one lost, repeated or swapped token shows. Real rounds: 24 streams of 2,000 to 6,000 tokens on one of
two vLLM workers that must be empty within 15 s, each stream compared with its undisturbed run.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.error import HTTPError

import numpy as np

from controlplane.placement.lengths import LengthTable
from controlplane.placement.queue import QueueSettings
from controlplane.types import Slo, WorkerId
from controlplane.worker_type import WorkerGroup, WorkerType
from dataplane.live.emulated.segment import Noise
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
from dataplane.live.gateway.metrics import Metrics
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import CURRENT_TICKET, Ticket
from dataplane.live.pool.emulated_host import EmulatedHost
from dataplane.live.pool.fleet_types import FleetTypes
from dataplane.live.pool.pool import WorkerPool
from experiments.lib.results import bar, flags, show
from harness.bare_fleet import token_request
from harness.served import ENGINE_FLAGS, Server, Stream, begun, fleet, session, stream, tiny_model
from tokenfleet.profiles.library import find_profiles

SLO = Slo(60.0, 1.0)
W0 = WorkerId("w0")
STREAMS, PROMPT_TOKENS, TOKENS, SECONDS = 64, 8000, 700, 10.0
REAL_STREAMS, REAL_TOKENS, REAL_SECONDS = 24, 1500, 15.0
FAST = 25.0  # emulated engines run so many times faster than life before and after the evacuation
REAL_FLAGS = (*ENGINE_FLAGS[:2], "--max-model-len", "8192", "--kv-cache-memory-bytes", str(900 << 20))


class Fleet:
    """Four emulated workers behind a FleetCore, and every stream's tokens and end."""

    def __init__(self) -> None:
        types, self.events = FleetTypes([WorkerGroup(WorkerType(None), 4)]), EventLog()
        profile = find_profiles("llama-3.1-8b", ["h200-sxm"], [1])[0]
        self.host = EmulatedHost({types.only(): profile}, 65536, Noise())
        self.host.fabric.speed = FAST
        placement = Placement({}, 8, LengthTable.constant(TOKENS), np.random.default_rng(0))
        settings = CoreSettings(8, SLO, QueueSettings())
        self.core = FleetCore(settings, placement, Metrics(), self.events, lambda *_: TOKENS)
        self.pool = WorkerPool(self.host, self.core, 8, types)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self._pump = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            for output in (await self.core.get_output_async()).outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.finish_reason.name

    async def begin(self, prompts: dict[str, list[int]]) -> None:
        """Start every stream on w0, and return once all decode."""
        others = [at.worker for at in self.core.attached() if at.worker != W0]
        for worker in others:
            self.core.set_open(worker, False)
        for name, prompt in prompts.items():
            CURRENT_TICKET.set(Ticket(name, "experiment", SLO, 0))
            await self.core.add_request_async(token_request(name, prompt, {"max_tokens": TOKENS}))
        while not all(self.tokens.get(name) for name in prompts):
            await asyncio.sleep(0.01)
        for worker in others:
            self.core.set_open(worker, True)

    async def close(self) -> None:
        await asyncio.to_thread(self.core.shutdown, 0.0)
        await self.pool.close()
        self._pump.cancel()


async def emulated_round(seed: int) -> dict[str, Any]:
    """One evacuation of emulated streams."""
    rng = np.random.default_rng(seed)
    prompts = {f"r{i}": rng.integers(1, 2000, PROMPT_TOKENS).tolist() for i in range(STREAMS)}
    one = Fleet()
    try:
        await one.pool.start()
        await one.begin(prompts)
        one.host.fabric.speed = 1.0
        one.pool.evacuate([W0], SECONDS, "an experiment")
        while not (done := [e for e in one.events if e.kind == "evacuated"]):
            await asyncio.sleep(0.01)
        one.host.fabric.speed = FAST
        async with asyncio.timeout(120):
            while len(one.ends) < STREAMS:
                await asyncio.sleep(0.01)
    finally:
        await one.close()
    whole = sum(one.tokens[name] == Noise().continuation(prompt, TOKENS) for name, prompt in prompts.items())
    failed = sum(end == "ERROR" for end in one.ends.values())
    return _row("emulated", done[0].facts, failed, STREAMS - whole - failed)


def _row(engines: str, facts: dict[str, Any], failed: int, wrong: int) -> dict[str, Any]:
    kept = ("moved", "replayed", "ended", "moved_tokens", "replayed_tokens", "seconds", "in_time")
    return {"engines": engines, "lost": failed, "wrong": wrong} | {name: facts[name] for name in kept}


async def real_round(
    server: Server, bodies: list[dict[str, Any]], expected: list[tuple[str, str, int]]
) -> dict[str, Any]:
    """One evacuation of a real worker's streams, all of them brought to it first."""
    ask = asyncio.to_thread
    async with session() as http:
        running = [asyncio.create_task(stream(http, server.gateway, body)) for body in bodies]
        await begun(server, len(bodies), running)
        leaving = (await ask(server.workers))[0]["worker"]
        while True:
            requests = (await ask(server.ask, "GET", "/v1/requests"))["requests"]
            away = [r for r in requests if r["worker"] != leaving]
            if not away:
                break
            for r in away[:2]:
                order = {"request_id": r["request_id"], "target": leaving}
                with suppress(HTTPError):  # too late, or while a move goes on
                    await ask(server.ask, "POST", "/v1/migrations", order)
            await asyncio.sleep(0.2)
        await ask(server.ask, "POST", f"/v1/workers/{leaving}/evacuate", {"deadline_s": REAL_SECONDS})
        told: list[dict[str, Any]] = []
        while not told:
            await asyncio.sleep(0.1)
            made = (await ask(server.ask, "GET", "/v1/fleet"))["decisions"]
            told = [d for d in made if d["kind"] == "evacuated" and d["worker"] == leaving]
        got: list[Stream] = await asyncio.gather(*running)
    while len(await ask(server.workers)) < 2:
        await asyncio.sleep(0.5)
    failed = sum(bool(s.error) for s in got)
    wrong = sum(not s.error and s.content != e for s, e in zip(got, expected, strict=True))
    row = _row("real", told[0], failed, wrong)
    return row | {"on it": len(requests), "worst gap_s": max(s.worst_gap_s for s in got)}


def real_rounds(server: Server, asked: Any) -> list[dict[str, Any]]:
    """Rounds one after another, each once the fleet is whole again."""
    rng = np.random.default_rng(asked.seed)
    bodies = [
        {"prompt": rng.integers(5, 2000, int(n)).tolist(), "max_tokens": REAL_TOKENS}
        for n in rng.integers(2000, 6000, REAL_STREAMS)
    ]

    async def undisturbed() -> list[Any]:
        async with session() as http:
            got = await asyncio.gather(*(stream(http, server.gateway, body) for body in bodies))
        return [list(s.content) for s in got]

    expected = asked.resume.part("expected", lambda: asyncio.run(undisturbed()))
    wanted = [tuple(content) for content in expected]
    one = partial(real_round, server, bodies, wanted)
    return [asked.resume.part(f"real {n}", lambda: asyncio.run(one())) for n in range(asked.real)]


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--rounds", type=int, default=50, help="on emulated engines")
    parser.add_argument("--real", type=int, default=10, help="on real vLLM workers")
    asked = parser.parse_args()
    rows = [
        asked.resume.part(f"emulated {n}", lambda n=n: asyncio.run(emulated_round(asked.seed + n)))
        for n in range(2 if asked.quick else asked.rounds)
    ]
    asked.real *= not asked.quick
    if all(asked.resume.read(f"real {n}") for n in range(asked.real)):
        rows += [asked.resume.read(f"real {n}") for n in range(asked.real)]
    else:
        with tiny_model() as model, fleet(model, "--workers", "2", engine_flags=REAL_FLAGS) as server:
            rows += real_rounds(server, asked)
    bars = {
        "streams lost": bar(sum(row["lost"] for row in rows), 0),
        "streams with lost or repeated tokens": bar(sum(row["wrong"] for row in rows), 0),
        "deadlines missed": bar(sum(not row["in_time"] for row in rows), 0),
    }
    return show("evacuation", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
