"""Replay of a workload on a running OpenAI endpoint: each request at its time, tokens as a client sees them.

Prompts are random token ids of the trace's lengths, so no prefix is cached and nothing is tokenized; outputs
have the trace's lengths. Emulated engines end them there, and placement has to predict them. Of other engines
they are demanded (`ignore_eos`, vLLM's), so that placement knows them. Latencies count from the instant at
which a request was really sent, so that a busy client is not taken for a slow server.

**HTTP overhead** is the time that the way to an engine and back adds to a first token. A lone request on an
idle fleet finds a gateway that shares its processor with no engine, and takes less. So the overhead is
learned from replayed requests whose worker was idle when they arrived. They waited only for their own step,
and the rest of their time to first token is the overhead. A request's own step is found by its time and by
the tokens that it prefilled; the clocks of client and engines have to agree to 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.workload import Workload
from dataplane.http.tls import distrust
from dataplane.live.engine_api.link import ENDS_AT
from tokenfleet.profiles.measurements import RequestLog, numbers, read_table

FIRST_TOKEN_ID, LAST_TOKEN_ID = 3, 1000  # ids that any vocabulary has
REQUEST_S = 600.0
PROBES = 20
CLOCKS_S = 0.02  # between a client's clock and an engine's steps
ORDER_S = 0.002  # a step that began so much earlier was before this one
NEEDED = ("at_s", "worker", "step_s", "prefill_tokens")
Columns = NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """A replay as its client saw it.

    Columns of shape [requests], seconds since the replay began; NaN where no token came.
    """

    sent_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    last_token_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    errors: tuple[str, ...]
    began_unix_s: float = 0.0

    @property
    def finished(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.last_token_s)

    @property
    def log(self) -> RequestLog:
        """The finished requests as they were, in the order in which they were sent."""
        rows = self._rows
        sent_s, first_s, last_s = (c[rows] for c in (self.sent_s, self.first_token_s, self.last_token_s))
        outputs = np.maximum(self.output_tokens[rows], 1)
        work = Workload(sent_s - sent_s[0], self.prompt_tokens[rows], outputs)
        return RequestLog(work, first_s - sent_s[0], last_s - sent_s[0])

    @property
    def sent_unix_s(self) -> NDArray[np.float64]:
        """In order of `log`."""
        return self.sent_s[self._rows] + self.began_unix_s

    @property
    def _rows(self) -> NDArray[np.int64]:
        rows = np.flatnonzero(self.finished)
        return rows[np.argsort(self.sent_s[rows], kind="stable")]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint that requests are sent to."""

    url: str
    model: str
    key: str | None = None
    trust: ssl.SSLContext | None = None
    context_limit_tokens: int = 0  # vLLM's max_model_len; 0 where the endpoint does not say
    is_emulated: bool = False  # all of its workers are

    def session(self, timeout_s: float) -> aiohttp.ClientSession:
        """A client of it, that sends the key and accepts the certificates that are trusted."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        connector = aiohttp.TCPConnector(limit=0, ssl=self.trust or True)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


def refusal(flag: str, url: str, what: str, error: BaseException) -> BadInput:
    """In one line why an address does not serve."""
    why = distrust(getattr(error, "certificate_error", None))
    return BadInput(f"{flag}: {url}: {why or f'{what}: {str(error) or type(error).__name__}'}")


async def served_model(url: str, key: str | None, trust: ssl.SSLContext | None = None) -> Endpoint:
    """The endpoint and the first model it serves. Raises BadInput when it does not answer as one."""
    endpoint = Endpoint(url.rstrip("/"), "", key, trust)
    try:
        async with (
            endpoint.session(30.0) as session,
            session.get(f"{endpoint.url}/v1/models") as reply,
        ):
            answer = await reply.json(content_type=None)
            first = answer["data"][0]
            name, limit = str(first["id"]), int(first.get("max_model_len") or 0)
            return replace(endpoint, model=name, context_limit_tokens=limit)
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError, TimeoutError) as error:
        raise refusal("--endpoint", url, "no OpenAI endpoint answers there", error) from None


async def overheads_s(endpoint: Endpoint, alone_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """The overhead of HTTP and of the way to the engine on a first token, from a few lone requests.

    `alone_s` is the profile's time to first token for such a request. One more comes first and is not
    counted: it finds things still to be loaded. One zero where none was answered.
    """
    one = Workload(np.zeros(1), np.array([8]), np.array([1]))
    rounds = [await replay(one, endpoint, rng) for _ in range(PROBES + 1)][1:]
    ttfts_s = np.concatenate([(one.first_token_s - one.sent_s)[one.finished] for one in rounds])
    return np.maximum(ttfts_s - alone_s, 0.0) if len(ttfts_s) else np.zeros(1)


async def replay(
    workload: Workload,
    endpoint: Endpoint,
    rng: np.random.Generator,
    told: Callable[[], None] = lambda: None,
) -> Replay:
    """Send every request at its time and wait for all of them. `told` is called as each ends."""
    n = len(workload)
    sent, first, last = np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan)
    received = np.zeros(n, np.int64)
    errors: list[str] = []
    async with endpoint.session(REQUEST_S) as session:
        # Prompts are made before the clock starts: drawing them must not delay anyone.
        prompts = [
            rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, int(p)).tolist() for p in workload.prompt_tokens
        ]
        began = time.perf_counter() - float(workload.arrival_s[0])

        async def one(i: int) -> None:
            await asyncio.sleep(max(0.0, began + float(workload.arrival_s[i]) - time.perf_counter()))
            body = _body(endpoint, prompts[i], int(workload.output_tokens[i]))
            sent[i] = time.perf_counter() - began
            try:
                async with session.post(f"{endpoint.url}/v1/completions", json=body) as reply:
                    if reply.status != 200:
                        raise BadInput(f"HTTP {reply.status}: {(await reply.text())[:200]}")
                    async for line in reply.content:
                        chunk = _chunk(line)
                        if chunk.get("choices"):
                            last[i] = time.perf_counter() - began
                            first[i] = last[i] if np.isnan(first[i]) else first[i]
                        if chunk.get("usage"):
                            received[i] = int(chunk["usage"]["completion_tokens"])
            except (aiohttp.ClientError, OSError, TimeoutError, BadInput) as error:
                errors.append(str(error) or repr(error))
                last[i] = np.nan
            if received[i] == 0:
                last[i] = np.nan
            told()

        await asyncio.gather(*(one(i) for i in range(n)))
    began_unix_s = time.time() - (time.perf_counter() - began)
    return Replay(sent, first, last, workload.prompt_tokens, received, tuple(errors), began_unix_s)


def _body(endpoint: Endpoint, prompt: list[int], tokens: int) -> dict[str, Any]:
    """A request whose answer has that many tokens."""
    body = {"model": endpoint.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if not endpoint.is_emulated:
        return body | {"ignore_eos": True}
    most = max(endpoint.context_limit_tokens - len(prompt), tokens)  # as a chat client allows
    return body | {"max_tokens": most, "vllm_xargs": {ENDS_AT: len(prompt) + tokens}}


def _chunk(line: bytes) -> dict[str, Any]:
    """The chunk in a line of a stream; empty where it has none. Raises BadInput for an error in it."""
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return {}
    try:
        chunk: dict[str, Any] = json.loads(line[6:])
    except ValueError:
        raise BadInput(f"endpoint: a chunk that is not JSON: {line[:80]!r}") from None
    if "error" in chunk:
        raise BadInput(f"endpoint: {chunk['error'].get('message', 'an error')}")
    return chunk


@dataclass(frozen=True)
class FleetSteps:
    """Steps of a fleet in the order they ended; columns of shape [steps]."""

    end_s: Columns  # Unix time
    step_s: Columns
    prefill_tokens: Columns
    worker: NDArray[np.str_]


def read_steps(path: Path) -> FleetSteps:
    """The `steps.csv` of a fleet's `--data`, which may hold no steps yet. Raises BadInput naming the row."""
    _, rows = read_table(path, NEEDED)
    end_s, step_s, tokens = (numbers(path, rows, name) for name in ("at_s", "step_s", "prefill_tokens"))
    order = np.argsort(end_s, kind="stable")
    worker = np.array([row["worker"] for row in rows], str)
    return FleetSteps(end_s[order], step_s[order], tokens[order], worker[order])


def learned_overheads_s(
    sent_unix_s: Columns, prompt_tokens: NDArray[np.int64], ttft_s: Columns, steps: FleetSteps
) -> Columns:
    """TTFT without the step, of the requests that found their worker idle; shape [found], seconds.

    A request counts only where the tokens prefilled tell its step from all others near it.
    """
    overheads = []
    first = np.searchsorted(steps.end_s, sent_unix_s - CLOCKS_S, side="right")
    last = np.searchsorted(steps.end_s, sent_unix_s + ttft_s + CLOCKS_S, side="left")
    for i in range(len(sent_unix_s)):
        near = slice(first[i], last[i])
        end_s, lasted_s = steps.end_s[near], steps.step_s[near]
        own = np.flatnonzero(steps.prefill_tokens[near] == prompt_tokens[i])
        if len(own) != 1:
            continue
        begun_s = end_s[own[0]] - lasted_s[own[0]]
        beside = (steps.worker[near] == steps.worker[near][own[0]]) & (end_s > sent_unix_s[i])
        if not (beside & (end_s - lasted_s < begun_s - ORDER_S)).any():
            overheads.append(ttft_s[i] - lasted_s[own[0]])
    return np.maximum(np.array(overheads, np.float64), 0.0)
