"""One simulated engine: admission, step boundaries, and the state that is known after each.

Between two events that matter (a request finishes, KV runs out, a request arrives that can be admitted) a
worker only repeats decode steps whose length grows by the same amount each time, so a whole run of n steps
lasts n·a + growth·n(n-1)/2 and is jumped at once. The result is that of going step by step (tests do).
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch
from controlplane.placement import ledger as state
from controlplane.placement.constraints import client_s
from controlplane.placement.ledger import Ledger
from dataplane.simulated import host_tier, kv
from dataplane.simulated.records import (
    DECODE_RUN,
    IDLE,
    LOADING,
    MIXED_STEP,
    PREFILL_STEP,
    WAKING,
    Engines,
)
from dataplane.simulated.step import is_chunked, plan


@compiled
def arrive(led: Ledger, eng: Engines, w: int, r: int, now_s: float, at_head: bool) -> None:
    """Put a request into a worker's queue; it is considered when the step in progress ends."""
    state.enqueue(led, w, r, at_head)
    led.runs[w].changed_s = now_s
    tokens = led.requests[r].prompt + led.requests[r].key
    led.workers[w].unreported += 1
    led.workers[w].unreported_context += tokens
    if (
        eng.workers[w].activity == DECODE_RUN
        and eng.workers[w].blocked > 0
        and state.queue_first(led, w) != r
    ):
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
        host_tier.note_end(eng.host, led.requests[r].worker, r)
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
    if tokens >= eng.requests[r].output or led.workers[w].role == state.PREFILL_ONLY:
        kv.give_back(led, eng, w, r)
        led.workers[w].queued -= 1
        led.workers[w].queued_context -= led.requests[r].prompt + led.requests[r].key
        led.requests[r].key = tokens
        led.requests[r].phase = state.DONE
        if tokens >= eng.requests[r].output:
            finish(led, eng, r, now_s)
        else:
            led.requests[r].phase = state.HELD
            eng.handover[eng.total[0].handover_n] = r
            eng.total[0].handover_n += 1
        return False
    batch.begin_decoding(led, w, r, tokens)
    return True


@compiled
def settle(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Book the step that ends at `now_s` for each admitted request, oldest first; those done leave."""
    kept = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        stays = True
        if led.requests[r].phase == state.PREFILLING:
            eng.requests[r].computed += eng.requests[r].chunk
            eng.requests[r].chunk = 0
            if eng.requests[r].computed >= led.requests[r].prompt + led.requests[r].key:
                stays = token_made(led, eng, w, r, now_s)
        elif led.requests[r].phase == state.DECODING and state.generated(led, r) >= eng.requests[r].output:
            kv.give_back(led, eng, w, r)
            batch.stop_decoding(led, w, r, state.DONE)
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
        kv.grow(led, eng, w, led.runs[w].steps)
        led.workers[w].step = led.runs[w].start_step + led.runs[w].steps
        led.workers[w].context = led.runs[w].start_context + led.runs[w].steps * led.workers[w].decoding
    elif activity == MIXED_STEP:
        led.workers[w].step += 1
        led.workers[w].context += led.workers[w].decoding
    settle(led, eng, w, eng.workers[w].next_s)
    eng.workers[w].busy_s += eng.workers[w].next_s - led.runs[w].start_s


@compiled
def begin_activity(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Decide at the boundary `now_s` what the worker does next, and begin it."""
    state.report(led, w)
    led.workers[w].unnoted = 0
    led.workers[w].unnoted_context = 0
    led.runs[w].start_s = now_s
    led.runs[w].changed_s = now_s
    led.runs[w].steps = 0
    eng.workers[w].blocked = 0
    steps = plan(led, eng, w, now_s)
    if eng.workers[w].prefill > 0:
        begin_prefill(led, eng, w, now_s)
    elif steps > 0:
        begin_run(led, eng, w, now_s, steps)
    else:
        rest(led, eng, w, now_s)
    if eng.workers[w].loading > 0:
        look_for_loads(led, eng, w, now_s)
    if led.workers[w].unreported > 0:
        led.workers[w].report_s = led.workers[w].boundary_s


@compiled
def begin_prefill(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Begin a step that carries prefill, by itself or beside the decoding requests."""
    k, worker, engine = led.coefficients[led.workers[w].variant], led.workers[w], eng.workers[w]
    step_s = batch.lasts_s(led, w, engine.prefill, engine.squares)
    engine.next_s = now_s + step_s * (1.0 + engine.slowdown)
    worker.boundary_s = engine.next_s
    engine.activity, worker.gains = PREFILL_STEP, 0
    if is_chunked(led, w):
        engine.activity, worker.gains = MIXED_STEP, 1
        engine.shared_s = k[speed.SHARED_TOKEN] * engine.prefill


@compiled
def begin_run(led: Ledger, eng: Engines, w: int, now_s: float, steps: int) -> None:
    """Begin a run of that many decode steps."""
    worker, run, engine = led.workers[w], led.runs[w], eng.workers[w]
    if state.queue_first(led, w) != state.NONE:
        engine.blocked = 1
    longer = 1.0 + engine.slowdown
    run.first_step_s = batch.lasts_s(led, w, 0, 0.0) * longer
    run.growth_s = led.coefficients[worker.variant][speed.PER_CONTEXT] * worker.decoding * longer
    run.steps = steps
    run.start_step = worker.step
    run.start_context = worker.context
    engine.activity = DECODE_RUN
    engine.grown = 1
    engine.next_s = now_s + speed.run_s(run.first_step_s, run.growth_s, steps)
    worker.boundary_s = now_s + run.first_step_s
    worker.gains = 1


@compiled
def rest(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Leave a worker idle."""
    eng.workers[w].activity = IDLE
    eng.workers[w].next_s = np.inf
    led.workers[w].boundary_s = now_s
    led.workers[w].gains = 0


@compiled
def look_for_loads(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """Let a worker decide anew when the next load that is under way is done."""
    next_s = host_tier.next_load_s(led, eng.host, w, now_s)
    if next_s < np.inf and eng.workers[w].activity == IDLE:
        eng.workers[w].activity = LOADING
        eng.workers[w].next_s = next_s
    elif next_s < np.inf and eng.workers[w].activity == DECODE_RUN:
        cut(led, eng, w, next_s)


@compiled
def cut(led: Ledger, eng: Engines, w: int, now_s: float) -> None:
    """End a worker's decode run at its first step boundary that is not before `now_s`."""
    run = led.runs[w]
    done = speed.steps_within(run.first_step_s, run.growth_s, now_s - run.start_s)
    at_s = run.start_s + speed.run_s(run.first_step_s, run.growth_s, done)
    if at_s < now_s or done == 0:
        done += 1
    if done < run.steps:
        run.steps = done
        eng.workers[w].next_s = run.start_s + speed.run_s(run.first_step_s, run.growth_s, done)


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
        eng.workers[rank].next_s = now_s + speed.run_s(longest_s, growth_s, steps)
        if eng.workers[rank].activity == DECODE_RUN:
            led.runs[rank].first_step_s, led.runs[rank].growth_s = longest_s, growth_s
            led.runs[rank].steps = steps
        if led.workers[rank].unreported > 0:
            led.workers[rank].report_s = led.workers[rank].boundary_s
