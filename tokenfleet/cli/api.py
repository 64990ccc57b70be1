"""`tokenfleet api`: serves plan jobs and the console over HTTP, for planning without a fleet."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.errors import BadInput
from tokenfleet.durations import parse_duration_s

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def api_command(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8001,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    data: Annotated[
        Path | None, typer.Option(help="folder for jobs, plans and uploads (default: $TOKENFLEET_DATA)")
    ] = None,
    control_key: Annotated[
        str | None, typer.Option(envvar="TOKENFLEET_CONTROL_KEY", help="the key callers must send")
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="plans made at the same time")] = 1,
    queue: Annotated[int, typer.Option(min=1, max=100_000, help="plans that may wait; more get 429")] = 100,
    job_timeout: Annotated[str, typer.Option(help="the most a plan may take")] = "15m",
    max_upload_mb: Annotated[int, typer.Option(min=1, max=4096, help="the largest trace")] = 64,
) -> None:
    """Answer until SIGTERM or SIGINT; one line says so. Unfinished plans go on at the next start."""
    job_timeout_s = parse_duration_s(job_timeout, "--job-timeout")
    if job_timeout_s <= 0:
        raise BadInput(f"--job-timeout: must be positive, got {job_timeout}")
    if host not in LOOPBACK and not control_key:
        raise BadInput(f"--host: {host} is reachable by others, so give --control-key")

    from dataplane.http.server import bind
    from tokenfleet.console.pages import console_extension
    from tokenfleet.service.app import plan_app
    from tokenfleet.service.data_folder import default_data_folder
    from tokenfleet.service.plan_service import PlanService, ServiceLimits
    from tokenfleet.service.routes import plan_extension

    listening = bind(host, port, "--port")
    limits = ServiceLimits(parallel, queue, job_timeout_s, max_upload_mb << 20)
    service = PlanService(data or default_data_folder(), limits)
    app = plan_app(control_key, [plan_extension(service), console_extension()])
    try:
        _answer(app, listening, f"ready http://{f'[{host}]' if ':' in host else host}:{port}")
    finally:
        service.close()
        listening.close()


def _answer(app: FastAPI, listening: socket.socket, ready: str) -> None:
    """Serve until SIGTERM or SIGINT, both of which end it cleanly; `ready` is printed once it answers."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(ready, flush=True)

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            # Uvicorn's own raises the signal again at the end, and the process would die of it.
            before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGTERM, signal.SIGINT)}
            try:
                yield
            finally:
                for one, handler in before.items():
                    signal.signal(one, handler)

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    Server(config).run(sockets=[listening])
