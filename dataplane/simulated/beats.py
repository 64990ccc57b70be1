"""Heartbeats at which `tick` has nothing to move, passed in compiled code.

Most heartbeats move nothing. Where requests are placed by targets, a move needs two things: one worker that
keeps its promises, and a reason. There are two reasons. A request on time is in the cluster's queue (room),
or a worker's forecast broke (shed). `may_move` looks for worker and reason. It is wider than the rules: what
it lets pass they may still decline, and what they do it never hides.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.migration.overload import MARGIN, ShedSettings
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import hits, outlook
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Floats, Ledger
from dataplane.simulated.cluster import advance
from dataplane.simulated.records import Cluster, Engines, Rules
from dataplane.simulated.sending import next_send

CRUMB = 1e-3  # by which forecasts may differ from those of the rules, which count blocks that are not whole


def limits_of(settings: ShedSettings) -> Floats:
    """The strictness of forecasts as compiled code reads it."""
    return np.array([settings.theta, settings.gamma, settings.headroom])


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
    step = speed.decode_s(k, worker.running_n + waiting, held + limits[0] * growth)
    capacity = k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS]
    kept = limits[2] * capacity if high > 0 else 0.0
    peak = held + growth - hits.shared_tokens(ledger, w)
    if peak + kept > limits[1] * capacity:  # as if all ended at once, which no peak exceeds
        peak = outlook.kv_peak(ledger, w, state.NONE, np.inf)
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
        reason = reason or breaks
    return drains or (reason and has_slack and serving > 1)


@compiled
def pass_beats(
    ledger: Ledger,
    engines: Engines,
    cluster: Cluster,
    rules: Rules,
    limits: Floats,
    beat_s: float,
    first_s: float,
) -> tuple[float, bool]:
    """Run to the first heartbeat, from `first_s` on, at which something may have to be done.

    Returns its time, and whether anything is left to happen.
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
