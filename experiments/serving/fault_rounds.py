"""Streams while workers and controllers are killed, links cut and clients leave, at each stage of a move.

    python experiments/serving/fault_rounds.py [--schedules N] [--real N] [--seed FIRST]

Seeded schedules of ten faults each happen to a FleetCore over emulated engines in this process, and a judge
reads what every client saw (harness/fault_schedules.py). It names the seed of each violation.

Then a served fleet of emulated engines loses its controller under load, and (`--real N`) a fleet of two real
vLLM workers on Ray loses an engine, an actor or its controller to `kill -9`, or has an engine stopped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from typing import Any

import numpy as np
import psutil

from experiments.lib.results import bar, flags, show
from harness.fault_schedules import played, schedule_of, violations
from harness.served import ENGINE_FLAGS, Server, begun, fleet, session, stream, tiny_model

TOGETHER = 6  # schedules played at a time
SIGNALS = {"live engine": signal.SIGSTOP}


async def schedules(count: int, first: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Play the schedules of `count` seeds: what happened, a row a kind of fault, and every violation."""
    happened, ends, broken = Counter[str](), Counter[str](), list[str]()
    for seed in range(first, first + count, TOGETHER):
        seeds = range(seed, min(seed + TOGETHER, first + count))
        for number, history in zip(
            seeds, await asyncio.gather(*(played(schedule_of(s)) for s in seeds)), strict=True
        ):
            happened += history.happened
            ends += Counter(end for each in history.ends.values() for end in each)
            broken += [f"seed {number}: {what}" for what in violations(history)]
    rows = [{"fault": f"{fault}, in schedules", "rounds": times} for fault, times in sorted(happened.items())]
    total = {
        "fault": "all, in schedules",
        "rounds": sum(times for fault, times in happened.items() if "nothing" not in fault),
        "complete": ends["LENGTH"],
        "explicit error": ends["ERROR"],
        "client left": ends["ABORT"],
        "silently wrong": len(broken),
    }
    return [*rows, total], broken


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
    """Kill -9, or SIGSTOP, under streams of a served fleet; each is compared with its undisturbed run."""
    bodies = [
        {"prompt": rng.integers(5, 2000, int(n)).tolist(), "max_tokens": 400}
        for n in rng.integers(20, 200, 12)
    ]
    async with session() as http:
        expected = await asyncio.gather(*(stream(http, server.gateway, body) for body in bodies))
        running = [asyncio.create_task(stream(http, server.gateway, body)) for body in bodies]
        await begun(server, len(bodies), running)
        os.kill(await asyncio.to_thread(victim_of, server, kind), SIGNALS.get(kind, signal.SIGKILL))
        got = await asyncio.gather(*running)
    equal = [not s.error and s.content == e.content for s, e in zip(got, expected, strict=True)]
    return {
        "fault": f"{SIGNALS.get(kind, signal.SIGKILL).name} to the {kind}, served",
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


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--real", type=int, help="rounds on real vLLM workers (default: 4, quick 0)")
    asked = parser.parse_args()
    rng = np.random.default_rng(asked.seed)
    rows, broken = asyncio.run(schedules(20 if asked.quick else asked.schedules, asked.seed))
    sys.stderr.writelines(f"{what}\n" for what in broken)
    with tiny_model() as model:
        kinds = ["controller"] * (2 if asked.quick else 5)
        with fleet(model, "--workers", "2", "--engine", "emulated", engine_flags=()) as server:
            rows += asyncio.run(served_rounds(server, kinds, rng))
        rounds = asked.real if asked.real is not None else 0 if asked.quick else 4
        if real := (["engine", *SIGNALS, "worker", "controller"] * rounds)[:rounds]:
            with fleet(model, "--workers", "2", engine_flags=ENGINE_FLAGS) as server:
                rows += asyncio.run(served_rounds(server, real, rng))
    bars = {"silently wrong streams": bar(sum(row.get("silently wrong", 0) for row in rows), 0)}
    return show("fault_rounds", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
