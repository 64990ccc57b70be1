"""Plans with moves: the default, what moves save, and where plans do without them."""

from dataclasses import replace

import numpy as np
import pytest
from planning_builders import planned, said_of, search_of, talks, worker, worker_type

from controlplane.errors import BadInput
from controlplane.perfmodel.offload import HostKv
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.ranks import Ranks
from controlplane.types import EngineMode, Slo
from controlplane.worker_type import WorkerGroup
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.planning.estimate import Estimate, Trial
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.moves import Settled, settled
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan
from tokenfleet.planning.search import Search
from tokenfleet.planning.sizing import Sizing
from tokenfleet.planning.threads import open_threads
from tokenfleet.report.plan_json import plan_json

HOLDS = Estimate(1.0, 1.0, 1.0, 0.9, 19)


def memory_bound(rate_rps: float, output: int, requests: int = 400) -> Workload:
    """Short prompts whose outputs fill KV memory; their lengths are hard to predict."""
    rng = np.random.default_rng(7)
    arrivals_s, prompts = (
        np.cumsum(rng.exponential(1.0 / rate_rps, requests)),
        rng.integers(100, 400, requests),
    )
    return Workload(arrivals_s, prompts, np.minimum(rng.geometric(1.0 / output, requests) + 1, 1000))


def with_moves(workload: Workload, kv: int, slo: Slo, attainment: float, **asked: object) -> Plan:
    """The plan of the default policy, at even odds."""
    kinds = [worker_type(worker(kv=kv))]
    request = {"policy": None, "confidence": 0.5, "explained": True} | asked
    return planned(workload, kinds, slo=slo, attainment=attainment, **request)  # type: ignore[arg-type]


def ranked(profile: Profile) -> Profile:
    return replace(profile, ranks=Ranks("data", 2))


def offloading(profile: Profile) -> Profile:
    kv = replace(profile.kv, bytes_per_token=1000)
    return replace(profile, kv=kv, host_kv=HostKv(2**30, 1_000_000_000))


@pytest.fixture(scope="module", autouse=True)
def few_replicates() -> None:
    """As many as plans have: what moves save depends on the draws."""


def test_a_plan_moves_requests_by_default_and_says_how_many_fewer_are_late() -> None:
    load = memory_bound(8.0, output=300)
    plan = with_moves(load, 2500, Slo(2.0, 0.04), 0.95)
    assert plan.policy == plan_json(plan)["policy"] == "spread+migrate"
    assert plan.best is not None
    assert plan.moves is not None
    assert plan.moves.with_moves is not None
    assert plan.moves.without_moves is not None
    specs = plan.best.fleet.specs()
    late = [
        int((~simulate(load, specs, plan.slo, policy).met).sum()) for policy in ("spread", "spread+migrate")
    ]
    assert late == [plan.moves.without_moves.late, plan.moves.with_moves.late]
    assert late[1] < late[0]
    assert plan.moves.with_moves.migrations > 0 == plan.moves.without_moves.migrations
    assert (
        said_of(plan)["Moves"]
        == f"cut late requests from {late[0]} to {late[1]} of 400 on the recorded trace."
    )


@pytest.fixture(scope="module")
def still() -> Plan:
    """The plan without moves of a load for which moves save a worker."""
    load = memory_bound(8.0, output=300)
    return with_moves(load, 3000, Slo(1.0, 0.05), 0.94, policy="spread", explained=False)


def test_a_worker_that_moves_save_is_not_planned(still: Plan) -> None:
    load, slo = memory_bound(8.0, output=300), Slo(1.0, 0.05)
    plan = with_moves(load, 3000, slo, 0.94)
    assert still.best is not None
    assert plan.best is not None
    assert plan.best.estimate is not None
    fewer = plan.best.fleet.workers
    assert fewer == still.best.fleet.workers - 1
    assert plan.best.estimate.low >= 0.94 <= plan.best.on_trace
    assert plan.one_fewer is not None
    assert plan.one_fewer.workers == fewer - 1
    assert "below the target" in plan.one_fewer.fails
    assert max(stretch["workers"] for stretch in plan_json(plan)["schedule"]) <= fewer
    assert said_of(plan)["Moves"].startswith(f"save 1 worker: without them the target takes {fewer + 1} ($")


def test_a_fleet_that_fails_with_moves_is_planned_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """No load is known where it does, since waiting requests go where KV memory has room: it is made to."""
    load, slo = memory_bound(12.0, output=300), Slo(1.0, 0.05)
    still = with_moves(load, 4000, slo, 0.98, policy="spread", explained=False)
    holds = Trial.holds

    def fails_with_moves(trial: Trial, *, screening: bool = False) -> bool:
        return not trial._search.terms.policy.endswith("+migrate") and holds(trial, screening=screening)

    monkeypatch.setattr(Trial, "holds", fails_with_moves)
    plan = with_moves(load, 4000, slo, 0.98)
    assert plan.policy == "spread"
    assert plan.best is not None
    assert still.best is not None
    assert (plan.best.fleet, plan.best.estimate) == (still.best.fleet, still.best.estimate)
    assert said_of(plan)["Moves"].startswith("none: with them this fleet misses the target")


@pytest.mark.parametrize(
    ("profile", "workload", "why_not", "refusal"),
    [
        (worker(mode=EngineMode.SPLIT), None, "split prefill and decode workers", "no split mode"),
        (ranked(worker()), None, "data- or pipeline-parallel", "workers of several ranks"),
        (offloading(worker(kv=1600)), talks(1, 60), "KV offload", "--host-kv: not simulated with moves"),
    ],
)
def test_where_moves_are_not_simulated_the_default_says_why_and_the_name_is_refused(
    profile: Profile, workload: Workload | None, why_not: str, refusal: str
) -> None:
    loose = Slo(2.0, 0.2)
    plan = planned(workload, [worker_type(profile)], policy=None, slo=loose)
    assert plan.policy == plan_json(plan)["policy"] == "spread"
    still = planned(workload, [worker_type(profile)], policy="spread", slo=loose)
    assert plan.best is not None
    assert still.best is not None
    assert (plan.best.fleet, plan.best.estimate) == (still.best.fleet, still.best.estimate)
    assert why_not in said_of(plan)["Moves"]
    with pytest.raises(BadInput, match=refusal):
        planned(workload, [worker_type(profile)], policy="spread+migrate", slo=loose)


def test_exact_placement_is_refused_for_several_types_before_any_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replayed(*_: object, **__: object) -> None:
        pytest.fail("replayed before the policy was refused")

    monkeypatch.setattr(Search, "replay", replayed)
    with pytest.raises(BadInput, match="exact: covers one worker type"):
        planned(None, [worker_type(worker(gpu=gpu)) for gpu in ("made-a", "made-b")], policy="exact")


def test_a_policy_without_moves_stays_without_them_and_has_no_line() -> None:
    plan = planned(policy="jsq")
    assert (plan.policy, plan.moves) == ("jsq", None)
    assert "Moves" not in said_of(plan)


def test_a_fleet_of_one_worker_keeps_the_policy_and_saves_nothing() -> None:
    plan = planned(policy=None, slo=Slo(5.0, 1.0), explained=True)
    assert plan.best is not None
    assert (plan.best.fleet.workers, plan.policy) == (1, "spread+migrate")
    assert said_of(plan)["Moves"] == "One worker carries this traffic, so moves save no worker."


def settled_on_one_each(policy: str) -> tuple[Settled, int]:
    """The answer for a fleet of one worker of each type, and the replays that it took."""
    kinds = [worker_type(worker("one")), worker_type(worker("other"))]
    fleet = Fleet(tuple(WorkerGroup(kind, 1) for kind in kinds))
    search = search_of(memory_bound(2.0, output=100), PlanRequest(slo=Slo(1.0, 0.05)), policy=policy)
    with open_threads(1) as threads:
        search = replace(search, threads=threads)
        answer = settled(search, Sizing(kinds[0], mix=fleet), fleet, HOLDS, is_judged=True)
    return answer, search.replayer.simulated


def test_a_fleet_with_each_worker_alone_of_its_type_is_not_judged_with_moves() -> None:
    answer, replays = settled_on_one_each("spread")
    assert (answer.estimate, replays) == (HOLDS, 0)
    assert answer.worth is not None
    assert answer.worth.why_not == "Requests move between workers of one type, and here each type has one"


def test_it_is_judged_under_a_policy_that_hands_waiting_requests_to_other_types() -> None:
    answer, replays = settled_on_one_each("jsq")
    assert replays > 0
    assert answer.worth is not None
    assert answer.worth.with_moves is not None


def test_a_fleet_with_each_worker_alone_of_its_type_serves_alike_with_moves() -> None:
    """Also where memory binds, and requests wait."""
    load, workers = (
        memory_bound(16.0, output=300),
        [WorkerSpec(worker(name, kv=2500)) for name in ("one", "other")],
    )
    plain, moving = (simulate(load, workers, Slo(1.0, 0.05), f"spread{moves}") for moves in ("", "+migrate"))
    assert plain.preemptions.sum() > 0
    assert plain.finish_s.tolist() == moving.finish_s.tolist()


def test_what_ifs_have_moves_and_the_fleet_that_holds_without_them(still: Plan) -> None:
    load, slo = memory_bound(8.0, output=300), Slo(1.0, 0.05)
    plan = with_moves(load, 3000, slo, 0.94, explained=False)
    assert plan.policy == "spread+migrate"
    assert plan.best is not None
    assert still.best is not None
    assert (plan.best.fleet, plan.best.estimate) == (still.best.fleet, still.best.estimate)
    assert said_of(plan)["Moves"].startswith("Not judged: the fleet holds without moves")
