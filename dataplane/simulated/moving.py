"""A request leaves one engine and joins another's batch, KV and all: the steps that touch compiled state.

Room is reserved on the target before anything is copied: blocks for the request's tokens and a seat in the
batch, which admission there respects and decoding may preempt for. Requests join and leave at step
boundaries only.
"""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import BLOCK_TOKENS, KV_BLOCKS, MAX_SEQS
from controlplane.placement.ledger import (
    DECODING,
    HELD,
    NONE,
    QUEUED,
    SERVING,
    Ledger,
    begin_decoding,
    generated,
    leave_queue,
    queue_first,
    stop_decoding,
)
from dataplane.simulated.engine import arrive, begin_activity, cut, end_activity, view
from dataplane.simulated.engine_records import DECODE_RUN, IDLE, WAKING, Engines
from dataplane.simulated.kv_room import blocks_of, drop_running


@compiled
def tokens_of(led: Ledger, eng: Engines, w: int, r: int, now_s: float) -> int:
    """KV tokens that a request decoding at a worker holds now; 0 when it does not decode there."""
    view(led, eng, w, now_s)
    if led.requests[r].worker != w or led.requests[r].phase != DECODING:
        return 0
    return int(led.requests[r].prompt) + generated(led, r)


@compiled
def reserve(led: Ledger, eng: Engines, w: int, tokens: int, now_s: float) -> bool:
    """Promise a worker's memory and a seat to a request of `tokens`; False where it lacks either.

    A block for each sequence that runs there is left for its next token.
    """
    if led.workers[w].status != SERVING:
        return False
    view(led, eng, w, now_s)
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    count = led.workers[w].running_n
    used = eng.workers[w].reserved_blocks
    for i in range(count):
        r = led.running[w, i]
        used += blocks_of(led.requests[r].prompt + generated(led, r), block)
    need = blocks_of(tokens + 1, block)
    if count + eng.workers[w].reserved_seats + 1 > k[MAX_SEQS] or used + need + count > k[KV_BLOCKS]:
        return False
    eng.workers[w].reserved_blocks += need
    eng.workers[w].reserved_seats += 1
    led.workers[w].queued += 1  # placement sees it as one that is coming
    led.workers[w].queued_context += tokens
    return True


@compiled
def release(led: Ledger, eng: Engines, w: int, tokens: int) -> None:
    """Take the promise back."""
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    eng.workers[w].reserved_blocks -= blocks_of(tokens + 1, block)
    eng.workers[w].reserved_seats -= 1
    led.workers[w].queued -= 1
    led.workers[w].queued_context -= tokens


@compiled
def look_again(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Something changed for a worker: it decides anew at its next boundary, and wakes if somebody waits."""
    if eng.workers[w].activity == DECODE_RUN:
        eng.workers[w].blocked = 0
        cut(led, eng, w, now_s)
    elif eng.workers[w].activity == IDLE and queue_first(led, w) != NONE:
        eng.workers[w].activity = WAKING
        eng.workers[w].next_s = now_s


@compiled
def take_out(led: Ledger, eng: Engines, w: int, r: int, now_s: float) -> int:
    """At the boundary `now_s` of worker `w`: the request leaves; return its tokens, 0 if it has ended there.

    It is HELD by nobody until it lands.
    """
    end_activity(led, eng, w)
    tokens = 0
    if led.requests[r].worker == w and led.requests[r].phase == DECODING:
        for i in range(led.workers[w].running_n):
            if led.running[w, i] == r:
                drop_running(led, w, i)
                break
        stop_decoding(led, w, r, HELD)
        led.requests[r].worker = NONE
        tokens = led.requests[r].prompt + led.requests[r].key
    eng.workers[w].slowdown = 0.0
    begin_activity(led, eng, w, now_s)
    return tokens


@compiled
def put_in(led: Ledger, eng: Engines, w: int, r: int, now_s: float) -> None:
    """At a boundary of worker `w`, or while it idles: the request joins its batch, on what was reserved."""
    if eng.workers[w].activity != IDLE:
        end_activity(led, eng, w)
    tokens = led.requests[r].prompt + led.requests[r].key
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    eng.workers[w].reserved_blocks -= blocks_of(tokens + 1, block)
    eng.workers[w].reserved_seats -= 1
    led.requests[r].worker = w
    led.requests[r].phase = QUEUED
    led.running[w, led.workers[w].running_n] = r
    led.workers[w].running_n += 1
    begin_decoding(led, w, r, led.requests[r].key)  # `reserve` had counted it as queued
    eng.requests[r].migrations += 1
    eng.workers[w].slowdown = 0.0
    begin_activity(led, eng, w, now_s)


@compiled
def requeue(led: Ledger, eng: Engines, source: int, target: int, r: int, now_s: float) -> bool:
    """Take a request that waits at `source` to the queue of `target`, ahead of those that came after it.

    False when it does not wait there any more.
    """
    if led.requests[r].worker != source or led.requests[r].phase != QUEUED:
        return False
    leave_queue(led, source, r)
    first = led.queue_head[led.requests[r].priority, target]
    ahead = first != NONE and led.requests[r].arrival_s < led.requests[first].arrival_s
    arrive(led, eng, target, r, now_s, ahead)
    eng.requests[r].migrations += 1
    look_again(led, eng, source, now_s)
    return True
