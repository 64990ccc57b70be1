"""Workers killed, controllers killed, clients gone, at every stage of a move: what the streams made of it.

Most rounds run FleetCore over emulated engines in this process, where a kill can be placed at an exact stage.
An emulated engine's token is a hash of all before it, so one lost, repeated or swapped token shows. After
each round no request may be left, and no KV block be in use on an engine that lives.

Then a served fleet of emulated engines loses its controller under load, and (`--real N`) one of two real
vLLM workers on Ray loses its engine, its actor or its controller to `kill -9`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import psutil

from controlplane.migration.move import Stage
from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import StepModel
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo, WorkerId
from experiments.lib.results import bar, flags, show
from harness.served import ENGINE_FLAGS, Server, begun, fleet, session, stream, tiny_model

SLO = Slo(10.0, 1.0)
STREAMS, TOKENS = 8, 120
PROFILE = Profile(
    model="any",
    gpu="none",
    tp_degree=1,
    step=StepModel(0.002, 1e-6, 1e-5, 1e-9),
    kv=KvModel(capacity_tokens=16 * 2048, block_tokens=16, bytes_per_token=20_000),
    engine=EngineLimits(max_batched_tokens=2048, max_seqs=64),
    residuals=Residuals(0.0, 0.0, 0.0, 1),
    source=Source("composed", "made up for fault rounds", "none", "2026-01-01"),
)
# (what happens, to whom, when): the stage is that of a move of one of the streams.
FAULTS = (
    ("kill", "source", None),
    ("kill", "source", Stage.PENDING),
    ("kill", "source", Stage.COPYING),
    ("kill", "source", Stage.CUTTING_OVER),
    ("kill", "target", Stage.PENDING),
    ("kill", "target", Stage.COPYING),
    ("kill", "target", Stage.CUTTING_OVER),
    ("leave", "client", Stage.COPYING),
    ("leave", "client", Stage.CUTTING_OVER),
    ("kill", "both", Stage.COPYING),
)


class Round:
    """One round's fleet: three emulated engines behind a FleetCore, and every stream's tokens and end."""

    def __init__(self) -> None:
        from dataplane.live.emulated.engine import EmulatedEngine, Fabric
        from dataplane.live.gateway.events import EventLog
        from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
        from dataplane.live.gateway.metrics import Metrics
        from dataplane.live.ledger.placement import Placement

        fabric = Fabric(speed=2.0)
        self.engines = {
            worker: EmulatedEngine(worker, PROFILE, fabric)
            for worker in (WorkerId("a"), WorkerId("b"), WorkerId("c"))
        }
        placement = Placement({}, 8, LengthTable.constant(TOKENS), np.random.default_rng(0))
        self.core = FleetCore(CoreSettings(8, SLO), placement, Metrics(), EventLog(), lambda _: TOKENS)
        for engine in self.engines.values():
            self.core.attach(engine)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.left: set[str] = set()
        self._pump = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            for output in (await self.core.get_output_async()).outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.finish_reason.name

    async def send(self, name: str, prompt: list[int]) -> None:
        from dataplane.live.gateway.request import CURRENT_TICKET
        from dataplane.live.ledger.request import Ticket
        from harness.bare_fleet import token_request

        CURRENT_TICKET.set(Ticket(name, "experiment", SLO, 0))
        await self.core.add_request_async(token_request(name, prompt, {"max_tokens": TOKENS}))

    async def fault(self, what: str, whom: str, stage: Stage | None, name: str) -> str:
        """Move a stream and let the fault happen at a stage of the move; the move's outcome."""
        tracked = self.core.requests.get(name)  # type: ignore[arg-type]
        if tracked is None or tracked.worker is None:
            return "none"
        source = tracked.worker
        target = next(w for w in self.engines if w != source)
        moving = asyncio.ensure_future(self.core.segments.move(tracked.id, target, "a fault round"))
        while stage is not None and not moving.done():
            open_move = self.core.migrations.open.get(tracked.id)
            if open_move is not None and open_move.stage is stage:
                break
            await asyncio.sleep(0)
        victims = {"source": [source], "target": [target], "both": [source, target]}.get(whom, [])
        for victim in victims:
            self.engines[victim].kill("kill -9")
        if what == "leave":
            self.left.add(name)
            await self.core.abandon(tracked.ticket)
        return (await moving).outcome

    async def settled(self) -> int:
        """Wait until every stream has ended; return the KV blocks that living engines have not freed."""
        async with asyncio.timeout(30):
            while len(self.core.requests):
                await asyncio.sleep(0.005)
        living = [e for e in self.engines.values() if not e.is_lost]
        with suppress(TimeoutError):
            async with asyncio.timeout(3):  # a hold that nobody released has its own time limit
                while any(e.batch.free_blocks < e.batch.total_blocks for e in living):
                    await asyncio.sleep(0.01)
        return sum(e.batch.total_blocks - e.batch.free_blocks for e in living)

    async def close(self) -> None:
        await asyncio.to_thread(self.core.shutdown, 0.0)
        for at in self.core.attached():
            await self.core.detach(at.worker)
        self._pump.cancel()


async def one_round(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """One fault among `STREAMS` streams."""
    from dataplane.live.emulated.segment import Noise

    what, whom, stage = FAULTS[number % len(FAULTS)]
    prompts = [rng.integers(1, 2000, int(n)).tolist() for n in rng.integers(20, 600, STREAMS)]
    fleet_of_three = Round()
    try:
        for i, prompt in enumerate(prompts):
            await fleet_of_three.send(f"r{i}", prompt)
        victim = f"r{int(rng.integers(STREAMS))}"
        least = int(rng.integers(2, 60))
        while len(fleet_of_three.tokens.get(victim, ())) < least:
            await asyncio.sleep(0.001)
        outcome = await fleet_of_three.fault(what, whom, stage, victim)
        leaked = await fleet_of_three.settled()
    finally:
        await fleet_of_three.close()
    row = Counter({"complete": 0, "explicit error": 0, "client left": 0, "silently wrong": 0})
    for i, prompt in enumerate(prompts):
        name = f"r{i}"
        end = fleet_of_three.ends.get(name)
        if name in fleet_of_three.left:
            row["client left"] += 1
        elif end == "ERROR":
            row["explicit error"] += 1
        elif fleet_of_three.tokens.get(name) == Noise().continuation(prompt, TOKENS) and end == "LENGTH":
            row["complete"] += 1
        else:
            row["silently wrong"] += 1
    at = "no move" if stage is None else stage.name.lower()
    return {"fault": f"{what} {whom} at {at}", "move": outcome, **row, "kv blocks leaked": leaked}


def summed(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rounds of the same fault as one row."""
    rows: dict[str, Counter[str]] = {}
    for one in rounds:
        row = rows.setdefault(one["fault"], Counter())
        row["rounds"] += 1
        for name, value in one.items():
            if name not in ("fault", "move"):
                row[name] += value
    return [{"fault": fault, **row} for fault, row in rows.items()]


def victim_of(server: Server, kind: str) -> int:
    """The process to kill: a worker's engine or actor, or the controller."""
    if kind == "controller":
        children = psutil.Process(server.process.pid).children(recursive=True)
        return next(c.pid for c in children if "dataplane.live.control.controller" in c.cmdline())
    actor = int(server.workers()[0]["pid"])
    if kind == "worker":
        return actor
    inner = psutil.Process(actor).children(recursive=True)
    return next(c.pid for c in inner if "EngineCore" in c.name())


async def served_round(server: Server, kind: str, rng: np.random.Generator) -> dict[str, Any]:
    """Kill -9 under streams of a served fleet, and compare each with its undisturbed run."""
    bodies = [
        {"prompt": rng.integers(5, 2000, int(n)).tolist(), "max_tokens": 400}
        for n in rng.integers(20, 200, 12)
    ]
    async with session() as http:
        expected = await asyncio.gather(*(stream(http, server.gateway, body) for body in bodies))
        running = [asyncio.create_task(stream(http, server.gateway, body)) for body in bodies]
        await begun(server, len(bodies), running)
        os.kill(await asyncio.to_thread(victim_of, server, kind), signal.SIGKILL)
        got = await asyncio.gather(*running)
    equal = [not s.error and s.content == e.content for s, e in zip(got, expected, strict=True)]
    return {
        "fault": f"kill -9 of the {kind}, served",
        "rounds": 1,
        "complete": sum(equal),
        "explicit error": sum(bool(s.error) for s in got),
        "client left": 0,
        "silently wrong": sum(not same and not s.error for same, s in zip(equal, got, strict=True)),
    }


async def served_rounds(server: Server, kinds: list[str], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Rounds one after another, each once the fleet is whole again."""
    rows = []
    for kind in kinds:
        rows.append(await served_round(server, kind, rng))
        while len(await asyncio.to_thread(server.workers)) < 2:
            await asyncio.sleep(0.2)
    return rows


async def emulated_rounds(count: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    return [await one_round(number, rng) for number in range(count)]


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--real", type=int, default=4, help="rounds on real vLLM workers")
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    rows = summed(asyncio.run(emulated_rounds(20 if asked.quick else asked.rounds, rng)))
    with tiny_model() as model:
        kinds = ["controller"] * (2 if asked.quick else 5)
        with fleet(model, "--workers", "2", "--engine", "emulated", engine_flags=()) as server:
            rows += summed(asyncio.run(served_rounds(server, kinds, rng)))
        real = [("engine", "worker", "controller")[i % 3] for i in range(0 if asked.quick else asked.real)]
        if real:
            with fleet(model, "--workers", "2", engine_flags=ENGINE_FLAGS) as server:
                rows += summed(asyncio.run(served_rounds(server, real, rng)))
    bars = {
        "silently wrong streams": bar(sum(row["silently wrong"] for row in rows), 0),
        "kv blocks leaked": bar(sum(row.get("kv blocks leaked", 0) for row in rows), 0),
    }
    return show("fault_rounds", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
