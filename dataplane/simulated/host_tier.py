"""A second tier of a worker's prefix cache, in host memory, as vLLM's OffloadingConnector keeps it.

**Stored** is every full block of a prompt, in the step that fills it. So are the blocks that the request hit
on the GPU and that are not in host memory: the first step of an admission offers all that it has. What is
generated is not stored (vLLM's `offload_prompt_only`, which is on). A store finds no room where all that
could go is new or being loaded. It is tried again in the next step.

**Evicted** is the block that was used longest ago. A block is used when it is stored, and when a request that
stored, offered or loaded it ends. All blocks of that request are used then, the last one first.

**Loaded** is what lies beyond the hit on the GPU. The request takes memory for it at once and leaves the
queue. It is computed from the first step on that is planned after its blocks are there, and then goes before
all that wait. Loads of a worker follow each other over its link. A request that would load what another is
loading waits, and those behind it go on. Memory must have room for a load in addition to what prefills that
have begun still need. A step is planned as before (`step.py`) in all else. The whole of a prompt may be
loaded; its last token is computed again.

A copy (`caches.Caches`) is a block of the prefixes in host memory: in the line of those asleep by its last
use, also while it is loaded (`users`). Requests and their ids are those of the engines' own caches. What
placement looks at is the ledger's (`caches.HostMemory`): the copies, the links, and the requests that load.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch, table
from controlplane.placement import ledger as state
from controlplane.placement.caches import NOTHING, fall_asleep, forget, wake
from controlplane.placement.ledger import Ledger
from controlplane.placement.memory import take, touch
from dataplane.simulated.records import AWAY, LOADED, LOADS, HostTier


@compiled
def reset_tier(ledger: Ledger, tier: HostTier, w: int) -> None:
    """A worker's process has ended, and its host memory with it; nothing may load there."""
    if tier.chunks.tokens > 0:
        worker = tier.workers[w]
        forget(tier.chunks, w, int(tier.chunks.workers[w].empty) + int(tier.chunks.workers[w].asleep))
        ledger.host.links[w].free_s = 0.0
        worker.new = worker.loaded = worker.failed = 0
        worker.ended = worker.last_ended = state.NONE


@compiled
def forget_request(ledger: Ledger, tier: HostTier, r: int) -> None:
    """A request goes to another worker, where it has offered nothing."""
    if tier.chunks.tokens > 0:
        at = tier.chunks.requests[r].at
        for block in range((ledger.requests[r].prompt + ledger.requests[r].key) // tier.chunks.tokens):
            tier.used[at + block] = 0
        tier.requests[r].stored = 0
        tier.requests[r].state = AWAY
        tier.requests[r].next = state.NONE


@compiled
def is_kept(tier: HostTier, w: int) -> bool:
    """Whether a worker has such a tier."""
    return tier.chunks.tokens > 0 and tier.chunks.workers[w].keeps > 0


@compiled
def offer(tier: HostTier, w: int, r: int, after: int) -> None:
    """Offer the blocks that a request fills with `after` tokens, those that it has not offered yet.

    Where they find no room they are offered again in the next step.
    """
    chunks, worker = tier.chunks, tier.workers[w]
    start, end = tier.requests[r].stored, after // chunks.tokens
    if end <= start:
        return
    worker.offer += 1
    at, new, copy = chunks.requests[r].at, 0, NOTHING
    for block in range(start, end):
        copy = table.find_next(chunks, w, copy, table.block_id(chunks, r, block))
        if copy == NOTHING:
            new += 1
        else:
            tier.marks[w, copy].offer = worker.offer
        if copy == NOTHING or tier.marks[w, copy].plan != worker.plan:
            tier.used[at + block] = 1
    if not make_room(tier, w, new):
        worker.failed |= int(end - start <= chunks.workers[w].empty + chunks.workers[w].asleep)
        return
    for block in range(start, end):
        key = table.block_id(chunks, r, block)
        if new > 0 and table.find(chunks, w, key) == NOTHING:
            copy = table.new_copy(chunks, w, key, 1)
            table.enter(chunks, w, copy)
            fall_asleep(chunks, w, copy)
            chunks.workers[w].empty -= 1
            tier.marks[w, copy].plan = worker.plan
            worker.new += 1
    tier.requests[r].stored = end


@compiled
def make_room(tier: HostTier, w: int, new: int) -> bool:
    """Evict until `new` copies have room. Returns False, and evicts nothing, where that cannot be."""
    chunks, worker = tier.chunks, tier.workers[w]
    need = new - chunks.workers[w].empty
    if need <= 0:
        return True
    if need > chunks.workers[w].asleep - worker.loaded - worker.new:
        return False
    copy, found = chunks.workers[w].first, 0
    while copy != NOTHING and found < need:
        found += int(may_go(tier, w, copy))
        copy = chunks.copies[w, copy].later
    if found < need:
        return False
    copy = chunks.workers[w].first
    while need > 0:
        later = chunks.copies[w, copy].later
        if may_go(tier, w, copy):
            wake(chunks, w, copy)
            table.drop(chunks, w, copy)
            chunks.workers[w].empty += 1
            chunks.workers[w].evicted += 1
            need -= 1
        copy = later
    return True


@compiled
def may_go(tier: HostTier, w: int, copy: int) -> bool:
    """Whether a copy can be evicted: it is not being loaded, nor of this step or of this offer."""
    mark, worker = tier.marks[w, copy], tier.workers[w]
    is_new = mark.plan == worker.plan or mark.offer == worker.offer
    return bool(tier.chunks.copies[w, copy].users == 0 and not is_new)


@compiled
def begin_plan(ledger: Ledger, tier: HostTier, w: int, now_s: float) -> None:
    """A step is planned: what the one before stored is there, and loads may be done."""
    if not is_kept(tier, w):
        return
    end_loads(ledger, tier, w, now_s)
    tier.workers[w].plan += 1
    tier.workers[w].new = 0
    tier.workers[w].failed = 0


@compiled
def note_end(tier: HostTier, w: int, r: int) -> None:
    """A request has all its tokens; its blocks are used when the next step has been planned."""
    worker = tier.workers[w]
    tier.requests[r].next = state.NONE
    if worker.ended == state.NONE:
        worker.ended = r
    else:
        tier.requests[worker.last_ended].next = r
    worker.last_ended = r


@compiled
def use_ended(ledger: Ledger, tier: HostTier, w: int) -> None:
    """What requests that have ended still had to offer is offered, and then all their blocks are used."""
    chunks, worker = tier.chunks, tier.workers[w]
    r = worker.ended
    while r != state.NONE:
        offer(tier, w, r, ledger.requests[r].prompt)
        r = tier.requests[r].next
    while worker.ended != state.NONE:
        r = worker.ended
        at = chunks.requests[r].at
        for block in range((ledger.requests[r].prompt + ledger.requests[r].key) // chunks.tokens - 1, -1, -1):
            if tier.used[at + block] > 0:
                copy = table.find(chunks, w, table.block_id(chunks, r, block))
                if copy != NOTHING:
                    wake(chunks, w, copy)
                    fall_asleep(chunks, w, copy)
        worker.ended = tier.requests[r].next
        tier.requests[r].next = state.NONE


@compiled
def begin_load(
    ledger: Ledger, tier: HostTier, w: int, r: int, hits: int, cached: int, blocks: int, now_s: float
) -> None:
    """A waiting request leaves the queue and takes memory: behind what it hits it loads `blocks` blocks."""
    chunks, link, load = tier.chunks, ledger.host.links[w], tier.requests[r]
    block = int(ledger.coefficients[ledger.workers[w].variant][speed.BLOCK_TOKENS])
    load.from_block = cached // chunks.tokens
    load.to_block = load.from_block + blocks
    tokens = load.to_block * chunks.tokens
    touch(ledger.caches, w, r, hits)
    more = (tokens + block - 1) // block - (cached + block - 1) // block
    take(ledger.caches, w, more, 1)
    ledger.caches.requests[r].own += more
    for i in range(load.from_block, load.to_block):
        copy = table.find(chunks, w, table.block_id(chunks, r, i))
        tier.workers[w].loaded += int(chunks.copies[w, copy].users == 0)
        chunks.copies[w, copy].users += 1
        tier.used[chunks.requests[r].at + i] = 1
    load.stored = load.to_block
    load.state = LOADS
    link.free_s = max(now_s, link.free_s) + blocks * link.copy_s
    load.ready_s = link.free_s
    batch.line_up(ledger, w, state.ON_LINK, r)


@compiled
def end_loads(ledger: Ledger, tier: HostTier, w: int, now_s: float) -> None:
    """The copies whose loads are done may be evicted again."""
    r = ledger.queue_head[state.ON_LINK, w]
    while r != state.NONE:
        load = tier.requests[r]
        if load.state == LOADS and load.ready_s <= now_s:
            load.state = LOADED
            for i in range(load.from_block, load.to_block):
                copy = table.find(tier.chunks, w, table.block_id(tier.chunks, r, i))
                tier.chunks.copies[w, copy].users -= 1
                tier.workers[w].loaded -= int(tier.chunks.copies[w, copy].users == 0)
        r = ledger.requests[r].next


@compiled
def leave_loading(ledger: Ledger, tier: HostTier, w: int, r: int) -> None:
    """A request loads no more."""
    batch.step_out(ledger, w, state.ON_LINK, r)
    tier.requests[r].state = AWAY


@compiled
def next_load_s(ledger: Ledger, tier: HostTier, w: int, now_s: float) -> float:
    """When the next load that is under way is done; inf where none is."""
    soonest_s, r = np.inf, ledger.queue_head[state.ON_LINK, w]
    while r != state.NONE:
        if tier.requests[r].ready_s > now_s:
            soonest_s = min(soonest_s, tier.requests[r].ready_s)
        r = ledger.requests[r].next
    return soonest_s
