"""What a schedule costs once a worker takes time to start: it is ordered, and paid, before it serves.

A worker wanted from t on is ordered at t - L, L being the cold start. One that would be given back and wanted
again within L is kept. So at t as many are paid as the schedule wants at most within [t, t + L]. The workers
of the first stretch are taken as running already; what draining takes is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenfleet.planning.fleet import Fleet, apportioned
from tokenfleet.planning.schedule import Stretch


@dataclass(frozen=True, slots=True)
class Order:
    """So many workers ordered at a time, to serve from another on. Before 0: before the trace begins."""

    order_s: float
    ready_s: float
    workers: int


@dataclass(frozen=True, slots=True)
class Paid:
    """A schedule with its starts: how many workers are paid when, and what is ordered when."""

    cold_start_s: float
    stretches: tuple[Stretch, ...]
    orders: tuple[Order, ...]

    @property
    def worker_hours(self) -> float:
        return sum(s.workers * (s.end_s - s.start_s) for s in self.stretches) / 3600.0

    def usd_per_hour(self, full: Fleet) -> float | None:
        """The mean price of an hour, fleets in the proportions of `full`; None where a price is unknown."""
        total, seconds = 0.0, 0.0
        for stretch in self.stretches:
            usd = apportioned(full, stretch.workers).usd_per_hour
            if usd is None:
                return None
            total += usd * (stretch.end_s - stretch.start_s)
            seconds += stretch.end_s - stretch.start_s
        return total / seconds if seconds > 0 else full.usd_per_hour


def paid(wanted: Sequence[Stretch], cold_start_s: float) -> Paid:
    """What the stretches (in order, no gap between them) cost when a start takes so many seconds."""
    if not wanted:
        return Paid(cold_start_s, (), ())
    first_s, end_s = wanted[0].start_s, wanted[-1].end_s
    edges = {s.start_s for s in wanted} | {max(s.start_s - cold_start_s, first_s) for s in wanted}
    starts = sorted(edges)
    found: list[Stretch] = []
    for begin_s, stop_s in zip(starts, [*starts[1:], end_s], strict=True):
        # Summed as it was subtracted, so that a stretch ordered at `begin_s` is always seen from there.
        ahead = [s.workers for s in wanted if s.end_s > begin_s and s.start_s - cold_start_s <= begin_s]
        if found and found[-1].workers == max(ahead):
            found[-1] = Stretch(found[-1].start_s, stop_s, max(ahead))
        else:
            found.append(Stretch(begin_s, stop_s, max(ahead)))
    return Paid(cold_start_s, tuple(found), _orders(wanted, cold_start_s))


def _orders(wanted: Sequence[Stretch], cold_start_s: float) -> tuple[Order, ...]:
    """Each rise that no kept worker covers. The n-th worker is looked at by itself: it is wanted or not."""
    orders: dict[float, int] = {}
    for level in range(1, max(s.workers for s in wanted) + 1):
        left_s: float | None = None if wanted[0].workers < level else wanted[0].start_s
        running = wanted[0].workers >= level
        for stretch in wanted[1:]:
            wants = stretch.workers >= level
            if wants and not running and (left_s is None or stretch.start_s - cold_start_s > left_s):
                orders[stretch.start_s] = orders.get(stretch.start_s, 0) + 1
            if running and not wants:
                left_s = stretch.start_s
            running = wants
    return tuple(Order(t - cold_start_s, t, n) for t, n in sorted(orders.items()))
