"""The planner, by stories on small made workloads."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_builders import SLO, planned, poisson, worker, worker_type

from controlplane.errors import BadInput
from controlplane.types import EngineMode, Slo
from controlplane.worker_type import WorkerGroup
from controlplane.workload import Workload
from tokenfleet.planning.fleet import Fleet, apportioned
from tokenfleet.planning.plan_file import ScalingRule
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan


@pytest.fixture(scope="module")
def busy() -> Plan:
    """A plan that needs several workers, with all its reasons."""
    return planned(poisson(rate_rps=20.0, requests=1500), explained=True)


def workers(plan: Plan) -> int:
    assert plan.best is not None, plan.reason
    return plan.best.fleet.workers


def test_the_answer_meets_the_target_on_the_trace_and_at_the_asked_confidence(busy: Plan) -> None:
    assert busy.best is not None
    assert busy.best.estimate is not None
    assert busy.best.on_trace >= busy.request.attainment
    assert busy.best.estimate.low >= busy.request.attainment


def test_one_worker_fewer_fails_and_the_plan_says_which_test(busy: Plan) -> None:
    fewer = busy.one_fewer
    assert fewer is not None
    assert fewer.on_trace is not None
    assert fewer.low is not None
    assert fewer.workers == workers(busy) - 1
    assert min(fewer.on_trace, fewer.low) < busy.request.attainment
    assert "below the target" in fewer.fails


def test_a_higher_rate_never_needs_fewer_workers() -> None:
    counts = [workers(planned(poisson(rate_rps=rate))) for rate in (4.0, 8.0, 16.0, 32.0)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_more_confidence_never_needs_fewer_workers() -> None:
    made = worker_type(worker(doubt=0.08))
    workload = poisson(rate_rps=20.0, requests=1200)
    counts = [workers(planned(workload, [made], confidence=c)) for c in (0.5, 0.9, 0.99)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_the_same_seed_gives_the_same_plan_and_threads_do_not_matter(busy: Plan) -> None:
    from tokenfleet.report.plan_json import plan_json

    again = planned(poisson(rate_rps=20.0, requests=1500), explained=True)
    assert plan_json(again) == plan_json(busy)


def test_the_cheaper_kind_wins_and_the_other_is_an_alternative() -> None:
    cheap, dear = worker_type(worker("cheap"), usd=1.0), worker_type(worker("dear"), usd=3.0)
    plan = planned(worker_types=[dear, cheap])
    assert plan.best is not None
    assert [g.worker_type.profile.gpu for g in plan.best.fleet.groups] == ["cheap"]
    assert [c.fleet.groups[0].worker_type.profile.gpu for c in plan.alternatives] == ["dear"]


@pytest.mark.parametrize("dearer", [1.0, 1.2, 1.5, 2.5])
def test_leaving_out_reasons_leaves_the_fleet_as_it_was(dearer: float) -> None:
    """Whether the faster kind is cheaper, close or hopeless: what-ifs pick the fleet that a plan picks."""
    worker_types = [
        worker_type(worker("slow", doubt=0.1), usd=2.0),
        worker_type(worker("fast", slower=0.7), usd=2.0 * dearer),
    ]
    whole, bare = (planned(poisson(14.0, 700), worker_types, explained=told) for told in (True, False))
    assert whole.best is not None
    assert bare.best is not None
    assert (bare.best.fleet, bare.best.estimate) == (whole.best.fleet, whole.best.estimate)
    assert [c.fleet.groups[0].worker_type for c in bare.alternatives] == [
        c.fleet.groups[0].worker_type for c in whole.alternatives
    ]


def test_without_prices_the_fewest_gpus_win() -> None:
    wide, narrow = worker_type(worker("wide", tp=4), usd=None), worker_type(worker("narrow"), usd=None)
    plan = planned(worker_types=[wide, narrow])
    assert plan.best is not None
    assert plan.best.fleet.groups[0].worker_type.profile.gpu == "narrow"
    assert plan.best.fleet.usd_per_hour is None


def test_a_mix_is_taken_where_it_is_cheaper_and_holds() -> None:
    big = worker_type(worker("big", slower=0.5), usd=10.0)
    small = worker_type(worker("small"), usd=4.6)
    plan = planned(poisson(rate_rps=30.0, requests=1500), [big, small], explained=True)
    assert plan.best is not None
    assert plan.best.estimate is not None
    assert plan.best.estimate.low >= plan.request.attainment
    single = min(c.fleet.usd_per_hour or 0.0 for c in plan.alternatives)
    assert (plan.best.fleet.usd_per_hour or 0.0) < single
    assert len(plan.best.fleet.groups) == 2
    # The reasons are the mix's own.
    assert plan.one_fewer is not None
    assert plan.one_fewer.workers == plan.best.fleet.workers - 1
    assert plan.schedule is not None
    assert max(s.workers for s in plan.schedule.stretches) <= plan.best.fleet.workers


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(1, 60))
def test_a_mix_apportioned_keeps_its_proportions(counts: list[int], workers: int) -> None:
    mix = Fleet(tuple(WorkerGroup(worker_type(worker(f"g{i}")), n) for i, n in enumerate(counts)))
    assert apportioned(mix, mix.workers) == mix
    part = apportioned(mix, workers)
    assert part.workers == workers
    of = {g.worker_type.profile.gpu: g.workers for g in part.groups}
    for group in mix.groups:
        share = group.workers * workers / mix.workers
        assert abs(of.get(group.worker_type.profile.gpu, 0) - share) < 1.0


def test_a_ttft_that_one_request_alone_breaks_is_not_mended_by_workers() -> None:
    long = replace(poisson(), prompt_tokens=np.full(600, 6000))
    plan = planned(long)
    assert plan.best is None
    assert "more workers do not help" in plan.reason
    assert plan.nearest is not None
    assert plan.nearest.ttft_s is not None
    assert plan.nearest.tpot_s is not None
    assert plan.nearest.ttft_s > SLO.ttft_s
    eased = planned(long, slo=Slo(plan.nearest.ttft_s, plan.nearest.tpot_s))
    assert eased.best is not None
    assert eased.best.fleet.workers == plan.nearest.workers


def test_a_tpot_below_the_step_s_base_is_loosened_alone() -> None:
    plan = planned(slo=Slo(0.5, 0.005))
    assert plan.best is None
    assert plan.nearest is not None
    assert plan.nearest.tpot_s is not None
    assert plan.nearest.ttft_s == 0.5
    assert plan.nearest.tpot_s > 0.010


def test_limits_bind_and_the_nearest_target_stays_within_them() -> None:
    workload = poisson(rate_rps=20.0, requests=1500)
    plan = planned(workload, max_gpus=2)
    assert plan.best is None
    assert plan.reason.startswith("--max-gpus 2 allows too few workers.")
    assert plan.nearest is not None
    assert plan.nearest.looser is not None
    assert plan.nearest.gpus <= 2
    assert plan.nearest.looser > 1.0
    broke = planned(workload, budget_usd_per_h=4.0)
    assert broke.best is None
    assert broke.nearest is not None
    assert (broke.nearest.usd_per_hour or 0.0) <= 4.0


def test_a_trace_too_short_says_how_long_it_must_be() -> None:
    plan = planned(poisson(requests=30), attainment=0.99, confidence=0.95)
    assert plan.best is None
    assert "30 requests are too few" in plan.reason
    assert "191 are needed" in plan.reason
    assert plan.nearest is not None
    assert plan.nearest.attainment == pytest.approx(0.9374, abs=0.002)
    assert plan.alternatives[0].note == "sized on the recorded trace alone"


def test_kv_binds_where_memory_is_short_and_prefill_where_prompts_are_long() -> None:
    tight = planned(
        poisson(rate_rps=3.0, requests=250, prompt=400, output=400),
        [worker_type(worker(kv=4_000))],
        explained=True,
        slo=Slo(1.5, 0.06),
    )
    assert tight.binding is not None
    assert tight.binding.constraint == "kv"
    prompts = planned(poisson(rate_rps=10.0, requests=400, prompt=900, output=4), explained=True)
    assert prompts.binding is not None
    assert prompts.binding.constraint in ("prefill", "ttft")


def test_the_window_that_binds_is_the_busy_one() -> None:
    calm, rush = poisson(rate_rps=3.0, requests=900), poisson(rate_rps=20.0, requests=700)
    arrival_s = np.concatenate((calm.arrival_s, 120.0 + rush.arrival_s))
    order = np.argsort(arrival_s, kind="stable")
    both = Workload(
        arrival_s[order],
        np.concatenate((calm.prompt_tokens, rush.prompt_tokens))[order],
        np.concatenate((calm.output_tokens, rush.output_tokens))[order],
    )
    plan = planned(both, explained=True)
    assert plan.binding is not None
    assert plan.binding.window_s == (120.0, 180.0)
    assert plan.schedule is not None
    assert len(plan.schedule.stretches) > 1
    assert plan.schedule.saved_share > 0.0
    assert plan.schedule.attainment >= plan.request.attainment
    busiest = max(plan.schedule.stretches, key=lambda s: s.workers)
    assert busiest.start_s <= 150.0 <= busiest.end_s


def test_the_schedule_covers_the_trace_without_gaps(busy: Plan) -> None:
    assert busy.schedule is not None
    stretches = busy.schedule.stretches
    assert stretches[0].start_s == 0.0
    assert stretches[-1].end_s == pytest.approx(75.0, rel=0.1)
    for before, after in pairwise(stretches):
        assert before.end_s == after.start_s
        assert before.workers != after.workers


def test_the_worker_line_fits_and_agrees_with_the_answer(busy: Plan) -> None:
    line = busy.line
    assert isinstance(line, ScalingRule)
    assert line.r2 is not None
    assert line.r2 > 0.95
    assert line.workers_per_rps > 0
    on_trace = min(n for n, share in busy.on_trace.items() if share >= busy.request.attainment)
    assert abs(math.ceil(line.workers_per_rps * busy.inputs.rate_rps + line.intercept) - on_trace) <= 1


def test_the_worker_line_is_of_the_busiest_traffic_phase() -> None:
    steady = poisson(rate_rps=20.0, requests=4000)
    after_s = float(steady.arrival_s[-1]) + 5.0 * (steady.arrival_s - steady.arrival_s[0])[:1000]
    quiet = Workload(after_s, steady.prompt_tokens[:1000], steady.output_tokens[:1000])
    falling = Workload(
        np.concatenate([steady.arrival_s, quiet.arrival_s]),
        np.concatenate([steady.prompt_tokens, quiet.prompt_tokens]),
        np.concatenate([steady.output_tokens, quiet.output_tokens]),
    )
    of_both = [planned(workload, explained=True).line for workload in (steady, falling)]
    needed = [line.workers_per_rps * 20.0 + line.intercept for line in of_both if line is not None]
    assert needed[1] == pytest.approx(needed[0], rel=0.1)  # the mean rate is half of it


def test_baselines_and_other_targets_are_sized_too(busy: Plan) -> None:
    assert [b.policy for b in busy.baselines] == ["jsq", "p2c", "round-robin"]
    counts = [one.workers for one in busy.costed if one.workers is not None]
    assert len(counts) > 2
    assert counts == sorted(counts, reverse=True)


def test_split_mode_plans_both_pools() -> None:
    plan = planned(worker_types=[worker_type(worker(mode=EngineMode.SPLIT))], explained=True)
    assert plan.best is not None
    assert {g.role for g in plan.best.fleet.groups} == {"prefill", "decode"}


def test_nothing_to_plan_with_is_refused() -> None:
    nothing = Workload(np.zeros(0), np.zeros(0), np.zeros(0))
    with pytest.raises(BadInput, match="no requests"):
        planned(nothing)


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"attainment": 1.0}, "--attainment"),
        ({"attainment": 0.0}, "--attainment"),
        ({"confidence": 0.4}, "--confidence"),
        ({"max_gpus": 0}, "--max-gpus"),
        ({"budget_usd_per_h": 0.0}, "--budget-usd-per-h"),
        ({"budget_usd_per_h": float("nan")}, "--budget-usd-per-h"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_a_question_without_sense_names_the_flag(asked: dict[str, float], flag: str) -> None:
    with pytest.raises(BadInput, match=flag):
        PlanRequest(SLO, **asked)  # type: ignore[arg-type]
