"""The smallest count that passes, and the cheapest types that hold, against looking at all of them."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from planning_builders import SLO, poisson, search_of, worker_type

from tokenfleet.planning.estimate import Estimate, Trial
from tokenfleet.planning.planner import confirm_cheapest
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.sizing import Sizing, smallest

SEARCH = search_of(poisson(), PlanRequest(SLO, attainment=0.95, confidence=0.9))


@given(st.integers(1, 300), st.integers(1, 300), st.integers(-5, 400), st.integers(0, 400))
def test_it_finds_what_looking_at_every_count_finds(low: int, cap: int, guess: int, first: int) -> None:
    looked = [n for n in range(low, cap + 1) if n >= first]
    assert smallest(lambda n: n >= first, low, guess, cap) == (looked[0] if looked else None)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_a_guess_wrong_by_d_costs_about_two_log_d_trials(guess: int, first: int) -> None:
    tried: list[int] = []

    def passes(n: int) -> bool:
        tried.append(n)
        return n >= first

    assert smallest(passes, 1, guess, 10_000) == first
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 * abs(guess - first).bit_length() + 2


# Of each type the price of a worker, the count for the recorded trace, and how many more hold.
TYPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=5)


@settings(deadline=None)
@given(TYPES, st.integers(1, 5))
def test_the_cheapest_types_that_hold_are_confirmed(types: list[tuple[int, int, int]], kinds: int) -> None:
    sizings = [Sizing(worker_type(usd=float(usd)), fluid=1, workers=count) for usd, count, _ in types]
    hold = {id(s.worker_type): count + more for s, (_, count, more) in zip(sizings, types, strict=True)}
    tried = set[int]()

    class Told(Trial):
        def holds(self, *, screening: bool = False) -> bool:
            kind = self.fleet.groups[0].worker_type
            tried.add(id(kind))
            return self.fleet.workers >= hold[id(kind)]

        def verdict(self) -> Estimate:
            return Estimate(0.99, 0.97, 1.0, 0.9, 19)

    with patch("tokenfleet.planning.sizing.Trial", Told):
        confirm_cheapest(SEARCH, sizings, kinds)
    costs = sorted(s.fleet(hold[id(s.worker_type)]).cost for s in sizings)[:kinds]
    confirmed = [s for s in sizings if s.confirmed]
    assert sorted(s.cost for s in confirmed) == costs
    assert all(s.confirmed == hold[id(s.worker_type)] for s in confirmed)
    assert all(s.failed < hold[id(s.worker_type)] for s in sizings)
    assert all(id(s.worker_type) not in tried or s.fleet(s.workers or 0).cost <= costs[-1] for s in sizings)
