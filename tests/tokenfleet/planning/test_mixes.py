"""The cheapest mix: small cases against every count, and bounds that no simulated mix beats."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_builders import planned, poisson, said_of, search_of, worker, worker_type

from controlplane.types import Slo
from controlplane.worker_type import WorkerGroup, WorkerType
from controlplane.workload import Workload
from tokenfleet.planning.estimate import Trial
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.mixes import cheapest
from tokenfleet.planning.mixes.bounds import MixBounds
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan
from tokenfleet.planning.search import Search
from tokenfleet.planning.threads import open_threads

TIGHT = Slo(0.15, 0.04)
# The slow kind breaks the TTFT target with the longer prompts, 43 % of all that there are.
FAST, SLOW = worker_type(worker("fast", slower=0.5), 3.0), worker_type(worker("slow", slower=2.0), 0.6)
MIDDLE = worker_type(worker("middle", slower=0.9), 1.9)


def load(rate_rps: float = 40.0) -> Workload:
    return poisson(rate_rps, 700, prompt=300, output=40)


def mixed(load: Workload, kinds: list[WorkerType], **asked: object) -> Plan:
    return planned(load, kinds, slo=TIGHT, **asked)


def of(kinds: list[WorkerType], counts: tuple[int, ...]) -> Fleet:
    return Fleet(tuple(WorkerGroup(kind, n) for kind, n in zip(kinds, counts, strict=True) if n))


def cheaper_ones(plan: Plan, load: Workload, kinds: list[WorkerType]) -> list[Fleet]:
    """The mixes cheaper than the plan's fleet that hold, by trying every count."""
    assert plan.best is not None
    cost = plan.best.fleet.cost
    most = [range(int(cost[0] / (kind.usd_per_h or 1.0)) + 1) for kind in kinds]
    fleets = [of(kinds, counts) for counts in product(*most) if any(counts)]
    with open_threads(1) as threads:
        search = Search.of(plan.request, load, kinds, threads)
        return [
            fleet
            for fleet in fleets
            if fleet.cost < cost and search.meets(search.replay(fleet)) and Trial(search, fleet).holds()
        ]


def test_a_kind_that_fails_alone_takes_part_in_the_cheapest_mix() -> None:
    plan = mixed(load(), [FAST, SLOW])
    assert plan.best is not None
    assert plan.mixes is not None
    assert [f"{one.gpu} TP{one.tp_degree}" for one in plan.passed_over] == ["slow TP1"]
    assert {group.worker_type.name for group in plan.best.fleet.groups} == {"fast TP1", "slow TP1"}
    assert plan.mixes.least is None
    assert plan.mixes.may_save(plan.best.fleet) == 0.0


@pytest.mark.parametrize("limits", [{}, {"max_gpus": 4}])
def test_targets_that_no_mix_meets_are_infeasible(limits: dict[str, int]) -> None:
    """The longer prompts break this TTFT target on an idle worker of either kind."""
    plan = planned(load(), [FAST, SLOW], slo=Slo(0.03, 0.04), **limits)
    assert plan.best is None
    assert len(plan.passed_over) == 2


@pytest.mark.parametrize(("rate_rps", "kinds"), [(40.0, [FAST, SLOW]), (32.0, [FAST, MIDDLE, SLOW])])
def test_no_cheaper_mix_holds_by_trying_every_count(rate_rps: float, kinds: list[WorkerType]) -> None:
    plan = mixed(load(rate_rps), kinds)
    assert plan.mixes is not None
    assert plan.mixes.least is None
    assert cheaper_ones(plan, load(rate_rps), kinds) == []


def test_a_search_that_runs_out_of_replays_says_how_much_cheaper_a_mix_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cheapest, "BUDGET", 1)
    monkeypatch.setattr(cheapest, "GUIDED", 0)
    kinds = [FAST, MIDDLE, SLOW]
    plan = mixed(load(32.0), kinds, explained=True)
    assert plan.best is not None
    assert plan.mixes is not None
    may_save = plan.mixes.may_save(plan.best.fleet)
    assert 0.0 < may_save < 1.0
    line = said_of(plan)["Cheaper mixes"]
    assert f"up to {100 * may_save:.0f} % cheaper may exist" in line
    # No mix that holds is cheaper than that.
    assert plan.mixes.least is not None
    assert all(one.cost[0] >= plan.mixes.least - 1e-9 for one in cheaper_ones(plan, load(32.0), kinds))


def test_a_mix_is_found_where_the_budget_allows_no_fleet_of_one_kind() -> None:
    free = mixed(load(), [FAST, SLOW]).best
    assert free is not None
    budget = free.fleet.usd_per_hour
    assert budget is not None
    assert mixed(load(), [FAST], budget_usd_per_h=budget).best is None
    within = mixed(load(), [FAST, SLOW], budget_usd_per_h=budget).best
    assert within is not None
    assert within.fleet.usd_per_hour == pytest.approx(budget)


@examples(25)
@given(st.integers(0, 2**31), st.integers(1, 2), st.integers(1, 3))
def test_no_mix_that_meets_its_target_is_ruled_out(seed: int, fast: int, slow: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(60, 200))
    some = Workload(np.sort(rng.uniform(0, 20, n)), rng.integers(20, 900, n), rng.integers(1, 80, n))
    kinds = [FAST, SLOW]
    slo = Slo(*rng.uniform((0.05, 0.012), (3.0, 0.2)))
    search = search_of(some, PlanRequest(slo))
    attained = search.replay(of(kinds, (fast, slow))).attainment
    if attained <= 0.0:
        return
    asked = replace(search.request, attainment=min(max(attained - 1e-9, 1e-6), 0.999))
    bounds = MixBounds(replace(search, request=asked), tuple(kinds))
    assert bounds.possible(np.array([[fast, slow]]))[0]
