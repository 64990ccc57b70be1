"""The phases of a trace: stretches of time with one request rate each, between change points.

Change points are found as the autoscaler finds them (`controlplane.scaler.traffic`), in all of the trace at
once. Counts are in bins of `BIN_S`, wider in a long trace and in one of few requests. A phase lasts at least
`LEAST_S`, less in a trace below 40 minutes and more in one above 4 hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from controlplane.scaler.traffic import change_points
from controlplane.workload import INSTANT_S, Workload

BIN_S = 10.0
LEAST_S = 150.0
OF_SHORT, OF_LONG = 1 / 16, 1 / 96  # of the trace: the least of a phase at most, and at least
BINS = 15  # of the shortest phase
IN_BIN = 10.0  # requests on average: fewer show no change


@dataclass(frozen=True, slots=True)
class Phase:
    """Time with one request rate; `prompt_tokens` and `output_tokens` are means, 0 without requests."""

    start_s: float
    end_s: float
    requests: int
    prompt_tokens: float
    output_tokens: float

    @property
    def rate_rps(self) -> float:
        return self.requests / max(self.end_s - self.start_s, INSTANT_S)


def phases_of(workload: Workload) -> tuple[Phase, ...]:
    """The phases of a workload in order, one where its rate is steady; none where it has no time."""
    if len(workload) == 0 or workload.duration_s <= INSTANT_S:
        return ()
    arrival_s = workload.arrival_s
    edges_s = [float(arrival_s[0]), *_changes_s(workload), float(np.nextafter(arrival_s[-1], np.inf))]
    first = np.searchsorted(arrival_s, edges_s)
    phases = []
    for (start_s, end_s), (begin, end) in zip(pairwise(edges_s), pairwise(first.tolist()), strict=True):
        means = [
            float(tokens[begin:end].mean()) if end > begin else 0.0
            for tokens in (workload.prompt_tokens, workload.output_tokens)
        ]
        phases.append(Phase(start_s, min(end_s, float(arrival_s[-1])), end - begin, *means))
    return tuple(phases)


def _changes_s(workload: Workload) -> list[float]:
    """When the rate changes."""
    duration_s, first_s = workload.duration_s, float(workload.arrival_s[0])
    least_s = max(min(LEAST_S, OF_SHORT * duration_s), OF_LONG * duration_s)
    bin_s = max(least_s / BINS, IN_BIN * duration_s / len(workload))
    bins = int(duration_s // bin_s)  # what is left over is no whole bin
    number = ((workload.arrival_s - first_s) // bin_s).astype(np.int64)
    counts = np.bincount(number[number < bins], minlength=bins)
    changes = change_points(counts.tolist(), least_bins=max(round(least_s / bin_s), 3))
    return [float(first_s + i * bin_s) for i in changes]


def phases_json(phases: Sequence[Phase]) -> list[dict[str, float]]:
    """The phases for programs."""
    return [
        {
            "start_s": round(phase.start_s, 3),
            "end_s": round(phase.end_s, 3),
            "requests": phase.requests,
            "rate_rps": float(f"{phase.rate_rps:.6g}"),
            "prompt_tokens": round(phase.prompt_tokens, 1),
            "output_tokens": round(phase.output_tokens, 1),
        }
        for phase in phases
    ]
