"""The simulated cluster's clock: arrivals, step boundaries, and changes to workers, in order.

At one instant: first changes to workers (the timeline), then arrivals, then KV that arrives after a
transfer, then step boundaries by worker number, then the held requests' next offer. So an arrival at a
boundary is in the queue there, and the same inputs give the same bytes out.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.placement import ledger as state
from controlplane.placement import misprediction, order, queue
from controlplane.placement.assign import ASK, NO_CHANCE, REFUSED, decide, decode_worker, refuses
from controlplane.placement.baselines import in_turn
from controlplane.placement.ledger import Ledger
from controlplane.placement.outlook import hopeless
from controlplane.placement.policies import CONSTRAINED, EXACT
from controlplane.placement.ranking import tell_change
from dataplane.simulated import changes, engine
from dataplane.simulated.records import Cluster, Engines, Rules
from dataplane.simulated.sending import next_send, release, send


@compiled
def advance(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules, until_s: float) -> bool:
    """Run to `until_s`, or until too many missed; True while something is left to happen."""
    for w in range(len(engines.workers)):  # whatever was done to it since
        ledger.runs[w].changed_s = np.inf
        order.write(engines.ends, 0, w, engines.workers[w].next_s)
    order.begin_keeping(ledger.orders)
    is_more = pass_events(ledger, engines, cluster, rules, until_s)
    ledger.orders.are_kept[0] = 0
    return is_more


@compiled
def pass_events(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules, until_s: float) -> bool:
    """Let happen what happens by then, one after the other."""
    pool = state.PREFILL_ONLY if rules.split else state.ANY_PHASE
    while True:
        if len(cluster.sending.left) > 0:
            release(ledger, engines, cluster.sending, cluster.clock[0].now_s)
        w = order.first(engines.ends, 0)
        boundary_s = order.number_of(engines.ends, 0, w)
        arrival_s = next_send(ledger, cluster.sending)[0]
        change = cluster.clock[0].timeline_at
        change_s = cluster.timeline_s[change] if change < len(cluster.timeline_s) else np.inf
        transit_s, passing = next_transit(cluster)
        now_s = min(min(boundary_s, arrival_s), min(change_s, min(transit_s, cluster.clock[0].offer_s)))
        if now_s > until_s or engines.total[0].misses > rules.max_misses:
            return now_s < np.inf
        if now_s == np.inf:
            return False
        cluster.clock[0].now_s = now_s
        ledger.orders.changes[0] += 1
        if change_s == now_s:
            cluster.clock[0].timeline_at += 1
            w = cluster.timeline_worker[change]
            changes.change_worker(ledger, engines, cluster, w, cluster.timeline_what[change])
            order.write(engines.ends, 0, w, engines.workers[w].next_s)
            tell_change(ledger, rules.settings, w, now_s)
        elif arrival_s == now_s:
            take_in(ledger, engines, cluster, rules)
        elif transit_s == now_s:
            r = cluster.transit[passing]
            cluster.clock[0].transit_n -= 1
            cluster.transit[passing] = cluster.transit[cluster.clock[0].transit_n]
            cluster.transit_s[passing] = cluster.transit_s[cluster.clock[0].transit_n]
            place_decode(ledger, engines, cluster, rules, r)
        elif boundary_s == now_s:
            pass_boundary(ledger, engines, cluster, rules, w, now_s)
        else:
            offer_held(ledger, engines, cluster, rules)
        if queue.is_empty(cluster.queue):
            cluster.clock[0].offer_s = np.inf
        elif cluster.clock[0].offer_s == np.inf and in_turn(ledger, 0, pool) != state.NONE:
            # With no worker serving no offer can succeed until one is ready.
            cluster.clock[0].offer_s = now_s + queue.next_offer_s(ledger, cluster.queue, rules.offer_every_s)


@compiled
def pass_boundary(
    ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules, w: int, now_s: float
) -> None:
    """End the steps of a worker's ranks that end now, and begin their next."""
    for rank in engine.ranks_with(engines, w):
        if engines.workers[rank].next_s == now_s:
            engine.end_activity(ledger, engines, rank)
            if engines.total[0].handover_n > 0:
                hand_over(ledger, engines, cluster, rules, rank, now_s)
    for rank in engine.ranks_with(engines, w):
        if engines.workers[rank].next_s == now_s:
            engine.begin_activity(ledger, engines, rank, now_s)
    if engines.workers[w].ranks > 1:
        engine.step_together(ledger, engines, w, now_s)
    for rank in engine.ranks_with(engines, w):
        order.write(engines.ends, 0, rank, engines.workers[rank].next_s)
        tell_change(ledger, rules.settings, rank, now_s)
    misprediction.keep_up(ledger, now_s)


@compiled
def put_on(ledger: Ledger, engines: Engines, w: int, r: int, now_s: float) -> None:
    """A request arrives at the worker that it was given."""
    engine.arrive(ledger, engines, w, r, now_s, False)
    for rank in engine.ranks_with(engines, w):
        order.write(engines.ends, 0, rank, engines.workers[rank].next_s)


@compiled
def take_in(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules) -> None:
    """Place the next request to arrive, or let it wait: requests that wait and are due sooner go first."""
    now_s, r = cluster.clock[0].now_s, send(ledger, cluster.sending)
    if rules.policy != EXACT and queue.goes_first(ledger, cluster.queue, r):
        w = choose(ledger, cluster, rules, r, ASK)
        if w != state.NONE:
            put_on(ledger, engines, w, r, now_s)
            return
    out = queue.turned_away(ledger, cluster.queue, r)
    if out != state.NONE:
        turn_away(ledger, engines, cluster, out)
    if out != r:
        queue.hold(ledger, cluster.queue, r, now_s)
        if cluster.clock[0].offer_s < np.inf:
            soon_s = now_s + queue.next_offer_s(ledger, cluster.queue, rules.offer_every_s)
            cluster.clock[0].offer_s = min(cluster.clock[0].offer_s, soon_s)


@compiled
def turn_away(ledger: Ledger, engines: Engines, cluster: Cluster, r: int) -> None:
    """End a request that is not to be served."""
    queue.leave(ledger, cluster.queue, r)
    ledger.requests[r].phase = state.DONE
    engines.requests[r].finish_s = np.inf
    engine.end(engines, r)
    engine.count_miss(engines, r)


@compiled
def hand_over(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules, w: int, now_s: float) -> None:
    """Send off the KV of requests that worker `w` has just prefilled, to arrive where they will decode."""
    while engines.total[0].handover_n > 0:
        engines.total[0].handover_n -= 1
        r = engines.handover[engines.total[0].handover_n]
        tokens = ledger.requests[r].prompt + ledger.requests[r].key
        cluster.transit[cluster.clock[0].transit_n] = r
        cluster.transit_s[cluster.clock[0].transit_n] = (
            now_s + rules.transfer_s[w] + rules.token_transfer_s[w] * tokens
        )
        cluster.clock[0].transit_n += 1


@compiled
def next_transit(cluster: Cluster) -> tuple[float, int]:
    """The KV that arrives next at a decode worker."""
    best_s, best = np.inf, state.NONE
    for i in range(cluster.clock[0].transit_n):
        if cluster.transit_s[i] < best_s or (
            cluster.transit_s[i] == best_s and cluster.transit[i] < cluster.transit[best]
        ):
            best_s, best = cluster.transit_s[i], i
    return best_s, best


@compiled
def view_all(ledger: Ledger, engines: Engines, now_s: float) -> None:
    """Bring the ledger up to `now_s` on every worker."""
    state.view_workers(ledger, now_s)


@compiled
def choose(ledger: Ledger, cluster: Cluster, rules: Rules, r: int, known: int) -> int:
    """The worker for a request, or NONE when the policy would rather hold it."""
    role = state.PREFILL_ONLY if rules.split else state.ANY_PHASE
    return decide(
        ledger,
        rules.policy,
        rules.settings,
        r,
        cluster.clock[0].now_s,
        rules.offer_every_s,
        rules.patience,
        role,
        rules.draws[r],
        known,
    )


@compiled
def refused_still(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules, r: int) -> bool:
    """Whether every worker refuses a request that waits; only those that have changed are asked again.

    Between a worker's steps time alone makes no constraint easier to keep.
    """
    now_s, job = cluster.clock[0].now_s, engines.requests[r]
    late = not np.isnan(ledger.requests[r].first_s) or hopeless(ledger, r, now_s, False)
    since_s = job.refused_s if late == (job.refused_late > 0) else -np.inf
    role = state.PREFILL_ONLY if rules.split else state.ANY_PHASE
    for w in range(len(ledger.workers)):
        if ledger.runs[w].changed_s >= since_s:
            job.no_chance = 0
            if not refuses(ledger, rules.settings, w, r, now_s, late, role):
                return False
    job.refused_s, job.refused_late = now_s, int(late)
    return True


@compiled
def place_held(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules, r: int) -> None:
    """Put a request that waits on the worker chosen for it, or note that it found none."""
    if misprediction.renew(ledger, r):
        engines.requests[r].refused_s = -np.inf
    now_s, job, known = cluster.clock[0].now_s, engines.requests[r], ASK
    if rules.policy in CONSTRAINED and refused_still(ledger, engines, cluster, rules, r):
        may_have = job.refused_late == 0 and job.no_chance == 0
        is_due = may_have and hopeless(ledger, r, now_s + rules.offer_every_s, True)
        known = REFUSED if is_due else NO_CHANCE
    w = choose(ledger, cluster, rules, r, known)
    if w == state.NONE:
        queue.refuse(cluster.queue, r)
        job.no_chance = max(job.no_chance, int(known == REFUSED))
    else:
        queue.leave(ledger, cluster.queue, r)
        put_on(ledger, engines, w, r, now_s)


@compiled
def place_decode(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules, r: int) -> None:
    """Put a prefilled request on the decode worker chosen for it."""
    now_s = cluster.clock[0].now_s
    w = decode_worker(ledger, rules.policy, rules.settings, r, now_s, rules.draws[r])
    if w == state.NONE:  # the whole pool is gone: its KV waits where it is
        cluster.transit[cluster.clock[0].transit_n] = r
        cluster.transit_s[cluster.clock[0].transit_n] = np.inf
        cluster.clock[0].transit_n += 1
    else:
        put_on(ledger, engines, w, r, now_s)


@compiled
def offer_held(ledger: Ledger, engines: Engines, cluster: Cluster, rules: Rules) -> None:
    """Turn away who has waited too long, and offer the others again."""
    now_s = cluster.clock[0].now_s
    cluster.clock[0].offer_s = np.inf
    r = queue.overdue(ledger, cluster.queue, now_s)
    while r != state.NONE:
        turn_away(ledger, engines, cluster, r)
        r = queue.overdue(ledger, cluster.queue, now_s)
    if rules.policy == EXACT:
        return  # its heartbeat places them together
    view_all(ledger, engines, now_s)
    queue.begin_round(cluster.queue)
    r, has_lost = queue.offer(ledger, cluster.queue, now_s)
    while r != state.NONE:
        if has_lost:
            engine.count_miss(engines, r)
        else:
            place_held(ledger, engines, cluster, rules, r)
        r, has_lost = queue.offer(ledger, cluster.queue, now_s)
