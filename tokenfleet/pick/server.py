"""The picker's gRPC port, with Envoy's external processor and gRPC's health check, and its /metrics."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.errors import BadInput
from tokenfleet.pick import messages as wire
from tokenfleet.pick.asked import PickTargets
from tokenfleet.pick.exchange import Exchange
from tokenfleet.pick.fleet import PREFIX, PickedFleet
from tokenfleet.pick.frames import Handler, Send
from tokenfleet.pick.http2 import Connection
from tokenfleet.pick.unseen import Unseen

SERVING, NOT_SERVING = 1, 2
CLOSING_S = 1.0


class PickerPort:
    """What the port serves: calls by their paths."""

    def __init__(self, fleet: PickedFleet, targets: PickTargets) -> None:
        self._fleet, self._targets = fleet, targets
        self._connections: set[Connection] = set()

    def handler(self, path: str, send: Send) -> Handler | None:
        """The handler of a call; None for a path that is not served."""
        if path == wire.PROCESS:
            return Exchange(self._fleet, self._targets, send)
        return _Health(self._fleet, send) if path == wire.CHECK else None

    def connection(self) -> Connection:
        """The protocol of one connection."""
        return Connection(self.handler, self._connections.add, self._connections.discard)

    async def close(self) -> None:
        """Say goodbye to all gateways, and wait until their connections have closed."""
        for one in list(self._connections):
            one.end()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                while self._connections:
                    await asyncio.sleep(0.01)


class _Health:
    """A health check: serving while there is a server to choose."""

    def __init__(self, fleet: PickedFleet, send: Send) -> None:
        self._fleet, self._send = fleet, send

    def receive(self, data: bytes) -> None:
        wire.parsed("HealthCheckRequest", data)
        status = SERVING if self._fleet.servers else NOT_SERVING
        self._send(wire.wire().HealthCheckResponse(status=status).SerializeToString())

    def closed(self) -> None: ...


@asynccontextmanager
async def serving(
    port: PickerPort, listening: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Serve the port meanwhile. Raises BadInput without protobuf."""
    try:
        import_module("google.protobuf")
    except ImportError:
        raise BadInput("pick: needs protobuf, which vLLM brings; `pip install protobuf`") from None
    wire.wire()
    server = await asyncio.get_running_loop().create_server(port.connection, sock=listening, ssl=tls)
    try:
        yield
    finally:
        server.close()
        await port.close()


def for_gateways(context: ssl.SSLContext, authority: Path | None) -> ssl.SSLContext:
    """TLS for HTTP/2; with an authority, only for clients that it has signed. Raises BadInput."""
    context.set_alpn_protocols(["h2"])
    if authority is None:
        return context
    try:
        context.load_verify_locations(authority)
    except OSError as error:  # ssl's errors are, too
        why = "holds no certificate in PEM form" if isinstance(error, ssl.SSLError) else error.strerror
        raise BadInput(f"--client-ca: {authority}: {why}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class PickGauges(Collector):
    """The counters of a picker. `events`: those of its KV events, where it follows any."""

    def __init__(self, fleet: PickedFleet, unseen: Unseen, events: Counter[str] | None) -> None:
        self._fleet, self._unseen, self._events = fleet, unseen, events

    def collect(self) -> Iterator[Metric]:
        fleet, counts = self._fleet, self._fleet.counts
        for what, label, text in (
            ("picked", "server", "requests by the server chosen first"),
            ("refused", "reason", "requests that got a status instead of a server"),
            ("ended", "outcome", "requests by how they ended"),
        ):
            yield _counter(what, text, label, {of: n for (one, of), n in counts.items() if one == what})
        elsewhere = {"": counts["served_elsewhere", ""]}
        yield _counter("served_elsewhere", "requests that the gateway sent elsewhere", "", elsewhere)
        yield from fleet.times.collect()
        yield _counter("prompts", "prompts by the source of their token count", "by", fleet.lengths.counts)
        yield _counter("unseen", "requests with unseen tokens", "how", self._unseen.counts)
        if self._events is not None:
            yield _counter("kv_event_messages", "KV event messages", "how", self._events)
        running: dict[str, float] = {server: fleet.placement.load(server) for server in fleet.servers}
        yield _gauge("running", "requests that the picker counts on a server", "server", running)
        told: dict[str, float] = {s: int(fleet.placement.tells_cached(s)) for s in fleet.servers}
        yield _gauge("tells_cache", "1 if the picker follows the server's KV events", "server", told)
        yield _gauge("waiting", "requests that wait for room", "", {"": len(fleet.admission)})
        yield _gauge("bytes_per_token", "bytes a token, for estimates", "", {"": fleet.lengths.bytes_a_token})


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(PREFIX + name, text, labels=[label] if label else [])
    for of, value in sorted(values.items()):
        family.add_metric([of] if of else [], value)
    return family


_counter, _gauge = partial(_family, CounterMetricFamily), partial(_family, GaugeMetricFamily)
