"""What corrects Aladdin: a worker whose forecast broke sheds to one with slack.

Placement promised each worker a step time and a memory peak; lengths predicted wrongly break the promise.
So both are forecast anew from what is there now, with the predictions renewed:

    (b) t_step(b, held + θ·still to come) <= tightest TPOT        (e) peak of KV <= γ·capacity

(b = all at the worker, waiting ones included.) A worker that breaks either sheds the request with the most
still to come for the least to copy, low priority first, to the worker of its kind with the most slack that
keeps both with it. One request a worker and heartbeat: the next heartbeat looks again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from controlplane.errors import BadInput
from controlplane.migration.balance import Recent, Seen
from controlplane.migration.cost import Price
from controlplane.migration.usage import with_request
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import SERVING, Load, Migrate, RunningRequest, Snapshot
from controlplane.types import WorkerId

# Tried for one source: where the freest targets cannot take the likeliest requests, others hardly can.
_LOOKED_AT = 4
_TRIED = 8


@dataclass(frozen=True, slots=True)
class ShedSettings:
    """How strictly forecasts are read (as in PlacementSettings), and how far over the line one must be.

    `margin`: the share by which a forecast must exceed its limit before anything moves. `most`: moves of
    one heartbeat. `price`: the pause and the copy must be worth less than the excess they end.
    """

    theta: float = 0.5
    gamma: float = 0.95
    margin: float = 0.05
    most: int = 64
    price: Price | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.theta <= 1.0 or not 0.0 < self.gamma <= 1.0 or not self.margin >= 0.0:
            raise BadInput(f"shedding: need theta in [0, 1], gamma in (0, 1], margin >= 0, got {self}")
        if self.most < 0:
            raise BadInput(f"shedding: most: must not be negative, got {self.most}")


@dataclass(frozen=True, slots=True)
class Forecast:
    """A worker's step time and KV peak to come, each as a share of its limit; 1 is at the limit."""

    step: float
    kv: float

    @property
    def worst(self) -> float:
        return max(self.step, self.kv)


def forecast(
    load: Load,
    requests: Sequence[RunningRequest],
    capacity_tokens: int,
    step: StepModel | None,
    settings: ShedSettings,
) -> Forecast:
    """Where a worker with this load is heading; `requests` are all there, waiting ones too."""
    held = load.held_tokens + load.waiting_tokens
    step_share = 0.0
    if step is not None and load.tpot_s < math.inf:
        context = held + settings.theta * load.growth_tokens
        step_share = _step_s(step, load.running + load.waiting, context) / load.tpot_s
    limit = settings.gamma * capacity_tokens
    kv = (held + load.growth_tokens) / limit  # as if all ended at once, which no peak exceeds
    if kv > 1.0:
        kv = (load.peak_tokens if load.peak_tokens >= 0 else peak_tokens(requests)) / limit
    return Forecast(step_share, kv)


def peak_tokens(requests: Sequence[RunningRequest]) -> int:
    """(e)'s most KV tokens ever held: Σ (tokens + n) over requests that last n steps, at the worst n."""
    held = peak = 0
    for n, r in enumerate(sorted(requests, key=lambda r: -r.remaining_tokens), start=1):
        held += r.tokens
        peak = max(peak, held + n * r.remaining_tokens)
    return peak


def forecast_of(s: Seen, settings: ShedSettings, also: RunningRequest | None = None) -> Forecast:
    """A worker's forecast, with another request there if one is given."""
    worker, load = s.worker, s.load
    everyone = _everyone(worker.requests, worker.waiting)
    if also is not None:
        load, everyone = with_request(load, also), [*everyone, also]
    return forecast(load, everyone, worker.capacity_tokens, worker.step, settings)


def plan_shedding(
    settings: ShedSettings,
    recent: Recent,
    snapshot: Snapshot,
    seen: Sequence[Seen],
    taken: frozenset[WorkerId],
) -> list[tuple[Migrate, WorkerId]]:
    """This heartbeat's moves, with their sources, off workers whose forecast broke.

    `taken` have a move already.
    """
    free = [s for s in seen if s.worker.worker not in taken and s.worker.worker not in snapshot.busy]
    ahead = {s.worker.worker: forecast_of(s, settings) for s in free}
    broken = sorted(
        (s for s in free if ahead[s.worker.worker].worst > 1.0 + settings.margin and s.load.running > 1),
        key=lambda s: (-ahead[s.worker.worker].worst, s.worker.worker),
    )
    if not broken:
        return []
    slack = sorted(
        (s for s in free if s.worker.state == SERVING and ahead[s.worker.worker].worst < 1.0),
        key=lambda s: (ahead[s.worker.worker].worst, s.worker.worker),
    )
    moves: list[tuple[Migrate, WorkerId]] = []
    for source in broken:
        if len(moves) >= settings.most:
            break
        same_kind = (t for t in slack if t.worker.kind == source.worker.kind)
        for target in list(islice(same_kind, _LOOKED_AT)):
            if (target.worker.worker, source.worker.worker) in recent.pairs:
                continue
            chosen = _choose(settings, recent, snapshot, source, target)
            if chosen is not None:
                reason = _reason(source, target, ahead[source.worker.worker], ahead[target.worker.worker])
                moves.append((Migrate(chosen.request, target.worker.worker, reason), source.worker.worker))
                slack.remove(target)
                break
    return moves


def _everyone(
    running: Sequence[RunningRequest], waiting: Sequence[RunningRequest]
) -> Sequence[RunningRequest]:
    return [*running, *waiting] if waiting else running


def _choose(
    settings: ShedSettings, recent: Recent, snapshot: Snapshot, source: Seen, target: Seen
) -> RunningRequest | None:
    candidates = sorted(
        (
            r
            for r in source.worker.requests
            if r.request not in recent.requests and r.request not in snapshot.moving and r.remaining_tokens
        ),
        key=lambda r: (r.priority, r.tokens - r.remaining_tokens, r.request),
    )
    room = target.free_tokens - target.load.waiting_tokens - target.load.running - 1
    for r in candidates[:_TRIED]:
        if r.tokens > room or target.load.running + target.load.waiting >= target.worker.max_seqs:
            continue
        if forecast_of(target, settings, r).worst <= 1.0 and _pays(settings, source, r):
            return r
    return None


def _pays(settings: ShedSettings, source: Seen, r: RunningRequest) -> bool:
    """Whether what the source is spared over the request's life exceeds the pause and the interference."""
    price, step = settings.price, source.worker.step
    if price is None or step is None:
        return True
    spared = step.per_sequence_s + step.per_context_token_s * (r.tokens + settings.theta * r.remaining_tokens)
    cost = price.fixed_s + price.slowdown * price.copy_s(r.tokens) * (source.load.running + 1)
    return spared * r.remaining_tokens * (source.load.running - 1) > cost


def _step_s(step: StepModel, sequences: int, context: float) -> float:
    """step.step_s in plain floats: a thousand workers are forecast in a heartbeat."""
    t = step.base_s + step.per_sequence_s * sequences + step.per_context_token_s * context
    for hinge in step.hinges:
        if hinge.of == "sequences" and sequences > hinge.start:
            t += hinge.per_unit_s * (sequences - hinge.start)
    return t


def _reason(source: Seen, target: Seen, now: Forecast, there: Forecast) -> str:
    what, share = ("step time", now.step) if now.step >= now.kv else ("KV peak", now.kv)
    return (
        f"{source.worker.worker} is forecast at {share:.0%} of its {what} limit,"
        f" {target.worker.worker} at {there.worst:.0%}"
    )
