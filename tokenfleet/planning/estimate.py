"""Bounds on a fleet's attainment, from replays in many resampled traces.

Each resampled trace is one draw of arrivals and one of coefficients. The traffic to come is one more of them,
so each rank among them is equally likely. Order W resampled traces by their share of misses. The next one
does not exceed the r-th with probability r/(W + 1), however they scatter (a conformal bound). The bound at a
confidence c is the resampled trace at r = ⌈c·(W + 1)⌉. A fleet holds when r of them meet the target.
`replicates_for` gives the W that makes this exact. Where W is too small (r > W), the lower of two attainments
is the bound. One is the worst of them. The other is a normal's next draw, on the logarithm of the share of
misses, y = log((m + 1/2)/(n + 1)):

    mean(y) + t(W - 1, confidence) · sd(y) · sqrt(1 + 1/W)

Resampled traces are made of the trace's own requests, so they hold no kind of miss that it does not.
Jeffreys' bound on a share with no case seen is therefore a floor to the uncertainty. So a short trace cannot
show a high target, whatever the fleet.

**Several classes** are judged together. In each resampled trace, the class that uses most of what it may miss
counts (`dataplane.simulated.outcome.joint`). So a fleet holds at a confidence where r resampled traces give
*every* class its own target at once. Each class has bounds by itself too; they decide nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from scipy import special  # its `stats` takes a third of a second to import

from dataplane.simulated.outcome import class_counts, joint
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.plan_file import Attainment
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.search import Search, missed

REPLICATES = 19  # r is a whole number for each multiple of 0.05
MOST_REPLICATES = 39  # a confidence above 0.975 would take more than pay
ROUND = 8  # resampled traces to look at before asking whether the verdict is still open
HOPELESS = 0.2  # of the requests missed: the rest counts as missed, too
SCREENED = 4  # resampled traces, the hardest known, more than may fail: a fleet passes them first


@dataclass(frozen=True, slots=True)
class Estimate:
    """Attainment of a fleet: its mean over resampled traces, and one-sided bounds, each at `confidence`.

    `low` is never above `expected`: see `estimate`.
    """

    expected: float
    low: float
    high: float
    confidence: float
    replicates: int
    hit_rates: tuple[float, ...] = ()  # of prefix caches, by resampled trace; none where nothing is cached
    classes: tuple[Estimate, ...] = ()  # of each class by itself, where there are several


def bounds(of: Estimate | None) -> dict[str, Any]:
    """The mean and its bounds by their names in a plan; null where there is no estimate."""
    return {name: getattr(of, name, None) for name in ("expected", "low", "high")}


def attained(of: Estimate | None, on_trace: float | None, target: float) -> Attainment:
    """Attainment as a plan has it."""
    worlds, confidence = (0, None) if of is None else (of.replicates, of.confidence)
    return Attainment(target=target, **bounds(of), confidence=confidence, worlds=worlds, on_trace=on_trace)


def estimate(
    misses: Sequence[int], requests: Sequence[int], confidence: float, showable: float | None = None
) -> Estimate:
    """Bounds from two resampled traces or more, with `misses[i]` of `requests[i]`.

    The lower bound is at most `showable`. It is a quantile over resampled traces. The mean can be below that,
    where a few bad ones pull it down and the confidence does not count them (below 0.95). Then the mean is
    the lower bound: a fleet whose mean misses its target does not meet it, however many resampled traces do.
    """
    missed, judged = np.asarray(misses, float), np.asarray(requests, float)
    replicates = len(missed)
    share = np.sort(missed / judged)
    expected = 1.0 - float(missed.sum() / judged.sum())
    place = rank(replicates, confidence)
    if place <= replicates:
        low, high = 1.0 - float(share[place - 1]), 1.0 - float(share[replicates - place])
    else:
        y = np.log((missed + 0.5) / (judged + 1.0))
        reach = float(
            special.stdtrit(replicates - 1, confidence) * y.std(ddof=1) * np.sqrt(1.0 + 1.0 / replicates)
        )
        low = min(1.0 - float(np.exp(y.mean() + reach)), 1.0 - float(share[-1]))
        high = max(1.0 - float(np.exp(y.mean() - reach)), 1.0 - float(share[0]))
    showable = most_showable(round(judged.mean()), confidence) if showable is None else showable
    low = max(min(low, showable, expected), 0.0)
    return Estimate(expected, low, min(max(high, expected), 1.0), confidence, replicates)


def rank(replicates: int, confidence: float) -> int:
    """The number of resampled traces that must hold; more than there are where they are too few to tell."""
    return math.ceil(confidence * (replicates + 1) - 1e-9)


def replicates_for(confidence: float) -> int:
    """The number of resampled traces to replay."""
    needed = math.ceil(1.0 / (1.0 - confidence) - 1e-9) - 1
    return max(needed, REPLICATES) if needed <= MOST_REPLICATES else REPLICATES


def most_showable(requests: int, confidence: float) -> float:
    """The highest attainment that a trace of `requests` requests can show: Jeffreys, no misses seen."""
    return 1.0 - float(special.betaincinv(0.5, requests + 0.5, confidence))


def requests_needed(attainment: float, confidence: float) -> int:
    """The number of requests that a trace needs for `attainment` to be showable with `confidence`."""
    most = next(1 << n for n in count() if most_showable(1 << n, confidence) >= attainment)
    return 1 + bisect_left(range(1, most), attainment, key=lambda n: most_showable(n, confidence))


class TooFew(NamedTuple):
    """A trace too short to show its target, whatever the fleet: why, and the most that it can show."""

    reason: str
    showable: float


def too_few(search: Search) -> TooFew | None:
    """Whether the trace, or one of its classes, has too few requests; None where it has enough."""
    confidence = search.request.confidence
    asked = [(len(search.workload), search.request.attainment, "")]
    if search.terms.classes:
        whose = [f" of class {one.name}" for one in search.terms.classes]
        asked = list(zip(search.counts, search.terms.asked, whose, strict=True))
    for requests, target, of in asked:
        if (showable := most_showable(requests, confidence)) < target:
            return TooFew(
                f"{requests} requests{of} are too few to show {100 * target:.6g} % at"
                f" {100 * confidence:.6g} % confidence:"
                f" {requests_needed(target, confidence)} are needed (or a lower target or confidence)",
                showable,
            )
    return None


class Trial:
    """A fleet in as many resampled traces as it takes to tell whether its lower bound meets the target.

    The resampled traces that were hardest for other fleets come first. A replay is broken off once it is
    lost. So a fleet that fails is known to fail, but not by how much. `verdict` goes on until that is known,
    where replays do not take long. `at_once`: replays side by side, as many as threads without it;
    `replays`: how many there were.
    """

    def __init__(self, search: Search, fleet: Fleet, at_once: int | None = None) -> None:
        self.fleet, self._search = fleet, search
        self._at_once, self.replays = at_once, 0
        self._seen: dict[int, ReplicateOutcome] = {}
        self.numbers = range(1, replicates_for(search.request.confidence) + 1)

    def holds(self, *, screening: bool = False) -> bool:
        """Whether the lower bound meets the target; `screening`: whether it may, by the hardest."""
        hardest = screened(self._search.request.confidence) if self._search.hardest else len(self.numbers)
        upto = hardest if screening else len(self.numbers)
        is_slow, at_once = self._search.is_slow, self._at_once or self._search.threads.count
        while len(self._seen) < upto and self._is_open:
            width = at_once if screening or not (is_slow or self._seen) else ROUND
            left = [i for i in self._search.hardest.first(self.numbers) if i not in self._seen]
            self._look(left[: min(width, upto - len(self._seen))], True)
        if screening or not self._is_open:
            return self._is_open
        self._look([i for i, seen in self._seen.items() if seen.lost], False)
        return self.verdict().low >= self._search.request.attainment

    @property
    def _is_open(self) -> bool:
        return open_still(list(self._seen.values()), self._search.request)

    def _look(self, numbers: Sequence[int], hurries: bool) -> None:
        allowed = self._search.may_miss if hurries else None
        seen = look(self._search, self.fleet, numbers, allowed)
        self.replays += len(seen)
        self._seen.update(zip(numbers, seen, strict=True))
        # A search among mixes counts its replays, and one whose replays take long tells what it has seen.
        is_told_by_order = self._at_once is not None or self._search.is_slow
        for i, one in zip(numbers, seen, strict=True):
            self._search.hardest.note(i, one.missed / one.requests, most=not is_told_by_order)

    @property
    def is_told(self) -> bool:
        """Whether enough was replayed to its end for a verdict."""
        if not self._search.is_slow:
            return True
        return len(self._seen) == len(self.numbers) and not any(s.lost for s in self._seen.values())

    @property
    def shares_missed(self) -> dict[int, float]:
        """Of each resampled trace that was replayed."""
        return {i: one.missed / one.requests for i, one in self._seen.items()}

    def verdict(self) -> Estimate:
        """The estimate from what was seen; where replays do not take long, from whole replays, in order."""
        told = sorted(self._seen) if self._search.is_slow else self._told_in_order()
        return verdict_on([self._seen[i] for i in told], self._search.request, self._search.terms.asked)

    def _told_in_order(self) -> list[int]:
        """The first resampled traces, replayed to their ends, until a failure is certain."""
        told: list[int] = []
        while len(told) < len(self.numbers) and open_still(
            [self._seen[i] for i in told], self._search.request
        ):
            some = self.numbers[len(told) : len(told) + ROUND]
            self._look([i for i in some if i not in self._seen or self._seen[i].lost], False)
            told += some
        return told


class ReplicateOutcome(NamedTuple):
    """A fleet in one resampled trace; `hit_rate` is None where nothing is cached.

    `lost`: broken off as soon as more had missed than may; requests that had not ended count as missed.
    """

    missed: int
    requests: int
    hit_rate: float | None
    lost: bool = False
    classes: tuple[tuple[int, int], ...] = ()  # (missed, requests) of each, where there are several


def verdict_on(
    seen: Sequence[ReplicateOutcome], request: PlanRequest, asked: Sequence[float] = ()
) -> Estimate:
    """The estimate from what was seen; `asked`: of each class, where there are several."""
    misses, requests, confidence = [s.missed for s in seen], [s.requests for s in seen], request.confidence
    hit_rates = tuple(s.hit_rate for s in seen if s.hit_rate is not None)
    if not asked:
        return replace(estimate(misses, requests, confidence), hit_rates=hit_rates)
    by_class = list(zip(*(s.classes for s in seen), strict=True))
    classes = tuple(estimate([m for m, _ in c], [max(n, 1) for _, n in c], confidence) for c in by_class)
    counts = [round(float(np.mean([n for _, n in c]))) for c in by_class]
    showable = joint(np.array([most_showable(n, confidence) for n in counts]), asked)
    bounds = estimate(misses, requests, confidence, showable)
    return replace(bounds, hit_rates=hit_rates, classes=classes)


def open_still(seen: Sequence[ReplicateOutcome], request: PlanRequest) -> bool:
    """Whether the number of resampled traces that must hold can still be reached."""
    failed = sum(s.missed > (1.0 - request.attainment) * s.requests for s in seen)
    return failed <= may_fail(request.confidence)


def may_fail(confidence: float) -> int:
    """How many of the resampled traces may miss the target."""
    every = replicates_for(confidence)
    return max(every - rank(every, confidence), 0)


def screened(confidence: float) -> int:
    """How many of the hardest resampled traces judge a fleet that is not replayed in all of them."""
    return min(may_fail(confidence) + SCREENED, replicates_for(confidence))


def look(
    search: Search, fleet: Fleet, numbers: Sequence[int] | range, allowed: float | None = None
) -> list[ReplicateOutcome]:
    """A fleet in each of the resampled traces.

    A hopeless replay is broken off: with a fifth of its requests missed, the rest counts as missed too. With
    `allowed` it is broken off as soon as more than that share has missed.
    """
    hopeless = HOPELESS if not search.terms.classes else 1.0

    def one(replicate: int) -> ReplicateOutcome:
        outcome = search.replay(fleet, replicate, most_missed=hopeless if allowed is None else allowed)
        lost = allowed is not None and not outcome.complete
        counts, late = (of.round().astype(int).tolist() for of in class_counts(outcome.met, outcome.workload))
        classes = tuple(zip(late, counts, strict=True)) if search.terms.asked else ()
        return ReplicateOutcome(
            missed(outcome), round(outcome.workload.requests), outcome.prefix_hit_rate, lost, classes
        )

    return search.threads.map(one, numbers)
