"""The records of a simulated run: the cluster's state beyond its ledger, and the engines' activities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import by_reference
from controlplane.perfmodel.profile import Profile
from controlplane.placement.caches import LINK, Caches, HostMemory, new_caches, no_caches
from controlplane.placement.constraints import SettingsRow
from controlplane.placement.ledger import NONE, Floats, Ints, Records
from controlplane.placement.order import new_trees
from controlplane.placement.queue import Queue, QueueSettings, new_queue
from controlplane.prefixes import Prefixes

READY, FAIL, DRAIN = 0, 1, 2  # what the timeline can do to a worker

CLOCK = np.dtype(
    [
        ("now_s", np.float64),
        ("offer_s", np.float64),  # when held requests are offered next; inf while there are none
        ("transit_n", np.int64),
        ("timeline_at", np.int64),
    ],
    align=True,
)


SENT = np.dtype(
    [
        ("sent", np.int64),  # requests that have been sent
        ("due", np.int64),  # entries of `due`
        ("released", np.int64),  # ended requests whose followers know of it
        ("begun", np.int64),  # sessions begun, where agents run them
    ],
    align=True,
)


@by_reference
class Sending(NamedTuple):
    """When requests are sent (see sending.py); in an open loop all but `counts` and `order` is empty."""

    counts: Records  # [1] of SENT
    order: Ints  # [requests] the rows as they are sent
    due: Ints  # [requests] heap
    left: Ints  # [requests] answers that each still waits for
    think_s: Floats
    # rows that wait for each row's answer
    after: Ints
    after_at: Ints
    # Of each session, in order of first arrival: those not ended yet, and the rows that wait for nothing,
    unended: Ints
    session: Ints  # [requests] its place in that order, or -1
    heads: Ints
    heads_at: Ints
    head_s: Floats  # [heads] after the session's beginning


@by_reference
class Cluster(NamedTuple):
    """State of the run beyond ledger and engines."""

    clock: Records  # [1] of CLOCK
    sending: Sending
    queue: Queue  # requests that no worker has taken
    transit: Ints  # [requests] KV on its way to a decode worker,
    transit_s: Floats  # when it gets there
    # what happens to workers, in order of time
    timeline_s: Floats
    timeline_worker: Ints
    timeline_what: Ints


def new_cluster(
    requests: int, timeline: list[tuple[float, int, int]], queue: QueueSettings, sending: Sending
) -> Cluster:
    """A cluster at time 0; `timeline` rows are (seconds, worker, READY | FAIL | DRAIN)."""
    rows = sorted(timeline)
    clock = np.zeros(1, CLOCK)
    clock["offer_s"] = np.inf
    return Cluster(
        clock=clock,
        sending=sending,
        queue=new_queue(queue),
        transit=np.zeros(requests, np.int64),
        transit_s=np.zeros(requests),
        timeline_s=np.array([r[0] for r in rows], np.float64),
        timeline_worker=np.array([r[1] for r in rows], np.int64),
        timeline_what=np.array([r[2] for r in rows], np.int64),
    )


@by_reference
class Rules(NamedTuple):
    """The rules of a run, which do not change during it."""

    policy: int
    settings: SettingsRow
    split: bool
    transfer_s: Floats  # [workers] of a request's KV, from this prefill worker to a decode worker,
    token_transfer_s: Floats  # and what each of its tokens adds
    offer_every_s: float  # how often held requests are offered to the workers again
    patience: float  # a held request is placed regardless once it waited this many of its TTFT
    max_misses: int  # stop the run when more have missed their targets
    draws: Floats  # [requests, 2] uniform


IDLE, WAKING, PREFILL_STEP, DECODE_RUN, MIXED_STEP, LOADING = 0, 1, 2, 3, 4, 5


ENGINE = np.dtype(
    [
        ("activity", np.int64),
        ("next_s", np.float64),  # when the activity ends; inf for an idle worker
        ("grown", np.int64),  # steps of a decode run for which the cache has given memory
        ("blocked", np.int64),  # 1 while the head of the queue is known not to fit
        ("busy_s", np.float64),
        ("reserved_blocks", np.int64),  # KV and
        ("reserved_seats", np.int64),  # places in the batch, promised to requests on their way here
        ("loading", np.int64),  # requests whose KV is loaded from host memory
        ("free", np.int64),  # where nothing is cached: blocks that are left in the step that is planned,
        ("at_least", np.int64),  # and 1 if decoding requests were counted at the most that they may hold
        ("soonest", np.int64),  # steps from the plan on after which the first has all its tokens
        ("first_end", np.int64),  # the worker's step count at which a decoding one has; 0: not known
        ("prefill", np.int64),  # tokens of prefill that it carries,
        ("squares", np.float64),  # and the growth of their squared lengths
        ("slowdown", np.float64),  # by what share steps are longer: KV is being copied
        ("first_rank", np.int64),  # the first of the engines that step together with it,
        ("ranks", np.int64),  # and how many there are
        ("shared_s", np.float64),  # of its step, what their steps add up (`perfmodel/ranks.py`)
        ("ahead_s", np.float64),  # of the steps planned already, where it plans ahead,
        ("planned_s", np.float64),  # when the step that just ended was planned,
        ("spent", np.int64),  # and 1 if that step's budget was used up
    ],
    align=True,
)
JOB = np.dtype(
    [
        ("output", np.int64),  # how long it really is
        ("tpot_s", np.float64),  # what it is judged by; the ledger's is what placement keeps
        ("computed", np.int64),  # prefill tokens done
        ("chunk", np.int64),  # prefill tokens in the step in progress
        ("placed_s", np.float64),  # when it came to its worker
        ("finish_s", np.float64),  # NaN until it ends; inf for one that was turned away
        ("preemptions", np.int64),
        ("migrations", np.int64),
        ("missed", np.int64),  # 1 once it is known that a target is not met
        ("weight", np.float64),  # what it counts for then
        ("refused_s", np.float64),  # when last every worker refused it,
        ("refused_late", np.int64),  # whether its TTFT was lost then,
        ("no_chance", np.int64),  # and 1 if none took it as a last chance either
        ("passed", np.int64),  # blocks that no window of it reaches,
        ("given", np.int64),  # and those of them that each group of windows has given back
    ],
    align=True,
)
TOTAL = np.dtype(
    [
        ("misses", np.float64),  # requests known not to meet their targets, of a sample those they tell of
        ("handover_n", np.int64),  # entries of `handover`
        ("ended_n", np.int64),  # and of `ended`
    ],
    align=True,
)


TIER = np.dtype(
    [
        ("plan", np.int64),  # the step that is planned,
        ("new", np.int64),  # the copies that it has stored so far,
        ("offer", np.int64),  # and the offers of copies so far
        ("loaded", np.int64),  # copies that are being loaded
        ("failed", np.int64),  # 1: a store found no room
        ("ended", np.int64),  # of those that ended since the last step: the first,
        ("last_ended", np.int64),  # and the last
    ],
    align=True,
)
# Of a copy: who stored, who offered it last.
MARK = np.dtype([("plan", np.int64), ("offer", np.int64)], align=True)
LOAD = np.dtype(
    [
        ("next", np.int64),  # the one that has ended after it
        ("ready_s", np.float64),  # when its blocks are there
        ("state", np.int64),
        ("from_block", np.int64),  # what it loads,
        ("to_block", np.int64),
        ("stored", np.int64),  # blocks up to which it has offered its own
        ("tokens", np.int64),  # that it loaded when it was first admitted
    ],
    align=True,
)
AWAY, LOADS, LOADED, CACHED = 0, 1, 2, 3  # not loading; blocks on their way; there; and found by others


@by_reference
class HostTier(NamedTuple):
    """Records by worker and by request; `chunks.tokens` 0: there is no such tier."""

    chunks: Caches
    workers: Records  # [workers] of TIER
    marks: Records  # [workers, copies] of MARK
    requests: Records  # [requests] of LOAD
    used: NDArray[np.uint8]  # 1 for each block of a request that it stored, offered or loaded


def no_tier() -> HostTier:
    """For engines without one."""
    nothing = np.zeros(0, np.uint8)
    return HostTier(no_caches(), np.zeros(0, TIER), np.zeros((0, 0), MARK), np.zeros(0, LOAD), nothing)


def new_tier(
    caches: Caches | None, prefixes: Prefixes | None, profiles: Sequence[Profile], variant: NDArray[np.int64]
) -> tuple[HostTier, HostMemory] | tuple[None, None]:
    """Empty tiers for workers of these profiles, and what placement looks at of them.

    None where no worker has one, or nothing is cached.
    """
    if prefixes is None or caches is None or not any(p.host_bytes for p in profiles):
        return None, None
    tokens, of_all = prefixes.block_tokens, len(caches.held)
    room = np.array([min(p.host_tokens // tokens, of_all) for p in profiles])
    copy_s = np.array([p.load_s(tokens * p.kv.bytes_per_token, p.tp_degree) or 0.0 for p in profiles])
    of_requests = np.zeros(len(caches.requests), np.int64)
    chunks = new_caches(prefixes, room[variant], np.full(len(variant), tokens), of_requests)
    chunks = chunks._replace(requests=caches.requests, held=caches.held)
    links = np.zeros(len(variant), LINK)
    links["copy_s"] = copy_s[variant]
    workers = np.zeros(len(variant), TIER)
    workers["ended"] = workers["last_ended"] = NONE
    requests = np.zeros(len(caches.requests), LOAD)
    requests["next"] = NONE
    marks, used = np.zeros(chunks.copies.shape, MARK), np.zeros(of_all, np.uint8)
    memory = HostMemory(chunks, links, np.zeros(len(requests), np.int64))
    return HostTier(chunks, workers, marks, requests, used), memory


@by_reference
class Engines(NamedTuple):
    """The state of the simulated engines beyond the ledger."""

    workers: Records  # [workers] of ENGINE
    requests: Records  # [requests] of JOB
    total: Records  # [1] of TOTAL
    handover: Ints  # [requests] prefilled elsewhere than they will decode, waiting to be placed
    ended: Ints  # [requests] in the order in which they ended
    ends: Floats  # [1, 2 * places + PAD] the workers by `next_s` (placement.order)
    host: HostTier


def new_engines(
    workers: int, output: Ints, tpot_s: Floats, weight: Floats | None, tier: HostTier | None = None
) -> Engines:
    """Idle engines, and the requests' true lengths, targets and weights. `tier`: caches in host memory."""
    engines = np.zeros(workers, ENGINE)
    engines["next_s"] = np.inf
    engines["first_rank"], engines["ranks"] = np.arange(workers), 1
    jobs = np.zeros(len(output), JOB)
    jobs["output"], jobs["tpot_s"] = output, tpot_s
    jobs["finish_s"] = np.nan
    jobs["weight"] = 1.0 if weight is None else weight
    handover, ended = np.zeros(len(output), np.int64), np.zeros(len(output), np.int64)
    host, ends = no_tier() if tier is None else tier, new_trees(1, workers)
    return Engines(engines, jobs, np.zeros(1, TOTAL), handover, ended, ends, host)
