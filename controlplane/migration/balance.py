"""Balancing by `freeness` (Llumnix): the least free workers shed one request each to the most free.

    sources  F < out_below;   targets  F > in_above, no source
    pairs    sources by F rising with targets by F falling, each kind of worker by itself

KV moves between workers of one kind only. Sources left over are paired with targets left over, whatever their
kinds, for requests that have not started. Draining workers take no part: migration.drain empties them.

No worker is both source and target, so a heartbeat never has A→B together with B→A. Across heartbeats a pair
is not reversed within `rest_s`. A move must leave the target freer than the source was. So no move is undone
by the next, and a burst causes no storm of moves. Of a source's requests those of low priority go first, then
those that take least time to copy, what the target has cached left out. No important request waits for them.

A move is made only where it gains more request-seconds than it costs. While `copy_s` = bytes / bandwidth
lasts, every step of both workers is `slowdown` longer. The moved request pauses for `fixed_s`.

    cost = fixed_s + slowdown · copy_s · (b_source + b_target + 1)

Only the bytes of the tokens that are sent count, not those of first tokens that the target has cached.

The gain is over the n steps that the moved request is still expected to take. The request adds
m = c2 + k2·tokens to every step that it is part of. Its neighbours at the source no longer bear that, and
those at the target do. Its own step times change.

    gain = n · [ m·(b_source - 1 - b_target) + t_source - (t_target + m) ]

Where requests wait at the source for memory, the move also shortens the wait of each request in its queue. It
saves the share min(moved tokens / missing tokens, 1) of the time until the source's next expected finish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.errors import BadInput
from controlplane.migration import usage
from controlplane.migration.move import MoveTerms, Price, price_of
from controlplane.migration.usage import Reading, WorkerView
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import SERVING, Load, Migrate, Move, Reassign, RunningRequest

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
        after = target.load.with_request(request, target.id)
        capacity = target.worker.capacity_tokens
        if usage.freeness(after, capacity, False, self.reading) <= source.freeness:
            return False
        used = usage.virtual_usage(source.load, source.worker.capacity_tokens, False, self.reading)
        share = usage.virtual_usage(after, capacity, False, self.reading) / capacity
        if share >= (used - request.tokens) / source.worker.capacity_tokens:
            return False
        return price is None or _pays(price, source, target, request)


def balance(settings: MoveSettings, workers: Sequence[WorkerView], terms: MoveTerms) -> list[Move]:
    """This heartbeat's moves between `workers`, at most one each."""
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
        if (target.id, source.id) in terms.recent:
            continue
        chosen = _choose(settings, terms, source, target)
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
    settings: MoveSettings, terms: MoveTerms, source: WorkerView, target: WorkerView
) -> tuple[RunningRequest, bool] | None:
    """The request of `source` that should go to `target`, and whether it waits there; None if none may.

    Only one that waits may go to another kind of worker.
    """
    waiting = source.worker.waiting
    if waiting and waiting[0].request not in terms.resting and settings.requeues(target, waiting[0]):
        return waiting[0], True
    if source.worker.kind != target.worker.kind:
        return None
    movable = terms.movable(source.worker)
    if _full_for_headroom_alone(settings, source):
        movable = [r for r in movable if not r.priority]
    price = price_of(terms.transport, source.worker, target.worker)
    for r in sorted(movable, key=lambda r: (r.priority, r.to_send(target.id), r.request))[:_TRIED]:
        if target.has_room(r) and settings.helps(source, target, r, price):
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


def _pays(price: Price, source: WorkerView, target: WorkerView, r: RunningRequest) -> bool:
    if source.worker.step is None or target.worker.step is None:
        return True
    gain = gain_s(r, source, target, source.worker.step, target.worker.step)
    return gain > cost_s(price, r.to_send(target.id), source.load, target.load)


def cost_s(price: Price, tokens: int, source: Load, target: Load) -> float:
    """Request-seconds that sending `tokens` tokens takes from all requests that the move touches."""
    busy = source.running + target.running + 1
    return price.fixed_s + price.slowdown * price.copy_s(tokens) * busy


def gain_s(
    r: RunningRequest,
    source: WorkerView,
    target: WorkerView,
    at_source: StepModel,
    at_target: StepModel,
) -> float:
    """Request-seconds that a move is expected to save, by the two workers' step times; below 0: it costs."""
    here, there = source.load, target.load
    t_source = float(at_source.step_s(0, here.running, here.held_tokens))
    t_target = float(at_target.step_s(0, there.running, there.held_tokens))
    spared = at_source.sequence_s(r.tokens)
    borne = at_target.sequence_s(r.tokens)
    others = spared * (here.running - 1) - borne * there.running
    gain = max(r.remaining_tokens, 1) * (others + t_source - (t_target + borne))
    lacks = here.head_tokens - source.free_tokens
    if here.waiting and lacks > 0:
        next_end = min((o.remaining_tokens for o in source.worker.requests if o is not r), default=1)
        gain += min(r.tokens / lacks, 1.0) * max(next_end, 1) * t_source * here.waiting
    return gain


def _reason(source: WorkerView, target: WorkerView) -> str:
    names = source.id, target.id
    full = [f"{100 * s.load.held_tokens / s.worker.capacity_tokens:.0f} %" for s in (source, target)]
    why_source = f"{names[0]} is {full[0]} full with {_steps(source.freeness)} steps of memory left"
    blocked = f", {source.load.waiting} waiting" if source.load.waiting else ""
    return f"{why_source}{blocked}; {names[1]} {full[1]} with {_steps(target.freeness)}"


def _steps(value: float) -> str:
    return "unbounded" if math.isinf(value) else f"{value:.0f}"
