"""The hindsight optimum: the cheapest schedule for a day that is known beforehand.

The day is cut into windows. Each gets the fewest workers that keep it alone at the target. Workers are then
taken away where that misses least, until the whole day only just meets the target. The schedule runs with
each launch a cold start ahead. Windows get workers back until that run meets the target. `trims`: every
window is then tried with fewer, for as long as the run costs less and meets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from controlplane.workload import Workload
from dataplane.simulated.elastic import FleetRecord
from dataplane.simulated.outcome import Outcome
from tokenfleet.planning.sizing import fewest

WINDOW_S = 300.0
LEAD_IN_S = 30.0  # of what a window begins with, so that it does not begin idle
Schedule = list[tuple[float, int]]  # from when, how many workers
HindsightRun = tuple[Schedule, Outcome, FleetRecord]


@dataclass(frozen=True)
class Alone:
    """The fewest workers of a window alone. `missed`: the judged requests of each class that others miss."""

    workers: int
    missed: Callable[[int], NDArray[np.int64]]
    is_late: bool  # no number of workers keeps it in time

    def missed_in_all(self, workers: int) -> int:
        return int(self.missed(workers).sum())


def fewest_alone(
    in_time: Callable[[int], NDArray[np.bool_]], judged: NDArray[np.bool_], of_class: NDArray[np.int64],
    attainments: NDArray[np.float64], guess: int, most: int,
) -> Alone:  # fmt: skip
    """The fewest workers that keep a window's judged requests at their classes' targets.

    `in_time`: which of the window's requests a number of workers keeps in time.
    """

    @cache
    def missed(workers: int) -> NDArray[np.int64]:
        late = judged & ~in_time(workers) if judged.any() else judged
        return np.bincount(of_class[late], minlength=len(attainments))

    allowed = (1.0 - attainments) * np.bincount(of_class[judged], minlength=len(attainments)) + 1e-9
    workers = fewest(missed, allowed, guess, most)
    return Alone(workers, missed, bool((missed(workers) > allowed).any()))


@dataclass(frozen=True)
class Hindsight:
    """A day and its target. `at_once` runs a part of it on a fixed fleet, `scheduled` all on a schedule."""

    workload: Workload
    attainment: float
    most: int
    at_once: Callable[[Workload, int], Outcome]
    scheduled: Callable[[Schedule], tuple[Outcome, FleetRecord]]

    @property
    def starts(self) -> list[float]:
        """When the windows begin."""
        return [float(s) for s in np.arange(0.0, float(self.workload.arrival_s[-1]) + 1e-9, WINDOW_S)]

    def cheapest(self, trims: bool) -> HindsightRun:
        """The schedule and its run."""
        counts, taken, in_turn = self.window_by_window()
        best = self._run(counts)
        while best[1].attainment < self.attainment and min(counts) < self.most:  # windows hand load over
            counts[taken.pop() if taken else self._worst_window(best[1], counts)] += 1
            best = self._run(counts)
        for i in in_turn if trims else ():
            # The fewer workers elsewhere, the worse without this one: once round is enough.
            while counts[i] > 1:
                fewer = [n - (i == at) for at, n in enumerate(counts)]
                found = self._run(fewer)
                if found[1].attainment < self.attainment or found[2].worker_s >= best[2].worker_s:
                    break
                counts, best = fewer, found
        return best

    def _run(self, counts: list[int]) -> HindsightRun:
        schedule = list(zip(self.starts, counts, strict=True))
        return schedule, *self.scheduled(schedule)

    def _worst_window(self, seen: Outcome, counts: list[int]) -> int:
        """The window with most misses, of those that may have another worker."""
        at = (self.workload.arrival_s // WINDOW_S).astype(int)
        missed = np.bincount(at[~seen.met], minlength=len(counts))
        return int(np.where(np.array(counts) < self.most, missed[: len(counts)], -1).argmax())

    def window_by_window(self) -> tuple[list[int], list[int], list[int]]:
        """Workers of each window, the windows that one was taken from, and those to take from next."""
        counts, misses = self.fewest()
        taken: list[int] = []
        spare = (1.0 - self.attainment) * len(self.workload)
        spare -= sum(missed(n) for missed, n in zip(misses, counts, strict=True))

        def price(i: int) -> tuple[int, int]:
            return misses[i](counts[i] - 1) - misses[i](counts[i]), i

        offers = [price(i) for i in range(len(counts)) if counts[i] > 1]
        heapify(offers)
        while offers:  # a worker fewer where it costs least
            more, i = heappop(offers)
            if more > spare:
                continue
            counts[i], spare = counts[i] - 1, spare - more
            taken.append(i)
            if counts[i] > 1:
                heappush(offers, price(i))
        return counts, taken, sorted((i for i, n in enumerate(counts) if n > 1), key=price)

    def fewest(self) -> tuple[list[int], list[Callable[[int], int]]]:
        """The fewest workers that keep each window alone at the target, and what others would miss."""
        found: list[Alone] = []
        target, guess = np.array([self.attainment]), 8
        for start_s in self.starts:
            lead_s = min(LEAD_IN_S, start_s)
            part = self.workload.window(start_s - lead_s, start_s + WINDOW_S)
            judged, one = part.arrival_s >= lead_s, np.zeros(len(part), np.int64)

            def in_time(workers: int, part: Workload = part) -> NDArray[np.bool_]:
                return self.at_once(part, workers).met

            found.append(fewest_alone(in_time, judged, one, target, guess, self.most))
            guess = found[-1].workers
        return [alone.workers for alone in found], [alone.missed_in_all for alone in found]
