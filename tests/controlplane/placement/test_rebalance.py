"""Error tracking against a plan replayed step by step; moves against their promises."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.perfmodel.step import StepModel
from controlplane.placement.heartbeat import NewRequest
from controlplane.placement.lengths import LengthTable
from controlplane.placement.rebalance import (
    Error,
    Reassign,
    Surprises,
    error_at,
    finished,
    forget,
    outlived,
    predicted_anew,
    rebalance,
)
from controlplane.types import RequestId, WorkerId

STEP = StepModel(0.02, 0.0, 1e-4, 1e-6)
TABLE = LengthTable.from_history([10] * 6, [2, 4, 5, 9, 20, 40])


def test_an_early_finish_leaves_the_papers_error():
    # Predicted 10, finished with 4: l_e = -6, b_e = -1 at that moment.
    assert error_at(finished(Surprises(), RequestId("a"), 4, 10), 4) == Error(-6, -1)


def test_an_outlived_prediction_leaves_the_papers_error():
    assert error_at(outlived(Surprises(), RequestId("a"), 25), 10) == Error(15, 1)


def test_an_error_is_over_once_its_steps_have_passed():
    early = finished(Surprises(), RequestId("a"), 4, 10)
    assert [error_at(early, n).output_tokens for n in (4, 7, 9, 10, 11)] == [-6, -3, -1, 0, 0]
    assert error_at(early, 10).sequences == 0
    assert forget(early, 10) == Surprises()
    assert forget(early, 9) == early


def test_an_outlived_request_that_finishes_leaves_nothing_behind():
    late = outlived(Surprises(), RequestId("a"), 25)
    assert finished(late, RequestId("a"), 12, 10) == Surprises()


def test_a_request_outlived_twice_counts_once():
    twice = outlived(outlived(Surprises(), RequestId("a"), 12), RequestId("a"), 30)
    assert error_at(twice, 12) == Error(18, 1)


def test_a_renewed_prediction_is_the_mean_of_those_that_went_on():
    assert predicted_anew(TABLE, 10, 9) == 30
    assert predicted_anew(TABLE, 10, 1000) == 1001


@given(st.lists(st.tuples(st.integers(1, 45), st.integers(1, 45)), max_size=8))
def test_the_error_is_outstanding_work_less_the_plan(lengths):
    """Requests (predicted, real), all decoding from step 0, followed step by step."""
    surprises = Surprises()
    ends = {i: predicted for i, (predicted, _) in enumerate(lengths)}
    for step in range(1, 60):
        for i, (predicted, real) in enumerate(lengths):
            request = RequestId(str(i))
            if step == real:
                surprises = finished(surprises, request, step, predicted)
                ends.pop(i)
            elif i in ends and step == ends[i]:
                ends[i] = predicted_anew(TABLE, 10, step)
                surprises = outlived(surprises, request, ends[i])
        planned = [p - step for p, _ in lengths if p > step]
        outstanding = [end - step for end in ends.values()]
        assert error_at(surprises, step) == Error(
            sum(outstanding) - sum(planned), len(outstanding) - len(planned)
        )
        assert error_at(forget(surprises, step), step + 1) == error_at(surprises, step + 1)


def a_queue(*sizes: int, name: str = "r") -> list[tuple[RequestId, NewRequest]]:
    return [(RequestId(f"{name}{k}"), NewRequest(size, 1)) for k, size in enumerate(sizes)]


A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def anything(*_: object) -> bool:
    return True


def test_the_last_in_the_queue_of_the_fullest_goes_to_the_emptiest():
    errors = {A: Error(2000, 3), B: Error(-1500, -1), C: Error(-500, 0)}
    moves = rebalance(errors, {A: a_queue(10, 20)}, STEP, anything)
    assert moves[0] == Reassign(RequestId("r1"), A, B)


def test_a_constraint_sends_a_request_to_the_next_worker():
    errors = {A: Error(2000, 3), B: Error(-1500, -1), C: Error(-500, 0)}
    moves = rebalance(errors, {A: a_queue(10)}, STEP, lambda _, target, __: target != B)
    assert moves == [Reassign(RequestId("r0"), A, C)]


def test_no_one_moves_without_both_an_over_and_an_under_utilised_worker():
    assert rebalance({A: Error(500, 1), B: Error(0, 0)}, {A: a_queue(1)}, STEP, anything) == []
    assert rebalance({A: Error(0, 0), B: Error(-500, -1)}, {A: a_queue(1)}, STEP, anything) == []
    assert rebalance({}, {}, STEP, anything) == []


def test_a_request_larger_than_the_imbalance_stays():
    errors = {A: Error(10, 0), B: Error(-10, 0)}
    assert rebalance(errors, {A: a_queue(4000)}, STEP, anything) == []


def test_a_check_sees_the_moves_before_it():
    seats = {B: 1}
    errors = {A: Error(5000, 5), B: Error(-5000, -5)}

    def one_seat(_: RequestId, target: WorkerId, moves: list[Reassign]) -> bool:
        return sum(m.target == target for m in moves) < seats[target]

    assert len(rebalance(errors, {A: a_queue(1, 1, 1)}, STEP, one_seat)) == 1


workers = st.lists(
    st.tuples(st.integers(-3000, 3000), st.integers(-5, 5), st.lists(st.integers(1, 2000), max_size=4)),
    max_size=5,
)


@given(workers, st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_moves_keep_the_constraints_and_lessen_the_imbalance(described, forbidden):
    names = [WorkerId(f"w{k}") for k in range(len(described))]
    errors = {w: Error(tokens, seqs) for w, (tokens, seqs, _) in zip(names, described, strict=True)}
    waiting = {w: a_queue(*sizes, name=f"{w}-") for w, (_, _, sizes) in zip(names, described, strict=True)}
    size = {r: s for queue in waiting.values() for r, s in queue}
    home = {r: w for w, queue in waiting.items() for r, _ in queue}

    def may_take(request: RequestId, target: WorkerId, _: object) -> bool:
        return (names.index(home[request]), names.index(target)) not in forbidden

    weight = {w: e.weight_s(STEP) for w, e in errors.items()}
    before = sum(x * x for x in weight.values())
    moves = rebalance(errors, waiting, STEP, may_take)
    assert len({m.request for m in moves}) == len(moves)
    for move in moves:
        assert home[move.request] == move.source != move.target
        assert may_take(move.request, move.target, ())
        load = Error(size[move.request].prompt_tokens + 1, 1).weight_s(STEP)
        weight[move.source] -= load
        weight[move.target] += load
        after = sum(x * x for x in weight.values())
        assert after < before
        before = after
