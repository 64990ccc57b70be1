"""Overload: workers whose forecasts broke give up requests, as Aladdin needs it once lengths err.

Placement promised each worker a step time and a memory peak. Lengths predicted wrongly break the promise. So
both are forecast again from what is there now, with renewed predictions:

    (b) t_step(b, held + θ·still to come) <= tightest TPOT        (e) peak of KV <= γ·capacity

(b = all at the worker, waiting ones included.)

**Shed.** A worker that breaks either gives up one request a heartbeat; the next heartbeat looks again. That
is the request with the most still to come for the least to copy, low priority first. It goes to the worker of
its kind with the most slack that keeps both with it. One of the next in line takes it instead where clearly
more of it is cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, islice

from controlplane.errors import BadInput
from controlplane.migration.balance import Pairs, decoding
from controlplane.migration.move import Price, price_of, tenths_to_send
from controlplane.migration.usage import WorkerView, peak_tokens, with_request
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import SERVING, Load, Migrate, RunningRequest, Transport
from controlplane.types import RequestId

MARGIN = 0.05  # the share by which a forecast must exceed its limit before anything moves
# Tried for one source: where the freest targets cannot take the likeliest requests, others hardly can.
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
        load, everyone = with_request(load, also, s.id), chain(everyone, (also,))
    return forecast(load, everyone, worker.capacity_tokens, worker.step, settings)


def shed(
    settings: ShedSettings,
    workers: Sequence[WorkerView],
    resting: Set[RequestId],
    recent: Pairs,
    transport: Transport,
) -> list[Migrate]:
    """This heartbeat's moves between `workers`, off those whose forecast broke.

    `resting` and `recent` as for `balance`; the pause and the copy, at the pace of `transport`, must be worth
    less than the excess they end.
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
        chosen = _chosen_of(settings, resting, source, _likely(source, slack, recent), transport)
        if chosen is not None:
            request, target = chosen
            reason = _reason(source, target, ahead[source.id], ahead[target.id])
            moves.append(Migrate(request.request, source.id, target.id, reason))
            slack.remove(target)
    return moves


def _likely(source: WorkerView, slack: Sequence[WorkerView], recent: Pairs) -> list[WorkerView]:
    """The first of its kind with slack, less those that have just given to it."""
    same_kind = (t for t in slack if t.worker.kind == source.worker.kind)
    return [t for t in islice(same_kind, _LOOKED_AT) if (t.id, source.id) not in recent]


def _chosen_of(
    settings: ShedSettings,
    resting: Set[RequestId],
    source: WorkerView,
    targets: Sequence[WorkerView],
    transport: Transport,
) -> tuple[RunningRequest, WorkerView] | None:
    """The request that goes, and where: the first of `targets` that takes one, or a cheaper one that does."""
    for n, target in enumerate(targets):
        r = _choose(settings, resting, source, target, transport)
        if r is not None:
            fit = [target, *(t for t in targets[n + 1 :] if _takes(settings, t, r))]
            return r, min(fit, key=lambda t: tenths_to_send(r, t.id))
    return None


def _choose(
    settings: ShedSettings,
    resting: Set[RequestId],
    source: WorkerView,
    target: WorkerView,
    transport: Transport,
) -> RunningRequest | None:
    candidates = sorted(
        (r for r in decoding(source.worker.requests) if r.request not in resting and r.remaining_tokens),
        key=lambda r: (r.priority, r.to_send(target.id) - r.remaining_tokens, r.request),
    )
    price = price_of(transport, source.worker, target.worker)
    if source.load.high and forecast_of(source, replace(settings, headroom=0.0)).worst <= 1.0 + MARGIN:
        candidates = [r for r in candidates if not r.priority]  # headroom alone: they are whom it is for
    for r in candidates[:_TRIED]:
        if _takes(settings, target, r) and _pays(settings, price, source, target, r):
            return r
    return None


def _takes(settings: ShedSettings, target: WorkerView, r: RunningRequest) -> bool:
    """Whether a worker has room for a request now, and keeps its promises with it."""
    room = target.free_tokens - target.load.waiting_tokens - target.load.running - 1
    if r.new_at(target.id) > room or target.load.running + target.load.waiting >= target.worker.max_seqs:
        return False
    return forecast_of(target, settings, r).worst <= 1.0


def _pays(
    settings: ShedSettings, price: Price | None, source: WorkerView, target: WorkerView, r: RunningRequest
) -> bool:
    """Whether what the source is spared over the request's life exceeds the pause and the interference."""
    step = source.worker.step
    if price is None or step is None:
        return True
    spared = step.per_sequence_s + step.per_context_token_s * (r.tokens + settings.theta * r.remaining_tokens)
    cost = price.fixed_s + price.slowdown * price.copy_s(r.to_send(target.id)) * (source.load.running + 1)
    return spared * r.remaining_tokens * (source.load.running - 1) > cost


def _step_s(step: StepModel, sequences: int, context: float) -> float:
    """step.step_s in plain floats: a thousand workers are forecast in a heartbeat."""
    t = step.base_s + step.per_sequence_s * sequences + step.per_context_token_s * context
    for hinge in step.hinges:
        if hinge.of == "sequences" and sequences > hinge.start:
            t += hinge.per_unit_s * (sequences - hinge.start)
        elif hinge.of == "experts":
            t -= hinge.per_unit_s * hinge.start * math.expm1(-sequences / hinge.start)
    return t


def _reason(source: WorkerView, target: WorkerView, now: LoadForecast, there: LoadForecast) -> str:
    what, share = ("step time", now.step) if now.step >= now.kv else ("KV peak", now.kv)
    limits = f"{100 * share:.0f} % of its {what} limit, {target.id} at {100 * there.worst:.0f} %"
    return f"{source.id} is forecast at {limits}"
