"""The cluster's waiting queue: requests that no worker has taken yet, in one order in both data planes.

    rank = arrival_s + ttft_s - ageing_s · priority       the lowest goes first; no rank ever changes

The request that is due first goes first, so a class with slack waits for one that has none. A high priority
counts as due `ageing_s` sooner: it overtakes younger normal requests, and a normal one that has waited longer
by that much goes ahead of it. A request that can no longer meet its TTFT is *late*: it goes behind all that
are on time, so that it waits until it costs none of them anything. A round offers the requests in this order.
One that finds no place lets others pass, until `REFUSALS` of them found none. A full queue turns away a late
request before it refuses one that may still be in time. Work that yields to a tighter class is there to wait:
on time it takes no place in a full queue, however much there is of it.

The lists are linked through the ledger's `next`; compiled code of the simulated plane and the live gateway
work on the same records.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from controlplane.compiled import by_reference, compiled
from controlplane.errors import BadInput
from controlplane.placement.ledger import HELD, NONE, Floats, Ints, Ledger
from controlplane.placement.outlook import hopeless, time_left_s

REFUSALS = 4  # held requests that may find no place before the others are left for the next round
LATE = 2  # the lists: by priority those on time, and from here on, by priority, those late
UNBOUNDED = 1 << 60
AGEING_S = 10.0
SELDOM_S, OF_TTFT = 0.25, 1e-3  # the longest between two offers to those that yield; or of their TTFT target
_WAITING, _REFUSED, _YIELDING = 0, 1, 2


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the queue: requests, and seconds that one may wait; past either it is turned away.

    `max_requests` bounds what does not yield to a tighter class, and what is late.
    """

    max_requests: int = UNBOUNDED
    max_wait_s: float = inf
    ageing_s: float = AGEING_S

    def __post_init__(self) -> None:
        if self.max_requests < 0 or not self.max_wait_s > 0 or not self.ageing_s >= 0:
            raise BadInput(f"queue: lengths and times must not be negative, got {self}")


@by_reference
class Queue(NamedTuple):
    """The lists, and the round under way."""

    head: Ints  # [4] of normal, high, late normal, late high
    tail: Ints
    refused: Ints  # [REFUSALS] those that this round found no place for
    counts: Ints  # [3] how many wait, how many of `refused` are of this round, how many on time yield
    limits: Floats  # [1] ageing_s and max_wait_s
    max_requests: int

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return int(self.counts[_WAITING])


def new_queue(settings: QueueSettings) -> Queue:
    """An empty queue."""
    return Queue(
        head=np.full(2 + LATE, NONE, np.int64),
        tail=np.full(2 + LATE, NONE, np.int64),
        refused=np.full(REFUSALS, NONE, np.int64),
        counts=np.zeros(3, np.int64),
        limits=np.array([settings.ageing_s, settings.max_wait_s]),
        max_requests=settings.max_requests,
    )


@compiled
def is_empty(queue: Queue) -> bool:
    """Whether no request waits."""
    return queue.counts[_WAITING] == 0


@compiled
def hold(ledger: Ledger, queue: Queue, r: int, now_s: float) -> None:
    """Put a newcomer into the line of its priority, most often at its end; `turned_away` has made room."""
    last = queue.tail[ledger.requests[r].priority]
    if last != NONE and is_due_before(ledger, r, last):
        readmit(ledger, queue, r, now_s)
    else:
        insert(ledger, queue, ledger.requests[r].priority, last, r)
        begin_waiting(ledger, queue, r, now_s)


@compiled
def readmit(ledger: Ledger, queue: Queue, r: int, now_s: float) -> None:
    """Put a request, as one that lost its worker, where it is due; never turned away for want of room."""
    before, i = NONE, queue.head[ledger.requests[r].priority]
    while i != NONE and is_due_before(ledger, i, r):
        before, i = i, ledger.requests[i].next
    insert(ledger, queue, ledger.requests[r].priority, before, r)
    begin_waiting(ledger, queue, r, now_s)


@compiled
def is_due_before(ledger: Ledger, one: int, other: int) -> bool:
    """Whether a request's first token is due before another's; of one class, whether it came before it."""
    sooner_s = ledger.requests[one].ttft_s - ledger.requests[other].ttft_s
    return ledger.requests[one].arrival_s + sooner_s < ledger.requests[other].arrival_s


@compiled
def goes_first(ledger: Ledger, queue: Queue, r: int) -> bool:
    """Whether a newcomer need not wait behind others: none waits, or all that wait are due after it."""
    for at in range(len(queue.head)):
        if queue.head[at] != NONE and not is_due_before(ledger, r, queue.head[at]):
            return False
    return True


@compiled
def next_offer_s(ledger: Ledger, queue: Queue, every_s: float) -> float:
    """In how long those that wait are offered again; where all of them yield to others, not so often."""
    pause_s = SELDOM_S
    for at in range(len(queue.head)):
        r = queue.head[at]
        if r != NONE:
            yields = ledger.requests[r].yields_tpot_s > 0.0
            pause_s = min(pause_s, ledger.requests[r].ttft_s * OF_TTFT if yields else every_s)
    return max(pause_s, every_s)


@compiled
def begin_waiting(ledger: Ledger, queue: Queue, r: int, now_s: float) -> None:
    """Count a request that now waits."""
    ledger.requests[r].phase = HELD
    ledger.requests[r].worker = NONE
    ledger.requests[r].held_s = now_s
    queue.counts[_WAITING] += 1
    queue.counts[_YIELDING] += yields(ledger, r)


@compiled
def yields(ledger: Ledger, r: int) -> bool:
    """Whether a request's class leaves room for a tighter one."""
    return ledger.requests[r].yields_tpot_s != 0.0


@compiled
def insert(ledger: Ledger, queue: Queue, at: int, before: int, r: int) -> None:
    """Link a request into a list behind `before`, or at its head for NONE."""
    if before == NONE:
        ledger.requests[r].next = queue.head[at]
        queue.head[at] = r
    else:
        ledger.requests[r].next = ledger.requests[before].next
        ledger.requests[before].next = r
    if queue.tail[at] == before:
        queue.tail[at] = r


@compiled
def leave(ledger: Ledger, queue: Queue, r: int) -> bool:
    """Take a request out of the queue, wherever it stands; False where it does not wait."""
    if ledger.requests[r].phase != HELD:
        return False
    p = ledger.requests[r].priority
    if unlink(ledger, queue, p, r):
        queue.counts[_YIELDING] -= yields(ledger, r)
    elif not unlink(ledger, queue, LATE + p, r):
        return False
    queue.counts[_WAITING] -= 1
    return True


@compiled
def unlink(ledger: Ledger, queue: Queue, at: int, r: int) -> bool:
    """Take a request out of a list; False where it is not in it."""
    before, i = NONE, queue.head[at]
    while i != NONE and i != r:
        before, i = i, ledger.requests[i].next
    if i == NONE:
        return False
    if before == NONE:
        queue.head[at] = ledger.requests[r].next
    else:
        ledger.requests[before].next = ledger.requests[r].next
    if queue.tail[at] == r:
        queue.tail[at] = before
    ledger.requests[r].next = NONE
    return True


@compiled
def begin_round(queue: Queue) -> None:
    """Begin a round: every request is offered again."""
    queue.counts[_REFUSED] = 0


@compiled
def refuse(queue: Queue, r: int) -> None:
    """No worker takes the request that was offered; it keeps its place, and others may pass it."""
    queue.refused[queue.counts[_REFUSED]] = r
    queue.counts[_REFUSED] += 1


@compiled
def offer(ledger: Ledger, queue: Queue, now_s: float) -> tuple[int, bool]:
    """The request to be offered next (NONE ends the round), and whether it has lost its TTFT just now.

    One that has is not offered yet: it has been put among the late. Otherwise the caller places it, after
    `leave`, or calls `refuse`.
    """
    r = first_of(ledger, queue, 0)
    if r != NONE and np.isnan(ledger.requests[r].first_s) and hopeless(ledger, r, now_s, False):
        demote(ledger, queue, r)
        return r, True
    return (first_of(ledger, queue, LATE) if r == NONE else r), False


@compiled
def offer_late(ledger: Ledger, queue: Queue) -> int:
    """The same among the late alone."""
    return first_of(ledger, queue, LATE)


@compiled
def first_of(ledger: Ledger, queue: Queue, late: int) -> int:
    """The first in line of those on time (0) or LATE whom this round has not refused; NONE past REFUSALS."""
    if queue.counts[_REFUSED] >= REFUSALS:
        return NONE
    normal, high = first_not_refused(ledger, queue, late), first_not_refused(ledger, queue, late + 1)
    if high == NONE:
        return normal
    return high if normal == NONE or is_ahead(ledger, queue, high, normal) else normal


@compiled
def first_not_refused(ledger: Ledger, queue: Queue, at: int) -> int:
    """The first of a list whom this round has not refused."""
    r = queue.head[at]
    i = 0
    while r != NONE and i < queue.counts[_REFUSED]:
        if queue.refused[i] == r:
            r, i = ledger.requests[r].next, 0
        else:
            i += 1
    return r


@compiled
def is_ahead(ledger: Ledger, queue: Queue, high: int, normal: int) -> bool:
    """Whether a high request's rank is not above a normal one's."""
    sooner_s = ledger.requests[high].ttft_s - ledger.requests[normal].ttft_s
    return ledger.requests[high].arrival_s - queue.limits[0] + sooner_s <= ledger.requests[normal].arrival_s


@compiled
def demote(ledger: Ledger, queue: Queue, r: int) -> None:
    """Put a request on time behind the late ones of its priority."""
    unlink(ledger, queue, ledger.requests[r].priority, r)
    queue.counts[_YIELDING] -= yields(ledger, r)
    late = LATE + ledger.requests[r].priority
    insert(ledger, queue, late, queue.tail[late], r)


@compiled
def line_up(ledger: Ledger, queue: Queue, now_s: float, line: Ints, lost: Ints) -> tuple[int, int]:
    """Fill `line` with those on time, in order, and `lost` with those demoted; return how many of each."""
    n, m = 0, 0
    normal, high = queue.head[0], queue.head[1]
    while n < len(line) and m < len(lost) and (normal != NONE or high != NONE):
        if high != NONE and (normal == NONE or is_ahead(ledger, queue, high, normal)):
            r, high = high, ledger.requests[high].next
        else:
            r, normal = normal, ledger.requests[normal].next
        if np.isnan(ledger.requests[r].first_s) and hopeless(ledger, r, now_s, False):
            demote(ledger, queue, r)
            lost[m] = r
            m += 1
        else:
            line[n] = r
            n += 1
    return n, m


@compiled
def on_time(ledger: Ledger, queue: Queue, now_s: float, line: Ints, left_s: Floats) -> int:
    """Fill `line` with the first who may be on time, in order; `left_s`: until each must begin. How many."""
    n = 0
    normal, high = queue.head[0], queue.head[1]
    while n < len(line) and (normal != NONE or high != NONE):
        if high != NONE and (normal == NONE or is_ahead(ledger, queue, high, normal)):
            r, high = high, ledger.requests[high].next
        else:
            r, normal = normal, ledger.requests[normal].next
        left = time_left_s(ledger, r, now_s)
        if left >= 0.0:
            line[n], left_s[n] = r, left
            n += 1
    return n


@compiled
def turned_away(ledger: Ledger, queue: Queue, r: int) -> int:
    """The request that is turned away for newcomer `r`, which may be `r` itself; NONE while there is room.

    That is the last in line of its own priority or below, if that is not the newcomer. Late ones go first,
    then, for a high newcomer, the youngest normal one; none on time that yields.
    """
    if yields(ledger, r) or queue.counts[_WAITING] - queue.counts[_YIELDING] < queue.max_requests:
        return NONE
    if queue.tail[LATE] != NONE:
        return queue.tail[LATE]
    if ledger.requests[r].priority > 0:
        if queue.tail[LATE + 1] != NONE:
            return queue.tail[LATE + 1]
        youngest, i = NONE, queue.head[0]
        while i != NONE:
            youngest, i = youngest if yields(ledger, i) else i, ledger.requests[i].next
        if youngest != NONE:
            return youngest
    return r


@compiled
def overdue(ledger: Ledger, queue: Queue, now_s: float) -> int:
    """A request that has waited as long as any may, or NONE; one that yields may for its TTFT target."""
    if queue.limits[1] == np.inf:
        return NONE
    for at in range(len(queue.head)):
        r = queue.head[at]
        while r != NONE:
            own_s = ledger.requests[r].ttft_s if yields(ledger, r) else 0.0
            if now_s - ledger.requests[r].held_s >= max(queue.limits[1], own_s):
                return r
            r = ledger.requests[r].next
    return NONE
