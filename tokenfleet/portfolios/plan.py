"""The plan of a portfolio: the cheapest choice among the fleets that its models could have (offers.py).

All schedules are laid on one axis of time: that of the clock where every trace has one, all days being alike;
else all traces begin together. Outside its trace a model has its whole fleet. The requests of a model's LoRA
adapters are among its own. A plan of its fleet without them shows what they add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import Infeasible
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.plan_file import PlanFile, parse_plan
from tokenfleet.portfolios.choose import (
    Choice,
    Group,
    Limit,
    Market,
    Offer,
    cheapest_relaxation,
    choose,
    least_excess,
    raised,
)
from tokenfleet.portfolios.offers import GpuPurchase, Made, PlanTasks, Without, fleets_of, gpus_of
from tokenfleet.portfolios.request import Portfolio
from tokenfleet.whatifs.run import results_of
from tokenfleet.whatifs.solve import Cache, Result

DAY_S = 86_400.0


@dataclass(frozen=True)
class Row:
    """What one model gets: its plan, and what the whole fleet costs if it never changes (dollars an hour).

    `usd_per_h`: on the schedule. `others`: the same for each GPU purchase that was not taken, those partly on
    spot left out, or why there is no fleet of it. `zone` is None where the limits name none. `beside`: the
    other models that may be on GPUs that it has parts of. `adapters`: each one's share of the model's
    requests. `adapters_usd_per_h`: what the whole fleet costs more for all of them (None: not known, or there
    are none).
    """

    name: str
    kind: GpuPurchase
    zone: str | None
    plan: PlanFile
    usd_per_h: float
    constant_usd_per_h: float
    others: Mapping[GpuPurchase, float | str]
    beside: tuple[str, ...]
    adapters: Mapping[str, float] = field(default_factory=dict)
    adapters_usd_per_h: float | None = None

    @property
    def on_demand_workers(self) -> int:
        """Workers of the whole fleet that are on demand."""
        return self.kind.on_demand if self.kind.is_spot else self.plan.workers


@dataclass(frozen=True, slots=True)
class Use:
    """A limit, the most that is taken of it at any time, and what more of it saves.

    `more`: the least growth that makes the answer cheaper; `saves_usd_per_h`: by how much. None: none does.
    """

    name: str
    most: float
    peak: float
    more: float | None
    saves_usd_per_h: float | None


@dataclass(frozen=True)
class PortfolioPlan:
    """The answer: a row for each model, the limits, and GPUs by type over time.

    `unlimited_usd_per_h`: what it would cost without limits; `constant_usd_per_h`: with them, if no fleet
    ever changed (None where the limits do not allow that). `free_usd_per_h`: of all, for parts of GPUs that
    no worker has. `rows` are in the order of the models. `edges_s`: the windows' edges; `gpus`
    [windows, types], whole.
    """

    rows: tuple[Row, ...]
    uses: tuple[Use, ...]
    usd_per_h: float
    unlimited_usd_per_h: float
    constant_usd_per_h: float | None
    free_usd_per_h: float
    gpu_types: tuple[str, ...]
    edges_s: NDArray[np.float64]
    gpus: NDArray[np.int64]
    warnings: tuple[str, ...]


def plan_portfolio(
    portfolio: Portfolio, asked: PlanTasks, jobs: int, cache: Cache, told: Callable[[], None] = lambda: None
) -> PortfolioPlan:
    """The cheapest choice of fleets within the limits. `told` is called after each task.

    Raises Infeasible where a model has no fleet on any GPU on offer, or the limits leave no choice; then
    with the cheapest relaxation.
    """
    chosen = cheapest(portfolio, *fleets_of(portfolio, asked, jobs, cache, told), asked.warnings)
    kinds = [row.kind._replace(on_demand=0, most=None) for row in chosen.rows]
    bare = [asked.bare.get(key) for key in enumerate(kinds)]
    alone = results_of([task for task in bare if task is not None], jobs, None, cache, lambda: None)
    rows = tuple(
        row if task is None else _with_adapters(row, asked.adapters[number], alone[task.number])
        for number, (row, task) in enumerate(zip(chosen.rows, bare, strict=True))
    )
    return replace(chosen, rows=rows)


def _with_adapters(row: Row, adapters: Mapping[str, float], alone: Result) -> Row:
    """The row of a model with adapters, where its plan without them is `alone`."""
    adds = None
    if alone["plan"] is not None:
        bare = parse_plan(alone["plan"], f"{row.name} without its adapters")
        if bare.feasible:
            # At the same prices: of a fleet partly on spot they add to those on spot.
            both = [Fleet(plan.groups).usd_per_hour or 0.0 for plan in (row.plan, bare)]
            adds = both[0] - both[1]
    return replace(row, adapters=adapters, adapters_usd_per_h=adds)


def cheapest(
    portfolio: Portfolio,
    made: Sequence[Made],
    without: Without,
    warnings: tuple[str, ...],
) -> PortfolioPlan:
    """The cheapest choice among these fleets within the limits, without the figures of adapters.

    Raises Infeasible, with the cheapest relaxation, where the limits leave no choice.
    """
    types = tuple(sorted(set(chain.from_iterable(gpus_of(one.fleet) for one in made))))
    pools = [(gpu, zone) for gpu in types for zone in portfolio.zones or (None,)]
    starts_s = _starts_s(portfolio, made)
    edges_s = _edges_s(made, starts_s)
    offers = tuple(_offer(one, starts_s[one.model], edges_s, pools) for one in made)
    named = _limits(portfolio, pools)
    market = Market(offers, np.diff(edges_s) / 3600.0, tuple(limit for _, limit in named))
    try:
        choice = choose(market)
    except Infeasible:
        raise Infeasible(_what_gives(market, named)) from None
    free = choose(replace(market, limits=()))
    constant = replace(market, offers=tuple(_at_most(offer) for offer in offers))
    try:
        fixed = choose(constant).usd_per_h
    except Infeasible:
        fixed = None
    names = [model.name for model in portfolio.models]
    in_order = sorted(choice.offers, key=lambda taken: made[taken].model)
    rows = [_row(names, made, taken, choice, market, without) for taken in in_order]
    taken = np.sum([offer.gpus for offer in market.bought(choice.offers)], axis=0)
    return PortfolioPlan(
        tuple(rows),
        tuple(_use(market, number, name, choice) for number, (name, _) in enumerate(named)),
        choice.usd_per_h,
        free.usd_per_h,
        fixed,
        choice.usd_per_h - sum(row.usd_per_h for row in rows),
        types,
        edges_s,
        taken.reshape(len(taken), len(types), -1).sum(axis=2).astype(np.int64),
        warnings,
    )


def _row(
    names: Sequence[str],
    made: Sequence[Made],
    taken: int,
    choice: Choice,
    market: Market,
    without: Without,
) -> Row:
    one, usd = made[taken], [market.usd_per_h(offer) for offer in market.offers]
    others: dict[GpuPurchase, float | str] = {
        kind: why for (n, kind), why in without.items() if n == one.model
    }
    others |= {
        other.kind: usd[o]
        for o, other in enumerate(made)
        if other.model == one.model
        and other.kind != one.kind
        and not (other.kind.on_demand or other.kind.most)
    }
    group = market.offers[taken].shared
    beside = [
        o for o in choice.offers if o != taken and group is not None and market.offers[o].shared == group
    ]
    return Row(
        names[one.model],
        one.kind,
        one.zone,
        one.plan,
        usd[taken],
        one.bought(one.fleet.workers)[2],
        others,
        tuple(names[made[o].model] for o in beside),
    )


def _starts_s(portfolio: Portfolio, made: Sequence[Made]) -> list[float]:
    """When each model's trace begins on the common axis, which begins with the first of them."""
    clocks = {one.model: one.plan.inputs.clock_start_unix_s for one in made}
    if any(clock is None for clock in clocks.values()):
        return [0.0] * len(portfolio.models)
    of_day = [(clocks[number] or 0.0) % DAY_S for number in range(len(portfolio.models))]
    return [float(round(start_s - min(of_day))) for start_s in of_day]


def _edges_s(made: Sequence[Made], starts_s: Sequence[float]) -> NDArray[np.float64]:
    """Where any fleet's size changes; one window of an hour where none has a schedule."""
    edges = {starts_s[one.model] + t for one in made for s in one.stretches for t in (s.start_s, s.end_s)}
    found: NDArray[np.float64] = np.unique(np.array([*edges, 0.0]))
    return found if len(found) > 1 else np.array([0.0, 3600.0])


def _offer(
    made: Made, start_s: float, edges_s: NDArray[np.float64], pools: Sequence[tuple[str, str | None]]
) -> Offer:
    middles = (edges_s[:-1] + edges_s[1:]) / 2 - start_s
    gpus = np.zeros((len(middles), len(pools)))
    on_spot, usd = np.zeros(len(middles)), np.zeros(len(middles))
    parts = made.kind.workers_per_gpu
    for w, at_s in enumerate(middles):
        counts = (s.workers for s in made.stretches if s.start_s <= at_s < s.end_s)
        taken, on_spot[w], usd[w] = made.bought(next(counts, made.fleet.workers))
        for gpu, n in taken.items():
            gpus[w, pools.index((gpu, made.zone))] = n / parts
    whole = (made.fleet.usd_per_hour or 0.0) / made.fleet.workers * parts
    pool = pools.index((made.kind.gpu, made.zone)) if parts > 1 else 0
    shared = Group(pool, parts, round(whole, 6)) if parts > 1 else None
    return Offer(made.model, gpus, usd, on_spot, shared)


def _at_most(offer: Offer) -> Offer:
    """The offer with its largest window's fleet all the time."""
    gpus, usd = offer.gpus.max(axis=0), offer.usd_per_h.max()
    return replace(
        offer,
        gpus=np.broadcast_to(gpus, offer.gpus.shape),
        usd_per_h=np.full(len(offer.usd_per_h), usd),
        on_spot=float(np.max(offer.on_spot)),
    )


def _limits(portfolio: Portfolio, pools: Sequence[tuple[str, str | None]]) -> list[tuple[str, Limit]]:
    """The limits and their names as the file has them."""
    limits = []
    for gpu, most in portfolio.gpus.items():
        if of := tuple(i for i, (one, _) in enumerate(pools) if one == gpu):
            limits.append((f"gpus.{gpu}", Limit(of, most)))
    for i, (gpu, zone) in enumerate(pools):
        if zone is not None:
            limits.append((f"zones.{zone}.{gpu}", Limit((i,), portfolio.zones[zone].get(gpu, 0))))
    if portfolio.spot_share is not None:
        limits.append(("spot-share", Limit("spot", portfolio.spot_share)))
    if portfolio.max_gpus is not None:
        limits.append(("max-gpus", Limit("gpus", portfolio.max_gpus)))
    if portfolio.budget_usd_per_h is not None:
        limits.append(("budget-usd-per-h", Limit("usd", portfolio.budget_usd_per_h)))
    return limits


def _use(market: Market, number: int, name: str, choice: Choice) -> Use:
    limit = market.limits[number]
    more = least_excess(market, number, choice.usd_per_h)
    saves = None if more is None else choice.usd_per_h - choose(raised(market, number, more)).usd_per_h
    return Use(name, limit.most, market.peak(limit, choice.offers), more, saves)


def _what_gives(market: Market, named: Sequence[tuple[str, Limit]]) -> str:
    """Why no choice keeps to the limits: what of all to raise, at least cost, and of each by itself."""
    price = float(np.mean([o.usd_per_h.sum() / max(o.gpus.sum(), 1) for o in market.offers]))
    prices = [1.0 if limit.of == "usd" else price for _, limit in named]
    raise_these = cheapest_relaxation(market, prices)
    least = " and ".join(_raised_text(named[number], more) for number, more in raise_these.items())
    alone = "; ".join(_raised_text(one, least_excess(market, number)) for number, one in enumerate(named))
    by_one = f". By one limit alone: {alone}" if len(named) > 1 else ""
    return f"no choice of fleets is within the limits; the cheapest way out: raise {least}{by_one}"


def _raised_text(named: tuple[str, Limit], more: float | None) -> str:
    name, limit = named
    raised = "" if more is None else f" from {limit.most:g} to {limit.most + more:.10g}"
    return name + (raised or ": no rise is enough")
