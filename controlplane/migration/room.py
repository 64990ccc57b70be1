"""Room: moves that let in what waits at the gateway, and the order in which a draining worker is emptied.

**De-fragmentation.** A request h that every worker refuses counts as virtual usage where it fits best. That
is the worker whose forecast exceeds its limits least with it (overload.forecast: (b) and (e), as placement
has them). From there a request r moves to a worker t: the one copied soonest of those without which h fits:

    forecast(w + h - r) <= 1        forecast(t + r) <= 1

The copy must end before h is late.

**Consolidation.** Requests that decode on a draining worker go too, one at a time and the largest first, to
another worker of its kind. Where none of its kind is left, they are recomputed on a worker of another. What
fits nowhere runs on. Both planes ask `next_off` as soon as a move has ended, and at least every
`DRAIN_LOOK_S`. So a drain goes on while no controller is there to decide.

The caches go along. What only the leaving worker has cached is copied to where its next turn will go, the
most recently used text first. That takes BRING_S at most, and fills half of the free memory there at most. A
newcomer is given its share of the fleet's conversations in the same way.

Moves choose t by best fit, among the workers of w's kind that keep their promises with r. Those that have
most of r cached, in tenths, come first, and of these the fullest. So no move breaks a promise to another
request, large gaps stay large, and the next worker to be drained is emptier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from controlplane.migration.balance import Pairs, decoding
from controlplane.migration.move import Price, price_of, tenths_to_send
from controlplane.migration.overload import ShedSettings, forecast, forecast_of
from controlplane.migration.usage import WorkerView
from controlplane.snapshot import SERVING, Cached, HeldRequest, Migrate, RunningRequest, Transport, WorkerLoad
from controlplane.types import RequestId, WorkerId

DRAIN_LOOK_S = 0.25
BRING_S = 10.0  # of copying, for a worker that leaves or comes
SHARE = 0.5  # of a worker's free memory, for what is brought: the rest keeps what it has cached itself
_LOOKED_AT = 4  # workers tried for one that waits: where those fail that fit it best, others hardly do better


def make_room(
    settings: ShedSettings,
    workers: Sequence[WorkerView],
    held: Sequence[HeldRequest],
    resting: Set[RequestId],
    recent: Pairs,
    transport: Transport,
) -> list[Migrate]:
    """This heartbeat's moves between `workers`, at most one each, for the requests `held` at the gateway.

    `resting` and `recent` as for `balance`; a copy at the pace of `transport` must end in time.
    """
    free = {w.id: w for w in workers if w.worker.state == SERVING}
    moves: list[Migrate] = []
    if not held:
        return moves
    bare = replace(settings, headroom=0.0)  # no request is held back for the sake of headroom
    for h in held:
        if len(moves) >= settings.most:
            break
        with_h = {
            w.id: forecast_of(w, bare, h.request).worst
            for w in free.values()
            if w.load.running + w.load.waiting < w.worker.max_seqs
        }
        if any(worst <= 1.0 for worst in with_h.values()):
            continue
        for source in sorted(with_h, key=lambda w: (with_h[w], w))[:_LOOKED_AT]:
            move = _room_at(settings, free[source], list(free.values()), h, resting, recent, transport)
            if move is not None:
                moves.append(move)
                del free[move.source], free[move.target]
                break
    return moves


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


def best_fit(settings: ShedSettings, targets: Sequence[WorkerView], r: RunningRequest) -> WorkerView | None:
    """Of `targets` that keep their promises with `r`: the one to which least is sent, then the fullest."""
    best, rank = None, (0, 0.0)
    for t in targets:
        room = t.free_tokens - t.load.waiting_tokens - t.load.running - 1
        seats = t.worker.max_seqs - t.load.running - t.load.waiting
        if seats <= 0 or r.new_at(t.id) > room:
            continue
        worst = forecast_of(t, settings, r).worst
        if worst <= 1.0 and (best is None or (tenths_to_send(r, t.id), -worst) < rank):
            best, rank = t, (tenths_to_send(r, t.id), -worst)
    return best


def _room_at(
    settings: ShedSettings,
    source: WorkerView,
    others: Sequence[WorkerView],
    h: HeldRequest,
    resting: Set[RequestId],
    recent: Pairs,
    transport: Transport,
) -> Migrate | None:
    """The move that lets `h` in at `source`, or None."""
    targets = [
        t
        for t in others
        if t.id != source.id and t.worker.kind == source.worker.kind and (t.id, source.id) not in recent
    ]
    if not targets:
        return None
    soonest = sorted(decoding(source.worker.requests), key=lambda r: (r.priority, r.tokens, r.request))
    bare = replace(settings, headroom=0.0)
    for r in (r for r in soonest if r.request not in resting):
        if _exchanged(bare, source, r, h.request) <= 1.0:
            taker = best_fit(settings, targets, r)
            if taker is not None and _in_time(price_of(transport, source.worker, taker.worker), r, taker, h):
                reason = f"{h.request.request} waits at the gateway and fits {source.id} without it"
                return Migrate(r.request, source.id, taker.id, reason)
    return None


def _in_time(price: Price | None, r: RunningRequest, taker: WorkerView, h: HeldRequest) -> bool:
    pause_s, copy_s = (0.0, 0.0) if price is None else (price.fixed_s, price.copy_s(r.to_send(taker.id)))
    return copy_s + pause_s <= h.left_s


def _exchanged(settings: ShedSettings, w: WorkerView, gone: RunningRequest, h: RunningRequest) -> float:
    """A worker's forecast with `h` in the place of a request that has gone."""
    load = w.load
    there = [r for r in w.worker.requests if r.request != gone.request]
    tpot_s = min((r.tpot_s for r in (*there, *w.worker.waiting, h)), default=math.inf)
    after = replace(
        load,
        held_tokens=load.held_tokens - gone.tokens + h.tokens,
        growth_tokens=load.growth_tokens - gone.remaining_tokens + h.remaining_tokens,
        tpot_s=tpot_s,
        peak_tokens=-1,
    )
    everyone = [*there, *w.worker.waiting, h]
    return forecast(after, everyone, w.worker.capacity_tokens, w.worker.step, settings).worst


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
