"""The question a plan answers: the target, its confidence, and the limits of the fleet."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.types import Slo
from controlplane.worker_type import WorkerType


@dataclass(frozen=True, slots=True)
class Question:
    """A target: `attainment` of requests within `slo`, to be held with probability `confidence`."""

    slo: Slo
    attainment: float = 0.99
    confidence: float = 0.95
    policy: str = "spread"
    seed: int = 0
    max_gpus: int | None = None
    budget_usd_per_h: float | None = None
    cold_start_s: float | None = None  # None: starts are left out of the schedule
    reclaims_per_h: float | None = None  # of one spot worker; None: none are kept for reclaimed ones
    drifts: bool = False  # whether the traffic's level may become another, as drift.py has it

    def __post_init__(self) -> None:
        if not 0.0 < self.attainment < 1.0:
            # 100 % is ill-defined: a two-token output behind one prefill misses any TPOT.
            raise BadInput(f"--attainment: must be above 0 and below 1, got {self.attainment:g}")
        if not 0.5 <= self.confidence < 1.0:
            raise BadInput(f"--confidence: must be at least 0.5 and below 1, got {self.confidence:g}")
        if self.max_gpus is not None and self.max_gpus < 1:
            raise BadInput(f"--max-gpus: must be at least 1, got {self.max_gpus}")
        if self.budget_usd_per_h is not None and not self.budget_usd_per_h > 0:
            raise BadInput(f"--budget-usd-per-h: must be positive, got {self.budget_usd_per_h:g}")
        if self.cold_start_s is not None and not 0 <= self.cold_start_s < math.inf:
            raise BadInput(f"--cold-start: must be a duration, got {self.cold_start_s:g} s")
        if self.reclaims_per_h is not None:
            if not 0 <= self.reclaims_per_h < math.inf:
                raise BadInput(f"--reclaims-per-h: must not be negative, got {self.reclaims_per_h:g}")
            if self.cold_start_s is None:
                raise BadInput("--reclaims-per-h: needs --cold-start, how long a replacement takes")
        if self.seed < 0:
            raise BadInput(f"--seed: must not be negative, got {self.seed}")

    def most_workers(self, worker_type: WorkerType) -> int | None:
        """The most workers of one type that the limits allow; None without a limit."""
        caps = []
        if self.max_gpus is not None:
            caps.append(self.max_gpus // worker_type.gpus)
        if self.budget_usd_per_h is not None and worker_type.usd_per_h:
            # A hair of tolerance: 3 x 1.2 is 3.5999999999999996.
            caps.append(int(self.budget_usd_per_h / worker_type.usd_per_h + 1e-9))
        return min(caps, default=None)
