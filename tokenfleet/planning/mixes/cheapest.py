"""The search for the cheapest mix of worker types.

A type that cannot hold the target alone takes part: placement gives it what it can serve.

1. **A guide picks first.** On this trace one worker of type v carries about the share 1/N_v. N_v is the count
   (with a fraction) at which that type alone just meets the target, or follows from its least work where the
   type never does. The integer program picks the cheapest counts whose shares add up to one. A pick that
   fails is asked to carry more.
2. **Then all cheaper mixes are listed**, and each is discarded for a reason, until none is left or the search
   has used up its replays. Bounds discard what no placement can serve (`bounds.py`: proven). A replay that
   fails discards the mix and every part of it. *Assumed*: one worker more never hurts, of a type that holds
   the target alone. While the guide has hope for some, the strongest of the cheaper half of these is next: a
   mix that holds takes all resampled traces. Else it is the one with the most parts among those that the
   cheapest mix left is a part of.

A replay that fails ends as soon as it has missed too much, and a mix begins with the resampled traces that
were hardest for others. Of large fleets not every mix is listed: counts go up in steps, and then in finer
ones around the best. Whatever is left gives how much cheaper a mix may still be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import Infeasible
from controlplane.scaler.line import Weights
from controlplane.scaler.mix import MixNeed, MixSettings, cheapest
from controlplane.worker_type import WorkerGroup
from tokenfleet.planning.estimate import Estimate, Trial
from tokenfleet.planning.fleet import Fleet, is_allowed
from tokenfleet.planning.mixes.bounds import MixBounds
from tokenfleet.planning.search import Hardest, Search
from tokenfleet.planning.sizing import Sizing, fraction_needed

BUDGET = 120  # replays,
HOPEFUL = 0.7  # of them for mixes that may hold; the rest rules out the cheapest that are left
MORE = 1.06  # demand grows by this much after each of the guide's picks that fails,
MORE_AT_FIRST = 1.25  # or by this much where no fleet is known that holds
GUIDED = 6  # picks
LISTED = 20_000  # mixes
KINDS = 4  # that are listed where there are too many mixes of all
FAR = 0.6  # of the least work is what a worker does, where no type says better
COMPARED = 200  # of them, for the one with the most parts
CRUMB = 1e-9

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mix that meets the target at the asked confidence, cheaper than the fleet it was held against."""

    fleet: Fleet
    estimate: Estimate
    missed: dict[int, float]  # its share of misses, by resampled trace


@dataclass(frozen=True, slots=True)
class MixSearch:
    """How far mixes were searched: how many were replayed, and the replays of the trace this took.

    `least`: the lowest cost of a mix that was neither replayed nor ruled out; None: there is none. It is in
    dollars an hour, or in GPUs where a price is not known.
    """

    mixes: int
    replays: int
    least: float | None

    def may_save(self, fleet: Fleet) -> float:
        """The share of the cost of `fleet`, the answer, by which another mix may be cheaper."""
        cost = fleet.gpus if fleet.usd_per_hour is None else fleet.usd_per_hour
        return 0.0 if self.least is None or cost <= 0 else max(1.0 - self.least / cost, 0.0)


def cheapest_mix(
    search: Search, sizings: Sequence[Sizing], best: Sizing | None
) -> tuple[Mixed | None, MixSearch | None]:
    """The cheapest verified mix that is cheaper than the fleet of `best`, and how far the search went.

    Split fleets are not mixed. `best` is None where no fleet is known that holds.
    """
    single = [s for s in sizings if not s.worker_type.is_split]
    if best is not None and best.worker_type.usd_per_h is not None:
        single = [s for s in single if s.worker_type.usd_per_h is not None]
    if len(single) < 2:
        return None, None
    hardest = Hardest(best.missed if best else {})
    mixes = _Mixes(replace(search, hardest=hardest), single, best.answer if best else None)
    mixes.ask_the_program()
    told = mixes.search_the_rest()
    return mixes.found, told


class _Mixes:
    """The mixes of some types, the best fleet known, and what is known to fail."""

    def __init__(self, search: Search, sizings: Sequence[Sizing], best: Fleet | None) -> None:
        self._search, self._best = search, best
        self._types = tuple(s.worker_type for s in sizings)
        self._bounds = MixBounds(search, self._types)
        self._limit = np.array([math.inf if t.limit is None else t.limit for t in self._types])
        usd = [t.usd_per_h for t in self._types]
        self._gpus = np.array([t.gpus for t in self._types], float)
        self._prices = self._gpus if None in usd else np.array(usd, float)
        self._guide = self._guides(sizings)
        self._may_hurt = np.array([s.workers is None for s in sizings])
        self._failed: list[Counts] = []
        self._weak = 0.0  # by the guide, what failed most surprisingly
        self._mixes = self._replays = 0
        self.found: Mixed | None = None

    def _guides(self, sizings: Sequence[Sizing]) -> NDArray[np.float64]:
        """[types] the share of the load that a worker carries, as far as is known: no bound."""
        bounds = self._bounds
        known = {i: 1.0 / fraction_needed(s, self._search) for i, s in enumerate(sizings) if s.workers}
        scale = FAR / max(bounds.demand, CRUMB)
        if known:
            scale = float(np.median([share / bounds.weights[i] for i, share in known.items()]))
        alone = [self._search.terms.attained(met, self._search.outline) for met in bounds.met]
        return np.array(
            [known.get(i, scale * bounds.weights[i] * max(alone[i], CRUMB)) for i in range(len(sizings))]
        )

    def ask_the_program(self) -> None:
        """Replay what the integer program picks, until a pick holds or is no longer cheaper."""
        names = [t.name for t in self._types]
        if len(set(names)) < len(names) or not math.isfinite(self._bounds.demand):
            return
        weights = Weights(names[0], dict(zip(names, self._guide.tolist(), strict=True)))
        demand = 1.0
        for _ in range(GUIDED):
            try:
                counts = cheapest(MixNeed(self._types, weights, demand, self._limits))
            except Infeasible:
                return
            picked = np.array([counts.get(name, 0) for name in names], np.int64)
            if self._best is not None and not self._fleet(picked).cost < self._best.cost:
                return
            is_new = len(counts) > 1 and not any(self._is_part(picked, one) for one in self._failed)
            if is_new and self._bounds.possible(picked[None])[0] and self._holds(picked):
                return
            demand *= MORE if self._best is not None else MORE_AT_FIRST

    @property
    def _limits(self) -> MixSettings:
        request = self._search.request
        is_priced = all(t.usd_per_h is not None for t in self._types)
        return MixSettings(
            max_gpus=request.max_gpus, budget_usd_per_h=request.budget_usd_per_h if is_priced else None
        )

    def search_the_rest(self) -> MixSearch | None:
        """Discard cheaper mixes or replay them; None where nothing bounds what they cost."""
        if not math.isfinite(self._most):
            return None
        left, step, is_whole = self._listed()
        left = self._searched(left)
        # A mix that is not listed is part of one that is, or costs about as much as the best.
        first = float(left[0] @ self._prices) if len(left) else self._most
        least = first - (step - 1) * float(self._prices.sum()) if is_whole else 0.0
        is_done = len(left) == 0 and step == 1 and is_whole
        while step > 1 and self._best is not None:
            step = (step + 1) // 2
            self._searched(self._around(step))
        least = max(least, self._bounds.demand * float((self._prices / self._bounds.weights).min()))
        return MixSearch(self._mixes, self._replays, None if is_done else least)

    @property
    def _most(self) -> float:
        """What a mix may cost: as much as the best fleet, or as the limits allow."""
        if self._best is not None:
            return float(self._counts(self._best) @ self._prices) if self.found else self._cost(self._best)
        request, prices = self._search.request, self._prices
        budget = request.budget_usd_per_h
        gpus = request.max_gpus
        by_gpus = math.inf if gpus is None else gpus * float((prices / self._gpus).max())
        return min(math.inf if budget is None else budget * (1.0 + CRUMB), by_gpus)

    def _cost(self, fleet: Fleet) -> float:
        usd = fleet.usd_per_hour
        return float(fleet.gpus) if usd is None or self._prices is self._gpus else usd

    def _counts(self, fleet: Fleet) -> Counts:
        return np.array(
            [sum(g.workers for g in fleet.groups if g.worker_type is t) for t in self._types], np.int64
        )

    def _listed(self) -> tuple[Counts, int, bool]:
        """Mixes that may be cheaper, cheapest first, the step in which counts go up, and whether others are
        parts of these or near the price of the best."""
        every, step = np.ones(len(self._types), bool), 1
        listed = self._affordable(every, 1)
        if listed is None and len(self._types) > KINDS:
            value = np.argsort(self._prices / self._guide, kind="stable")[:KINDS]
            every = np.isin(np.arange(len(self._types)), value)
            listed = self._affordable(every, 1)
        while listed is None:
            step *= 2
            listed = self._affordable(every, step)
        is_whole = bool(every.all()) and (step == 1 or self._search.request.max_gpus is None)
        return self._cheaper(listed), step, is_whole

    def _affordable(self, used: NDArray[np.bool_], step: int) -> Counts | None:
        """All counts of these types in steps, no dearer than the best; None where there are too many."""
        counts = np.zeros((1, len(self._types)), np.int64)
        for kind in np.flatnonzero(used).tolist():
            room = self._most - counts @ self._prices + CRUMB
            most = np.minimum(room / max(self._prices[kind], CRUMB), 1000).astype(np.int64) // step
            if (most + 1).sum() > LISTED:
                return None
            rows = np.repeat(counts, most + 1, axis=0)
            starts = np.cumsum(most + 1) - (most + 1)
            rows[:, kind] = step * (np.arange(len(rows)) - np.repeat(starts, most + 1))
            counts = rows
        return counts

    def _around(self, step: int) -> Counts:
        """Mixes around the best one, by up to two steps of each of its types."""
        assert self._best is not None
        at = self._counts(self._best)
        moved = np.flatnonzero(at)[:KINDS]
        grid = np.stack(np.meshgrid(*[np.arange(-2, 3) * step] * len(moved), indexing="ij"), axis=-1)
        counts = np.repeat(at[None], grid.size // len(moved), axis=0)
        counts[:, moved] += grid.reshape(-1, len(moved))
        return self._cheaper(counts[(counts >= 0).all(axis=1)])

    def _cheaper(self, counts: Counts) -> Counts:
        """Those of some mixes that may be a cheaper answer, the cheapest first."""
        cost, gpus, workers = counts @ self._prices, counts @ self._gpus, counts.sum(axis=1)
        keep = ((counts > 0).sum(axis=1) > 1) & (counts <= self._limit).all(axis=1)
        if self._best is None:
            keep &= cost <= self._most
        else:
            most, best = self._most, self._best
            fewer = gpus < best.gpus
            keep &= (cost < most - CRUMB) | ((cost <= most + CRUMB) & fewer)
        for failed in self._failed:
            keep &= ~self._is_part(counts, failed)
        counts, order = counts[keep], np.lexsort((workers[keep], gpus[keep], cost[keep]))
        counts = counts[order]
        counts = counts[self._bounds.possible(counts)] if len(counts) else counts
        fleets = [self._fleet(row) for row in counts]
        allowed = [is_allowed(f.usd_per_hour, f.gpus, self._search.request) for f in fleets]
        return counts[np.array(allowed, bool)] if len(counts) else counts

    def _is_part(self, counts: Counts, failed: Counts) -> NDArray[np.bool_]:
        """Whether each of some mixes is part of one that fails, less only workers that never hurt."""
        is_part = (counts <= failed) & ((counts == failed) | ~self._may_hurt)
        return np.asarray(is_part.all(axis=-1))

    def _searched(self, left: Counts) -> Counts:
        """Replay mixes until none of `left` can be cheaper; what is left when the replays are used up."""
        while len(left) and self._replays < BUDGET:
            hopeful = left[left @ self._guide > self._weak]
            if len(hopeful) and self._replays < HOPEFUL * BUDGET:
                some = hopeful[: (len(hopeful) + 1) // 2]
                tried = some[int(np.argmax(some @ self._guide))]
            else:
                tried = _largest(left)
            left = self._cheaper(left) if self._holds(tried) else left[~self._is_part(left, tried)]
        return left

    def _holds(self, counts: Counts) -> bool:
        """Whether a mix meets the target on the trace and at the asked confidence; it is the best then."""
        mix, search = self._fleet(counts), self._search
        trial = Trial(search, mix, at_once=1)
        self._mixes += 1
        holds = not search.hardest or trial.holds(screening=True)
        if holds:
            on_trace = search.replay(mix, most_missed=search.may_miss)
            self._replays += 1
            holds = search.meets(on_trace) and trial.holds()
        self._replays += trial.replays
        if holds:
            self._best, self.found = mix, Mixed(mix, trial.verdict(), trial.shares_missed)
        else:
            self._failed.append(counts)
            self._weak = max(self._weak, float(counts @ self._guide))
        return holds

    def _fleet(self, counts: Counts) -> Fleet:
        """The fleet with these counts of each type, without types that have none."""
        pairs = zip(self._types, counts.tolist(), strict=True)
        chosen = sorted(pairs, key=lambda pair: (pair[0].gpu or "", pair[0].tp_degree))
        return Fleet(tuple(WorkerGroup(kind, n) for kind, n in chosen if n))


def _largest(left: Counts) -> Counts:
    """Of the mixes that the first is a part of, the one that has most of them as parts."""
    above = left[(left >= left[0]).all(axis=1)][-COMPARED:]
    parts = [int((left[: 10 * COMPARED] <= one).all(axis=1).sum()) for one in above]
    return np.asarray(above[int(np.argmax(parts))])
