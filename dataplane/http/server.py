"""Server ports, bound before anything starts and awaited until they answer, and API extensions.

An extension (plan jobs, the console) adds routes to a control API; the program that starts the fleet hands it
in.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from prometheus_client.registry import Collector

from controlplane.errors import BadInput

OPEN_FILES = 1 << 18


def allow_open_files() -> None:
    """Allow this process, and all it will start, as many open files as it may have, up to OPEN_FILES.

    Each stream and each worker takes some; many systems begin with 1,024 and allow far more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(host: str, port: int, what: str) -> socket.socket:
    """A bound socket for a server; BadInput naming the flag when the port is taken.

    Bound before any engine starts: a taken port is told at once, not after a model has loaded.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise BadInput(f"{what}: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error
    return listening


async def until_answering(host: str, port: int, server: asyncio.Task[None]) -> None:
    """Return once the port answers HTTP; raises what ended the server if it ended first."""
    host = "127.0.0.1" if host in ("0.0.0.0", "") else host
    while not server.done():
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: tokenfleet\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    server.result()
    raise RuntimeError("the server ended before it answered")


def _nothing() -> AbstractAsyncContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Extension:
    """Routes, and what they need: `running` is entered while the API answers, `collectors` join /metrics.

    `open_paths` answer without a key; `body_bytes` lets a path take a larger body than others.
    """

    routers: Sequence[APIRouter]
    running: Callable[[], AbstractAsyncContextManager[Any]] = _nothing
    collectors: Sequence[Collector] = ()
    open_paths: frozenset[str] = frozenset()
    body_bytes: Mapping[str, int] = field(default_factory=dict)
