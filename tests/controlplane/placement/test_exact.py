"""The heartbeat's MIP against trying every placement, each judged straight from the constraints' words."""

from __future__ import annotations

from itertools import product

import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.placement.exact import solve
from controlplane.placement.heartbeat import (
    Heartbeat,
    PendingRequest,
    WorkerState,
    best_fit,
    cost_of,
    worker_rows,
)
from controlplane.types import Slo

# Multiples of 1/512 s are whole nanoseconds, so that the float judge and the integer rows agree on ties;
# 1/64 s leaves room for quarters and halves of it.
UNIT_S = 1 / 64
STEP = StepModel(20 * UNIT_S, 0.0, UNIT_S, UNIT_S / 4, hinges=(Hinge("sequences", 3, 2 * UNIT_S),))
PREFILL = PrefillModel(5 * UNIT_S, UNIT_S, hinges=(Hinge("prefill_tokens", 8, UNIT_S),))


def keeps_its_constraints(beat: Heartbeat, state: WorkerState, new: list[PendingRequest]) -> bool:
    """(b) to (e) for what `state` would carry, every coming step looked at."""
    batch = len(state.held_tokens) + len(new)
    context = sum(state.held_tokens) + sum(r.prompt_tokens for r in new)
    growth = sum(state.remaining_tokens) + sum(r.predicted_tokens for r in new)
    if batch > beat.max_seqs:
        return False
    if float(beat.step.step_s(0, batch, context + beat.theta * growth)) > beat.slo.tpot_s:
        return False
    tokens, squares = sum(r.prompt_tokens for r in new), sum(r.prompt_tokens**2 for r in new)
    prefill_s = float(beat.prefill.prefill_s(tokens, squares))
    if state.backlog_s + prefill_s > beat.slo.ttft_s or prefill_s > state.min_slack_s:
        return False
    holding = [*zip(state.held_tokens, state.remaining_tokens, strict=True)]
    holding += [(r.prompt_tokens, r.predicted_tokens) for r in new]
    for n in range(1, max(lasts for _, lasts in holding) + 1):
        if sum(held + n for held, lasts in holding if lasts >= n) > beat.gamma * beat.kv_capacity_tokens:
            return False
    return True


def is_feasible(beat: Heartbeat, worker: tuple[int | None, ...]) -> bool:
    for j, state in enumerate(beat.workers):
        new = [r for r, w in zip(beat.requests, worker, strict=True) if w == j]
        if new and not keeps_its_constraints(beat, state, new):
            return False
    return True


def cheapest_by_trying_all(beat: Heartbeat) -> int:
    choices = [None, *range(len(beat.workers))]
    placements = product(choices, repeat=len(beat.requests))
    return min(cost_of(beat, p)[1] for p in placements if is_feasible(beat, p))


new_requests = st.builds(PendingRequest, st.integers(1, 12), st.integers(1, 8))
ongoing = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=3)
busy_workers = st.builds(
    lambda held, slack, backlog: WorkerState(
        tuple(h for h, _ in held), tuple(r for _, r in held), slack * UNIT_S, backlog * UNIT_S
    ),
    ongoing,
    st.sampled_from([10, 20, 40, float("inf")]),
    st.sampled_from([0, 10]),
)
heartbeats = st.builds(
    lambda requests, workers, ttft, tpot, kv, seqs, theta, gamma: Heartbeat(
        tuple(requests),
        tuple(workers),
        STEP,
        PREFILL,
        Slo(ttft * UNIT_S, tpot * UNIT_S),
        kv,
        seqs,
        theta,
        gamma,
    ),
    st.lists(new_requests, min_size=1, max_size=5),
    st.lists(st.one_of(busy_workers, st.just(WorkerState())), min_size=1, max_size=3),
    st.integers(10, 60),
    st.integers(22, 50),
    st.integers(10, 70),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.5, 1.0]),
)


@examples(200)
@given(heartbeats)
def test_the_exact_placement_costs_what_trying_all_costs(beat):
    placement = solve(beat, time_limit_s=60.0)
    assert placement.proven
    assert is_feasible(beat, placement.worker)
    assert placement.cost == placement.bound == cheapest_by_trying_all(beat)
    assert (placement.workers_used, placement.cost) == cost_of(beat, placement.worker)


@given(heartbeats)
def test_best_fit_is_feasible_and_never_cheaper(beat):
    start = best_fit(beat, [worker_rows(beat, state) for state in beat.workers])
    assert is_feasible(beat, start.worker)
    assert start.bound <= solve(beat, time_limit_s=60.0).cost <= start.cost


@given(heartbeats)
def test_rows_say_what_the_constraints_say(beat):
    for state in beat.workers:
        rows = worker_rows(beat, state)
        for chosen in product((0, 1), repeat=len(beat.requests)):
            new = [r for r, c in zip(beat.requests, chosen, strict=True) if c]
            if new:
                by_rows = rows.open and bool((rows.weights @ chosen <= rows.limits).all())
                assert by_rows == keeps_its_constraints(beat, state, new)


ROOMY = Slo(10.0, 1.0)


def a_heartbeat(requests, workers, kv=10, **changes) -> Heartbeat:
    return Heartbeat(tuple(requests), tuple(workers), STEP, PREFILL, ROOMY, kv, **changes)


def test_packing_better_than_best_fit_is_found():
    # They hold 3, 3, 5, 5, 7, 7 of 10: in turn 3+3 | 5+5 | 7 | 7, at best 3+7 | 3+7 | 5+5.
    requests = [PendingRequest(p, 1) for p in (2, 2, 4, 4, 6, 6)]
    beat = a_heartbeat(requests, [WorkerState()] * 4)
    start = best_fit(beat, [worker_rows(beat, s) for s in beat.workers])
    placement = solve(beat)
    assert (start.workers_used, placement.workers_used, placement.proven) == (4, 3, True)


def test_requests_that_outlive_one_another_share_memory_that_their_sums_exceed():
    # One short-lived and large, one long-lived and small: peaks 8 + 1 and 0 + 8 tokens, never at once.
    beat = a_heartbeat([PendingRequest(7, 1), PendingRequest(1, 7)], [WorkerState()] * 2, kv=10)
    assert solve(beat).workers_used == 1


def test_a_request_that_fits_nowhere_is_held_and_the_others_are_placed():
    placement = solve(a_heartbeat([PendingRequest(50, 1), PendingRequest(2, 1)], [WorkerState()] * 2))
    assert placement.worker[0] is None
    assert placement.worker[1] is not None
    assert (placement.held, placement.workers_used, placement.proven) == (1, 1, True)


def test_a_worker_past_its_limits_takes_nothing_more():
    late = WorkerState((3,), (2,), min_slack_s=-1.0)
    placement = solve(a_heartbeat([PendingRequest(1, 1)], [late, WorkerState()]))
    assert placement.worker == (1,)


def test_no_time_at_all_gives_best_fits_answer_and_a_bound():
    requests = [PendingRequest(p, 1) for p in (2, 2, 4, 4, 6, 6)]
    beat = a_heartbeat(requests, [WorkerState()] * 4)
    start = best_fit(beat, [worker_rows(beat, s) for s in beat.workers])
    placement = solve(beat, time_limit_s=0.0)
    assert placement.worker == start.worker
    assert not placement.proven
    assert placement.bound <= 3


def test_an_empty_heartbeat_needs_nothing():
    placement = solve(a_heartbeat([], [WorkerState((3,), (2,)), WorkerState()]))
    assert (placement.worker, placement.workers_used, placement.proven) == ((), 1, True)


@pytest.mark.parametrize("wrong", [{"theta": 1.5}, {"theta": -0.1}, {"gamma": 0.0}, {"gamma": 1.1}])
def test_knobs_out_of_range_are_refused(wrong):
    with pytest.raises(BadInput, match=next(iter(wrong))):
        a_heartbeat([], [], **wrong)


def test_unusable_nouns_are_refused():
    with pytest.raises(BadInput, match="at least 1"):
        PendingRequest(0, 1)
    with pytest.raises(BadInput, match="one entry a request"):
        WorkerState((1, 2), (1,))
