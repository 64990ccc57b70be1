"""The next step of a simulated engine: who goes on, who comes back from loads, who is admitted.

Each running request, oldest first, takes the blocks that its tokens need, the newest being preempted where
there are none. Then come requests whose KV has been loaded from host memory, then those that wait, in order,
while budget, seats and memory last. What a step fills can be hit from its planning on. Without a prefix cache
nothing is hit, and without a tier in host memory nothing is loaded: the rule is the same (`kv.py`).

chunked        A step carries one token for each decoding request, then prefill up to a budget.
prefill-first  It admits first, whole prompts. A step that admits is a prefill, any other a decode step.
split          A prefill worker chunks and only prefills. A decode worker admits first, and only decodes.

A step without prefill is the first of a run of decode steps, up to the first in which anything can change.
"""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch, hits
from controlplane.placement import ledger as state
from controlplane.placement.caches import NOTHING
from controlplane.placement.ledger import Ledger
from controlplane.placement.memory import extend, grow, store
from dataplane.simulated import host_tier, kv, sending
from dataplane.simulated.records import CACHED, LOADED, LOADS, Engines

MANY = 1 << 60


@compiled
def plan(ledger: Ledger, engines: Engines, w: int, now_s: float) -> int:
    """Give a worker's requests what they have of its next step; how many such steps follow each other.

    The prefill that it carries, and its squares, are in the engine's record. 0: there is nothing to do.
    """
    worker, engine = ledger.workers[w], engines.workers[w]
    engine.prefill, engine.squares = 0, 0.0
    admits_first = worker.role == state.DECODE_ONLY or not is_chunked(ledger, w)
    if admits_first and batch.queue_first(ledger, w) != state.NONE:
        kv.count(ledger, engines, w)
        admit(ledger, engines, w, now_s)
        if engine.prefill > 0:
            return 1
    host_tier.begin_plan(ledger, engines.host, w, now_s)
    before = worker.running_n
    steps = engine.soonest = go_on(ledger, engines, w)
    preempted = worker.running_n < before
    if preempted and worker.running_n == 0:  # others load: a step of nothing takes no time
        host_tier.use_ended(ledger, engines.host, w)
        host_tier.begin_plan(ledger, engines.host, w, now_s)
        preempted = False
    if not (admits_first or preempted) and come_back(ledger, engines, w):
        admit(ledger, engines, w, now_s)
    offer_filled(ledger, engines, w)
    if worker.running_n == 0:
        return 0
    if preempted or engine.prefill > 0 or tier_may_change(ledger, engines, w):
        return 1  # what a preemption freed may let a request in at the next boundary
    return kv.steps_unseen(ledger, w, kv.steps_with_room(ledger, engines, w, steps))


@compiled
def is_chunked(ledger: Ledger, w: int) -> bool:
    """Whether a worker's steps carry chunks of prompts."""
    return ledger.coefficients[ledger.workers[w].variant, speed.MODE] == speed.CHUNKED


@compiled
def go_on(ledger: Ledger, engines: Engines, w: int) -> int:
    """Give each running request its tokens of this step; one that runs alone may outgrow the worker.

    Returns the decode steps until the first of them has all its tokens. Where there is surely room for those
    that decode, and it is known which of them ends first, there are only those to look at whose prefill goes
    on.
    """
    worker, engine, is_cached = ledger.workers[w], engines.workers[w], ledger.caches.tokens > 0
    k = ledger.coefficients[worker.variant]
    budget, block = int(k[speed.MAX_BATCHED]), int(k[speed.BLOCK_TOKENS])
    kv.begin(ledger, engines, w)
    free, steps, i = kv.room(ledger, engines, w), MANY, 0
    is_quick = goes_on_surely(ledger, engines, w, free)
    engine.at_least = int(is_quick)
    if is_quick:
        free -= kv.most_held(ledger, w, 0, 0)
        steps, i = engine.first_end - worker.step, first_prefilling(ledger, w)
    else:
        engine.first_end = MANY
    while i < worker.running_n:
        r = ledger.running[w, i]
        request = ledger.requests[r]
        is_decoding = request.phase == state.DECODING
        if is_decoding and is_quick:
            i += 1
            continue
        made = request.key + (worker.step if is_decoding else 0)
        length = request.prompt + made
        before, after = length - 1, length
        if not is_decoding:
            before = engines.requests[r].computed
            after = before + max(min(length - before, budget - worker.decoding), 0)
        if is_cached:
            free += kv.pass_windows(ledger, engines, w, r, before)
        blocks = kv.step_takes(k, is_cached, before, after, length)
        while blocks > free and worker.running_n + engine.loading > 1:
            preempt_newest(ledger, engines, w)
            if worker.running_n == i:
                return 1
            if is_cached:
                free = kv.room(ledger, engines, w)
        free -= blocks
        if is_cached:
            extend(ledger.caches, w, r, block, before, after, kv.fold_of(ledger, w))
        if not is_decoding:
            carry(ledger, engines, w, r, after - before)
        steps = min(steps, engines.requests[r].output - made)
        if is_decoding:
            engine.first_end = min(engine.first_end, worker.step + engines.requests[r].output - made)
        i += 1
    engine.free = free
    return steps


@compiled
def goes_on_surely(ledger: Ledger, engines: Engines, w: int, free: int) -> bool:
    """Whether these free blocks are enough for all that run, and the first decoding one to end is known."""
    worker = ledger.workers[w]
    if ledger.caches.tokens > 0 or engines.workers[w].first_end == 0 or not is_chunked(ledger, w):
        return False
    tokens = 0
    for i in range(first_prefilling(ledger, w), worker.running_n):
        tokens += ledger.requests[ledger.running[w, i]].prompt + ledger.requests[ledger.running[w, i]].key
    most = kv.most_held(ledger, w, tokens, worker.running_n - worker.decoding)
    return worker.role == state.ANY_PHASE and most <= free


@compiled
def first_prefilling(ledger: Ledger, w: int) -> int:
    """The place in the batch of the first request whose prefill goes on: behind most that decode."""
    i = ledger.workers[w].running_n
    left = i - ledger.workers[w].decoding
    while left > 0:
        i -= 1
        left -= ledger.requests[ledger.running[w, i]].phase == state.PREFILLING
    return i


@compiled
def budget_left(ledger: Ledger, engines: Engines, w: int) -> int:
    """Tokens of prefill that the planned step may still carry."""
    worker = ledger.workers[w]
    budget = int(ledger.coefficients[worker.variant][speed.MAX_BATCHED]) - engines.workers[w].prefill
    admits_first = worker.role == state.DECODE_ONLY or not is_chunked(ledger, w)
    return budget if admits_first else budget - worker.decoding


@compiled
def come_back(ledger: Ledger, engines: Engines, w: int) -> bool:
    """Admit requests whose KV has been loaded; False where one has no room: none behind it is admitted."""
    k, worker, engine = ledger.coefficients[ledger.workers[w].variant], ledger.workers[w], engines.workers[w]
    if engine.loading == 0:
        return True
    block = kv.block_tokens(ledger, w)
    r = ledger.queue_head[state.ON_LINK, w]
    while r != state.NONE:
        seats = worker.running_n + engine.reserved_seats
        if batch.is_full(k, seats, budget_left(ledger, engines, w)):
            return False
        load, after = engines.host.requests[r], ledger.requests[r].next
        if load.state == LOADS:
            r = after
            continue
        if load.state == LOADED:
            load.state = CACHED
            store(ledger.caches, w, r, block, load.to_block * ledger.caches.tokens)
        is_alone = seats == 0 and engines.host.workers[w].loaded == 0
        if not is_alone and kv.lacking(ledger, w, r) > kv.room(ledger, engines, w):
            return False
        host_tier.leave_loading(ledger, engines.host, w, r)
        engine.loading -= 1
        ledger.running[w, worker.running_n] = r
        worker.running_n += 1
        left = ledger.requests[r].prompt + ledger.requests[r].key - engines.requests[r].computed
        chunk = min(left, budget_left(ledger, engines, w))
        grow(ledger.caches, w, r, block, engines.requests[r].computed + chunk, 1)
        carry(ledger, engines, w, r, chunk)
        r = after
    return True


@compiled
def admit(ledger: Ledger, engines: Engines, w: int, now_s: float) -> None:
    """Admit waiting requests, or let them load what host memory has beyond their hits.

    The first that has no room ends it. A decode worker's requests come with their KV.
    """
    worker, engine = ledger.workers[w], engines.workers[w]
    k = ledger.coefficients[worker.variant]
    sending.note_planned(ledger, engines, w)
    r = batch.queue_first(ledger, w)
    while r != state.NONE:
        seats, budget = worker.running_n + engine.reserved_seats, budget_left(ledger, engines, w)
        if batch.is_full(k, seats, budget):
            return
        after, length = batch.next_in_queue(ledger, w, r), ledger.requests[r].prompt + ledger.requests[r].key
        copies, cached, asleep = kv.look_up(ledger, w, r, length)
        loads, waits = hits.to_load(ledger, w, r, cached, 0)
        if waits:  # for another's load, which it will hit
            r = after
            continue
        chunk = batch.chunk_of(k, length - cached, budget)
        if batch.is_too_long(k, engine.prefill, chunk, budget):
            return
        tokens, spare = to_hold(ledger, w, length, chunk)
        blocks = kv.wanted(ledger, w, tokens, cached, asleep)
        if seats > 0 or engine.loading > 0:  # one that is alone may outgrow the worker
            has = kv.room_for(ledger, engines, w, blocks + spare) - spare
            if blocks > has:
                return
            if loads > 0:
                loaded = (cached // ledger.caches.tokens + loads) * ledger.caches.tokens
                has -= kv.lacking_in_all(ledger, w)
                if kv.wanted(ledger, w, loaded, cached, asleep) > has:
                    return
        if loads > 0:
            begin_load(ledger, engines, w, r, copies, cached, loads, now_s)
        else:
            begin(ledger, engines, w, r, copies, cached, chunk, blocks)
        r = after


@compiled
def to_hold(ledger: Ledger, w: int, length: int, chunk: int) -> tuple[int, int]:
    """Tokens that memory must hold of a waiting request to admit it, and the blocks that must stay free.

    Where all is computed at once, or is there already, a block stays free for each request's next token.
    """
    if ledger.workers[w].role == state.DECODE_ONLY:
        return length, ledger.workers[w].running_n + 1
    if not is_chunked(ledger, w):
        return length + 1, ledger.workers[w].running_n
    if ledger.caches.tokens > 0:
        return length, 0
    return (length + 1 if chunk == length else chunk), 0


@compiled
def begin(
    ledger: Ledger, engines: Engines, w: int, r: int, copies: int, cached: int, chunk: int, blocks: int
) -> None:
    """A waiting request joins the batch behind what it hits, and has memory for its first chunk."""
    batch.join(ledger, w, r)
    kv.use_hits(ledger, engines, w, r, copies, cached)
    if ledger.workers[w].role == state.DECODE_ONLY:
        ledger.workers[w].queued_tokens -= batch.to_compute(ledger, r)
        batch.begin_decoding(ledger, w, r, ledger.requests[r].key)
        computed = ledger.requests[r].prompt + state.generated(ledger, r) - 1
        kv.take(ledger, engines, w, r, blocks, cached, computed)
        return
    know_computed(ledger, engines, w, r, cached)
    kv.take(ledger, engines, w, r, blocks, cached, cached + chunk)
    carry(ledger, engines, w, r, chunk)
    sending.note_lag(ledger, engines, w, r)


@compiled
def begin_load(
    ledger: Ledger, engines: Engines, w: int, r: int, copies: int, cached: int, blocks: int, now_s: float
) -> None:
    """A waiting request begins to load; what it loads counts as computed, except one token at least."""
    batch.dequeue(ledger, w, r)
    ledger.requests[r].phase = state.PREFILLING
    host_tier.begin_load(ledger, engines.host, w, r, copies, cached, blocks, now_s)
    engines.workers[w].loading += 1
    loaded = engines.host.requests[r].to_block * ledger.caches.tokens
    computed = min(loaded, ledger.requests[r].prompt + ledger.requests[r].key - 1)
    if ledger.caches.requests[r].cached == NOTHING:
        ledger.caches.requests[r].cached = computed
        engines.host.requests[r].tokens = computed - cached
    know_computed(ledger, engines, w, r, computed)


@compiled
def know_computed(ledger: Ledger, engines: Engines, w: int, r: int, computed: int) -> None:
    """A request's prefill begins behind the tokens that it has, whatever it was expected to have."""
    ledger.workers[w].queued_tokens += ledger.requests[r].cached - computed
    ledger.requests[r].cached = computed
    engines.requests[r].computed = computed


@compiled
def carry(ledger: Ledger, engines: Engines, w: int, r: int, chunk: int) -> None:
    """Put these tokens of a request's prefill into the step."""
    engines.requests[r].chunk = chunk
    ledger.workers[w].queued_tokens -= chunk
    engines.workers[w].prefill += chunk
    engines.workers[w].squares += batch.squares(engines.requests[r].computed, chunk)


@compiled
def offer_filled(ledger: Ledger, engines: Engines, w: int) -> None:
    """Offer host memory what this step fills, then use what requests that have ended had used."""
    if not host_tier.is_kept(engines.host, w):
        return
    for i in range(ledger.workers[w].running_n):
        r = ledger.running[w, i]
        computed = ledger.requests[r].prompt
        if ledger.requests[r].phase != state.DECODING:
            computed = min(computed, engines.requests[r].computed + engines.requests[r].chunk)
        host_tier.offer(engines.host, w, r, computed)
    host_tier.use_ended(ledger, engines.host, w)


@compiled
def tier_may_change(ledger: Ledger, engines: Engines, w: int) -> bool:
    """Whether the next step may store what this one could not, or a load change who comes next."""
    if not host_tier.is_kept(engines.host, w):
        return False
    queued = batch.queue_first(ledger, w) != state.NONE
    return engines.host.workers[w].failed > 0 or (queued and engines.workers[w].loading > 0)


@compiled
def preempt_newest(ledger: Ledger, engines: Engines, w: int) -> None:
    """Free the KV of the newest admitted request; it waits at the head, to be prefilled again."""
    worker = ledger.workers[w]
    r = batch.drop_running(ledger, w, worker.running_n - 1)
    kv.give_back(ledger, engines, w, r)
    if ledger.requests[r].phase == state.DECODING:
        batch.stop_decoding(ledger, w, r, state.QUEUED)
    else:  # part of its prefill is lost; it had been counted as queued all along
        length = ledger.requests[r].prompt + ledger.requests[r].key
        worker.queued -= 1
        worker.queued_context -= length
        worker.queued_tokens -= length - engines.requests[r].computed
    engines.requests[r].computed = 0
    engines.requests[r].preemptions += 1
    batch.enqueue(ledger, w, r, True)
