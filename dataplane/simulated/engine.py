"""One simulated engine: admission, step boundaries, and the state that is known after each.

Between two events that matter (a request finishes, KV runs out, a request arrives that can be admitted) a
worker only repeats decode steps whose length grows by the same amount each time, so a whole run of n steps
lasts n·a + growth·n(n-1)/2 and is jumped at once. The result is that of going step by step (tests do).
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import (
    CHUNKED,
    MODE,
    run_s,
)
from controlplane.placement.constraints import client_s
from controlplane.placement.ledger import (
    DECODE_ONLY,
    DECODING,
    DONE,
    HELD,
    PREFILL_ONLY,
    PREFILLING,
    Ledger,
    begin_decoding,
    enqueue,
    generated,
    queue_first,
    report,
    stop_decoding,
)
from dataplane.simulated.cached_step import begin_cached, grow
from dataplane.simulated.host_tier import note_end
from dataplane.simulated.next_step import (
    admit_decoding,
    begin_chunked,
    begin_prefill,
    begin_run,
    cut,
    free_kv,
)
from dataplane.simulated.records import (
    DECODE_RUN,
    IDLE,
    LOADING,
    MIXED_STEP,
    WAKING,
    Engines,
)
from dataplane.simulated.tiered_step import begin_tiered


@compiled
def arrive(led: Ledger, eng: Engines, w: int, r: int, now_s: float, at_head: bool) -> None:
    """Put a request into a worker's queue; it is considered when the step in progress ends."""
    enqueue(led, w, r, at_head)
    led.runs[w].changed_s = now_s
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
        if eng.workers[w].ranks > 1:
            join(led, eng, w, now_s)
    elif eng.workers[w].activity == LOADING:
        eng.workers[w].next_s = now_s
    elif eng.workers[w].activity == DECODE_RUN:
        eng.workers[w].blocked = 0
        cut_ranks(led, eng, w, now_s)


@compiled
def join(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """A rank that wakes begins when the step that the others are in ends."""
    for other in ranks_with(eng, w):
        if other != w and eng.workers[other].activity != IDLE:
            cut_ranks(led, eng, other, now_s)
            eng.workers[w].next_s = eng.workers[other].next_s
    led.workers[w].boundary_s = eng.workers[w].next_s


@compiled
def cut_ranks(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """End the decode run of a worker's ranks, which step together, at its first boundary from `now_s` on."""
    for rank in ranks_with(eng, w):
        if eng.workers[rank].activity == DECODE_RUN:
            cut(led, eng, rank, now_s)


@compiled
def ranks_with(eng: Engines, w: int) -> range:
    """The engines that step together with this one, itself among them."""
    first = eng.workers[w].first_rank
    return range(first, first + eng.workers[w].ranks)


@compiled
def finish(led: Ledger, eng: Engines, r: int, now_s: float) -> None:
    """A request has all its tokens; count it if it missed a target."""
    eng.requests[r].finish_s = now_s
    end(eng, r)
    if eng.host.chunks.tokens > 0:
        note_end(eng.host, led.requests[r].worker, r)
    late = led.requests[r].first_s + client_s(led, r) - led.requests[r].arrival_s > led.requests[r].ttft_s
    gaps = eng.requests[r].output - 1
    slow = gaps > 0 and (now_s - led.requests[r].first_s) / gaps > eng.requests[r].tpot_s
    if late or slow:
        count_miss(eng, r)


@compiled
def end(eng: Engines, r: int) -> None:
    """A request is over."""
    eng.ended[eng.total[0].ended_n] = r
    eng.total[0].ended_n += 1


@compiled
def count_miss(eng: Engines, r: int) -> None:
    """A request meets its targets no more; it is counted once."""
    if eng.requests[r].missed == 0:
        eng.requests[r].missed = 1
        eng.total[0].misses += eng.requests[r].weight


@compiled
def token_made(led: Ledger, eng: Engines, w: int, r: int, now_s: float) -> bool:
    """A prefill ended at `now_s` and gave its request a token; whether the request goes on to decode."""
    tokens = led.requests[r].key + 1
    if np.isnan(led.requests[r].first_s):
        led.requests[r].first_s = now_s
    if tokens >= eng.requests[r].output or led.workers[w].role == PREFILL_ONLY:
        free_kv(led, eng, w, r)
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
def settle(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Book the step that ends at `now_s` for each admitted request, oldest first; those done leave."""
    kept = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        stays = True
        if led.requests[r].phase == PREFILLING:
            eng.requests[r].computed += eng.requests[r].chunk
            eng.requests[r].chunk = 0
            if eng.requests[r].computed >= led.requests[r].prompt + led.requests[r].key:
                stays = token_made(led, eng, w, r, now_s)
        elif led.requests[r].phase == DECODING and generated(led, r) >= eng.requests[r].output:
            free_kv(led, eng, w, r)
            stop_decoding(led, w, r, DONE)
            finish(led, eng, r, now_s)
            stays = False
        if stays:
            led.running[w, kept] = r
            kept += 1
    led.workers[w].running_n = kept


@compiled
def end_activity(led: Ledger, eng: Engines, w: int) -> None:
    """Book what the activity that ends now has done."""
    activity = eng.workers[w].activity
    if activity in (WAKING, LOADING):
        return
    if activity == DECODE_RUN:
        if led.caches.tokens > 0:
            grow(led, eng, w, led.runs[w].steps)
        led.workers[w].step = led.runs[w].start_step + led.runs[w].steps
        led.workers[w].context = led.runs[w].start_context + led.runs[w].steps * led.workers[w].decoding
    elif activity == MIXED_STEP:
        led.workers[w].step += 1
        led.workers[w].context += led.workers[w].decoding
    settle(led, eng, w, eng.workers[w].next_s)
    eng.workers[w].busy_s += eng.workers[w].next_s - led.runs[w].start_s


@compiled
def begin_activity(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Decide at the boundary `now_s` what the worker does next, as its mode has it."""
    k = led.coefficients[led.workers[w].variant]
    report(led, w)
    led.workers[w].unnoted = 0
    led.workers[w].unnoted_context = 0
    led.runs[w].start_s = now_s
    led.runs[w].changed_s = now_s
    led.runs[w].steps = 0
    eng.workers[w].blocked = 0
    if eng.host.chunks.tokens > 0:
        begin_tiered(led, eng, w, now_s)
    elif led.caches.tokens > 0:
        begin_cached(led, eng, w, now_s)
    elif led.workers[w].role == DECODE_ONLY:
        admit_decoding(led, eng, w)
        begin_run(led, eng, w, now_s)
    elif k[MODE] == CHUNKED:
        begin_chunked(led, eng, w, now_s)
    elif not begin_prefill(led, eng, w, now_s):
        begin_run(led, eng, w, now_s)
    if led.workers[w].unreported > 0:
        led.workers[w].report_s = led.workers[w].boundary_s


@compiled
def step_together(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Make the ranks whose steps begin now step together: in steps of the slowest, and of what they share.

    A run of decode steps goes on while the same rank is the slowest.
    """
    longest_s, growth_s, shared_s, steps = 0.0, 0.0, 0.0, 1 << 60
    for rank in ranks_with(eng, w):
        if eng.workers[rank].activity == IDLE:
            continue
        own_s, grows_s = led.runs[rank].first_step_s, led.runs[rank].growth_s
        if eng.workers[rank].activity == DECODE_RUN:
            steps = min(steps, led.runs[rank].steps)
        else:
            own_s, grows_s = eng.workers[rank].next_s - now_s - eng.workers[rank].shared_s, 0.0
            shared_s += eng.workers[rank].shared_s
            steps = 1
        if own_s > longest_s or (own_s == longest_s and grows_s > growth_s):
            longest_s, growth_s = own_s, grows_s
    for rank in ranks_with(eng, w):
        if steps > 1 and eng.workers[rank].activity == DECODE_RUN and led.runs[rank].growth_s > growth_s:
            behind_s = longest_s - led.runs[rank].first_step_s
            steps = min(steps, 1 + int(behind_s / (led.runs[rank].growth_s - growth_s)))
    longest_s += shared_s
    for rank in ranks_with(eng, w):
        if eng.workers[rank].activity == IDLE:
            continue
        led.workers[rank].boundary_s = now_s + longest_s
        eng.workers[rank].next_s = now_s + run_s(longest_s, growth_s, steps)
        if eng.workers[rank].activity == DECODE_RUN:
            led.runs[rank].first_step_s, led.runs[rank].growth_s = longest_s, growth_s
            led.runs[rank].steps = steps
        if led.workers[rank].unreported > 0:
            led.workers[rank].report_s = led.workers[rank].boundary_s
