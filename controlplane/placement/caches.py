"""The prefix caches of the workers: which blocks of text each one's KV memory still holds.

A block is a fixed number of tokens of a sequence. Its id stands for the block and all before it. A *copy* is
a block in a worker's memory: in use by requests, or asleep, which is free memory that can still be hit. Equal
blocks that were computed side by side are copies of one id; the oldest that is still there is hit. As a
request frees its blocks last to first, no block stays longer than those before it:

    free blocks = empty + asleep          a copy of block j is cached  ⟹  one of block j - 1 is

A block of the prefixes (`tokens`) is one of the engine's, or a multiple of it. Where it is a multiple, a copy
is that many engine blocks, which come and go together, and hits end at whole copies. What is left at the end
of a request sleeps as a copy that no lookup finds. Memory is always counted in the engine's blocks.

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
        ("blocks", np.int16),  # the engine's blocks in it
        ("sooner", np.int32),  # of those asleep: the one that is evicted before it,
        ("later", np.int32),  # and after it; of unused records: the next
        # Of the copies of its id: the one stored before it (of the oldest: the youngest), and after it.
        ("older", np.int32),
        ("younger", np.int32),
        ("next", np.int32),  # where the block behind it was found last
    ],
    align=True,
)
PLACE = np.dtype([("id", np.int64), ("copy", np.int64)], align=True)  # 1 + the oldest copy of an id, 0: none
CACHE = np.dtype(
    [
        # Free blocks that hold nothing; below 0 where a lone request outgrows its worker.
        ("empty", np.int64),
        ("asleep", np.int64),  # free blocks that hold copies
        ("keeps", np.int64),  # 0: nothing is cached here, ever
        ("first", np.int64),  # of the copies asleep: the next to be evicted,
        ("last", np.int64),  # and the last
        ("unused", np.int64),  # records given back, in a list,
        ("fresh", np.int64),  # and the first that was never used
        ("shared", np.int64),  # blocks saved as copies have more than one user
        ("evicted", np.int64),  # blocks, so far
        ("dropped", np.int64),  # how often copies have gone, one of them or all
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
    """Empty caches for workers with `kv_blocks` blocks of `block_tokens`; `tokens` [requests] in all."""
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
    """Mirrors of nothing in host memory, below these caches, for workers of up to `blocks` blocks."""
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
    worker.dropped += 1
    worker.asleep = worker.shared = worker.fresh = 0
    worker.first = worker.last = worker.unused = NOTHING


@compiled
def join(caches: Caches, w: int, sooner: int, later: int) -> None:
    """In the line of those asleep, let two follow each other; NOTHING is either end."""
    if sooner == NOTHING:
        caches.workers[w].first = later
    else:
        caches.copies[w, sooner].later = later
    if later == NOTHING:
        caches.workers[w].last = sooner
    else:
        caches.copies[w, later].sooner = sooner


@compiled
def wake(caches: Caches, w: int, copy: int) -> None:
    """Take a copy out of the line of those asleep."""
    join(caches, w, caches.copies[w, copy].sooner, caches.copies[w, copy].later)
    caches.workers[w].asleep -= caches.copies[w, copy].blocks


@compiled
def fall_asleep(caches: Caches, w: int, copy: int) -> None:
    """Put a copy that has no users at the end of the line."""
    last = caches.workers[w].last
    caches.copies[w, copy].sooner = last
    caches.copies[w, copy].later = NOTHING
    if last == NOTHING:
        caches.workers[w].first = copy
    else:
        caches.copies[w, last].later = copy
    caches.workers[w].last = copy
    caches.workers[w].asleep += caches.copies[w, copy].blocks
