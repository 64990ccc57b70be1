"""Algorithm 2: how far each worker is from what was predicted for it, and moves of new requests against it.

    l_e = Σ outlived (new end - step) - Σ early (planned end - step)     output tokens
    b_e = outlived - early                                              sequences

A request that finishes before its planned end leaves its worker under-utilised until that end: the paper's
l_e -= l_pred - l_real, b_e -= 1. One that outlives its prediction is predicted anew, E[output | output > so
far], and weighs the other way: l_e += l_pred' - l_pred, b_e += 1. Either weight fades step by step as the
worker passes the end in question, so the error is always of outstanding work. Steps are the worker's own
count of decode steps. Only requests that have not started move; started ones are migration's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.perfmodel.step import StepModel
from controlplane.placement.heartbeat import NewRequest
from controlplane.placement.lengths import LengthTable
from controlplane.types import RequestId, WorkerId


@dataclass(frozen=True, slots=True)
class Surprises:
    """What went otherwise than planned on one worker, as far as it still matters.

    `early`: planned ends, in steps, of requests that finished sooner. `outlived`: requests that passed their
    predictions and still run, with their new ends.
    """

    early: tuple[int, ...] = ()
    outlived: tuple[tuple[RequestId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Error:
    """Outstanding work beyond the plan; negative where there is less (under-utilised)."""

    output_tokens: int  # l_e
    sequences: int  # b_e

    def weight_s(self, step: StepModel) -> float:
        """Both in one unit: what the error adds to the time of a decode step."""
        return step.per_context_token_s * self.output_tokens + step.per_sequence_s * self.sequences


@dataclass(frozen=True, slots=True)
class Reassign:
    """Take a request that has not started from one worker's queue to another's."""

    request: RequestId
    source: WorkerId
    target: WorkerId


def finished(surprises: Surprises, request: RequestId, step: int, planned_end: int) -> Surprises:
    """A request finished at `step`, by its first prediction to be expected at `planned_end`."""
    outlived = tuple(o for o in surprises.outlived if o[0] != request)
    was_late = len(outlived) < len(surprises.outlived)
    # The plan never counted what an outlived request did past its first prediction: nothing is missing now.
    early = surprises.early if was_late or planned_end <= step else (*surprises.early, planned_end)
    return Surprises(early, outlived)


def outlived(surprises: Surprises, request: RequestId, new_end: int) -> Surprises:
    """A request passed its (latest) prediction without finishing; it is now expected at step `new_end`."""
    others = tuple(o for o in surprises.outlived if o[0] != request)
    return Surprises(surprises.early, (*others, (request, new_end)))


def predicted_anew(table: LengthTable, prompt_tokens: int, generated: int) -> int:
    """Total output tokens expected of a request that has `generated` and goes on; more than `generated`."""
    return max(round(float(table.predict(prompt_tokens, generated))), generated + 1)


def error_at(surprises: Surprises, step: int) -> Error:
    """l_e and b_e of a worker when it has done `step` decode steps."""
    missing = [end - step for end in surprises.early if end > step]
    extra = [end - step for _, end in surprises.outlived if end > step]
    return Error(sum(extra) - sum(missing), len(extra) - len(missing))


def forget(surprises: Surprises, step: int) -> Surprises:
    """The same without what no longer matters at `step`."""
    return Surprises(tuple(end for end in surprises.early if end > step), surprises.outlived)


def rebalance(
    errors: Mapping[WorkerId, Error],
    waiting: Mapping[WorkerId, Sequence[tuple[RequestId, NewRequest]]],
    step: StepModel,
    may_take: Callable[[RequestId, WorkerId, Sequence[Reassign]], bool],
) -> list[Reassign]:
    """Moves of waiting requests from the most over-utilised workers to the most under-utilised.

    `errors` has every worker; `waiting` those with requests not yet started, in queue order (the last in the
    queue moves first: it has least to lose). `may_take(request, worker, moves)` checks the constraints on
    the worker as it would be after `moves`. A request moves at most once, and only where that lessens the
    sum of squared errors, so the moves never swap one imbalance for another.
    """
    weight = {w: e.weight_s(step) for w, e in errors.items()}
    queues = {w: list(reversed(queue)) for w, queue in waiting.items()}
    moves: list[Reassign] = []
    while (move := _next_move(weight, queues, step, may_take, moves)) is not None:
        request, size, source, target = move
        queues[source] = [entry for entry in queues[source] if entry[0] != request]
        weight[source] -= _load_s(size, step)
        weight[target] += _load_s(size, step)
        moves.append(Reassign(request, source, target))
    return moves


def _next_move(
    weight: Mapping[WorkerId, float],
    queues: Mapping[WorkerId, Sequence[tuple[RequestId, NewRequest]]],
    step: StepModel,
    may_take: Callable[[RequestId, WorkerId, Sequence[Reassign]], bool],
    moves: Sequence[Reassign],
) -> tuple[RequestId, NewRequest, WorkerId, WorkerId] | None:
    ranked = sorted(weight, key=lambda w: (weight[w], w))
    for source in reversed(ranked):
        if weight[source] <= 0:
            break
        for request, size in queues.get(source, ()):
            for target in ranked:
                if weight[target] >= 0 or weight[target] + _load_s(size, step) >= weight[source]:
                    break
                if may_take(request, target, moves):
                    return request, size, source, target
    return None


def _load_s(size: NewRequest, step: StepModel) -> float:
    """What a request adds to a decode step by its expected end."""
    return Error(size.prompt_tokens + size.predicted_tokens, 1).weight_s(step)
