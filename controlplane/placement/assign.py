"""The choice of a worker by a placement policy: compiled functions, the same in both planes.

`spread`, `best-fit` and `slack-fit` consider only workers that satisfy the constraints and differ in the
order: least or most loaded by capacity_norm (Algorithm 1), or least to spare in (d), so that workers with
much to spare are kept for long prompts. Under the former two work that yields to a tighter class goes to the
slowest kind of worker that has room for it, so that the fast are left to those that need them. Where no
worker satisfies the constraints the request is held in the cluster's queue. The baselines
(placement.baselines) never hold and know no constraint.

Both planes call `decide` when a request arrives and again for each that is held, every `retry_s`; where
prefill and decode have workers of their own, `decode_worker` once the prefill is done.

Where workers cache prefixes, `spread` takes the one with the least added work, in seconds of prefill:

    what the worker still has to compute of others + what it would have to compute of the request

A worker that has the request's prefix cached has less of the second. What it has of it in host memory below
its cache it would load: that takes the loads before it and its own. Once its queue outweighs that, the
request goes elsewhere and the prefix is cached there too: so a hot prefix is replicated, and a first block
that all share draws no request anywhere. At a tie it is the worker whose memory holds least. What requests
do to each other beyond this, the constraints say. Where they refuse that worker for now, the request is held
rather than computed anew on one that has less of it cached: that work would be in the way of all that come
after. Where step times are not known, capacity_norm with the cached tokens taken off stands for the work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import (
    BASE,
    BLOCK_TOKENS,
    KV_BLOCKS,
    MAX_SEQS,
    PER_CONTEXT,
    decode_base_s,
)
from controlplane.placement.baselines import (
    highest_score,
    in_turn,
    least_prefill,
    longest_prefix,
    prefix_unless_unbalanced,
    serves,
    two_choices,
)
from controlplane.placement.constraints import (
    AS_REPORTED,
    HEADROOM,
    TOLERANCE,
    Knobs,
    closed_to,
    could_fit,
    fits,
    harm,
    hopeless,
    prefill_lasts_s,
    spare_s,
)
from controlplane.placement.ledger import (
    ANY_PHASE,
    DECODE_ONLY,
    NONE,
    Ledger,
    empty_everywhere,
    known_cached,
    loads_s,
    view,
    view_workers,
)
from controlplane.placement.order import (
    FEW,
    MANY,
    OPEN,
    ROWS,
    begin_order,
    close,
    enter,
    level_of,
    next_in_order,
    open_those,
    places,
    renumber,
    set_up,
)
from controlplane.placement.policies import (
    BEST_FIT,
    CONSTRAINED,
    FREENESS,
    JSQ,
    LEAST_KV,
    LEAST_PREFILL,
    LLM_D,
    LONGEST_PREFIX,
    P2C,
    SGLANG,
    SLACK_FIT,
    SPREAD,
    WITHOUT_RANK,
)

FORGOTTEN = 4  # changes a worker, since an order was last asked for, after which it is kept no longer
SLOWEST_FIRST = 1e6  # of load, for a second of step time that work which yields would rather have


@compiled
def assign(
    led: Ledger,
    policy: int,
    knobs: Knobs,
    r: int,
    now_s: float,
    late: bool,
    phase_role: int,
    draw: NDArray[np.float64],
) -> int:
    """Return the worker for request `r`, or NONE to hold it in the cluster's queue.

    `late`: its TTFT cannot be met any more, so (c) no longer matters. `phase_role`: PREFILL_ONLY or
    DECODE_ONLY restricts the choice to that pool in split mode, ANY_PHASE does not. `draw` [2] uniform in
    [0, 1), used by p2c and to start round-robin's turn.
    """
    if policy in WITHOUT_RANK:
        view_workers(led, now_s)
        return pick(led, policy, r, now_s, phase_role, draw)
    if has_order(led, policy, knobs):
        return first_to_take(led, policy, knobs, r, now_s, late, phase_role)
    constrained = policy in CONSTRAINED
    by_work = policy == SPREAD and led.caches.tokens > 0
    best, best_score, emptiest, had, cached = NONE, np.inf, 0, 0, 0
    wanted_score, wanted = np.inf, 0  # of one that refuses: its added work, and what it has cached
    for w in range(len(led.workers)):
        if not serves(led, w, phase_role):
            continue
        view(led, w, now_s)
        if constrained and phase_role != DECODE_ONLY:
            cached = known_cached(led, w, r, cached)  # often as at the worker before
        score = load(led, policy, knobs, w, r, cached, now_s)
        empty = empty_everywhere(led, w) if by_work else 0
        better = (score < best_score) | ((score == best_score) & (empty > emptiest))
        if not better:
            continue
        if not constrained or fits(led, knobs, w, r, cached, now_s, late):
            best, best_score, emptiest, had = w, score, empty, cached
        elif by_work and score < wanted_score and could_fit(led, knobs, w, r, cached, now_s, late):
            wanted_score, wanted = score, cached
    return NONE if (wanted_score < best_score) & (wanted > had) else best


@compiled
def has_order(led: Ledger, policy: int, knobs: Knobs) -> bool:
    """Whether a policy ranks many workers, and each by what only grows and is the same for a class."""
    is_load = policy in (JSQ, LEAST_KV) or (policy == SPREAD and knobs[HEADROOM] == 0)
    return is_load and led.caches.tokens == 0 and len(led.workers) > FEW


@compiled
def first_to_take(
    led: Ledger, policy: int, knobs: Knobs, r: int, now_s: float, late: bool, phase_role: int
) -> int:
    """`assign` in the order of load, up to the first that takes the request: no others are looked at."""
    t, orders = order_for(led, policy, knobs, r, now_s, phase_role), led.orders
    tokens = led.requests[r].prompt + led.requests[r].key
    level = level_of(tokens) if len(led.workers) >= MANY else OPEN - 1  # of few, none are closed
    best, refused = NONE, 0
    open_those(orders, t, tokens, now_s)
    while best == NONE:
        w, known = next_in_order(orders, t, level)
        if w == NONE:
            break
        view(led, w, now_s)
        rank = load(led, policy, knobs, w, r, 0, now_s)
        if rank != known:
            renumber(orders, t, w, rank if rank < np.inf else np.inf)
            if not rank < np.inf or next_in_order(orders, t, level)[0] != w:
                continue
        if policy not in CONSTRAINED or fits(led, knobs, w, r, 0, now_s, late):
            best = w
        elif not refuses_longer(led, knobs, t, w, r, rank, now_s):
            orders.aside[refused], orders.aside_load[refused] = w, rank
            refused += 1
            renumber(orders, t, w, np.inf)
    for i in range(refused):
        renumber(orders, t, orders.aside[i], orders.aside_load[i])
    return best


@compiled
def refuses_longer(led: Ledger, knobs: Knobs, t: int, w: int, r: int, rank: float, now_s: float) -> bool:
    """Close a worker that refuses a request to prompts from its level on, if that is why."""
    if not led.orders.are_kept[0] or len(led.workers) < MANY:
        return False
    level, longest = closed_to(led, knobs, w, r, now_s)
    if level == OPEN:
        return False
    # In a run its steps end without a word; else it is told when the step ends.
    until_s = led.workers[w].boundary_s if led.runs[w].steps > 0 else np.inf
    close(led.orders, t, w, rank, level, longest, until_s)
    return True


@compiled
def order_for(led: Ledger, policy: int, knobs: Knobs, r: int, now_s: float, phase_role: int) -> int:
    """The order in which a policy looks at workers for such a request, made anew where none is kept."""
    orders, is_decode_pool = led.orders, int(phase_role == DECODE_ONLY)
    t = 0
    if orders.are_kept[0]:
        for i in range(orders.made[0]):
            of = orders.of[i]
            is_such = of.is_made and of.policy == policy and of.is_decode_pool == is_decode_pool
            if is_such and (policy != SPREAD or is_alike(led, of.request, r)):
                of.unasked = 0
                return i
            if of.unasked > orders.of[t].unasked:
                t = i
        if orders.made[0] < len(orders.of):
            t = orders.made[0]
            orders.made[0] += 1
    orders.of[t].is_made, orders.of[t].policy, orders.of[t].request = 1, policy, r
    orders.of[t].is_decode_pool, orders.of[t].unasked = is_decode_pool, 0
    begin_order(orders, t)
    row, before = t * ROWS + OPEN, places(orders.trees)
    for w in range(len(led.workers)):
        view(led, w, now_s)
        orders.trees[row, before + w] = own_load(led, knobs, t, w, now_s)
    set_up(orders.trees, row)
    return t


@compiled
def is_alike(led: Ledger, one: int, other: int) -> bool:
    """Whether `spread` ranks workers alike for two requests."""
    a, b = led.requests[one], led.requests[other]
    return a.tpot_s == b.tpot_s and (a.yields_tpot_s != 0.0) == (b.yields_tpot_s != 0.0)


@compiled
def own_load(led: Ledger, knobs: Knobs, t: int, w: int, now_s: float) -> float:
    """A worker's number in an order; inf where it belongs to another pool, or takes no requests."""
    of = led.orders.of[t]
    if not serves(led, w, DECODE_ONLY if of.is_decode_pool else ANY_PHASE):
        return np.inf
    rank = load(led, of.policy, knobs, w, of.request, 0, now_s)
    return rank if rank < np.inf else np.inf


@compiled
def tell_change(led: Ledger, knobs: Knobs, w: int, now_s: float) -> None:
    """Something happened to a worker by which its load may be less, where orders are kept."""
    for t in range(led.orders.made[0]):
        if led.orders.of[t].is_made:
            led.orders.of[t].unasked += 1
            if led.orders.of[t].unasked > FORGOTTEN * len(led.workers):
                led.orders.of[t].is_made = 0  # what keeps it costs more by now than to make it anew
            else:
                enter(led.orders, t, w, own_load(led, knobs, t, w, now_s))


@compiled
def refuses(led: Ledger, knobs: Knobs, w: int, r: int, now_s: float, late: bool, phase_role: int) -> bool:
    """Whether the constraints forbid a worker to take a request now."""
    return not serves(led, w, phase_role) or not fits(
        led, knobs, w, r, known_cached(led, w, r, 0), now_s, late
    )


@compiled
def pick(led: Ledger, policy: int, r: int, now_s: float, phase_role: int, draw: NDArray[np.float64]) -> int:
    """The choice of the baselines that are no order of workers by one number."""
    if policy == P2C:
        return two_choices(led, phase_role, draw)
    if policy == LEAST_PREFILL:
        return least_prefill(led, now_s, phase_role)
    if policy == LONGEST_PREFIX:
        return longest_prefix(led, r, phase_role)
    if policy == LLM_D:
        return highest_score(led, r, phase_role, draw)
    if policy == SGLANG:
        return prefix_unless_unbalanced(led, r, phase_role)
    return in_turn(led, r, phase_role)


@compiled
def added_work_s(led: Ledger, knobs: Knobs, w: int, r: int, cached: int, now_s: float) -> float:
    """Seconds of prefill that a worker has to do, once it has a request of which so much is cached.

    And what loading it takes, where a part of that is in host memory.
    """
    worker = led.workers[w]
    k = led.coefficients[worker.variant]
    tokens = led.requests[r].prompt + led.requests[r].key
    work = worker.queued_tokens + tokens - cached + kept_free(led, k, knobs, w, r)
    lasts_s = prefill_lasts_s(k, work, tokens, cached, worker.decoding, worker.context)
    if worker.queued > 0:  # the step in progress prefills too
        lasts_s += max(worker.boundary_s - now_s, 0.0)
    return lasts_s + loads_s(led, w, r, now_s)


@compiled
def last_chance(led: Ledger, knobs: Knobs, r: int, now_s: float, phase_role: int) -> int:
    """Return the worker where `r`, about to lose its TTFT, does least harm; NONE past the tolerance.

    It yields to no tighter class any more.
    """
    led.requests[r].yields_tpot_s = -abs(led.requests[r].yields_tpot_s)
    best, least, cached = NONE, knobs[TOLERANCE], 0
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            view(led, w, now_s)
            cached = known_cached(led, w, r, cached)
            harmed = harm(led, knobs, w, r, cached, now_s, False, least)
            if harmed < least:
                best, least = w, harmed
    return best


@compiled
def load(led: Ledger, policy: int, knobs: Knobs, w: int, r: int, cached: int, now_s: float) -> float:
    """The policy's rank of a worker that has so much of the request cached; the least is taken."""
    if policy == SLACK_FIT and led.workers[w].role == ANY_PHASE:
        return spare_s(led, w, r, cached, now_s)
    requests = float(led.workers[w].decoding + led.workers[w].queued)
    if policy == JSQ:
        return requests
    k = led.coefficients[led.workers[w].variant]
    if policy == SPREAD and led.caches.tokens > 0 and k[BASE] > 0 and led.workers[w].role != DECODE_ONLY:
        return added_work_s(led, knobs, w, r, cached, now_s)
    tokens = float(led.workers[w].context + led.workers[w].queued_context)
    if policy == LEAST_KV:
        return tokens / (k[KV_BLOCKS] * k[BLOCK_TOKENS])
    if policy == FREENESS:  # Llumnix: free memory per request; the more the better
        if knobs[AS_REPORTED] > 0:
            requests -= led.workers[w].unreported
            tokens -= led.workers[w].unreported_context
        free = k[KV_BLOCKS] * k[BLOCK_TOKENS] - tokens
        return -(free - kept_free(led, k, knobs, w, r)) / requests if requests > 0 else -np.inf
    if policy == SPREAD:
        tokens += kept_free(led, k, knobs, w, r)
        if led.caches.tokens > 0:
            tokens += led.requests[r].prompt + led.requests[r].key - cached
    norm = capacity_norm(k, requests, tokens, led.requests[r].tpot_s)
    slow = SLOWEST_FIRST * decode_base_s(k, 1.0) * (led.requests[r].yields_tpot_s != 0.0)
    return (-norm if policy == BEST_FIT else norm) - slow


@compiled
def kept_free(led: Ledger, k: NDArray[np.float64], knobs: Knobs, w: int, r: int) -> float:
    """The tokens by which a worker counts as fuller for a request of another priority than it has."""
    if knobs[HEADROOM] == 0 or has_high(led, w) == (led.requests[r].priority > 0):
        return 0.0
    return float(knobs[HEADROOM] * k[KV_BLOCKS] * k[BLOCK_TOKENS])


@compiled
def has_high(led: Ledger, w: int) -> bool:
    """Whether a worker has a request of high priority, running or in its queue."""
    for i in range(led.workers[w].running_n):
        if led.requests[led.running[w, i]].priority > 0:
            return True
    return led.queue_head[1, w] != NONE


@compiled
def capacity_norm(k: NDArray[np.float64], requests: float, tokens: float, tpot_s: float) -> float:
    """Algorithm 1's L2 norm, squared, of batch and weighted context, each in shares of its own limit.

    The paper leaves the context's weight open: in shares of max_seqs and of Eq 4's l(1) it is 1.
    """
    limit = (tpot_s - decode_base_s(k, 1.0)) / k[PER_CONTEXT] if k[PER_CONTEXT] > 0 else np.inf
    limit = min(max(limit, 1.0), k[KV_BLOCKS] * k[BLOCK_TOKENS])
    batch = requests / k[MAX_SEQS]
    context = tokens / limit
    return batch * batch + context * context


@compiled
def decide(
    led: Ledger,
    policy: int,
    knobs: Knobs,
    r: int,
    now_s: float,
    retry_s: float,
    patience: float,
    phase_role: int,
    draw: NDArray[np.float64],
    refused: bool,
) -> int:
    """Return the worker for request `r`, or NONE to hold it until the next try.

    `refused`: it is known that the policy would choose none. Else the policy's choice; without one, for a
    request whose TTFT a busy worker could not meet any more by the next try, the worker where it does least
    harm; and after `patience` of its TTFT targets the least loaded worker with a seat, whatever it breaks.
    """
    late = not np.isnan(led.requests[r].first_s) or hopeless(led, r, now_s, False)
    w = NONE if refused else assign(led, policy, knobs, r, now_s, late, phase_role, draw)
    if w == NONE and not late and policy in CONSTRAINED and hopeless(led, r, now_s + retry_s, True):
        w = last_chance(led, knobs, r, now_s, phase_role)
    if w == NONE and now_s - led.requests[r].arrival_s >= patience * led.requests[r].ttft_s:
        w = assign(led, JSQ, knobs, r, now_s, late, phase_role, draw)
        # Past its seats a worker only queues, where none may overtake; here another worker may take it.
        if w != NONE and not has_seat(led, w):
            w = NONE
    return w


@compiled
def decode_worker(
    led: Ledger, policy: int, knobs: Knobs, r: int, now_s: float, draw: NDArray[np.float64]
) -> int:
    """The decode worker for a request whose prefill is done: the policy's choice, else the least loaded."""
    w = assign(led, policy, knobs, r, now_s, True, DECODE_ONLY, draw)
    return w if w != NONE else assign(led, JSQ, knobs, r, now_s, True, DECODE_ONLY, draw)


@compiled
def has_seat(led: Ledger, w: int) -> bool:
    """Whether a worker's batch has room for one more than it has been given."""
    return (
        led.workers[w].decoding + led.workers[w].queued < led.coefficients[led.workers[w].variant][MAX_SEQS]
    )
