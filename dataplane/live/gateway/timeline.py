"""The last hour of a fleet: throughput, TTFT, TPOT, attainment and errors in buckets of ten seconds.

Prometheus keeps such series where it is installed; the live page and `tokenfleet fleet status` need them on a
fleet that stands alone. Memory is bounded: KEPT buckets, each with at most MOST_VALUES latencies.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BUCKET_S = 10.0
KEPT = 361  # an hour, and the bucket that is being filled
LATELY_S = 300.0
ENDS = ("finished", "failed", "rejected", "aborted")
MOST_VALUES = 4096  # the newest of a bucket; percentiles of more would not differ


@dataclass(slots=True)
class Bucket:
    """Counts of BUCKET_S from `at_s` on. `met`: requests within ttft, tpot, both.

    `ended`: requests by their ends, ENDS. `given_up`: those of the aborted that were beyond a target.
    """

    at_s: float
    tokens: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    met: list[int] = field(default_factory=lambda: [0, 0, 0])
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_VALUES))
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_VALUES))


class Timeline:
    """The last hour in buckets; one in which nothing happened is not kept. Times are of a monotonic clock."""

    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque(maxlen=KEPT)

    def add_tokens(self, tokens: int, at_s: float) -> None:
        """Output tokens that were passed to clients."""
        self._at(at_s).tokens += tokens

    def add_judged(
        self, outcome: str, ttft_s: float | None, tpot_s: float | None, met: Sequence[bool], at_s: float
    ) -> None:
        """A request that finished, or `aborted`: given up by its client beyond a target, which is a miss.

        Its latencies (of one given up, its wait as its TTFT), and its targets met (ttft, tpot, both).
        """
        bucket = self._at(at_s)
        bucket.ended[outcome] += 1
        bucket.given_up += outcome == "aborted"
        bucket.met = [count + hit for count, hit in zip(bucket.met, met, strict=True)]
        if ttft_s is not None:
            bucket.ttft_s.append(ttft_s)
        if tpot_s is not None:
            bucket.tpot_s.append(tpot_s)

    def add_unfinished(self, outcome: str, at_s: float) -> None:
        """A request that ended otherwise: failed, aborted by its client, rejected or rate_limited."""
        self._at(at_s).ended[outcome if outcome in ENDS else "rejected"] += 1

    def points(self, minutes: float, now_s: float, unix_s: float) -> list[dict[str, Any]]:
        """A point for each kept bucket that began in the last `minutes`, oldest first, in Unix time."""
        since_s, ahead_s = now_s - 60.0 * minutes, unix_s - now_s
        kept = [b for b in self._buckets if b.at_s >= since_s]
        return [{"at_s": round(b.at_s + ahead_s, 1), **_summary([b], BUCKET_S)} for b in kept]

    def lately(self, began_s: float, now_s: float) -> dict[str, Any]:
        """The last LATELY_S in one point, or the time since `began_s` where that is shorter."""
        over_s = max(BUCKET_S, min(LATELY_S, now_s - began_s))
        return _summary([b for b in self._buckets if b.at_s >= now_s - over_s], over_s)

    def _at(self, at_s: float) -> Bucket:
        start_s = math.floor(at_s / BUCKET_S) * BUCKET_S
        if not self._buckets or self._buckets[-1].at_s < start_s:
            self._buckets.append(Bucket(start_s))
        return self._buckets[-1]


def _summary(buckets: list[Bucket], over_s: float) -> dict[str, Any]:
    """Rates and latencies of some buckets; a latency is None where no request finished in them."""
    ended = {end: sum(b.ended[end] for b in buckets) for end in ENDS}
    judged = ended["finished"] + sum(b.given_up for b in buckets)
    met = {
        target: {"met": sum(b.met[i] for b in buckets), "of": judged}
        for i, target in enumerate(("ttft", "tpot", "both"))
    }
    return {
        "over_s": over_s,
        "tokens_per_s": sum(b.tokens for b in buckets) / over_s,
        **ended,
        "ttft_s": _percentiles(value for b in buckets for value in b.ttft_s),
        "tpot_s": _percentiles(value for b in buckets for value in b.tpot_s),
        "attainment": met,
    }


def _percentiles(values: Iterable[float]) -> dict[str, float] | None:
    found = np.fromiter(values, float)
    if not found.size:
        return None
    p50, p90, p99 = np.percentile(found, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}
