"""Prefill and decode workers sized apart: each pool by a line of its own, from the same arrivals.

A pool is scaled as a fleet of one type would be, by its own workers and its own wanted number. What waits at
the gateway counts for prefill and not for decode, since only prompts wait there. Requests with a late first
token correct the line of prefill; those that were slow after it correct that of decode. The bounds are of
both pools together. Where they allow fewer than both want, each gets its share, and at least one worker.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from controlplane.scaler.load import LoadSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import may_give_back
from controlplane.snapshot import Scale, Snapshot
from controlplane.worker_type import WorkerType


def are_pools(types: Sequence[WorkerType]) -> bool:
    """Whether a fleet's types are prefill and decode workers, and not one of these pools alone."""
    return len(types) > 1 and any(t.role != "any" for t in types)


def scaling_of(settings: ScalingSettings, pool: WorkerType) -> ScalingSettings:
    """How one pool follows demand; the other keeps a worker. A line of the whole fleet is not its."""
    target = replace(settings.target, workers_per_rps=None, intercept=None, low=1, to_zero=False)
    if target.high is not None:
        target = replace(target, high=max(target.high - 1, 1))
    return replace(settings, target=target, learned_at=None, worker_types=(pool,))


def load_of(settings: LoadSettings) -> LoadSettings:
    """How one pool follows its load."""
    return replace(settings, least=1, most=max(settings.most - 1, 1))


def seen_by(pool: WorkerType, snapshot: Snapshot) -> Snapshot:
    """The part of a snapshot that concerns one pool."""
    wanted = snapshot.wanted_kinds.get(pool.name, 0)
    is_decode = pool.role == "decode"
    return replace(
        snapshot,
        workers=tuple(w for w in snapshot.workers if w.kind == pool.name),
        wanted=wanted,
        wanted_kinds={},
        waiting_tokens=0 if is_decode else snapshot.waiting_tokens,
        waiting_requests=0 if is_decode else snapshot.waiting_requests,
        fixed=None if snapshot.fixed is None else wanted,
        outcomes=tuple(replace(o, met=o.tpot_met if is_decode else o.ttft_met) for o in snapshot.outcomes),
    )


def together(
    settings: ScalingSettings, snapshot: Snapshot, changes: Mapping[str, Scale | None]
) -> Scale | None:
    """One change of the pools' own, within the fleet's bounds; None where the wanted numbers stay.

    A pool gives nothing back while requests wait for the other.
    """
    there = {name: snapshot.wanted_kinds.get(name, 0) for name in changes}
    wanted = {name: there[name] if change is None else change.workers for name, change in changes.items()}
    if not may_give_back(snapshot, by_demand=False):
        wanted = {name: max(n, there[name]) for name, n in wanted.items()}
    one = replace(settings, worker_types=settings.worker_types[:1]).limits
    counts = within(wanted, max(settings.target.low, len(wanted)), one.high)
    if counts == there:
        return None
    reasons = [f"{name}: {change.reason}" for name, change in changes.items() if change is not None]
    facts = next((change.facts for change in changes.values() if change is not None), {})
    return Scale(sum(counts.values()), "; ".join(reasons) or "the fleet's bounds", facts, counts)


def within(wanted: Mapping[str, int], low: int, high: int | None) -> dict[str, int]:
    """The counts nearest to `wanted` in its proportions, with a sum in low..high and each at least 1."""
    total = max(sum(wanted.values()), 1)
    bound = max(min(max(total, low), math.inf if high is None else high), len(wanted))
    if bound == total:
        return {name: max(n, 1) for name, n in wanted.items()}
    exact = {name: n * bound / total for name, n in wanted.items()}
    counts = {name: max(int(share), 1) for name, share in exact.items()}
    by_rest = sorted(counts, key=lambda name: (counts[name] - exact[name], name))
    while sum(counts.values()) < bound:
        counts[by_rest[0]] += 1
        by_rest = by_rest[1:] + by_rest[:1]
    while sum(counts.values()) > bound:
        counts[max(counts, key=lambda name: counts[name])] -= 1
    return counts
