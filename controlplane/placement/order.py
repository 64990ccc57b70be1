"""Orders of workers by a number each, as tournament trees: the first is found without a look at the others.

    tree[places + w] = the number of worker w,  inf where it has none
    tree[i]          = min(tree[2i], tree[2i + 1])        tree[1]: the least of all

A number that changes is written again up to the root: log2(workers) steps. Of equal ones the lowest worker is
the first. Several trees of one fleet are the rows of one array.

`Orders` are those in which placement looks at workers, by their load. **The number of a worker is what its
load was when something last happened to it, or when it was last looked at.** Until something happens to it
again, a worker's load only grows: its requests stay, and their tokens become more. So what is written is
never more than the load, and the first whose load is still what is written has the least of all. Where
changes of workers are not reported (`are_kept` 0), an order is rebuilt each time it is asked for.

A worker can be **closed** to prompts from a level on, the lowest of LEVELS that it is known to refuse,
until a time or until something happens to it. It then stands in the tree of that level, at which a request
with a shorter prompt looks too: its order is that of several trees. Else all that have just begun to decode
a request, a share of the fleet, would be asked again for each one that is placed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import by_reference, compiled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Records = Any

FEW = 8  # workers that are sooner looked at one after the other
MANY = 200  # workers from which on it pays to close some: of fewer most are asked but once in a step
ASKED = 64  # requests whose cached tokens on workers are remembered: those that wait are looked up in turn
ORDERS = 6  # kept at a time: one for each policy and class that is asked for, in each pool
LEVELS = (1, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 3072, 6144)  # tokens of prompts
OPEN = len(LEVELS)  # the row of an order's trees that has the workers which are closed to none
UNTIL, LONGEST = OPEN + 1, OPEN + 2  # rows of the closed: by when that ends, and by the longest they refuse
ROWS = OPEN + 3
PAD = 8  # numbers between trees: roots at powers of two would be in each other's way in a processor's cache

ORDER = np.dtype(
    [
        ("is_made", np.int64),
        ("policy", np.int64),
        ("is_decode_pool", np.int64),
        ("request", np.int64),  # one with the targets that the order is for
        ("unasked", np.int64),  # changes of workers since it was last asked for
    ],
    align=True,
)


@by_reference
class Orders(NamedTuple):
    """The orders in which placement looks at workers."""

    are_kept: Ints  # [1] whether every change of a worker is reported
    made: Ints  # [1] how many of the rows have been used since
    of: Records  # [orders] of ORDER
    trees: Floats  # [orders * ROWS, 2 * places + PAD]
    level: Ints  # [orders, workers] each worker's row
    aside: Ints  # [workers] those that are out of a tree for the rest of a search, and their numbers
    aside_load: Floats
    changes: Ints  # [1] so far, of anything
    least_of: Ints  # [ASKED] requests whose least time to prefill was worked out lately,
    least_s: Floats  # [ASKED, 2] on an idle worker, and on a busy one; 0 where it was not
    asked_of: Ints  # [ASKED] requests whose cached tokens on workers were looked up lately;
    cached: Ints  # [ASKED, workers] those tokens,
    loads: Ints  # the copies in host memory that the worker would load,
    dropped: Ints  # how often its host memory had dropped some by then,
    cached_at: Ints  # and the number of changes until then, 0 where it was not looked up


def new_orders(workers: int) -> Orders:
    """None made."""
    return Orders(
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(ORDERS, ORDER),
        new_trees(ORDERS * ROWS, workers),
        np.full((ORDERS, workers), OPEN, np.int64),
        np.zeros(workers, np.int64),
        np.zeros(workers),
        np.zeros(1, np.int64),
        np.full(ASKED, -1, np.int64),
        np.zeros((ASKED, 2)),
        np.full(ASKED, -1, np.int64),
        *(np.zeros((ASKED, workers), np.int64) for _ in range(4)),
    )


def new_trees(trees: int, workers: int) -> Floats:
    """Trees in which no worker has a number."""
    return np.full((trees, (2 << max(workers - 1, 0).bit_length()) + PAD), np.inf)


@compiled
def places(trees: Floats) -> int:
    """How many workers a tree has room for."""
    return (trees.shape[1] - PAD) // 2


@compiled
def first(trees: Floats, t: int) -> int:
    """The worker with the least number; any where none has one."""
    leaves, i = places(trees), 1
    while i < leaves:
        i = 2 * i + (trees[t, 2 * i] > trees[t, 2 * i + 1])
    return i - leaves


@compiled
def number_of(trees: Floats, t: int, w: int) -> float:
    """A worker's number, or inf."""
    return trees[t, places(trees) + w]


@compiled
def write(trees: Floats, t: int, w: int, number: float) -> None:
    """A worker has another number; inf: none."""
    i = places(trees) + w
    trees[t, i] = number
    while i > 1:
        i //= 2
        least = min(trees[t, 2 * i], trees[t, 2 * i + 1])
        if trees[t, i] == least:
            return
        trees[t, i] = least


@compiled
def set_up(trees: Floats, t: int) -> None:
    """Bring a tree up to the numbers of its workers."""
    for i in range(places(trees) - 1, 0, -1):
        trees[t, i] = min(trees[t, 2 * i], trees[t, 2 * i + 1])


@compiled
def level_of(tokens: int) -> int:
    """The highest level that a prompt is not below."""
    level = 0
    while level + 1 < OPEN and LEVELS[level + 1] <= tokens:
        level += 1
    return level


@compiled
def next_in_order(orders: Orders, t: int, level: int) -> tuple[int, float]:
    """The least loaded worker that is not closed to a level, and its number; -1, inf where there is none."""
    row, w = t * ROWS + OPEN, -1
    least = orders.trees[row, 1]
    if least < np.inf:
        w = first(orders.trees, row)
    for other in range(t * ROWS + level + 1, row):
        number = orders.trees[other, 1]
        if number <= least and number < np.inf:
            v = first(orders.trees, other)
            if number < least or v < w:
                least, w = number, v
    return w, least


@compiled
def renumber(orders: Orders, t: int, w: int, number: float) -> None:
    """A worker has another number in an order, and is closed to what it was closed to."""
    write(orders.trees, t * ROWS + orders.level[t, w], w, number)


@compiled
def enter(orders: Orders, t: int, w: int, number: float) -> None:
    """A worker has another number in an order, and is open."""
    if orders.level[t, w] != OPEN:
        for row in (orders.level[t, w], UNTIL, LONGEST):
            write(orders.trees, t * ROWS + row, w, np.inf)
        orders.level[t, w] = OPEN
    write(orders.trees, t * ROWS + OPEN, w, number)


@compiled
def close(orders: Orders, t: int, w: int, number: float, level: int, longest: float, until_s: float) -> None:
    """Close a worker to prompts from `level` on, up to `longest` tokens, until `until_s`.

    `until_s` inf: until something happens to the worker.
    """
    renumber(orders, t, w, np.inf)
    orders.level[t, w] = level
    write(orders.trees, t * ROWS + level, w, number)
    write(orders.trees, t * ROWS + UNTIL, w, until_s)
    write(orders.trees, t * ROWS + LONGEST, w, longest)


@compiled
def open_again(orders: Orders, t: int, w: int) -> None:
    """It is not known any more what a worker refuses."""
    if orders.level[t, w] != OPEN:
        enter(orders, t, w, number_of(orders.trees, t * ROWS + orders.level[t, w], w))


@compiled
def open_those(orders: Orders, t: int, tokens: int, now_s: float) -> None:
    """Open the workers that were closed until now, or to shorter prompts alone."""
    for row, at_most in ((UNTIL, now_s), (LONGEST, tokens - 1.0)):
        while orders.trees[t * ROWS + row, 1] <= at_most:
            open_again(orders, t, first(orders.trees, t * ROWS + row))


@compiled
def has_more(orders: Orders, w: int) -> None:
    """A worker has been given a request."""
    for t in range(orders.made[0]):
        open_again(orders, t, w)


@compiled
def begin_order(orders: Orders, t: int) -> None:
    """Empty an order that is to be rebuilt: no worker is closed."""
    for row in range(t * ROWS, (t + 1) * ROWS):
        if orders.trees[row, 1] < np.inf:
            orders.trees[row, :] = np.inf
    orders.level[t, :] = OPEN


@compiled
def begin_keeping(orders: Orders) -> None:
    """From now on every change of a worker is reported; nothing is known of earlier ones."""
    orders.are_kept[0], orders.made[0] = 1, 0
    orders.changes[0] += 1
    orders.least_of[:] = -1
