"""Servers that count as vLLM does for its metrics, without an engine: requests arrive, run and end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenfleet.advise.look import Page
from tokenfleet.profiles.engine_metrics import HISTOGRAMS, LENGTHS, NAMES, engine_counts

LENGTH_EDGES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, float("inf"))
EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, float("inf"))
PROMPT, OUTPUT = 600, 200


class CountedServer:
    """A server's counters. `arrive` and `end` move requests through it; `page` is what it shows."""

    def __init__(self, model: str = "m") -> None:
        self.model = model
        self.ended = self.running = self.waiting = self.first_tokens = 0
        self.seconds = {"ttft": 0.0, "tpot": 0.0}
        edges = {name: LENGTH_EDGES if name in LENGTHS else EDGES for name in HISTOGRAMS}
        self.buckets = {name: dict.fromkeys(edges[name], 0) for name in HISTOGRAMS}

    def arrive(self, count: int = 1, waits: bool = False) -> None:
        self.waiting += count
        if not waits:
            self.admit(count)

    def admit(self, count: int) -> None:
        """Requests that wait run from now on, and have their first tokens."""
        count = min(count, self.waiting)
        self.waiting -= count
        self.running += count
        self.first_tokens += count

    def leave(self, count: int = 1) -> None:
        """Clients leave: vLLM counts no end."""
        self.running -= min(count, self.running)

    def end(self, count: int = 1, ttft_s: float = 0.1, tpot_s: float = 0.02) -> None:
        count = min(count, self.running)
        self.running -= count
        self.ended += count
        self.seconds["ttft"] += ttft_s * count
        self.seconds["tpot"] += tpot_s * count
        each = {"ttft": ttft_s, "tpot": tpot_s, "prompt": PROMPT, "output": OUTPUT}
        for name, value in each.items():
            for edge in self.buckets[name]:
                self.buckets[name][edge] += count * (value <= edge)

    def restart(self) -> None:
        self.__init__(self.model)  # type: ignore[misc]

    def text(self) -> str:
        values: Mapping[str, float] = {
            "gaps": self.ended * (OUTPUT - 1),
            "gaps_s": self.seconds["tpot"] * (OUTPUT - 1),
            "first_tokens": self.first_tokens,
            "first_tokens_s": self.seconds["ttft"],
            "prompt_tokens": self.ended * PROMPT,
            "running": self.running,
            "waiting": self.waiting,
            "kv_share": 0.0,
            "ended": self.ended,
            "ended_prompt_tokens": self.ended * PROMPT,
            "ended_output_tokens": self.ended * OUTPUT,
        }
        label = f'engine="0",model_name="{self.model}"'
        lines = ['vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="400000"} 1.0']
        lines += [f"vllm:{NAMES[name][0]}{{{label}}} {float(value)}" for name, value in values.items()]
        for name, told in HISTOGRAMS.items():
            for edge in self.buckets[name]:
                said = "+Inf" if edge == float("inf") else edge
                lines.append(f'vllm:{told}{{{label},le="{said}"}} {float(self.buckets[name][edge])}')
        return "\n".join(lines) + "\n"

    def page(self, at_s: float) -> Page:
        (one,) = engine_counts(self.text(), at_s).values()
        return one


@contextmanager
def answering(text: str | Callable[[], str], status: int = 200, token: str = "") -> Iterator[str]:
    """A server that shows this page, or what a function makes, to those with the token; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = not token or self.headers.get("Authorization") == f"Bearer {token}"
            self.send_response(status if is_known else 401)
            self.end_headers()
            self.wfile.write((text() if callable(text) else text).encode())

        def log_message(self, *told: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def busy(requests: int = 40) -> Iterator[str]:
    """A server to which requests come between two looks and end; its address."""
    server = CountedServer("llama-3.1-8b")

    def page() -> str:
        server.end(server.running)
        server.arrive(requests)
        return server.text()

    with answering(page) as address:
        yield address
