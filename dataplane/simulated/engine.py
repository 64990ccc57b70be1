"""One simulated engine: what happens at a step boundary, and how far it may jump to the next.

Between two things that matter (a request finishes, KV runs out, somebody arrives who can be admitted) a
worker only repeats decode steps whose length grows by the same amount each time, so a whole run of n steps
lasts n·a + growth·n(n-1)/2 and is jumped at once. The result is that of going step by step (tests do).

The rules of each mode are those of docs/engine.md, which follows vLLM:
  prefill-first  a step is a prefill of all that can be admitted, else a decode step
  chunked        every step carries one token for each decoding request, then prefill chunks up to a budget
  split          a prefill worker only prefills; a decode worker only decodes
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import (
    BLOCK_TOKENS,
    CHUNKED,
    KV_BLOCKS,
    MAX_BATCHED,
    MAX_SEQS,
    MODE,
    PER_CONTEXT,
    decode_base_s,
    mixed_s,
    prefill_s,
    run_s,
    steps_within,
)
from controlplane.placement.ledger import (
    DECODE_ONLY,
    DECODING,
    DONE,
    HELD,
    NONE,
    PREFILL_ONLY,
    PREFILLING,
    QUEUED,
    Ints,
    Ledger,
    Records,
    begin_decoding,
    dequeue,
    enqueue,
    generated,
    queue_first,
    stop_decoding,
)

IDLE, WAKING, PREFILL_STEP, DECODE_RUN, MIXED_STEP = 0, 1, 2, 3, 4


ENGINE = np.dtype(
    [
        ("activity", np.int64),
        ("next_s", np.float64),  # when the activity ends; inf for an idle worker
        ("start_s", np.float64),  # when it began
        ("first_step_s", np.float64),  # of a decode run: its first step,
        ("growth_s", np.float64),  # what each step adds to the next,
        ("run_steps", np.int64),  # its planned steps,
        ("start_step", np.int64),  # the worker's step count
        ("start_context", np.int64),  # and context when it began
        ("blocked", np.int64),  # 1 while the head of the queue is known not to fit
        ("busy_s", np.float64),
        ("reserved_blocks", np.int64),  # KV and
        ("reserved_seats", np.int64),  # places in the batch, promised to requests on their way here
        ("slowdown", np.float64),  # by what share steps are longer: KV is being copied
    ],
    align=True,
)
JOB = np.dtype(
    [
        ("output", np.int64),  # how long it really is
        ("computed", np.int64),  # prefill tokens done
        ("chunk", np.int64),  # prefill tokens in the step in progress
        ("finish_s", np.float64),
        ("preemptions", np.int64),
        ("migrations", np.int64),
        ("missed", np.int64),  # 1 once it is known that a target is not met
    ],
    align=True,
)
TOTAL = np.dtype(
    [
        ("misses", np.int64),  # requests known not to meet their targets
        ("handover_n", np.int64),  # entries of `handover`
    ],
    align=True,
)


class Engines(NamedTuple):
    """What the simulated engines know beyond the ledger."""

    workers: Records  # [workers] of ENGINE
    requests: Records  # [requests] of JOB
    total: Records  # [1] of TOTAL
    handover: Ints  # [requests] prefilled elsewhere than they will decode, waiting to be placed


def new_engines(workers: int, output: Ints) -> Engines:
    """Idle engines, and `output` as the requests' true lengths."""
    engines = np.zeros(workers, ENGINE)
    engines["next_s"] = np.inf
    jobs = np.zeros(len(output), JOB)
    jobs["output"] = output
    jobs["finish_s"] = np.nan
    return Engines(engines, jobs, np.zeros(1, TOTAL), np.zeros(len(output), np.int64))


@compiled
def view(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Bring the ledger's columns of a worker in a decode run up to the steps that ended by `now_s`."""
    if now_s >= led.workers[w].report_s:
        report(led, w)
    if eng.workers[w].activity != DECODE_RUN or now_s < led.workers[w].boundary_s:
        return  # no step ended since
    done = steps_within(eng.workers[w].first_step_s, eng.workers[w].growth_s, now_s - eng.workers[w].start_s)
    done = min(done, eng.workers[w].run_steps)
    led.workers[w].step = eng.workers[w].start_step + done
    led.workers[w].context = eng.workers[w].start_context + done * led.workers[w].decoding
    led.workers[w].boundary_s = eng.workers[w].start_s + run_s(
        eng.workers[w].first_step_s, eng.workers[w].growth_s, done + 1
    )


@compiled
def report(led: Ledger, w: int) -> None:
    """Tell dispatchers of the load that was noted as the step that ends now began."""
    led.workers[w].unreported = led.workers[w].unnoted
    led.workers[w].unreported_context = led.workers[w].unnoted_context
    led.workers[w].report_s = np.inf


@compiled
def arrive(led: Ledger, eng: Engines, w: int, r: int, now_s: float, at_head: bool) -> None:
    """Put a request into a worker's queue; it is looked at when the step in progress ends."""
    enqueue(led, w, r, at_head)
    tokens = led.requests[r].prompt + led.requests[r].key
    led.workers[w].unreported += 1
    led.workers[w].unreported_context += tokens
    if eng.workers[w].activity == DECODE_RUN and eng.workers[w].blocked > 0 and queue_first(led, w) != r:
        led.workers[w].report_s = led.workers[w].boundary_s  # a short step early: the run goes on unseen
        return
    led.workers[w].unnoted += 1
    led.workers[w].unnoted_context += tokens
    if eng.workers[w].activity == IDLE:
        eng.workers[w].activity = WAKING
        eng.workers[w].next_s = now_s
    elif eng.workers[w].activity == DECODE_RUN:
        eng.workers[w].blocked = 0
        cut(led, eng, w, now_s)


@compiled
def cut(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """End a worker's decode run at its first step boundary that is not before `now_s`."""
    done = steps_within(eng.workers[w].first_step_s, eng.workers[w].growth_s, now_s - eng.workers[w].start_s)
    at_s = eng.workers[w].start_s + run_s(eng.workers[w].first_step_s, eng.workers[w].growth_s, done)
    if at_s < now_s or done == 0:
        done += 1
    if done < eng.workers[w].run_steps:
        eng.workers[w].run_steps = done
        eng.workers[w].next_s = eng.workers[w].start_s + run_s(
            eng.workers[w].first_step_s, eng.workers[w].growth_s, done
        )


@compiled
def blocks_of(tokens: int, block: int) -> int:
    """KV blocks that hold `tokens`."""
    return (tokens + block - 1) // block


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


@compiled
def finish(led: Ledger, eng: Engines, r: int, now_s: float) -> None:
    """A request has all its tokens; count it if it missed a target."""
    eng.requests[r].finish_s = now_s
    late = led.requests[r].first_s - led.requests[r].arrival_s > led.requests[r].ttft_s
    gaps = eng.requests[r].output - 1
    slow = gaps > 0 and (now_s - led.requests[r].first_s) / gaps > led.requests[r].tpot_s
    if late or slow:
        count_miss(eng, r)


@compiled
def count_miss(eng: Engines, r: int) -> None:
    """A request meets its targets no more; it is counted once."""
    if eng.requests[r].missed == 0:
        eng.requests[r].missed = 1
        eng.total[0].misses += 1


@compiled
def token_made(led: Ledger, eng: Engines, w: int, r: int, now_s: float) -> bool:
    """A prefill ended at `now_s` and gave its request a token; whether the request goes on to decode."""
    tokens = led.requests[r].key + 1
    if np.isnan(led.requests[r].first_s):
        led.requests[r].first_s = now_s
    if tokens >= eng.requests[r].output or led.workers[w].role == PREFILL_ONLY:
        led.workers[w].queued -= 1
        led.workers[w].queued_context -= led.requests[r].prompt + led.requests[r].key
        led.requests[r].key = tokens
        led.requests[r].phase = DONE
        if tokens >= eng.requests[r].output:
            finish(led, eng, r, now_s)
        else:
            led.requests[r].phase = HELD
            eng.handover[eng.total[0].handover_n] = r
            eng.total[0].handover_n += 1
        return False
    begin_decoding(led, w, r, tokens)
    return True


@compiled
def finish_decoded(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Let every decoding request that has all its tokens leave at `now_s`."""
    kept = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        if led.requests[r].phase == DECODING and generated(led, r) >= eng.requests[r].output:
            stop_decoding(led, w, r, DONE)
            finish(led, eng, r, now_s)
        else:
            led.running[w, kept] = r
            kept += 1
    led.workers[w].running_n = kept


@compiled
def end_activity(led: Ledger, eng: Engines, w: int) -> None:
    """Book what the activity that ends now has done."""
    now_s = eng.workers[w].next_s
    activity = eng.workers[w].activity
    if activity == DECODE_RUN:
        led.workers[w].step = eng.workers[w].start_step + eng.workers[w].run_steps
        led.workers[w].context = (
            eng.workers[w].start_context + eng.workers[w].run_steps * led.workers[w].decoding
        )
        finish_decoded(led, eng, w, now_s)
    elif activity == MIXED_STEP:
        led.workers[w].step += 1
        led.workers[w].context += led.workers[w].decoding
    if activity in (PREFILL_STEP, MIXED_STEP):
        kept = 0
        for i in range(led.workers[w].running_n):
            r = led.running[w, i]
            stays = True
            if led.requests[r].phase == PREFILLING:
                eng.requests[r].computed += eng.requests[r].chunk
                eng.requests[r].chunk = 0
                if eng.requests[r].computed >= led.requests[r].prompt + led.requests[r].key:
                    stays = token_made(led, eng, w, r, now_s)
            if stays:
                led.running[w, kept] = r
                kept += 1
        led.workers[w].running_n = kept
    if activity == MIXED_STEP:
        finish_decoded(led, eng, w, now_s)
    if activity != WAKING:
        eng.workers[w].busy_s += now_s - eng.workers[w].start_s


@compiled
def begin_activity(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Decide at the boundary `now_s` what the worker does next, as its mode has it."""
    k = led.coefficients[led.workers[w].variant]
    report(led, w)
    led.workers[w].unnoted = 0
    led.workers[w].unnoted_context = 0
    eng.workers[w].start_s = now_s
    eng.workers[w].blocked = 0
    if led.workers[w].role == DECODE_ONLY:
        admit_decoding(led, eng, w)
        begin_run(led, eng, w, now_s)
    elif k[MODE] == CHUNKED:
        begin_chunked(led, eng, w, now_s)
    elif not begin_prefill(led, eng, w, now_s):
        begin_run(led, eng, w, now_s)
    if led.workers[w].unreported > 0:
        led.workers[w].report_s = led.workers[w].boundary_s


@compiled
def begin_prefill(led: Ledger, eng: Engines, w: int, now_s: float) -> bool:
    """Begin a prefill step of all waiting requests that can be admitted; False when none can."""
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    running = led.workers[w].running_n
    used = 0
    for i in range(running):
        r = led.running[w, i]
        used += blocks_of(led.requests[r].prompt + generated(led, r), block)
    seats = running + eng.workers[w].reserved_seats
    used += eng.workers[w].reserved_blocks
    taken, tokens, squares = 0, 0, 0.0
    while True:
        r = queue_first(led, w)
        if r == NONE:
            break
        length = led.requests[r].prompt + led.requests[r].key
        need = blocks_of(length + 1, block)
        if seats + taken > 0 and (
            seats + taken + 1 > k[MAX_SEQS] or used + need + running + taken > k[KV_BLOCKS]
        ):
            break
        if taken > 0 and tokens + length > k[MAX_BATCHED]:
            break
        dequeue(led, w, r)
        led.requests[r].phase = PREFILLING
        led.running[w, led.workers[w].running_n] = r
        led.workers[w].running_n += 1
        led.workers[w].queued_tokens -= length
        eng.requests[r].computed = 0
        eng.requests[r].chunk = length
        used += need
        taken += 1
        tokens += length
        squares += float(length) * float(length)
    if taken == 0:
        return False
    eng.workers[w].activity = PREFILL_STEP
    eng.workers[w].next_s = now_s + prefill_s(k, tokens, squares) * (1.0 + eng.workers[w].slowdown)
    led.workers[w].boundary_s = eng.workers[w].next_s
    led.workers[w].gains = 0
    return True


@compiled
def admit_decoding(led: Ledger, eng: Engines, w: int) -> None:
    """A decode worker takes requests whose KV has arrived, in order, while batch and KV allow."""
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    used = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        used += blocks_of(led.requests[r].prompt + generated(led, r), block)
    while True:
        r = queue_first(led, w)
        if r == NONE:
            return
        running = led.workers[w].running_n
        need = blocks_of(led.requests[r].prompt + led.requests[r].key, block)
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
    while led.workers[w].running_n > 1 and blocks_after(led, w, 1, block) > capacity:
        preempt_newest(led, eng, w)
        preempted = True
    if led.workers[w].running_n == 0:
        eng.workers[w].activity = IDLE
        eng.workers[w].next_s = np.inf
        led.workers[w].boundary_s = now_s
        led.workers[w].gains = 0
        return
    steps = eng.requests[led.running[w, 0]].output
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        steps = min(steps, eng.requests[r].output - generated(led, r))
    if preempted:
        steps = 1  # what it freed may let somebody in at the next boundary
    elif led.workers[w].running_n > 1:
        steps = steps_with_room(led, w, steps, block, capacity)
    if queue_first(led, w) != NONE:
        eng.workers[w].blocked = 1
    sequences = led.workers[w].decoding
    longer = 1.0 + eng.workers[w].slowdown
    first_step_s = decode_base_s(k, sequences) + k[PER_CONTEXT] * led.workers[w].context
    eng.workers[w].activity = DECODE_RUN
    eng.workers[w].first_step_s = first_step_s * longer
    eng.workers[w].growth_s = k[PER_CONTEXT] * sequences * longer
    eng.workers[w].run_steps = steps
    eng.workers[w].start_step = led.workers[w].step
    eng.workers[w].start_context = led.workers[w].context
    eng.workers[w].next_s = now_s + run_s(eng.workers[w].first_step_s, eng.workers[w].growth_s, steps)
    led.workers[w].boundary_s = now_s + eng.workers[w].first_step_s
    led.workers[w].gains = 1


@compiled
def blocks_after(led: Ledger, w: int, steps: int, block: int) -> int:
    """KV blocks the admitted requests hold once each has `steps` more tokens."""
    used = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        used += blocks_of(led.requests[r].prompt + generated(led, r) + steps, block)
    return used


@compiled
def steps_with_room(led: Ledger, w: int, steps: int, block: int, capacity: int) -> int:
    """How many of `steps` decode steps KV has room for; the first is known to fit."""
    count = led.workers[w].running_n
    if led.workers[w].context + count * (steps + block - 1) <= capacity * block:
        return steps  # even with every last block nearly empty
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_after(led, w, middle, block) <= capacity:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def begin_chunked(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Begin a chunked step: a token for each decoding request, then prefill up to the budget.

    With no prefill to carry it is a run of decode steps instead.
    """
    k = led.coefficients[led.workers[w].variant]
    block = int(k[BLOCK_TOKENS])
    capacity = int(k[KV_BLOCKS]) - eng.workers[w].reserved_blocks
    budget = int(k[MAX_BATCHED]) - led.workers[w].decoding
    preempted = False
    while True:
        used, chunk = chunked_need(led, eng, w, budget, block)
        if used <= capacity or led.workers[w].running_n <= 1:
            break
        newest = led.running[w, led.workers[w].running_n - 1]
        if led.requests[newest].phase == DECODING:
            budget += 1
        preempt_newest(led, eng, w)
        preempted = True
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
        need = blocks_of(length + 1 if chunk == length else chunk, block)
        seats = led.workers[w].running_n + eng.workers[w].reserved_seats
        if seats > 0 and (seats >= k[MAX_SEQS] or used + need > capacity):
            break
        dequeue(led, w, r)
        led.requests[r].phase = PREFILLING
        led.running[w, led.workers[w].running_n] = r
        led.workers[w].running_n += 1
        eng.requests[r].computed = 0
        more, square = take_chunk(led, eng, w, r, chunk)
        prefill += more
        squares += square
        used += need
        budget -= chunk
    if prefill == 0:
        begin_run(led, eng, w, now_s)
        if preempted and eng.workers[w].activity == DECODE_RUN:
            eng.workers[w].run_steps = 1
            eng.workers[w].next_s = led.workers[w].boundary_s
        return
    eng.workers[w].activity = MIXED_STEP
    step_s = mixed_s(k, prefill, led.workers[w].decoding, led.workers[w].context, squares)
    eng.workers[w].next_s = now_s + step_s * (1.0 + eng.workers[w].slowdown)
    led.workers[w].boundary_s = eng.workers[w].next_s
    led.workers[w].gains = 1


@compiled
def chunked_need(led: Ledger, eng: Engines, w: int, budget: int, block: int) -> tuple[int, int]:
    """KV blocks that the admitted requests need for their next step, and the chunk of the one in prefill."""
    used, chunk = 0, 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        if led.requests[r].phase == DECODING:
            used += blocks_of(led.requests[r].prompt + generated(led, r) + 1, block)
        else:
            length = led.requests[r].prompt + led.requests[r].key
            chunk = min(length - eng.requests[r].computed, budget)
            after = eng.requests[r].computed + chunk
            used += blocks_of(length + 1 if after == length else after, block)
    return used, chunk


@compiled
def take_chunk(led: Ledger, eng: Engines, w: int, r: int, chunk: int) -> tuple[int, float]:
    """Put `chunk` tokens of a prefill into the step; return them and the growth of its squared length."""
    before = float(eng.requests[r].computed)
    eng.requests[r].chunk = chunk
    led.workers[w].queued_tokens -= chunk
    return chunk, (before + chunk) * (before + chunk) - before * before
