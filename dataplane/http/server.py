"""Server ports and options, files that are followed while a server runs, and API extensions.

Ports are bound before anything starts and awaited until they answer.

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
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter
from prometheus_client.registry import Collector

from controlplane.errors import BadInput
from dataplane.http.protocol import BoundedHttp
from dataplane.http.tls import ServerCertificate, own_host_context

OPEN_FILES = 1 << 18
LOOK_S = 1.0  # between two looks at a followed file


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

    It is bound before any engine starts: a taken port is reported at once, not after a model has loaded.
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


def address(host: str, port: int, certificate: ServerCertificate | None) -> str:
    """The URL of a server there."""
    scheme = "http" if certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def server_options(certificate: ServerCertificate | None) -> dict[str, Any]:
    """The options that every server of ours gives uvicorn."""
    options: dict[str, Any] = {"http": BoundedHttp}
    if certificate is not None:
        options["ssl_context_factory"] = lambda config, default: certificate.context
    return options


class QuietServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own: the gateway's end is the fleet's end.

    Give its `serve` a bound socket, and set `should_exit` to end it; what is open then has `shutdown_s`.
    """

    def __init__(
        self, app: Any, certificate: ServerCertificate | None = None, shutdown_s: int = 1, **options: Any
    ) -> None:
        """`options`: uvicorn's, besides those of every server of ours."""
        usual: dict[str, Any] = {"log_level": "warning", "access_log": False}
        usual |= server_options(certificate) | {"timeout_graceful_shutdown": shutdown_s} | options
        super().__init__(uvicorn.Config(app, **usual))

    def capture_signals(self) -> Any:
        return nullcontext()


async def follow(
    files: Sequence[Path],
    reload: Callable[[], None],
    say: Callable[[str], None],
    look_s: float = LOOK_S,
) -> None:
    """Call `reload` now, and whenever the files have changed and then kept still for a look; `say` what came
    of a change.

    Two files are not replaced in one moment. Where `reload` raises BadInput, what was in force stays.
    """
    known = last = _state_of(files)
    _try(reload, say, "")  # they may have changed since they were read
    while True:
        await asyncio.sleep(look_s)
        last, before = _state_of(files), last
        if last != known and last == before:
            known = last
            _try(reload, say, f"{' and '.join(map(str, files))}: reloaded, in force from now on")


def _try(reload: Callable[[], None], say: Callable[[str], None], done: str) -> None:
    try:
        reload()
    except BadInput as refusal:
        say(f"{refusal}; what was in force stays")
    else:
        if done:
            say(done)


def _state_of(files: Sequence[Path]) -> tuple[object, ...]:
    """What tells one version of the files from another, through links as Kubernetes makes them."""
    return tuple(_stamp(file) for file in files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


async def until_answering(host: str, port: int, server: asyncio.Task[None], is_tls: bool = False) -> None:
    """Return once the port answers HTTP; raises what ended the server if it ended first."""
    host = "127.0.0.1" if host in ("0.0.0.0", "") else host
    trust = own_host_context() if is_tls else None
    while not server.done():
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=trust)
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


@dataclass(frozen=True, slots=True)
class Extension:
    """Routes, and what they need: `running` is entered while the API answers, `collectors` join /metrics.

    `open_paths` answer without a key; `body_bytes` lets a path take a larger body than others; `fleet` adds
    to what `GET /v1/fleet` says. `attach` gets the orders of the fleet that the API steers, if it steers one.
    """

    routers: Sequence[APIRouter]
    running: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext
    collectors: Sequence[Collector] = ()
    open_paths: frozenset[str] = frozenset()
    body_bytes: Mapping[str, int] = field(default_factory=dict)
    fleet: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    attach: Callable[[Any], None] = lambda orders: None
