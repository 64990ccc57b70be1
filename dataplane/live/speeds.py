"""What workers of each kind can do: as their profiles say, or as their last steps show."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controlplane.perfmodel.samples import StepSamples
from controlplane.scaler.line import Speed
from controlplane.scaler.seen_speed import speed_seen

REMEMBERED_STEPS = 600
REFIT_EVERY = 40

Row = Mapping[str, Any]


@dataclass(slots=True)
class Steps:
    """A kind's last steps (prefill tokens, sequences, context tokens, seconds), and those not fitted yet."""

    last: deque[tuple[float, float, float, float]] = field(
        default_factory=lambda: deque(maxlen=REMEMBERED_STEPS)
    )
    new: int = 0


class Speeds:
    """Speeds by kind. `given` ones stay as they are."""

    def __init__(self, given: Mapping[str, Speed]) -> None:
        self._given = dict(given)
        self._learnt: dict[str, Speed] = {}
        self._steps: defaultdict[str, Steps] = defaultdict(Steps)
        self._last_step: dict[str, int] = {}

    def of(self, kind: str) -> Speed | None:
        """A worker's speed, as given or as seen."""
        return self._given.get(kind) or self._learnt.get(kind)

    def any(self) -> Speed | None:
        """Of a kind whose speed is known."""
        return next(iter((self._given | self._learnt).values()), None)

    def learn(self, workers: Sequence[Row]) -> None:
        """Take in the workers' last steps, as GET /v1/fleet tells them; refit now and then."""
        for w in workers:
            load, kind = w.get("telemetry"), w["kind"]
            if kind in self._given or not load or self._last_step.get(w["worker"]) == load["steps"]:
                continue
            self._last_step[w["worker"]] = load["steps"]
            if load["step_s"] > 0 and (load["prefill_tokens"] or load["sequences"]):
                steps = self._steps[kind]
                steps.last.append(
                    (load["prefill_tokens"], load["sequences"], load["context_tokens"], load["step_s"])
                )
                steps.new += 1
        for kind, steps in self._steps.items():
            if steps.new >= REFIT_EVERY:
                steps.new = 0
                self._refit(kind, [w for w in workers if w["kind"] == kind and w.get("kv_blocks")])

    def _refit(self, kind: str, known: Sequence[Row]) -> None:
        capacity = min((int(w["kv_blocks"]) * int(w["block_tokens"]) for w in known), default=0)
        seats = min((int(w["max_seqs"]) for w in known), default=0)
        columns = np.array(self._steps[kind].last, float).T
        seen = speed_seen(StepSamples(*columns), capacity, seats)
        if seen is not None:
            self._learnt[kind] = seen
