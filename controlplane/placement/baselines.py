"""Baselines of the field: placement by round-robin, chance, load, the longest cached prefix, and scores.

None knows a constraint or holds a request back. Those that know caches see them as the ledger does: exactly,
where nothing is predicted. That flatters them. The routers themselves guess what workers have cached from
what they sent there, or from the workers' events. They do not see what lies in host memory below the caches.

    least-prefill    the least prefill left to do, in seconds; at a tie, the fewest requests
    longest-prefix   the most tokens of the request cached; at a tie, the fewest requests
    llm-d            3·(share of the prompt cached) + 2·(shortness of the queue, between the shortest and the
                     longest) + 2·(share of KV free): the weights of its default profile (llm-d-router 0.8);
                     a tie is broken by lot
    random           any worker, as a Kubernetes service picks one for a connection
    least-request    of two drawn workers, which may be the same, that with fewer requests, at a tie the first
                     drawn: Envoy's LEAST_REQUEST with equal weights
    sglang           the idlest worker, where the busiest has over 64 requests more and over 1.5 times as
                     many; else that with the longest match, if it is over 0.3 of the prompt; else that with
                     the least text on record (the defaults of SGLang's gateway 0.3, `cache_aware`)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import hits
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Ledger
from controlplane.placement.memory import free_blocks
from controlplane.placement.outlook import prefill_lasts_s

PREFIX_WEIGHT, QUEUE_WEIGHT, FREE_WEIGHT = 3.0, 2.0, 2.0
MATCH, MORE, TIMES_MORE = 0.3, 64, 1.5


@compiled
def serves(ledger: Ledger, w: int, phase_role: int) -> bool:
    """Whether a worker takes requests, and belongs to the pool that is asked for."""
    is_decode_only = ledger.workers[w].role == state.DECODE_ONLY
    return ledger.workers[w].status == state.SERVING and is_decode_only == (phase_role == state.DECODE_ONLY)


@compiled
def requests_at(ledger: Ledger, w: int) -> int:
    """Requests that a worker has, whatever their phase."""
    return ledger.workers[w].decoding + ledger.workers[w].queued


@compiled
def serving(ledger: Ledger, phase_role: int) -> int:
    """How many workers serve a phase."""
    count = 0
    for w in range(len(ledger.workers)):
        if serves(ledger, w, phase_role):
            count += 1
    return count


@compiled
def nth(ledger: Ledger, phase_role: int, n: int) -> int:
    """The worker at place `n`, from 0, of those that serve a phase."""
    for w in range(len(ledger.workers)):
        if serves(ledger, w, phase_role):
            if n == 0:
                return w
            n -= 1
    return state.NONE


@compiled
def two_choices(ledger: Ledger, phase_role: int, draw: NDArray[np.float64]) -> int:
    """The less loaded of two workers drawn at random: by requests, then tokens held, then the first drawn."""
    count = serving(ledger, phase_role)
    first = int(draw[0] * count)
    one = nth(ledger, phase_role, first)
    if count < 2:
        return one
    second = int(draw[1] * (count - 1))
    other = nth(ledger, phase_role, second + 1 if second >= first else second)
    return other if is_less_loaded(ledger, other, one) else one


@compiled
def by_chance(ledger: Ledger, phase_role: int, draw: float) -> int:
    """A worker drawn at random; `draw` is uniform in [0, 1)."""
    return nth(ledger, phase_role, int(draw * serving(ledger, phase_role)))


@compiled
def fewer_requests(ledger: Ledger, phase_role: int, draw: NDArray[np.float64]) -> int:
    """Of two workers drawn at random, perhaps the same, that with fewer requests; at a tie the first."""
    one = by_chance(ledger, phase_role, draw[0])
    other = by_chance(ledger, phase_role, draw[1])
    if one != state.NONE and requests_at(ledger, other) < requests_at(ledger, one):
        return other
    return one


@compiled
def is_less_loaded(ledger: Ledger, a: int, b: int) -> bool:
    """Whether worker `a` has fewer requests than `b`, or as many that hold fewer tokens."""
    more = requests_at(ledger, b) - requests_at(ledger, a)
    if more != 0:
        return more > 0
    return (
        ledger.workers[a].context + ledger.workers[a].queued_context
        < ledger.workers[b].context + ledger.workers[b].queued_context
    )


@compiled
def in_turn(ledger: Ledger, r: int, phase_role: int) -> int:
    """Round-robin by the request's number."""
    count = serving(ledger, phase_role)
    return nth(ledger, phase_role, r % count) if count > 0 else state.NONE


@compiled
def least_prefill(ledger: Ledger, now_s: float, phase_role: int) -> int:
    """The worker with least prefill left to do, in seconds; of several the one with the fewest requests."""
    best, least_s = state.NONE, np.inf
    for w in range(len(ledger.workers)):
        if serves(ledger, w, phase_role):
            left_s = prefill_left_s(ledger, w, now_s)
            if left_s < least_s or (left_s == least_s and requests_at(ledger, w) < requests_at(ledger, best)):
                best, least_s = w, left_s
    return best


@compiled
def prefill_left_s(ledger: Ledger, w: int, now_s: float) -> float:
    """Seconds of prefill that a worker has still to do."""
    worker = ledger.workers[w]
    k = ledger.coefficients[worker.variant]
    work = float(worker.queued_tokens)
    left_s = 0.0
    if work > 0:
        left_s = prefill_lasts_s(k, work, 0.0, 0.0, worker.decoding, worker.context)
    return left_s + (max(worker.boundary_s - now_s, 0.0) if worker.queued > 0 else 0.0)


@compiled
def longest_prefix(ledger: Ledger, r: int, phase_role: int) -> int:
    """The worker that has most of a request cached, of several the one with the fewest requests."""
    best, most, cached = state.NONE, -1, 0
    for w in range(len(ledger.workers)):
        if serves(ledger, w, phase_role):
            cached = hits.cached_tokens(ledger, w, r, cached, False)
            if cached > most or (cached == most and requests_at(ledger, w) < requests_at(ledger, best)):
                best, most = w, cached
    return best


@compiled
def highest_score(ledger: Ledger, r: int, phase_role: int, draw: NDArray[np.float64]) -> int:
    """The worker with the highest weighted score of prefix, queue and free memory."""
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    shortest, longest = 1 << 60, -1
    for w in range(len(ledger.workers)):
        if serves(ledger, w, phase_role):
            waiting = requests_at(ledger, w) - ledger.workers[w].running_n
            shortest, longest = min(shortest, waiting), max(longest, waiting)
    best, highest, cached = state.NONE, -np.inf, 0
    first = int(draw[0] * len(ledger.workers))
    for i in range(len(ledger.workers)):
        w = (first + i) % len(ledger.workers)
        if not serves(ledger, w, phase_role):
            continue
        cached = hits.cached_tokens(ledger, w, r, cached, False)
        waiting = requests_at(ledger, w) - ledger.workers[w].running_n
        short = (longest - waiting) / (longest - shortest) if longest > shortest else 1.0
        score = PREFIX_WEIGHT * cached / tokens + QUEUE_WEIGHT * short + FREE_WEIGHT * share_free(ledger, w)
        if score > highest:
            best, highest = w, score
    return best


@compiled
def share_free(ledger: Ledger, w: int) -> float:
    """The share of a worker's KV memory that no request uses."""
    k = ledger.coefficients[ledger.workers[w].variant]
    if ledger.caches.tokens > 0:
        return free_blocks(ledger.caches, w, 1) / k[speed.KV_BLOCKS]
    return 1.0 - ledger.workers[w].context / (k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS])


@compiled
def prefix_unless_unbalanced(ledger: Ledger, r: int, phase_role: int) -> int:
    """The idlest worker of an unbalanced fleet; else the best match, or that with the least on record."""
    idlest, matching, emptiest = state.NONE, state.NONE, state.NONE
    least, most, longest, emptiness, cached = 1 << 60, -1, -1, -1, 0
    for w in range(len(ledger.workers)):
        if not serves(ledger, w, phase_role):
            continue
        here = requests_at(ledger, w)
        most = max(most, here)
        if here < least:
            idlest, least = w, here
        cached = hits.cached_tokens(ledger, w, r, cached, False)
        if cached > longest:
            matching, longest = w, cached
        empty = hits.empty_blocks(ledger, w)
        if emptiest == state.NONE or empty > emptiness:
            emptiest, emptiness = w, empty
    if most - least > MORE and most > TIMES_MORE * least:
        return idlest
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    return matching if longest > MATCH * tokens else emptiest
