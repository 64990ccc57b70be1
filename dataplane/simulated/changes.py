"""Changes to workers from outside: they become ready, are drained, or fail with all that they hold."""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch, queue
from controlplane.placement import ledger as state
from controlplane.placement.caches import forget
from controlplane.placement.ledger import Ledger, view
from dataplane.simulated.host_tier import forget_request, leave_loading, reset_tier
from dataplane.simulated.kv import give_back
from dataplane.simulated.records import DRAIN, IDLE, READY, Cluster, Engines


@compiled
def change_worker(ledger: Ledger, engines: Engines, cluster: Cluster, w: int, what: int) -> None:
    """A worker becomes ready, is drained, or fails: then all it held waits in the cluster's queue again."""
    ledger.runs[w].changed_s = cluster.clock[0].now_s
    if what == READY:
        ledger.workers[w].status = state.SERVING
        for i in range(cluster.clock[0].transit_n):  # what found no worker tries again
            if cluster.transit_s[i] == np.inf:
                cluster.transit_s[i] = cluster.clock[0].now_s
    elif what == DRAIN:
        ledger.workers[w].status = state.DRAINING
        take_queued(ledger, engines, cluster, w)
    else:
        view(ledger, w, cluster.clock[0].now_s)
        ledger.workers[w].status = state.OFF
        while ledger.workers[w].running_n > 0:
            r = batch.drop_running(ledger, w, ledger.workers[w].running_n - 1)
            give_back(ledger, engines, w, r)
            if ledger.requests[r].phase == state.DECODING:
                batch.stop_decoding(ledger, w, r, state.HELD)
                put_back(ledger, engines, cluster, r)
            else:
                put_back_prefilling(ledger, engines, cluster, w, r)
        while engines.workers[w].loading > 0:
            r = ledger.queue_head[state.ON_LINK, w]
            leave_loading(ledger, engines.host, w, r)
            engines.workers[w].loading -= 1
            give_back(ledger, engines, w, r)
            put_back_prefilling(ledger, engines, cluster, w, r)
        take_queued(ledger, engines, cluster, w)
        ledger.workers[w].queued_tokens = 0
        engines.workers[w].activity = IDLE
        engines.workers[w].next_s = np.inf
        ledger.runs[w].steps = 0
        forget_kv(ledger, engines, w)


@compiled
def put_back_prefilling(ledger: Ledger, engines: Engines, cluster: Cluster, w: int, r: int) -> None:
    """A request whose prefill had begun at a worker waits in the cluster's queue again."""
    ledger.workers[w].queued -= 1
    ledger.workers[w].queued_context -= ledger.requests[r].prompt + ledger.requests[r].key
    put_back(ledger, engines, cluster, r)


@compiled
def put_back(ledger: Ledger, engines: Engines, cluster: Cluster, r: int) -> None:
    """A request that has lost its KV waits in the cluster's queue again."""
    engines.requests[r].computed = 0
    engines.requests[r].chunk = 0
    forget_request(ledger, engines.host, r)
    queue.readmit(ledger, cluster.queue, r, cluster.clock[0].now_s)


@compiled
def forget_kv(ledger: Ledger, engines: Engines, w: int) -> None:
    """A worker's process has ended, and what it had cached with it."""
    if ledger.caches.tokens > 0:
        forget(ledger.caches, w, int(ledger.coefficients[ledger.workers[w].variant][speed.KV_BLOCKS]))
        reset_tier(ledger, engines.host, w)


@compiled
def take_queued(ledger: Ledger, engines: Engines, cluster: Cluster, w: int) -> None:
    """Put all that waits at a worker back into the cluster's queue."""
    while batch.queue_first(ledger, w) != state.NONE:
        r = batch.queue_first(ledger, w)
        batch.leave_queue(ledger, w, r)
        forget_request(ledger, engines.host, r)
        queue.readmit(ledger, cluster.queue, r, cluster.clock[0].now_s)
