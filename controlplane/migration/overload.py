"""Overload and room: moves by forecasts, which keep what placement promised and let in what waits.

Placement promised each worker a step time and a memory peak. Lengths predicted wrongly break the promise. So
both are forecast again from what is there now, with renewed predictions:

    (b) t_step(b, held + θ·still to come) <= tightest TPOT        (e) peak of KV <= γ·capacity

(b = all at the worker, waiting ones included.)

**Shed.** A worker that breaks either gives up one request a heartbeat; the next heartbeat looks again. That
is the request with the most still to come for the least to copy, low priority first. It goes to the worker of
its kind with the most slack that keeps both with it. One of the next in line takes it instead where clearly
more of it is cached.

**Room.** A request h at the gateway that every worker refuses is counted where it fits best. That is the
worker whose forecast exceeds its limits least with it. From there a request r moves to a worker t: the one
copied soonest of those without which h fits:

    forecast(w + h - r) <= 1        forecast(t + r) <= 1

The copy must end before h is late. Best fit chooses t among the workers of w's kind that keep their promises
with r. Those that have most of r cached, in tenths, come first, and of these the fullest. So no move breaks a
promise to another request, and large gaps stay large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from controlplane.errors import BadInput
from controlplane.migration.move import MoveTerms, Price, price_of
from controlplane.migration.usage import WorkerView
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import SERVING, HeldRequest, Load, Migrate, RunningRequest
from controlplane.types import WorkerId

MARGIN = 0.05  # the share by which a forecast must exceed its limit before anything moves
# Tried for one source, or one that waits: where the likeliest workers and requests fail, others hardly do
# better.
_LOOKED_AT = 4
_TRIED = 8


@dataclass(frozen=True, slots=True)
class ShedSettings:
    """The strictness of forecasts, as in PlacementSettings, and the bounds of what is moved.

    `most`: moves of one heartbeat. `headroom`: the share of KV that a worker with a high-priority request
    keeps free for it (migration.usage); what breaks it alone sends normal requests away.
    """

    theta: float = 0.5
    gamma: float = 0.95
    most: int = 64
    headroom: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.headroom < 1.0:
            raise BadInput(f"shedding: headroom: must be at least 0 and below 1, got {self.headroom:g}")
        if not 0.0 <= self.theta <= 1.0 or not 0.0 < self.gamma <= 1.0:
            raise BadInput(f"shedding: need theta in [0, 1] and gamma in (0, 1], got {self}")
        if self.most < 0:
            raise BadInput(f"shedding: most: must not be negative, got {self.most}")


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """A worker's step time and KV peak to come, each as a share of its limit; 1 is at the limit."""

    step: float
    kv: float

    @property
    def worst(self) -> float:
        return max(self.step, self.kv)


def forecast(
    load: Load,
    requests: Iterable[RunningRequest],
    capacity_tokens: int,
    step: StepModel | None,
    settings: ShedSettings,
) -> LoadForecast:
    """The forecast of a worker with this load; `requests` are all there, waiting ones too.

    They are listed only where a bound on their peak is not enough.
    """
    held = load.held_tokens + load.waiting_tokens
    step_share = 0.0
    if step is not None and load.tpot_s < math.inf:
        context = held + settings.theta * load.growth_tokens
        step_share = _step_s(step, load.running + load.waiting, context) / load.tpot_s
    limit = settings.gamma * capacity_tokens
    kept = settings.headroom * capacity_tokens if load.high else 0.0
    # As if all ended at once, which no peak exceeds.
    kv = (held + load.growth_tokens - load.shared_tokens + kept) / limit
    if kv > 1.0:
        peak = load.peak_tokens if load.peak_tokens >= 0 else peak_tokens(requests) - load.shared_tokens
        kv = (peak + kept) / limit
    return LoadForecast(step_share, kv)


def forecast_of(s: WorkerView, settings: ShedSettings, also: RunningRequest | None = None) -> LoadForecast:
    """A worker's forecast, with another request there if one is given."""
    worker, load = s.worker, s.load
    everyone: Iterable[RunningRequest] = chain(worker.requests, worker.waiting)
    if also is not None:
        load, everyone = load.with_request(also, s.id), chain(everyone, (also,))
    return forecast(load, everyone, worker.capacity_tokens, worker.step, settings)


def peak_tokens(requests: Iterable[RunningRequest]) -> int:
    """(e)'s most KV tokens ever held: Σ (tokens + n) over requests that last n steps, at the worst n."""
    held = peak = 0
    for n, r in enumerate(sorted(requests, key=lambda r: -r.remaining_tokens), start=1):
        held += r.tokens
        peak = max(peak, held + n * r.remaining_tokens)
    return peak


def _step_s(step: StepModel, sequences: int, context: float) -> float:
    """step.step_s in plain floats: a thousand workers are forecast in a heartbeat."""
    t = step.base_s + step.per_sequence_s * sequences + step.per_context_token_s * context
    for hinge in step.hinges:
        if hinge.of == "sequences" and sequences > hinge.start:
            t += hinge.per_unit_s * (sequences - hinge.start)
        elif hinge.of == "experts":
            t -= hinge.per_unit_s * hinge.start * math.expm1(-sequences / hinge.start)
    return t


def shed(settings: ShedSettings, workers: Sequence[WorkerView], terms: MoveTerms) -> list[Migrate]:
    """This heartbeat's moves between `workers`, off those whose forecast broke.

    The pause and the copy must be worth less than the excess they end.
    """
    ahead = {w.id: forecast_of(w, settings) for w in workers}
    over = [w for w in workers if ahead[w.id].worst > 1.0 + MARGIN and w.load.running > 1]
    if not over:
        return []
    broken = sorted(over, key=lambda w: (-ahead[w.id].worst, w.id))
    under = [w for w in workers if w.worker.state == SERVING and ahead[w.id].worst < 1.0]
    slack = sorted(under, key=lambda w: (ahead[w.id].worst, w.id))
    moves: list[Migrate] = []
    for source in broken:
        if len(moves) >= settings.most:
            break
        chosen = _chosen_of(settings, terms, source, slack)
        if chosen is not None:
            request, target = chosen
            reason = _reason(source, target, ahead[source.id], ahead[target.id])
            moves.append(Migrate(request.request, source.id, target.id, reason))
            slack.remove(target)
    return moves


def _chosen_of(
    settings: ShedSettings, terms: MoveTerms, source: WorkerView, slack: Sequence[WorkerView]
) -> tuple[RunningRequest, WorkerView] | None:
    """The request that goes, and where: to the first in `slack` that takes one, or a cheaper one that does.

    That is one of its kind which has not just given to it.
    """
    same_kind = (t for t in slack if t.worker.kind == source.worker.kind)
    targets = [t for t in islice(same_kind, _LOOKED_AT) if (t.id, source.id) not in terms.recent]
    for n, target in enumerate(targets):
        r = _choose(settings, terms, source, target)
        if r is not None:
            fit = [target, *(t for t in targets[n + 1 :] if worst_with(settings, t, r) <= 1.0)]
            return r, min(fit, key=lambda t: tenths_to_send(r, t.id))
    return None


def _choose(
    settings: ShedSettings, terms: MoveTerms, source: WorkerView, target: WorkerView
) -> RunningRequest | None:
    candidates = sorted(
        (r for r in terms.movable(source.worker) if r.remaining_tokens),
        key=lambda r: (r.priority, r.to_send(target.id) - r.remaining_tokens, r.request),
    )
    price = price_of(terms.transport, source.worker, target.worker)
    if source.load.high and forecast_of(source, replace(settings, headroom=0.0)).worst <= 1.0 + MARGIN:
        candidates = [r for r in candidates if not r.priority]  # headroom alone: they are whom it is for
    for r in candidates[:_TRIED]:
        if worst_with(settings, target, r) <= 1.0 and _pays(settings, price, source, target, r):
            return r
    return None


def _pays(
    settings: ShedSettings, price: Price | None, source: WorkerView, target: WorkerView, r: RunningRequest
) -> bool:
    """Whether what the source is spared over the request's life exceeds the pause and the interference."""
    step = source.worker.step
    if price is None or step is None:
        return True
    spared = step.sequence_s(r.tokens + settings.theta * r.remaining_tokens)
    cost = price.fixed_s + price.slowdown * price.copy_s(r.to_send(target.id)) * (source.load.running + 1)
    return spared * r.remaining_tokens * (source.load.running - 1) > cost


def _reason(source: WorkerView, target: WorkerView, now: LoadForecast, there: LoadForecast) -> str:
    what, share = ("step time", now.step) if now.step >= now.kv else ("KV peak", now.kv)
    limits = f"{100 * share:.0f} % of its {what} limit, {target.id} at {100 * there.worst:.0f} %"
    return f"{source.id} is forecast at {limits}"


def make_room(
    settings: ShedSettings, workers: Sequence[WorkerView], held: Sequence[HeldRequest], terms: MoveTerms
) -> list[Migrate]:
    """This heartbeat's moves between `workers`, at most one each, for the requests `held` at the gateway."""
    free = {w.id: w for w in workers if w.worker.state == SERVING}
    moves: list[Migrate] = []
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
            move = _room_at(settings, terms, free[source], list(free.values()), h)
            if move is not None:
                moves.append(move)
                del free[move.source], free[move.target]
                break
    return moves


def _room_at(
    settings: ShedSettings, terms: MoveTerms, source: WorkerView, others: Sequence[WorkerView], h: HeldRequest
) -> Migrate | None:
    """The move that lets `h` in at `source`, or None."""
    alike = [t for t in others if t.id != source.id and t.worker.kind == source.worker.kind]
    targets = [t for t in alike if (t.id, source.id) not in terms.recent]
    bare = replace(settings, headroom=0.0)
    movable = terms.movable(source.worker) if targets else []
    for r in sorted(movable, key=lambda r: (r.priority, r.tokens, r.request)):
        if _exchanged(bare, source, r, h.request) <= 1.0:
            taker = best_fit(settings, targets, r)
            if taker is not None and _in_time(terms, source, taker, r, h.left_s):
                reason = f"{h.request.request} waits at the gateway and fits {source.id} without it"
                return Migrate(r.request, source.id, taker.id, reason)
    return None


def _in_time(
    terms: MoveTerms, source: WorkerView, taker: WorkerView, r: RunningRequest, left_s: float
) -> bool:
    price = price_of(terms.transport, source.worker, taker.worker)
    move_s = 0.0 if price is None else price.copy_s(r.to_send(taker.id)) + price.fixed_s
    return move_s <= left_s


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


def best_fit(settings: ShedSettings, targets: Sequence[WorkerView], r: RunningRequest) -> WorkerView | None:
    """Of `targets` that keep their promises with `r`: the one to which least is sent, then the fullest."""
    worst = {t.id: worst_with(settings, t, r) for t in targets}
    fit = [t for t in targets if worst[t.id] <= 1.0]
    return min(fit, key=lambda t: (tenths_to_send(r, t.id), -worst[t.id]), default=None)


def worst_with(settings: ShedSettings, target: WorkerView, r: RunningRequest) -> float:
    """The worst of a worker's forecast with a request there; infinite without room for it now."""
    return forecast_of(target, settings, r).worst if target.has_room(r) else math.inf


def tenths_to_send(r: RunningRequest, target: WorkerId) -> int:
    """Tenths of a request that a move to a worker sends: the order of targets that are equal otherwise.

    A smaller difference than a tenth is no reason to choose one.
    """
    return -(-10 * r.to_send(target) // max(r.tokens, 1))
