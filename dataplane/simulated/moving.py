"""The way of a request from one engine to another: a reservation, then a step boundary of each."""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Ledger, view
from controlplane.placement.memory import free_blocks, peek, pin, unpin
from controlplane.placement.table import most_hits
from dataplane.simulated import kv
from dataplane.simulated.engine import arrive, begin_activity, cut, end_activity
from dataplane.simulated.records import DECODE_RUN, IDLE, WAKING, Engines


@compiled
def tokens_of(ledger: Ledger, engines: Engines, w: int, r: int, now_s: float) -> int:
    """KV tokens that a request decoding at a worker holds now; 0 when it does not decode there."""
    view(ledger, w, now_s)
    if ledger.requests[r].worker != w or ledger.requests[r].phase != state.DECODING:
        return 0
    return int(ledger.requests[r].prompt) + state.generated(ledger, r)


@compiled
def reserve(
    ledger: Ledger, engines: Engines, w: int, r: int, tokens: int, now_s: float
) -> tuple[int, int, int]:
    """Promise a worker's memory and a seat to a request of `tokens`; NONE where it lacks either.

    What is cached there of the request is kept for it: copies, and tokens. A block for each sequence that
    runs there is left for its next token.
    """
    if ledger.workers[w].status != state.SERVING:
        return state.NONE, 0, 0
    view(ledger, w, now_s)
    k = ledger.coefficients[ledger.workers[w].variant]
    block = int(k[speed.BLOCK_TOKENS])
    count = ledger.workers[w].running_n
    copies, cached, asleep = 0, 0, 0
    if ledger.caches.tokens > 0:
        if engines.workers[w].activity == DECODE_RUN:
            kv.grow(ledger, engines, w, ledger.workers[w].step - ledger.runs[w].start_step)
        room = free_blocks(ledger.caches, w, kv.fold_of(ledger, w)) - engines.workers[w].reserved_blocks
        most, most_tokens = most_hits(ledger.caches, tokens, block)
        copies, asleep = peek(ledger.caches, w, r, most)
        cached = min(copies * ledger.caches.tokens, most_tokens)
    else:
        kv.count(ledger, engines, w)
        room = kv.room(ledger, engines, w)
    fold = kv.fold_of(ledger, w) if ledger.caches.tokens > 0 else 1
    need = kv.blocks_held(k, tokens + 1) - cached // block
    if fold > 1:
        need = kv.wanted(ledger, w, tokens + 1, cached, 0)
    needs = need + (asleep + count) * fold
    if count + engines.workers[w].reserved_seats + 1 > k[speed.MAX_SEQS] or needs > room:
        return state.NONE, 0, 0
    if copies > 0:
        pin(ledger.caches, w, r, copies)
    engines.workers[w].reserved_blocks += need
    engines.workers[w].reserved_seats += 1
    ledger.workers[w].queued += 1  # placement sees it as one that is coming
    ledger.workers[w].queued_context += tokens
    return need, copies, cached


@compiled
def release(ledger: Ledger, engines: Engines, w: int, r: int, tokens: int, blocks: int, copies: int) -> None:
    """Take the promise back."""
    if copies > 0:
        unpin(ledger.caches, w, r, copies)
    engines.workers[w].reserved_blocks -= blocks
    engines.workers[w].reserved_seats -= 1
    ledger.workers[w].queued -= 1
    ledger.workers[w].queued_context -= tokens


@compiled
def look_again(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """Something changed for a worker: it decides again at its next boundary, and wakes if a request waits."""
    if engines.workers[w].activity == DECODE_RUN:
        engines.workers[w].blocked = 0
        cut(ledger, engines, w, now_s)
    elif engines.workers[w].activity == IDLE and batch.queue_first(ledger, w) != state.NONE:
        engines.workers[w].activity = WAKING
        engines.workers[w].next_s = now_s


@compiled
def take_out(ledger: Ledger, engines: Engines, w: int, r: int, now_s: float) -> int:
    """At the boundary `now_s` of worker `w`: the request leaves; return its tokens, 0 if it has ended there.

    It is HELD, without a worker, until it lands.
    """
    end_activity(ledger, engines, w)
    tokens = 0
    if ledger.requests[r].worker == w and ledger.requests[r].phase == state.DECODING:
        for i in range(ledger.workers[w].running_n):
            if ledger.running[w, i] == r:
                batch.drop_running(ledger, w, i)
                break
        kv.give_back(ledger, engines, w, r)
        batch.stop_decoding(ledger, w, r, state.HELD)
        ledger.requests[r].worker = state.NONE
        tokens = ledger.requests[r].prompt + ledger.requests[r].key
    engines.workers[w].slowdown = 0.0
    begin_activity(ledger, engines, w, now_s)
    return tokens


@compiled
def put_in(ledger: Ledger, engines: Engines, w: int, r: int, blocks: int, copies: int, now_s: float) -> None:
    """At a boundary of worker `w`, or while it idles: the request joins its batch, on what was reserved."""
    if engines.workers[w].activity != IDLE:
        end_activity(ledger, engines, w)
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    engines.workers[w].reserved_blocks -= blocks
    engines.workers[w].reserved_seats -= 1
    if ledger.caches.tokens > 0:
        unpin(ledger.caches, w, r, copies)
        kv.receive(ledger, engines, w, r, tokens - 1)
    ledger.requests[r].worker = w
    ledger.requests[r].phase = state.QUEUED
    ledger.running[w, ledger.workers[w].running_n] = r
    ledger.workers[w].running_n += 1
    batch.begin_decoding(ledger, w, r, ledger.requests[r].key)  # `reserve` had counted it as queued
    engines.requests[r].migrations += 1
    engines.workers[w].first_end = 0
    engines.workers[w].slowdown = 0.0
    begin_activity(ledger, engines, w, now_s)


@compiled
def requeue(ledger: Ledger, engines: Engines, source: int, target: int, r: int, now_s: float) -> bool:
    """Take a request that waits at `source` to the queue of `target`, ahead of those that came after it.

    False when it does not wait there any more.
    """
    if ledger.requests[r].worker != source or ledger.requests[r].phase != state.QUEUED:
        return False
    batch.leave_queue(ledger, source, r)
    first = ledger.queue_head[ledger.requests[r].priority, target]
    ahead = first != state.NONE and ledger.requests[r].arrival_s < ledger.requests[first].arrival_s
    arrive(ledger, engines, target, r, now_s, ahead)
    engines.requests[r].migrations += 1
    look_again(ledger, engines, source, now_s)
    return True
