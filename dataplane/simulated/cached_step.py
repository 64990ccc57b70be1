"""The next step of a simulated engine that caches prefixes, as vLLM plans it.

In one pass per step: each running request, oldest first, takes the blocks that its tokens need, the newest
being preempted where there are none; then waiting requests are looked up and admitted. What a step fills can
be hit from its planning on, so a request may hit blocks that another computes in the same step.

A run of decode steps has the first of them planned so. No request is looked up during the others: the memory
they take and the blocks they fill are booked together when the run ends, in the order of the steps. A run
ends early where a block is filled that the request at the head of the queue would hit.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import (
    BLOCK_TOKENS,
    CHUNKED,
    MAX_BATCHED,
    MAX_SEQS,
    MODE,
    WINDOW_BLOCKS,
)
from controlplane.placement.caches import NOTHING, block_id, most_hits
from controlplane.placement.ledger import (
    DECODE_ONLY,
    DECODING,
    NONE,
    Ledger,
    begin_decoding,
    dequeue,
    generated,
    queue_first,
    to_compute,
)
from controlplane.placement.memory import begin, extend, free_blocks, look_up, store, take, touch
from controlplane.placement.memory import release as leave_behind
from dataplane.simulated.next_step import (
    admit,
    blocks_of,
    enter_mixed,
    enter_prefill,
    enter_run,
    preempt_newest,
    rest,
    steps_to_first_end,
    take_chunk,
)
from dataplane.simulated.records import DECODE_RUN, Engines


@compiled
def begin_cached(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Begin the next step of a worker with a prefix cache, or a run of decode steps."""
    k = led.coefficients[led.workers[w].variant]
    decodes_only = led.workers[w].role == DECODE_ONLY
    if decodes_only:
        receive_waiting(led, eng, w)
    elif k[MODE] != CHUNKED and prefill_waiting(led, eng, w, now_s):
        return
    before = led.workers[w].running_n
    prefill, squares = go_on(led, eng, w)
    preempted = led.workers[w].running_n < before
    if k[MODE] == CHUNKED and not decodes_only and not preempted:
        budget = int(k[MAX_BATCHED]) - led.workers[w].decoding - prefill
        more, more_squares = begin_waiting(led, eng, w, budget)
        prefill += more
        squares += more_squares
    if prefill > 0:
        enter_mixed(led, eng, w, now_s, prefill, squares)
        return
    if led.workers[w].running_n == 0:
        rest(led, eng, w, now_s)
        return
    steps = 1
    if not preempted:
        steps = steps_with_free_blocks(led, eng, w, steps_to_first_end(led, eng, w))
        steps = steps_unseen(led, w, steps)
    enter_run(led, eng, w, now_s, steps)


@compiled
def go_on(led: Ledger, eng: Engines, w: int) -> tuple[int, float]:
    """Give each running request its tokens of this step; return the prefill among them, and its squares.

    One that runs alone may outgrow the worker.
    """
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    prefill, squares = 0, 0.0
    i = 0
    while i < led.workers[w].running_n:
        r = led.running[w, i]
        length = led.requests[r].prompt + generated(led, r)
        before, tokens = length - 1, 1
        if led.requests[r].phase != DECODING:
            before = eng.requests[r].computed
            budget = int(k[MAX_BATCHED]) - led.workers[w].decoding
            tokens = max(min(length - before, budget), 0)
        need = blocks_of(before + tokens, block) - blocks_of(before, block)
        while need > room(led, eng, w) and led.workers[w].running_n + eng.workers[w].loading > 1:
            preempt_newest(led, eng, w)
            if led.workers[w].running_n == i:
                return prefill, squares
        extend(led.caches, w, r, block, before, before + tokens)
        if led.requests[r].phase != DECODING:
            more, square = take_chunk(led, eng, w, r, tokens)
            prefill += more
            squares += square
        i += 1
    return prefill, squares


@compiled
def room(led: Ledger, eng: Engines, w: int) -> int:
    """Blocks that a worker can give out, those promised to requests on their way here left alone.

    Of what running requests hold beyond their tokens all is counted from their first token on.
    """
    k = led.coefficients[led.workers[w].variant]
    windows = (led.workers[w].running_n + eng.workers[w].loading) * int(k[WINDOW_BLOCKS])
    return int(free_blocks(led.caches, w) - eng.workers[w].reserved_blocks - windows)


@compiled
def hit(led: Ledger, w: int, r: int, tokens: int) -> tuple[int, int, int]:
    """What a waiting request of so many tokens would hit: copies, tokens, and blocks of these asleep."""
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    most, most_tokens = most_hits(led.caches, tokens, block)
    copies, asleep = look_up(led.caches, w, r, most)
    return copies, min(copies * led.caches.tokens, most_tokens), asleep


@compiled
def begin_waiting(led: Ledger, eng: Engines, w: int, budget: int) -> tuple[int, float]:
    """Admit waiting requests to a chunked step while budget, seats and memory last.

    Returns the prefill that this adds to the step, and its squares.
    """
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    prefill, squares = 0, 0.0
    while budget > 0:
        r = queue_first(led, w)
        if r == NONE:
            break
        seats = led.workers[w].running_n + eng.workers[w].reserved_seats
        if seats > 0 and seats >= k[MAX_SEQS]:
            break
        length = led.requests[r].prompt + led.requests[r].key
        copies, cached, asleep = hit(led, w, r, length)
        need = blocks_of(length, block) - cached // block + asleep + int(k[WINDOW_BLOCKS])
        if seats > 0 and need > room(led, eng, w):
            break
        chunk = min(length - cached, budget)
        admit_cached(led, eng, w, r, copies, cached, chunk)
        more, square = take_chunk(led, eng, w, r, chunk)
        prefill += more
        squares += square
        budget -= chunk
    return prefill, squares


@compiled
def admit_cached(led: Ledger, eng: Engines, w: int, r: int, copies: int, cached: int, chunk: int) -> None:
    """Take a waiting request into the batch behind what it hits, and give it memory for its first chunk."""
    admit(led, eng, w, r)
    if led.caches.requests[r].cached == NOTHING:
        led.caches.requests[r].cached = cached
    led.workers[w].queued_tokens += led.requests[r].cached - cached  # as it is, for as it was expected
    led.requests[r].cached = cached
    eng.requests[r].computed = cached
    touch(led.caches, w, r, copies)
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    extend(led.caches, w, r, block, cached, cached + chunk)


@compiled
def prefill_waiting(led: Ledger, eng: Engines, w: int, now_s: float) -> bool:
    """Begin a prefill step of all waiting requests that can be admitted; False when none can."""
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    running = led.workers[w].running_n
    taken, tokens, squares = 0, 0, 0.0
    while True:
        r = queue_first(led, w)
        if r == NONE:
            break
        seats = running + taken + eng.workers[w].reserved_seats
        length = led.requests[r].prompt + led.requests[r].key
        copies, cached, asleep = hit(led, w, r, length)
        need = blocks_of(length + 1, block) - cached // block + asleep + int(k[WINDOW_BLOCKS])
        if seats > 0 and (seats >= k[MAX_SEQS] or need + running + taken > room(led, eng, w)):
            break
        if taken > 0 and tokens + length - cached > k[MAX_BATCHED]:
            break
        admit_cached(led, eng, w, r, copies, cached, length - cached)
        more, square = take_chunk(led, eng, w, r, length - cached)
        taken += 1
        tokens += more
        squares += square
    if taken > 0:
        enter_prefill(led, eng, w, now_s, tokens, squares)
    return taken > 0


@compiled
def receive_waiting(led: Ledger, eng: Engines, w: int) -> None:
    """A decode worker takes requests whose KV has arrived, in order, while batch and KV allow."""
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    while queue_first(led, w) != NONE:
        r = queue_first(led, w)
        running = led.workers[w].running_n
        tokens = led.requests[r].prompt + led.requests[r].key
        _, cached, asleep = hit(led, w, r, tokens)
        need = blocks_of(tokens, block) - cached // block + asleep + int(k[WINDOW_BLOCKS])
        if running > 0 and (running >= k[MAX_SEQS] or need + running + 1 > room(led, eng, w)):
            return
        dequeue(led, w, r)
        led.workers[w].queued_tokens -= to_compute(led, r)
        receive(led, w, r, tokens - 1)
        led.running[w, running] = r
        led.workers[w].running_n += 1
        begin_decoding(led, w, r, led.requests[r].key)


@compiled
def receive(led: Ledger, w: int, r: int, tokens: int) -> None:
    """A request comes with the KV of so many tokens: what the worker has cached of it is used, not stored."""
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    copies, cached, _ = hit(led, w, r, tokens + 1)
    touch(led.caches, w, r, copies)
    extend(led.caches, w, r, block, cached, tokens)


@compiled
def bring(led: Ledger, eng: Engines, w: int, r: int, tokens: int) -> bool:
    """The KV of an ended request's first `tokens` comes to a worker, as if it had ended there just now.

    False where the worker has no memory for what it lacks of it.
    """
    if eng.workers[w].activity == DECODE_RUN:
        grow(led, eng, w, led.workers[w].step - led.runs[w].start_step)
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    _, cached, asleep = hit(led, w, r, tokens)
    if blocks_of(tokens, block) - cached // block + asleep > room(led, eng, w):
        return False
    begin(led.caches, w, r, block, tokens)
    leave_behind(led.caches, w, r, block, tokens)
    return True


@compiled
def steps_with_free_blocks(led: Ledger, eng: Engines, w: int, steps: int) -> int:
    """The number of `steps` decode steps that free blocks suffice for; the first has its blocks already."""
    k = led.coefficients[led.workers[w].variant]
    block, count, free = int(k[BLOCK_TOKENS]), led.workers[w].running_n, room(led, eng, w)
    if count + eng.workers[w].loading == 1 or count * blocks_of(steps - 1, block) <= free:
        return steps
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_grown(led, w, block, 1, middle) <= free:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def blocks_grown(led: Ledger, w: int, block: int, since: int, steps: int) -> int:
    """Blocks that the steps after the first `since`, up to `steps`, take; none of them is done yet."""
    blocks = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        computed = led.requests[r].prompt + generated(led, r) - 1
        blocks += blocks_of(computed + steps, block) - blocks_of(computed + since, block)
    return blocks


@compiled
def steps_unseen(led: Ledger, w: int, steps: int) -> int:
    """The number of `steps` decode steps before one that fills the next block the queue's head would hit."""
    head = queue_first(led, w)
    if head == NONE:
        return steps
    hits, _, _ = hit(led, w, head, led.requests[head].prompt + led.requests[head].key)
    key = block_id(led.caches, head, hits)
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        if block_id(led.caches, r, hits) == key:
            computed = led.requests[r].prompt + generated(led, r) - 1
            fills = (hits + 1) * led.caches.tokens - computed
            if fills > 1:  # or it is full, or the step that is planned already fills it
                steps = min(steps, fills - 1)
    return steps


@compiled
def grow(led: Ledger, eng: Engines, w: int, steps: int) -> None:
    """Book what a decode run's steps up to the number `steps` take and fill, in the order of the steps."""
    grown = eng.workers[w].grown
    if steps <= grown:
        return
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    count = led.workers[w].running_n
    fills = np.empty(count, np.int64)  # the step that fills each request's next block
    taken, soonest = 0, steps + 1
    for i in range(count):
        r = led.running[w, i]
        computed = led.requests[r].prompt + led.requests[r].key + led.runs[w].start_step - 1
        blocks = blocks_of(computed + steps, block) - blocks_of(computed + grown, block)
        led.caches.requests[r].own += blocks
        taken += blocks
        next_full = (led.caches.requests[r].copies + 1) * led.caches.tokens - computed
        fills[i] = max(next_full, grown + 1)
        soonest = min(soonest, fills[i])
    take(led.caches, w, taken)
    while soonest <= steps:
        step, soonest = soonest, steps + 1
        for i in range(count):
            if fills[i] == step:
                r = led.running[w, i]
                computed = led.requests[r].prompt + led.requests[r].key + led.runs[w].start_step - 1
                store(led.caches, w, r, block, computed + step)
                fills[i] = step + led.caches.tokens
            soonest = min(soonest, fills[i])
    eng.workers[w].grown = steps
