"""A worker's queue and its batch: who waits, who is in it, what a step may carry and how long it lasts.

The rules of an engine's step that simulated engines and the ledger of a live fleet share. A live engine plans
by itself; `begin_step` says what its ledger should expect of the step that begins.
"""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import hits, misprediction
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Floats, Ints, Ledger
from controlplane.placement.order import has_more


@compiled
def enqueue(ledger: Ledger, w: int, r: int, at_head: bool) -> None:
    """Put a request into a worker's queue of its priority; `at_head` is for one that was preempted."""
    p = ledger.requests[r].priority
    ledger.requests[r].cached = hits.known_cached(ledger, w, r, 0)
    ledger.requests[r].shared = hits.cached_tokens(ledger, w, r, ledger.requests[r].cached, True)
    if ledger.host.chunks.tokens > 0:
        ledger.host.loads[r] = hits.known_loads(ledger, w, r)
        ledger.host.links[w].waiting += ledger.host.loads[r]
    if at_head and ledger.queue_head[p, w] != state.NONE:
        ledger.requests[r].next = ledger.queue_head[p, w]
        ledger.queue_head[p, w] = r
    else:
        line_up(ledger, w, p, r)
    misprediction.begin(ledger, r)
    ledger.requests[r].worker = w
    ledger.requests[r].phase = state.QUEUED
    ledger.workers[w].queued += 1
    ledger.workers[w].queued_tokens += to_compute(ledger, r)
    ledger.workers[w].queued_context += ledger.requests[r].prompt + ledger.requests[r].key
    ledger.workers[w].queued_shared += ledger.requests[r].shared
    ledger.orders.changes[0] += 1
    has_more(ledger.orders, w)


@compiled
def line_up(ledger: Ledger, w: int, p: int, r: int) -> None:
    """Put a request at the end of one of a worker's queues."""
    tail = ledger.queue_tail[p, w]
    if tail == state.NONE:
        ledger.queue_head[p, w] = r
    else:
        ledger.requests[tail].next = r
    ledger.queue_tail[p, w] = r
    ledger.requests[r].next = state.NONE


@compiled
def step_out(ledger: Ledger, w: int, p: int, r: int) -> None:
    """Take a request out of one of a worker's queues, wherever it stands."""
    before = state.NONE
    at = ledger.queue_head[p, w]
    while at != r:
        before = at
        at = ledger.requests[at].next
    if before == state.NONE:
        ledger.queue_head[p, w] = ledger.requests[r].next
    else:
        ledger.requests[before].next = ledger.requests[r].next
    if ledger.queue_tail[p, w] == r:
        ledger.queue_tail[p, w] = before
    ledger.requests[r].next = state.NONE


@compiled
def to_compute(ledger: Ledger, r: int) -> int:
    """Tokens that the prefill of a request at its worker computes."""
    return ledger.requests[r].prompt + ledger.requests[r].key - ledger.requests[r].cached


@compiled
def queue_first(ledger: Ledger, w: int) -> int:
    """The request whose turn is next at a worker, high priority before normal, or NONE."""
    high = ledger.queue_head[1, w]
    return high if high != state.NONE else ledger.queue_head[0, w]


@compiled
def next_in_queue(ledger: Ledger, w: int, r: int) -> int:
    """The request whose turn is next after another's, or NONE."""
    after = ledger.requests[r].next
    if after == state.NONE and ledger.requests[r].priority == 1:
        return int(ledger.queue_head[0, w])
    return int(after)


@compiled
def dequeue(ledger: Ledger, w: int, r: int) -> None:
    """Take a request out of its worker's queue, wherever it stands; its prefill is still to be done."""
    step_out(ledger, w, ledger.requests[r].priority, r)
    if ledger.host.chunks.tokens > 0:
        ledger.host.links[w].waiting -= ledger.host.loads[r]
        ledger.host.loads[r] = 0
    ledger.workers[w].queued_shared -= ledger.requests[r].shared
    ledger.requests[r].shared = 0


@compiled
def leave_queue(ledger: Ledger, w: int, r: int) -> None:
    """Take a request that waits at a worker away from it altogether: it is HELD again."""
    dequeue(ledger, w, r)
    ledger.workers[w].queued -= 1
    ledger.workers[w].queued_tokens -= to_compute(ledger, r)
    ledger.workers[w].queued_context -= ledger.requests[r].prompt + ledger.requests[r].key
    ledger.requests[r].worker = state.NONE
    ledger.requests[r].phase = state.HELD


@compiled
def is_full(k: Floats, seats: int, budget: int) -> bool:
    """Whether a step admits no more: its budget or the batch's seats are used."""
    return budget <= 0 or seats >= k[speed.MAX_SEQS]


@compiled
def chunk_of(k: Floats, left: int, budget: int) -> int:
    """The tokens that a step takes of a prompt's remaining ones: all, where it does not chunk."""
    return min(left, budget) if k[speed.MODE] == speed.CHUNKED else left


@compiled
def is_too_long(k: Floats, prefill: int, chunk: int, budget: int) -> bool:
    """Whether a whole prompt is over the budget of a step; the first may be of any length."""
    return k[speed.MODE] != speed.CHUNKED and prefill > 0 and chunk > budget


@compiled
def squares(before: int, chunk: int) -> float:
    """The growth of a step's sum of squared lengths by a chunk behind the computed tokens."""
    start, end = float(before), float(before + chunk)
    return end * end - start * start


@compiled
def lasts_s(ledger: Ledger, w: int, prefill: int, sum_sq: float) -> float:
    """Seconds of a worker's step with this prefill; 0 for a worker without work."""
    k = ledger.coefficients[ledger.workers[w].variant]
    if k[speed.MODE] != speed.CHUNKED and prefill > 0:
        return speed.prefill_s(k, prefill, sum_sq)
    if ledger.workers[w].running_n == 0:
        return 0.0
    return speed.mixed_s(k, prefill, ledger.workers[w].decoding, ledger.workers[w].context, sum_sq)


@compiled
def join(ledger: Ledger, w: int, r: int) -> None:
    """A waiting request is in the batch from now on, to be prefilled."""
    dequeue(ledger, w, r)
    ledger.requests[r].phase = state.PREFILLING
    ledger.running[w, ledger.workers[w].running_n] = r
    ledger.workers[w].running_n += 1


@compiled
def drop_running(ledger: Ledger, w: int, i: int) -> int:
    """Take the i-th admitted request off a worker's list and return it; the order of the others stays."""
    r = ledger.running[w, i]
    for j in range(i, ledger.workers[w].running_n - 1):
        ledger.running[w, j] = ledger.running[w, j + 1]
    ledger.workers[w].running_n -= 1
    return r


@compiled
def begin_step(ledger: Ledger, w: int, computed: Ints, chunks: Ints, now_s: float) -> None:
    """A worker's engine begins a step: the prefill that it takes, and when it ends, by the engine's rules.

    For a ledger whose engines are elsewhere. `computed` and `chunks`, by request: tokens of a prefill that
    are done, and those in this step. Prefills in progress come first, then the queue, as budget and seats
    last; memory is the engine's affair.
    """
    k = ledger.coefficients[ledger.workers[w].variant]
    whole = k[speed.MODE] != speed.CHUNKED
    budget = int(k[speed.MAX_BATCHED]) - (0 if whole else ledger.workers[w].decoding)
    prefill, sum_sq = 0, 0.0
    i = 0
    while budget > 0:
        if i == ledger.workers[w].running_n:
            r = queue_first(ledger, w)
            if r == state.NONE or is_full(k, i, budget):
                break
            if is_too_long(k, prefill, to_compute(ledger, r), budget):
                break
            join(ledger, w, r)
            computed[r] = 0
        r = ledger.running[w, i]
        if ledger.requests[r].phase == state.PREFILLING:
            chunks[r] = chunk_of(k, to_compute(ledger, r) - computed[r], budget)
            sum_sq += squares(ledger.requests[r].cached + computed[r], chunks[r])
            prefill += chunks[r]
            budget -= chunks[r]
        i += 1
    ledger.workers[w].queued_tokens -= prefill
    ledger.workers[w].gains = 0 if whole and prefill > 0 else 1
    ledger.workers[w].boundary_s = now_s + lasts_s(ledger, w, prefill, sum_sq)


@compiled
def end_step(ledger: Ledger, w: int, computed: Ints, chunks: Ints, prefilled: int) -> None:
    """End the step, which computed these tokens of prompts; below 0: as many as planned."""
    more = prefilled
    for i in range(ledger.workers[w].running_n):
        r = ledger.running[w, i]
        if ledger.requests[r].phase == state.PREFILLING:
            done = min(chunks[r], more) if prefilled >= 0 else chunks[r]
            computed[r] += done
            ledger.workers[w].queued_tokens += chunks[r] - done
            chunks[r] = 0
            more -= done
    for i in range(ledger.workers[w].running_n):  # more than was thought: the first of them are further
        r = ledger.running[w, i]
        if more > 0 and ledger.requests[r].phase == state.PREFILLING:
            done = min(to_compute(ledger, r) - computed[r], more)
            computed[r] += done
            ledger.workers[w].queued_tokens -= done
            more -= done


@compiled
def begin_decoding(ledger: Ledger, w: int, r: int, tokens: int) -> None:
    """A queued request's prefill is done and it holds `tokens` output tokens: it decodes from here on."""
    ledger.workers[w].queued -= 1
    ledger.workers[w].queued_context -= ledger.requests[r].prompt + ledger.requests[r].key
    ledger.requests[r].phase = state.DECODING
    ledger.requests[r].key = tokens - ledger.workers[w].step
    ledger.workers[w].decoding += 1
    ledger.workers[w].context += ledger.requests[r].prompt + tokens
    expect_end(ledger, w, r)


@compiled
def stop_decoding(ledger: Ledger, w: int, r: int, phase: int) -> None:
    """A decoding request finished, was preempted or left: its tokens are no longer held here."""
    tokens = state.generated(ledger, r)
    ledger.requests[r].phase = phase
    ledger.requests[r].key = tokens
    ledger.workers[w].decoding -= 1
    ledger.workers[w].context -= ledger.requests[r].prompt + tokens


@compiled
def expect_end(ledger: Ledger, w: int, r: int) -> None:
    """Set when a decoding request should finish: by its prediction, or, once past it, conditionally.

    Algorithm 2's re-prediction, E[output | prompt, output > generated], taken when it is needed.
    """
    tokens = state.generated(ledger, r)
    total = ledger.requests[r].predicted
    if total <= tokens:
        total = int(misprediction.expected_still(ledger, r, tokens))
        ledger.requests[r].predicted = total
    ledger.requests[r].ends = ledger.workers[w].step + max(total - tokens, 1)
