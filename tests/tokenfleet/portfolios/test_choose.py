"""The choice among offers: against every combination, and what the least growth of a limit is."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import Infeasible
from tokenfleet.portfolios.choose import (
    Group,
    Limit,
    Market,
    Offer,
    cheapest_relaxation,
    choose,
    least_excess,
    raised,
)

POOLS, WINDOWS = 3, 3
PRICES = np.array([1.0, 2.5, 2.5])  # dollars a GPU-hour


@st.composite
def questions(draw):
    models = draw(st.integers(1, 4))
    offers = []
    for model in range(models):
        if draw(st.booleans()):  # and a part of the GPUs of one pool
            pool, counts = (
                draw(st.integers(0, POOLS - 1)),
                draw(st.lists(st.integers(0, 6), min_size=3, max_size=3)),
            )
            parts = draw(st.sampled_from([2, 4]))
            gpus = np.zeros((WINDOWS, POOLS))
            gpus[:, pool] = np.array(counts) / parts
            price = draw(st.sampled_from([PRICES[pool], 3.0]))
            offers.append(Offer(model, gpus, gpus[:, pool] * price, shared=Group(pool, parts, price)))
        for _ in range(draw(st.integers(1, 3))):
            cells = draw(st.lists(st.integers(0, 6), min_size=POOLS * WINDOWS, max_size=POOLS * WINDOWS))
            gpus = np.array(cells).reshape(WINDOWS, POOLS)
            # On demand, on spot, or so many on demand and the rest on spot.
            on_demand = draw(st.sampled_from([99, 0]) | st.integers(1, 9))
            total = gpus.sum(axis=1)
            on_spot = np.maximum(total - on_demand, 0)
            usd = gpus @ PRICES * (1 - 0.5 * on_spot / np.maximum(total, 1)) + draw(st.integers(0, 3))
            offers.append(Offer(model, gpus, usd, on_spot))
    hours = np.array(draw(st.lists(st.integers(1, 4), min_size=WINDOWS, max_size=WINDOWS)), float)
    most = st.integers(0, 15)
    limits = [
        Limit((0,), draw(most)),
        Limit((1, 2), draw(most)),
        Limit("spot", draw(st.sampled_from([0.0, 0.25, 0.5, 2 / 3, 1.0]))),
        Limit("gpus", draw(most)),
        Limit("usd", 3.0 * draw(most)),
    ]
    return Market(tuple(offers), hours, tuple(draw(st.permutations(limits))[: draw(st.integers(0, 5))]))


def taken(market, chosen):
    """What offers take, counted by hand: GPUs [windows, pools], those on spot, dollars an hour [windows]."""
    gpus, spot, usd = np.zeros((WINDOWS, POOLS)), np.zeros(WINDOWS), np.zeros(WINDOWS)
    parts = {}
    for offer in (market.offers[o] for o in chosen):
        if offer.shared is None:
            gpus, usd = gpus + offer.gpus, usd + offer.usd_per_h
            spot = spot + offer.on_spot
        else:
            parts[offer.shared] = parts.get(offer.shared, 0) + offer.gpus[:, offer.shared.pool]
    for group, part in parts.items():
        gpus[:, group.pool] += np.ceil(part)
        usd = usd + group.usd_per_h * np.ceil(part)
    return gpus, spot, usd


def holds(limit, gpus, spot, usd):
    if isinstance(limit.of, tuple):
        return (gpus[:, limit.of].sum(axis=1) <= limit.most + 1e-6).all()
    whole = gpus.sum(axis=1)
    used = {"gpus": whole, "usd": usd, "spot": spot / np.maximum(whole, 1)}[limit.of]
    return (used <= limit.most + 1e-6).all()


def every_choice(market):
    """All combinations that keep to the limits: dollars an hour, and the offers."""
    models = sorted({offer.model for offer in market.offers})
    of_model = [[o for o, offer in enumerate(market.offers) if offer.model == m] for m in models]
    for chosen in itertools.product(*of_model):
        found = taken(market, chosen)
        cut = {g for o in chosen if (g := market.offers[o].shared) is not None}
        is_alike = len({g[:2] for g in cut}) == len({g.pool for g in cut})
        if is_alike and all(holds(limit, *found) for limit in market.limits):
            yield float((found[2] * market.hours).sum() / market.hours.sum()), chosen


@given(questions())
def test_no_combination_within_the_limits_is_cheaper(market):
    found = sorted(every_choice(market))
    if not found:
        with pytest.raises(Infeasible):
            choose(market)
        return
    choice = choose(market)
    assert choice.usd_per_h == pytest.approx(found[0][0], abs=1e-4)
    assert choice.offers in [chosen for _, chosen in found]


@given(questions(), st.integers(0, 4))
def test_the_least_growth_of_a_limit_is_enough_and_one_gpu_less_is_not(market, which):
    if not market.limits:
        return
    which %= len(market.limits)
    try:
        below = choose(market).usd_per_h
    except Infeasible:
        below = None

    def is_enough(more):
        found = [usd for usd, _ in every_choice(raised(market, which, more))]
        return bool(found) and (below is None or min(found) <= below - 0.01 + 1e-6)

    more = least_excess(market, which, below)
    if more is None:
        assert not is_enough(1000)
    else:
        assert is_enough(more + 1e-6)
        less = {"usd": 0.05, "spot": 1e-4}.get(market.limits[which].of, 1)
        assert more == 0 or not is_enough(more - less)


@given(questions())
def test_the_cheapest_relaxation_leaves_a_choice(market):
    if not market.limits:
        return
    relaxed = market
    for which, more in cheapest_relaxation(market, [1.0] * len(market.limits)).items():
        relaxed = raised(relaxed, which, more + 1e-6)
    assert list(every_choice(relaxed))


def test_a_half_whose_other_half_stays_free_is_no_cheaper_than_a_whole_gpu():
    def market(models):
        whole = [Offer(m, np.ones((1, 1)), np.array([2.0])) for m in range(models)]
        half = [
            Offer(m, np.full((1, 1), 0.5), np.array([1.0]), shared=Group(0, 2, 2.0)) for m in range(models)
        ]
        return Market((*whole, *half), np.ones(1), (Limit("gpus", 2),))

    assert choose(market(1)).offers == (0,)  # and of equally dear answers the one with no neighbour
    assert choose(market(2)).usd_per_h == pytest.approx(2.0)
    three = choose(market(3))
    assert three.usd_per_h == pytest.approx(4.0)
    assert market(3).peak(Limit("gpus", 2), three.offers) == 2
    assert least_excess(market(5), 0) == 1
