"""What became of each request of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.workload import Workload


@dataclass(frozen=True)
class Outcome:
    """What became of each request; columns of shape [requests], absolute seconds, NaN = did not happen."""

    workload: Workload
    ttft_target_s: NDArray[np.float64]
    tpot_target_s: NDArray[np.float64]
    worker: NDArray[np.int64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    preemptions: NDArray[np.int64]
    migrations: NDArray[np.int64]
    busy_s: NDArray[np.float64]  # [workers]
    end_s: float  # when the last thing happened
    complete: bool  # False when the run was stopped early, see `max_misses`
    misses: int = 0  # finished outside their targets

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        return self.first_token_s - self.workload.arrival_s

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """NaN for an output of one token, which has no gaps."""
        gaps = self.workload.output_tokens - 1
        return np.where(gaps > 0, (self.finish_s - self.first_token_s) / np.maximum(gaps, 1), np.nan)

    @property
    def met(self) -> NDArray[np.bool_]:
        """Whether each request finished within both its targets."""
        slow = self.tpot_s > self.tpot_target_s  # NaN compares false: judged by TTFT alone
        return np.asarray(~np.isnan(self.finish_s) & (self.ttft_s <= self.ttft_target_s) & ~slow)

    @property
    def attainment(self) -> float:
        """Share of requests within both targets; 1 for none at all."""
        return float(self.met.mean()) if len(self.workload) else 1.0

    @property
    def utilisation(self) -> float:
        """Share of worker time spent in steps."""
        return float(self.busy_s.sum() / (len(self.busy_s) * self.end_s)) if self.end_s > 0 else 0.0
