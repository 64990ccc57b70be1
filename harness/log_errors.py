"""Errors of a replayed log of requests, against the measured one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane.simulated.outcome import Outcome
from tokenfleet.profiles.measurements import RequestLog


@dataclass(frozen=True, slots=True)
class LogErrors:
    """The errors of a simulated log, as fractions of the real figures."""

    e2e_mape: float
    tpot_mape: float
    ttft_mean: float
    ttft_p99: float
    requests: int


def log_errors(log: RequestLog, outcome: Outcome, rows: NDArray[np.bool_]) -> LogErrors:
    """Errors over the requests marked in `rows`, shape [requests]."""
    e2e = outcome.finish_s - log.workload.arrival_s
    many = rows & (log.workload.output_tokens > 1)
    ttft, real = outcome.ttft_s[rows], log.ttft_s[rows]
    return LogErrors(
        e2e_mape=float(np.mean(np.abs(e2e[rows] / log.e2e_s[rows] - 1))),
        tpot_mape=float(np.mean(np.abs(outcome.tpot_s[many] / log.tpot_s[many] - 1))),
        ttft_mean=float(ttft.mean() / real.mean() - 1),
        ttft_p99=float(np.quantile(ttft, 0.99) / np.quantile(real, 0.99) - 1),
        requests=int(rows.sum()),
    )
