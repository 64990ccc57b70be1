"""Two pickers behind real Envoys under seeded faults, and a judge of what their ledgers say.

    python -m harness.picker_faults --requests 10000 --rounds 20

**Requests** are streamed or not; clients leave early or late; servers cut, hang and answer 503, at one
address or at all. Meanwhile servers and pickers are killed, pickers are stopped for a while, and start again.
At the end both ledgers are empty. A ledger is off a server while it has more requests there, or fewer, than
the server itself has within SKEW_S of that look; never longer than STALE_S. A picker that has just started or
taken over is not asked for GRACE_S.

**Rounds** are judged by streams: half of them run through each picker, as each is the first of one Envoy and
the standby of the other. One picker is killed. All streams are whole, and its Envoy takes requests again.
With `--duplex` answers pass through pickers, as in gateways of Kubernetes: the killed one's end in an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from harness import envoy
from harness.vllm_like import VllmLike

SAMPLE_S, SKEW_S, STALE_S, GRACE_S = 0.02, 0.2, 1.0, 3.0
STEP_S = 60e-3
READY_S, PATIENCE_S, EMPTY_S = 300.0, 60.0, 30.0
RATE_RPS = 30.0
COUNT = re.compile(r'^tokenfleet_pick_running\{server="127\.0\.0\.1:(\d+)"\} (\S+)$', re.M)
WAITING = re.compile(r"^tokenfleet_pick_waiting (\S+)$", re.M)
PICKED = re.compile(r"^tokenfleet_pick_picked_total\{.*\} (\S+)$", re.M)
KINDS = {  # of requests, and how often each comes
    "stream": 0.50, "whole": 0.10, "leaves": 0.10, "leaves at once": 0.06, "cut": 0.08, "503 once": 0.08,
    "503": 0.04, "hang": 0.04,
}  # fmt: skip
ACTS = (
    "kill server",
    "kill first picker",
    "kill server",
    "kill second picker",
    "kill server",
    "stop first picker",
)


@dataclass(eq=False)
class Picker:
    """A process of `tokenfleet pick`. `free_s`: from when on its ledger is judged."""

    port: int
    metrics: int
    servers: list[int]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    free_s: float = 0.0
    is_up: bool = False

    async def start(self) -> None:
        """Start it, and wait until it answers at both ports."""
        names = [f"127.0.0.1:{port}" for port in self.servers]
        command = ["pick", *names, "--slo", "ttft=2s,tpot=200ms", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--metrics-listen", f"127.0.0.1:{self.metrics}", "--max-num-seqs", "64"]
        with self.log.open("ab") as log:
            whole = [sys.executable, "-m", "tokenfleet", *command]
            self.process = subprocess.Popen(whole, stdout=log, stderr=log)
        async with asyncio.timeout(READY_S):
            for port in (self.port, self.metrics):
                while not await _listens(port):
                    await asyncio.sleep(0.05)
        self.is_up, self.free_s = True, time.monotonic() + GRACE_S

    def kill(self) -> None:
        """End it without a word."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process, self.is_up = None, False

    def pause(self, is_stopped: bool) -> None:
        """Stop it, or let it go on."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
        self.is_up, self.free_s = not is_stopped, time.monotonic() + GRACE_S

    async def page(self, session: aiohttp.ClientSession) -> str:
        """Its metrics. Raises aiohttp.ClientError or OSError."""
        async with session.get(f"http://127.0.0.1:{self.metrics}/metrics") as reply:
            return await reply.text()

    async def picked(self, session: aiohttp.ClientSession) -> int:
        """The requests that it has placed."""
        return round(sum(map(float, PICKED.findall(await self.page(session)))))


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _waited_s(pid: int) -> float:
    """Seconds for which a process's threads were ready and had no core."""
    waited = 0
    with suppress(OSError):  # it ends
        for one in Path(f"/proc/{pid}/task").iterdir():
            waited += int((one / "schedstat").read_text(encoding="ascii").split()[1])
    return waited / 1e9


@dataclass
class Judge:
    """The servers' own recent counts, and the judgement of ledgers by them.

    `off`: each time that a ledger was off a server, for how long, and its count at the end of that and the
    server's. Then come the server's HTTP requests, and how busy the host was meanwhile. `looks`: how often
    ledgers were read. `pids`: processes, by name.
    """

    servers: dict[int, VllmLike | None]
    pids: Callable[[], dict[str, int]]
    off: dict[str, str] = field(default_factory=dict)
    looks: int = 0
    _had: deque[tuple[float, dict[int, int]]] = field(default_factory=lambda: deque(maxlen=200))
    _since: dict[tuple[str, int], tuple[float, int, dict[str, float]]] = field(default_factory=dict)

    async def run(self) -> None:
        """Read the servers' counts until cancelled."""
        while True:
            counts = {
                port: 0 if one is None else len(one.running) + len(one.waiting)
                for port, one in self.servers.items()
            }
            self._had.append((time.monotonic(), counts))
            await asyncio.sleep(SAMPLE_S)

    def check(self, name: str, page: str, from_s: float, to_s: float) -> None:
        """Compare a ledger, read between two moments, with what each server had about then."""
        self.looks += 1
        about = [had for at_s, had in self._had if from_s - SKEW_S <= at_s <= to_s + SKEW_S]
        waited = {who: _waited_s(pid) for who, pid in self.pids().items()}
        for port, text in COUNT.findall(page):
            had = [counts[int(port)] for counts in about]
            least, most, count = min(had), max(had), int(float(text))
            sign = (count > most) - (count < least)
            since_s, before, then = self._since.get((name, port), (from_s, 0, waited))
            since_s, then = (since_s, then) if sign == before else (from_s, waited)
            self._since[name, port] = since_s, sign, then
            if sign and to_s - since_s > STALE_S:
                told = f"{name} on {port} from {since_s:.1f}"
                off = f"{to_s - since_s:.2f} s; {count}, and it had {least} to {most}"
                server = self.servers[int(port)]
                off += f" of {0 if server is None else server.inside} inside"
                self.off[told] = f"{off}; {self._host(since_s, to_s, then, waited)}"

    def _host(self, from_s: float, to_s: float, then: dict[str, float], now: dict[str, float]) -> str:
        """The longest time in which this process's loop did not come round, and what waited for a core."""
        at = [at_s for at_s, _ in self._had if at_s >= from_s - STALE_S]
        late_s = max((b - a for a, b in pairwise(at)), default=0.0) - SAMPLE_S
        waits = ", ".join(f"{who} {now[who] - then[who]:.2f}" for who in now if who in then)
        return f"loop late by {late_s:.2f} s; seconds without a core: {waits}"

    def forget(self, name: str) -> None:
        """Nothing is asked of this ledger for now."""
        self._since = {of: since for of, since in self._since.items() if of[0] != name}


@dataclass
class Stand:
    """Servers, two pickers, and Envoys: the first with picker 0 before 1, the second the other way round."""

    servers: dict[int, VllmLike | None]
    pickers: list[Picker]
    doors: list[str]
    session: aiohttp.ClientSession
    judge: Judge

    async def ask(self, door: int, kind: str, words: int, prompt: int, faulty: int) -> str:
        """One request of a kind; return how it ended."""
        body: dict[str, Any] = {"prompt": "x" * prompt, "stream": kind != "whole", "max_tokens": words}
        if kind.startswith("503") or kind in ("cut", "hang"):
            body["fault"] = kind[:3] if kind[0] == "5" else kind
        if kind == "503 once":
            body["fault_on"] = str(faulty)
        patience = {"leaves at once": 0.01, "leaves": 0.15, "hang": 1.5}.get(kind, PATIENCE_S)
        try:
            async with asyncio.timeout(patience), self.session.post(self.doors[door], json=body) as reply:
                text = await reply.text()
        except TimeoutError:
            return "left"
        except (aiohttp.ClientError, OSError):
            return "broken"
        if reply.status != 200:
            return str(reply.status)
        whole = kind == "whole" or text.rstrip().endswith("[DONE]")
        got = text.count(" word")
        return "whole" if whole and got == words else f"false end ({got} of {words} words)"

    async def accepted(self, door: int) -> float:
        """Seconds until a request of this Envoy is answered."""
        began_s = time.monotonic()
        async with asyncio.timeout(READY_S):
            while await self.ask(door, "stream", 1, 4, 0) != "whole":
                await asyncio.sleep(0.02)
        return time.monotonic() - began_s

    async def first_is(self, door: int) -> None:
        """Wait until an Envoy sends its requests to its own picker."""
        picker = self.pickers[door]
        async with asyncio.timeout(READY_S):
            while True:
                before = await picker.picked(self.session)
                end = await self.ask(door, "stream", 1, 4, 0)
                if end == "whole" and await picker.picked(self.session) > before:
                    return
                await asyncio.sleep(0.1)

    async def emptied(self) -> str:
        """Wait until both ledgers hold nothing; return what is left, or nothing."""
        left, until_s = "", time.monotonic() + EMPTY_S
        while time.monotonic() < until_s:
            pages = [await one.page(self.session) for one in self.pickers]
            held = [f"{n} on {port}" for page in pages for port, n in COUNT.findall(page) if float(n)]
            held += [f"{n} waiting" for page in pages for n in WAITING.findall(page) if float(n)]
            if not (left := ", ".join(held)):
                return ""
            await asyncio.sleep(0.1)
        return left


async def standing(stack: AsyncExitStack, folder: Path, ports: list[int], change: envoy.Change) -> Stand:
    """All of it, at eleven free ports, with Envoys changed by `change`."""
    servers: dict[int, VllmLike | None] = {}
    for port in ports[:3]:
        one = servers[port] = VllmLike(port, STEP_S)
        await one.start()
    stack.push_async_callback(_stop_all, servers)
    pickers = [Picker(ports[3 + n], ports[5 + n], ports[:3], folder / f"picker-{n}.log") for n in range(2)]
    for picker in pickers:
        stack.callback(picker.kill)
    await asyncio.gather(*(one.start() for one in pickers))
    doors, pids = [], {"harness": os.getpid()}

    def all_pids() -> dict[str, int]:
        names = zip(("first picker", "second picker"), pickers, strict=True)
        return pids | {name: one.process.pid for name, one in names if one.process is not None}

    for n, order in enumerate(([0, 1], [1, 0])):
        port, admin = ports[7 + 2 * n : 9 + 2 * n]
        at = [pickers[one].port for one in order]
        starting = envoy.running(folder, port, admin, ports[:3], at, change)
        pids[f"Envoy {n + 1}"] = (await asyncio.to_thread(starting.__enter__)).pid
        stack.push_async_callback(asyncio.to_thread, starting.__exit__, None, None, None)
        doors.append(f"http://127.0.0.1:{port}/v1/completions")
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    judge = Judge(servers, all_pids)
    task = asyncio.create_task(judge.run())
    stack.callback(task.cancel)
    return Stand(servers, pickers, doors, session, judge)


async def _stop_all(servers: dict[int, VllmLike | None]) -> None:
    for one in servers.values():
        if one is not None:
            await one.stop()


async def requests(stand: Stand, count: int, every: int, seed: int) -> dict[str, Any]:
    """`count` requests through the first Envoy, with an act of destruction at each `every`th."""
    draw = np.random.default_rng(seed)
    kinds, shares = list(KINDS), list(KINDS.values())
    ends: Counter[str] = Counter()
    tasks: set[asyncio.Task[None]] = set()
    watching = asyncio.create_task(_watched(stand))
    acting: dict[str, asyncio.Task[None]] = {}
    acts: list[str] = []

    async def one(kind: str, words: int, prompt: int, faulty: int) -> None:
        ends[f"{kind}: {await stand.ask(0, kind, words, prompt, faulty)}"] += 1

    for n in range(count):
        kind = kinds[int(draw.choice(len(kinds), p=shares))]
        words, prompt = int(draw.integers(2, 14)), int(draw.integers(40, 4000))
        faulty = int(draw.choice(list(stand.servers)))
        task = asyncio.create_task(one(kind, words, prompt, faulty))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if every and n % every == every - 1:
            act = ACTS[n // every % len(ACTS)]
            on = act.rpartition(" ")[2]  # one picker, or one server, at a time
            if on not in acting or acting[on].done():
                acts.append(f"{act} ({faulty}) at {time.monotonic():.1f}")
                acting[on] = asyncio.create_task(_act(stand, act, faulty))
        await asyncio.sleep(float(draw.exponential(1 / RATE_RPS)))
    await asyncio.gather(*tasks, *acting.values())
    left = await stand.emptied()
    if watching.done():
        watching.result()  # what ended it
    watching.cancel()
    found = {"requests": count, "acts": acts, "ends": dict(sorted(ends.items()))}
    false = sum(n for end, n in ends.items() if "false end" in end)
    return found | {"false ends": false, "left": left, "looks": stand.judge.looks, "off": stand.judge.off}


async def _act(stand: Stand, act: str, faulty: int) -> None:
    first, standby = stand.pickers
    if act == "kill server":
        server = stand.servers[faulty]
        assert server is not None
        stand.servers[faulty] = None
        await server.stop()
        await asyncio.sleep(1.0)
        server = VllmLike(faulty, STEP_S)
        await server.start()
        stand.servers[faulty] = server
    elif act == "stop first picker":
        first.pause(True)
        standby.free_s = time.monotonic() + GRACE_S
        await asyncio.sleep(3.0)
        first.pause(False)
    else:
        of = first if act == "kill first picker" else standby
        of.kill()
        standby.free_s = time.monotonic() + GRACE_S
        await asyncio.sleep(2.0)
        await of.start()


async def _watched(stand: Stand) -> None:
    """Judge the picker that has the requests: the first while it runs, else the second."""
    names = ("first picker", "second picker")
    while True:
        await asyncio.sleep(SAMPLE_S)
        of = next((n for n, one in enumerate(stand.pickers) if one.is_up), 0)
        picker, began_s = stand.pickers[of], time.monotonic()
        stand.judge.forget(names[1 - of])
        try:
            page = await picker.page(stand.session)
        except (aiohttp.ClientError, OSError):
            page = ""
        read_s = time.monotonic()
        await asyncio.sleep(SKEW_S + SAMPLE_S)
        if page and picker.is_up and began_s > picker.free_s:
            stand.judge.check(names[of], page, began_s, read_s)
        else:
            stand.judge.forget(names[of])


async def rounds(stand: Stand, count: int, streams: int, cut: str = "whole") -> dict[str, Any]:
    """Kill each picker in turn, under streams of both; `cut`: how those of the killed one end."""
    again_s, wrong = [], []
    ends: Counter[str] = Counter()
    for n in range(count):
        killed = n % 2
        for door in (0, 1):
            await stand.first_is(door)
        before = [await one.picked(stand.session) for one in stand.pickers]
        running = [
            [asyncio.create_task(stand.ask(door, "stream", 150, 400, 0)) for _ in range(streams // 2)]
            for door in (0, 1)
        ]
        async with asyncio.timeout(READY_S):
            while [
                await one.picked(stand.session) - had for one, had in zip(stand.pickers, before, strict=True)
            ] != [streams // 2] * 2:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        stand.pickers[killed].kill()
        again_s.append(await stand.accepted(killed))
        starting = asyncio.create_task(stand.pickers[killed].start())
        for door in (0, 1):
            got = Counter(await asyncio.gather(*running[door]))
            ends += got
            if got != Counter({cut if door == killed else "whole": streams // 2}):
                wrong.append(f"round {n}: {'killed' if door == killed else 'other'}: {dict(got)}")
        await starting
    left = await stand.emptied()
    return {"rounds": count, "streams": streams, "ends": dict(ends), "wrong": wrong, "left": left} | {
        "again_s": [round(one, 2) for one in again_s]
    }


async def run(
    folder: Path,
    ports: list[int],
    act: Callable[[Stand], Any],
    change: envoy.Change = lambda document: None,
) -> Any:
    """Do something with a stand."""
    async with AsyncExitStack() as stack:
        return await act(await standing(stack, folder, ports, change))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--requests", type=int, default=600)
    asked.add_argument("--every", type=int, default=150, help="requests between two acts of destruction")
    asked.add_argument("--rounds", type=int, default=2)
    asked.add_argument("--streams", type=int, default=60)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--duplex", action="store_true", help="answers pass through the pickers")
    flags = asked.parse_args()

    async def act(stand: Stand) -> bool:
        is_good = True
        if flags.requests:
            found = await requests(stand, flags.requests, flags.every, flags.seed)
            print(json.dumps(found, indent=1), flush=True)
            is_good = not found["left"] and not found["off"] and not found["false ends"]
        if flags.rounds:
            found = await rounds(stand, flags.rounds, flags.streams, "broken" if flags.duplex else "whole")
            print(json.dumps(found, indent=1), flush=True)
            is_good = is_good and not found["wrong"] and not found["left"] and max(found["again_s"]) <= 3.0
        return is_good

    with tempfile.TemporaryDirectory() as folder:
        more = [envoy.full_duplex] if flags.duplex else []
        return int(not asyncio.run(run(Path(folder), list(range(22_300, 22_311)), act, *more)))


if __name__ == "__main__":
    raise SystemExit(main())
