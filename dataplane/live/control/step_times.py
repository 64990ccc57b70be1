"""Step times of the workers against their profile, and the profile corrected by them.

Each telemetry message carries the steps executed since the one before. `perfmodel.refit` learns from the
first of them, since long ones are likelier to be the last before a message. Placement is notified when
the refitted model has moved. Operators see the factors. A sudden change is an event of the fleet's log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.refit import Refit, StepTimeChange
from controlplane.perfmodel.step import StepModel, coefficients
from controlplane.types import WorkerId
from dataplane.live.engine_api.link import Step, Telemetry
from dataplane.live.gateway.events import EventLog

TELL_EVERY = 50  # steps learned from between two corrections of placement
TURN_S = 0.05  # between two steps learned from, as often as a lone worker tells of them
FORGET_EVERY = 256  # turns after which workers that have gone are looked for
BELIEVED_STEPS = 200  # before the controller uses a refit
WORKER_STEPS = 100  # memory of a worker's own factor
LAST_DRIFTS = 10


class KindTimes:
    """The refit of one worker type, whose profile is in force `since_s` (Unix time); `tell` corrections."""

    def __init__(self, profile: Profile, events: EventLog, tell: Callable[[StepModel], None]) -> None:
        self.refit = Refit(profile)
        self.since_s = time.time()
        self.variant = profile.type_name
        self._events, self._tell = events, tell
        self._factors: dict[WorkerId, float] = {}
        self._reported = 0

    def take(self, worker: WorkerId, step: Step) -> float:
        """Note the step as its worker's and learn from it; seconds until it is that worker's turn again."""
        self._note(worker, step)
        self.learn(step)
        return TURN_S * len(self._factors)

    def learn(self, step: Step) -> None:
        """Learn from this step, whatever came just before it."""
        drift = self.refit.take(
            step.prefill_tokens, step.sequences, step.context_tokens, step.step_s, step.prefill_sum_sq
        )
        if drift is not None:
            self._announce(drift)
        if drift is not None or self.refit.steps - self._reported >= TELL_EVERY:
            self._reported = self.refit.steps
            self._tell(self.refit.model)

    def own_factors(self, here: Collection[WorkerId]) -> dict[WorkerId, float]:
        """Each worker's own factor on the profile; those that are not `here` any more are forgotten."""
        self._factors = {worker: own for worker, own in self._factors.items() if worker in here}
        return self._factors

    def _note(self, worker: WorkerId, step: Step) -> None:
        """The worker's own factor on the profile, as a running geometric-like mean of clipped ratios."""
        expected_s = float(
            self.refit.profile.step.step_s(
                step.prefill_tokens, step.sequences, step.context_tokens, step.prefill_sum_sq
            )
        )
        if expected_s > 0:
            before = self._factors.get(worker, step.step_s / expected_s)
            ratio = min(max(step.step_s / expected_s, before / 2), before * 2)
            self._factors[worker] = before + (ratio - before) / WORKER_STEPS

    def _announce(self, drift: StepTimeChange) -> None:
        way = "slower" if drift.ratio > 1 else "faster"
        self._events.record(
            time.time(),
            "drift",
            f"{self.variant}: steps have become {way}, {drift.ratio:.2f} times what was predicted;"
            f" placement now uses {self.refit.slowdown:.2f} times the profile",
            variant=self.variant,
            ratio=round(drift.ratio, 4),
            slowdown=round(self.refit.slowdown, 4),
        )

    def step_as_json(self) -> dict[str, Any]:
        """The refitted step model."""
        step = self.refit.model
        hinges = [{"of": h.of, "from": h.start, "per_unit_s": h.per_unit_s} for h in step.hinges]
        return {**coefficients(step), "hinges": hinges}

    def as_json(self, here: Collection[WorkerId]) -> dict[str, Any]:
        """Profile and reality, for `/v1/fleet`; errors are mean relative ones over the last steps."""
        refit = self.refit
        return {
            "profile": refit.profile.label,
            "source": refit.profile.source.what,
            "since_s": round(self.since_s, 3),
            "variant": self.variant,
            "steps": refit.steps,
            "slowdown": round(refit.slowdown, 4),
            "profile_error": round(refit.profile_error, 4),
            "refit_error": round(refit.error, 4),
            "drifts": [
                {"step": d.step, "since": d.since, "ratio": round(d.ratio, 4)}
                for d in refit.drifts[-LAST_DRIFTS:]
            ],
            "step": self.step_as_json(),
            "workers": {worker: round(factor, 4) for worker, factor in self.own_factors(here).items()},
        }


class StepTimes(Collector):
    """The refits of those kinds of a fleet whose profile is known, by name.

    A profile that counts drafts is of tokens, but engines report steps: it is not refitted.

    `attached`: the workers there are, `kind_of`: their kind. Workers of a kind take turns, so each is heard
    as often as the others. A large fleet learns as fast as a small one, for the same time of the gateway's.
    `on_refit(kind, step model)` are called on corrections.
    """

    def __init__(
        self, profiles: Mapping[str, Profile], events: EventLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events = events
        self.kinds: dict[str, KindTimes] = {}
        self.on_refit: list[Callable[[str, StepModel], None]] = []
        for kind, profile in profiles.items():
            if profile.speculation is None:
                self.know(kind, profile)
        self.attached: Callable[[], Collection[WorkerId]] = lambda: tuple(self._steps_taken)
        self.kind_of: Callable[[WorkerId], str | None] = lambda worker: next(iter(profiles))
        self._steps_taken: dict[WorkerId, int] = {}
        self._clock = clock
        self._turn_s: dict[WorkerId, float] = {}  # when it is each worker's turn again
        self._turns = 0

    def know(self, kind: str, profile: Profile) -> None:
        """Refit this profile from now on."""
        self.kinds[kind] = KindTimes(profile, self._events, partial(self._refitted, kind))

    def _refitted(self, kind: str, step: StepModel) -> None:
        for tell in self.on_refit:
            tell(kind, step)

    def forget(self, kind: str) -> None:
        """There are no workers of a kind any more."""
        self.kinds.pop(kind, None)

    def pass_over(self, worker: WorkerId, steps: int) -> None:
        """Learn nothing from a worker's first steps: they were its measurement."""
        self._steps_taken[worker] = steps

    def add(self, load: Telemetry) -> None:
        """Learn from one of a worker's new steps, once, where it is its turn."""
        now_s = self._clock()
        if now_s < self._turn_s.get(load.worker, now_s):
            return
        kind = self.kind_of(load.worker)
        if kind is None or kind not in self.kinds:
            return
        new = load.since(self._steps_taken.get(load.worker, 0))
        if not new or new[0].step_s <= 0 or not (new[0].prefill_tokens or new[0].sequences):
            return
        self._steps_taken[load.worker] = load.steps
        self._turn_s[load.worker] = now_s + self.kinds[kind].take(load.worker, new[0])
        self._turns += 1
        if self._turns % FORGET_EVERY == 0:
            here = self._here()
            for times in self.kinds.values():
                times.own_factors(here)

    def as_json(self) -> list[dict[str, Any]]:
        """One view for each kind."""
        here = self._here()
        return [times.as_json(here) for times in self.kinds.values()]

    def profiles(self) -> dict[str, Profile]:
        """The profile of each kind, as given or measured."""
        return {kind: times.refit.profile for kind, times in self.kinds.items()}

    def believed(self) -> dict[str, StepModel]:
        """The refitted step times of each worker type with enough steps."""
        return {
            k: times.refit.model for k, times in self.kinds.items() if times.refit.steps >= BELIEVED_STEPS
        }

    def _here(self) -> Collection[WorkerId]:
        """The workers there are; what is known of those that have gone is forgotten."""
        here = self.attached()
        self._steps_taken = {worker: steps for worker, steps in self._steps_taken.items() if worker in here}
        self._turn_s = {worker: turn_s for worker, turn_s in self._turn_s.items() if worker in here}
        return here

    def collect(self) -> Iterable[Metric]:
        here = self._here()
        factor = GaugeMetricFamily(
            "tokenfleet_step_profile_ratio",
            "Time of all workers' steps over the profile's",
            labels=["variant"],
        )
        errors = GaugeMetricFamily(
            "tokenfleet_step_error_ratio",
            "Mean relative error of predicted step times over the last steps, by model: profile or refit",
            labels=["variant", "model"],
        )
        drifts = CounterMetricFamily(
            "tokenfleet_step_drifts", "Sudden changes of step times", labels=["variant"]
        )
        workers = GaugeMetricFamily(
            "tokenfleet_worker_step_profile_ratio",
            "Time of a worker's own steps over the profile's",
            labels=["worker"],
        )
        for times in self.kinds.values():
            factor.add_metric([times.variant], times.refit.slowdown)
            errors.add_metric([times.variant, "profile"], times.refit.profile_error)
            errors.add_metric([times.variant, "refit"], times.refit.error)
            drifts.add_metric([times.variant], len(times.refit.drifts))
            for worker, own in times.own_factors(here).items():
                workers.add_metric([worker], own)
        return factor, errors, drifts, workers
