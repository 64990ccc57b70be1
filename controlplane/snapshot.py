"""Snapshots and actions: a fleet as the controller sees it, and what it may ask of the data plane.

A plane that counts for itself gives each worker's `Load`: the simulated one does, in its kernels. The live
one only lists requests, and the load is added up from the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from controlplane.perfmodel.step import StepModel
from controlplane.types import ClassArrivals, ClassOutcomes, RequestId, WorkerId

SERVING, DRAINING, STARTING = "serving", "draining", "starting"


@dataclass(frozen=True, slots=True)
class Cached:
    """How many of a request's first tokens a worker has cached, and how many of these others use there."""

    tokens: int = 0
    in_use: int = 0


NOT_CACHED = Cached()


def cached_nowhere(worker: WorkerId) -> Cached:
    """`NOT_CACHED` for every worker: nothing of the request is known to be cached anywhere."""
    return NOT_CACHED


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request on a worker, and the KV tokens it holds (or, while it waits there, will take).

    `generated`: output tokens so far, -1 = not known. `remaining_tokens`: output tokens still expected,
    0 = not known. `tpot_s`: its target. `cached`: what another worker has of it.
    """

    request: RequestId
    tokens: int
    priority: int = 0
    generated: int = -1
    remaining_tokens: int = 0
    tpot_s: float = math.inf
    cached: Callable[[WorkerId], Cached] = field(default=cached_nowhere, compare=False, repr=False)

    def to_send(self, target: WorkerId) -> int:
        """Tokens whose KV a move there copies: those that the target has not cached."""
        return max(self.tokens - self.cached(target).tokens, 0)

    def new_at(self, target: WorkerId) -> int:
        """Tokens of the target's memory that the request takes: what others use there lies there once."""
        return max(self.tokens - self.cached(target).in_use, 0)


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's load: counts of requests, tokens of KV.

    `head_tokens` is what the head of its queue needs and cannot have yet, `waiting_tokens` what the whole
    queue needs. `high` counts running requests of high priority. `growth_tokens` is the output that all on it
    are still expected to make, `tpot_s` the tightest target among them. `peak_tokens` is the most KV they
    should ever hold together (-1 = not counted). `shared_tokens`: of those held, the ones that lie in its
    memory once for several requests.
    """

    running: int = 0
    held_tokens: int = 0
    waiting: int = 0
    head_tokens: int = 0
    waiting_tokens: int = 0
    high: int = 0
    growth_tokens: int = 0
    tpot_s: float = math.inf
    peak_tokens: int = -1
    shared_tokens: int = 0

    def with_request(self, request: RunningRequest, worker: WorkerId) -> Load:
        """The load of that worker once a request runs there too."""
        # In full: `replace` takes three times as long, and a heartbeat asks this of every worker.
        return Load(
            running=self.running + 1,
            held_tokens=self.held_tokens + request.tokens,
            waiting=self.waiting,
            head_tokens=self.head_tokens,
            waiting_tokens=self.waiting_tokens,
            high=self.high + (1 if request.priority else 0),
            growth_tokens=self.growth_tokens + request.remaining_tokens,
            tpot_s=min(self.tpot_s, request.tpot_s),
            peak_tokens=-1,
            shared_tokens=self.shared_tokens + request.tokens - request.new_at(worker),
        )


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker as last observed. `capacity_tokens` 0 = not known (it is starting).

    `requests` run there in order of admission, `waiting` stand in its queue, its head first. `step` is its
    speed, for forecasts. `load`, where given, says the same as the lists. `kind` names what it is made
    of, in a fleet of several kinds: KV moves between workers of one kind only. `kv_bytes_per_token`: 0 = not
    known, and then no copy is priced.
    """

    worker: WorkerId
    state: str
    capacity_tokens: int
    requests: Sequence[RunningRequest] = ()
    waiting: Sequence[RunningRequest] = ()
    step: StepModel | None = None
    max_seqs: int = 1 << 30
    load: Load | None = None
    kind: str = ""
    kv_bytes_per_token: float = 0.0

    def counted(self) -> Load:
        """The load, added up from the lists where the plane gave none."""
        if self.load is not None:
            return self.load
        held = high = growth = waiting_tokens = 0
        tpot_s = math.inf
        for r in self.requests:
            held += r.tokens
            growth += r.remaining_tokens
            if r.priority:
                high += 1
            if r.tpot_s < tpot_s:
                tpot_s = r.tpot_s
        for r in self.waiting:
            waiting_tokens += r.tokens
            growth += r.remaining_tokens
            tpot_s = min(tpot_s, r.tpot_s)
        return Load(
            running=len(self.requests),
            held_tokens=held,
            waiting=len(self.waiting),
            head_tokens=self.waiting[0].tokens if self.waiting else 0,
            waiting_tokens=waiting_tokens,
            high=high,
            growth_tokens=growth,
            tpot_s=tpot_s,
        )


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that no worker has taken, and the seconds in which its prefill must begin to be on time."""

    request: RunningRequest
    left_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of moves: bytes a second of their copies, and the pause of the moved request.

    `moves`: how many it was learned from. Before any, it is what Llumnix measured with Gloo between hosts.
    """

    bytes_per_s: float = 2.4e9
    pause_s: float = 0.01
    moves: int = 0

    def after(self, bytes_per_s: float, pause_s: float) -> Pace:
        """The pace once another move has finished.

        It is a mean of logarithms, in which the last ten moves weigh most. A single move counts as at most 4
        times faster or slower than the mean. So one that waited for a step or a full link changes little.
        """
        weight = 1.0 / min(self.moves + 1, 10)

        def towards(mean: float, seen: float) -> float:
            near = seen if self.moves == 0 else min(max(seen, mean / 4.0), mean * 4.0)
            return math.exp((1.0 - weight) * math.log(mean) + weight * math.log(max(near, 1e-9)))

        return Pace(towards(self.bytes_per_s, bytes_per_s), towards(self.pause_s, pause_s), self.moves + 1)


@dataclass(frozen=True, slots=True)
class Transport:
    """The pace of moves in a fleet: `pairs` of workers (source, target), and `usual` for all others."""

    usual: Pace = Pace()
    pairs: Mapping[tuple[WorkerId, WorkerId], Pace] = field(default_factory=dict)
    slowdown: float = 0.02

    def between(self, source: WorkerId, target: WorkerId) -> Pace:
        """The pace from one worker to another."""
        return self.pairs.get((source, target), self.usual)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at `now_s`; `waiting_tokens` are the prompts that no worker has taken.

    `moving` and `busy`: requests on the move or not to be moved, and workers at either end of a move.
    `arrivals`: requests that arrived since the last snapshot, None = not counted; `by_class` the same with
    their lengths. `fixed`: the number of workers an operator has fixed. `waiting_requests`: those that no
    worker has taken. `cold_start_s`, `drain_s`: what a launch and a drain have lately taken here, 0 = not
    known.
    `wanted_kinds`: how many of each are wanted, in a fleet of several kinds; they add up to `wanted`.
    `outcomes`: the requests that have ended since the plane began, by class.
    `held`: the first in line of those that no worker has taken and that may still be on time. `transport`:
    the pace of moves here.
    """

    now_s: float
    workers: tuple[WorkerLoad, ...]
    wanted: int
    waiting_tokens: int = 0
    moving: frozenset[RequestId] = frozenset()
    busy: frozenset[WorkerId] = frozenset()
    arrivals: float | None = None
    fixed: int | None = None
    by_class: tuple[ClassArrivals, ...] = ()
    waiting_requests: int = 0
    cold_start_s: float = 0.0
    drain_s: float = 0.0
    wanted_kinds: Mapping[str, int] = field(default_factory=dict)
    outcomes: tuple[ClassOutcomes, ...] = ()
    held: tuple[HeldRequest, ...] = ()
    transport: Transport = field(default_factory=Transport)

    @property
    def may_give_back(self) -> bool:
        """Whether workers may be given back: arrivals have been counted, and no request waits."""
        is_counted = self.arrivals is not None and not math.isnan(self.arrivals)
        return is_counted and not self.waiting_requests


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move a request that runs, with its KV."""

    request: RequestId
    source: WorkerId
    target: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Reassign:
    """Take a request that has not started from one worker's queue to another's."""

    request: RequestId
    source: WorkerId
    target: WorkerId
    reason: str


# The facts that a decision may give for its reason. Of any fleet: `seen`, `compared` and `cost`. Of a fleet
# of several kinds: the weight of a worker of each, and how many of each are chosen. Also how many each kind
# alone would need, and what that would cost.
Fact = Literal["seen", "compared", "cost", "weights", "chosen", "alone", "alone_usd_per_h"]
Facts = Mapping[Fact, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """Want another number of workers. `facts`: the observed rates, the compared counts, and the cost.

    `kinds`: how many of each, in a fleet of several kinds; they add up to `workers`.
    """

    workers: int
    reason: str
    facts: Facts = field(default_factory=dict)
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Note:
    """What the scaler has to say though the number of workers stays: its line was corrected, or more workers
    are wanted than a limit allows."""

    kind: Literal["correction", "limit"]
    reason: str
    facts: Facts = field(default_factory=dict)


Move = Migrate | Reassign
Action = Move | Scale | Note
