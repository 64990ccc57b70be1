"""Algorithm 2: how far each worker is from what was predicted for it, and moves of new requests against it.

    l_e = Σ outlived (new end - step) - Σ early (planned end - step)     output tokens
    b_e = outlived - early                                              sequences

A request that finishes before its planned end leaves its worker under-utilised until that end: the paper's
l_e -= l_pred - l_real, b_e -= 1. One that outlives its prediction is predicted again, E[output | output > so
far], and weighs the other way: l_e += l_pred' - l_pred, b_e += 1. Either weight fades step by step as the
worker passes the end in question, so the error is always of outstanding work. Steps are the worker's own
count of decode steps. Only requests that have not started move; migration moves the started ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.step import StepModel
from controlplane.placement.heartbeat import PendingRequest
from controlplane.types import RequestId, WorkerId

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


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
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The requests that decode at one look, a column each.

    `request`: names or numbers, each once. `worker`: its place among the workers of the look. `generated` and
    `expected`: its output tokens so far, and in all as now predicted.
    """

    request: NDArray[Any]
    worker: Ints
    generated: Ints
    expected: Ints


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of decoding requests when first observed on their workers; sorted by `request`."""

    request: NDArray[Any]
    worker: Ints  # by the tracker's own numbers
    end: Ints  # the worker's step count at which it should end,
    expected: Ints  # and its output tokens by then
    outlived: Mask


class DeviationTracker:
    """The record of early finishers and outlived predictions, from one observation to the next.

    A request is planned when first seen decoding on a worker. One that moves or is preempted is planned again
    where it decodes next, and leaves no error behind.
    """

    def __init__(self) -> None:
        self._numbers: dict[WorkerId, int] = {}
        self._planned: Planned | None = None
        self._early: dict[WorkerId, list[int]] = {}  # planned ends of requests that finished before them

    def look(
        self, steps: Mapping[WorkerId, int], now: Decoding, has_ended: Callable[[NDArray[Any]], Mask]
    ) -> dict[WorkerId, Error]:
        """The errors of the workers whose step counts are known; empty where nothing is off.

        `has_ended`: which requests, of those that no longer decode where they did, are over.
        """
        number = np.array([self._numbers.setdefault(w, len(self._numbers)) for w in steps], np.int64)
        step = np.full(len(self._numbers), np.iinfo(np.int64).max)  # past every end: a worker that is gone
        step[number] = list(steps.values())
        order = np.argsort(now.request)
        request, worker = now.request[order], number[now.worker[order]]
        expected = now.expected[order]
        rest = np.maximum(expected - now.generated[order], 1)
        planned = Planned(request, worker, step[worker] + rest, expected, np.zeros(len(request), bool))
        early: dict[WorkerId, list[int]] = {w: [] for w in steps}
        if self._planned is not None and len(self._planned.request):
            before = self._planned
            planned, left = _carried(before, planned)
            over = left[has_ended(before.request[left])]
            name = {n: w for w, n in zip(steps, number.tolist(), strict=True)}
            for w, end in zip(before.worker[over].tolist(), before.end[over].tolist(), strict=True):
                # The plan never counted what an outlived request did past its end: nothing is missing now.
                if w in name:
                    early[name[w]].append(end)
        self._planned = planned
        late = planned.outlived
        tokens = np.bincount(worker[late], rest[late], len(step)).astype(np.int64)
        sequences = np.bincount(worker[late], minlength=len(step))
        errors = {}
        for (w, at), n in zip(steps.items(), number.tolist(), strict=True):
            ends = [end for end in (*self._early.get(w, ()), *early[w]) if end > at]
            early[w] = ends
            errors[w] = Error(int(tokens[n]) - sum(ends) + at * len(ends), int(sequences[n]) - len(ends))
        self._early = early
        return errors if any(e.sequences or e.output_tokens for e in errors.values()) else {}


def _carried(before: Planned, now: Planned) -> tuple[Planned, Ints]:
    """The plans of `now`, as they were for requests still on their workers; and which of `before` are not.

    Of these only such as had not outlived their predictions, by their places.
    """
    at = np.minimum(np.searchsorted(before.request, now.request), len(before.request) - 1)
    same = (before.request[at] == now.request) & (before.worker[at] == now.worker)
    expected = np.where(same, before.expected[at], now.expected)
    planned = Planned(
        now.request, now.worker, np.where(same, before.end[at], now.end), expected, now.expected > expected
    )
    left = ~before.outlived
    left[at[same]] = False
    return planned, np.flatnonzero(left)


def rebalance(
    errors: Mapping[WorkerId, Error],
    waiting: Mapping[WorkerId, Sequence[tuple[RequestId, PendingRequest]]],
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
    queues: Mapping[WorkerId, Sequence[tuple[RequestId, PendingRequest]]],
    step: StepModel,
    may_take: Callable[[RequestId, WorkerId, Sequence[Reassign]], bool],
    moves: Sequence[Reassign],
) -> tuple[RequestId, PendingRequest, WorkerId, WorkerId] | None:
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


def _load_s(size: PendingRequest, step: StepModel) -> float:
    """A request's addition to a decode step by its expected end."""
    return Error(size.prompt_tokens + size.predicted_tokens, 1).weight_s(step)
