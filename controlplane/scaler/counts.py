"""How many workers of each kind: demand in reference workers to the cheapest counts, and how to get there.

The program is scaler.fleet's. What a launch pays in its cold start and a worker let go in its drain is spread
over `horizon_s`, so a mix that is no cheaper than that is not changed for.

Where one kind gives way to another, those that go stay until those that come serve, as far as demand needs
them and limits allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.errors import Infeasible
from controlplane.scaler.mix import Candidate, FleetLimits, cheapest_counts, most_counts
from controlplane.scaler.worker_types import PARTS, KindSettings, MixingSettings, Weights, carried, stands

Counts = Mapping[str, int]
_HAIR = 1e-6  # weights are rounded numbers


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to the program: so many `units` (PARTS of a reference worker), with so much to be had.

    `kinds`: their speeds are not read, they count as weights. `there`: what is wanted now. `least`, `most`:
    workers, all kinds together. `cold_start_s`, `drain_s`: what a launch and a drain take.
    """

    kinds: tuple[KindSettings, ...]
    mixing: MixingSettings
    weights: Weights
    units: int
    there: Counts
    least: int = 0
    most: int | None = None
    cold_start_s: float = 0.0
    drain_s: float = 0.0

    @property
    def needed(self) -> float:
        """Reference workers asked for."""
        return self.units / PARTS

    def carries(self, counts: Counts) -> float:
        """Reference workers that these counts can be counted on for."""
        return carried(self.kinds, self.mixing, self.weights, counts, self.cold_start_s)

    def is_enough(self, counts: Counts) -> bool:
        return self.carries(counts) >= self.needed - _HAIR

    def is_allowed(self, counts: Counts) -> bool:
        """Whether the fleet's limits allow these counts."""
        budget = self.mixing.budget_usd_per_h
        within = self.most is None or sum(counts.values()) <= self.most
        return within and (budget is None or (usd_per_h(self.kinds, counts) or 0.0) <= budget + 1e-9)


def choose(asked: Asked) -> dict[str, int]:
    """The cheapest counts that carry the units; those with most capacity where none within the limits do.

    Kinds with none are left out; those that are not to be chosen from keep what is there.
    """
    known = [k for k in asked.kinds if k.kind in asked.weights.of]
    others = {kind: n for kind, n in asked.there.items() if kind not in asked.weights.of}
    candidates = [
        Candidate(
            asked.weights.of[k.kind],
            k.gpus,
            k.usd_per_h,
            k.low,
            k.high,
            asked.there.get(k.kind, 0),
            asked.cold_start_s / asked.mixing.horizon_s,
            asked.drain_s / asked.mixing.horizon_s,
            stands(asked.kinds, k, asked.mixing.survive, asked.cold_start_s),
        )
        for k in known
    ]
    elsewhere = sum(others.values())
    most = None if asked.most is None else max(asked.most - elsewhere, sum(k.low for k in known))
    least = max(asked.least - elsewhere, 0)
    limits = FleetLimits(None, asked.mixing.budget_usd_per_h, least, most)
    try:
        found = cheapest_counts(asked.needed, candidates, limits)
    except Infeasible:
        found = most_counts(asked.needed, candidates, limits)
    return {k.kind: n for k, n in zip(known, found, strict=True) if n} | others


def bridged(asked: Asked, chosen: Counts, serving: Counts) -> dict[str, int]:
    """The chosen counts, and besides those of the kinds that shrink whom demand needs until others serve."""
    counts = {k.kind: chosen.get(k.kind, 0) for k in asked.kinds} | dict(chosen)
    ready = {kind: min(n, serving.get(kind, 0)) for kind, n in counts.items()}
    for kind in sorted(asked.weights.of, key=lambda kind: (-asked.weights.of[kind], kind)):
        while (
            counts[kind] < asked.there.get(kind, 0)
            and ready[kind] < serving.get(kind, 0)
            and not asked.is_enough(ready)
            and asked.is_allowed(counts | {kind: counts[kind] + 1})
        ):
            counts[kind] += 1
            ready[kind] += 1
    return present(counts)


def stepped(
    kinds: Sequence[KindSettings],
    capacity: Mapping[str, float],
    there: Counts,
    total: int,
    may_go: Callable[[Counts], bool] = lambda rest: True,
) -> dict[str, int]:
    """`there` brought to `total` workers one by one, within the kinds' limits; as near as they let it.

    More: of the kind cheapest for its `capacity` (1 where it is not said). Fewer: of the dearest for it whose
    going leaves a `rest` that `may_go`.
    """
    counts = {k.kind: 0 for k in kinds} | dict(there)
    priced = all(k.usd_per_h is not None for k in kinds)

    def price(k: KindSettings) -> tuple[float, str]:
        return ((k.usd_per_h or 0.0) if priced else k.gpus) / capacity.get(k.kind, 1.0), k.kind

    while (missing := total - sum(counts.values())) != 0:
        more = 1 if missing > 0 else -1
        able = [
            k
            for k in kinds
            if (k.high is None or counts[k.kind] < k.high if more > 0 else counts[k.kind] > k.low)
            and (more > 0 or may_go(counts | {k.kind: counts[k.kind] - 1}))
        ]
        if not able:
            break
        chosen = min(able, key=price) if more > 0 else max(able, key=price)
        counts[chosen.kind] += more
    return present(counts)


def present(counts: Counts) -> dict[str, int]:
    """The counts without the kinds of which there is none."""
    return {kind: n for kind, n in counts.items() if n}


def alone(asked: Asked) -> dict[str, int]:
    """How many workers of each kind would carry the units alone, whether so many can be had or not."""
    counts = {}
    for k in asked.kinds:
        if k.kind not in asked.weights.of:
            continue
        n = math.ceil(asked.needed / asked.weights.of[k.kind] - _HAIR)
        while not asked.is_enough({k.kind: n}):
            n += 1
        counts[k.kind] = n
    return counts


def usd_per_h(kinds: Sequence[KindSettings], counts: Counts) -> float | None:
    """What these workers cost an hour; None where a kind's price is not known."""
    prices = {k.kind: k.usd_per_h for k in kinds}
    used = present(counts)
    if any(prices.get(kind) is None for kind in used):
        return None
    return sum((prices[kind] or 0.0) * n for kind, n in used.items())


def said(counts: Counts) -> str:
    """`2 h100 + 1 a100`."""
    return " + ".join(f"{n} {kind}" for kind, n in sorted(present(counts).items())) or "none"
