"""The cheapest mix, against trying all of them."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.errors import BadInput, Infeasible
from controlplane.scaler.mix import MixOffer, cheapest_mix
from controlplane.types import Variant


def offer(
    gpu: str = "a100",
    tp: int = 1,
    *,
    usd: float | None = 4.0,
    capacity: float = 10.0,
    limit: int | None = None,
) -> MixOffer:
    return MixOffer(Variant(gpu, tp), capacity, usd, limit)


def test_one_big_worker_beats_three_small_ones() -> None:
    offers = [offer("a10", usd=1.0, capacity=4.0), offer("a100", usd=2.5, capacity=12.0)]
    assert cheapest_mix(12.0, offers) == {Variant("a100", 1): 1}


def test_a_small_worker_takes_the_rest_that_a_second_big_one_would_waste() -> None:
    offers = [offer("a10", usd=1.0, capacity=4.0), offer("a100", usd=2.5, capacity=12.0)]
    assert cheapest_mix(15.0, offers) == {Variant("a10", 1): 1, Variant("a100", 1): 1}


def test_of_equally_dear_mixes_the_one_with_fewer_gpus_wins() -> None:
    offers = [offer("a", 4, usd=8.0, capacity=10.0), offer("b", 2, usd=8.0, capacity=10.0)]
    assert cheapest_mix(10.0, offers) == {Variant("b", 2): 1}


def test_without_all_prices_gpus_decide() -> None:
    offers = [offer("a", 2, usd=1.0, capacity=10.0), offer("b", 1, usd=None, capacity=10.0)]
    assert cheapest_mix(10.0, offers) == {Variant("b", 1): 1}


def test_limits_that_fall_short_are_infeasible() -> None:
    with pytest.raises(Infeasible):
        cheapest_mix(21.0, [offer(capacity=10.0, limit=2)])
    with pytest.raises(Infeasible):
        cheapest_mix(21.0, [offer(tp=4, capacity=10.0)], max_gpus=11)
    with pytest.raises(Infeasible):
        cheapest_mix(21.0, [offer(usd=4.0, capacity=10.0)], budget_usd_per_h=11.9)


def test_a_budget_without_prices_is_refused() -> None:
    with pytest.raises(BadInput, match="price"):
        cheapest_mix(1.0, [offer(usd=None)], budget_usd_per_h=10.0)


kinds = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(2, 40), st.integers(0, 4)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40)
@given(kinds, st.integers(1, 120), st.integers(2, 24))
def test_the_cost_is_that_of_the_best_of_all_mixes(
    kinds: list[tuple[int, int, int, int]], demand: int, max_gpus: int
) -> None:
    offers = [
        offer(f"g{i}", tp, usd=float(usd), capacity=float(capacity), limit=limit)
        for i, (tp, usd, capacity, limit) in enumerate(kinds)
    ]
    best = min(
        (
            sum(n * o.usd_per_hour for n, o in zip(counts, offers, strict=True))
            for counts in product(*(range((o.limit or 0) + 1) for o in offers))
            if sum(n * o.capacity for n, o in zip(counts, offers, strict=True)) >= demand
            and sum(n * o.variant.tp_degree for n, o in zip(counts, offers, strict=True)) <= max_gpus
        ),
        default=None,
    )
    if best is None:
        with pytest.raises(Infeasible):
            cheapest_mix(float(demand), offers, max_gpus=max_gpus)
    else:
        mix = cheapest_mix(float(demand), offers, max_gpus=max_gpus)
        cost = {o.variant: o.usd_per_hour for o in offers}
        assert sum(n * cost[v] for v, n in mix.items()) == pytest.approx(best)
