"""The advice as Prometheus gauges: what KEDA's `prometheus` trigger asks for, and what a dashboard shows."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenfleet.advise.advice import Advice

WANTED = "tokenfleet_wanted_replicas"
LABELS = ("model", "worker_type")  # of a model served by two types each has its own advice


class AdviceGauges(Collector):
    """The gauges of the newest advice. Those that are not known are left out: a missing gauge is no zero."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.advice: Advice | None = None

    def collect(self) -> Iterator[Metric]:
        advice = self.advice
        if advice is None:
            return
        held = int(bool(advice.held))
        wanted = GaugeMetricFamily(WANTED, "replicas that meet the targets", labels=LABELS)
        has = GaugeMetricFamily("tokenfleet_replicas", "replicas that answer now", labels=LABELS)
        kept = "1 while metrics are missing and the last advice is kept"
        holds = GaugeMetricFamily("tokenfleet_advice_held", kept, labels=LABELS)
        arrivals = CounterMetricFamily("tokenfleet_advice_arrivals", "requests that arrived", labels=LABELS)
        range_ = "bounds of the advice's 90 % interval"
        likely = GaugeMetricFamily("tokenfleet_likely_replicas", range_, labels=[*LABELS, "bound"])
        cost = GaugeMetricFamily(
            "tokenfleet_advice_usd_per_hour", "cost of the fleet and of the advice", labels=[*LABELS, "of"]
        )
        for one in advice.of_types:
            labels, each = [self.model, one.worker_type.name], one.worker_type.usd_per_h
            if one.published is not None:
                wanted.add_metric(labels, one.published)
            has.add_metric(labels, one.has)
            holds.add_metric(labels, held)
            arrivals.add_metric(labels, one.arrivals)
            for bound, value in zip(("low", "high"), one.likely or (), strict=False):
                likely.add_metric([*labels, bound], value)
            if each is not None and one.wanted is not None:
                cost.add_metric([*labels, "fleet"], one.has * each)
                cost.add_metric([*labels, "wanted"], one.wanted * each)
        yield from (family for family in (wanted, has, holds, arrivals, likely, cost) if family.samples)
