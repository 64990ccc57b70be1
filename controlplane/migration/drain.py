"""Draining: the order in which a worker is emptied, and what of its caches goes along.

Requests that decode on a draining worker leave it one at a time and the largest first, to another worker of
its kind (by migration.overload's best fit). So the next worker to be drained is emptier. Where none of its
kind is left, they are recomputed on a worker of another. What fits nowhere runs on. Both planes ask
`next_off` as soon as a move has ended, and at least every `DRAIN_LOOK_S`. So a drain goes on while no
controller is there to decide.

The caches go along. What only the leaving worker has cached is copied to where its next turn will go, the
most recently used text first. That takes BRING_S at most, and fills half of the free memory there at most. A
newcomer is given its share of the fleet's conversations in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from controlplane.migration.overload import ShedSettings, best_fit
from controlplane.migration.usage import WorkerView
from controlplane.snapshot import Cached, RunningRequest, WorkerLoad
from controlplane.types import WorkerId

DRAIN_LOOK_S = 0.25
BRING_S = 10.0  # of copying, for a worker that leaves or comes
SHARE = 0.5  # of a worker's free memory, for what is brought: the rest keeps what it has cached itself


def next_off(
    settings: ShedSettings,
    source: WorkerLoad,
    leaving: Sequence[RunningRequest],
    takers: Callable[[RunningRequest], Sequence[Sequence[WorkerView]]],
    busy: Set[WorkerId],
) -> tuple[RunningRequest, WorkerView] | None:
    """The request that leaves a draining worker next, and its target; None if none leaves now.

    Requests leave one at a time, and to no worker that takes part in another move: `busy` are those that do.
    The next is the largest of `leaving` that fits anywhere, on workers of the source's kind, or, where there
    are none, on any. `takers`: the serving workers that a request may go to, those that are better for it
    first.
    """
    if source.worker in busy:
        return None
    for r in sorted(leaving, key=lambda r: (-r.tokens, r.request)):
        groups = takers(r)
        kinds = {t.worker.kind for group in groups for t in group}
        for group in groups:
            alike = [t for t in group if t.worker.kind == source.kind or source.kind not in kinds]
            taker = best_fit(settings, [t for t in alike if t.id not in busy], r)
            if taker is not None:
                return r, taker
    return None


@dataclass(frozen=True, slots=True)
class Text:
    """What a request has left in caches: the ids of its full blocks, and how much of it a worker has cached.

    `number` and `of` are the plane's own, `block_tokens` is what a block holds.
    """

    number: int
    block_tokens: int
    ids: Sequence[int]
    cached: Callable[[WorkerId], Cached]
    of: Any = None


@dataclass(frozen=True, slots=True)
class Bring:
    """A copy of a text's first `tokens` from one worker's cache to another's, which lacks `lacks` of them."""

    text: Text
    source: WorkerId
    target: WorkerId
    tokens: int
    lacks: int


class _Copies:
    """The copies so far: what they leave of time and of the targets' memory, and what comes where."""

    def __init__(self, targets: Sequence[WorkerView], tokens: float) -> None:
        self._targets, self._left = {t.id: t for t in targets}, tokens
        self._room = {t.id: SHARE * (t.free_tokens - t.load.waiting_tokens) for t in targets}
        self._coming: dict[WorkerId, set[int]] = {t.id: set() for t in targets}
        self.made: list[Bring] = []

    def has(self, text: Text, worker: WorkerId) -> int:
        """Tokens of a text that a target has cached, or will have."""
        coming, blocks = self._coming[worker], 0
        while blocks < len(text.ids) and text.ids[blocks] in coming:
            blocks += 1
        return max(text.cached(worker).tokens, blocks * text.block_tokens)

    def make(self, text: Text, source: WorkerId, tokens: int, to: Sequence[WorkerId]) -> None:
        """Copy to where the next turn would go: least prefill to do with it there, then most memory free."""

        def work(target: WorkerId) -> tuple[float, float]:
            queued = self._targets[target].load.waiting_tokens
            return queued + tokens - self.has(text, target), -self._room[target]

        fits = [t for t in to if tokens - self.has(text, t) <= min(self._room[t], self._left)]
        if fits:
            target = min(fits, key=work)
            lacks = tokens - self.has(text, target)
            self.made.append(Bring(text, source, target, tokens, lacks))
            self._left -= lacks
            self._room[target] -= lacks
            self._coming[target].update(text.ids[: tokens // text.block_tokens])


def pulled_along(
    texts: Iterable[Text], source: WorkerId, targets: Sequence[WorkerView], tokens: float
) -> list[Bring]:
    """Copies of what only the leaving `source` has cached, in the order of `texts`, of `tokens` at most."""
    copies, to = _Copies(targets, tokens), [t.id for t in targets]
    for text in texts:
        here = text.cached(source).tokens
        if to and here > max(copies.has(text, t) for t in to):
            copies.make(text, source, here, to)
    return copies.made


def warmed(
    texts: Iterable[Text], newcomer: WorkerView, others: Sequence[WorkerId], tokens: float
) -> list[Bring]:
    """Copies of a newcomer's share of what the others have cached: one text in each `len(others) + 1`.

    `texts` are in order. Each turn of a conversation may be one: the first that is met stands for them all.
    """
    copies, known, turn = _Copies([newcomer], tokens), set[int](), 0
    for text in texts:
        here, source = max(((text.cached(w).tokens, w) for w in others), default=(0, newcomer.id))
        blocks = here // text.block_tokens
        if not blocks or text.ids[blocks - 1] in known:
            continue
        known.update(text.ids[:blocks])
        turn += 1
        if turn % (len(others) + 1) == 0:
            copies.make(text, source, here, [newcomer.id])
    return copies.made
