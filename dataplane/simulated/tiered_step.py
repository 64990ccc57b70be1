"""The next step of a simulated engine whose prefix cache has a tier in host memory below it.

As in `cached_step.py`, but requests that load go first, and what the queue's head does not hold up may pass
it (`host_tier.py` has the tier). Such engines chunk.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import BLOCK_TOKENS, MAX_BATCHED, MAX_SEQS, WINDOW_BLOCKS
from controlplane.placement.caches import NOTHING
from controlplane.placement.ledger import (
    DECODING,
    NONE,
    ON_LINK,
    PREFILLING,
    Ledger,
    dequeue,
    queue_first,
)
from controlplane.placement.memory import grow as hold_memory
from controlplane.placement.memory import store
from dataplane.simulated.cached_step import (
    admit_cached,
    begin_cached,
    go_on,
    hit,
    room,
    steps_unseen,
    steps_with_free_blocks,
)
from dataplane.simulated.host_tier import (
    CACHED,
    LOADED,
    LOADS,
    begin_load,
    begin_plan,
    end_loads,
    held_in_host,
    leave_loading,
    next_load_s,
    offer,
    use_ended,
)
from dataplane.simulated.next_step import (
    blocks_of,
    cut,
    enter_mixed,
    enter_run,
    rest,
    steps_to_first_end,
    take_chunk,
)
from dataplane.simulated.records import LOADING, Engines


@compiled
def begin_tiered(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Begin the next step of a worker with a prefix cache, or a run of decode steps."""
    if eng.host.chunks.workers[w].keeps == 0:
        begin_cached(led, eng, w, now_s)
        return
    begin_plan(eng.host, w)
    end_loads(led, eng.host, w, now_s)
    before = led.workers[w].running_n
    prefill, squares = go_on(led, eng, w)
    preempted = led.workers[w].running_n < before
    if preempted and led.workers[w].running_n == 0:  # a step of nothing takes no time
        use_ended(led, eng.host, w)
        begin_plan(eng.host, w)
        preempted = False
    if not preempted:
        budget = int(led.coefficients[led.workers[w].variant][MAX_BATCHED])
        budget -= led.workers[w].decoding + prefill
        more, more_squares, budget = begin_loaded(led, eng, w, budget)
        prefill += more
        squares += more_squares
        more, more_squares = begin_or_load(led, eng, w, budget, now_s)
        prefill += more
        squares += more_squares
    offer_filled(led, eng, w)
    if prefill > 0:
        enter_mixed(led, eng, w, now_s, prefill, squares)
        return
    next_s = next_load_s(led, eng.host, w, now_s)
    if led.workers[w].running_n == 0:
        rest(led, eng, w, now_s)
        if next_s < np.inf:
            eng.workers[w].activity = LOADING
            eng.workers[w].next_s = next_s
        return
    steps, queued = 1, queue_first(led, w) != NONE
    if not preempted and eng.host.workers[w].failed == 0 and not (queued and eng.workers[w].loading > 0):
        steps = steps_with_free_blocks(led, eng, w, steps_to_first_end(led, eng, w))
        steps = steps_unseen(led, w, steps)
    enter_run(led, eng, w, now_s, steps)
    if next_s < np.inf:
        cut(led, eng, w, next_s)


@compiled
def begin_loaded(led: Ledger, eng: Engines, w: int, budget: int) -> tuple[int, float, int]:
    """Admit requests whose blocks have been loaded; the prefill that this adds, its squares, the budget left.

    The budget left is 0 where one of them has no room: then nobody behind it is admitted.
    """
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    prefill, squares = 0, 0.0
    r = led.queue_head[ON_LINK, w]
    while budget > 0 and r != NONE:
        seats = led.workers[w].running_n + eng.workers[w].reserved_seats
        if seats > 0 and seats >= k[MAX_SEQS]:
            return prefill, squares, 0
        load, after = eng.host.requests[r], led.requests[r].next
        if load.state == LOADS:
            r = after
            continue
        if load.state == LOADED:
            load.state = CACHED
            store(led.caches, w, r, block, load.to_block * led.caches.tokens)
        length = led.requests[r].prompt + led.requests[r].key
        is_alone = seats == 0 and eng.host.workers[w].loaded == 0
        if not is_alone and blocks_lacking(led, r, block) > room(led, eng, w):
            return prefill, squares, 0
        leave_loading(led, eng.host, w, r)
        eng.workers[w].loading -= 1
        led.running[w, led.workers[w].running_n] = r
        led.workers[w].running_n += 1
        chunk = min(length - eng.requests[r].computed, budget)
        hold_memory(led.caches, w, r, block, eng.requests[r].computed + chunk)
        more, square = take_chunk(led, eng, w, r, chunk)
        prefill += more
        squares += square
        budget -= chunk
        r = after
    return prefill, squares, budget


@compiled
def blocks_lacking(led: Ledger, r: int, block: int) -> int:
    """Engine blocks that a request needs for its prefill beyond those that it holds."""
    holding = led.caches.requests[r]
    held = int(holding.copies * (led.caches.tokens // block) + holding.own)
    return blocks_of(led.requests[r].prompt + led.requests[r].key, block) - held


@compiled
def begin_or_load(led: Ledger, eng: Engines, w: int, budget: int, now_s: float) -> tuple[int, float]:
    """Admit waiting requests, or let them load what host memory has beyond their hits.

    Returns the prefill that this adds to the step, and its squares.
    """
    k = led.coefficients[led.workers[w].variant]
    block, unit = int(k[BLOCK_TOKENS]), led.caches.tokens
    prefill, squares = 0, 0.0
    r = queue_first(led, w)
    while budget > 0 and r != NONE:
        seats = led.workers[w].running_n + eng.workers[w].reserved_seats
        if seats > 0 and seats >= k[MAX_SEQS]:
            break
        after = next_in_queue(led, w, r)
        length = led.requests[r].prompt + led.requests[r].key
        copies, cached, asleep = hit(led, w, r, length)
        start = cached // unit
        blocks, loads = held_in_host(eng.host, w, r, start, length // unit)
        if (start + blocks) * unit - cached < unit:
            blocks = 0
        if blocks > 0 and loads:  # by another, whose blocks it will hit
            r = after
            continue
        is_alone, has = seats == 0 and eng.workers[w].loading == 0, room(led, eng, w)
        taken = asleep + int(k[WINDOW_BLOCKS]) - cached // block
        if not is_alone and blocks_of(length, block) + taken > has:
            break
        if blocks > 0:
            loaded = (start + blocks) * unit
            if not is_alone and blocks_of(loaded, block) + taken > has - blocks_to_come(led, eng, w):
                break
            wait_for_load(led, eng, w, r, copies, cached, blocks, now_s)
        else:
            chunk = min(length - cached, budget)
            admit_cached(led, eng, w, r, copies, cached, chunk)
            more, square = take_chunk(led, eng, w, r, chunk)
            prefill += more
            squares += square
            budget -= chunk
        r = after
    return prefill, squares


@compiled
def next_in_queue(led: Ledger, w: int, r: int) -> int:
    """The request whose turn is next after another's, or NONE."""
    after = led.requests[r].next
    if after == NONE and led.requests[r].priority == 1:
        return int(led.queue_head[0, w])
    return int(after)


@compiled
def blocks_to_come(led: Ledger, eng: Engines, w: int) -> int:
    """Blocks that requests still need whose prefill has begun, or whose KV is loaded."""
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    blocks = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        if led.requests[r].phase != DECODING:
            blocks += blocks_lacking(led, r, block)
    r = led.queue_head[ON_LINK, w]
    while r != NONE:
        blocks += blocks_lacking(led, r, block)
        r = led.requests[r].next
    return blocks


@compiled
def wait_for_load(
    led: Ledger, eng: Engines, w: int, r: int, copies: int, cached: int, blocks: int, now_s: float
) -> None:
    """A waiting request begins to load; what it loads it has computed, but for one token at least."""
    dequeue(led, w, r)
    led.requests[r].phase = PREFILLING
    begin_load(led, eng.host, w, r, copies, cached, blocks, now_s)
    eng.workers[w].loading += 1
    loaded = eng.host.requests[r].to_block * led.caches.tokens
    computed = min(loaded, led.requests[r].prompt + led.requests[r].key - 1)
    if led.caches.requests[r].cached == NOTHING:
        led.caches.requests[r].cached = computed
        eng.host.requests[r].tokens = computed - cached
    led.workers[w].queued_tokens += led.requests[r].cached - computed
    led.requests[r].cached = computed
    eng.requests[r].computed = computed


@compiled
def offer_filled(led: Ledger, eng: Engines, w: int) -> None:
    """Offer host memory what this step fills, then use what requests that have ended had used."""
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        computed = led.requests[r].prompt
        if led.requests[r].phase != DECODING:
            computed = min(computed, eng.requests[r].computed + eng.requests[r].chunk)
        offer(eng.host, w, r, computed)
    use_ended(led, eng.host, w)
