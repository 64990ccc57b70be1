"""Demand counters: arrivals and outcomes since the gateway began, by SLO class; they only grow.

The controller takes the difference between two readings. A controller that has just started has no first
reading and reports the rate as unknown instead of zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from controlplane.types import ClassArrivals, ClassOutcomes, Slo
from dataplane.live.ledger.request import Tracked

SUMS = ("requests", "prompt_tokens", "output_tokens")
MOST_CLASSES = 64  # clients name targets as they like; past this many they count for the first


class DemandCount:
    """Requests and tokens by class; `add` is called for every request that reaches the fleet."""

    def __init__(self) -> None:
        self._sums: dict[Slo, list[int]] = {}
        self._ended: dict[Slo, list[int]] = {}

    def add(self, tracked: Tracked) -> None:
        """Count an arrival, with what is expected of its output."""
        sums = _row(self._sums, tracked.slo, 3)
        sums[0] += 1
        sums[1] += tracked.prompt_tokens
        sums[2] += tracked.predicted_tokens

    def end(self, tracked: Tracked, outcome: str, now_s: float | None = None) -> None:
        """Count a request that is over, as `controlplane.types.ClassOutcomes` says.

        One that its client gave up beyond a target counts as it stood; one given up earlier is no outcome.
        """
        is_judged = tracked.is_judged(outcome, time.monotonic() if now_s is None else now_s)
        if not is_judged and outcome != "rejected":
            return
        ttft_met, tpot_met = tracked.slo_met() if is_judged else (False, False)
        sums = _row(self._ended, tracked.slo, 4)
        for at, counts in enumerate((True, ttft_met, tpot_met, ttft_met and tpot_met)):
            sums[at] += counts

    def arrivals(self) -> list[ClassArrivals]:
        """The arrivals of each class."""
        return [ClassArrivals(slo, *sums) for slo, sums in self._sums.items()]

    def outcomes(self) -> list[ClassOutcomes]:
        """The outcomes of each class."""
        return [ClassOutcomes(slo, *sums) for slo, sums in self._ended.items()]


def _row(sums: dict[Slo, list[int]], slo: Slo, columns: int) -> list[int]:
    if slo not in sums and len(sums) >= MOST_CLASSES:
        slo = next(iter(sums))
    return sums.setdefault(slo, [0] * columns)


def since(
    before: Sequence[ClassArrivals] | None, now: Sequence[ClassArrivals]
) -> tuple[ClassArrivals, ...] | None:
    """Arrivals between two readings; None without a first one, or where the counters were reset."""
    if before is None:
        return None
    had = {one.slo: one for one in before}
    arrived = []
    for one in now:
        was = had.pop(one.slo, ClassArrivals(one.slo, 0, 0, 0))
        new = [getattr(one, name) - getattr(was, name) for name in SUMS]
        if min(new) < 0:
            return None
        if new[0]:
            arrived.append(ClassArrivals(one.slo, *new))
    return None if had else tuple(arrived)
