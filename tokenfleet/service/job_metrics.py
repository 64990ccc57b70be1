"""Plan jobs as Prometheus metrics, counted in the database when asked."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenfleet.service.jobs import Jobs

STATES = ("queued", "running", "done", "failed", "cancelled")


class JobCollector(Collector):
    """`tokenfleet_plan_jobs{state}`."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def describe(self) -> Iterable[Metric]:
        return (_family(),)

    def collect(self) -> Iterable[Metric]:
        family, counts = _family(), self._jobs.counts()
        for state in STATES:
            family.add_metric([state], counts.get(state, 0))
        yield family


def _family() -> GaugeMetricFamily:
    return GaugeMetricFamily("tokenfleet_plan_jobs", "Plan jobs that are kept, by state", labels=["state"])
