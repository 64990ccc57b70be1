"""The next step of a simulated engine, by its mode, and the KV room that bounds it.

The rules are those of docs/engine.md, which follows vLLM:

prefill-first  a step is a prefill of all that can be admitted, else a decode step
chunked        every step carries one token for each decoding request, then prefill chunks up to a budget
split          a prefill worker only prefills; a decode worker only decodes

The KV room gives the number of steps that fit, and the requests to preempt when none does.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import (
    BLOCK_TOKENS,
    KV_BLOCKS,
    MAX_BATCHED,
    MAX_SEQS,
    PER_CONTEXT,
    SHARED_TOKEN,
    WINDOW_BLOCKS,
    decode_base_s,
    mixed_s,
    prefill_s,
    run_s,
    steps_within,
    window_blocks,
)
from controlplane.placement.ledger import (
    DECODING,
    NONE,
    PREFILLING,
    QUEUED,
    Floats,
    Ledger,
    begin_decoding,
    dequeue,
    enqueue,
    generated,
    queue_first,
    stop_decoding,
)
from controlplane.placement.memory import release
from dataplane.simulated.records import (
    DECODE_RUN,
    IDLE,
    MIXED_STEP,
    PREFILL_STEP,
    Engines,
)


@compiled
def begin_prefill(led: Ledger, eng: Engines, w: int, now_s: float) -> bool:
    """Begin a prefill step of all waiting requests that can be admitted; False when none can."""
    k = led.coefficients[led.workers[w].variant]
    running = led.workers[w].running_n
    seats = running + eng.workers[w].reserved_seats
    used = blocks_after(led, w, 0) + eng.workers[w].reserved_blocks
    taken, tokens, squares = 0, 0, 0.0
    while True:
        r = queue_first(led, w)
        if r == NONE:
            break
        length = led.requests[r].prompt + led.requests[r].key
        need = blocks_held(k, length + 1)
        if seats + taken > 0 and (
            seats + taken + 1 > k[MAX_SEQS] or used + need + running + taken > k[KV_BLOCKS]
        ):
            break
        if taken > 0 and tokens + length > k[MAX_BATCHED]:
            break
        admit(led, eng, w, r)
        led.workers[w].queued_tokens -= length
        eng.requests[r].chunk = length
        used += need
        taken += 1
        tokens += length
        squares += float(length) * float(length)
    if taken == 0:
        return False
    enter_prefill(led, eng, w, now_s, tokens, squares)
    return True


@compiled
def enter_prefill(led: Ledger, eng: Engines, w: int, now_s: float, tokens: int, squares: float) -> None:
    """Begin a step of prefill alone."""
    k = led.coefficients[led.workers[w].variant]
    eng.workers[w].activity = PREFILL_STEP
    eng.workers[w].next_s = now_s + prefill_s(k, tokens, squares) * (1.0 + eng.workers[w].slowdown)
    led.workers[w].boundary_s = eng.workers[w].next_s
    led.workers[w].gains = 0


@compiled
def admit(led: Ledger, eng: Engines, w: int, r: int) -> None:
    """Take a waiting request into the batch, to be prefilled from its first token on."""
    dequeue(led, w, r)
    led.requests[r].phase = PREFILLING
    led.running[w, led.workers[w].running_n] = r
    led.workers[w].running_n += 1
    eng.requests[r].computed = 0


@compiled
def admit_decoding(led: Ledger, eng: Engines, w: int) -> None:
    """A decode worker takes requests whose KV has arrived, in order, while batch and KV allow."""
    k = led.coefficients[led.workers[w].variant]
    used = blocks_after(led, w, 0)
    while True:
        r = queue_first(led, w)
        if r == NONE:
            return
        running = led.workers[w].running_n
        need = blocks_held(k, led.requests[r].prompt + led.requests[r].key)
        if running > 0 and (running + 1 > k[MAX_SEQS] or used + need + running + 1 > k[KV_BLOCKS]):
            eng.workers[w].blocked = 1
            return
        dequeue(led, w, r)
        led.workers[w].queued_tokens -= led.requests[r].prompt + led.requests[r].key
        led.running[w, running] = r
        led.workers[w].running_n += 1
        used += need
        begin_decoding(led, w, r, led.requests[r].key)


@compiled
def begin_run(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Begin a run of decode steps as long as nothing can change in it; idle with nothing to decode."""
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    capacity = int(k[KV_BLOCKS]) - eng.workers[w].reserved_blocks
    preempted = False
    while led.workers[w].running_n > 1 and blocks_after(led, w, 1) > capacity:
        preempt_newest(led, eng, w)
        preempted = True
    if led.workers[w].running_n == 0:
        rest(led, eng, w, now_s)
        return
    steps = steps_to_first_end(led, eng, w)
    if preempted:
        steps = 1  # what it freed may let a request in at the next boundary
    elif led.workers[w].running_n > 1:
        steps = steps_with_room(led, w, steps, block, capacity)
    enter_run(led, eng, w, now_s, steps)


@compiled
def rest(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Leave a worker idle."""
    eng.workers[w].activity = IDLE
    eng.workers[w].next_s = np.inf
    led.workers[w].boundary_s = now_s
    led.workers[w].gains = 0


@compiled
def steps_to_first_end(led: Ledger, eng: Engines, w: int) -> int:
    """Decode steps until the first of the admitted requests has all its tokens."""
    steps = eng.requests[led.running[w, 0]].output
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        steps = min(steps, eng.requests[r].output - generated(led, r))
    return steps


@compiled
def enter_run(led: Ledger, eng: Engines, w: int, now_s: float, steps: int) -> None:
    """Begin a run of that many decode steps."""
    k = led.coefficients[led.workers[w].variant]
    if queue_first(led, w) != NONE:
        eng.workers[w].blocked = 1
    sequences = led.workers[w].decoding
    longer = 1.0 + eng.workers[w].slowdown
    first_step_s = decode_base_s(k, sequences) + k[PER_CONTEXT] * led.workers[w].context
    eng.workers[w].activity = DECODE_RUN
    led.runs[w].first_step_s = first_step_s * longer
    led.runs[w].growth_s = k[PER_CONTEXT] * sequences * longer
    led.runs[w].steps = steps
    eng.workers[w].grown = 1
    led.runs[w].start_step = led.workers[w].step
    led.runs[w].start_context = led.workers[w].context
    eng.workers[w].next_s = now_s + run_s(led.runs[w].first_step_s, led.runs[w].growth_s, steps)
    led.workers[w].boundary_s = now_s + led.runs[w].first_step_s
    led.workers[w].gains = 1


@compiled
def cut(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """End a worker's decode run at its first step boundary that is not before `now_s`."""
    done = steps_within(led.runs[w].first_step_s, led.runs[w].growth_s, now_s - led.runs[w].start_s)
    at_s = led.runs[w].start_s + run_s(led.runs[w].first_step_s, led.runs[w].growth_s, done)
    if at_s < now_s or done == 0:
        done += 1
    if done < led.runs[w].steps:
        led.runs[w].steps = done
        eng.workers[w].next_s = led.runs[w].start_s + run_s(
            led.runs[w].first_step_s, led.runs[w].growth_s, done
        )


@compiled
def begin_chunked(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Begin a chunked step: a token for each decoding request, then prefill up to the budget.

    With no prefill to carry it is a run of decode steps instead.
    """
    k = led.coefficients[led.workers[w].variant]
    capacity = int(k[KV_BLOCKS]) - eng.workers[w].reserved_blocks
    before = led.workers[w].running_n
    used, chunk, budget = make_room(led, eng, w, capacity)
    preempted = led.workers[w].running_n < before
    prefill, squares = 0, 0.0
    if chunk > 0:
        r = led.running[w, led.workers[w].running_n - 1]
        prefill, squares = take_chunk(led, eng, w, r, chunk)
        budget -= chunk
    while not preempted and budget > 0:
        r = queue_first(led, w)
        if r == NONE:
            break
        length = led.requests[r].prompt + led.requests[r].key
        chunk = min(length, budget)
        need = blocks_held(k, length + 1 if chunk == length else chunk)
        seats = led.workers[w].running_n + eng.workers[w].reserved_seats
        if seats > 0 and (seats >= k[MAX_SEQS] or used + need > capacity):
            break
        admit(led, eng, w, r)
        more, square = take_chunk(led, eng, w, r, chunk)
        prefill += more
        squares += square
        used += need
        budget -= chunk
    if prefill == 0:
        begin_run(led, eng, w, now_s)
        if preempted and eng.workers[w].activity == DECODE_RUN:
            led.runs[w].steps = 1
            eng.workers[w].next_s = led.workers[w].boundary_s
        return
    enter_mixed(led, eng, w, now_s, prefill, squares)


@compiled
def enter_mixed(led: Ledger, eng: Engines, w: int, now_s: float, prefill: int, squares: float) -> None:
    """Begin a step that carries that much prefill beside the decoding requests."""
    k = led.coefficients[led.workers[w].variant]
    eng.workers[w].activity = MIXED_STEP
    step_s = mixed_s(k, prefill, led.workers[w].decoding, led.workers[w].context, squares)
    eng.workers[w].next_s = now_s + step_s * (1.0 + eng.workers[w].slowdown)
    eng.workers[w].shared_s = k[SHARED_TOKEN] * prefill
    led.workers[w].boundary_s = eng.workers[w].next_s
    led.workers[w].gains = 1


@compiled
def make_room(led: Ledger, eng: Engines, w: int, capacity: int) -> tuple[int, int, int]:
    """Preempt until the next step fits; the KV blocks that it needs, the chunk in prefill, the budget."""
    budget = int(led.coefficients[led.workers[w].variant][MAX_BATCHED]) - led.workers[w].decoding
    while True:
        used, chunk = chunked_need(led, eng, w, budget)
        if used <= capacity or led.workers[w].running_n <= 1:
            return used, chunk, budget
        newest = led.running[w, led.workers[w].running_n - 1]
        if led.requests[newest].phase == DECODING:
            budget += 1
        preempt_newest(led, eng, w)


@compiled
def chunked_need(led: Ledger, eng: Engines, w: int, budget: int) -> tuple[int, int]:
    """KV blocks that the admitted requests need for their next step, and the chunk of the one in prefill."""
    k = led.coefficients[led.workers[w].variant]
    used, chunk = 0, 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        if led.requests[r].phase == DECODING:
            used += blocks_held(k, led.requests[r].prompt + generated(led, r) + 1)
        else:
            length = led.requests[r].prompt + led.requests[r].key
            chunk = min(length - eng.requests[r].computed, budget)
            after = eng.requests[r].computed + chunk
            used += blocks_held(k, length + 1 if after == length else after)
    return used, chunk


@compiled
def take_chunk(led: Ledger, eng: Engines, w: int, r: int, chunk: int) -> tuple[int, float]:
    """Put `chunk` tokens of a prefill into the step; return them and the growth of its squared length."""
    before = float(eng.requests[r].computed)
    eng.requests[r].chunk = chunk
    led.workers[w].queued_tokens -= chunk
    return chunk, (before + chunk) * (before + chunk) - before * before


@compiled
def blocks_of(tokens: int, block: int) -> int:
    """KV blocks that hold `tokens`."""
    return (tokens + block - 1) // block


@compiled
def blocks_held(k: Floats, tokens: int) -> int:
    """KV blocks of a request of so many tokens."""
    return blocks_of(tokens, int(k[BLOCK_TOKENS])) + window_blocks(k, tokens)


@compiled
def blocks_after(led: Ledger, w: int, steps: int) -> int:
    """KV blocks the admitted requests hold once each has `steps` more tokens."""
    k, used = led.coefficients[led.workers[w].variant], 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        used += blocks_held(k, led.requests[r].prompt + generated(led, r) + steps)
    return used


@compiled
def steps_with_room(led: Ledger, w: int, steps: int, block: int, capacity: int) -> int:
    """The number of `steps` decode steps that KV has room for; the first is known to fit."""
    count = led.workers[w].running_n
    window = int(led.coefficients[led.workers[w].variant][WINDOW_BLOCKS]) * block
    if led.workers[w].context + count * (steps + block - 1 + window) <= capacity * block:
        return steps  # even with every last block nearly empty
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_after(led, w, middle) <= capacity:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def free_kv(led: Ledger, eng: Engines, w: int, r: int) -> None:
    """A request leaves the batch: its worker's cache, if it has one, keeps what it may."""
    if led.caches.tokens > 0:
        block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
        computed = eng.requests[r].computed
        if led.requests[r].phase == DECODING:
            computed = led.requests[r].prompt + generated(led, r) - 1
        release(led.caches, w, r, block, computed)


@compiled
def drop_running(led: Ledger, w: int, i: int) -> int:
    """Take the i-th admitted request off a worker's list and return it; the order of the others stays."""
    r = led.running[w, i]
    for j in range(i, led.workers[w].running_n - 1):
        led.running[w, j] = led.running[w, j + 1]
    led.workers[w].running_n -= 1
    return r


@compiled
def preempt_newest(led: Ledger, eng: Engines, w: int) -> None:
    """Free the KV of the newest admitted request; it waits at the head, to be prefilled anew."""
    r = drop_running(led, w, led.workers[w].running_n - 1)
    free_kv(led, eng, w, r)
    if led.requests[r].phase == DECODING:
        stop_decoding(led, w, r, QUEUED)
    else:  # part of its prefill is lost; it had been counted as queued all along
        led.workers[w].queued -= 1
        led.workers[w].queued_context -= led.requests[r].prompt + led.requests[r].key
        led.workers[w].queued_tokens -= (
            led.requests[r].prompt + led.requests[r].key - eng.requests[r].computed
        )
    eng.requests[r].computed = 0
    eng.requests[r].preemptions += 1
    enqueue(led, w, r, True)
