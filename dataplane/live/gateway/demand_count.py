"""Demand counters: arrivals and outcomes since the gateway began, by SLO class; they only grow.

The controller takes the difference between two readings. A controller that has just started has no first
reading and reports the rate as unknown instead of zero.
"""

from __future__ import annotations

from typing import Any

from controlplane.types import ClassArrivals, Slo
from dataplane.live.gateway.request import Tracked

OUTCOMES = ("ended", "ttft_met", "tpot_met", "met")
MOST_CLASSES = 64  # clients name targets as they like; past so many they count for the first


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

    def end(self, tracked: Tracked, outcome: str) -> None:
        """Count a request that is over, as `controlplane.types.ClassOutcomes` says."""
        if outcome not in ("finished", "rejected"):
            return
        ttft_met, tpot_met = tracked.slo_met() if outcome == "finished" else (False, False)
        sums = _row(self._ended, tracked.slo, 4)
        for at, counts in enumerate((True, ttft_met, tpot_met, ttft_met and tpot_met)):
            sums[at] += counts

    def outcomes(self) -> list[dict[str, Any]]:
        """The outcomes; as ClassOutcomes has them."""
        return [
            {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, **dict(zip(OUTCOMES, sums, strict=True))}
            for slo, sums in self._ended.items()
        ]

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "ttft_s": slo.ttft_s,
                "tpot_s": slo.tpot_s,
                "requests": requests,
                "prompt_tokens": prompt,
                "expected_tokens": expected,
            }
            for slo, (requests, prompt, expected) in self._sums.items()
        ]


def _row(sums: dict[Slo, list[int]], slo: Slo, columns: int) -> list[int]:
    if slo not in sums and len(sums) >= MOST_CLASSES:
        slo = next(iter(sums))
    return sums.setdefault(slo, [0] * columns)


def since(before: list[dict[str, Any]] | None, now: list[dict[str, Any]]) -> tuple[ClassArrivals, ...] | None:
    """Arrivals between two readings; None without a first one, or where the counters were reset."""
    if before is None:
        return None
    names = ("requests", "prompt_tokens", "expected_tokens")
    had = {(row["ttft_s"], row["tpot_s"]): [int(row[name]) for name in names] for row in before}
    arrived = []
    for row in now:
        old = had.pop((row["ttft_s"], row["tpot_s"]), [0, 0, 0])
        new = [int(row[name]) - was for name, was in zip(names, old, strict=True)]
        if min(new) < 0:
            return None
        if new[0]:
            arrived.append(ClassArrivals(Slo(row["ttft_s"], row["tpot_s"]), *new))
    return None if had else tuple(arrived)
