"""The picker's servers: who is listed, who answers, what each is, and what its metrics say.

A server takes requests once its metrics and its models were read. One that leaves the list gets no more; one
whose metrics are missing is chosen last.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from tokenfleet.advise.look import NoCounts
from tokenfleet.advise.servers import Servers, url_of
from tokenfleet.pick.fleet import PickedFleet
from tokenfleet.pick.unseen import Unseen, load_of
from tokenfleet.profiles.engine_metrics import EngineCounts

log = logging.getLogger(__name__)
EVERY_S = 0.5
SILENT_AFTER = 3  # looks in a row
UNKNOWN_KV = 1 << 17  # tokens, where neither server nor profile tells
TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What metrics do not tell: seats, tokens of a step, and KV where a server says none."""

    max_seqs: int
    max_batched_tokens: int
    kv_tokens: int = UNKNOWN_KV


class ServerWatch:
    """The servers between two looks. `tell` gets a line for each that comes or goes."""

    def __init__(
        self,
        servers: Servers,
        fleet: PickedFleet,
        unseen: Unseen,
        limits: ServerLimits,
        tell: Callable[[str], None],
        model: str = "",
        kind: str = "",
    ) -> None:
        self._servers, self._fleet, self._unseen = servers, fleet, unseen
        self._limits, self._tell, self._kind = limits, tell, kind
        self.model = model
        self._addresses: dict[str, WorkerId] = {}
        self._missed: dict[WorkerId, int] = {}
        self._refused: dict[str, str] = {}
        self.on_server: list[Callable[[WorkerId, bool], None]] = []  # one has come, or gone

    async def run(self, stop: asyncio.Event) -> None:
        """Look until `stop` is set: every EVERY_S, or half of that after a long look."""
        took_s = 0.0
        while not stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(max(EVERY_S - took_s, EVERY_S / 2)):
                    await stop.wait()
            began_s = time.monotonic()
            with suppress(BadInput):  # of a list that was never read: `look` has raised it before
                await self.look()
            took_s = time.monotonic() - began_s

    async def look(self) -> None:
        """Read the list and the metrics. Raises BadInput for a list that was never read."""
        asked_s, had = self._fleet.clock(), Counter(call.worker for call in self._fleet.calls.values())
        pages = await self._servers.pages(time.monotonic())
        names = {server: await self._address(server) for server in pages}
        for gone in set(self._fleet.servers) - set(names.values()):
            self._part(gone, "no longer listed")
        counted: dict[WorkerId, EngineCounts] = {}
        for server, page in pages.items():
            name = names[server]
            if name is None:
                continue
            if not isinstance(page, EngineCounts):
                self._silent(server, name, page, asked_s)
            elif name not in self._fleet.servers:
                await self._meet(server, name, page, asked_s)
            else:
                if self._missed.pop(name, 0) >= SILENT_AFTER:
                    self._fleet.suspect(name, False)
                    self._tell(f"{name}: answers again")
                counted[name] = page
        # Those that have the fewest first, by the ledger: another may show in this look what they lack.
        for name in sorted(counted, key=lambda name: load_of(counted[name]) - had[name]):
            self._unseen.heard(name, counted[name], asked_s, had[name])

    async def _address(self, server: str) -> WorkerId | None:
        """A server's IP and port, as gateways know it."""
        if " " in server:  # HOST:PORT WORKER, behind a control address
            self._refuse(server, "it is a worker of `tokenfleet serve`, whose own gateway places requests")
            return None
        if server not in self._addresses:
            parts = urlsplit(url_of(server))
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except OSError as error:
                self._refuse(server, f"its name cannot be resolved: {error.strerror}")
                return None
            at = sorted({one[4][0] for one in found}, key=lambda ip: (":" in str(ip), ip))[0]
            ip = ipaddress.ip_address(str(at))
            self._addresses[server] = WorkerId(f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}")
        return self._addresses[server]

    def _silent(self, server: str, name: WorkerId, page: NoCounts, asked_s: float) -> None:
        if name not in self._fleet.servers:
            self._refuse(server, page.why)
            return
        missed = self._missed.get(name, 0)
        if page.refuses:
            self._unseen.refused(name, asked_s)
        self._missed[name] = max(missed + 1, SILENT_AFTER if page.refuses else 0)
        if missed < SILENT_AFTER <= self._missed[name]:
            self._tell(f"{name}: {page.why}; chosen last until it answers")
            self._fleet.suspect(name, True)

    def _refuse(self, server: str, why: str) -> None:
        if self._refused.get(server) != why:
            self._refused[server] = why
            self._tell(f"{server}: gets no requests: {why}")

    async def _meet(self, server: str, name: WorkerId, page: EngineCounts, asked_s: float) -> None:
        if self.model and page.model and page.model != self.model:
            self._refuse(server, f"serves {page.model}, the fleet serves {self.model}")
            return
        longest, adapters = await models_of(server, page.model)
        self.model = self.model or page.model
        kv_tokens = page.kv_tokens or self._limits.kv_tokens
        block = page.block_tokens or 16
        info = WorkerInfo(
            worker=name, engine="vllm", model=page.model, endpoint=name, kv_addresses=(), block_tokens=block,
            kv_blocks=max(kv_tokens // block, 1), kv_bytes_per_token=1, max_model_len=longest or kv_tokens,
            max_seqs=self._limits.max_seqs, max_batched_tokens=self._limits.max_batched_tokens, tp_degree=1,
            vllm_version="", dtype="", pid=0,
        )  # fmt: skip
        self._fleet.lengths.adapters |= adapters
        if not self._fleet.attach(info, self._kind):
            self._refuse(server, "the picker has room for twice the servers it started with: restart it")
            return
        self._refused.pop(server, None)
        self._unseen.heard(name, page, asked_s)
        self._tell(f"{name}: gets requests; KV memory for {kv_tokens:,} tokens")
        for told in self.on_server:
            told(name, True)

    def _part(self, name: WorkerId, why: str) -> None:
        for told in self.on_server:
            told(name, False)
        self._unseen.gone(name)
        self._fleet.detach(name)
        self._missed.pop(name, None)
        self._tell(f"{name}: gets no more requests: {why}")


async def models_of(server: str, served: str) -> tuple[int, frozenset[str]]:
    """The longest sequence that a server takes (0: it does not say), and its LoRA adapters."""
    url = url_of(server).removesuffix("/metrics") + "/v1/models"
    document: Any = None
    with suppress(aiohttp.ClientError, TimeoutError, ValueError, OSError):
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
            document = await reply.json(content_type=None)
    entries = document.get("data") if isinstance(document, dict) else None
    models = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    longest = [one["max_model_len"] for one in models if type(one.get("max_model_len")) is int]
    names = {str(one["id"]) for one in models if one.get("parent") and one.get("id") != served}
    return max((n for n in longest if n > 1), default=0), frozenset(names)
