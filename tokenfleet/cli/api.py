"""`tokenfleet api`: serves plan jobs and the console over HTTP, for planning without a fleet."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput
from dataplane.http.keys import KeyRing, control_keys_of, read_control_keys
from dataplane.http.tls import ServerCertificate, certificate_of
from tokenfleet.cli.flags import ControlKey, ControlKeys, Insecure, TlsCert, TlsKey, flag, takes_flags
from tokenfleet.cli.terminal import warn
from tokenfleet.texts import parse_duration_s

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

    Followed = tuple[Sequence[Path], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class ApiFlags:
    """What `tokenfleet api` is asked."""

    port: int = flag(8001, "port to listen on", min=1, max=65535)
    host: str = flag("127.0.0.1", "address to listen on")
    data: Path | None = flag(None, "folder for jobs, plans and uploads (default: $TOKENFLEET_DATA)")
    control_key: ControlKey = None
    control_keys: ControlKeys = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Insecure = False
    parallel: int = flag(1, "plans computed at the same time", min=1, max=64)
    queue: int = flag(100, "longest queue of plans; more get 429", min=1, max=100_000)
    job_timeout: str = flag("15m", "longest time for a plan")
    max_upload_mb: int = flag(64, "largest upload of a trace, MB", min=1, max=4096)


@takes_flags()
def api_command(flags: ApiFlags) -> None:
    """Serve plan jobs until SIGTERM or SIGINT. Unfinished plans continue at the next start."""
    job_timeout_s = parse_duration_s(flags.job_timeout, "--job-timeout")
    if job_timeout_s <= 0:
        raise BadInput(f"--job-timeout: must be positive, got {flags.job_timeout}")
    host, port = flags.host, flags.port
    keys = KeyRing(control_keys_of(flags.control_key, flags.control_keys, {"--host": host}))
    certificate = certificate_of(flags.tls_cert, flags.tls_key, flags.insecure, {"--host": host})

    from dataplane.http.server import address, bind
    from tokenfleet.console.pages import console_extension
    from tokenfleet.service.app import plan_app
    from tokenfleet.service.data_folder import default_data_folder
    from tokenfleet.service.plan_service import PlanService, ServiceLimits
    from tokenfleet.service.routes import plan_extension

    listening = bind(host, port, "--port")
    limits = ServiceLimits(flags.parallel, flags.queue, job_timeout_s, flags.max_upload_mb << 20)
    service = PlanService(flags.data or default_data_folder(), limits)
    app = plan_app(keys, [plan_extension(service), console_extension()])
    try:
        followed: list[Followed] = []
        if certificate is not None:
            followed.append((certificate.files, certificate.reload))
        if (file := flags.control_keys) is not None:
            followed.append(((file,), partial(keys.reload, file, read_control_keys)))
        _answer(app, listening, certificate, followed, f"ready {address(host, port, certificate)}")
    finally:
        service.close()
        listening.close()


def _answer(
    app: FastAPI,
    listening: socket.socket,
    certificate: ServerCertificate | None,
    followed: Sequence[Followed],
    ready: str,
) -> None:
    """Serve until SIGTERM or SIGINT, which both end it cleanly. It prints `ready` once it answers."""
    import uvicorn

    from dataplane.http.server import follow, server_options

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(ready, flush=True)
            works = [follow(files, reload, lambda line: warn([line])) for files, reload in followed]
            self.following = [asyncio.create_task(work) for work in works]  # they end with the loop

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            # Uvicorn's own raises the signal again at the end, and the process would die of it.
            before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGTERM, signal.SIGINT)}
            try:
                yield
            finally:
                for one, handler in before.items():
                    signal.signal(one, handler)

    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2}
    config = uvicorn.Config(app, **options, **server_options(certificate))
    Server(config).run(sockets=[listening])
