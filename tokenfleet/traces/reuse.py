"""The reuse of prefixes in a trace: what a cache could serve, and how large it must be.

A request's hit is the longest run of its prompt's first blocks that earlier requests had, prompts and answers
alike; at least one token is always computed. With every block ever seen kept, hits are *ideal*. The distance
of a reuse is the number of unique tokens that requests touched since the last one that had the block. A
least-recently-used cache serves those with distances up to its size. Requests count as touching all their
blocks at their arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from controlplane.prefixes import Prefixes
from controlplane.workload import Workload

KEEPS = 0.9  # of the ideal hits: what the working set is large enough for


@dataclass(frozen=True)
class TraceReuse:
    """Token counts of a trace: its prompts, ideal hits, hits on what the same session had (None where no
    sessions are known), and all unique tokens. `distances` [reuses] in tokens, rising, with their `hits`.
    """

    prompt_tokens: int
    hit_tokens: int
    within_tokens: int | None
    unique_tokens: int
    distances: NDArray[np.int64]
    hits: NDArray[np.int64]

    @property
    def ideal(self) -> float:
        """The share of prompt tokens that a cache of any size could serve."""
        return self.hit_tokens / self.prompt_tokens

    def distance(self, share: float) -> float:
        """The distance within which this share of the hits lies; NaN without any."""
        if not len(self.hits):
            return float("nan")
        return float(self.distances[np.searchsorted(np.cumsum(self.hits), share * self.hits.sum())])

    def kept(self, cache_tokens: int) -> float:
        """The hit rate with so much cache in one place."""
        return float(self.hits[self.distances <= cache_tokens].sum()) / self.prompt_tokens


def reuse_of(workload: Workload) -> TraceReuse | None:
    """What requests reuse; None where a trace does not say what they share."""
    prefixes = workload.prefixes
    if prefixes is None:
        return None
    unit, n = prefixes.block_tokens, len(workload)
    last = np.full(prefixes.ids.max(initial=-1) + 1, -1, np.int64)
    latest = _Sums(n)
    held = np.maximum((workload.prompt_tokens + workload.output_tokens) // unit, np.diff(prefixes.offsets))
    usable = (workload.prompt_tokens - 1) // unit
    distances, hits = [], []
    for r in range(n):
        ids = prefixes.of(r)
        before = last[ids]
        known = int(np.count_nonzero(before >= 0))  # the first ones: an id stands for all before it
        hit = min(known, int(usable[r]))
        # A request with a block has all before it: the last requests to have them stand in falling order.
        ends = (np.flatnonzero(np.diff(before[:known], append=-2)) + 1).tolist()
        runs = list(pairwise([0, *ends]))
        for start, end in runs:
            if start < hit:
                distances.append(latest.after(int(before[start])) * unit)
                hits.append((min(end, hit) - start) * unit)
        for start, end in runs:
            latest.add(int(before[start]), start - end)
        latest.add(r, int(held[r]))
        last[ids] = r
    order = np.argsort(distances, kind="stable")
    counted = np.array(hits, np.int64)[order]
    return TraceReuse(
        prompt_tokens=int(workload.prompt_tokens.sum()),
        hit_tokens=int(counted.sum()),
        within_tokens=_within(workload, prefixes, usable),
        unique_tokens=latest.after(-1) * unit,
        distances=np.array(distances, np.int64)[order],
        hits=counted,
    )


def _within(workload: Workload, prefixes: Prefixes, usable: NDArray[np.int64]) -> int | None:
    """The tokens of prompts that an earlier request of the same session had."""
    if workload.sessions is None:
        return None
    had: dict[int, set[int]] = {}
    blocks = 0
    for r, session in enumerate(workload.sessions.session.tolist()):
        if session < 0:
            continue
        own, ids = had.setdefault(session, set()), prefixes.of(r)
        low, high = 0, len(ids)
        while low < high:  # a block is known only if all before it are
            middle = (low + high) // 2
            low, high = (middle + 1, high) if int(ids[middle]) in own else (low, middle)
        blocks += min(low, int(usable[r]))
        own.update(ids[low:].tolist())
    return blocks * prefixes.block_tokens


class _Sums:
    """Sums of counts over the rows after one (a Fenwick tree)."""

    def __init__(self, rows: int) -> None:
        self._tree, self._total = [0] * (rows + 1), 0

    def add(self, row: int, count: int) -> None:
        self._total += count
        at = row + 1
        while at < len(self._tree):
            self._tree[at] += count
            at += at & -at

    def after(self, row: int) -> int:
        at, up_to = row + 1, 0
        while at > 0:
            up_to += self._tree[at]
            at -= at & -at
        return self._total - up_to
