"""Prefix hits of real vLLM servers: behind Envoy with `tokenfleet pick`, Envoy alone, and our gateway.

Each way serves the same chats on two servers. A chat is a growing list of messages; its next turn comes a
while after the last answer. Hits are counted by the engines. Servers empty their caches before each way. The
picker knows prompts by the model's tokenizer, and caches by the servers' KV events.

`possible` is the share that one endless cache would hit: whole blocks of the prompt before in the chat.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from harness import ROOT, envoy
from harness.served import (
    ENGINE_FLAGS,
    Server,
    Stream,
    fleet,
    free_port,
    plain_server,
    session,
    stream,
    tiny_model,
)
from harness.virtual_pick import write_profile
from tokenfleet.pick.call import tokenizer

BLOCK, WORDS, SAID, ANSWER = 32, 300, 30, 12  # tokens of a block; words of a first prompt, of a later one
BEGIN_S, THINK_S = 0.25, 0.8  # between two chats' first turns, and mean think time
SLO = ("ttft=2s,tpot=500ms", "batch:ttft=60s,tpot=2s,attainment=0.9")
EMPTY_S = 30.0
EVENTS, REPLAY = 1, 2  # ports, from a server's own
NONE: Mapping[str, str] = MappingProxyType({})
CACHING = ("--block-size", str(BLOCK))
COUNTED = "prefix_cache_queries", "prefix_cache_hits"


@dataclass(frozen=True)
class Turn:
    """A user's message, and the wait after the answer before it."""

    wait_s: float
    text: str


def chats(count: int, turns: int, seed: int) -> list[list[Turn]]:
    """Chats of random words; no two begin alike."""
    draw = np.random.default_rng(seed)

    def said(words: int) -> str:
        letters = draw.integers(97, 123, (words, 5), np.uint8)
        return " ".join(word.tobytes().decode() for word in letters)

    return [
        [
            Turn(float(draw.exponential(THINK_S)) if n else BEGIN_S * chat, said(SAID if n else WORDS))
            for n in range(turns)
        ]
        for chat in range(count)
    ]


@dataclass(frozen=True)
class Talk:
    """The answers of all chats, and each chat's prompts."""

    answers: list[Stream]
    prompts: list[list[list[dict[str, str]]]]

    def possible(self, model: Path) -> float:
        """The share of prompt tokens that are whole blocks of the chat's prompt before."""
        tokenize, total, shared = tokenizer(str(model)), 0, 0
        for chat in self.prompts:
            before: Sequence[int] = ()
            for messages in chat:
                ids = tokenize({"messages": messages})
                alike = next(
                    (n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before)
                )
                total, shared, before = total + len(ids), shared + alike // BLOCK * BLOCK, ids
        return shared / total


def talked(url: str, of: Sequence[Sequence[Turn]], headers: Mapping[str, str] = NONE) -> Talk:
    """All chats at one address. Raises RuntimeError for an answer that is not whole."""

    async def chat(http: Any, turns: Sequence[Turn]) -> list[tuple[list[dict[str, str]], Stream]]:
        messages: list[dict[str, str]] = []
        found = []
        for turn in turns:
            await asyncio.sleep(turn.wait_s)
            messages = [*messages, {"role": "user", "content": turn.text}]
            got = await stream(http, url, {"messages": messages, "max_tokens": ANSWER}, headers)
            found.append((messages, got))
            messages = [*messages, {"role": "assistant", "content": got.text}]
        return found

    async def all_of_them() -> list[list[tuple[list[dict[str, str]], Stream]]]:
        async with session() as http:
            return await asyncio.gather(*(chat(http, one) for one in of))

    found = asyncio.run(all_of_them())
    talk = Talk([got for one in found for _, got in one], [[asked for asked, _ in one] for one in found])
    for answer in talk.answers:
        if answer.error or not answer.is_done or answer.tokens != ANSWER:
            raise RuntimeError(f"{url}: {answer.error or f'{answer.tokens} of {ANSWER} tokens'}")
    return talk


def page(url: str) -> str:
    """A page of metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text: str = reply.read().decode()
        return text


def sum_of(text: str, name: str, labels: str = "") -> float:
    """The sum of a metric's samples whose labels have `labels` in them."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.M)
    return sum(float(value) for of, value in found if labels in of)


@dataclass(frozen=True)
class Stand:
    """Two servers, addresses of Envoys with the picker and without, the picker's metrics and rows."""

    model: Path
    servers: list[Server]
    picked: str
    least_request: str
    metrics: str
    data: Path

    def row(self, way: str, url: str, of: Sequence[Sequence[Turn]]) -> dict[str, Any]:
        """The hits of these chats, by the servers' counters, and the requests of each server."""
        for server in self.servers:
            _post(f"{server.gateway}/reset_prefix_cache")
        before = [page(server.gateway) for server in self.servers]
        talk = talked(url, of, {"x-slo-class": "batch", "x-slo-ttft-ms": "5000"})
        now = [page(server.gateway) for server in self.servers]
        queried, hit = (
            sum(
                sum_of(b, f"vllm:{one}_total") - sum_of(a, f"vllm:{one}_total")
                for a, b in zip(before, now, strict=True)
            )
            for one in COUNTED
        )
        ended = "vllm:request_success_total"
        each = [round(sum_of(b, ended) - sum_of(a, ended)) for a, b in zip(before, now, strict=True)]
        return hits(way, talk, self.model, queried, hit) | {"requests of each": each}

    def emptied(self) -> str:
        """Wait until the ledger holds nothing; return what is left, or nothing."""
        until_s = time.monotonic() + EMPTY_S
        while True:
            text = page(self.metrics)
            left = [sum_of(text, f"tokenfleet_pick_{name}") for name in ("running", "waiting")]
            if not any(left) or time.monotonic() > until_s:
                return f"{left[0]:.0f} running, {left[1]:.0f} waiting" if any(left) else ""
            time.sleep(0.1)


def hits(way: str, talk: Talk, model: Path, queried: float, hit: float) -> dict[str, Any]:
    """A way's row."""
    first = sorted(answer.ttft_s for answer in talk.answers)
    return {
        "way": way,
        "requests": len(first),
        "prompt tokens": round(queried),
        "hits": round(hit / queried, 4),
        "possible": round(talk.possible(model), 4),
        "TTFT p50 ms": round(first[len(first) // 2] * 1e3),
    }


def _post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()


@contextmanager
def standing(model: Path, folder: Path) -> Iterator[Stand]:
    """All of it, on this machine."""
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        ports = [free_ports_from() for _ in range(2)]
        starts = [
            pool.submit(stack.enter_context, plain_server(model, core, port=port, flags=_telling(port)))
            for core, port in enumerate(ports)
        ]
        servers = [start.result() for start in starts]
        at, metrics, door, plain, *admin = (free_port() for _ in range(6))
        profile = write_profile(folder, 1.0)
        names = [f"127.0.0.1:{port}" for port in ports]
        command: list[Any] = [sys.executable, "-m", "tokenfleet", "pick", *names]
        command += ["--profile", profile, "--tokenizer", model]
        command += [word for one in SLO for word in ("--slo", one)]
        command += ["--listen", f"127.0.0.1:{at}", "--metrics-listen", f"127.0.0.1:{metrics}"]
        command += ["--data", folder / "picked", "--kv-events", f"+{EVENTS}", "--kv-replay", f"+{REPLAY}"]
        process = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        envoy.ready(at)
        stack.enter_context(envoy.running(folder, door, admin[0], ports, at))
        stack.enter_context(envoy.running(folder, plain, admin[1], ports, at, envoy.least_request))
        picked, least, told = (f"http://127.0.0.1:{port}" for port in (door, plain, metrics))
        yield Stand(model, servers, picked, least, told, folder / "picked")


def free_ports_from() -> int:
    """A free port, with those of its events free as well."""
    while True:
        port = free_port()
        with suppress(OSError), ExitStack() as stack:
            for beside in (EVENTS, REPLAY):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + beside))
            return port


def _telling(port: int) -> list[str]:
    of = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port + EVENTS}"}
    of["replay_endpoint"] = f"tcp://*:{port + REPLAY}"
    return [*CACHING, "--kv-events-config", json.dumps(of)]


def gateways(model: Path, folder: Path, of: Sequence[Sequence[Turn]]) -> dict[str, Any]:
    """The row of our gateway over two workers with the same engines."""
    flags = ["--workers", "2", "--profile", str(write_profile(folder, 1.0))]
    slo = [word for one in SLO for word in ("--slo", one)]
    with fleet(model, *flags, *slo, engine_flags=(*ENGINE_FLAGS, *CACHING)) as server:
        talk = talked(server.gateway, of)
        told = [one["prefix_tokens"] for one in server.workers()]
    return hits("gateway", talk, model, *(sum(one[name] for one in told) for name in ("queried", "hit")))


def all_ways(seed: int, quick: bool) -> list[dict[str, Any]]:
    """The rows of each way."""
    of = chats(*((6, 4) if quick else (12, 5)), seed)
    with tempfile.TemporaryDirectory() as name, tiny_model() as model:
        with standing(model, Path(name)) as stand:
            rows = [
                stand.row("least request", stand.least_request, of),
                stand.row("picker", stand.picked, of),
            ]
            if left := stand.emptied():
                raise RuntimeError(f"the ledger still has {left}")
        return [*rows, gateways(model, Path(name), of)]
