"""The picker's /metrics: what it chose and how fast, and what it did not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenfleet.pick.fleet import PickedFleet
from tokenfleet.pick.unseen import Unseen

PREFIX = "tokenfleet_pick_"


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
        elsewhere = counts["served_elsewhere", ""]
        yield _counter("served_elsewhere", "requests that the gateway sent elsewhere", "", {"": elsewhere})
        times = HistogramMetricFamily(PREFIX + "decision_seconds", "time to choose a server")
        times.add_metric([], fleet.times.buckets(), fleet.times.sum_s)
        yield times
        yield _counter("prompts", "prompts by the source of their token count", "by", fleet.lengths.counts)
        yield _counter("unseen", "requests with unseen tokens", "how", self._unseen.counts)
        if self._events is not None:
            yield _counter("kv_event_messages", "KV event messages", "how", self._events)
        running: dict[str, float] = {server: fleet.placement.load(server) for server in fleet.servers}
        yield _gauge("running", "requests that the picker counts on a server", "server", running)
        told: dict[str, float] = {
            server: int(fleet.placement.tells_cached(server)) for server in fleet.servers
        }
        yield _gauge("tells_cache", "1 if the picker follows the server's KV events", "server", told)
        yield _gauge("waiting", "requests that wait for room", "", {"": len(fleet.admission)})
        yield _gauge("bytes_per_token", "bytes a token, for estimates", "", {"": fleet.lengths.bytes_a_token})


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for of, value in sorted(values.items()):
        family.add_metric([of] if label else [], value)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for of, value in sorted(values.items()):
        family.add_metric([of] if label else [], value)
    return family
