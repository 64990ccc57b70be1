"""The advice as Prometheus gauges: what KEDA's `prometheus` trigger asks for, and what a dashboard shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenfleet.advise.advice import Advice, AdviceSettings

WANTED = "tokenfleet_wanted_replicas"
LABELS = ("model", "worker_type")  # of a model served by two types each has its own advice


class AdviceGauges(Collector):
    """The gauges of the newest advice. Those that are not known are left out: a missing gauge is no zero."""

    def __init__(self, model: str, settings: AdviceSettings) -> None:
        self.model, self._settings = model, settings
        self.advice: Advice | None = None

    def collect(self) -> Iterator[Metric]:
        advice = self.advice
        if advice is None:
            return
        if advice.published is not None:
            yield self._gauge(WANTED, "replicas that meet the targets", advice.published)
        yield self._gauge("tokenfleet_replicas", "replicas that answer", advice.has)
        yield self._gauge("tokenfleet_advice_held", "1 while metrics are missing", int(bool(advice.held)))
        arrivals = CounterMetricFamily("tokenfleet_advice_arrivals", "requests that arrived", labels=LABELS)
        arrivals.add_metric([self.model, self._settings.worker_type.name], advice.arrivals)
        yield arrivals
        if advice.likely is not None:
            bounds = dict(zip(("low", "high"), advice.likely, strict=True))
            yield self._family("tokenfleet_likely_replicas", "90 % interval", "bound", bounds)
        each = self._settings.worker_type.usd_per_h
        if each is not None and advice.wanted is not None:
            costs = {"fleet": advice.has * each, "wanted": advice.wanted * each}
            yield self._family("tokenfleet_advice_usd_per_hour", "cost of the replicas", "of", costs)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric([self.model, self._settings.worker_type.name], value)
        return family

    def _family(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*LABELS, label])
        for said, value in values.items():
            family.add_metric([self.model, self._settings.worker_type.name, said], value)
        return family
