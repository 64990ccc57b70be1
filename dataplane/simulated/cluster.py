"""The simulated cluster's clock: arrivals, step boundaries, and changes to workers, in order.

At one instant: first changes to workers (the timeline), then arrivals, then KV that arrives after a
transfer, then step boundaries by worker number, then the held requests' next offer. So an arrival at a
boundary is in the queue there, and the same inputs give the same bytes out.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import KV_BLOCKS
from controlplane.placement.assign import decide, decode_worker, refuses, tell_change
from controlplane.placement.baselines import in_turn
from controlplane.placement.batch import stop_decoding
from controlplane.placement.caches import forget
from controlplane.placement.constraints import hopeless
from controlplane.placement.ledger import (
    ANY_PHASE,
    DECODING,
    DONE,
    DRAINING,
    HELD,
    NONE,
    OFF,
    ON_LINK,
    PREFILL_ONLY,
    SERVING,
    Ledger,
    leave_queue,
    queue_first,
    view,
    view_workers,
)
from controlplane.placement.order import begin_keeping, first, number_of, write
from controlplane.placement.policies import CONSTRAINED, EXACT
from controlplane.placement.queue import (
    begin_round,
    goes_first,
    hold,
    is_empty,
    leave,
    next_offer_s,
    offer,
    overdue,
    readmit,
    refuse,
    turned_away,
)
from dataplane.simulated.engine import (
    arrive,
    begin_activity,
    count_miss,
    end,
    end_activity,
    ranks_with,
    step_together,
)
from dataplane.simulated.host_tier import forget_request, leave_loading, reset_tier
from dataplane.simulated.kv import give_back
from dataplane.simulated.records import DRAIN, IDLE, READY, Cluster, Engines, Rules
from dataplane.simulated.sending import next_send, release, send
from dataplane.simulated.step import drop_running


@compiled
def advance(led: Ledger, eng: Engines, clu: Cluster, rules: Rules, until_s: float) -> bool:
    """Run to `until_s`, or until too many missed; True while something is left to happen."""
    for w in range(len(eng.workers)):  # whatever was done to it since
        led.runs[w].changed_s = np.inf
        write(eng.ends, 0, w, eng.workers[w].next_s)
    begin_keeping(led.orders)
    is_more = pass_events(led, eng, clu, rules, until_s)
    led.orders.are_kept[0] = 0
    return is_more


@compiled
def pass_events(led: Ledger, eng: Engines, clu: Cluster, rules: Rules, until_s: float) -> bool:
    """Let happen what happens by then, one after the other."""
    pool = PREFILL_ONLY if rules.split else ANY_PHASE
    while True:
        if len(clu.sending.left) > 0:
            release(led, eng, clu.sending, clu.clock[0].now_s)
        w = first(eng.ends, 0)
        boundary_s = number_of(eng.ends, 0, w)
        arrival_s = next_send(led, clu.sending)[0]
        change = clu.clock[0].timeline_at
        change_s = clu.timeline_s[change] if change < len(clu.timeline_s) else np.inf
        transit_s, passing = next_transit(clu)
        now_s = min(min(boundary_s, arrival_s), min(change_s, min(transit_s, clu.clock[0].offer_s)))
        if now_s > until_s or eng.total[0].misses > rules.max_misses:
            return now_s < np.inf
        if now_s == np.inf:
            return False
        clu.clock[0].now_s = now_s
        led.orders.changes[0] += 1
        if change_s == now_s:
            clu.clock[0].timeline_at += 1
            w = clu.timeline_worker[change]
            change_worker(led, eng, clu, w, clu.timeline_what[change])
            write(eng.ends, 0, w, eng.workers[w].next_s)
            tell_change(led, rules.knobs, w, now_s)
        elif arrival_s == now_s:
            take_in(led, eng, clu, rules)
        elif transit_s == now_s:
            r = clu.transit[passing]
            clu.clock[0].transit_n -= 1
            clu.transit[passing] = clu.transit[clu.clock[0].transit_n]
            clu.transit_s[passing] = clu.transit_s[clu.clock[0].transit_n]
            place_decode(led, eng, clu, rules, r)
        elif boundary_s == now_s:
            pass_boundary(led, eng, clu, rules, w, now_s)
        else:
            offer_held(led, eng, clu, rules)
        if is_empty(clu.queue):
            clu.clock[0].offer_s = np.inf
        elif clu.clock[0].offer_s == np.inf and in_turn(led, 0, pool) != NONE:
            # With no worker serving no offer can succeed until one is ready.
            clu.clock[0].offer_s = now_s + next_offer_s(led, clu.queue, rules.offer_every_s)


@compiled
def pass_boundary(led: Ledger, eng: Engines, clu: Cluster, rules: Rules, w: int, now_s: float) -> None:
    """End the steps of a worker's ranks that end now, and begin their next."""
    for rank in ranks_with(eng, w):
        if eng.workers[rank].next_s == now_s:
            end_activity(led, eng, rank)
            if eng.total[0].handover_n > 0:
                hand_over(led, eng, clu, rules, rank, now_s)
    for rank in ranks_with(eng, w):
        if eng.workers[rank].next_s == now_s:
            begin_activity(led, eng, rank, now_s)
    if eng.workers[w].ranks > 1:
        step_together(led, eng, w, now_s)
    for rank in ranks_with(eng, w):
        write(eng.ends, 0, rank, eng.workers[rank].next_s)
        tell_change(led, rules.knobs, rank, now_s)


@compiled
def put_on(led: Ledger, eng: Engines, w: int, r: int, now_s: float) -> None:
    """A request arrives at the worker that it was given."""
    arrive(led, eng, w, r, now_s, False)
    for rank in ranks_with(eng, w):
        write(eng.ends, 0, rank, eng.workers[rank].next_s)


@compiled
def take_in(led: Ledger, eng: Engines, clu: Cluster, rules: Rules) -> None:
    """Place the next request to arrive, or let it wait: requests that wait and are due sooner go first."""
    now_s, r = clu.clock[0].now_s, send(led, clu.sending)
    if rules.policy != EXACT and goes_first(led, clu.queue, r):
        w = choose(led, clu, rules, r, False)
        if w != NONE:
            put_on(led, eng, w, r, now_s)
            return
    out = turned_away(led, clu.queue, r)
    if out != NONE:
        turn_away(led, eng, clu, out)
    if out != r:
        hold(led, clu.queue, r, now_s)
        if clu.clock[0].offer_s < np.inf:
            soon_s = now_s + next_offer_s(led, clu.queue, rules.offer_every_s)
            clu.clock[0].offer_s = min(clu.clock[0].offer_s, soon_s)


@compiled
def turn_away(led: Ledger, eng: Engines, clu: Cluster, r: int) -> None:
    """End a request that is not to be served."""
    leave(led, clu.queue, r)
    led.requests[r].phase = DONE
    eng.requests[r].finish_s = np.inf
    end(eng, r)
    count_miss(eng, r)


@compiled
def hand_over(led: Ledger, eng: Engines, clu: Cluster, rules: Rules, w: int, now_s: float) -> None:
    """Send off the KV of requests that worker `w` has just prefilled, to arrive where they will decode."""
    while eng.total[0].handover_n > 0:
        eng.total[0].handover_n -= 1
        r = eng.handover[eng.total[0].handover_n]
        tokens = led.requests[r].prompt + led.requests[r].key
        clu.transit[clu.clock[0].transit_n] = r
        clu.transit_s[clu.clock[0].transit_n] = (
            now_s + rules.transfer_s[w] + rules.token_transfer_s[w] * tokens
        )
        clu.clock[0].transit_n += 1


@compiled
def next_transit(clu: Cluster) -> tuple[float, int]:
    """The KV that arrives next at a decode worker."""
    best_s, best = np.inf, NONE
    for i in range(clu.clock[0].transit_n):
        if clu.transit_s[i] < best_s or (clu.transit_s[i] == best_s and clu.transit[i] < clu.transit[best]):
            best_s, best = clu.transit_s[i], i
    return best_s, best


@compiled
def view_all(led: Ledger, eng: Engines, now_s: float) -> None:
    """Bring the ledger up to `now_s` on every worker."""
    view_workers(led, now_s)


@compiled
def choose(led: Ledger, clu: Cluster, rules: Rules, r: int, refused: bool) -> int:
    """The worker for a request, or NONE when the policy would rather hold it."""
    role = PREFILL_ONLY if rules.split else ANY_PHASE
    return decide(
        led,
        rules.policy,
        rules.knobs,
        r,
        clu.clock[0].now_s,
        rules.offer_every_s,
        rules.patience,
        role,
        rules.draws[r],
        refused,
    )


@compiled
def refused_still(led: Ledger, eng: Engines, clu: Cluster, rules: Rules, r: int) -> bool:
    """Whether every worker refuses a request that waits; only those that have changed are asked again.

    Between a worker's steps time alone makes no constraint easier to keep.
    """
    now_s, job = clu.clock[0].now_s, eng.requests[r]
    late = not np.isnan(led.requests[r].first_s) or hopeless(led, r, now_s, False)
    since_s = job.refused_s if late == (job.refused_late > 0) else -np.inf
    role = PREFILL_ONLY if rules.split else ANY_PHASE
    for w in range(len(led.workers)):
        if led.runs[w].changed_s >= since_s and not refuses(led, rules.knobs, w, r, now_s, late, role):
            return False
    job.refused_s, job.refused_late = now_s, int(late)
    return True


@compiled
def place_held(led: Ledger, eng: Engines, clu: Cluster, rules: Rules, r: int) -> None:
    """Put a request that waits on the worker chosen for it, or note that it found none."""
    is_held = rules.policy in CONSTRAINED and refused_still(led, eng, clu, rules, r)
    w = choose(led, clu, rules, r, is_held)
    if w == NONE:
        refuse(clu.queue, r)
    else:
        leave(led, clu.queue, r)
        put_on(led, eng, w, r, clu.clock[0].now_s)


@compiled
def place_decode(led: Ledger, eng: Engines, clu: Cluster, rules: Rules, r: int) -> None:
    """Put a prefilled request on the decode worker chosen for it."""
    now_s = clu.clock[0].now_s
    w = decode_worker(led, rules.policy, rules.knobs, r, now_s, rules.draws[r])
    if w == NONE:  # the whole pool is gone: its KV waits where it is
        clu.transit[clu.clock[0].transit_n] = r
        clu.transit_s[clu.clock[0].transit_n] = np.inf
        clu.clock[0].transit_n += 1
    else:
        put_on(led, eng, w, r, now_s)


@compiled
def offer_held(led: Ledger, eng: Engines, clu: Cluster, rules: Rules) -> None:
    """Turn away who has waited too long, and offer the others again."""
    now_s = clu.clock[0].now_s
    clu.clock[0].offer_s = np.inf
    r = overdue(led, clu.queue, now_s)
    while r != NONE:
        turn_away(led, eng, clu, r)
        r = overdue(led, clu.queue, now_s)
    if rules.policy == EXACT:
        return  # its heartbeat places them together
    view_all(led, eng, now_s)
    begin_round(clu.queue)
    r, has_lost = offer(led, clu.queue, now_s)
    while r != NONE:
        if has_lost:
            count_miss(eng, r)
        else:
            place_held(led, eng, clu, rules, r)
        r, has_lost = offer(led, clu.queue, now_s)


@compiled
def change_worker(led: Ledger, eng: Engines, clu: Cluster, w: int, what: int) -> None:
    """A worker becomes ready, is drained, or fails: then all it held waits in the cluster's queue anew."""
    led.runs[w].changed_s = clu.clock[0].now_s
    if what == READY:
        led.workers[w].status = SERVING
        for i in range(clu.clock[0].transit_n):  # what found no worker tries again
            if clu.transit_s[i] == np.inf:
                clu.transit_s[i] = clu.clock[0].now_s
    elif what == DRAIN:
        led.workers[w].status = DRAINING
        take_queued(led, eng, clu, w)
    else:
        view(led, w, clu.clock[0].now_s)
        led.workers[w].status = OFF
        while led.workers[w].running_n > 0:
            r = drop_running(led, w, led.workers[w].running_n - 1)
            give_back(led, eng, w, r)
            if led.requests[r].phase == DECODING:
                stop_decoding(led, w, r, HELD)
                put_back(led, eng, clu, r)
            else:
                put_back_prefilling(led, eng, clu, w, r)
        while eng.workers[w].loading > 0:
            r = led.queue_head[ON_LINK, w]
            leave_loading(led, eng.host, w, r)
            eng.workers[w].loading -= 1
            give_back(led, eng, w, r)
            put_back_prefilling(led, eng, clu, w, r)
        take_queued(led, eng, clu, w)
        led.workers[w].queued_tokens = 0
        eng.workers[w].activity = IDLE
        eng.workers[w].next_s = np.inf
        led.runs[w].steps = 0
        forget_kv(led, eng, w)


@compiled
def put_back_prefilling(led: Ledger, eng: Engines, clu: Cluster, w: int, r: int) -> None:
    """A request whose prefill had begun at a worker waits in the cluster's queue anew."""
    led.workers[w].queued -= 1
    led.workers[w].queued_context -= led.requests[r].prompt + led.requests[r].key
    put_back(led, eng, clu, r)


@compiled
def put_back(led: Ledger, eng: Engines, clu: Cluster, r: int) -> None:
    """A request that has lost its KV waits in the cluster's queue anew."""
    eng.requests[r].computed = 0
    eng.requests[r].chunk = 0
    forget_request(led, eng.host, r)
    readmit(led, clu.queue, r, clu.clock[0].now_s)


@compiled
def forget_kv(led: Ledger, eng: Engines, w: int) -> None:
    """A worker's process has ended, and what it had cached with it."""
    if led.caches.tokens > 0:
        forget(led.caches, w, int(led.coefficients[led.workers[w].variant][KV_BLOCKS]))
        reset_tier(led, eng.host, w)


@compiled
def take_queued(led: Ledger, eng: Engines, clu: Cluster, w: int) -> None:
    """Put all that waits at a worker back into the cluster's queue."""
    while queue_first(led, w) != NONE:
        r = queue_first(led, w)
        leave_queue(led, w, r)
        forget_request(led, eng.host, r)
        readmit(led, clu.queue, r, clu.clock[0].now_s)
