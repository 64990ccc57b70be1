"""The servers of a fleet and their metrics pages: by address, by file, by DNS name, by labels of pods.

Files and names are looked up at each look. Where one cannot be read any more, its last list stands. A name
that has no address any more has no servers, as a Service of Kubernetes without pods.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from errno import ECONNREFUSED
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp

from controlplane.errors import BadInput
from tokenfleet.advise.bearer import Bearer
from tokenfleet.advise.kubernetes.pods import PodWatch
from tokenfleet.advise.look import NoCounts, Page
from tokenfleet.field_errors import read_text
from tokenfleet.profiles.engine_metrics import MOST_BYTES, engine_counts

if TYPE_CHECKING:
    from tokenfleet.advise.watch import MetricsSource

TIMEOUT_S = 4.0
TOGETHER = 64
DNS = "dns:"
WORKER = re.compile(r'^vllm:\w+\{[^}]*\bworker="', re.M)  # a gateway of ours names the workers
TWICE = "is listed for two worker types"
SEVERAL = "shows {} engines; a replica is counted as one (`tokenfleet serve` shows its workers at port 8001)"


class Servers:
    """The servers that are asked for, and a session to ask them by."""

    def __init__(
        self,
        addresses: Sequence[str],
        file: Path | None = None,
        pods: PodWatch | None = None,
        bearer: Bearer | None = None,
    ) -> None:
        if not addresses and file is None and pods is None:
            raise BadInput("advise: no server is named, expected addresses, --servers FILE or --selector")
        self.discovered: frozenset[str] = frozenset()
        self._pods, self._bearer = pods, bearer or Bearer()
        self._fixed = [checked(address) for address in addresses]
        self._file = file
        self._known: dict[str, list[str]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Servers:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=TOGETHER))
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def listed(self) -> list[str]:
        """The servers now, each once. Raises BadInput for a file or a name that was never read."""
        listed = self._fixed + (self._of_file(self._file) if self._file is not None else [])
        found = [await self._of_name(one) if one.startswith(DNS) else [one] for one in listed]
        if self._pods is not None:
            found.append(self._pods.listed())
            self.discovered = frozenset(found[-1])
        return list(dict.fromkeys(address for some in found for address in some))

    async def pages(self, at_s: float) -> dict[str, Page]:
        """What each server says now."""
        servers = await self.listed()
        headers = self._bearer.headers()
        pages = await asyncio.gather(*(self._page(server, at_s, headers) for server in servers))
        return {name: page for found in pages for name, page in found.items()}

    async def texts(self) -> dict[str, str | NoCounts]:
        """The metrics page of each."""
        servers, headers = await self.listed(), self._bearer.headers()
        texts = await asyncio.gather(*(self._text(server, headers) for server in servers))
        return dict(zip(servers, texts, strict=True))

    async def _page(self, server: str, at_s: float, headers: dict[str, str]) -> dict[str, Page]:
        """A server's counts; those of each worker where it is the control address of `tokenfleet serve`."""
        text = await self._text(server, headers)
        if isinstance(text, NoCounts):
            return {server: text}
        try:
            engines = engine_counts(text, at_s, server)
        except BadInput as error:
            return {server: NoCounts(str(error).removeprefix(f"{server}: "), answers=True)}
        if WORKER.search(text):
            return {f"{server} {name.partition(' ')[0]}": page for name, page in engines.items()}
        if len(engines) > 1:
            return {server: NoCounts(SEVERAL.format(len(engines)), answers=True)}
        return {server: next(iter(engines.values()))}

    async def _text(self, server: str, headers: dict[str, str]) -> str | NoCounts:
        assert self._session is not None
        try:
            async with self._session.get(url_of(server), headers=headers, allow_redirects=False) as reply:
                if reply.status != 200:
                    said = f"{reply.url.path} answers with status {reply.status}"
                    return NoCounts(said, answers=reply.status < 500)
                return await _text(reply)
        except TimeoutError:
            return NoCounts(f"does not answer within {TIMEOUT_S:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            refuses = getattr(error, "errno", None) == ECONNREFUSED
            why = "connection refused" if refuses else getattr(error, "strerror", None) or error
            return NoCounts(f"does not answer: {why}", refuses=refuses)

    def _of_file(self, path: Path) -> list[str]:
        """The addresses in a file, one a line; # begins a comment."""
        key = str(path)
        try:
            lines = [line.partition("#")[0].strip() for line in read_text(path).splitlines()]
            self._known[key] = [checked(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line]
        except BadInput:
            if key not in self._known:
                raise
        return self._known[key]

    async def _of_name(self, name: str) -> list[str]:
        """The servers of `dns:NAME:PORT`: one for each of its addresses."""
        host, _, port = name.removeprefix(DNS).rpartition(":")
        try:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            four = sorted({at[0] for family, *_, at in found if family == socket.AF_INET})
            six = sorted({f"[{at[0]}]" for family, *_, at in found if family == socket.AF_INET6})
            self._known[name] = [f"{at}:{port}" for at in four or six]
        except OSError as error:
            if name not in self._known:
                raise BadInput(f"{name}: the name cannot be resolved: {error.strerror}") from None
            if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
                self._known[name] = []
        return self._known[name]


class TypedServers:
    """The servers of several worker types as one fleet; each page has the place of its type."""

    def __init__(self, of_types: Sequence[MetricsSource]) -> None:
        self._of_types = of_types
        self.discovered: frozenset[str] = frozenset()

    async def pages(self, at_s: float) -> dict[str, Page]:
        """What each server says now. One that is listed for two types is not counted."""
        pages: dict[str, Page] = {}
        of_types = await asyncio.gather(*(source.pages(at_s) for source in self._of_types))
        self.discovered = frozenset().union(*(source.discovered for source in self._of_types))
        for kind, found in enumerate(of_types):
            for server, page in found.items():
                is_new = server not in pages
                pages[server] = replace(page, kind=kind) if is_new else NoCounts(TWICE, answers=True)
        return pages


def checked(address: str, where: str = "advise") -> str:
    """An address as it was given. Raises BadInput for none."""
    try:
        parts = urlsplit(url_of(address.removeprefix(DNS)))
        is_one = bool(parts.hostname) and (parts.port is not None or not address.startswith(DNS))
    except ValueError:
        is_one = False
    if not is_one or any(c.isspace() for c in address):
        raise BadInput(f"{where}: {address!r}: expected HOST:PORT, http://HOST:PORT or dns:NAME:PORT")
    return address


def url_of(server: str) -> str:
    """The address of a server's metrics page. Raises ValueError for another scheme."""
    url = server if "://" in server else f"http://{server}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{server}: no http address")
    return f"{url}/metrics" if url.count("/") == 2 else url


async def _text(reply: aiohttp.ClientResponse) -> str:
    """A page, or as much of it as anybody needs."""
    pieces, size = [], 0
    async for piece in reply.content.iter_chunked(1 << 16):
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            break
    return b"".join(pieces).decode("utf-8", "replace")
