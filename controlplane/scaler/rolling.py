"""Rolling steps from one fleet to another: each starts one worker, and stops its share of the old ones.

Of n workers to start and m to stop, step j stops old ones until m * j // n have stopped. So the fleet's
capacity lies between that of the two fleets at every step, where a worker starts before others stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RollingStep:
    """Start a worker of one type (None: start none), then stop one of each of these, by type."""

    start: str | None
    stops: tuple[str, ...] = ()


def rolling_steps(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[RollingStep, ...]:
    """The steps between two fleets, workers by type; none where they are the same."""
    kinds = list(dict.fromkeys((*before, *after)))
    more = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in kinds}
    starts = [kind for kind in kinds for _ in range(max(more[kind], 0))]
    stops = [kind for kind in kinds for _ in range(max(-more[kind], 0))]
    if not starts:
        return tuple(RollingStep(None, (kind,)) for kind in stops)
    ends = [len(stops) * (j + 1) // len(starts) for j in range(len(starts))]
    return tuple(
        RollingStep(kind, tuple(stops[begin:end]))
        for kind, begin, end in zip(starts, (0, *ends), ends, strict=False)
    )
