"""Demand is what arrives, counted in bins of time; completions plateau under overload and say nothing.

A bin nobody counted is unknown, not empty: an outage of the metrics is no pause of the traffic, and no
traffic is a number, zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from controlplane.errors import BadInput


@dataclass(frozen=True, slots=True)
class Demand:
    """Arrivals by bin, oldest first; None for a bin in which some time went uncounted.

    `bin_s`: a bin's length. `keep`: bins remembered. `first_bin`: number of the oldest, bin n covering
    [n·bin_s, (n+1)·bin_s). `open_count`: arrivals in the bin in progress, None once a part of it is unknown.
    """

    bin_s: float = 10.0
    keep: int = 360
    first_bin: int = 0
    closed: tuple[int | None, ...] = ()
    open_count: int | None = 0
    seen_s: float | None = None

    def __post_init__(self) -> None:
        if not self.bin_s > 0 or self.keep < 1:
            raise BadInput(f"demand: need bin_s > 0 and keep >= 1, got {self.bin_s:g} and {self.keep}")

    @property
    def known(self) -> tuple[int, ...]:
        """The counted bins."""
        return tuple(c for c in self.closed if c is not None)


def observe(demand: Demand, now_s: float, arrivals: float | None) -> Demand:
    """The demand after a look at `now_s`: `arrivals` since the last one, None or NaN where nobody counted.

    What a look reports belongs to the bin it falls in. Raises BadInput for a time that runs backwards.
    """
    if demand.seen_s is not None and now_s < demand.seen_s:
        raise BadInput(f"demand: now_s: {now_s:g} is before the last look at {demand.seen_s:g}")
    counted = arrivals is not None and not math.isnan(arrivals)
    if counted and (arrivals is None or arrivals < 0 or math.isinf(arrivals)):
        raise BadInput(f"demand: arrivals: must be a number of at least 0, got {arrivals}")
    at = int(now_s // demand.bin_s)
    if demand.seen_s is None:  # what came before the first look is not known
        starts = at * demand.bin_s == now_s
        return replace(demand, first_bin=at, open_count=0 if starts else None, seen_s=now_s)
    before = int(demand.seen_s // demand.bin_s)
    closed, open_count = demand.closed, demand.open_count
    new = int(arrivals) if counted and arrivals is not None else None
    if at > before:
        # Where whole bins lie between two looks, nobody knows in which of them the arrivals came.
        lost = new is None or (new > 0 and at > before + 1)
        closed += (None if lost else open_count,) + (None if lost else 0,) * (at - before - 1)
        open_count = None if lost else 0
    open_count = None if new is None or open_count is None else open_count + new
    dropped = max(len(closed) - demand.keep, 0)
    return replace(
        demand,
        first_bin=demand.first_bin + dropped,
        closed=closed[dropped:],
        open_count=open_count,
        seen_s=now_s,
    )


def recent_rps(demand: Demand, bins: int) -> float | None:
    """The mean rate of the last `bins` bins, those known; None when none is."""
    last = [c for c in demand.closed[-bins:] if c is not None]
    return sum(last) / (len(last) * demand.bin_s) if last else None
