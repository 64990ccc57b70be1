"""A worker's batch: what its steps may carry, how long they last, who is in it.

The rules of an engine's step that simulated engines and the ledger of a live fleet share. A live engine plans
by itself; `begin_step` says what its ledger should expect of the step that begins.
"""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Floats, Ints, Ledger
from controlplane.placement.lengths import expected_output


@compiled
def is_full(k: Floats, seats: int, budget: int) -> bool:
    """Whether a step admits no more: its budget or the batch's seats are used."""
    return budget <= 0 or seats >= k[speed.MAX_SEQS]


@compiled
def chunk_of(k: Floats, left: int, budget: int) -> int:
    """The tokens that a step takes of a prompt of which so many are left: all, where it does not chunk."""
    return min(left, budget) if k[speed.MODE] == speed.CHUNKED else left


@compiled
def is_too_long(k: Floats, prefill: int, chunk: int, budget: int) -> bool:
    """Whether a whole prompt is over the budget of a step; the first may be of any length."""
    return k[speed.MODE] != speed.CHUNKED and prefill > 0 and chunk > budget


@compiled
def squares(before: int, chunk: int) -> float:
    """What a chunk adds to the step's sum of squared lengths, behind so many computed tokens."""
    start, end = float(before), float(before + chunk)
    return end * end - start * start


@compiled
def lasts_s(led: Ledger, w: int, prefill: int, sum_sq: float) -> float:
    """Seconds of a worker's step that carries so much prefill; 0 for one that has nothing to do."""
    k = led.coefficients[led.workers[w].variant]
    if k[speed.MODE] != speed.CHUNKED and prefill > 0:
        return speed.prefill_s(k, prefill, sum_sq)
    if led.workers[w].running_n == 0:
        return 0.0
    return speed.mixed_s(k, prefill, led.workers[w].decoding, led.workers[w].context, sum_sq)


@compiled
def join(led: Ledger, w: int, r: int) -> None:
    """A waiting request is in the batch from now on, to be prefilled."""
    state.dequeue(led, w, r)
    led.requests[r].phase = state.PREFILLING
    led.running[w, led.workers[w].running_n] = r
    led.workers[w].running_n += 1


@compiled
def begin_step(led: Ledger, w: int, computed: Ints, chunks: Ints, now_s: float) -> None:
    """A worker's engine begins a step: the prefill that it takes, and when it ends, by the engine's rules.

    For a ledger whose engines are elsewhere. `computed` and `chunks`, by request: tokens of a prefill that
    are done, and those in this step. Prefills in progress come first, then the queue, as budget and seats
    last; memory is the engine's affair.
    """
    k = led.coefficients[led.workers[w].variant]
    whole = k[speed.MODE] != speed.CHUNKED
    budget = int(k[speed.MAX_BATCHED]) - (0 if whole else led.workers[w].decoding)
    prefill, sum_sq = 0, 0.0
    i = 0
    while budget > 0:
        if i == led.workers[w].running_n:
            r = state.queue_first(led, w)
            if r == state.NONE or is_full(k, i, budget):
                break
            if is_too_long(k, prefill, state.to_compute(led, r), budget):
                break
            join(led, w, r)
            computed[r] = 0
        r = led.running[w, i]
        if led.requests[r].phase == state.PREFILLING:
            chunks[r] = chunk_of(k, state.to_compute(led, r) - computed[r], budget)
            sum_sq += squares(led.requests[r].cached + computed[r], chunks[r])
            prefill += chunks[r]
            budget -= chunks[r]
        i += 1
    led.workers[w].queued_tokens -= prefill
    led.workers[w].gains = 0 if whole and prefill > 0 else 1
    led.workers[w].boundary_s = now_s + lasts_s(led, w, prefill, sum_sq)


@compiled
def end_step(led: Ledger, w: int, computed: Ints, chunks: Ints, prefilled: int) -> None:
    """The step is over and has computed so many tokens of prompts; less than 0: as many as was thought."""
    more = prefilled
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        if led.requests[r].phase == state.PREFILLING:
            done = min(chunks[r], more) if prefilled >= 0 else chunks[r]
            computed[r] += done
            led.workers[w].queued_tokens += chunks[r] - done
            chunks[r] = 0
            more -= done
    for i in range(led.workers[w].running_n):  # more than was thought: the first of them are further
        r = led.running[w, i]
        if more > 0 and led.requests[r].phase == state.PREFILLING:
            done = min(state.to_compute(led, r) - computed[r], more)
            computed[r] += done
            led.workers[w].queued_tokens -= done
            more -= done


@compiled
def begin_decoding(led: Ledger, w: int, r: int, tokens: int) -> None:
    """A queued request's prefill is done and it holds `tokens` output tokens: it decodes from here on."""
    led.workers[w].queued -= 1
    led.workers[w].queued_context -= led.requests[r].prompt + led.requests[r].key
    led.requests[r].phase = state.DECODING
    led.requests[r].key = tokens - led.workers[w].step
    led.workers[w].decoding += 1
    led.workers[w].context += led.requests[r].prompt + tokens
    expect_end(led, w, r)


@compiled
def stop_decoding(led: Ledger, w: int, r: int, phase: int) -> None:
    """A decoding request finished, was preempted or left: its tokens are no longer held here."""
    tokens = state.generated(led, r)
    led.requests[r].phase = phase
    led.requests[r].key = tokens
    led.workers[w].decoding -= 1
    led.workers[w].context -= led.requests[r].prompt + tokens


@compiled
def expect_end(led: Ledger, w: int, r: int) -> None:
    """Set when a decoding request should finish: by its prediction, or, once past it, conditionally.

    Algorithm 2's re-prediction, E[output | prompt, output > generated], taken when it is needed.
    """
    tokens = state.generated(led, r)
    total = led.requests[r].predicted
    if total <= tokens:
        total = expected_output(
            led.length_edges, led.length_grid, led.length_expected, led.requests[r].prompt, tokens
        )
        led.requests[r].predicted = total
    led.requests[r].ends = led.workers[w].step + max(total - tokens, 1)
