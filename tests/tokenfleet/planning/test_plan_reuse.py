"""Plans for traffic that shares prefixes: what caches save, how much more traffic they bear, the output."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planning_builders import SLO, planned, poisson, said_of, search_of, talks, worker, worker_type

from controlplane.errors import BadInput
from controlplane.perfmodel.offload import HostKv
from controlplane.perfmodel.profile import Profile
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from tokenfleet.planning.comparisons import tier_worth
from tokenfleet.planning.estimate import Trial, look, verdict_on
from tokenfleet.planning.fleet import of_one_kind, parts_of
from tokenfleet.planning.inputs import chosen_profiles, gather, priced
from tokenfleet.planning.plan_file import AgentsLine, PlanFile
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan
from tokenfleet.planning.reuse import LOST, MOST_GROWTH, WITHIN, cliff_of, session_cost, working_set_tokens
from tokenfleet.planning.schedule import followed
from tokenfleet.planning.search import Replayer, Search, workload_digest
from tokenfleet.planning.sizing import Sizing, most_agents, size_on_trace
from tokenfleet.planning.threads import open_threads
from tokenfleet.planning.traffic import replicates as rough
from tokenfleet.planning.traffic.draws import in_sessions, units_of
from tokenfleet.report.plan_figures import plan_figures
from tokenfleet.report.plan_json import plan_json
from tokenfleet.traces import Trace

KV = 24_000  # tokens: some talks at once, not all


def busy_talks(sessions: int = 300, *, told: bool = True, waits: bool = False) -> Workload:
    """Talks that keep a few workers busy, with prompts twice as long."""
    workload = talks(1, sessions, told=told, waits=waits)
    return replace(workload, arrival_s=workload.arrival_s / 12.0).longer(2.0, 2.0)


@pytest.fixture(scope="module")
def shared() -> Plan:
    return planned(busy_talks(), [worker_type(worker(kv=KV))], explained=True)


def test_a_plan_with_caches_needs_fewer_workers_than_one_without(shared: Plan) -> None:
    alone = planned(replace(busy_talks(), prefixes=None), [worker_type(worker(kv=KV))])
    assert shared.best is not None
    assert alone.best is not None
    assert shared.best.fleet.workers < alone.best.fleet.workers
    assert alone.best.hit_rate is None


def test_what_a_plan_has_replayed_is_remembered_and_changes_nothing(shared: Plan) -> None:
    memory = Replayer(draws=False)
    plain, remembering = (
        planned(busy_talks(), [worker_type(worker(kv=KV))], explained=True, replayer=replayer)
        for replayer in (Replayer(most_bytes=1, draws=False), memory)
    )
    assert plan_json(plain) == plan_json(remembering) == plan_json(shared)
    assert memory.recalled >= 5


def tiered(kv: int = KV, gib: float = 1.0) -> Profile:
    """A worker with host memory for a million tokens of KV by each GiB."""
    profile = worker(kv=kv)
    host = HostKv(int(gib * (1 << 30)), 50e9)
    return replace(profile, kv=replace(profile.kv, bytes_per_token=1024), host_kv=host)


def test_host_memory_below_kv_saves_workers_and_the_plan_says_how_many_and_what_it_does_to_hits() -> None:
    tight = 3_000  # tokens: few talks at once
    plan = planned(busy_talks(150), [worker_type(tiered(tight))], explained=True)
    bare = planned(busy_talks(150), [worker_type(worker(kv=tight))])
    assert plan.best is not None
    assert bare.best is not None
    assert plan.best.fleet.workers <= bare.best.fleet.workers
    tier = plan.tier
    assert tier is not None
    assert tier.prefix_hit_rate > tier.prefix_hit_rate_without + 0.02
    assert 0.02 < tier.loaded <= tier.prefix_hit_rate
    assert tier.workers_without is not None
    assert tier.workers <= tier.workers_without
    told = json.loads(json.dumps(plan_json(plan)))["host_kv"]
    assert told["gib"] == 1.0
    assert told["gb_per_s"] == 50.0
    assert told["prefix_hit_rate"] == tier.prefix_hit_rate
    assert told["workers"] == tier.workers
    assert told["workers_without"] == tier.workers_without
    assert told["usd_per_hour_without"] >= told["usd_per_hour"]
    said = said_of(plan)["KV offload"]
    assert said.startswith("1 GiB a worker at 50 GB/s a GPU reload ")
    assert " without. " in said
    assert said.endswith("it has no price of its own.")
    assert told["host_usd_per_hour"] == 0.0
    assert "host_kv" not in plan_json(bare)


@pytest.mark.parametrize("usd", [0.1, 9.0])
def test_what_host_memory_saves_is_net_of_its_price(usd: float) -> None:
    at_a_price = replace(worker_type(tiered(3_000)), usd_per_h=2.0 + usd, host_usd_per_h=usd)
    busy = busy_talks()
    search = search_in_turn(replace(busy, arrival_s=busy.arrival_s / 3.0), PlanRequest(SLO, attainment=0.9))
    sizing = size_on_trace(search, at_a_price)
    tier = tier_worth(search, sizing)
    assert tier is not None
    assert tier.workers_without is not None
    assert tier.workers < tier.workers_without, "a load on which it saves none shows nothing"
    assert tier.usd_per_hour == pytest.approx(tier.workers * (2.0 + usd))
    assert tier.host_usd_per_hour == pytest.approx(tier.workers * usd)
    assert tier.usd_per_hour_without == pytest.approx(tier.workers_without * 2.0)
    net = tier.workers_without * 2.0 - tier.workers * (2.0 + usd)
    assert tier.saved_usd_per_hour == pytest.approx(net)


def test_a_price_list_prices_the_host_memory_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "schema: tokenfleet.prices/1\nprices:\n"
        "- {gpu: h100-sxm, on_demand: 2, host_memory_gib: 0.01, date: 2026-11-01, source: x}\n"
    )
    plain = PlanRequest(SLO, model="llama-3.1-70b", gpu=("h100",), tp=(2,), prices=path)
    for asked, usd, of_host in (
        (plain, 4.0, 0.0),
        (replace(plain, host_kv="64GiB"), 4.64, 0.64),
        (replace(plain, host_kv="64GiB", price_scale=2.0), 9.28, 1.28),
    ):
        (kind,), _ = priced(chosen_profiles(asked), asked)
        assert kind.usd_per_h == pytest.approx(usd)
        assert kind.host_usd_per_h == pytest.approx(of_host)
        assert ("with 64 GiB of host memory at $0.01 each" in kind.priced) == (of_host > 0.0)


def test_host_memory_is_refused_where_nothing_would_be_loaded_and_beside_no_caches() -> None:
    source = Trace("made", "plain", poisson(requests=50))
    asked = PlanRequest(SLO, model="llama-3.1-8b", gpu=("h100",), tp=(1,), host_kv="64GiB")
    with pytest.raises(BadInput, match="--host-kv: requests share no prefixes, so nothing would be loaded"):
        gather(source, asked)
    with pytest.raises(BadInput, match="--host-kv: contradicts --no-prefix-cache"):
        replace(asked, no_prefix_cache=True).consistent()
    with pytest.raises(BadInput, match="only chunked engines are simulated with it"):
        chosen_profiles(replace(asked, engine=EngineMode.SPLIT))


@pytest.mark.parametrize(
    ("gpu", "text", "gb_per_s"),
    [("h100", "64GiB", 47.0), ("a100", "64GiB", 25.0), ("h100", "64GiB@12.5GB/s", 12.5)],
)
def test_a_gpu_loads_as_its_bus_allows_unless_it_is_said(gpu: str, text: str, gb_per_s: float) -> None:
    for profile in chosen_profiles(PlanRequest(SLO, model="llama-3.1-70b", gpu=(gpu,), host_kv=text)):
        assert profile.host_kv == HostKv(64 << 30, gb_per_s * 1e9)


def test_a_plan_says_what_is_hit_what_could_be_and_where_the_cliff_is(shared: Plan) -> None:
    reuse = shared.reuse
    assert reuse is not None
    assert 0.0 < reuse.low <= reuse.hit_rate <= reuse.high <= reuse.ideal + 0.02
    assert reuse.working_set_tokens > 0
    assert shared.best is not None
    assert reuse.kv_tokens == KV * shared.best.fleet.workers
    written = json.loads(json.dumps(plan_json(shared)))
    assert written["prefix_cache"] is True
    assert written["reuse"]["cliff"]["tried"][0]["scale"] == 1.0
    assert written["inputs"]["ideal_hit_rate"] == pytest.approx(reuse.ideal, abs=1e-5)
    assert {b["policy"] for b in written["baselines"] if b["prefix_hit_rate"]} >= {"round-robin"}
    said = said_of(shared)
    assert "at best" in said["Prefix cache"]
    assert said["More sessions"].startswith(("at +", "both"))
    assert said["Cache-aware policy"].startswith("saves")
    assert "cliff" in {figure.id for figure in plan_figures(PlanFile.model_validate(written))}


@pytest.mark.parametrize("waits", [False, True])
def test_the_cliff_is_where_a_sweep_finds_it(waits: bool) -> None:
    workload = replace(busy_talks(150, waits=waits), arrival_s=busy_talks(150).arrival_s / 4.0)
    fleet = of_one_kind(worker_type(worker(kv=KV)), 1)
    search = search_in_turn(workload)
    target = 0.9 * search.replay(fleet).attainment
    with open_threads(2) as threads:
        cliff = cliff_of(replace(search, threads=threads), fleet, target)
    sweep = np.arange(1.0, MOST_GROWTH + 0.01, 0.1)
    outcomes = [search.replay(fleet, workload=search.traffic.units.busier(s)) for s in sweep]
    late = [s for s, o in zip(sweep, outcomes, strict=True) if o.attainment < target]
    rate = outcomes[0].prefix_hit_rate
    assert rate is not None
    cold = [s for s, o in zip(sweep, outcomes, strict=True) if (o.prefix_hit_rate or 0) < LOST * rate]
    for found, swept in ((cliff.target_lost, late), (cliff.hits_lost, cold)):
        assert (found is None) == (not swept)
        if found is not None:
            assert found == pytest.approx(swept[0], abs=0.1 + (WITHIN - 1.0) * found)
    assert late, "a load on which nothing is lost shows nothing"


def search_in_turn(workload: Workload, request: PlanRequest | None = None) -> Search:
    return search_of(workload, request, policy="round-robin")


def test_the_working_set_counts_what_is_shared_once() -> None:
    lists = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2]]
    prefixes = Prefixes(16, np.array([0, 3, 7, 10]), np.concatenate(lists))
    workload = Workload(
        np.array([0.0, 1.0, 5000.0]), np.full(3, 70), np.array([10, 10, 10]), prefixes=prefixes
    )
    outcome = search_in_turn(workload).replay(of_one_kind(worker_type(), 1))
    # Three blocks, one more, and what lies past the lists: 80 - 48 and 80 - 64 tokens.
    assert working_set_tokens(outcome) == 4 * 16 + 32 + 16


def test_a_session_costs_its_share_of_the_fleet() -> None:
    fleet = of_one_kind(worker_type(usd=2.0), 3)
    outcome = search_in_turn(talks(3, 20, waits=True)).replay(fleet)
    cost = session_cost(outcome, fleet)
    assert cost is not None
    assert cost.sessions == 20
    assert 1 <= cost.at_once <= 20
    hours = (np.nanmax(outcome.finish_s) - outcome.arrival_s.min()) / 3600
    assert cost.usd == pytest.approx(3 * 2.0 * hours / 20, rel=1e-5)
    assert session_cost(search_in_turn(talks(3, 20)).replay(fleet), fleet) is None


def test_with_agents_a_session_costs_what_it_does_while_all_of_them_work() -> None:
    fleet = of_one_kind(worker_type(usd=2.0), 3)
    outcome = search_in_turn(talks(3, 20, waits=True)).on(agents=4).replay(fleet)
    begin_s, end_s = outcome.workload.sessions.spans(outcome.arrival_s, outcome.finish_s)  # type: ignore[union-attr]
    cost = session_cost(outcome, fleet, 4)
    assert cost is not None
    hours = begin_s.max() / 3600  # then the last one begins, and whoever ends has no next
    assert cost.usd == pytest.approx(3 * 2.0 * hours / (end_s <= begin_s.max()).sum(), rel=1e-5)
    assert cost.at_once == 4


def test_without_caches_the_same_sessions_are_drawn() -> None:
    workload = talks(2, 30, told=False)
    assert np.array_equal(units_of(in_sessions(workload)).rows, units_of(workload).rows)
    trace = Trace("made", "plain", workload)
    request = PlanRequest(SLO, model="llama-3.1-8b", gpu=("h100",), tp=(1,))
    kept, left = (gather(trace, replace(request, no_prefix_cache=off)) for off in (False, True))
    assert kept.workload.prefixes is not None
    assert left.workload.prefixes is None
    assert left.inputs.ideal_hit_rate is None
    assert np.array_equal(units_of(kept.workload).rows, units_of(left.workload).rows)


def test_twice_the_traffic_of_a_trace_with_sessions_is_no_faster_clock() -> None:
    trace = Trace("made", "plain", talks(2, 30))
    request = PlanRequest(SLO, model="llama-3.1-8b", gpu=("h100",), tp=(1,), rate_scale=2.0)
    twice = gather(trace, request)
    assert len(twice.workload) == pytest.approx(2 * len(trace.workload), rel=0.05)
    assert twice.inputs.rate_scale == 1.0


def test_workloads_that_share_differently_are_told_apart() -> None:
    workload = talks(2, 10)
    assert workload.prefixes is not None
    others = [
        replace(workload, prefixes=None),
        replace(workload, sessions=None),
        replace(workload, prefixes=replace(workload.prefixes, block_tokens=32)),
    ]
    assert len({workload_digest(one) for one in [workload, *others]}) == 4


def crowd(sessions: int) -> Workload:
    """Talks of people who wait for answers, too many for one worker."""
    workload = busy_talks(sessions, waits=True)
    return replace(workload, arrival_s=workload.arrival_s / 8.0)


def test_a_fleet_is_judged_by_its_hardest_replicates_as_by_all() -> None:
    """A trial that breaks off what is lost comes to the verdict of one that replays everything."""
    workload = crowd(150)
    request = PlanRequest(SLO, attainment=0.9, confidence=0.8)
    verdicts = set()
    with open_threads(2) as threads:
        search = replace(search_in_turn(workload, request), threads=threads)
        for workers in (6, 1, 3, 2, 5):
            fleet = of_one_kind(worker_type(worker(kv=KV)), workers)
            trial = Trial(search, fleet)
            may = trial.holds(screening=True)
            held = trial.holds()
            whole = verdict_on(look(search, fleet, trial.numbers), request)
            assert held == (whole.low >= request.attainment)
            assert may or not held
            if held:
                assert trial.verdict() == whole
            verdicts.add(held)
    assert verdicts == {True, False}, "a load on which all are alike shows nothing"


def test_a_plan_holds_the_time_of_sessions_too() -> None:
    workload, easy = crowd(120), Slo(20.0, 0.5)
    types = [worker_type(worker(kv=KV))]
    loose = planned(workload, types, slo=easy, attainment=0.9, explained=True)
    assert loose.best is not None
    search = search_of(workload, slo=easy)
    one, endless = (search.replay(f) for f in (loose.best.fleet, of_one_kind(types[0], 60)))
    least_s, took_s = (float(np.quantile(o.session_s, 0.9)) for o in (endless, one))
    assert least_s < 0.98 * took_s, "a load on which workers do not help shows nothing"
    target_s = (least_s + took_s) / 2
    tight = planned(workload, types, slo=easy, attainment=0.9, session_s=target_s, explained=True)
    assert tight.best is not None
    assert tight.best.fleet.workers > loose.best.fleet.workers
    assert tight.reuse is not None
    assert tight.reuse.sessions is not None
    assert tight.reuse.sessions.within is not None
    assert tight.reuse.sessions.within >= 0.9
    assert "in time" in said_of(tight)["Sessions"]
    # Its schedule holds it as well, all through, where one by requests alone does not.
    assert tight.schedule is not None
    held = search.on(session_s=target_s)
    sizing = Sizing(types[0])
    assert tight.schedule.attainment == followed(held, sizing, tight.schedule.stretches) >= 0.9
    assert loose.schedule is not None
    assert followed(held, sizing, loose.schedule.stretches) < 0.9
    assert json.loads(json.dumps(plan_json(tight)))["session_s"] == target_s
    never = planned(workload, types, slo=easy, attainment=0.9, session_s=least_s / 4)
    assert never.best is None
    assert "of the sessions take longer than" in never.reason
    # The nearest target loosens the time of sessions alone, and can be asked for.
    near = never.nearest
    assert near is not None
    assert (near.ttft_s, near.tpot_s) == (easy.ttft_s, easy.tpot_s)
    assert near.session_s is not None
    assert near.session_s > least_s / 4
    assert near.looser == pytest.approx(near.session_s / (least_s / 4), rel=1e-5)
    again = planned(workload, types, slo=easy, attainment=0.9, session_s=near.session_s)
    assert again.best is not None
    assert parts_of(again.best.fleet) == near.fleet
    assert ", sessions " in said_of(never)["Nearest target"]


def test_more_agents_need_more_workers_and_none_knows_a_time_of_day() -> None:
    workload = busy_talks(80, waits=True)
    types = [worker_type(worker(kv=KV))]
    few, many = (planned(workload, types, agents=n, attainment=0.9, explained=n == 40) for n in (2, 40))
    assert few.best is not None
    assert many.best is not None
    assert few.best.fleet.workers < many.best.fleet.workers
    assert many.schedule is None
    line = many.line
    assert isinstance(line, AgentsLine)
    assert [agents for agents, _ in line.points] == [60, 80, 120]  # a small fleet says little
    assert line.r2 > 0.9
    on_trace = min(n for n, share in many.on_trace.items() if share >= 0.9)
    assert abs(math.ceil(line.workers_per_agent * 40 + line.intercept) - on_trace) <= 1
    told = json.loads(json.dumps(plan_json(many)))
    assert told["demand_line"] is None
    assert told["agents_line"]["workers_per_agent"] == line.workers_per_agent
    assert "x concurrent sessions" in said_of(many)["Scaling rule"]
    assert many.reuse is not None
    assert many.reuse.sessions is not None
    assert many.reuse.sessions.at_once == 40
    assert said_of(many)["Target"].endswith(", 40 concurrent sessions, 90 % confidence")


def test_the_most_agents_hold_in_traffic_that_was_not_seen_where_some_more_do_not() -> None:
    fleet, request = of_one_kind(worker_type(worker(kv=KV, doubt=0.1)), 2), PlanRequest(SLO, attainment=0.9)
    search = search_of(busy_talks(waits=True), request)
    with open_threads(2) as threads:
        most = most_agents(replace(search, threads=threads), fleet)
    assert most.agents < most.on_trace < most.sessions
    assert most.estimate.low >= request.attainment

    def held(agents: int) -> int:
        """Of ten draws from other seeds."""
        others = [
            replace(search.on(agents=agents), traffic=replace(search.traffic, seed=1000 + i))
            for i in range(10)
        ]
        return sum(other.replay(fleet, 1).attainment >= request.attainment for other in others)

    assert held(most.agents) >= 9
    assert held(most.on_trace) < 9
    assert held(round(1.3 * most.agents)) <= 3


def test_a_limit_too_tight_is_told_by_no_share_that_was_not_replayed() -> None:
    # Trials of it are broken off long before their ends: what they reach is not known then.
    plan = planned(busy_talks(80, waits=True), [worker_type(worker(kv=KV))], agents=40, max_gpus=1)
    assert plan.best is None
    assert "--max-gpus 1 allows 1 workers, which miss the target with over 10 % of" in plan.reason


@pytest.mark.parametrize("asked", [{"agents": 3}, {"session_s": 60.0}])
def test_sessions_are_asked_for_only_of_traces_that_have_some(asked: dict[str, float]) -> None:
    request = replace(PlanRequest(SLO, model="llama-3.1-8b", gpu=("h100",), tp=(1,)), **asked)
    flag = "--agents" if "agents" in asked else "--session-time"
    for trace in (poisson(), talks(2, 30, told=False)):
        with pytest.raises(BadInput, match=f"{flag}: the trace has no sessions"):
            gather(Trace("made", "plain", trace), request)
    talked = Trace("made", "plain", talks(2, 30))
    sessions = gather(talked, request).workload.sessions
    assert sessions is not None
    many = len(np.unique(sessions.session)) + 1
    said = gather(talked, replace(request, agents=many)).inputs.warnings
    assert f"--agents: {many}; {many - 1} at most run at once: the trace has no more sessions" in said
    assert not gather(talked, replace(request, agents=many - 1)).inputs.warnings


def test_rough_replays_are_of_the_same_draws_and_hit_nearly_as_much(monkeypatch) -> None:
    monkeypatch.setattr(rough, "OF_PROMPT", 8.0)
    search = search_in_turn(busy_talks(100, waits=True))
    rougher, fleet = search.roughly(), of_one_kind(worker_type(worker(kv=KV)), 2)
    exact, drawn = search.workload.prefixes, rougher.workload.prefixes
    assert exact is not None
    assert drawn is not None
    assert drawn.block_tokens in (2 * exact.block_tokens, 4 * exact.block_tokens, 8 * exact.block_tokens)
    for replicate in (0, 1, 2):
        one, other = (r.replay(fleet, replicate) for r in (search, rougher))
        assert np.array_equal(one.workload.prompt_tokens, other.workload.prompt_tokens)
        assert np.array_equal(one.workload.arrival_s, other.workload.arrival_s)
        assert other.prefix_hit_rate == pytest.approx(one.prefix_hit_rate, abs=0.1)
        assert other.prefix_hit_rate != one.prefix_hit_rate
    monkeypatch.setattr(rough, "OF_PROMPT", 1e9)
    search = search_in_turn(busy_talks(100, waits=True))
    assert search.roughly() is search
    plain = search_in_turn(replace(busy_talks(20), prefixes=None))
    assert plain.roughly() is plain


def test_of_kinds_that_cannot_be_the_cheapest_only_the_trace_is_asked() -> None:
    kinds = [worker_type(worker(kv=KV)), worker_type(worker("other-gpu", kv=KV), 9.0)]
    plan = planned(busy_talks(100), kinds, explained=True)
    assert plan.best is not None
    assert plan.best.fleet.groups[0].worker_type.gpu == "made-gpu"
    [other] = plan.alternatives
    assert other.estimate is None
    assert other.note == "sized on the recorded trace alone"
