"""Orders of workers by a number each, as tournament trees: the first is found without a look at the others.

    tree[places + w] = the number of worker w,  inf where it has none
    tree[i]          = min(tree[2i], tree[2i + 1])        tree[1]: the least of all

A number that changes is written again up to the root: log2(workers) steps. Of equal ones the lowest worker is
the first. Several trees of one fleet are the rows of one array.

`Orders` are those in which placement looks at workers, by their load. **The number of a worker is what its
load was when something last happened to it, or when it was last looked at.** Until something happens to it
again, a worker's load only grows: its requests stay, and their tokens become more. So what is written is
never more than the load, and the first whose load is still what is written has the least of all. Where what
happens to workers is not told (`are_kept` 0), an order is made anew each time it is asked for.
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
ASKED = 8  # requests of which what workers have cached is remembered: those that wait are asked of in turn
ORDERS = 6  # kept at a time: one for each policy and class that is asked for, in each pool

ORDER = np.dtype(
    [
        ("is_made", np.int64),
        ("policy", np.int64),
        ("is_decode_pool", np.int64),
        ("request", np.int64),  # one with the targets that it goes by
        ("unasked", np.int64),  # changes of workers since it was last asked for
    ],
    align=True,
)


@by_reference
class Orders(NamedTuple):
    """The orders in which placement looks at workers."""

    are_kept: Ints  # [1] whether every change of a worker is told
    made: Ints  # [1] how many of the rows have been used since
    of: Records  # [orders] of ORDER
    trees: Floats  # [orders, 2 * places]
    aside: Ints  # [workers] those that are out of a tree for the rest of a search, and their numbers
    aside_load: Floats
    changes: Ints  # [1] so far, of anything
    asked_of: Ints  # [ASKED] requests of which it was asked lately what workers have cached;
    cached: Ints  # [ASKED, workers] what that was,
    cached_at: Ints  # and the number of changes until then, 0 where it was not asked


def new_orders(workers: int) -> Orders:
    """None made."""
    return Orders(
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(ORDERS, ORDER),
        new_trees(ORDERS, workers),
        np.zeros(workers, np.int64),
        np.zeros(workers),
        np.zeros(1, np.int64),
        np.full(ASKED, -1, np.int64),
        np.zeros((ASKED, workers), np.int64),
        np.zeros((ASKED, workers), np.int64),
    )


def new_trees(trees: int, workers: int) -> Floats:
    """Trees in which no worker has a number."""
    return np.full((trees, 2 << max(workers - 1, 0).bit_length()), np.inf)


@compiled
def first(trees: Floats, t: int) -> int:
    """The worker with the least number; any where none has one."""
    places, i = trees.shape[1] // 2, 1
    while i < places:
        i = 2 * i + (trees[t, 2 * i] > trees[t, 2 * i + 1])
    return i - places


@compiled
def number_of(trees: Floats, t: int, w: int) -> float:
    """A worker's number, or inf."""
    return trees[t, trees.shape[1] // 2 + w]


@compiled
def write(trees: Floats, t: int, w: int, number: float) -> None:
    """A worker has another number; inf: none."""
    i = trees.shape[1] // 2 + w
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
    for i in range(trees.shape[1] // 2 - 1, 0, -1):
        trees[t, i] = min(trees[t, 2 * i], trees[t, 2 * i + 1])


@compiled
def begin_keeping(orders: Orders) -> None:
    """From now on every change of a worker is told; nothing is known of what was before."""
    orders.are_kept[0], orders.made[0] = 1, 0
    orders.changes[0] += 1
