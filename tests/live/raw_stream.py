"""A stream read with as little work as possible: fifty at once must not be what a test waits for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import aiohttp


@dataclass
class RawStream:
    """What a client was sent."""

    text: str = ""
    finish: str | None = None
    tokens: int = 0
    error: str = ""
    is_done: bool = False


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300)
    )


async def stream(
    http: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None, **body: object
):
    """One greedy streamed completion, read to its end."""
    settings = {"model": "tiny-llama", "temperature": 0, "ignore_eos": True, "stream": True} | body
    settings["stream_options"] = {"include_usage": True}
    got = RawStream()
    async with http.post(f"{url}/v1/completions", json=settings, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: [DONE]"):
                got.is_done = True
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    got.error = chunk["error"]["message"]
                    continue
                for choice in chunk["choices"]:
                    got.text += choice["text"]
                    got.finish = choice["finish_reason"] or got.finish
                if chunk.get("usage"):
                    got.tokens = chunk["usage"]["completion_tokens"]
    return got


async def begun(fleet, streams, running):
    """Return once this many requests decode, or fewer than before do: some have ended already.

    Raises what a stream of `running` failed with; a stream that has ended well was one too fast to see.
    """
    most = 0
    while not any(task.done() for task in running):
        requests = (await asyncio.to_thread(fleet.ask, "GET", "/v1/requests"))["requests"]
        decoding = sum(r["output_tokens"] > 0 for r in requests)
        if decoding >= streams or decoding < most:
            return
        most = decoding
        await asyncio.sleep(0.01)
    for task in running:
        if task.done():
            task.result()
