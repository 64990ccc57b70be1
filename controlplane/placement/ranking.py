"""The rank of workers by policy, a number each, and the search in the order of that rank.

Where the rank only grows until something happens to a worker, its order is kept (`order.py`), and a search
looks at the first workers alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import baselines, constraints, hits, order, outlook, policies
from controlplane.placement import ledger as state
from controlplane.placement.constraints import SettingsRow
from controlplane.placement.ledger import Ledger, view

FORGOTTEN = 4  # changes a worker, since an order was last asked for, after which it is kept no longer
SLOWEST_FIRST = 1e6  # of load, for a second of step time that work which yields would rather have


@compiled
def load(
    ledger: Ledger, policy: int, settings: SettingsRow, w: int, r: int, cached: int, now_s: float
) -> float:
    """The policy's rank of a worker with these tokens of the request cached; the least is taken."""
    if policy == policies.SLACK_FIT and ledger.workers[w].role == state.ANY_PHASE:
        return outlook.spare_s(ledger, w, r, cached, now_s)
    requests = float(ledger.workers[w].decoding + ledger.workers[w].queued)
    if policy == policies.JSQ:
        return requests
    k = ledger.coefficients[ledger.workers[w].variant]
    if (
        policy == policies.SPREAD
        and ledger.caches.tokens > 0
        and k[speed.BASE] > 0
        and ledger.workers[w].role != state.DECODE_ONLY
    ):
        return added_work_s(ledger, settings, w, r, cached, now_s)
    tokens = float(ledger.workers[w].context + ledger.workers[w].queued_context)
    if policy == policies.LEAST_KV:
        return tokens / (k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS])
    if policy == policies.FREENESS:  # Llumnix: free memory per request; the more the better
        free = k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS] - tokens
        return -(free - kept_free(ledger, k, settings, w, r)) / requests if requests > 0 else -np.inf
    if policy == policies.SPREAD:
        tokens += kept_free(ledger, k, settings, w, r)
        if ledger.caches.tokens > 0:
            tokens += ledger.requests[r].prompt + ledger.requests[r].key - cached
    norm = capacity_norm(k, requests, tokens, ledger.requests[r].tpot_s)
    slow = SLOWEST_FIRST * speed.decode_base_s(k, 1.0) * (ledger.requests[r].yields_tpot_s != 0.0)
    return (-norm if policy == policies.BEST_FIT else norm) - slow


@compiled
def added_work_s(ledger: Ledger, settings: SettingsRow, w: int, r: int, cached: int, now_s: float) -> float:
    """Seconds of prefill that a worker has to do with a request of these cached tokens.

    That includes the time of loading it, where a part of it is in host memory.
    """
    worker = ledger.workers[w]
    k = ledger.coefficients[worker.variant]
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    work = worker.queued_tokens + tokens - cached + kept_free(ledger, k, settings, w, r)
    lasts_s = outlook.prefill_lasts_s(k, work, tokens, cached, worker.decoding, worker.context)
    if worker.queued > 0:  # the step in progress prefills too
        lasts_s += max(worker.boundary_s - now_s, 0.0)
    return lasts_s + hits.loads_s(ledger, w, r, now_s)


@compiled
def kept_free(ledger: Ledger, k: NDArray[np.float64], settings: SettingsRow, w: int, r: int) -> float:
    """The tokens by which a worker counts as fuller for a request of another priority than it has."""
    if settings[constraints.HEADROOM] == 0 or has_high(ledger, w) == (ledger.requests[r].priority > 0):
        return 0.0
    return float(settings[constraints.HEADROOM] * k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS])


@compiled
def has_high(ledger: Ledger, w: int) -> bool:
    """Whether a worker has a request of high priority, running or in its queue."""
    for i in range(ledger.workers[w].running_n):
        if ledger.requests[ledger.running[w, i]].priority > 0:
            return True
    return ledger.queue_head[1, w] != state.NONE


@compiled
def capacity_norm(k: NDArray[np.float64], requests: float, tokens: float, tpot_s: float) -> float:
    """Algorithm 1's L2 norm, squared, of batch and weighted context, each in shares of its own limit.

    The paper leaves the context's weight open: in shares of max_seqs and of Eq 4's l(1) it is 1.
    """
    token_s = k[speed.PER_CONTEXT]
    limit = (tpot_s - speed.decode_base_s(k, 1.0)) / token_s if token_s > 0 else np.inf
    limit = min(max(limit, 1.0), k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS])
    batch = requests / k[speed.MAX_SEQS]
    context = tokens / limit
    return batch * batch + context * context


@compiled
def has_order(ledger: Ledger, policy: int, settings: SettingsRow) -> bool:
    """Whether a policy ranks many workers, and each by what only grows and is the same for a class."""
    is_load = policy in (policies.JSQ, policies.LEAST_KV) or (
        policy == policies.SPREAD and settings[constraints.HEADROOM] == 0
    )
    return is_load and ledger.caches.tokens == 0 and len(ledger.workers) > order.FEW


@compiled
def first_to_take(
    ledger: Ledger, policy: int, settings: SettingsRow, r: int, now_s: float, late: bool, phase_role: int
) -> int:
    """`assign` in the order of load, up to the first that takes the request: no others are looked at."""
    t, orders = order_for(ledger, policy, settings, r, now_s, phase_role), ledger.orders
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    level = order.OPEN - 1  # of few, none are closed
    if len(ledger.workers) >= order.MANY:
        level = order.level_of(tokens)
    best, refused = state.NONE, 0
    order.open_those(orders, t, tokens, now_s)
    while best == state.NONE:
        w, known = order.next_in_order(orders, t, level)
        if w == state.NONE:
            break
        view(ledger, w, now_s)
        rank = load(ledger, policy, settings, w, r, 0, now_s)
        if rank != known:
            order.renumber(orders, t, w, rank if rank < np.inf else np.inf)
            if not rank < np.inf or order.next_in_order(orders, t, level)[0] != w:
                continue
        if policy not in policies.CONSTRAINED or constraints.fits(ledger, settings, w, r, 0, now_s, late):
            best = w
        elif not refuses_longer(ledger, settings, t, w, r, rank, now_s):
            orders.aside[refused], orders.aside_load[refused] = w, rank
            refused += 1
            order.renumber(orders, t, w, np.inf)
    for i in range(refused):
        order.renumber(orders, t, orders.aside[i], orders.aside_load[i])
    return best


@compiled
def refuses_longer(
    ledger: Ledger, settings: SettingsRow, t: int, w: int, r: int, rank: float, now_s: float
) -> bool:
    """Close a worker that refuses a request to prompts from its level on, if that is why."""
    if not ledger.orders.are_kept[0] or len(ledger.workers) < order.MANY:
        return False
    level, longest = constraints.closed_to(ledger, settings, w, r, now_s)
    if level == order.OPEN:
        return False
    # In a run the end of a step is not reported; outside of one it is.
    until_s = ledger.workers[w].boundary_s if ledger.runs[w].steps > 0 else np.inf
    order.close(ledger.orders, t, w, rank, level, longest, until_s)
    return True


@compiled
def order_for(
    ledger: Ledger, policy: int, settings: SettingsRow, r: int, now_s: float, phase_role: int
) -> int:
    """The order in which a policy looks at workers for such a request, rebuilt where none is kept."""
    orders, is_decode_pool = ledger.orders, int(phase_role == state.DECODE_ONLY)
    t = 0
    if orders.are_kept[0]:
        for i in range(orders.made[0]):
            of = orders.of[i]
            is_such = of.is_made and of.policy == policy and of.is_decode_pool == is_decode_pool
            if is_such and (policy != policies.SPREAD or is_alike(ledger, of.request, r)):
                of.unasked = 0
                return i
            if of.unasked > orders.of[t].unasked:
                t = i
        if orders.made[0] < len(orders.of):
            t = orders.made[0]
            orders.made[0] += 1
    orders.of[t].is_made, orders.of[t].policy, orders.of[t].request = 1, policy, r
    orders.of[t].is_decode_pool, orders.of[t].unasked = is_decode_pool, 0
    order.begin_order(orders, t)
    row, before = t * order.ROWS + order.OPEN, order.places(orders.trees)
    for w in range(len(ledger.workers)):
        view(ledger, w, now_s)
        orders.trees[row, before + w] = own_load(ledger, settings, t, w, now_s)
    order.set_up(orders.trees, row)
    return t


@compiled
def is_alike(ledger: Ledger, one: int, other: int) -> bool:
    """Whether `spread` ranks workers alike for two requests."""
    a, b = ledger.requests[one], ledger.requests[other]
    return a.tpot_s == b.tpot_s and (a.yields_tpot_s != 0.0) == (b.yields_tpot_s != 0.0)


@compiled
def own_load(ledger: Ledger, settings: SettingsRow, t: int, w: int, now_s: float) -> float:
    """A worker's number in an order; inf where it belongs to another pool, or takes no requests."""
    of = ledger.orders.of[t]
    if not baselines.serves(ledger, w, state.DECODE_ONLY if of.is_decode_pool else state.ANY_PHASE):
        return np.inf
    rank = load(ledger, of.policy, settings, w, of.request, 0, now_s)
    return rank if rank < np.inf else np.inf


@compiled
def tell_change(ledger: Ledger, settings: SettingsRow, w: int, now_s: float) -> None:
    """Something happened to a worker by which its load may be less, where orders are kept."""
    for t in range(ledger.orders.made[0]):
        if ledger.orders.of[t].is_made:
            ledger.orders.of[t].unasked += 1
            if ledger.orders.of[t].unasked > FORGOTTEN * len(ledger.workers):
                ledger.orders.of[t].is_made = 0  # keeping it costs more by now than rebuilding it
            else:
                order.enter(ledger.orders, t, w, own_load(ledger, settings, t, w, now_s))
