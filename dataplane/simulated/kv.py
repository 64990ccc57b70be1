"""A simulated worker's KV memory, as its steps see it: room, look up, take, give back.

With a prefix cache that is vLLM's block pool (`placement/memory.py`). Without one it is a count: a plan
begins with all blocks free, and takes for each request what it holds, the block of its next token included.

Layers with a window are in groups as large as that of the layers that keep all tokens. With a prefix cache a
block of tokens takes a block of the pool in each (`fold`). They give back what windows no longer reach and no
other uses. Cached text is evicted in all groups at once, where vLLM evicts a group after the other.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch, memory, table
from controlplane.placement import ledger as state
from controlplane.placement.caches import NOTHING
from controlplane.placement.ledger import Floats, Ledger
from dataplane.simulated.records import DECODE_RUN, Engines


@compiled
def blocks_of(tokens: int, block: int) -> int:
    """KV blocks that hold `tokens`."""
    return (tokens + block - 1) // block


@compiled
def blocks_held(k: Floats, tokens: int) -> int:
    """KV blocks of a request with this number of tokens, where nothing is cached."""
    return blocks_of(tokens, int(k[speed.BLOCK_TOKENS])) + speed.window_blocks(k, tokens)


@compiled
def block_tokens(ledger: Ledger, w: int) -> int:
    """Tokens in a block of a worker's KV."""
    return int(ledger.coefficients[ledger.workers[w].variant, speed.BLOCK_TOKENS])


@compiled
def fold_of(ledger: Ledger, w: int) -> int:
    """Blocks of a worker's pool that a cached block of tokens takes: one in each group of layers."""
    return 1 + int(ledger.coefficients[ledger.workers[w].variant, speed.WINDOW_GROUPS])


@compiled
def pass_windows(ledger: Ledger, engines: Engines, w: int, r: int, computed: int) -> int:
    """Give back what no window of a request with these tokens computed reaches: the pool's blocks."""
    k, request = ledger.coefficients[ledger.workers[w].variant], engines.requests[r]
    groups = int(k[speed.WINDOW_GROUPS])
    if groups == 0 or ledger.caches.tokens == 0:
        return 0
    start = speed.window_start(k, computed)
    if start <= request.passed:
        return 0
    unit = ledger.caches.tokens // int(k[speed.BLOCK_TOKENS])
    blocks = max(start - max(int(request.passed), memory.shared_copies(ledger.caches, w, r) * unit), 0)
    request.passed = start
    request.given += blocks
    ledger.caches.workers[w].empty += blocks * groups
    return blocks * groups


@compiled
def begin(ledger: Ledger, engines: Engines, w: int) -> None:
    """Begin to give out blocks, where nothing is cached: all but those promised to requests on their way."""
    blocks = int(ledger.coefficients[ledger.workers[w].variant, speed.KV_BLOCKS])
    engines.workers[w].free = blocks - engines.workers[w].reserved_blocks
    engines.workers[w].at_least = 0


@compiled
def count(ledger: Ledger, engines: Engines, w: int) -> None:
    """The same, when running requests have what they hold now."""
    begin(ledger, engines, w)
    if ledger.caches.tokens == 0:
        k, held = ledger.coefficients[ledger.workers[w].variant], 0
        for i in range(ledger.workers[w].running_n):
            r = ledger.running[w, i]
            held += blocks_held(k, ledger.requests[r].prompt + state.generated(ledger, r))
        engines.workers[w].free -= held


@compiled
def most_held(ledger: Ledger, w: int, more: int, requests: int) -> int:
    """Blocks that decoding requests may hold at most after their next token, where nothing is cached.

    With `requests` others that hold `more` tokens.
    """
    worker, k = ledger.workers[w], ledger.coefficients[ledger.workers[w].variant]
    each = 1 + int(k[speed.WINDOW_BLOCKS])  # of a request: the last block, and its windows
    return (worker.context + more) // int(k[speed.BLOCK_TOKENS]) + (worker.decoding + requests) * each


@compiled
def room_for(ledger: Ledger, engines: Engines, w: int, blocks: int) -> int:
    """Blocks that a worker can give out: a lower bound where that is `blocks` or more, else their number."""
    engine = engines.workers[w]
    if engine.at_least > 0 and engine.free < blocks:
        k, held = ledger.coefficients[ledger.workers[w].variant], 0
        for i in range(ledger.workers[w].running_n):
            r = ledger.running[w, i]
            if ledger.requests[r].phase == state.DECODING:
                held += blocks_held(k, ledger.requests[r].prompt + state.generated(ledger, r) + 1)
        engine.free += most_held(ledger, w, 0, 0) - held
        engine.at_least = 0
    return room(ledger, engines, w)


@compiled
def room(ledger: Ledger, engines: Engines, w: int) -> int:
    """Blocks that a worker can give out.

    Of the states that running requests hold a cache counts all from their first token on.
    """
    engine, k = engines.workers[w], ledger.coefficients[ledger.workers[w].variant]
    if ledger.caches.tokens == 0:
        return int(engine.free)
    states = 0
    if k[speed.WINDOW_GROUPS] == 0:
        states = (ledger.workers[w].running_n + engine.loading) * int(k[speed.WINDOW_BLOCKS])
    return int(memory.free_blocks(ledger.caches, w, fold_of(ledger, w)) - engine.reserved_blocks - states)


@compiled
def look_up(ledger: Ledger, w: int, r: int, tokens: int) -> tuple[int, int, int]:
    """The hits of a waiting request among its tokens: copies, tokens, and blocks of these asleep."""
    if ledger.caches.tokens == 0:
        return 0, 0, 0
    most, most_tokens = table.most_hits(ledger.caches, tokens, block_tokens(ledger, w))
    copies, asleep = memory.look_up(ledger.caches, w, r, most)
    return copies, min(copies * ledger.caches.tokens, most_tokens), asleep


@compiled
def wanted(ledger: Ledger, w: int, tokens: int, cached: int, asleep: int) -> int:
    """Blocks that a waiting request takes for its tokens behind those that it hits."""
    k = ledger.coefficients[ledger.workers[w].variant]
    if ledger.caches.tokens == 0:
        return blocks_held(k, tokens)
    block, groups = int(k[speed.BLOCK_TOKENS]), int(k[speed.WINDOW_GROUPS])
    blocks = blocks_of(tokens, block) - cached // block + asleep
    if groups == 0:
        return blocks + int(k[speed.WINDOW_BLOCKS])
    hit, start = cached // block, speed.window_start(k, cached)
    new = min(blocks_of(tokens, block), speed.most_window_blocks(k)) - max(hit, start)
    return blocks + groups * (max(new, 0) + min(asleep, max(hit - start, 0)))


@compiled
def step_takes(k: Floats, is_cached: bool, before: int, after: int, length: int) -> int:
    """Blocks that a running request of `length` tokens takes in a step which computes it up to `after`."""
    if is_cached:
        block, fold = int(k[speed.BLOCK_TOKENS]), 1 + int(k[speed.WINDOW_GROUPS])
        return (blocks_of(after, block) - blocks_of(before, block)) * fold
    return blocks_held(k, after + 1 if after == length else after)


@compiled
def take(ledger: Ledger, engines: Engines, w: int, r: int, blocks: int, before: int, after: int) -> None:
    """Give a request the blocks for its tokens from `before` to `after`; what is full can be hit."""
    if ledger.caches.tokens == 0:
        engines.workers[w].free -= blocks
    else:
        memory.extend(ledger.caches, w, r, block_tokens(ledger, w), before, after, fold_of(ledger, w))


@compiled
def use_hits(ledger: Ledger, engines: Engines, w: int, r: int, copies: int, cached: int) -> None:
    """A request that is admitted uses the copies that `look_up` listed."""
    if ledger.caches.tokens > 0:
        if ledger.caches.requests[r].cached == NOTHING:
            ledger.caches.requests[r].cached = cached
        memory.touch(ledger.caches, w, r, copies)
        pass_windows(ledger, engines, w, r, cached)


@compiled
def receive(ledger: Ledger, engines: Engines, w: int, r: int, tokens: int) -> None:
    """Take in a request with the KV of its tokens: the cached part is used, not stored."""
    copies, cached, _ = look_up(ledger, w, r, tokens + 1)
    use_hits(ledger, engines, w, r, copies, cached)
    take(ledger, engines, w, r, 0, cached, tokens)
    pass_windows(ledger, engines, w, r, tokens)


@compiled
def give_back(ledger: Ledger, engines: Engines, w: int, r: int) -> None:
    """A request leaves the batch: its worker's cache, if it has one, keeps what it may."""
    engines.workers[w].first_end = 0
    if ledger.caches.tokens > 0:
        computed = engines.requests[r].computed
        if ledger.requests[r].phase == state.DECODING:
            computed = ledger.requests[r].prompt + state.generated(ledger, r) - 1
        fold, request = fold_of(ledger, w), engines.requests[r]
        ledger.caches.workers[w].empty -= request.given * (fold - 1)
        request.passed, request.given = 0, 0
        memory.release(ledger.caches, w, r, block_tokens(ledger, w), computed, fold)


@compiled
def bring(ledger: Ledger, engines: Engines, w: int, r: int, tokens: int) -> bool:
    """The KV of an ended request's first `tokens` comes to a worker, as if it had ended there just now.

    False where the worker has no memory for what it lacks of it.
    """
    if engines.workers[w].activity == DECODE_RUN:
        grow(ledger, engines, w, ledger.workers[w].step - ledger.runs[w].start_step)
    block, fold = block_tokens(ledger, w), fold_of(ledger, w)
    copies, cached, asleep = look_up(ledger, w, r, tokens)
    if (blocks_of(tokens, block) - cached // block + asleep) * fold > room(ledger, engines, w):
        return False
    memory.touch(ledger.caches, w, r, copies)
    memory.grow(ledger.caches, w, r, block, tokens, fold)
    memory.release(ledger.caches, w, r, block, tokens, fold)
    return True


@compiled
def lacking(ledger: Ledger, w: int, r: int) -> int:
    """Blocks that a request whose prefill has begun needs for the rest of it."""
    holding, block = ledger.caches.requests[r], block_tokens(ledger, w)
    held = int(holding.copies * (ledger.caches.tokens // block) + holding.own)
    return blocks_of(ledger.requests[r].prompt + ledger.requests[r].key, block) - held


@compiled
def lacking_in_all(ledger: Ledger, w: int) -> int:
    """The same of all whose prefill has begun, and of those whose KV is loaded."""
    blocks = 0
    for i in range(ledger.workers[w].running_n):
        r = ledger.running[w, i]
        if ledger.requests[r].phase != state.DECODING:
            blocks += lacking(ledger, w, r)
    r = ledger.queue_head[state.ON_LINK, w]
    while r != state.NONE:
        blocks += lacking(ledger, w, r)
        r = ledger.requests[r].next
    return blocks


@compiled
def steps_with_room(ledger: Ledger, engines: Engines, w: int, steps: int) -> int:
    """The number of `steps` decode steps that there is room for; the first has its blocks already."""
    k = ledger.coefficients[ledger.workers[w].variant]
    running, block = ledger.workers[w].running_n, int(k[speed.BLOCK_TOKENS])
    window = int(k[speed.WINDOW_BLOCKS]) if ledger.caches.tokens == 0 else 0
    most = blocks_of(steps - 1, block) + window
    free = room_for(ledger, engines, w, running * most)
    if ledger.caches.tokens > 0:  # as if windows gave nothing back
        free //= fold_of(ledger, w)
    if running + engines.workers[w].loading == 1 or running * most <= free:
        return steps
    # A request's last block has room for fewer tokens than a block, or for none.
    each = free // running
    low, high = 1 + max(each - window, 0) * block, min(steps, (each + 1) * block)
    free += blocks_after(ledger, w, 1)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_after(ledger, w, middle) <= free:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def blocks_after(ledger: Ledger, w: int, steps: int) -> int:
    """Blocks that running requests hold after `steps` decode steps; none of them is done yet."""
    k, blocks = ledger.coefficients[ledger.workers[w].variant], 0
    for i in range(ledger.workers[w].running_n):
        r = ledger.running[w, i]
        tokens = ledger.requests[r].prompt + state.generated(ledger, r) + steps
        if ledger.caches.tokens == 0:
            blocks += blocks_held(k, tokens)
        else:
            blocks += blocks_of(tokens - 1, int(k[speed.BLOCK_TOKENS]))
    return blocks


@compiled
def steps_unseen(ledger: Ledger, w: int, steps: int) -> int:
    """The number of `steps` decode steps before one that fills the next block the queue's head would hit."""
    head = batch.queue_first(ledger, w)
    if head == state.NONE or ledger.caches.tokens == 0:
        return steps
    hits, _, _ = look_up(ledger, w, head, ledger.requests[head].prompt + ledger.requests[head].key)
    key = table.block_id(ledger.caches, head, hits)
    for i in range(ledger.workers[w].running_n):
        r = ledger.running[w, i]
        if table.block_id(ledger.caches, r, hits) == key:
            computed = ledger.requests[r].prompt + state.generated(ledger, r) - 1
            fills = (hits + 1) * ledger.caches.tokens - computed
            if fills > 1:  # or it is full, or the step that is planned already fills it
                steps = min(steps, fills - 1)
    return steps


@compiled
def grow(ledger: Ledger, engines: Engines, w: int, steps: int) -> None:
    """Book what a decode run's steps up to the number `steps` take and fill, in the order of the steps."""
    grown = engines.workers[w].grown
    if steps <= grown or ledger.caches.tokens == 0:
        return
    unit, block, running = ledger.caches.tokens, block_tokens(ledger, w), ledger.workers[w].running_n
    fills = np.empty(running, np.int64)  # the step that fills each request's next block
    taken, soonest = 0, steps + 1
    for i in range(running):
        r = ledger.running[w, i]
        computed = ledger.requests[r].prompt + ledger.requests[r].key + ledger.runs[w].start_step - 1
        blocks = blocks_of(computed + steps, block) - blocks_of(computed + grown, block)
        ledger.caches.requests[r].own += blocks
        taken += blocks
        fills[i] = max((ledger.caches.requests[r].copies + 1) * unit - computed, grown + 1)
        soonest = min(soonest, fills[i])
    fold = fold_of(ledger, w)
    memory.take(ledger.caches, w, taken * fold, fold)
    while soonest <= steps:
        step, soonest = soonest, steps + 1
        for i in range(running):
            if fills[i] == step:
                r = ledger.running[w, i]
                computed = ledger.requests[r].prompt + ledger.requests[r].key + ledger.runs[w].start_step - 1
                memory.store(ledger.caches, w, r, block, computed + step)
                fills[i] = step + unit
            soonest = min(soonest, fills[i])
    engines.workers[w].grown = steps
