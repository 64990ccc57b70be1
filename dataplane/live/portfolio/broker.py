"""The process before the fleets of a portfolio: it answers for all of them and divides what they share.

Each look asks every fleet what it needs, asks for and has, and tells those whose share changes
(controlplane.scaler.shares decides). A fleet that does not answer keeps the share that it has. The process
may be killed: open connections break, and the fleets serve on with their shares. They report these to the
process that takes its place.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import Any

import aiohttp

from controlplane.scaler.shares import Claims, Limits, Patience, Tenant, share_out
from dataplane.http.server import QuietServer, address, follow, until_answering
from dataplane.http.tls import ServerCertificate
from dataplane.live.engine_api.processes import Pulse, race
from dataplane.live.portfolio.front import control, endpoint, session

log = logging.getLogger("tokenfleet.portfolio")
LOOK_S = 0.5
ANSWER_S = 5.0
PATIENCE = 0.25  # cold starts that a worker must not be needed before another model has its GPUs
IDLE_S = 75  # as vLLM's server of the fleets
LAST_CHANGES = 100


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Where the front answers, and where the fleet of each model does: its gateway and its control API.

    `tenants`: the models' rights and workers, by type. `key`: of the fleets' control APIs, where they have
    any. `hold_s`: how long a division must be the better one before it takes away workers that are needed.
    """

    host: str
    port: int
    control_host: str
    control_port: int
    gateways: Mapping[str, str]
    controls: Mapping[str, str]
    shutdown_s: int
    certificate: tuple[Path, Path] | None
    tenants: tuple[Tenant, ...]
    limits: Limits
    hold_s: float
    key: str


class Broker:
    """Divides the limits among the fleets. `view` is for operators: shares, limits, and the last changes."""

    def __init__(self, settings: FrontSettings, http: aiohttp.ClientSession) -> None:
        self._settings, self._http = settings, http
        self._tenants = {tenant.key: replace(tenant, share=0, is_heard=False) for tenant in settings.tenants}
        self._times: dict[str, tuple[float, float]] = {}  # cold start and drain of each fleet, once heard
        self._claims = Claims()
        self.view: dict[str, Any] = {"shares": [], "limits": [], "changes": []}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("shares were not looked at; they stay as they are")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Ask all fleets, divide, and tell those whose share changes."""
        await asyncio.gather(*(self._hear(model) for model in self._settings.controls))
        tenants = list(self._tenants.values())
        # Of a fleet never heard it is not known what it has.
        if len(self._times) == len(self._settings.controls):
            cold_start_s = max(start for start, _ in self._times.values())
            drain_s = max(drain for _, drain in self._times.values())
            patience = Patience(PATIENCE * cold_start_s, max(self._settings.hold_s, cold_start_s + drain_s))
            now_s = time.monotonic()
            self._claims, told = share_out(patience, self._claims, tenants, self._settings.limits, now_s)
            changed = {tenant.model for tenant in tenants if told[tenant.key] != tenant.share}
            # What is lowered is in force once its fleet has answered; others are given it at a later look.
            await asyncio.gather(*(self._tell(model, told) for model in sorted(changed)))
        self._show()

    async def _hear(self, model: str) -> None:
        if (told := await self._ask(model, "GET", None)) is not None:
            self._take(model, told)
            return
        for tenant in self._of(model):
            self._tenants[tenant.key] = replace(tenant, is_heard=False)

    def _of(self, model: str) -> list[Tenant]:
        return [tenant for tenant in self._tenants.values() if tenant.model == model]

    async def _tell(self, model: str, shares: Mapping[str, int]) -> None:
        before = self._of(model)
        # They may be in force though no answer comes: then the larger of both counts until one does.
        for p in before:
            self._tenants[p.key] = replace(p, share=max(shares[p.key], p.share), is_heard=False)
        order = {"workers": {p.kind: shares[p.key] for p in before}}
        if (told := await self._ask(model, "PUT", order)) is None:
            return
        self._take(model, told)
        for p in before:
            share = shares[p.key]
            if share == p.share:
                continue
            said = {"at_s": time.time(), "model": model, "kind": p.kind, "before": p.share, "share": share}
            self.view["changes"] = [*self.view["changes"], said][-LAST_CHANGES:]
            log.info("%s: allocation %d -> %d (asks for %d)", p.key, p.share, share, p.asked)

    def _take(self, model: str, told: Mapping[str, Any]) -> None:
        fields = {"share": "workers", "asked": "asked", "needed": "needed", "held": "held"}
        for p in self._of(model):
            now = {field: told[name].get(p.kind, 0) for field, name in fields.items()}
            self._tenants[p.key] = replace(p, is_heard=True, **now)
        self._times[model] = told["cold_start_s"], told["drain_s"]

    async def _ask(self, model: str, method: str, order: object) -> dict[str, Any] | None:
        """A fleet's share as it tells it; None where it does not answer."""
        url = f"{self._settings.controls[model]}/v1/fleet/share"
        headers = {
            "authorization": f"Bearer {self._settings.key}",
            "content-type": "application/json",
        }
        patience = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with self._http.request(
                method, url, json=order, headers=headers, timeout=patience
            ) as reply:
                if reply.status == 200:
                    found: dict[str, Any] = await reply.json()
                    return found
                log.warning("%s: its share was not sent: %s", model, await reply.text())
        except (aiohttp.ClientError, TimeoutError):
            pass
        return None

    def _show(self) -> None:
        tenants, limits = list(self._tenants.values()), self._settings.limits
        held = [
            {"name": name, "most": most, "held": held}
            for name, held, most in limits.used(tenants, [p.held for p in tenants])
        ]
        shares = [
            {
                "name": p.model,
                "kind": p.kind,
                "gpu": p.gpu,
                "gpus_per_worker": p.gpus,
                "zone": p.zone,
                "right": p.right,
                "share": p.share,
                "asked": p.asked,
                "needed": p.needed,
                "held": p.held,
                "heard": p.is_heard,
            }
            for p in tenants
        ]
        self.view |= {"shares": shares, "limits": held}


async def run_front(
    settings: FrontSettings, doors: tuple[socket, socket], pulse: Pulse, announce: Callable[[str], None]
) -> None:
    """Answer until SIGTERM; `announce` the addresses, the first time once every fleet serves."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    hosts, ports = (settings.host, settings.control_host), (settings.port, settings.control_port)
    certificate = None
    if settings.certificate is not None:
        certificate = ServerCertificate(*settings.certificate, hosts)
    async with session() as http:
        broker = Broker(settings, http)
        apps = endpoint(settings.gateways, http), control(settings.controls, http, broker.view)
        last, usual = settings.shutdown_s, {"lifespan": "off", "timeout_keep_alive": IDLE_S}
        servers = [QuietServer(app, certificate, last, **usual) for app in apps]
        if not pulse.served:
            await race(_until_ready(http, settings.controls), stop.wait())
        if stop.is_set():
            return
        serving = [
            asyncio.create_task(server.serve(sockets=[door]))
            for server, door in zip(servers, doors, strict=True)
        ]
        tasks = [asyncio.create_task(broker.run())]
        if certificate is not None:
            tasks.append(asyncio.create_task(follow(certificate.files, certificate.reload, log.warning)))
        for host, port, task in zip(hosts, ports, serving, strict=True):
            await until_answering(host, port, task, certificate is not None)
        urls = [address(host, port, certificate) for host, port in zip(hosts, ports, strict=True)]
        announce(f"ready {urls[0]} control {urls[1]}")
        pulse.serves()
        await stop.wait()
        for task in tasks:
            task.cancel()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)


async def _until_ready(http: aiohttp.ClientSession, controls: Mapping[str, str]) -> None:
    """Return once each fleet says that it is ready."""

    async def ready(control: str) -> None:
        while True:
            try:
                async with http.get(f"{control}/ready") as reply:
                    if reply.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(LOOK_S)

    await asyncio.gather(*(ready(control) for control in controls.values()))
