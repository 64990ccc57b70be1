"""A worker's KV memory with a prefix cache: what requests take, fill, share and leave behind.

It works as vLLM's block pool does. Blocks that hold nothing are given out first, then those of the copy that
has slept longest. A copy counts its users; when the last one leaves it falls asleep, at the end of the line,
a request's last copy before its first. A hit takes a copy out of the line again. Where an engine tells what
it stores and removes (`learn`), records say only who uses what (`hold`, `let_go`).

`fold`: the groups of layers that hold a block each for the same tokens (`dataplane/simulated/kv.py`). Empty
blocks are counted in all of them, those of copies in one.
"""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.placement import table
from controlplane.placement.caches import NOTHING, UNKNOWN, Caches, Ints, fall_asleep, join, wake


@compiled
def look_up(caches: Caches, w: int, r: int, most: int) -> tuple[int, int]:
    """List the copies that a waiting request would hit: how many, and the engine blocks of them asleep."""
    at, begins = caches.requests[r].at, caches.requests[r].begins
    named = min(most, caches.requests[r].listed)
    hits, asleep, copy = 0, 0, NOTHING
    while hits < most:
        key = caches.ids[begins + hits] if hits < named else table.block_id(caches, r, hits)
        known = copy if copy == NOTHING else caches.copies[w, copy].next
        # As `find_next`, whose call alone takes as long as what most blocks need.
        if known == NOTHING or caches.copies[w, known].id != key or caches.copies[w, known].older != known:
            known = table.find_next(caches, w, copy, key)
            if known == NOTHING:
                break
        copy = known
        if caches.copies[w, copy].users == 0:
            asleep += caches.copies[w, copy].blocks
        caches.held[at + hits] = copy
        hits += 1
    return hits, asleep


@compiled
def touch(caches: Caches, w: int, r: int, hits: int) -> None:
    """A request that is admitted uses the copies that `look_up` listed.

    Those that fell asleep together lie together in the line, the last first, and leave it at once.
    """
    i = caches.requests[r].at
    end = i + hits
    caches.requests[r].copies = hits
    caches.requests[r].own = 0
    awake, shared = 0, 0
    while i < end:
        copy = caches.held[i]
        i += 1
        if caches.copies[w, copy].users > 0:
            caches.copies[w, copy].users += 1
            shared += caches.copies[w, copy].blocks
            continue
        later, sooner = caches.copies[w, copy].later, caches.copies[w, copy].sooner
        caches.copies[w, copy].users = 1
        awake += caches.copies[w, copy].blocks
        while i < end and sooner != NOTHING and caches.held[i] == sooner:
            copy, sooner = sooner, caches.copies[w, sooner].sooner
            caches.copies[w, copy].users = 1
            awake += caches.copies[w, copy].blocks
            i += 1
        join(caches, w, sooner, later)
    caches.workers[w].asleep -= awake
    caches.workers[w].shared += shared


@compiled
def shared_copies(caches: Caches, w: int, r: int) -> int:
    """Copies of a request that others use, too: its first ones, as who uses one uses those before it."""
    at, low, high = caches.requests[r].at, 0, int(caches.requests[r].copies)
    while low < high:
        middle = (low + high) // 2
        if caches.copies[w, caches.held[at + middle]].users > 1:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def use(caches: Caches, w: int, copy: int) -> None:
    """A copy has one user more."""
    if caches.copies[w, copy].users == 0:
        wake(caches, w, copy)
    else:
        caches.workers[w].shared += caches.copies[w, copy].blocks
    caches.copies[w, copy].users += 1


@compiled
def disuse(caches: Caches, w: int, copy: int) -> None:
    """A copy has one user less."""
    caches.copies[w, copy].users -= 1
    if caches.copies[w, copy].users == 0:
        fall_asleep(caches, w, copy)
    else:
        caches.workers[w].shared -= caches.copies[w, copy].blocks


@compiled
def peek(caches: Caches, w: int, r: int, most: int) -> tuple[int, int]:
    """As `look_up`, for a request that is on another worker: nothing is listed."""
    hits, asleep, copy = 0, 0, NOTHING
    while hits < most:
        copy = table.find_next(caches, w, copy, table.block_id(caches, r, hits))
        if copy == NOTHING:
            break
        if caches.copies[w, copy].users == 0:
            asleep += caches.copies[w, copy].blocks
        hits += 1
    return hits, asleep


@compiled
def pin(caches: Caches, w: int, r: int, hits: int) -> None:
    """Keep the copies that a request on its way here will hit."""
    for i in range(hits):
        use(caches, w, table.find(caches, w, table.block_id(caches, r, i)))


@compiled
def unpin(caches: Caches, w: int, r: int, hits: int) -> None:
    """Let them go again; the oldest copy of an id stays the oldest while it is used."""
    for i in range(hits - 1, -1, -1):
        disuse(caches, w, table.find(caches, w, table.block_id(caches, r, i)))


@compiled
def free_blocks(caches: Caches, w: int, fold: int) -> int:
    """Engine blocks that a worker can give out."""
    return int(caches.workers[w].empty) + int(caches.workers[w].asleep) * fold


@compiled
def take(caches: Caches, w: int, blocks: int, fold: int) -> None:
    """Give out `blocks` blocks: empty ones, then those of the copies that have slept longest."""
    while caches.workers[w].empty < blocks and caches.workers[w].first != NOTHING:
        copy = caches.workers[w].first
        wake(caches, w, copy)
        caches.workers[w].empty += caches.copies[w, copy].blocks * fold
        caches.workers[w].evicted += caches.copies[w, copy].blocks
        table.drop(caches, w, copy)
    caches.workers[w].empty -= blocks


@compiled
def extend(caches: Caches, w: int, r: int, block: int, before: int, after: int, fold: int) -> None:
    """A request's computed tokens grow from `before` to `after`: take what that needs, store what is full."""
    blocks = (after + block - 1) // block - (before + block - 1) // block
    if blocks > 0:
        take(caches, w, blocks * fold, fold)
        caches.requests[r].own += blocks
    store(caches, w, r, block, after)


@compiled
def store(caches: Caches, w: int, r: int, block: int, after: int) -> None:
    """Let the blocks be found that are full once `after` tokens are computed."""
    had, at, blocks = caches.requests[r].copies, caches.requests[r].at, caches.tokens // block
    number, before = had, NOTHING if had == 0 else caches.held[at + had - 1]
    while (number + 1) * caches.tokens <= after:
        copy = table.new_copy(caches, w, table.block_id(caches, r, number), blocks)
        if copy == NOTHING:
            break
        table.enter(caches, w, copy)
        if before != NOTHING:
            caches.copies[w, before].next = copy
        caches.copies[w, copy].users = 1
        caches.held[at + number] = copy
        number, before = number + 1, copy
    caches.requests[r].copies = number
    caches.requests[r].own -= (number - had) * blocks


@compiled
def release(caches: Caches, w: int, r: int, block: int, computed: int, fold: int) -> None:
    """A request leaves: its copies lose a user, last to first, and what it had beyond them is empty."""
    own, copies = caches.requests[r].own, caches.requests[r].copies
    rest = min((computed - copies * caches.tokens) // block, own)
    if rest > 0:  # full blocks, but fewer than a copy has
        copy = table.new_copy(caches, w, UNKNOWN, rest)
        if copy != NOTHING:
            fall_asleep(caches, w, copy)
            own -= rest
    caches.workers[w].empty += own * fold
    at, last, asleep, shared = caches.requests[r].at, caches.workers[w].last, 0, 0
    for i in range(at + copies - 1, at - 1, -1):  # as `disuse`, the ends of the line at hand
        copy = caches.held[i]
        caches.copies[w, copy].users -= 1
        if caches.copies[w, copy].users > 0:
            shared += caches.copies[w, copy].blocks
            continue
        caches.copies[w, copy].sooner = last
        if last == NOTHING:
            caches.workers[w].first = copy
        else:
            caches.copies[w, last].later = copy
        last = copy
        asleep += caches.copies[w, copy].blocks
    if asleep > 0:
        caches.copies[w, last].later = NOTHING
    caches.workers[w].last = last
    caches.workers[w].asleep += asleep
    caches.workers[w].shared -= shared
    caches.requests[r].copies = 0
    caches.requests[r].own = 0
    take(caches, w, 0, fold)  # what a lone request had beyond its worker's memory is not kept


@compiled
def begin(caches: Caches, w: int, r: int, block: int, tokens: int) -> None:
    """A request's first `tokens` are computed at a worker: what it has of them is used, the rest stored."""
    most, _ = table.most_hits(caches, tokens, block)
    copies, _ = look_up(caches, w, r, most)
    touch(caches, w, r, copies)
    grow(caches, w, r, block, tokens, 1)


@compiled
def end(caches: Caches, w: int, r: int, block: int, tokens: int) -> None:
    """A request leaves a worker that has computed its first `tokens`."""
    grow(caches, w, r, block, tokens, 1)
    release(caches, w, r, block, tokens, 1)


@compiled
def grow(caches: Caches, w: int, r: int, block: int, tokens: int, fold: int) -> None:
    """Give a request memory for `tokens` tokens in all, and store what they fill."""
    has = caches.requests[r].copies * (caches.tokens // block) + caches.requests[r].own
    blocks = (tokens + block - 1) // block - has
    if blocks > 0:
        take(caches, w, blocks * fold, fold)
        caches.requests[r].own += blocks
    store(caches, w, r, block, tokens)


@compiled
def learn(caches: Caches, w: int, stored: Ints, removed: Ints) -> None:
    """An engine has said which blocks it has stored and removed; its own memory decides what goes."""
    for key in removed:
        copy = table.find(caches, w, key)
        if copy == NOTHING:
            continue
        users, blocks = caches.copies[w, copy].users, caches.copies[w, copy].blocks
        if users == 0:
            wake(caches, w, copy)
        else:  # of a request that was preempted, or has ended there and not yet here
            caches.workers[w].shared -= (users - 1) * blocks
        caches.workers[w].empty += blocks
        table.drop(caches, w, copy)
    for key in stored:
        copy = table.new_copy(caches, w, key, 1) if table.find(caches, w, key) == NOTHING else NOTHING
        if copy != NOTHING:
            table.enter(caches, w, copy)
            fall_asleep(caches, w, copy)
            caches.workers[w].empty -= 1


@compiled
def hold(caches: Caches, w: int, r: int, most: int) -> None:
    """A request uses those of its first blocks that an engine has said to be cached."""
    at, most, copies, copy = caches.requests[r].begins, min(most, caches.requests[r].listed), 0, NOTHING
    while copies < most:
        copy = table.find_next(caches, w, copy, caches.ids[at + copies])
        if copy == NOTHING:
            break
        use(caches, w, copy)
        copies += 1
    caches.requests[r].copies = copies
    caches.requests[r].own = 0


@compiled
def let_go(caches: Caches, w: int, r: int) -> None:
    """A request uses them no more; some may be gone by now."""
    at = caches.requests[r].begins
    for i in range(at, at + caches.requests[r].copies):
        copy = table.find(caches, w, caches.ids[i])
        if copy != NOTHING and caches.copies[w, copy].users > 0:
            disuse(caches, w, copy)
    caches.requests[r].copies = 0
