"""Error tracking against a plan replayed step by step; moves against their promises."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controlplane.perfmodel.step import StepModel
from controlplane.placement.heartbeat import PendingRequest
from controlplane.placement.lengths import LengthTable
from controlplane.placement.rebalance import Decoding, DeviationTracker, Error, Reassign, rebalance
from controlplane.types import RequestId, WorkerId

STEP = StepModel(0.02, 0.0, 1e-4, 1e-6)
TABLE = LengthTable.from_history([10] * 6, [2, 4, 5, 9, 20, 40])
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


class Looks:
    """A tracker, and what it is told: (request, worker, generated, expected) of those that decode."""

    def __init__(self) -> None:
        self.tracker = DeviationTracker()

    def __call__(self, steps, *decoding, ended=()):
        columns = list(zip(*decoding, strict=True)) or [()] * 4
        workers = list(steps)
        now = Decoding(
            np.array(columns[0], np.str_),
            np.array([workers.index(w) for w in columns[1]], np.int64),
            np.array(columns[2], np.int64),
            np.array(columns[3], np.int64),
        )
        return self.tracker.look(steps, now, lambda gone: np.isin(gone, ended))


def test_an_early_finish_leaves_the_papers_error_until_its_planned_end():
    look = Looks()
    assert look({A: 0}, ("r", A, 0, 10)) == {}
    # Predicted 10, finished with 4: l_e = -6, b_e = -1 at that moment.
    assert look({A: 4}, ended=["r"]) == {A: Error(-6, -1)}
    assert [look({A: n}) for n in (7, 9, 10)] == [{A: Error(-3, -1)}, {A: Error(-1, -1)}, {}]


def test_an_outlived_prediction_leaves_the_papers_error_until_the_request_is_over():
    look = Looks()
    look({A: 0}, ("r", A, 0, 10))
    assert look({A: 10}, ("r", A, 10, 25)) == {A: Error(15, 1)}
    assert look({A: 12}, ("r", A, 12, 25)) == {A: Error(13, 1)}
    assert look({A: 13}, ended=["r"]) == {}


def test_a_request_outlived_twice_counts_once():
    look = Looks()
    look({A: 0}, ("r", A, 0, 10))
    look({A: 10}, ("r", A, 10, 12))
    assert look({A: 12}, ("r", A, 12, 30)) == {A: Error(18, 1)}


def test_a_request_that_moves_or_is_preempted_leaves_no_error_and_is_planned_anew():
    look = Looks()
    look({A: 0, B: 500}, ("moves", A, 0, 50), ("preempted", A, 0, 50))
    assert look({A: 5, B: 505}, ("moves", B, 5, 50)) == {}
    assert look({A: 9, B: 509}, ("moves", B, 9, 50), ("preempted", A, 9, 50)) == {}
    assert look({A: 9, B: 515}, ended=["moves", "preempted"]) == {A: Error(-41, -1), B: Error(-35, -1)}


def test_a_worker_that_is_gone_takes_its_errors_with_it():
    look = Looks()
    look({A: 0, B: 0}, ("r", A, 0, 10), ("s", B, 0, 10))
    assert look({A: 4, B: 4}, ("s", B, 4, 10), ended=["r"])[A] == Error(-6, -1)
    assert look({B: 5}, ("s", B, 5, 10)) == {}
    assert look({A: 0}, ended=["r", "s"]) == {}


@given(st.lists(st.tuples(st.integers(1, 45), st.integers(1, 45)), max_size=8), st.integers(1, 7))
def test_the_error_is_outstanding_work_less_the_plan(lengths, every):
    """Requests (predicted, real), all decoding from step 0, looked at now and then."""
    look = Looks()
    expected = [predicted for predicted, _ in lengths]
    for step in range(60):
        for i, (_, real) in enumerate(lengths):
            if step < real and step >= expected[i]:
                expected[i] = max(round(float(TABLE.predict(10, step))), step + 1)
        if step % every:
            continue
        going = [i for i, (_, real) in enumerate(lengths) if step < real]
        rows = [(str(i), A, step, expected[i]) for i in going]
        seen = look({A: step}, *rows, ended=[str(i) for i in range(len(lengths))])
        planned = [p - step for p, _ in lengths if p > step]
        outstanding = [expected[i] - step for i in going]
        want = Error(sum(outstanding) - sum(planned), len(outstanding) - len(planned))
        assert seen.get(A, Error(0, 0)) == want


def a_queue(*sizes: int, name: str = "r") -> list[tuple[RequestId, PendingRequest]]:
    return [(RequestId(f"{name}{k}"), PendingRequest(size, 1)) for k, size in enumerate(sizes)]


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
