"""Each rule of virtual usage, on and off, in both planes: headroom, room for what waits, consolidation.

    python experiments/planning/virtual_usage.py [--quick] [--live] [--resume FOLDER] [--format table|json]

The workers and targets of moves_in_overload.py, L-L lengths, three streams of 3,000 Poisson arrivals:

    headroom        3.6/s, a tenth of the requests at high priority; 0.4 of KV kept free beside them, or none
    room            4.1/s; moves for what waits at the gateway, or none
    consolidation   2/s; after a third of the arrivals 8 of 16 workers are drained, packed into the others, or
                    left until what they have ends

Decode times are means over requests of the time of a token after the first.

With `--live`, in twelve minutes, a fleet of four emulated engines (chunked prefill, steps and targets half as
long, 1,840 tokens of KV) serves three streams of 80 requests of the same mix without its longest, in each
setting, at rates at which its simulation, shown beside it, tells the settings apart; 2 of 4 workers are
drained. Of so few requests, times say more than the number of late ones.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import aiohttp
import numpy as np
import polars as pl

from controlplane.control import Settings, State, tick
from controlplane.perfmodel.profile import KvModel
from controlplane.placement.policies import PlacementSettings, Policy
from controlplane.snapshot import Action, Scale, Snapshot
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.history.files import read_history
from dataplane.simulated.simulate import ControlSettings, Outcome, WorkerSpec, simulate
from experiments.lib.llumnix import WORKERS, workload
from experiments.lib.other_engines import times
from experiments.lib.results import flags, show
from experiments.lib.without import processes_without, without
from experiments.planning.moves_in_overload import PROFILE, TARGETS
from harness.elastic import ElasticSettings, simulate_elastic
from harness.served import Server, fleet, session, stream, tiny_model
from tokenfleet.profiles.library import write_profile

SEEDS = (1, 2, 3)
REQUESTS = 3000
FLEET = [WorkerSpec(PROFILE)] * WORKERS
HEADROOM = 0.4
# Of the live part: a quarter of the workers, twice as fast, of the requests those that end soon, and as much
# memory as makes them wait for it.
FEW, FACTOR, MOST_TOKENS, BLOCKS = WORKERS // 4, 0.5, 1500, 115
LIVE_REQUESTS, LIVE_RATES = 80, {"headroom": 6.0, "room": 5.0, "consolidation": 4.0}
FAST = replace(
    times(PROFILE, FACTOR),
    prefill=None,
    engine=replace(PROFILE.engine, mode=EngineMode.CHUNKED),
    kv=KvModel(BLOCKS * PROFILE.kv.block_tokens, PROFILE.kv.block_tokens, PROFILE.kv.bytes_per_token),
)
SOON = Slo(TARGETS.ttft_s * FACTOR, TARGETS.tpot_s * FACTOR)


def seen(outcome: Outcome, rows: np.ndarray) -> dict[str, float]:
    """What some of the requests got."""
    return {
        "requests": float(rows.sum()),
        "late": float((~outcome.met[rows]).sum()),
        "TTFT p99 s": float(np.percentile(outcome.ttft_s[rows], 99)),
        "decode ms": 1e3 * float(np.nanmean(outcome.tpot_s[rows])),
        "decode p99 ms": 1e3 * float(np.nanpercentile(outcome.tpot_s[rows], 99)),
    }


def headroom(on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    plain = workload("L-L", 3.6, seed, requests=requests)
    high = np.random.default_rng([seed, 13]).random(requests) < 0.1
    load = Workload(plain.arrival_s, plain.prompt_tokens, plain.output_tokens, high.astype(np.int64))
    kept = PlacementSettings(headroom=HEADROOM if on else 0.0)
    outcome = simulate(load, FLEET, TARGETS, "spread+migrate", settings=kept)
    return {"high": seen(outcome, high), "normal": seen(outcome, ~high)}


def room(on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    with without("" if on else "room"):
        outcome = simulate(workload("L-L", 4.1, seed, requests=requests), FLEET, TARGETS, "spread+migrate")
    return {"all": seen(outcome, np.ones(requests, bool))}


def consolidation(on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    return {"all": drained(workload("L-L", 2.0, seed, requests=requests), FLEET, TARGETS, on)}


def drained(load: Workload, slots: list[WorkerSpec], slo: Slo, on: bool) -> dict[str, float]:
    """Half of the workers drained after a third of the arrivals."""
    at_s, workers = float(load.arrival_s[len(load) // 3]), len(slots)
    settings = Settings.of_policy(Policy.SPREAD)

    def decide(state: State, snapshot: Snapshot) -> tuple[State, list[Action]]:
        state, actions = tick(settings, state, snapshot)
        if snapshot.now_s >= at_s and snapshot.wanted == workers:
            actions.append(Scale(workers // 2, "half are enough"))
        return state, actions

    with without("" if on else "consolidation"):
        outcome, record = simulate_elastic(
            load, slots, slo, ElasticSettings(workers), ControlSettings(), "spread+migrate", decide=decide
        )
    gone_s = max((t for t, _, there in record.changes if there == workers // 2), default=np.inf)
    return seen(outcome, np.ones(len(load), bool)) | {"until they are gone s": gone_s - at_s}


def live_load(rule: str, seed: int, requests: int) -> Workload:
    """The load of a rule's live part."""
    plain = workload("L-L", LIVE_RATES[rule], seed, requests=2 * requests)
    rows = np.flatnonzero(plain.prompt_tokens + plain.output_tokens < MOST_TOKENS)[:requests]
    high = np.random.default_rng([seed, 13]).random(len(rows)) < (0.1 if rule == "headroom" else 0.0)
    columns = (plain.arrival_s, plain.prompt_tokens, plain.output_tokens)
    arrival_s, prompt, output = (column[rows] for column in columns)
    return Workload(arrival_s - arrival_s[0], prompt, output, high.astype(np.int64))


def live(rule: str, on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    """The product before emulated engines, with a rule or without it."""
    load = live_load(rule, seed, requests)
    left_out = "" if on or rule == "headroom" else rule
    kept = HEADROOM if on and rule == "headroom" else 0.0
    with tiny_model() as model, processes_without(left_out) as environment:
        data = model.parent / "data"
        write_profile(FAST, model.parent / "fast.yaml")
        words = ["--engine", "emulated", "--profile", str(model.parent / "fast.yaml"), "--workers", str(FEW)]
        words += ["--policy", "spread+migrate", "--priority-headroom", str(kept), "--data", str(data)]
        words += ["--slo", f"ttft={SOON.ttft_s:g}s,tpot={SOON.tpot_s * 1e3:g}ms"]
        with fleet(model, *words, engine_flags=(), environment=environment) as server:
            drained_s = asyncio.run(played(server, load, rule == "consolidation"))
        rows = read_history(data / "history", 0.0, np.inf).filter(pl.col("outcome") == "finished")
    met = (rows["ttft_s"] <= SOON.ttft_s) & (rows["tpot_s"].fill_null(0.0) <= SOON.tpot_s)
    groups = {"all": pl.repeat(True, len(rows), eager=True)}
    if rule == "headroom":
        groups = {name: rows["priority"] == name for name in ("high", "normal")}
    return {
        name: {
            "requests": float(of.sum()),
            "late": float((~met.filter(of)).sum()) + (len(load) - len(rows) if name != "high" else 0),
            "TTFT p99 s": float(np.percentile(rows["ttft_s"].filter(of), 99)),
            "decode ms": 1e3 * float(rows["tpot_s"].filter(of).mean()),  # type: ignore[arg-type]
            "decode p99 ms": 1e3 * float(np.percentile(rows["tpot_s"].filter(of).drop_nulls(), 99)),
        }
        | ({"until they are gone s": drained_s} if rule == "consolidation" else {})
        for name, of in groups.items()
    }


async def played(server: Server, load: Workload, drains: bool) -> float:
    """Send the load; the seconds until the drained half is gone, if one `drains`."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def half() -> float:
        await asyncio.sleep(float(load.arrival_s[len(load) // 3]))
        ordered_s = loop.time()
        # As in simulation: the fleet chooses who leaves.
        await asyncio.to_thread(server.ask, "POST", "/v1/fleet/scale", {"workers": FEW // 2})
        while len((await asyncio.to_thread(server.ask, "GET", "/v1/fleet"))["workers"]) > FEW // 2:
            await asyncio.sleep(0.1)
        return loop.time() - ordered_s

    async def one(http: aiohttp.ClientSession, i: int) -> None:
        await asyncio.sleep(max(float(load.arrival_s[i]) - (loop.time() - began_s), 0.0))
        prompt = [3 + (i + k) % 200 for k in range(int(load.prompt_tokens[i]))]
        body = {"prompt": prompt, "max_tokens": int(load.output_tokens[i])}
        headers = {"x-tokenfleet-priority": "high"} if load.priority[i] else {}
        await stream(http, server.gateway, body, headers)

    draining = asyncio.create_task(half()) if drains else None
    async with session() as http:
        await asyncio.gather(*(one(http, i) for i in range(len(load))))
    return 0.0 if draining is None else await draining


def beside(rule: str, on: bool, seed: int, requests: int) -> dict[str, dict[str, float]]:
    """The live part's fleet, simulated."""
    load, slots = live_load(rule, seed, requests), [WorkerSpec(FAST)] * FEW
    high = load.priority > 0
    if rule == "consolidation":
        return {"all": drained(load, slots, SOON, on)}
    settings = PlacementSettings(headroom=HEADROOM if on and rule == "headroom" else 0.0)
    with without("room" if rule == "room" and not on else ""):
        outcome = simulate(load, slots, SOON, "spread+migrate", settings=settings)
    if rule == "headroom":
        return {"high": seen(outcome, high), "normal": seen(outcome, ~high)}
    return {"all": seen(outcome, ~high)}


RULES: dict[str, Callable[[bool, int, int], dict[str, dict[str, float]]]] = {
    "headroom": headroom,
    "room": room,
    "consolidation": consolidation,
}


def run(asked: argparse.Namespace) -> int:
    seeds, requests = (SEEDS[:1], 800) if asked.quick else (SEEDS, REQUESTS)
    planes: dict[str, Callable[[str, bool, int, int], dict[str, dict[str, float]]]] = {
        "simulated": lambda rule, *how: RULES[rule](*how)
    }
    if asked.live:
        requests = LIVE_REQUESTS // 2 if asked.quick else LIVE_REQUESTS
        planes = {"live": live, "simulated": beside}
    rows: list[dict[str, Any]] = []
    for (plane, measure), rule, on in product(planes.items(), RULES, (False, True)):
        part = f"{plane} {rule} {on} {requests}" + (" beside" if asked.live else "")
        runs = [
            asked.resume.part(f"{part} {seed}", partial(measure, rule, on, seed, requests)) for seed in seeds
        ]
        for group in runs[0]:
            means = {name: float(np.mean([one[group][name] for one in runs])) for name in runs[0][group]}
            rows.append({"plane": plane, "rule": rule, "is on": on, "priority": group} | means)
    return show("virtual_usage", rows, {}, asked)


if __name__ == "__main__":
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--live", action="store_true", help="a live fleet and its simulation instead")
    sys.exit(run(parser.parse_args()))
