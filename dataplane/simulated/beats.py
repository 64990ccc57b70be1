"""Heartbeats at which `tick` has nothing to move, passed in compiled code.

Most heartbeats move nothing. Where requests are placed by targets, a move needs two things: one worker that
keeps its promises, and a reason. There are three reasons. A request on time is in the cluster's queue (room),
a worker's forecast broke (shed), or the forecast of a worker with a queue is at its limit (Algorithm 2).
`may_move` looks for worker and reason. It is wider than the rules: what it lets pass they may still decline,
and what they do it never hides.

Algorithm 2's errors go on at every heartbeat (placement.rebalance has the rule; both planes agree on them).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.compiled import by_reference, compiled
from controlplane.migration.overload import MARGIN, ShedSettings
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import hits, outlook
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Floats, Ints, Ledger, Records
from dataplane.simulated.cluster import advance
from dataplane.simulated.records import Cluster, Engines, Rules
from dataplane.simulated.sending import next_send

CRUMB = 1e-3  # by which forecasts may differ from those of the rules, which count blocks that are not whole
_LOOKS, _ACTIVE, _EARLY = 0, 1, 2

PLAN = np.dtype(
    [
        ("seen", np.int64),  # the last look at which it decoded
        ("worker", np.int64),
        ("end", np.int64),  # the worker's step count at which it should end,
        ("expected", np.int64),  # the tokens it should have made by then
        ("outlived", np.int64),
    ],
    align=True,
)


@by_reference
class PlannedEnds(NamedTuple):
    """The plan of each decoding request when first seen on its worker, and the errors that came of them."""

    requests: Records  # [requests] of PLAN
    active: Ints  # [requests] those that decoded at the last look
    early: Ints  # [requests] those that ended before their planned end, until it passes
    counts: Ints  # [3] looks, entries of `active` and of `early`
    errors: Ints  # [workers, 2] tokens and sequences


def new_plans(workers: int, requests: int) -> PlannedEnds:
    """No request planned."""
    plans = np.zeros(requests, PLAN)
    plans["seen"] = state.NONE
    active, early = np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    return PlannedEnds(plans, active, early, np.zeros(3, np.int64), np.zeros((workers, 2), np.int64))


def limits_of(settings: ShedSettings) -> Floats:
    """The strictness of forecasts as compiled code reads it."""
    return np.array([settings.theta, settings.gamma, settings.headroom])


@compiled
def look(ledger: Ledger, plans: PlannedEnds) -> None:
    """Bring the errors up to now; predictions are those that `may_move` or `loads` renewed."""
    plans.counts[_LOOKS] += 1
    now = plans.counts[_LOOKS]
    plans.errors[:] = 0
    for w in range(len(ledger.workers)):
        step = ledger.workers[w].step
        for i in range(ledger.workers[w].running_n):
            r = ledger.running[w, i]
            if ledger.requests[r].phase != state.DECODING:
                continue
            plan, expected = plans.requests[r], ledger.requests[r].predicted
            rest = max(expected - ledger.requests[r].key - step, 1)
            was_seen = plan.seen == now - 1
            if not was_seen:
                plans.active[plans.counts[_ACTIVE]] = r
                plans.counts[_ACTIVE] += 1
            if was_seen and plan.worker == w:
                plan.outlived = int(expected > plan.expected)
            else:
                plan.worker, plan.end, plan.expected, plan.outlived = w, step + rest, expected, 0
            plan.seen = now
            if plan.outlived:
                plans.errors[w, 0] += rest
                plans.errors[w, 1] += 1
    note_ends(ledger, plans, now)


@compiled
def note_ends(ledger: Ledger, plans: PlannedEnds, now: int) -> None:
    """Count those that ended before their planned end, and forget those whose end has passed."""
    kept, early = 0, plans.counts[_EARLY]
    for i in range(plans.counts[_ACTIVE]):
        r = plans.active[i]
        if plans.requests[r].seen == now:
            plans.active[kept] = r
            kept += 1
        elif not plans.requests[r].outlived and ledger.requests[r].phase == state.DONE:
            plans.early[early] = r
            early += 1
    plans.counts[_ACTIVE], kept = kept, 0
    for i in range(early):
        r = plans.early[i]
        w, end = plans.requests[r].worker, plans.requests[r].end
        if end > ledger.workers[w].step:
            plans.early[kept] = r
            kept += 1
            plans.errors[w, 0] -= end - ledger.workers[w].step
            plans.errors[w, 1] -= 1
    plans.counts[_EARLY] = kept


@compiled
def forecast(ledger: Ledger, limits: Floats, w: int) -> tuple[float, float]:
    """A worker's worst share of a limit (`overload.forecast`), without headroom and with it."""
    worker, k = ledger.workers[w], ledger.coefficients[ledger.workers[w].variant]
    held, growth, tpot_s, high, waiting = 0.0, 0.0, np.inf, 0, 0
    for i in range(worker.running_n):
        r = ledger.running[w, i]
        held += ledger.requests[r].prompt + state.generated(ledger, r)
        growth += outlook.remaining(ledger, w, r)
        tpot_s = min(tpot_s, ledger.requests[r].tpot_s)
        high += ledger.requests[r].priority
    for p in range(len(ledger.queue_head)):
        r = ledger.queue_head[p, w]
        while r != state.NONE:
            waiting += 1
            held += ledger.requests[r].prompt + ledger.requests[r].key
            growth += max(ledger.requests[r].predicted - ledger.requests[r].key, 1)
            tpot_s = min(tpot_s, ledger.requests[r].tpot_s)
            r = ledger.requests[r].next
    step = speed.decode_base_s(k, worker.running_n + waiting) + k[speed.PER_CONTEXT] * (
        held + limits[0] * growth
    )
    capacity = k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS]
    kept = limits[2] * capacity if high > 0 else 0.0
    peak = held + growth - hits.shared_tokens(ledger, w)
    if peak + kept > limits[1] * capacity:  # as if all ended at once, which no peak exceeds
        peak = outlook.kv_peak(ledger, w, state.NONE)
    bare = max(step / tpot_s, peak / (limits[1] * capacity))
    return bare, max(bare, (peak + kept) / (limits[1] * capacity))


@compiled
def may_move(ledger: Ledger, cluster: Cluster, limits: Floats) -> bool:
    """Whether the rules may move a request now. Renews outlived predictions, as every look does."""
    reason = cluster.queue.head[0] != state.NONE or cluster.queue.head[1] != state.NONE
    serving, has_slack, drains = 0, False, False
    for w in range(len(ledger.workers)):
        worker = ledger.workers[w]
        bare, worst = forecast(ledger, limits, w)
        if worker.status == state.OFF:
            continue
        drains = drains or (worker.status == state.DRAINING and worker.decoding > 0)
        if worker.status == state.SERVING:
            serving += 1
            has_slack = has_slack or bare <= 1.0 + CRUMB
        breaks = worst > 1.0 + MARGIN - CRUMB and worker.running_n > 1
        reason = reason or breaks or (worst > 1.0 - CRUMB and worker.queued > 0)
    return drains or (reason and has_slack and serving > 1)


@compiled
def pass_beats(
    ledger: Ledger,
    engines: Engines,
    cluster: Cluster,
    rules: Rules,
    plans: PlannedEnds,
    limits: Floats,
    beat_s: float,
    first_s: float,
) -> tuple[float, bool]:
    """Run to the first heartbeat, from `first_s` on, at which something may have to be done.

    Returns its time, and whether anything is left to happen. Algorithm 2 has not looked there yet.
    """
    at_s, change = first_s, cluster.clock[0].timeline_at
    while True:
        is_more = advance(ledger, engines, cluster, rules, at_s)
        cluster.clock[0].now_s = at_s
        is_over = not is_more or engines.total[0].misses > rules.max_misses
        if is_over or cluster.clock[0].timeline_at != change:
            return at_s, is_more
        state.view_workers(ledger, at_s)
        if may_move(ledger, cluster, limits):
            return at_s, is_more
        look(ledger, plans)
        at_s = next_beat_s(ledger, engines, cluster, at_s, beat_s)


@compiled
def next_beat_s(ledger: Ledger, engines: Engines, cluster: Cluster, now_s: float, beat_s: float) -> float:
    """The next heartbeat; a fleet that has nothing to do waits for the next arrival."""
    for w in range(len(engines.workers)):
        if engines.workers[w].next_s < np.inf:
            return now_s + beat_s
    next_s = next_send(ledger, cluster.sending)[0]
    if next_s < np.inf and cluster.queue.counts[0] == 0:
        return max(next_s, now_s) + beat_s
    return now_s + beat_s
