"""How far the workers' real step times are from their profile, and the profile corrected by them.

Each telemetry message carries the steps executed since the one before; `perfmodel.refit` learns from the
first of them, since long ones are likelier to be the last before a message. Placement is told when the
refitted model has moved, operators see the factors, and a sudden change is an event of the fleet's log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.refit import Drift, Refit
from controlplane.perfmodel.step import StepModel
from controlplane.types import WorkerId
from dataplane.live.events import EventLog
from dataplane.live.link import Telemetry

TELL_EVERY = 50  # steps learned from between two corrections of placement
LEAST_GAP_S = 0.005  # between two steps learned from: a step's share of the gateway's core stays below 2 %
WORKER_STEPS = 100  # memory of a worker's own factor
LAST_DRIFTS = 10
LEARNT = ("prefill_tokens", "sequences", "context_tokens", "step_s", "prefill_sum_sq")


class StepTimes(Collector):
    """The refit of the fleet's variant; all its workers are of one profile.

    `on_refit(step model)` are told of corrections; `attached` says which workers there are.
    """

    def __init__(self, profile: Profile, events: EventLog) -> None:
        self.refit = Refit(profile)
        self.on_refit: list[Callable[[StepModel], None]] = []
        self._events = events
        self.attached: Callable[[], Collection[WorkerId]] = lambda: self._factors.keys()
        self._seen: dict[WorkerId, int] = {}
        self._factors: dict[WorkerId, float] = {}
        self._learned_s = float("-inf")
        self._told = 0

    def add(self, load: Telemetry) -> None:
        """Learn from one of a worker's new steps, once."""
        new = load.since(self._seen.get(load.worker, 0))
        if new:
            load = replace(load, **{name: getattr(new[0], name) for name in LEARNT})
        computed = load.step_s > 0 and (load.prefill_tokens or load.sequences)
        if not computed or self._seen.get(load.worker) == load.steps:
            return
        self._seen[load.worker] = load.steps
        self._note(load)
        now_s = time.monotonic()
        if now_s - self._learned_s < LEAST_GAP_S:
            return
        self._learned_s = now_s
        self.learn(load)

    def learn(self, load: Telemetry) -> None:
        """Learn from this step, whatever came just before it."""
        drift = self.refit.take(
            load.prefill_tokens, load.sequences, load.context_tokens, load.step_s, load.prefill_sum_sq
        )
        if drift is not None:
            self._announce(drift)
        if drift is not None or self.refit.steps - self._told >= TELL_EVERY:
            self._told = self.refit.steps
            for tell in self.on_refit:
                tell(self.refit.model)

    def _note(self, load: Telemetry) -> None:
        """The worker's own factor on the profile, as a running geometric-like mean of clipped ratios."""
        expected_s = float(
            self.refit.profile.step.step_s(
                load.prefill_tokens, load.sequences, load.context_tokens, load.prefill_sum_sq
            )
        )
        if expected_s > 0:
            before = self._factors.get(load.worker, load.step_s / expected_s)
            ratio = min(max(load.step_s / expected_s, before / 2), before * 2)
            self._factors[load.worker] = before + (ratio - before) / WORKER_STEPS

    def _announce(self, drift: Drift) -> None:
        way = "slower" if drift.ratio > 1 else "faster"
        self._events.record(
            time.time(),
            "drift",
            f"{self._variant}: steps have become {way}, {drift.ratio:.2f} times what was predicted;"
            f" now {self.refit.slowdown:.2f} times the profile, and placement goes by that",
            variant=self._variant,
            ratio=round(drift.ratio, 4),
            slowdown=round(self.refit.slowdown, 4),
        )

    def _own_factors(self) -> dict[WorkerId, float]:
        """Of the workers there are; those that have gone are forgotten."""
        here = self.attached()
        for worker in [w for w in self._factors if w not in here]:
            del self._factors[worker], self._seen[worker]
        return self._factors

    @property
    def _variant(self) -> str:
        return str(self.refit.profile.variant)

    def as_json(self) -> dict[str, Any]:
        """Profile and reality, for `/v1/fleet`; errors are mean relative ones over the last steps."""
        refit, step = self.refit, self.refit.model
        return {
            "profile": refit.profile.label,
            "variant": self._variant,
            "steps": refit.steps,
            "slowdown": round(refit.slowdown, 4),
            "profile_error": round(refit.profile_error, 4),
            "refit_error": round(refit.error, 4),
            "drifts": [
                {"step": d.step, "since": d.since, "ratio": round(d.ratio, 4)}
                for d in refit.drifts[-LAST_DRIFTS:]
            ],
            "step": {
                "base_s": step.base_s,
                "per_prefill_token_s": step.per_prefill_token_s,
                "per_sequence_s": step.per_sequence_s,
                "per_context_token_s": step.per_context_token_s,
                "per_prefill_sum_sq_s": step.per_prefill_sum_sq_s,
                "hinges": [{"of": h.of, "from": h.start, "per_unit_s": h.per_unit_s} for h in step.hinges],
            },
            "workers": {worker: round(factor, 4) for worker, factor in self._own_factors().items()},
        }

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        refit, variant = self.refit, self._variant
        factor = GaugeMetricFamily(
            "tokenfleet_step_profile_ratio",
            "How many times as long as the profile says steps take, all in all",
            labels=["variant"],
        )
        factor.add_metric([variant], refit.slowdown)
        yield factor
        errors = GaugeMetricFamily(
            "tokenfleet_step_error_ratio",
            "Mean relative error of predicted step times over the last steps, by model: profile or refit",
            labels=["variant", "model"],
        )
        errors.add_metric([variant, "profile"], refit.profile_error)
        errors.add_metric([variant, "refit"], refit.error)
        yield errors
        drifts = CounterMetricFamily(
            "tokenfleet_step_drifts", "Sudden changes of step times that were noticed", labels=["variant"]
        )
        drifts.add_metric([variant], len(refit.drifts))
        yield drifts
        workers = GaugeMetricFamily(
            "tokenfleet_worker_step_profile_ratio",
            "How many times as long as the profile says a worker's own steps take",
            labels=["worker"],
        )
        for worker, own in self._own_factors().items():
            workers.add_metric([worker], own)
        yield workers
