"""The prefix caches of the workers: which blocks of text each one's KV memory still holds.

A block is so many tokens of a sequence, known by the id that stands for it and all before it. A *copy* is a
block in a worker's memory: in use by requests, or asleep, which is free memory that still can be hit. Equal
blocks that were computed side by side are copies of one id; the oldest that is still there is hit. As a
request frees its blocks last to first, no block stays longer than those before it:

    free blocks = empty + asleep          a copy of block j is cached  ⟹  one of block j - 1 is

A block of the prefixes (`tokens`) is one of the engine's, or a multiple of it. Where it is a multiple, a copy
is that many engine blocks that come and go together, hits end at whole copies, and what is left at the end of
a request sleeps as a copy that no lookup finds; memory is counted in the engine's blocks all along.

Records are bounded by a worker's memory: a copy for every block that it holds, in a hash table by its id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import by_reference, compiled
from controlplane.prefixes import Prefixes

Ints = NDArray[np.int64]
Records = Any

NOTHING = -1  # no copy
UNKNOWN = -1  # the id of a copy that no lookup finds
SHORT = 4  # copies there is room for, by whole ones that fit: those of requests' ends are shorter
MIX = np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64, by Steele, Lea and Flood
POSITIVE = np.uint64(0x7FFFFFFFFFFFFFFF)
NEIGHBOURS = 3  # 2^3 ids whose places are one behind the other: those of a conversation come and go together
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 by the golden ratio: multiplying spreads neighbours (Knuth)

COPY = np.dtype(
    [
        ("id", np.int64),
        ("users", np.int16),
        ("blocks", np.int16),  # the engine's, of which it consists
        ("sooner", np.int32),  # of those asleep: the one that is evicted before it,
        ("later", np.int32),  # and after it; of unused records: the next
        (
            "older",
            np.int32,
        ),  # of the copies of its id: the one stored before it (of the oldest: the youngest)
        ("younger", np.int32),
        ("next", np.int32),  # where the block behind it was found last
    ],
    align=True,
)
PLACE = np.dtype([("id", np.int64), ("copy", np.int64)], align=True)  # 1 + the oldest copy of an id, 0: none
CACHE = np.dtype(
    [
        (
            "empty",
            np.int64,
        ),  # free blocks that hold nothing; below 0 where a lone request outgrows its worker
        ("asleep", np.int64),  # free blocks that hold copies
        ("keeps", np.int64),  # 0: nothing is cached here, ever
        ("first", np.int64),  # of the copies asleep: the next to be evicted,
        ("last", np.int64),  # and the last
        ("unused", np.int64),  # records given back, in a list,
        ("fresh", np.int64),  # and the first that was never used
        ("shared", np.int64),  # blocks saved as copies have more than one user
        ("evicted", np.int64),  # blocks, so far
        ("lives", np.int64),  # how often it has begun empty
    ],
    align=True,
)
HOLDING = np.dtype(
    [
        ("begins", np.int64),  # where the list of its ids begins in `ids`,
        ("listed", np.int64),  # how long that is,
        ("at", np.int64),  # and where the list of its copies begins in `held`
        ("copies", np.int64),  # of its blocks from the first on
        ("own", np.int64),  # engine blocks beyond them
        ("cached", np.int64),  # tokens it found cached when it was first admitted; NOTHING before
    ],
    align=True,
)

LINK = np.dtype(
    [
        ("copy_s", np.float64),  # what loading a copy takes
        ("free_s", np.float64),  # when the loads that have begun are done
        ("waiting", np.int64),  # copies that those who wait at the worker should load
    ],
    align=True,
)


@by_reference
class Caches(NamedTuple):
    """Records by worker and by request; `tokens` 0: nothing is cached, and there are no records."""

    tokens: int  # of a block of the prefixes
    shift: int  # of a hash, to a place in the table
    ids: Ints
    workers: Records  # [workers] of CACHE
    copies: Records  # [workers, copies] of COPY
    table: Records  # [workers, places] of PLACE
    requests: Records  # [requests] of HOLDING
    held: NDArray[np.int32]  # copies held by requests


@by_reference
class HostMemory(NamedTuple):
    """What lies below caches, in the workers' host memory; `chunks.tokens` 0: nothing does."""

    chunks: Caches
    links: Records  # [workers] of LINK
    loads: Ints  # [requests] copies that one should load which waits at a worker


def no_caches() -> Caches:
    """For engines that cache nothing."""
    return Caches(
        0,
        0,
        np.zeros(0, np.int64),
        np.zeros(0, CACHE),
        np.zeros((0, 0), COPY),
        np.zeros((0, 0), PLACE),
        np.zeros(0, HOLDING),
        np.zeros(0, np.int32),
    )


def no_host_memory() -> HostMemory:
    """For engines that keep nothing below their caches."""
    return HostMemory(no_caches(), np.zeros(0, LINK), np.zeros(0, np.int64))


def new_caches(prefixes: Prefixes, kv_blocks: Ints, block_tokens: Ints, tokens: Ints) -> Caches:
    """Empty caches for workers of so many blocks of so many tokens; `tokens` [requests] in all."""
    multiple = prefixes.block_tokens // block_tokens
    room = np.where(multiple == 1, kv_blocks, np.minimum(SHORT * (kv_blocks // multiple + 1), kv_blocks))
    copies = max(int(room.max()), 1)
    bits = int(copies).bit_length()  # more places than copies; most copies that fit are short, and in none
    lists = tokens // prefixes.block_tokens
    requests = np.zeros(len(tokens), HOLDING)
    requests["at"] = np.cumsum(lists) - lists
    requests["begins"], requests["listed"] = prefixes.offsets[:-1], np.diff(prefixes.offsets)
    requests["cached"] = NOTHING
    caches = Caches(
        prefixes.block_tokens,
        64 - bits,
        prefixes.ids,
        np.zeros(len(kv_blocks), CACHE),
        np.zeros((len(kv_blocks), copies), COPY),
        np.zeros((len(kv_blocks), 1 << bits), PLACE),
        requests,
        np.zeros(int(lists.sum()), np.int32),
    )
    for w, blocks in enumerate(kv_blocks.tolist()):
        forget(caches, w, blocks)
    return caches


@compiled
def chain(tokens: Ints, block: int, before: int, ids: Ints) -> int:
    """Fill `ids` with those of the full blocks of `tokens`, which follow the id `before`; how many."""
    blocks = min(len(tokens) // block, len(ids))
    state = np.uint64(before)
    for b in range(blocks):
        for i in range(b * block, (b + 1) * block):
            state = (state ^ np.uint64(tokens[i])) * MIX
            state ^= state >> np.uint64(29)
        state = (state * SPREAD) & POSITIVE
        ids[b] = np.int64(state)
    return blocks


def new_mirrors(
    workers: int, kv_blocks: int, engine_block: int, requests: int, tokens: int, block: int
) -> Caches:
    """Mirrors of nothing, for workers of up to `kv_blocks` and requests of up to `tokens`."""
    none = Prefixes(block, np.zeros(requests + 1, np.int64), np.zeros(0, np.int64))
    rooms = np.full(workers, kv_blocks), np.full(workers, engine_block)
    caches = new_caches(none, *rooms, np.full(requests, tokens))
    caches.requests["begins"] = caches.requests["at"]
    for w in range(workers):
        forget(caches, w, 0)
    return caches._replace(ids=np.zeros(len(caches.held), np.int64))


def new_host_mirrors(caches: Caches, blocks: int) -> HostMemory:
    """Mirrors of nothing in host memory, below these, for workers of up to so many blocks."""
    none = Prefixes(caches.tokens, np.zeros(1, np.int64), np.zeros(0, np.int64))
    workers = len(caches.workers)
    chunks = new_caches(
        none, np.full(workers, blocks), np.full(workers, caches.tokens), np.zeros(0, np.int64)
    )
    chunks = chunks._replace(ids=caches.ids, requests=caches.requests, held=caches.held)
    for w in range(workers):
        forget(chunks, w, 0)
    return HostMemory(chunks, np.zeros(workers, LINK), np.zeros(len(caches.requests), np.int64))


@compiled
def forget(caches: Caches, w: int, blocks: int) -> None:
    """Worker `w` starts with `blocks` empty blocks, 0 for one that caches nothing. Nothing may run there."""
    for at in range(caches.table.shape[1]):
        caches.table[w, at].copy = 0
    worker = caches.workers[w]
    worker.empty = blocks
    worker.keeps = int(blocks > 0)
    worker.lives += 1
    worker.asleep = worker.shared = worker.fresh = 0
    worker.first = worker.last = worker.unused = NOTHING


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
def cached_blocks(caches: Caches, w: int, r: int, there: int, most: int, guess: int, in_use: bool) -> int:
    """How many of a request's first `most` blocks are cached at a worker now, if more than `there`.

    Touches nothing. `in_use`: cached and in use. A cached block's predecessors are cached too, so the count
    is searched for by doubling and halving: 2·log2(n) looks into the table for n blocks, two where it is
    `there` or `guess`.
    """
    missing = most + 1  # of the counts from `missing` on, none is all cached
    if there < guess <= most:
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
