"""The servers of a fleet as a Prometheus server has them: vLLM's metrics by instant queries.

Three queries make a look: the metrics of all servers, when each server's were scraped, and which targets
cannot be scraped. Counters are read as they are, so a restart or a gap shows as it does on a server's own
page. Absence is never idleness:

* a target that Prometheus cannot scrape, or whose last sample is older than LAG_S, gives no counts
* without an answer from Prometheus, no server does

API: https://prometheus.io/docs/prometheus/latest/querying/api/
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import aiohttp

from controlplane.errors import BadInput
from tokenfleet.advise.bearer import Bearer
from tokenfleet.advise.look import NoCounts, Page
from tokenfleet.advise.servers import TIMEOUT_S
from tokenfleet.profiles.engine_metrics import READ, engine_counts
from tokenfleet.traces.prometheus import matchers_of, results_of

LAG_S = 75.0  # of a server's last sample; longer than any usual scrape interval
EVERY_S = 15.0
RUNNING = "vllm:num_requests_running"
Series = list[tuple[dict[str, str], float]]


class PrometheusServers:
    """The servers whose metrics a selector matches, and a session to ask Prometheus by."""

    def __init__(self, url: str, selector: str = "{}", bearer: Bearer | None = None) -> None:
        self._matchers, self._bearer = matchers_of(url, selector), bearer or Bearer()
        self._url, self._selector = url.rstrip("/"), selector.strip()
        self._known: set[str] = set()
        self._session: aiohttp.ClientSession | None = None
        self.discovered: frozenset[str] = frozenset()

    async def __aenter__(self) -> PrometheusServers:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def pages(self, at_s: float) -> dict[str, Page]:
        """What each server showed when it was last scraped."""
        named = f'__name__=~"vllm:({"|".join(READ)})"'
        try:
            series = await self._asked(f"{{{named},{self._matchers}}}")
            ages = await self._asked(f"time() - timestamp({RUNNING}{{{self._matchers}}})")
            down = await self._asked("up == 0")
        except BadInput as error:
            if not self._known:
                raise BadInput(f"--prometheus: {self._url}: {error}") from None
            return {server: NoCounts(f"Prometheus {error}") for server in self._known}
        if not series and not self._known:
            raise BadInput(f"--selector: no metric of vLLM matches {self._selector} at {self._url}")
        age_s: defaultdict[str, list[float]] = defaultdict(list)
        for labels, value in ages:
            age_s[_server(labels)].append(value)
        lines: defaultdict[str, list[str]] = defaultdict(list)
        for labels, value in series:
            lines[_server(labels)].append(_line(labels, value))
        pages = {server: _page(server, lines[server], age_s[server], at_s) for server in lines}
        for labels, _ in down:
            if (server := _server(labels)) in self._known:
                pages[server] = NoCounts("Prometheus cannot scrape it")
        self._known = set(pages)
        return pages

    async def _asked(self, query: str) -> Series:
        """The series of an instant query. Raises BadInput."""
        assert self._session is not None
        url = f"{self._url}/api/v1/query"
        try:
            async with self._session.post(
                url, data={"query": query}, headers=self._bearer.headers()
            ) as reply:
                return [(labels, values[0][1]) for labels, values in results_of(await reply.read())]
        except TimeoutError:
            raise BadInput(f"does not answer within {TIMEOUT_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BadInput(f"does not answer: {getattr(error, 'strerror', None) or error}") from None


def _server(labels: dict[str, str]) -> str:
    """The server that a series is of: its target's address, or its pod."""
    return labels.get("instance") or labels.get("pod") or "a server without the label instance"


def _line(labels: dict[str, Any], value: float) -> str:
    """A series as a line of a metrics page."""
    quoted = ",".join(
        f'{name}="{_escaped(text)}"'
        for name, text in labels.items()
        if name not in ("__name__", "worker")  # of a gateway alone; as a target's label it is another thing
    )
    return f"{labels['__name__']}{{{quoted}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _page(server: str, lines: list[str], ages_s: list[float], at_s: float) -> Page:
    """A server's counts, or why there are none."""
    if not ages_s:
        return NoCounts(f"{RUNNING} is missing", answers=True)
    if len(ages_s) > 1:
        why = f"{len(ages_s)} engines or copies match; a replica is counted as one, narrow --selector"
        return NoCounts(why, answers=True)
    if ages_s[0] > LAG_S:
        return NoCounts(f"Prometheus' last sample of it is {ages_s[0]:.0f} s old")
    try:
        return next(iter(engine_counts("\n".join(lines), at_s - max(ages_s[0], 0.0), server).values()))
    except BadInput as error:
        return NoCounts(str(error).removeprefix(f"{server}: "), answers=True)
