"""Room: moves that let in what waits at the gateway, and moves that empty a draining worker.

**De-fragmentation.** A request h that every worker refuses counts as virtual usage where it fits best: on the
worker whose forecast (overload.forecast: (b) and (e), as placement has them) exceeds its limits least
with it. There the request r goes that is copied soonest, of those without which h fits:

    forecast(w + h - r) <= 1        forecast(t + r) <= 1

The copy must end before h is late. **Consolidation.** What is on a draining worker goes too, the largest
first; what fits nowhere runs on. (The live plane drains by itself, several requests at a time, and asks
`best_fit` of each.)

Both choose t by best fit: of the workers of w's kind that keep their promises with r, those that have most
of it cached, in tenths, and of these the fullest. So no move breaks a promise to another request, large gaps
stay large, and the next worker to be drained is emptier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import replace

from controlplane.migration.balance import Pairs, decoding
from controlplane.migration.move import Price, price_of, tenths_to_send
from controlplane.migration.overload import ShedSettings, forecast, forecast_of
from controlplane.migration.usage import WorkerView
from controlplane.snapshot import (
    DRAINING,
    SERVING,
    HeldRequest,
    Migrate,
    Move,
    Reassign,
    RunningRequest,
    Transport,
)
from controlplane.types import RequestId

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
    bare = replace(settings, headroom=0.0)  # no request is held back for the sake of headroom
    for h in held:
        with_h = {
            w.id: forecast_of(w, bare, h.request).worst
            for w in free.values()
            if w.load.running + w.load.waiting < w.worker.max_seqs
        }
        if len(moves) >= settings.most or any(worst <= 1.0 for worst in with_h.values()):
            continue
        for source in sorted(with_h, key=lambda w: (with_h[w], w))[:_LOOKED_AT]:
            move = _room_at(settings, free[source], list(free.values()), h, resting, recent, transport)
            if move is not None:
                moves.append(move)
                del free[move.source], free[move.target]
                break
    return moves


def empty(settings: ShedSettings, workers: Sequence[WorkerView], resting: Set[RequestId]) -> list[Move]:
    """This heartbeat's moves off draining workers, at most one for each worker at either end."""
    targets = [w for w in workers if w.worker.state == SERVING]
    moves: list[Move] = []
    for source in (w for w in workers if w.worker.state == DRAINING):
        if len(moves) >= settings.most:
            break
        move = _off(settings, source, targets, resting)
        if move is not None:
            moves.append(move)
            targets = [t for t in targets if t.id != move.target]
    return moves


def _off(
    settings: ShedSettings, source: WorkerView, targets: Sequence[WorkerView], resting: Set[RequestId]
) -> Move | None:
    alike = [t for t in targets if t.worker.kind == source.worker.kind]
    waiting = {r.request for r in source.worker.waiting}
    here = (*decoding(source.worker.requests), *source.worker.waiting)
    for r in sorted((r for r in here if r.request not in resting), key=lambda r: (-r.tokens, r.request)):
        has_kv = r.request not in waiting
        taker = best_fit(settings, alike if has_kv else targets, r)
        if taker is not None:
            move = Migrate if has_kv else Reassign
            reason = f"{source.id} is draining; {r.request} fits {taker.id} best"
            return move(r.request, source.id, taker.id, reason)
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
    soonest = sorted(decoding(source.worker.requests), key=lambda r: (r.priority, r.tokens, r.request))
    targets = [
        t
        for t in others
        if t.id != source.id and t.worker.kind == source.worker.kind and (t.id, source.id) not in recent
    ]
    for r in (r for r in soonest if r.request not in resting):
        if _exchanged(replace(settings, headroom=0.0), source, r, h.request) <= 1.0:
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
