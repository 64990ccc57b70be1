"""A stream read with as little work as possible: fifty at once must not be what a test waits for."""

from __future__ import annotations

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
