"""Prometheus metrics of the fleet: `tokenfleet_` prefix, base units, no label per request.

SLO hits are counted per request, not read from histogram buckets: a p99 against a 300 ms target cannot be
derived from buckets at 250 and 500 ms. vLLM's own `vllm:` families pass through with a `worker` label in
place of its `engine` index.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from controlplane.types import PLAIN_CLASS, WorkerId
from dataplane.live.engine_api.messages import Moment, MomentKind
from dataplane.live.gateway.timeline import Timeline
from dataplane.live.ledger.request import Tracked

LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 120,
)  # fmt: skip
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)
DOWNTIME_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
SLO_TARGETS = ("ttft", "tpot", "both")
PRIORITY_NAMES = ("normal", "high")


class Metrics:
    """The fleet's counters, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.timeline = Timeline()
        counter = functools.partial(Counter, registry=self.registry)
        gauge = functools.partial(Gauge, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        by_priority, by_worker = ["priority"], ["worker"]
        self.requests = counter(
            "tokenfleet_requests",
            "Requests by how they ended: finished, failed, aborted, rejected, rate_limited",
            ["outcome", "priority"],
        )
        by_key = "Requests by the name of the caller's API key, and how they ended"
        self.key_requests = counter("tokenfleet_key_requests", by_key, ["key", "outcome"])
        spent = "Tokens of ended requests by the name of the caller's API key: prompt, output"
        self.key_tokens = counter("tokenfleet_key_tokens", spent, ["key", "kind"])
        self.slo = counter(
            "tokenfleet_slo_requests",
            "Requests that finished, or were given up late, by whether they met a target: ttft, tpot, both",
            ["target", "met", "priority", "slo_class"],
        )
        self.ttft_s = histogram(
            "tokenfleet_time_to_first_token_seconds",
            "Arrival to first token at the gateway, queueing included",
            by_priority,
            buckets=LATENCY_BUCKETS_S,
        )
        self.tpot_s = histogram(
            "tokenfleet_time_per_output_token_seconds",
            "(finish - first token) / (output tokens - 1), one figure a request",
            by_priority,
            buckets=TPOT_BUCKETS_S,
        )
        wait = "Arrival to being placed on a worker"
        self.queue_wait_s = histogram(
            "tokenfleet_queue_wait_seconds", wait, by_priority, buckets=LATENCY_BUCKETS_S
        )
        way = "Time of a first token between gateway and engine, both ways, without queues and steps"
        self.engine_way_s = histogram("tokenfleet_engine_way_seconds", way, buckets=LATENCY_BUCKETS_S)
        beats = "Heartbeats of --policy exact by their placement: exact, or best found when time ran out"
        self.heartbeats = counter("tokenfleet_exact_heartbeats", beats, ["placed_by"])
        self.tokens = counter("tokenfleet_output_tokens", "Tokens passed to clients")
        self.waiting = gauge("tokenfleet_queue_requests", "Requests that wait for a worker")
        self.workers = gauge("tokenfleet_workers", "Workers by state", ["state"])
        self.running = gauge("tokenfleet_worker_requests", "Requests on a worker", by_worker)
        context = "Context tokens of the worker's decoding requests"
        self.context = gauge("tokenfleet_worker_context_tokens", context, by_worker)
        self.kv_used = gauge("tokenfleet_worker_kv_used_ratio", "Share of KV blocks in use", by_worker)
        self.step_s = gauge("tokenfleet_worker_step_seconds", "Duration of the worker's last step", by_worker)
        started = "Preemptions since the worker started"
        self.preemptions = gauge("tokenfleet_worker_preemptions", started, by_worker)
        self.prefix_tokens = gauge(
            "tokenfleet_worker_prefix_tokens",
            "Prompt tokens since the worker started, by placement policy: queried, hit (cached), loaded (hits"
            " from CPU memory), expected (predicted hits), off, ideal. Off sums how far each request's hits"
            " were from the expected ones. Ideal is what an unlimited cache shared by all workers would hit.",
            ["worker", "what", "policy"],
        )
        self.migrations = counter("tokenfleet_migrations", "Moves of a request by outcome", ["outcome"])
        downtime = "Pause of a moved request: from the switch to the first token of its new worker"
        self.downtime_s = histogram(
            "tokenfleet_migration_downtime_seconds", downtime, buckets=DOWNTIME_BUCKETS_S
        )
        handed = "KV transfers to decode workers: done, failed (and retried), stayed on the prefill worker"
        self.handovers = counter("tokenfleet_handovers", handed, ["outcome"])
        pending = "Requests that wait for their KV transfer from a prefill worker"
        self.handovers_open = gauge("tokenfleet_handovers_open", pending)
        self.moved_bytes = counter("tokenfleet_migration_bytes", "KV bytes copied by moves")
        self.replays = counter(
            "tokenfleet_replays",
            "Requests computed again from prompt and tokens, since a worker was lost or refused them",
        )
        self.rollouts = counter(
            "tokenfleet_rollouts",
            "Updates and restarts by how they ended: done, rolled-back, failed",
            ["outcome"],
        )
        self.evacuations = counter(
            "tokenfleet_evacuations", "Evacuated workers, by their deadline: met, late", ["deadline"]
        )
        self.evacuated = counter(
            "tokenfleet_evacuated_requests",
            "Requests of evacuated workers by how they left: moved, replayed, ended, failed",
            ["how"],
        )
        self.lost_workers = counter("tokenfleet_workers_lost", "Workers that were lost or did not start")

    def see(self, request: Tracked, event: Moment) -> None:
        """Take in what an engine did with a request, at a time of the gateway's clock."""
        if event.type == MomentKind.QUEUED and request.stays == 1 and request.begun_s is not None:
            self.engine_way_s.observe(event.timestamp - request.begun_s)

    def count_end(self, request: Tracked, outcome: str) -> None:
        """Count a request that is over; one that finished, or was given up late, also against its SLO."""
        priority, key = PRIORITY_NAMES[request.ticket.priority], request.ticket.key
        self.requests.labels(outcome, priority).inc()
        self.key_requests.labels(key, outcome).inc()
        self.key_tokens.labels(key, "prompt").inc(0 if outcome == "rejected" else request.prompt_tokens)
        self.key_tokens.labels(key, "output").inc(len(request.output_token_ids))
        now_s = time.monotonic()
        if not request.is_judged(outcome, now_s):
            self.timeline.add_unfinished(outcome, now_s)
            return
        slo_class = request.ticket.slo_class or PLAIN_CLASS
        ttft_met, tpot_met = request.slo_met()
        targets_met = (ttft_met, tpot_met, ttft_met and tpot_met)
        for target, met in zip(SLO_TARGETS, targets_met, strict=True):
            self.slo.labels(target, "true" if met else "false", priority, slo_class).inc()
        if outcome == "aborted":
            self.timeline.add_judged(outcome, request.waited_s(now_s), None, targets_met, now_s)
            return
        ttft_s, tpot_s = request.ttft_s(), request.tpot_s()
        self.timeline.add_judged(outcome, ttft_s, tpot_s, targets_met, now_s)
        if ttft_s is not None:
            self.ttft_s.labels(priority).observe(ttft_s)
        if tpot_s is not None:
            self.tpot_s.labels(priority).observe(tpot_s)

    def attainment(self) -> dict[str, dict[str, int]]:
        """{target: {"met", "of"}} of requests since the fleet began; targets ttft, tpot and both.

        Those that finished, and those that their clients gave up beyond a target.
        """
        return {target: self._met(target=target) for target in SLO_TARGETS}

    def attainment_of(self, slo_class: str) -> dict[str, int]:
        """{"met", "of"} of the finished requests of a class since the fleet began."""
        return self._met(target="both", slo_class=slo_class)

    def _met(self, **labels: str) -> dict[str, int]:
        counts = {"met": 0, "of": 0}
        for sample in next(iter(self.slo.collect())).samples:
            if sample.name.endswith("_total") and labels.items() <= sample.labels.items():
                counts["of"] += int(sample.value)
                counts["met"] += int(sample.value) if sample.labels["met"] == "true" else 0
        return counts

    def count_limited(self, key: str) -> None:
        """Count a request that its key's limits turned away."""
        self.requests.labels("rate_limited", "any").inc()
        self.key_requests.labels(key, "rate_limited").inc()
        self.timeline.add_unfinished("rate_limited", time.monotonic())

    def count_tokens(self, tokens: int) -> None:
        """Count output tokens that are passed to clients."""
        self.tokens.inc(tokens)
        self.timeline.add_tokens(tokens, time.monotonic())

    def count_move(self, outcome: str, moved_bytes: int, downtime_s: float | None) -> None:
        """Count a move that is over."""
        self.migrations.labels(outcome).inc()
        self.moved_bytes.inc(moved_bytes)
        if downtime_s is not None:
            self.downtime_s.observe(downtime_s)

    def count_evacuation(self, in_time: bool, counts: Mapping[str, float]) -> None:
        """Count a worker that was evacuated, and its requests by how they left."""
        self.evacuations.labels("met" if in_time else "late").inc()
        for how in ("moved", "replayed", "ended", "failed"):
            self.evacuated.labels(how).inc(counts[how])

    def forget_worker(self, worker: WorkerId) -> None:
        """Drop the gauges of a worker that is gone."""
        for gauge in (self.running, self.context, self.kv_used, self.step_s, self.preemptions):
            if (worker,) in gauge._metrics:
                gauge.remove(worker)
        self.prefix_tokens.remove_by_labels({"worker": worker})

    def exposition(self) -> bytes:
        """Everything registered, in Prometheus' text format."""
        return generate_latest(self.registry)


class EngineFamilies(Collector):
    """vLLM's `vllm:` families from a registry, `engine` index replaced by `worker` name.

    Indices without a worker (unused slots, workers gone) are left out.
    """

    def __init__(
        self,
        workers_by_slot: Callable[[], Mapping[str, WorkerId]],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._workers_by_slot, self._registry = workers_by_slot, registry

    def collect(self) -> Iterable[Metric]:
        workers = self._workers_by_slot()
        for family in self._registry.collect():
            if not family.name.startswith("vllm:"):
                continue
            renamed = Metric(family.name, family.documentation, family.type, family.unit)
            for sample in family.samples:
                labels = dict(sample.labels)
                slot = labels.pop("engine", None)
                if slot is not None:
                    if slot not in workers:
                        continue
                    labels["worker"] = workers[slot]
                renamed.samples.append(sample._replace(labels=labels))
            if renamed.samples:
                yield renamed
