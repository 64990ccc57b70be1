"""Baselines of the field: placement by turns, chance, load, the longest cached prefix, and scores.

None knows a constraint or holds a request back. Those that know caches see them as the ledger does, exactly
where nothing is predicted, which flatters them: the routers themselves guess what workers have cached from
what they sent there, or from the workers' events. What lies in host memory below the caches they do not see.

    least-prefill    the least prefill left to do, in seconds; at a tie, the fewest requests
    longest-prefix   the most tokens of the request cached; at a tie, the fewest requests
    llm-d            3·(share of the prompt cached) + 2·(shortness of the queue, between the shortest and the
                     longest) + 2·(share of KV free): the weights of its default profile (llm-d-router 0.8);
                     a tie is broken by lot
    sglang           the idlest worker, where the busiest has over 64 requests more and over 1.5 times as
                     many; else that with the longest match, if it is over 0.3 of the prompt; else that with
                     the least text on record (the defaults of SGLang's gateway 0.3, `cache_aware`)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import BLOCK_TOKENS, KV_BLOCKS
from controlplane.placement.constraints import prefill_lasts_s
from controlplane.placement.ledger import DECODE_ONLY, NONE, SERVING, Ledger, cached_tokens, empty_blocks
from controlplane.placement.memory import free_blocks

PREFIX_WEIGHT, QUEUE_WEIGHT, FREE_WEIGHT = 3.0, 2.0, 2.0
MATCH, MORE, TIMES_MORE = 0.3, 64, 1.5


@compiled
def serves(led: Ledger, w: int, phase_role: int) -> bool:
    """Whether a worker takes requests, and belongs to the pool that is asked for."""
    is_decode_only = led.workers[w].role == DECODE_ONLY
    return led.workers[w].status == SERVING and is_decode_only == (phase_role == DECODE_ONLY)


@compiled
def requests_at(led: Ledger, w: int) -> int:
    """Requests that a worker has, whatever their phase."""
    return led.workers[w].decoding + led.workers[w].queued


@compiled
def two_choices(led: Ledger, phase_role: int, draw: NDArray[np.float64]) -> int:
    """The less loaded of two workers drawn at random: by requests, then tokens held, then the first drawn."""
    count = 0
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            count += 1
    if count == 0:
        return NONE
    first = int(draw[0] * count)
    second = int(draw[1] * max(count - 1, 1))
    if count > 1 and second >= first:
        second += 1
    one, other, at = NONE, NONE, 0
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            if at == first:
                one = w
            elif at == second:
                other = w
            at += 1
    return one if other == NONE or not is_less_loaded(led, other, one) else other


@compiled
def is_less_loaded(led: Ledger, a: int, b: int) -> bool:
    """Whether worker `a` has fewer requests than `b`, or as many that hold fewer tokens."""
    more = led.workers[b].decoding + led.workers[b].queued - led.workers[a].decoding - led.workers[a].queued
    if more != 0:
        return more > 0
    return (
        led.workers[a].context + led.workers[a].queued_context
        < led.workers[b].context + led.workers[b].queued_context
    )


@compiled
def in_turn(led: Ledger, r: int, phase_role: int) -> int:
    """Round-robin by the request's number."""
    count = 0
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            count += 1
    if count == 0:
        return NONE
    turn = r % count
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            if turn == 0:
                return w
            turn -= 1
    return NONE


@compiled
def least_prefill(led: Ledger, now_s: float, phase_role: int) -> int:
    """The worker with least prefill left to do, in seconds; of several the one with the fewest requests."""
    best, least_s = NONE, np.inf
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            left_s = prefill_left_s(led, w, now_s)
            if left_s < least_s or (left_s == least_s and requests_at(led, w) < requests_at(led, best)):
                best, least_s = w, left_s
    return best


@compiled
def prefill_left_s(led: Ledger, w: int, now_s: float) -> float:
    """Seconds of prefill that a worker has still to do."""
    worker = led.workers[w]
    k = led.coefficients[worker.variant]
    work = float(worker.queued_tokens)
    left_s = 0.0
    if work > 0:
        left_s = prefill_lasts_s(k, work, 0.0, 0.0, worker.decoding, worker.context)
    return left_s + (max(worker.boundary_s - now_s, 0.0) if worker.queued > 0 else 0.0)


@compiled
def longest_prefix(led: Ledger, r: int, phase_role: int) -> int:
    """The worker that has most of a request cached, of several the one with the fewest requests."""
    best, most, cached = NONE, -1, 0
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            cached = cached_tokens(led, w, r, cached, False)
            if cached > most or (cached == most and requests_at(led, w) < requests_at(led, best)):
                best, most = w, cached
    return best


@compiled
def highest_score(led: Ledger, r: int, phase_role: int, draw: NDArray[np.float64]) -> int:
    """The worker with the highest weighted score of prefix, queue and free memory."""
    tokens = led.requests[r].prompt + led.requests[r].key
    shortest, longest = 1 << 60, -1
    for w in range(len(led.workers)):
        if serves(led, w, phase_role):
            waiting = requests_at(led, w) - led.workers[w].running_n
            shortest, longest = min(shortest, waiting), max(longest, waiting)
    best, highest, cached = NONE, -1.0, 0
    first = int(draw[0] * len(led.workers))
    for i in range(len(led.workers)):
        w = (first + i) % len(led.workers)
        if not serves(led, w, phase_role):
            continue
        cached = cached_tokens(led, w, r, cached, False)
        waiting = requests_at(led, w) - led.workers[w].running_n
        short = (longest - waiting) / (longest - shortest) if longest > shortest else 1.0
        score = PREFIX_WEIGHT * cached / tokens + QUEUE_WEIGHT * short + FREE_WEIGHT * share_free(led, w)
        if score > highest:
            best, highest = w, score
    return best


@compiled
def share_free(led: Ledger, w: int) -> float:
    """The share of a worker's KV memory that no request uses."""
    k = led.coefficients[led.workers[w].variant]
    if led.caches.tokens > 0:
        return free_blocks(led.caches, w) / k[KV_BLOCKS]
    return 1.0 - led.workers[w].context / (k[KV_BLOCKS] * k[BLOCK_TOKENS])


@compiled
def prefix_unless_unbalanced(led: Ledger, r: int, phase_role: int) -> int:
    """The idlest worker of an unbalanced fleet; else the best match, or that with the least on record."""
    idlest, matching, emptiest = NONE, NONE, NONE
    least, most, longest, emptiness, cached = 1 << 60, -1, -1, -1, 0
    for w in range(len(led.workers)):
        if not serves(led, w, phase_role):
            continue
        here = requests_at(led, w)
        most = max(most, here)
        if here < least:
            idlest, least = w, here
        cached = cached_tokens(led, w, r, cached, False)
        if cached > longest:
            matching, longest = w, cached
        empty = empty_blocks(led, w)
        if emptiest == NONE or empty > emptiness:
            emptiest, emptiness = w, empty
    if most - least > MORE and most > TIMES_MORE * least:
        return idlest
    tokens = led.requests[r].prompt + led.requests[r].key
    return matching if longest > MATCH * tokens else emptiest
