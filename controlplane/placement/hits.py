"""The hits that placement expects of a request: its tokens that a worker would have cached.

A worker's cache and its host memory count as its last planned step left them. The blocks that requests there
have still to store count, too.
"""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import BLOCK_TOKENS
from controlplane.placement import ledger as state
from controlplane.placement import table
from controlplane.placement.ledger import Ledger
from controlplane.placement.order import ASKED


@compiled
def cached_tokens(ledger: Ledger, w: int, r: int, guess: int, in_use: bool) -> int:
    """Tokens of a request that worker `w` would have in its cache if the request were put there now.

    What requests there will still store counts, so a burst of one prefix finds the worker of the first of it.
    `in_use`: only what others use or will use, which takes no memory. `guess`: the likely answer.
    """
    if ledger.caches.tokens == 0 or ledger.caches.workers[w].keeps == 0:
        return 0
    unit = ledger.caches.tokens
    block = int(ledger.coefficients[ledger.workers[w].variant][BLOCK_TOKENS])
    most, tokens = table.most_hits(ledger.caches, ledger.requests[r].prompt + ledger.requests[r].key, block)
    blocks = table.cached_blocks(ledger.caches, w, r, most, (guess + unit - 1) // unit, in_use)
    i = ledger.workers[w].running_n - 1
    while i >= 0 and ledger.requests[ledger.running[w, i]].phase == state.PREFILLING:
        blocks = soon_cached(ledger, r, ledger.running[w, i], blocks, most)
        i -= 1
    for p in range(len(ledger.queue_head)):
        other = ledger.queue_head[p, w]
        while other != state.NONE:
            blocks = soon_cached(ledger, r, other, blocks, most)
            other = ledger.requests[other].next
    return min(blocks * unit, tokens)


@compiled
def to_load(ledger: Ledger, w: int, r: int, cached: int, known: int) -> tuple[int, bool]:
    """Copies that worker `w` would load from host memory for a request with these tokens cached.

    A whole one at least. And whether one is being loaded, for another. `known`: copies found before.
    """
    chunks = ledger.host.chunks
    if chunks.tokens == 0 or chunks.workers[w].keeps == 0:
        return 0, False
    start = cached // chunks.tokens
    most = (ledger.requests[r].prompt + ledger.requests[r].key) // chunks.tokens
    copies, is_loading = table.copies_from(chunks, w, r, start + known, most)
    copies += known
    if (start + copies) * chunks.tokens - cached < chunks.tokens:
        return 0, False
    return copies, is_loading


@compiled
def with_loads(ledger: Ledger, r: int, cached: int, copies: int) -> int:
    """Tokens of a request that are not computed, by those cached and the copies it loads."""
    if copies == 0:
        return cached
    unit = ledger.host.chunks.tokens
    return min((cached // unit + copies) * unit, ledger.requests[r].prompt + ledger.requests[r].key - 1)


@compiled
def known_cached(ledger: Ledger, w: int, r: int, guess: int) -> int:
    """Tokens that worker `w` would not compute of a request, looked up once until something changes.

    Those of `cached_tokens`, in use or not, and those that it would load from host memory behind them.
    Placing one asks that of every worker up to four times, and again at each offer while it waits: then the
    last answer is the guess. Where changes are not told it is looked up each time.
    """
    if ledger.caches.tokens == 0:
        return 0
    known = ledger.orders
    if not known.are_kept[0]:
        cached = cached_tokens(ledger, w, r, guess, False)
        return with_loads(ledger, r, cached, to_load(ledger, w, r, cached, 0)[0])
    row = r % ASKED
    if known.asked_of[row] != r:
        known.asked_of[row] = r
        known.cached_at[row, :] = 0
    if known.cached_at[row, w] != known.changes[0]:
        before = -1
        if known.cached_at[row, w] > 0:
            guess = before = known.cached[row, w]
        cached = known.cached[row, w] = cached_tokens(ledger, w, r, guess, False)
        if ledger.host.chunks.tokens > 0:
            dropped = ledger.host.chunks.workers[w].dropped
            are_there = cached == before and known.dropped[row, w] == dropped
            known.loads[row, w] = to_load(ledger, w, r, cached, known.loads[row, w] if are_there else 0)[0]
            known.dropped[row, w] = dropped
        known.cached_at[row, w] = known.changes[0]
    return int(with_loads(ledger, r, known.cached[row, w], known.loads[row, w]))


@compiled
def known_loads(ledger: Ledger, w: int, r: int) -> int:
    """Copies that worker `w` would load for a request from host memory, looked up once as `known_cached`."""
    if ledger.host.chunks.tokens == 0:
        return 0
    if not ledger.orders.are_kept[0]:
        return to_load(ledger, w, r, cached_tokens(ledger, w, r, 0, False), 0)[0]
    known_cached(ledger, w, r, 0)
    return int(ledger.orders.loads[r % ASKED, w])


@compiled
def loads_s(ledger: Ledger, w: int, r: int, from_s: float) -> float:
    """Seconds after `from_s` until worker `w` has loaded a request; 0: it would load nothing.

    Loads follow each other: those that have begun, of those that wait there, its own.
    """
    copies = known_loads(ledger, w, r)
    if copies == 0:
        return 0.0
    link = ledger.host.links[w]
    return float(max(link.free_s - from_s, 0.0) + (link.waiting + copies) * link.copy_s)


@compiled
def soon_cached(ledger: Ledger, r: int, other: int, there: int, most: int) -> int:
    """Of a request's first `most` blocks, how many another's prefill stores, if more than `there`."""
    stores = (ledger.requests[other].prompt + ledger.requests[other].key) // ledger.caches.tokens
    return table.common_blocks(ledger.caches, r, other, there, min(most, stores))


@compiled
def shared_tokens(ledger: Ledger, w: int) -> int:
    """Tokens that several requests at a worker hold, or will, and that lie in its memory once."""
    if ledger.caches.tokens == 0:
        return 0
    block = int(ledger.coefficients[ledger.workers[w].variant][BLOCK_TOKENS])
    return int(ledger.caches.workers[w].shared) * block + ledger.workers[w].queued_shared


@compiled
def empty_blocks(ledger: Ledger, w: int) -> int:
    """Blocks of a worker's memory that hold nothing, neither in use nor cached."""
    return int(ledger.caches.workers[w].empty) if ledger.caches.tokens > 0 else 0


@compiled
def empty_everywhere(ledger: Ledger, w: int) -> int:
    """The same of its memory and its host memory."""
    blocks = empty_blocks(ledger, w)
    if ledger.host.chunks.tokens > 0:
        block = int(ledger.coefficients[ledger.workers[w].variant][BLOCK_TOKENS])
        blocks += int(ledger.host.chunks.workers[w].empty) * (ledger.host.chunks.tokens // block)
    return blocks
