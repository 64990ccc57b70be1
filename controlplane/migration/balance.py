"""Balancing by `freeness` (Llumnix): the least free workers shed one request each to the most free.

    sources  F < out_below;   targets  F > in_above, no source
    pairs    sources by F rising with targets by F falling, each kind of worker by itself

KV moves between workers of one kind only. Sources left over are paired with targets left over, whatever their
kinds, for requests that have not started. Draining workers take no part: migration.room empties them.

No worker is both source and target, so a heartbeat never has A→B together with B→A. Across heartbeats a pair
is not reversed within `rest_s`. A move must leave the target freer than the source was. So no move is undone
by the next, and a burst causes no storm of moves. Of a source's requests those of low priority go first, then
those that take least time to copy, what the target has cached left out. No important request waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice

from controlplane.errors import BadInput
from controlplane.migration import usage
from controlplane.migration.move import Price, cost_s, gain_s, price_of
from controlplane.migration.usage import Reading, WorkerView
from controlplane.snapshot import SERVING, Migrate, Move, Reassign, RunningRequest, Transport
from controlplane.types import RequestId, WorkerId

_TRIED = 8  # requests of a source that are looked at for one target: the order puts the likely ones first


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """Thresholds and amounts of moving; thresholds in steps (tokens per request, see virtual_usage).

    `most`: moves of one heartbeat.
    `rest_s`: a request that moved, or a pair turned round, waits so long.
    """

    reading: Reading = usage.PAPER
    out_below: float = 160.0
    in_above: float = 160.0
    most: int = 64
    rest_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.out_below <= self.in_above:
            raise BadInput(f"moves: out_below {self.out_below:g} must not exceed in_above {self.in_above:g}")
        if self.most < 0 or not self.rest_s >= 0:
            raise BadInput("moves: most and rest_s must not be negative")

    def in_order(self, requests: Sequence[RunningRequest], target: WorkerId) -> Iterable[RunningRequest]:
        """A source's decoding requests, the one that should go first: low priority, then soonest copied."""
        return sorted(decoding(requests), key=lambda r: (r.priority, r.to_send(target), r.request))

    def requeues(self, target: WorkerView, request: RunningRequest) -> bool:
        """Whether a head of line goes to the target, which admits it now: no queue, memory and a seat free.

        There is nothing to copy. A token for each that runs is left to grow into.
        """
        room = target.free_tokens - target.load.running - 1
        seats = target.worker.max_seqs - target.load.running
        return target.load.waiting == 0 and seats > 0 and request.tokens + 1 <= room

    def helps(
        self, source: WorkerView, target: WorkerView, request: RunningRequest, price: Price | None
    ) -> bool:
        """Whether the target stays freer than the source was, and the move gains more than it costs."""
        after = usage.with_request(target.load, request, target.id)
        capacity = target.worker.capacity_tokens
        if usage.freeness(after, capacity, False, self.reading) <= source.freeness:
            return False
        used = usage.virtual_usage(source.load, source.worker.capacity_tokens, False, self.reading)
        share = usage.virtual_usage(after, capacity, False, self.reading) / capacity
        if share >= (used - request.tokens) / source.worker.capacity_tokens:
            return False
        return price is None or _pays(price, source, target, request)


def decoding(requests: Iterable[RunningRequest]) -> Iterator[RunningRequest]:
    """Those that have a token: what is in its prefill has no KV yet that could be copied whole."""
    return (r for r in requests if r.generated != 0)


Pairs = Container[tuple[WorkerId, WorkerId]]


def balance(
    settings: MoveSettings,
    workers: Sequence[WorkerView],
    resting: Set[RequestId],
    recent: Pairs,
    transport: Transport,
) -> list[Move]:
    """This heartbeat's moves between `workers`, at most one each.

    `resting`: requests that must stay where they are. `recent`: pairs (source, target) that are not turned
    round yet. `transport`: at its pace a move must gain more than it costs, where speeds are known.
    """
    serving = [w for w in workers if w.worker.state == SERVING]
    sources = sorted((w for w in serving if _is_source(w, settings)), key=lambda w: (w.freeness, w.id))
    targets = sorted(
        (w for w in serving if w.freeness > settings.in_above and not _is_source(w, settings)),
        key=lambda w: (-w.freeness, w.id),
    )
    moves: list[Move] = []
    for source, target in _pairs(sources, targets):
        if len(moves) >= settings.most:
            break
        if (target.id, source.id) in recent:
            continue
        chosen = _choose(settings, resting, source, target, transport)
        if chosen is None:
            continue
        request, waits = chosen
        if waits:
            moves.append(Reassign(request.request, source.id, target.id, _reason(source, target)))
        else:
            moves.append(Migrate(request.request, source.id, target.id, _reason(source, target)))
    return moves


def _pairs(
    sources: Sequence[WorkerView], targets: Sequence[WorkerView]
) -> list[tuple[WorkerView, WorkerView]]:
    """Sources with targets, both in order: kind by kind, then those left over."""
    kinds = {s.worker.kind for s in sources}
    queues = {kind: iter([t for t in targets if t.worker.kind == kind]) for kind in kinds}
    found = [(s, next(queues[s.worker.kind], None)) for s in sources]
    pairs = [(s, t) for s, t in found if t is not None]
    paired = {t.id for _, t in pairs}
    others = [t for t in targets if t.id not in paired]
    return pairs + list(zip([s for s, t in found if t is None], others, strict=False))


def _choose(
    settings: MoveSettings,
    resting: Set[RequestId],
    source: WorkerView,
    target: WorkerView,
    transport: Transport,
) -> tuple[RunningRequest, bool] | None:
    """The request of `source` that should go to `target`, and whether it waits there; None if none may.

    Only one that waits may go to another kind of worker.
    """
    waiting = source.worker.waiting
    if waiting and waiting[0].request not in resting and settings.requeues(target, waiting[0]):
        return waiting[0], True
    low_only = _full_for_headroom_alone(settings, source)
    free_ones = (
        r
        for r in settings.in_order(source.worker.requests, target.id)
        if r.request not in resting and not (low_only and r.priority)
    )
    same_kind = source.worker.kind == target.worker.kind
    price = price_of(transport, source.worker, target.worker)
    for r in islice(free_ones, _TRIED if same_kind else 0):
        if _may_go(settings, source, target, r, price):
            return r, False
    return None


def _is_source(s: WorkerView, settings: MoveSettings) -> bool:
    # To move the only request is to move the problem.
    return s.load.running + s.load.waiting > 1 and s.freeness < settings.out_below


def _full_for_headroom_alone(settings: MoveSettings, s: WorkerView) -> bool:
    """Whether a worker is short of nothing but headroom: its high-priority requests, for whom it is, stay.

    To move them would carry the headroom from worker to worker, and leave the normal ones nowhere.
    """
    if usage.headroom_tokens(s.load, s.worker.capacity_tokens, settings.reading) == 0:
        return False
    bare = replace(settings.reading, headroom=0.0)
    return usage.freeness(s.load, s.worker.capacity_tokens, False, bare) >= settings.out_below


def _may_go(
    settings: MoveSettings, source: WorkerView, target: WorkerView, r: RunningRequest, price: Price | None
) -> bool:
    if target.load.running + target.load.waiting >= target.worker.max_seqs:
        return False
    room = target.free_tokens - target.load.waiting_tokens
    if r.new_at(target.id) + target.load.running + 1 > room:
        return False
    return settings.helps(source, target, r, price)


def _pays(price: Price, source: WorkerView, target: WorkerView, r: RunningRequest) -> bool:
    if source.worker.step is None or target.worker.step is None:
        return True
    ends = min((o.remaining_tokens for o in source.worker.requests if o is not r), default=1)
    gain = gain_s(
        r,
        source.load,
        target.load,
        source.worker.step,
        target.worker.step,
        source.free_tokens,
        max(ends, 1),
    )
    return gain > cost_s(price, r.to_send(target.id), source.load, target.load)


def _reason(source: WorkerView, target: WorkerView) -> str:
    names = source.id, target.id
    full = [f"{100 * s.load.held_tokens / s.worker.capacity_tokens:.0f} %" for s in (source, target)]
    why_source = f"{names[0]} is {full[0]} full with {_steps(source.freeness)} steps of memory left"
    blocked = f", {source.load.waiting} waiting" if source.load.waiting else ""
    return f"{why_source}{blocked}; {names[1]} {full[1]} with {_steps(target.freeness)}"


def _steps(value: float) -> str:
    return "unbounded" if math.isinf(value) else f"{value:.0f}"
