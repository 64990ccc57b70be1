"""`tokenfleet advise` on two stock vLLM servers: time to the first advice; and its CPU for a hundred servers.

    python benchmarks/advise.py [--quick] [--format table|json]

**First advice.** Two vLLM servers on CPUs get two requests a second each. `advise A B --gpu … --slo … --once`
names nothing that their metrics tell. The time is from the command's start to its end.

**A hundred servers.** A hundred ports show what those servers showed while they worked, a page each look.
`advise` looks at all every 5 s. Its CPU is that of the process, without its start, over the seconds watched.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from experiments.lib.results import bar, flags, show
from harness import ROOT
from harness.served import Server, plain_server, session, stream, tiny_model

SERVED = "llama-3.1-8b"  # in the library, so that no flag has to name the model
TARGETS = ("--gpu", "h100", "--slo", "ttft=1s,tpot=50ms", "--format", "json")
PORT, SERVERS, EVERY_S = 22_100, 100, 5.0
GAP_S = 0.5  # between two requests to a server


async def requests(url: str, stop: threading.Event) -> None:
    """Send requests, one every GAP_S, until stopped."""
    body, tasks = {"model": SERVED, "max_tokens": 16}, list[asyncio.Task[Any]]()
    async with session() as http:
        while not stop.is_set():
            prompt = {"prompt": [7, len(tasks) % 90 + 5, *range(9, 40)]}
            tasks.append(asyncio.create_task(stream(http, url, body | prompt)))
            await asyncio.sleep(GAP_S)
        await asyncio.gather(*tasks)


@contextmanager
def traffic(servers: Sequence[Server]) -> Iterator[None]:
    """Requests to each server meanwhile."""
    stop = threading.Event()
    threads = [threading.Thread(target=lambda s=s: asyncio.run(requests(s.gateway, stop))) for s in servers]
    for one in threads:
        one.start()
    try:
        yield
    finally:
        stop.set()
        for one in threads:
            one.join()


def command(servers: Sequence[str], *more: str) -> list[str]:
    return [sys.executable, "-m", "tokenfleet", "advise", *servers, *TARGETS, *more]


def first_advice(servers: Sequence[Server]) -> dict[str, Any]:
    """A row of one command."""
    began_s = time.perf_counter()
    asked = command([one.gateway for one in servers], "--once")
    done = subprocess.run(asked, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    took_s = time.perf_counter() - began_s
    told = json.loads(done.stdout.splitlines()[-1])
    busy = psutil.getloadavg()[0]
    return {"part": "first advice", "seconds": round(took_s, 1), "wanted": told["wanted_replicas"],
            "arrivals": told["arrivals"], "load": round(busy, 1)}  # fmt: skip


def recorded(server: Server, count: int) -> list[str]:
    """Pages that a server showed, a second apart."""
    pages = []
    for _ in range(count):
        with urllib.request.urlopen(f"{server.gateway}/metrics", timeout=30) as reply:
            pages.append(reply.read().decode())
        time.sleep(1.0)
    return pages


async def showing(pages: Sequence[str], ports: Sequence[int]) -> None:
    """Show the pages at all ports, another one every EVERY_S; the last of them stays."""
    began_s = time.monotonic()

    async def page(request: web.Request) -> web.Response:
        number = int((time.monotonic() - began_s) / EVERY_S)
        return web.Response(text=pages[min(number, len(pages) - 1)])

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for port in ports:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    print("showing", flush=True)
    await asyncio.Event().wait()


def hundred(pages: Path, seconds: float) -> dict[str, Any]:
    """A row of the CPU that a hundred servers take."""
    ports = range(PORT, PORT + SERVERS)
    show_them = [sys.executable, __file__, "--show", str(pages)]
    with ExitStack() as stack:

        def started(words: Sequence[str]) -> subprocess.Popen[str]:
            one = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            stack.callback(one.communicate)
            stack.callback(one.terminate)
            return one

        assert started(show_them).stdout.readline()  # type: ignore[union-attr]
        process = started(command([f"127.0.0.1:{port}" for port in ports]))
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        watched, looks = psutil.Process(process.pid), 0
        before, began_s = watched.cpu_times(), time.monotonic()
        while time.monotonic() - began_s < seconds:
            told, looks = json.loads(process.stdout.readline()), looks + 1
        after, took_s = watched.cpu_times(), time.monotonic() - began_s
    spent_s = after.user + after.system - before.user - before.system
    page = json.loads(pages.read_text())[-1]
    return {
        "part": "hundred servers", "seconds": round(took_s, 1), "wanted": told["wanted_replicas"],
        "arrivals": told["arrivals"], "load": round(psutil.getloadavg()[0], 1), "looks": looks,
        "servers": told["replicas"], "lines a page": page.count("\n"), "bytes a page": len(page),
        "cores": round(spent_s / took_s, 3),
    }  # fmt: skip


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--show", type=Path, help="show these pages at all ports (used by this script)")
    asked = parser.parse_args()
    if asked.show is not None:
        asyncio.run(showing(json.loads(asked.show.read_text()), range(PORT, PORT + SERVERS)))
    rounds, seconds = (1, 20.0) if asked.quick else (3, 60.0)
    with tiny_model() as model, ExitStack() as stack:
        name = ("--served-model-name", SERVED)
        with stack:
            starts = [plain_server(model, core, flags=name) for core in (0, 1)]
            servers = [stack.enter_context(one) for one in starts]
            with traffic(servers):
                rows = [first_advice(servers) for _ in range(rounds)]
                kept = model.parent / "pages.json"
                kept.write_text(json.dumps(recorded(servers[0], 5 + int(seconds / EVERY_S))))
        rows.append(hundred(kept, seconds))
    first, last = max(row["seconds"] for row in rows[:-1]), rows[-1]
    bars = {"slowest first advice, s": bar(first, 60.0), "cores of a hundred": bar(last["cores"], 0.1)}
    return show("advise", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
