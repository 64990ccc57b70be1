"""The choice of one fleet for each model, so that all of them keep to the limits at least cost.

An *offer* o is one way to serve one model: what it takes in each window of time. With x_o binary,

    minimise    Σ hours_w · usd_ow · x_o / Σ hours_w
    subject to  Σ x_o = 1                      for each model
                Σ used_l(o, w) · x_o <= most_l     for each limit l and window w

used_l counts GPUs of some *capacity pools* (the GPUs of one type in one zone), all GPUs, or dollars an hour.
At most a share s of the GPUs on spot means Σ (spot_o(w) - s · gpus_o(w)) · x_o <= 0. A fleet that may be
partly on spot is several offers. Fleets are the planner's own, whole, so what is chosen is what it has
replayed.
Windows tie no offers together: a model that sleeps while another is awake leaves it its GPUs.

Workers that have a part of a GPU share it with others of that pool and price. Whole GPUs are bought for each
such *group* (`controlplane/scaler/limits.py`).

All GPUs of a pool that are shared are cut alike: with y_pn binary, Σ_n y_pn <= 1, and x_o <= y_pn for offers
of 1/n of its GPUs. Equal parts always fit into the whole GPUs bought, and no worker has more neighbours than
its plan allows for.

How far a limit is from making the answer cheaper is another solve: the least excess of the limit at a lower
cost. Integer programs have no useful duals. The least share on spot is a ratio: Dinkelbach's method finds it,
from any choice down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pulp
from numpy.typing import NDArray

from controlplane.errors import Infeasible
from controlplane.scaler.limits import HAIR, bought, keep_to, solve, whole_gpus

_CENT = 0.01  # a saving of less an hour is none
_TIE = 1e-6  # dollars a GPU: of equally dear answers the one with fewer GPUs, and fewer that are shared


class Group(NamedTuple):
    """Shared GPUs of a pool, each with `workers_per_gpu` workers, at dollars an hour for each GPU."""

    pool: int
    workers_per_gpu: int
    usd_per_h: float


@dataclass(frozen=True)
class Offer:
    """One way to serve model number `model`: GPUs by pool [windows, pools], dollars an hour [windows].

    `on_spot`: the GPUs on spot [windows], or one number for every window. `shared`: the GPUs that its workers
    have parts of; None: theirs are whole.
    """

    model: int
    gpus: NDArray[np.float64]
    usd_per_h: NDArray[np.float64]
    on_spot: NDArray[np.float64] | float = 0.0
    shared: Group | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit: the most that may be taken in every window.

    `of`: the GPUs of these pools, all GPUs (`gpus`), dollars an hour (`usd`), or the share of GPUs on spot
    (`spot`).
    """

    of: tuple[int, ...] | Literal["gpus", "usd", "spot"]
    most: float

    def used(self, offer: Offer) -> NDArray[np.float64]:
        """What an offer takes of it [windows]; of a share, GPUs on spot beyond it."""
        if self.of == "usd":
            return offer.usd_per_h
        if isinstance(self.of, tuple):
            return np.asarray(offer.gpus[:, self.of].sum(axis=1), np.float64)
        gpus = np.asarray(offer.gpus.sum(axis=1), np.float64)
        return offer.on_spot - self.most * gpus if self.of == "spot" else gpus


@dataclass(frozen=True)
class Choice:
    """The offer of each model, by its place among the offers, and the mean dollars an hour of all."""

    offers: tuple[int, ...]
    usd_per_h: float


@dataclass(frozen=True)
class Market:
    """Offers for each model, the windows' lengths in hours [windows], and the limits."""

    offers: tuple[Offer, ...]
    hours: NDArray[np.float64]
    limits: tuple[Limit, ...]

    def usd_per_h(self, offer: Offer) -> float:
        """Dollars an hour of an offer, over all windows."""
        return float((self.hours * offer.usd_per_h).sum() / self.hours.sum())

    def bought(self, chosen: Sequence[int]) -> list[Offer]:
        """What is bought for the chosen offers: their own GPUs, and for each group whole ones."""
        taken = [self.offers[o] for o in chosen]
        whole = [offer for offer in taken if offer.shared is None]
        for group in sorted({offer.shared for offer in taken if offer.shared is not None}):
            parts = sum(offer.gpus[:, group.pool] for offer in taken if offer.shared == group)
            one = self.one_gpu(group)
            count = bought(np.asarray(parts))
            whole.append(replace(one, gpus=one.gpus * count[:, None], usd_per_h=one.usd_per_h * count))
        return whole

    def one_gpu(self, group: Group) -> Offer:
        """A GPU of a group, as an offer to no model."""
        gpus = np.zeros_like(self.offers[0].gpus, np.float64)
        gpus[:, group.pool] = 1.0
        return Offer(-1, gpus, np.full(len(self.hours), group.usd_per_h))

    def peak(self, limit: Limit, chosen: Sequence[int]) -> float:
        """The most that the chosen offers take of a limit in any window."""
        bought = self.bought(chosen)
        if limit.of == "spot":
            gpus, spot = np.zeros(len(self.hours)), np.zeros(len(self.hours))
            for offer in bought:
                gpus += offer.gpus.sum(axis=1)
                spot += offer.on_spot
            return float((spot / np.maximum(gpus, 1)).max())
        return float(sum(limit.used(offer) for offer in bought).max())  # type: ignore[union-attr]


def choose(market: Market) -> Choice:
    """The cheapest choice. Raises Infeasible where none keeps to the limits."""
    return _Program(market).cheapest()


def least_excess(market: Market, which: int, below_usd_per_h: float | None = None) -> float | None:
    """By how much limit number `which` must grow, the others held, for an answer to exist.

    With `below_usd_per_h` for one that costs a cent less than this. None where no growth is enough.
    """
    limit = market.limits[which]
    try:
        if limit.of == "spot":
            return max(0.0, _least_share(market, which, below_usd_per_h) - limit.most)
        program = _Program(market, frozenset({which}))
        return program.least_excess({which: 1.0}, below_usd_per_h)[which]
    except Infeasible:
        return None


def _least_share(market: Market, which: int, below_usd_per_h: float | None) -> float:
    """The least share on spot of any choice that keeps to the other limits."""
    share = 1.0
    while True:
        program = _Program(raised(market, which, share - market.limits[which].most), frozenset({which}))
        excess = program.least_excess({which: 1.0}, below_usd_per_h)[which]
        less = market.peak(market.limits[which], program.chosen())
        if excess > -HAIR or less >= share:
            return share
        share = less


def cheapest_relaxation(market: Market, prices: Sequence[float]) -> dict[int, float]:
    """The cheapest growth of limits that leaves a choice, by limit number; `prices`: of each one's growth."""
    every = range(len(market.limits))
    program = _Program(market, frozenset(every))
    excess = program.least_excess(dict(zip(every, prices, strict=True)))
    for number, limit in enumerate(market.limits):
        if limit.of == "spot":  # in GPUs until here
            excess[number] = max(0.0, market.peak(limit, program.chosen()) - limit.most)
    return {limit: more for limit, more in excess.items() if more > HAIR}


def raised(market: Market, which: int, more: float) -> Market:
    """The market with one limit larger."""
    limits = list(market.limits)
    limits[which] = replace(limits[which], most=limits[which].most + more)
    return replace(market, limits=tuple(limits))


class _Program:
    """The integer program; limits in `elastic` may be exceeded."""

    def __init__(self, market: Market, elastic: frozenset[int] = frozenset()) -> None:
        self._market = market
        self._problem = pulp.LpProblem("portfolio", pulp.LpMinimize)
        self._x = [self._problem.add_variable(f"x{o}", cat="Binary") for o in range(len(market.offers))]
        for model in sorted({offer.model for offer in market.offers}):
            of_model = [x for x, offer in zip(self._x, market.offers, strict=True) if offer.model == model]
            self._problem += pulp.lpSum(of_model) == 1
        self._buy()
        self._excess: dict[int, Any] = {}
        for number, limit in enumerate(market.limits):
            self._limit(number, limit, number in elastic, len(elastic) == 1)
        self._price()

    def _buy(self) -> None:
        """What is bought: GPUs of an offer's own, the same in all windows, and those of a group in some."""
        every = np.ones(len(self._market.hours))
        self._bought: list[tuple[Offer, NDArray[np.float64], Any]] = []
        groups: set[Group] = set()
        for offer, x in zip(self._market.offers, self._x, strict=True):
            if offer.shared is None:
                self._bought.append((offer, every, x))
            else:
                groups.add(offer.shared)
        for group in sorted(groups):
            self._share(group)
        for pool in {group.pool for group in groups}:
            self._cut_alike(pool, sorted({g.workers_per_gpu for g in groups if g.pool == pool}))

    def _price(self) -> None:
        """The dollars an hour, and the rank of an answer."""
        hours = self._market.hours / self._market.hours.sum()
        usd = [float((hours * when * offer.usd_per_h).sum()) * x for offer, when, x in self._bought]
        gpus = [float((when * offer.gpus.sum(axis=1)).mean()) * x for offer, when, x in self._bought]
        parted = [x for x, offer in zip(self._x, self._market.offers, strict=True) if offer.shared]
        self._usd = pulp.lpSum(usd)
        self._ranked = self._usd + _TIE * pulp.lpSum([*gpus, *parted])

    def _cut_alike(self, pool: int, ways: Sequence[int]) -> None:
        """Allow one way in which GPUs of the pool are cut."""
        taken = [self._problem.add_variable(f"cut{pool}_{n}", cat="Binary") for n in ways]
        self._problem += pulp.lpSum(taken) <= 1
        for x, offer in zip(self._x, self._market.offers, strict=True):
            if offer.shared is not None and offer.shared.pool == pool:
                self._problem += x <= taken[ways.index(offer.shared.workers_per_gpu)]

    def _share(self, group: Group) -> None:
        """Whole GPUs for the offers that share those of a group, in each window."""
        offers = self._market.offers
        parts = np.stack([o.gpus[:, group.pool] * (o.shared == group) for o in offers], axis=1)
        one = self._market.one_gpu(group)
        for when, whole in whole_gpus(self._problem, parts, self._x, len(self._bought)):
            self._bought.append((one, when, whole))

    def _limit(self, number: int, limit: Limit, is_elastic: bool, is_alone: bool) -> None:
        is_share = limit.of == "spot"
        most: Any = 0.0 if is_share else limit.most
        if is_elastic:
            kind = "Continuous" if limit.of in ("usd", "spot") else "Integer"
            # Alone, a share's excess may be below none: how far it can still fall.
            least = None if is_share and is_alone else 0
            self._excess[number] = self._problem.add_variable(f"more{number}", lowBound=least, cat=kind)
            most = most + self._excess[number]
        used = np.stack([limit.used(offer) * when for offer, when, _ in self._bought], axis=1)
        keep_to(self._problem, used, [x for *_, x in self._bought], most)

    def cheapest(self) -> Choice:
        self._problem += self._ranked
        self._solve()
        chosen = self.chosen()
        return Choice(chosen, sum(map(self._market.usd_per_h, self._market.bought(chosen))))

    def chosen(self) -> tuple[int, ...]:
        """The offers of the last solve."""
        return tuple(o for o, x in enumerate(self._x) if (pulp.value(x) or 0.0) > 0.5)

    def least_excess(
        self, prices: dict[int, float], below_usd_per_h: float | None = None
    ) -> dict[int, float]:
        """What each elastic limit is exceeded by, the sum at these prices being least."""
        if below_usd_per_h is not None:
            self._problem += self._usd <= below_usd_per_h - _CENT
        self._problem += pulp.lpSum(prices[number] * more for number, more in self._excess.items())
        self._solve()
        found = {number: float(pulp.value(more) or 0.0) for number, more in self._excess.items()}
        return {
            number: more if self._market.limits[number].of in ("usd", "spot") else float(round(more))
            for number, more in found.items()
        }

    def _solve(self) -> None:
        solve(self._problem, "no choice of fleets keeps to the limits")
