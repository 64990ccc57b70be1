"""One simulated engine: admission, step boundaries, and the state that is known after each.

Three events matter: a request finishes, KV runs out, or a request arrives that can be admitted. Between two
of them a worker only repeats decode steps, whose length grows by the same amount each time. So a run of n
steps lasts n·a + growth·n(n-1)/2 and is jumped at once. The result is that of going step by step (tests do).
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch, misprediction
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Ledger
from controlplane.placement.outlook import client_s
from dataplane.simulated import host_tier, kv
from dataplane.simulated.records import DECODE_RUN, IDLE, LOADING, MIXED_STEP, PREFILL_STEP, WAKING, Engines
from dataplane.simulated.step import MANY, budget_left, first_prefilling, is_chunked, plan


@compiled
def arrive(ledger: Ledger, engines: Engines, w: int, r: int, now_s: float, at_head: bool) -> None:
    """Put a request into a worker's queue; it is considered when the step in progress ends."""
    batch.enqueue(ledger, w, r, at_head)
    engines.requests[r].placed_s = now_s
    ledger.runs[w].changed_s = now_s
    engine = engines.workers[w]
    if engine.activity == DECODE_RUN and engine.blocked > 0 and batch.queue_first(ledger, w) != r:
        return
    if engine.activity == IDLE:
        engine.activity = WAKING
        engine.next_s = now_s
        if engine.ranks > 1:
            join(ledger, engines, w, now_s)
    elif engine.activity == LOADING:
        engine.next_s = now_s
    elif engine.activity == DECODE_RUN:
        engine.blocked = 0
        cut_ranks(ledger, engines, w, now_s)


@compiled
def join(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """A rank that wakes begins when the step that the others are in ends."""
    for other in ranks_with(engines, w):
        if other != w and engines.workers[other].activity != IDLE:
            cut_ranks(ledger, engines, other, now_s)
            engines.workers[w].next_s = engines.workers[other].next_s
    ledger.workers[w].boundary_s = engines.workers[w].next_s


@compiled
def cut_ranks(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """End the decode run of a worker's ranks, which step together, at its first boundary from `now_s` on."""
    for rank in ranks_with(engines, w):
        if engines.workers[rank].activity == DECODE_RUN:
            cut(ledger, engines, rank, now_s)


@compiled
def ranks_with(engines: Engines, w: int) -> range:
    """The engines that step together with this one, itself among them."""
    first = engines.workers[w].first_rank
    return range(first, first + engines.workers[w].ranks)


@compiled
def finish(ledger: Ledger, engines: Engines, r: int, now_s: float) -> None:
    """A request has all its tokens; count it if it missed a target."""
    engines.requests[r].finish_s = now_s
    end(engines, r)
    misprediction.note_end(ledger, r, engines.requests[r].output)
    if engines.host.chunks.tokens > 0:
        host_tier.note_end(engines.host, ledger.requests[r].worker, r)
    request, gaps = ledger.requests[r], engines.requests[r].output - 1
    late = request.first_s + client_s(ledger, r) - request.arrival_s > request.ttft_s
    slow = gaps > 0 and (now_s - request.first_s) / gaps > engines.requests[r].tpot_s
    if late or slow:
        count_miss(engines, r)


@compiled
def end(engines: Engines, r: int) -> None:
    """A request is over."""
    engines.ended[engines.total[0].ended_n] = r
    engines.total[0].ended_n += 1


@compiled
def count_miss(engines: Engines, r: int) -> None:
    """A request meets its targets no more; it is counted once."""
    if engines.requests[r].missed == 0:
        engines.requests[r].missed = 1
        engines.total[0].misses += engines.requests[r].weight


@compiled
def token_made(ledger: Ledger, engines: Engines, w: int, r: int, now_s: float) -> bool:
    """A prefill ended at `now_s` and gave its request a token; whether the request goes on to decode."""
    tokens = ledger.requests[r].key + 1
    if np.isnan(ledger.requests[r].first_s):
        ledger.requests[r].first_s = now_s
    if tokens >= engines.requests[r].output or ledger.workers[w].role == state.PREFILL_ONLY:
        kv.give_back(ledger, engines, w, r)
        ledger.workers[w].queued -= 1
        ledger.workers[w].queued_context -= ledger.requests[r].prompt + ledger.requests[r].key
        ledger.requests[r].key = tokens
        ledger.requests[r].phase = state.DONE
        if tokens >= engines.requests[r].output:
            finish(ledger, engines, r, now_s)
        else:
            ledger.requests[r].phase = state.HELD
            engines.handover[engines.total[0].handover_n] = r
            engines.total[0].handover_n += 1
        return False
    batch.begin_decoding(ledger, w, r, tokens)
    return True


@compiled
def settle(ledger: Ledger, engines: Engines, w: int, now_s: float, steps: int) -> None:
    """Book the steps that end at `now_s` for each admitted request, oldest first; those done leave.

    While none that decodes has all its tokens, there are only those to look at whose prefill goes on.
    """
    engine, first = engines.workers[w], 0
    first_end = MANY
    if steps < engine.soonest:
        first, first_end = first_prefilling(ledger, w), engine.first_end
    kept = first
    for i in range(first, ledger.workers[w].running_n):
        r = ledger.running[w, i]
        stays = True
        if ledger.requests[r].phase == state.PREFILLING:
            engines.requests[r].computed += engines.requests[r].chunk
            engines.requests[r].chunk = 0
            if engines.requests[r].computed >= ledger.requests[r].prompt + ledger.requests[r].key:
                stays = token_made(ledger, engines, w, r, now_s)
        elif (
            ledger.requests[r].phase == state.DECODING
            and state.generated(ledger, r) >= engines.requests[r].output
        ):
            kv.give_back(ledger, engines, w, r)
            batch.stop_decoding(ledger, w, r, state.DONE)
            finish(ledger, engines, r, now_s)
            stays = False
        if stays:
            ledger.running[w, kept] = r
            kept += 1
            if ledger.requests[r].phase == state.DECODING:
                first_end = min(first_end, engines.requests[r].output - ledger.requests[r].key)
    ledger.workers[w].running_n = kept
    engine.first_end = first_end


@compiled
def end_activity(ledger: Ledger, engines: Engines, w: int) -> None:
    """Book what the activity that ends now has done."""
    worker, run, engine = ledger.workers[w], ledger.runs[w], engines.workers[w]
    if engine.activity in (WAKING, LOADING):
        return
    steps = 0
    if engine.activity == DECODE_RUN:
        steps = run.steps
        kv.grow(ledger, engines, w, run.steps)
        worker.step = run.start_step + run.steps
        worker.context = run.start_context + run.steps * worker.decoding
    elif engine.activity == MIXED_STEP:
        steps = 1
        worker.step += 1
        worker.context += worker.decoding
    settle(ledger, engines, w, engine.next_s, steps)
    engine.busy_s += engine.next_s - run.start_s


@compiled
def begin_activity(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """Decide at the boundary `now_s` what the worker does next, and begin it."""
    engines.workers[w].planned_s = ledger.runs[w].start_s
    ledger.runs[w].start_s = now_s
    ledger.runs[w].changed_s = now_s
    ledger.runs[w].steps = 0
    engines.workers[w].blocked = 0
    steps = plan(ledger, engines, w, now_s)
    engines.workers[w].spent = engines.workers[w].prefill > 0 and budget_left(ledger, engines, w) <= 0
    if engines.workers[w].prefill > 0:
        begin_prefill(ledger, engines, w, now_s)
    elif steps > 0:
        begin_run(ledger, engines, w, now_s, steps)
    else:
        rest(ledger, engines, w, now_s)
    if engines.workers[w].loading > 0:
        look_for_loads(ledger, engines, w, now_s)


@compiled
def begin_prefill(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """Begin a step that carries prefill, by itself or together with the decoding requests."""
    k, worker, engine = ledger.coefficients[ledger.workers[w].variant], ledger.workers[w], engines.workers[w]
    step_s = batch.lasts_s(ledger, w, engine.prefill, engine.squares)
    engine.next_s = now_s + step_s * (1.0 + engine.slowdown)
    worker.boundary_s = engine.next_s
    engine.activity, worker.gains = PREFILL_STEP, 0
    if is_chunked(ledger, w):
        engine.activity, worker.gains = MIXED_STEP, 1
        engine.shared_s = k[speed.SHARED_TOKEN] * engine.prefill


@compiled
def begin_run(ledger: Ledger, engines: Engines, w: int, now_s: float, steps: int) -> None:
    """Begin a run of that many decode steps."""
    worker, run, engine = ledger.workers[w], ledger.runs[w], engines.workers[w]
    if batch.queue_first(ledger, w) != state.NONE:
        engine.blocked = 1
    longer = 1.0 + engine.slowdown
    run.first_step_s = batch.lasts_s(ledger, w, 0, 0.0) * longer
    run.growth_s = ledger.coefficients[worker.variant][speed.PER_CONTEXT] * worker.decoding * longer
    run.steps = steps
    run.start_step = worker.step
    run.start_context = worker.context
    engine.activity = DECODE_RUN
    engine.grown = 1
    engine.next_s = now_s + speed.run_s(run.first_step_s, run.growth_s, steps)
    worker.boundary_s = now_s + run.first_step_s
    worker.gains = 1


@compiled
def rest(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """Leave a worker idle."""
    engines.workers[w].activity = IDLE
    engines.workers[w].next_s = np.inf
    ledger.workers[w].boundary_s = now_s
    ledger.workers[w].gains = 0


@compiled
def look_for_loads(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """Let a worker decide again when the next load that is under way is done."""
    next_s = host_tier.next_load_s(ledger, engines.host, w, now_s)
    if next_s < np.inf and engines.workers[w].activity == IDLE:
        engines.workers[w].activity = LOADING
        engines.workers[w].next_s = next_s
    elif next_s < np.inf and engines.workers[w].activity == DECODE_RUN:
        cut(ledger, engines, w, next_s)


@compiled
def cut(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """End a worker's decode run at its first step boundary that is not before `now_s`."""
    run = ledger.runs[w]
    done = speed.steps_within(run.first_step_s, run.growth_s, now_s - run.start_s)
    at_s = run.start_s + speed.run_s(run.first_step_s, run.growth_s, done)
    if at_s < now_s or done == 0:
        done += 1
    if done < run.steps:
        run.steps = done
        engines.workers[w].next_s = run.start_s + speed.run_s(run.first_step_s, run.growth_s, done)


@compiled
def step_together(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """Make the ranks whose steps begin now step together: in steps of the slowest, and of what they share.

    A run of decode steps goes on while the same rank is the slowest.
    """
    longest_s, growth_s, shared_s, steps = 0.0, 0.0, 0.0, 1 << 60
    for rank in ranks_with(engines, w):
        if engines.workers[rank].activity == IDLE:
            continue
        own_s, grows_s = ledger.runs[rank].first_step_s, ledger.runs[rank].growth_s
        if engines.workers[rank].activity == DECODE_RUN:
            steps = min(steps, ledger.runs[rank].steps)
        else:
            own_s, grows_s = engines.workers[rank].next_s - now_s - engines.workers[rank].shared_s, 0.0
            shared_s += engines.workers[rank].shared_s
            steps = 1
        if own_s > longest_s or (own_s == longest_s and grows_s > growth_s):
            longest_s, growth_s = own_s, grows_s
    for rank in ranks_with(engines, w):
        run = ledger.runs[rank]
        if steps > 1 and engines.workers[rank].activity == DECODE_RUN and run.growth_s > growth_s:
            steps = min(steps, 1 + int((longest_s - run.first_step_s) / (run.growth_s - growth_s)))
    longest_s += shared_s
    for rank in ranks_with(engines, w):
        if engines.workers[rank].activity == IDLE:
            continue
        ledger.workers[rank].boundary_s = now_s + longest_s
        engines.workers[rank].next_s = now_s + speed.run_s(longest_s, growth_s, steps)
        if engines.workers[rank].activity == DECODE_RUN:
            ledger.runs[rank].first_step_s, ledger.runs[rank].growth_s = longest_s, growth_s
            ledger.runs[rank].steps = steps
