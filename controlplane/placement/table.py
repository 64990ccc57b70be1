"""The copies of blocks in a worker's memory, found by their ids: a hash table, open and without tombstones.

Copies of one id stand in a ring, the oldest in the table. Requests' blocks lie side by side in it.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.placement.caches import NEIGHBOURS, NOTHING, SPREAD, UNKNOWN, Caches, Ints


@compiled
def block_id(caches: Caches, r: int, block: int) -> int:
    """The id of a request's block; past its list one that no other request has."""
    if block < caches.requests[r].listed:
        return caches.ids[caches.requests[r].begins + block]
    return UNKNOWN - 1 - ((r << 24) | block)


@compiled
def place(caches: Caches, key: int) -> int:
    """Where the search for an id begins in a table: ids that follow each other lie side by side in memory."""
    home = np.int64((np.uint64(key >> NEIGHBOURS) * SPREAD) >> np.uint64(caches.shift))
    side_by_side = (1 << NEIGHBOURS) - 1
    return int(((home & ~side_by_side) | (key & side_by_side)) & (caches.table.shape[1] - 1))


@compiled
def find(caches: Caches, w: int, key: int) -> int:
    """The oldest copy of an id at a worker, or NOTHING."""
    last = caches.table.shape[1] - 1
    at = place(caches, key)
    while True:
        if caches.table[w, at].copy == 0 or caches.table[w, at].id == key:
            return caches.table[w, at].copy - 1
        at = (at + 1) & last


@compiled
def find_next(caches: Caches, w: int, before: int, key: int) -> int:
    """As `find`, for the block behind a copy; most often it is where it was the last time.

    A request's copies lie side by side, so that this is read from memory in order, and not from a table.
    """
    if before == NOTHING:
        return find(caches, w, key)
    copy = caches.copies[w, before].next
    if copy != NOTHING and caches.copies[w, copy].id == key and caches.copies[w, copy].older == copy:
        return copy  # the only one of its id
    copy = find(caches, w, key)
    caches.copies[w, before].next = copy
    return copy


@compiled
def cached_blocks(caches: Caches, w: int, r: int, most: int, guess: int, in_use: bool) -> int:
    """How many of a request's first `most` blocks are cached at a worker now.

    Touches nothing. `in_use`: cached and in use. A cached block's predecessors are cached too (not in host
    memory: `copies_from`), so the count is searched for by doubling and halving. That takes 2·log2(n) looks
    into the table for n blocks, two where it is `guess`.
    """
    there, missing = 0, most + 1  # of the counts from `missing` on, none is all cached
    if 0 < guess <= most:
        if is_cached(caches, w, r, guess - 1, in_use):
            there = guess
        else:
            missing = guess
    step = 1
    while there + step < missing:
        if not is_cached(caches, w, r, there + step - 1, in_use):
            missing = there + step
            break
        there += step
        step *= 2
    while missing - there > 1:
        middle = (there + missing) // 2
        if is_cached(caches, w, r, middle - 1, in_use):
            there = middle
        else:
            missing = middle
    return there


@compiled
def copies_from(chunks: Caches, w: int, r: int, start: int, most: int) -> tuple[int, bool]:
    """How many of a request's first `most` blocks a worker has in host memory, from `start` to the first gap.

    And whether one of them is being loaded. Touches nothing. Host memory evicts also from between blocks that
    stay. So each is looked for, in order, as vLLM's manager does. Most lie side by side.
    """
    block, copy, is_loading, fresh = start, NOTHING, False, chunks.workers[w].fresh
    while block < most:
        key, copy = block_id(chunks, r, block), copy + 1
        if copy >= fresh or chunks.copies[w, copy].id != key:
            copy = find(chunks, w, key)
            if copy == NOTHING:
                break
        is_loading = is_loading or chunks.copies[w, copy].users > 0
        block += 1
    return block - start, is_loading


@compiled
def cached_everywhere(caches: Caches, ids: Ints) -> Ints:
    """By worker, how many of these blocks, from the first on, are cached there now."""
    counts = np.zeros(len(caches.workers), np.int64)
    for w in range(len(counts)):
        missing = len(ids) + 1
        while missing - counts[w] > 1:  # as in cached_blocks; mostly none is
            middle = (counts[w] + missing) // 2 if counts[w] > 0 else 1
            if find(caches, w, ids[middle - 1]) != NOTHING:
                counts[w] = middle
            else:
                missing = middle
    return counts


@compiled
def is_cached(caches: Caches, w: int, r: int, block: int, in_use: bool) -> bool:
    """Whether a request's block is cached at a worker, and, if asked, in use there."""
    copy = find(caches, w, block_id(caches, r, block))
    return copy != NOTHING and (not in_use or caches.copies[w, copy].users > 0)


@compiled
def common_blocks(caches: Caches, r: int, other: int, there: int, most: int) -> int:
    """How many of its first `most` blocks a request has in common with another, if more than `there`."""
    at, others = caches.requests[r].begins, caches.requests[other].begins
    most = min(most, min(caches.requests[r].listed, caches.requests[other].listed))
    if there >= most or caches.ids[at + there] != caches.ids[others + there]:
        return there
    missing = most + 1
    there += 1
    while missing - there > 1:
        middle = (there + missing) // 2
        if caches.ids[at + middle - 1] == caches.ids[others + middle - 1]:
            there = middle
        else:
            missing = middle
    return there


@compiled
def most_hits(caches: Caches, tokens: int, block: int) -> tuple[int, int]:
    """Of `tokens`, in engine blocks of `block`: the blocks and the tokens that may be hit at most.

    One token at least is computed, and so the engine block that holds it.
    """
    hits = (tokens - 1) // block * block
    return min((hits + caches.tokens - 1) // caches.tokens, tokens // caches.tokens), hits


@compiled
def new_copy(caches: Caches, w: int, key: int, blocks: int) -> int:
    """A record for a copy in memory that was taken already, or NOTHING where there are no more."""
    copy = caches.workers[w].unused
    if copy != NOTHING:
        caches.workers[w].unused = caches.copies[w, copy].later
    else:
        copy = caches.workers[w].fresh
        if copy == caches.copies.shape[1]:
            return NOTHING
        caches.workers[w].fresh += 1
    caches.copies[w, copy].id = key
    caches.copies[w, copy].users = 0
    caches.copies[w, copy].blocks = blocks
    caches.copies[w, copy].older = copy
    caches.copies[w, copy].younger = NOTHING
    caches.copies[w, copy].next = NOTHING
    return copy


@compiled
def enter(caches: Caches, w: int, copy: int) -> None:
    """Let a copy be found: behind the older ones of its id, or in a place of its own."""
    key = caches.copies[w, copy].id
    at, last = place(caches, key), caches.table.shape[1] - 1
    while caches.table[w, at].copy != 0 and caches.table[w, at].id != key:
        at = (at + 1) & last
    oldest = caches.table[w, at].copy - 1
    if oldest != NOTHING:
        youngest = caches.copies[w, oldest].older
        caches.copies[w, youngest].younger = copy
        caches.copies[w, copy].older = youngest
        caches.copies[w, oldest].older = copy
        return
    caches.table[w, at].id = key
    caches.table[w, at].copy = copy + 1


@compiled
def drop(caches: Caches, w: int, copy: int) -> None:
    """An evicted copy is found no more, and its record is free."""
    key = caches.copies[w, copy].id
    if key != UNKNOWN:
        at, last = place(caches, key), caches.table.shape[1] - 1
        older, younger = caches.copies[w, copy].older, caches.copies[w, copy].younger
        while caches.table[w, at].id != key:
            at = (at + 1) & last
        oldest = caches.table[w, at].copy - 1
        if copy != oldest:
            caches.copies[w, older].younger = younger
            caches.copies[w, oldest if younger == NOTHING else younger].older = older
        elif younger != NOTHING:
            caches.table[w, at].copy = younger + 1
            caches.copies[w, younger].older = older
        else:
            close_gap(caches, w, at)
        caches.copies[w, copy].id = UNKNOWN
    caches.copies[w, copy].later = caches.workers[w].unused
    caches.workers[w].unused = copy
    caches.workers[w].dropped += 1


@compiled
def close_gap(caches: Caches, w: int, gap: int) -> None:
    """Empty a place of the table, and move up those that were put further on for it."""
    last = caches.table.shape[1] - 1
    at = gap
    while True:
        at = (at + 1) & last
        if caches.table[w, at].copy == 0:
            break
        home = place(caches, caches.table[w, at].id)
        if ((at - home) & last) >= ((at - gap) & last):
            caches.table[w, gap].id = caches.table[w, at].id
            caches.table[w, gap].copy = caches.table[w, at].copy
            gap = at
    caches.table[w, gap].copy = 0
