"""The planner under hostile questions: a plan, word that there is none, or one line; never a traceback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from planning_builders import SLO, planned, poisson, search_of, worker, worker_type
from rich.console import Console

from controlplane.errors import BadInput, ControlPlaneError
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from tokenfleet.cli.plan import plan_answer
from tokenfleet.planning.estimate import Estimate, Trial
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan
from tokenfleet.planning.sizing import Sizing, confirm, past_hope
from tokenfleet.planning.threads import open_threads
from tokenfleet.report.page import plan_report
from tokenfleet.report.plan_json import plan_json

MODES = [*EngineMode]


def at_once(requests: int, at_s: float = 0.0) -> Workload:
    return Workload(np.full(requests, at_s), np.full(requests, 100), np.full(requests, 20))


def with_steps(mode: EngineMode = EngineMode.CHUNKED, **seconds: float) -> Profile:
    """The builders' worker with other step coefficients; a prefill coefficient counts in every mode."""
    made = worker(mode=mode)
    base, token = seconds.get("base_s", 0.01), seconds.get("per_prefill_token_s", 2e-4)
    return replace(made, step=replace(made.step, **seconds), prefill=PrefillModel(base, token))


def shown(plan: Plan) -> str:
    """The plan on a terminal, once its JSON and its report have been made as well."""
    document = plan_json(plan)
    json.dumps(document, allow_nan=False)
    read = PlanFile.model_validate(document)
    plan_report(read)
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        for table in plan_answer(read, Path("out"), True):
            console.print(table)
    return capture.get()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_s", [0.0, 5.0])
def test_requests_at_one_instant_are_planned(mode: EngineMode, at_s: float) -> None:
    plan = planned(at_once(60, at_s), [worker_type(worker(mode=mode))], explained=True)
    assert plan.best is not None
    assert plan.schedule is not None
    assert plan.schedule.stretches[-1].end_s > at_s
    shown(plan)


def test_arrivals_closer_than_any_clock_tells_are_planned_as_one_instant() -> None:
    workload = replace(at_once(60), arrival_s=np.cumsum([5e-324] * 60))
    plan = planned(workload, explained=True)
    assert plan.best is not None
    shown(plan)


@pytest.mark.parametrize("mode", MODES)
def test_a_profile_whose_steps_take_no_time_needs_the_smallest_fleet(mode: EngineMode) -> None:
    idle = replace(worker(mode=mode), step=StepModel(0.0, 0.0, 0.0, 0.0), prefill=PrefillModel(0.0, 0.0))
    plan = planned(worker_types=[worker_type(idle)], explained=True)
    assert plan.best is not None
    assert plan.best.fleet.workers == (2 if mode == EngineMode.SPLIT else 1)
    shown(plan)


@pytest.mark.parametrize("mode", MODES)
def test_a_profile_without_cost_of_decode_is_planned(mode: EngineMode) -> None:
    free = with_steps(mode, base_s=0.0, per_sequence_s=0.0, per_context_token_s=0.0)
    assert planned(worker_types=[worker_type(free)], explained=True).best is not None


def test_a_trace_of_ages_is_refused_as_one_in_another_unit() -> None:
    with pytest.raises(BadInput, match="31 years"):
        poisson().scaled(1e-9)


def test_no_more_workers_are_tried_than_are_as_good_as_endless() -> None:
    sizing = Sizing(worker_type(), fluid=1000)
    assert past_hope(sizing, poisson(requests=600)) == 1200
    assert past_hope(sizing, poisson(requests=10)) == 1000


@pytest.mark.parametrize("endless_hold", [True, False])
def test_the_search_goes_on_past_twice_the_count_only_where_workers_could_hold(
    monkeypatch: pytest.MonkeyPatch, endless_hold: bool
) -> None:
    """Three workers meet the target on the recorded trace; on resampled traces only forty do."""

    class OfForty(Trial):
        def holds(self, *, screening: bool = False) -> bool:
            return self.fleet.workers >= 40

        def verdict(self) -> Estimate:
            return Estimate(0.9, 0.5, 1.0, 0.9, 19)

    monkeypatch.setattr("tokenfleet.planning.sizing.Trial", OfForty)
    monkeypatch.setattr("tokenfleet.planning.sizing.workers_could_hold", lambda *_: endless_hold)
    sizing = Sizing(worker_type(), fluid=2, workers=3)
    workload = poisson()
    request = PlanRequest(SLO, attainment=0.95, confidence=0.9)
    with open_threads(1) as threads:
        confirm(replace(search_of(workload, request), threads=threads), sizing)
    assert sizing.confirmed == (40 if endless_hold else None)
    assert max(sizing.sure) <= (47 if endless_hold else 8)


def test_a_flat_curve_says_what_misses_at_any_worker_count() -> None:
    """Every twenty-eighth prompt breaks the TTFT by itself: 3.6 % of 5 % allowed are missed by any fleet."""
    made = poisson(rate_rps=20.0, requests=840)
    made.prompt_tokens[::28] = 4000
    plan = planned(made, explained=True)
    assert plan.best is not None
    flat = plan.plateau
    assert flat is not None
    assert len(flat.workers) >= 3
    assert plan.best.fleet.workers in flat.workers
    assert flat.alone.ttft == pytest.approx(1 / 28, abs=1e-6)
    assert flat.alone.tpot == 0.0
    assert plan_json(plan)["plateau"]["workers"] == list(flat.workers)
    assert "More workers" in shown(plan)


def test_a_curve_that_another_worker_moves_is_not_called_flat() -> None:
    plan = planned(poisson(rate_rps=20.0, requests=840), explained=True)
    assert plan.plateau is None
    assert "plateau" not in plan_json(plan)
    assert "flat curve" not in shown(plan)


lengths = st.one_of(st.just(1), st.integers(1, 300), st.sampled_from([1, 2, 4000]))
seconds = st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 0.1])
targets = st.sampled_from([1e-9, 1e-3, 0.011, 0.1, 1.0, 1e3])


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    gaps_s = st.sampled_from([0.0, 5e-324, 1e-9, 0.01, 1.0, 900.0])
    arrival_s = np.cumsum(draw(st.lists(gaps_s, min_size=1, max_size=40)))
    columns = [draw(st.lists(lengths, min_size=len(arrival_s), max_size=len(arrival_s))) for _ in range(2)]
    return Workload(arrival_s, np.array(columns[0]), np.array(columns[1]))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    made = worker(
        mode=draw(st.sampled_from(MODES)),
        tp=draw(st.sampled_from([1, 2])),
        kv=draw(st.sampled_from([8000, 100_000])),
        doubt=draw(st.sampled_from([0.0, 0.02, 1.0])),
    )
    return replace(
        made,
        step=StepModel(*(draw(seconds) for _ in range(4))),
        prefill=PrefillModel(draw(seconds), draw(seconds)),
    )


questions = st.fixed_dictionaries(
    {
        "slo": st.builds(Slo, targets, targets),
        "attainment": st.sampled_from([1e-6, 0.5, 0.9, 0.999999]),
        "confidence": st.sampled_from([0.5, 0.9, 0.999999]),
        "policy": st.sampled_from(["spread", "best-fit", "jsq", "p2c", "round-robin"]),
        "seed": st.sampled_from([0, 2**63]),
        "max_gpus": st.sampled_from([None, 1, 3]),
        "budget_usd_per_h": st.sampled_from([None, 1e-9, 5.0]),
        "spot": st.booleans(),
        **dict.fromkeys(("cold_start_s", "reclaims_per_h"), st.sampled_from([None, 0.0, 60.0, 3600.0])),
    }
)


@given(workloads(), profiles(), st.sampled_from([None, 0.0, 2.0, 1e300]), questions)
@examples(12)
def test_every_question_ends_in_a_plan_a_reason_or_one_line(
    workload: Workload, profile: Profile, usd: float | None, asked: dict[str, object]
) -> None:
    try:
        replace(PlanRequest(SLO), **asked).consistent()  # type: ignore[arg-type]
        plan = planned(workload, [worker_type(profile, usd)], explained=True, **asked)
    except ControlPlaneError as error:
        refusal = str(error)
    else:
        refusal = plan.reason or "a plan"
        assert "nan" not in shown(plan).lower().split()
    assert refusal
    assert "\n" not in refusal
