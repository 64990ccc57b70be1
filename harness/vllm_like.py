"""Small servers that answer and count as vLLM does, with a batch whose steps take a time of its own.

    python -m harness.vllm_like 8001 8002

`POST /v1/completions` and `/v1/chat/completions` stream `max_tokens` words. The body's `fault` is 503, cut or
hang, at the ports that `fault_on` names. A step takes a time of its
own, and more for each request and each prefill token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from tokenfleet.profiles.engine_metrics import NAMES

STEP_S, A_REQUEST_S, A_PREFILL_TOKEN_S = 4e-3, 1e-4, 2e-6
SEATS, KV_TOKENS = 64, 400_000
BATCHED = 2048


@dataclass(eq=False)
class Running:
    """A request in the batch: tokens of the prompt to compute, words to make, and where they go.

    `session`: those of one begin alike, the longer with the shorter's prompt and answer; 0: it is of none.
    `hangs`: it stays in the batch, and no word is made.
    """

    prompt: int
    words: int
    session: int = 0
    made: int = 0
    left: int = 0
    hangs: bool = False
    out: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class Batch:
    """An engine: its batch, whose steps last by the loop's clock, and its counters."""

    def __init__(
        self,
        step_s: float = STEP_S,
        seats: int = SEATS,
        a_request_s: float = A_REQUEST_S,
        a_token_s: float = A_PREFILL_TOKEN_S,
    ) -> None:
        self.step_s, self.seats = step_s, seats
        self.a_request_s, self.a_token_s = a_request_s, a_token_s
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.values = dict.fromkeys(
            ("gaps", "gaps_s", "first_tokens", "first_tokens_s", "prompt_tokens", "ended"), 0.0
        ) | dict.fromkeys(("ended_prompt_tokens", "ended_output_tokens"), 0.0)
        self.cached: dict[int, int] = {}  # tokens, by session
        self.on_step: Callable[[int], None] = lambda prefilled: None  # a step is over; prompt tokens computed
        self._wake = asyncio.Event()

    async def steps(self) -> None:
        """Make steps until cancelled."""
        while True:
            if not self.running and not self.waiting:
                self._wake.clear()
                await self._wake.wait()
            while self.waiting and len(self.running) < self.seats:
                self.running.append(self.waiting.pop(0))
            budget = BATCHED
            for one in self.running:
                chunk = min(one.left, budget)
                budget -= chunk
                one.left -= chunk
            took_s = self.step_s + len(self.running) * self.a_request_s + (BATCHED - budget) * self.a_token_s
            await asyncio.sleep(took_s)
            for one in [one for one in self.running if not one.left and not one.hangs]:
                one.made += 1
                self.values["gaps" if one.made > 1 else "first_tokens"] += 1
                self.values["gaps_s" if one.made > 1 else "first_tokens_s"] += took_s
                one.out.put_nowait(one.made)
                if one.made >= one.words:
                    self.running.remove(one)
            self.on_step(BATCHED - budget)

    def begin(self, prompt: int, words: int, session: int = 0) -> Running:
        """Queue a request of `prompt` tokens that will generate `words` tokens."""
        one = Running(prompt, words, session)
        one.left = prompt - min(self.cached.get(session, 0), prompt - 1)
        self.waiting.append(one)
        self._wake.set()
        self.values["prompt_tokens"] += prompt
        return one

    def end(self, one: Running) -> None:
        """It has had all its words, or its client has left."""
        for of in (self.running, self.waiting):
            if one in of:
                of.remove(one)
        if one.session:
            self.cached[one.session] = one.prompt + one.made
        self.values["ended"] += 1
        self.values["ended_prompt_tokens"] += one.prompt
        self.values["ended_output_tokens"] += one.made

    def told(self) -> dict[str, float]:
        """What its metrics say, by the names of `NAMES`."""
        held = sum(one.prompt - one.left + one.made for one in self.running)
        loads = {"running": len(self.running), "waiting": len(self.waiting), "kv_share": held / KV_TOKENS}
        return self.values | loads


class VllmLike(Batch):
    """One server: its engine and its routes. `engine`: seats and step times, as a `Batch` takes them."""

    def __init__(self, port: int, *engine: float) -> None:
        super().__init__(*engine)  # type: ignore[arg-type]
        self.port = port
        self.bodies: list[tuple[int, dict[str, str]]] = []  # of requests: the body's size, and headers
        self.aborted = self.inside = 0  # requests: whose clients left, and in the HTTP server now
        self._task: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, self._answer)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self._task = asyncio.create_task(self.steps())

    async def stop(self) -> None:
        assert self._runner is not None
        assert self._task is not None
        self._task.cancel()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append((len(body), dict(request.headers)))
        asked = json.loads(body)
        fault = asked.get("fault", "") if str(self.port) in asked.get("fault_on", str(self.port)) else ""
        if fault == "503":
            return web.Response(status=503, text="busy")
        text = json.dumps(asked.get("messages") or asked.get("prompt", ""))
        one = self.begin(max(len(text) // 4, 1), asked.get("max_tokens", 8))
        one.hangs = fault == "hang"
        self.inside += 1
        try:
            return await self._stream(request, asked, one, fault)
        except (asyncio.CancelledError, ConnectionResetError) as left:
            self.aborted += 1
            if isinstance(left, asyncio.CancelledError):
                raise
            return web.Response()  # the client has gone
        finally:
            self.inside -= 1
            self.end(one)

    async def _stream(
        self, request: web.Request, asked: dict[str, object], one: Running, fault: str
    ) -> web.StreamResponse:
        usage = {"prompt_tokens": one.prompt, "completion_tokens": one.words}
        if not asked.get("stream"):
            for _ in range(one.words):
                await one.out.get()
            document = {"choices": [{"text": " word" * one.words}], "usage": usage}
            return web.json_response(document, headers={"x-port": str(self.port)})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream", "x-port": str(self.port)})
        await reply.prepare(request)
        for n in range(one.words):
            if fault == "hang" or (fault == "cut" and n == one.words // 2):
                await (asyncio.sleep(3600) if fault == "hang" else asyncio.sleep(0))
                assert request.transport is not None
                request.transport.abort()
                return reply
            await one.out.get()
            await reply.write(b'data: {"choices":[{"index":0,"text":" word"}]}\n\n')
        await reply.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return reply

    async def _metrics(self, request: web.Request) -> web.Response:
        label = 'engine="0",model_name="small"'
        config = f'block_size="16",engine="0",kv_cache_size_tokens="{KV_TOKENS}"'
        lines = [f"vllm:cache_config_info{{{config}}} 1.0"]
        lines += [f"vllm:{NAMES[name][0]}{{{label}}} {float(value)}" for name, value in self.told().items()]
        return web.Response(text="\n".join(lines) + "\n")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small", "max_model_len": 32_768}]})


async def serve(servers: list[VllmLike]) -> None:
    """Serve until stopped."""
    for one in servers:
        await one.start()
    await asyncio.Event().wait()


def main() -> None:
    """Servers at the ports given, with the step times given."""
    flags = argparse.ArgumentParser()
    flags.add_argument("ports", type=int, nargs="+")
    for name, value in (("step-ms", STEP_S * 1e3), ("request-ms", A_REQUEST_S * 1e3)):
        flags.add_argument(f"--{name}", type=float, default=value)
    flags.add_argument("--token-us", type=float, default=A_PREFILL_TOKEN_S * 1e6)
    flags.add_argument("--seats", type=int, default=SEATS)
    asked = flags.parse_args()
    times = asked.step_ms / 1e3, asked.seats, asked.request_ms / 1e3, asked.token_us / 1e6
    asyncio.run(serve([VllmLike(port, *times) for port in asked.ports]))


if __name__ == "__main__":
    main()
