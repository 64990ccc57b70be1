"""Kinds of worker in one fleet, and what each is worth in reference workers.

Demand is counted in reference workers, those of the kind that carries least of this traffic, and held in
tenths of them: rounded to whole ones it would ask for half a worker too many, in the mean. At the lengths
seen, x_v(c) being what a worker of kind v carries of class c (scaler.line) and s_c the class's share of the
requests,

    capacity_v = 1 / Σ_c s_c / x_v(c)        weight_v = capacity_v / capacity_reference

Lengths drift all the time, a little. The weights stay as they are until one of them is off by more than
`DRIFT`, so that the fleet is not rearranged for nothing.

Spot workers are reclaimed: how many of those bought stand at a time.

Each is reclaimed r times an hour, independently of the others, and stands again after the cold start T; so at
any time it is missing with probability q = r·T / (1 + r·T), and of n bought Binomial(n, q) are. What takes
many workers at once, such as a zone that is cleared, is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from scipy.special import bdtr

from controlplane.errors import BadInput
from controlplane.scaler.line import LEAST_REQUESTS, Line, Speed, capacity_rps
from controlplane.scaler.traffic import Mix

DRIFT = 0.1
PARTS = 10  # of a reference worker: what demand is rounded up to
_HAIR = 1e-6  # weights are rounded numbers: 3 · 0.33 carries 0.99


@dataclass(frozen=True, slots=True)
class KindSettings:
    """A kind of worker that may be had. `kind` is its name, as in WorkerLoad.

    `speed` None: not known; such a kind is not launched, and while any of it is wanted the whole mix is held.
    `usd_per_h`: of one worker; where any kind's is None, GPUs are counted instead. `low`: always kept,
    however little arrives. `high`: so many can be had at most, None = no limit. `reclaims_per_h` above 0:
    spot workers, each taken away so often.
    """

    kind: str
    speed: Speed | None
    usd_per_h: float | None = None
    gpus: int = 1
    low: int = 0
    high: int | None = None
    reclaims_per_h: float = 0.0

    def __post_init__(self) -> None:
        if not self.kind:
            raise BadInput("kinds: kind: a name is needed")
        if self.usd_per_h is not None and not 0.0 <= self.usd_per_h < math.inf:
            raise BadInput(f"kinds: {self.kind}: usd_per_h: must not be negative, got {self.usd_per_h:g}")
        if self.gpus < 1:
            raise BadInput(f"kinds: {self.kind}: gpus: must be at least 1, got {self.gpus}")
        if self.low < 0 or (self.high is not None and self.high < self.low):
            raise BadInput(f"kinds: {self.kind}: need 0 <= low <= high, got {self.low} and {self.high}")
        if not 0.0 <= self.reclaims_per_h < math.inf:
            raise BadInput(
                f"kinds: {self.kind}: reclaims_per_h: must not be negative, got {self.reclaims_per_h:g}"
            )


@dataclass(frozen=True, slots=True)
class MixingSettings:
    """How counts are chosen among kinds.

    `horizon_s`: what a change costs (a launch's cold start, a drain) is weighed as if it came once in so
    long. `survive`: the probability with which at any time enough spot workers stand. `budget_usd_per_h`:
    of all workers together; it needs every kind's price.
    """

    horizon_s: float = 900.0
    survive: float = 0.99
    budget_usd_per_h: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.horizon_s < math.inf:
            raise BadInput(f"mixing: horizon_s: must be a positive duration, got {self.horizon_s:g}")
        if not 0.0 < self.survive < 1.0:
            raise BadInput(f"mixing: survive: must be within 0 and 1, got {self.survive:g}")
        if self.budget_usd_per_h is not None and not 0.0 <= self.budget_usd_per_h < math.inf:
            raise BadInput("mixing: budget_usd_per_h: must not be negative")


@dataclass(frozen=True, slots=True)
class Weights:
    """What a worker of each kind carries, in workers of the `reference` kind.

    Not `known`: all are taken as even.
    """

    reference: str
    of: Mapping[str, float]
    known: bool = True

    def scaled(self, line: Line, kind: str) -> Line:
        """A line in workers of `kind`, in reference workers."""
        weight = self.of[kind]
        source = f"{line.source}, in {self.reference}"
        return Line(line.workers_per_rps * weight, line.intercept * weight, source)


def check_kinds(
    kinds: Sequence[KindSettings], mixing: MixingSettings, low: int, high: int | None, line_kind: str | None
) -> None:
    """Raises BadInput where names repeat, or limits of kinds, fleet and budget contradict each other."""
    names = [k.kind for k in kinds]
    if len(set(names)) < len(names):
        raise BadInput(f"kinds: every kind once, got {', '.join(names)}")
    if line_kind is not None and line_kind not in names:
        raise BadInput(f"kinds: line_kind: {line_kind!r} is none of {', '.join(names)}")
    least = sum(k.low for k in kinds)
    if high is not None and least > high:
        raise BadInput(f"kinds: low: {least} workers are always kept, but no more than {high} are allowed")
    highs = [k.high for k in kinds if k.high is not None]
    if len(highs) == len(names) and sum(highs) < low:
        raise BadInput(f"kinds: high: {sum(highs)} workers can be had, but at least {low} are to be kept")
    if mixing.budget_usd_per_h is None:
        return
    if any(k.usd_per_h is None for k in kinds):
        raise BadInput("mixing: a budget needs a price for every kind of worker")
    kept = sum((k.usd_per_h or 0.0) * k.low for k in kinds)
    if kept > mixing.budget_usd_per_h:
        raise BadInput(f"kinds: low: what is always kept costs ${kept:g}/h, more than the budget")


def weigh(
    kinds: Sequence[KindSettings], there: Mapping[str, int], mix: Mix, before: Weights | None
) -> Weights | None:
    """The weights at the lengths of `mix`; `before` while they still hold.

    None before enough was seen, or while a kind of unknown speed is wanted (`there`, or its `low`). Unknown
    kinds of which there is none are left out.
    """
    unknown = {k.kind for k in kinds if k.speed is None}
    if any(k.low or there.get(k.kind) for k in kinds if k.kind in unknown):
        return None
    speeds = {k.kind: k.speed for k in kinds if k.speed is not None}
    if mix.requests < LEAST_REQUESTS or not speeds:
        return before if before is not None and before.of.keys() == speeds.keys() else None
    capacity = {kind: _capacity(speed, mix) for kind, speed in speeds.items()}
    if before is not None and before.of.keys() == capacity.keys():
        unit = capacity[before.reference]
        if all(abs(capacity[kind] / unit / weight - 1.0) <= DRIFT for kind, weight in before.of.items()):
            return before
    reference = min(capacity, key=lambda kind: (capacity[kind], kind))
    return Weights(reference, {kind: round(c / capacity[reference], 3) for kind, c in capacity.items()})


def even(kinds: Sequence[KindSettings]) -> Weights:
    """Every worker as good as any other: all that can be said where `weigh` knows nothing.

    Of the kinds of known speed, where there are any.
    """
    named = [k.kind for k in kinds if k.speed is not None] or [k.kind for k in kinds]
    return Weights(named[0], dict.fromkeys(named, 1.0), known=False)


def stands(
    kinds: Sequence[KindSettings], kind: KindSettings, survive: float, cold_start_s: float
) -> Callable[[int], int] | None:
    """How many of n workers of `kind` can be counted on; None = all of them.

    Kinds are reclaimed independently: with m spot kinds each must survive at `survive` to the power 1/m.
    """
    missing = missing_share(kind.reclaims_per_h, cold_start_s)
    if missing == 0.0:
        return None
    each = survive ** (1.0 / sum(k.reclaims_per_h > 0 for k in kinds))

    @cache
    def standing(count: int) -> int:
        return count - most_missing(count, missing, each)

    return standing


def carried(
    kinds: Sequence[KindSettings],
    mixing: MixingSettings,
    weights: Weights,
    counts: Mapping[str, int],
    cold_start_s: float,
) -> float:
    """Reference workers that `counts` can be counted on for; kinds without a weight carry nothing."""
    sums = 0.0
    for k in kinds:
        count, spot = counts.get(k.kind, 0), stands(kinds, k, mixing.survive, cold_start_s)
        sums += weights.of.get(k.kind, 0.0) * (count if spot is None else spot(count))
    return sums


def in_parts(workers: float) -> int:
    """Reference workers in whole `PARTS`, no more than there are."""
    return math.floor(workers * PARTS + _HAIR)


def _capacity(speed: Speed, mix: Mix) -> float:
    return mix.requests / sum(c.requests / capacity_rps(speed, c) for c in mix.classes)


def missing_share(reclaims_per_h: float, cold_start_s: float) -> float:
    """Probability that a worker is missing at a given time: gone for T after every 1/r hours on average."""
    gone = reclaims_per_h * cold_start_s / 3600.0
    return gone / (1.0 + gone)


def enough_stand(needed: int, spares: int, missing: float) -> float:
    """P(at least `needed` of `needed + spares` workers stand)."""
    return float(bdtr(spares, needed + spares, missing))


def most_missing(workers: int, missing: float, survive: float) -> int:
    """The fewest k with P(at most k of `workers` are missing) >= survive."""
    k = 0
    while k < workers and enough_stand(workers - k, k, missing) < survive:
        k += 1
    return k
