"""The deadline planner: which requests of a worker that must soon be gone move, and which are recomputed.

A gateway holds every token, so no request that can be replayed is lost with its worker. What runs out with
the time is the chance to move. A request that is not moved is recomputed on another worker, less the tokens
cached there. The plan recomputes as few tokens as it can. lacks_ij is tokens_i less what haven j has cached
of i:

    maximise  Σ min_j lacks_ij  over the requests i that are moved
    such that Σ (fixed_s + lacks_ij / tokens_per_s) <= seconds
              Σ over those moved to j of tokens_i <= free_j,  and their number <= seats_j

This is a knapsack of several sacks with a time limit. The search takes requests in falling size and tries
each first on the haven that it fills best. It cuts a branch off where what is left cannot beat the best plan
so far. The first plan is best-fit decreasing; after `MOST_NODES` the best one found stands.

A request that is expected to end by itself in time is moved only with what the others leave. Otherwise it
stays, and is replayed if it is still there at the end. One that can be neither moved nor replayed stays until
the deadline. It ends in an error if it has not finished by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from controlplane.errors import BadInput
from controlplane.types import RequestId, WorkerId

MOST_NODES = 2_000  # of the search; it is made again whenever a move has ended
MOST_SEARCHED = 200  # requests; more are moved as best-fit decreasing has them
MOVE: Final = "move"
REPLAY: Final = "replay"
STAY: Final = "stay"
How = Literal["move", "replay", "stay"]


@dataclass(frozen=True, slots=True)
class Leaving:
    """A request of the worker that must go.

    `tokens`: the KV it needs where it goes. `remaining_s`: when it is expected to end by itself, inf where
    nothing is known. `has_kv`: it has begun, so that a replay computes `tokens` again. `cached`: how many of
    them a worker has cached, which are neither sent there nor computed again.
    """

    request: RequestId
    tokens: int
    remaining_s: float = math.inf
    has_kv: bool = True
    may_move: bool = True
    may_replay: bool = True
    cached: Callable[[WorkerId], int] = field(default=lambda worker: 0, compare=False, repr=False)

    def lacks(self, haven: WorkerId) -> int:
        """Tokens that a haven has not cached: a move sends them, a replay computes them."""
        return max(self.tokens - self.cached(haven), 0)


@dataclass(frozen=True, slots=True)
class Haven:
    """A worker that can take requests: its free KV and seats, and whether it reads the leaving one's KV."""

    worker: WorkerId
    free_tokens: int
    seats: int
    reads_kv: bool = True


@dataclass(frozen=True, slots=True)
class Way:
    """The pace at which all moves together leave the worker, and the fixed time of each."""

    tokens_per_s: float
    fixed_s: float = 0.02

    def __post_init__(self) -> None:
        if not (self.tokens_per_s > 0 and self.fixed_s >= 0):
            raise BadInput(f"evacuation: need tokens_per_s > 0 and fixed_s >= 0, got {self}")

    def move_s(self, tokens: int) -> float:
        return self.fixed_s + tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Order:
    """One request's way out; `target` is None for one that stays."""

    request: RequestId
    how: How
    target: WorkerId | None = None


def plan_evacuation(
    leaving: Sequence[Leaving], havens: Sequence[Haven], seconds: float, way: Way
) -> tuple[Order, ...]:
    """An order for each request: moves in the order to begin them, then replays, then those that stay.

    Raises BadInput where there are requests that could go on elsewhere, and no haven.
    """
    if not havens and any(r.may_move or r.may_replay for r in leaving):
        raise BadInput("evacuation: no other worker serves, so there is nowhere to go")
    large_first = sorted(leaving, key=lambda r: (-r.tokens, r.request))
    moves = _moves(large_first, havens, seconds, way)
    free = {h.worker: h.free_tokens for h in havens}
    for r, worker in moves:
        free[worker] -= r.tokens
    moved = {r.request for r, _ in moves}
    rest = [r for r in large_first if r.request not in moved]
    replays = _spread([r for r in rest if not _stays(r, seconds)], free)
    stays = (Order(r.request, STAY) for r in rest if _stays(r, seconds))
    return (*(Order(r.request, MOVE, worker) for r, worker in moves), *replays, *stays)


def _stays(r: Leaving, seconds: float) -> bool:
    """Whether one that is not moved stays: it ends by itself, or cannot be replayed."""
    return not r.may_replay or (r.has_kv and r.remaining_s <= seconds)


def _spread(replays: Sequence[Leaving], free: dict[WorkerId, int]) -> list[Order]:
    """Each in its turn where it fits and least is recomputed, to a tenth; then where most is free."""
    orders = []
    for r in replays:
        worker = min(free, key=lambda w: (r.tokens > free[w], _tenths(r, w), -free[w], w))
        free[worker] -= r.tokens
        orders.append(Order(r.request, REPLAY, worker))
    return orders


def _moves(
    leaving: Sequence[Leaving], havens: Sequence[Haven], seconds: float, way: Way
) -> list[tuple[Leaving, WorkerId]]:
    """The moves, in the order to begin them; `leaving` is in falling size."""
    movable = [r for r in leaving if r.may_move and r.has_kv]
    rooms = [_Room(h.worker, h.free_tokens, h.seats) for h in havens if h.reads_kv]
    must = [r for r in movable if r.remaining_s > seconds]
    moves = _best_moves(must, rooms, max(seconds, 0.0), way)
    left_s = seconds - sum(way.move_s(r.lacks(worker)) for r, worker in moves)
    for r in movable:  # with what the others leave: those that may end by themselves
        room = _best_fit(r, rooms) if r.remaining_s <= seconds else None
        if room is not None and (cost_s := way.move_s(r.lacks(room.worker))) <= left_s:
            room.take(r.tokens)
            moves.append((r, room.worker))
            left_s -= cost_s
    return moves


@dataclass(slots=True)
class _Room:
    worker: WorkerId
    free: int
    seats: int

    def fits(self, tokens: int) -> bool:
        return self.seats > 0 and tokens <= self.free

    def take(self, tokens: int, back: int = 1) -> None:
        """Take a request in; `back` -1 gives its place back."""
        self.free -= back * tokens
        self.seats -= back


def _best_fit(r: Leaving, rooms: Iterable[_Room]) -> _Room | None:
    fitting = (room for room in rooms if room.fits(r.tokens))
    return min(fitting, key=lambda room: (_tenths(r, room.worker), room.free, room.worker), default=None)


def _tenths(r: Leaving, haven: WorkerId) -> int:
    """Tenths of a request that a haven lacks: what sets apart havens that are equal otherwise."""
    return -(-10 * r.lacks(haven) // max(r.tokens, 1))


def _best_moves(
    requests: Sequence[Leaving], rooms: list[_Room], seconds: float, way: Way
) -> list[tuple[Leaving, WorkerId]]:
    """The moves with the most tokens, from requests in falling size; `rooms` are left without their place."""
    search = _Search(requests, rooms, way)
    search.first(seconds)
    if len(requests) <= MOST_SEARCHED:
        search.dive(0, 0, seconds, [])
    for r, room in search.best:
        room.take(r.tokens)
    return [(r, room.worker) for r, room in search.best]


class _Search:
    """Branch and bound over requests in falling size: to which room each goes, or that it is not moved."""

    def __init__(self, requests: Sequence[Leaving], rooms: Sequence[_Room], way: Way) -> None:
        self._requests, self._rooms, self._way = requests, rooms, way
        # What a replay computes where least is lacking, and the same of all requests from each on.
        self._spares = [min((r.lacks(room.worker) for room in rooms), default=r.tokens) for r in requests]
        self._after = [0]
        for spares in reversed(self._spares):
            self._after.append(self._after[-1] + spares)
        self._after.reverse()
        self._nodes = 0
        self._most = 0
        self.best: list[tuple[Leaving, _Room]] = []

    def first(self, left_s: float) -> None:
        """Each in turn to the haven that it fills best."""
        for r, spares in zip(self._requests, self._spares, strict=True):
            room = _best_fit(r, self._rooms)
            if room is not None and (cost_s := self._way.move_s(r.lacks(room.worker))) <= left_s:
                room.take(r.tokens)
                left_s -= cost_s
                self._most += spares
                self.best.append((r, room))
        for r, room in self.best:
            room.take(r.tokens, back=-1)

    def dive(self, at: int, value: int, left_s: float, chosen: list[tuple[Leaving, _Room]]) -> None:
        """Try everything from the request `at` on that can still beat the best."""
        self._nodes += 1
        if value > self._most:
            self._most, self.best = value, list(chosen)
        free = sum(max(room.free, 0) for room in self._rooms if room.seats > 0)
        bound = min(self._after[at], free, left_s * self._way.tokens_per_s)
        if value + bound <= self._most or self._nodes > MOST_NODES:
            return
        r = self._requests[at]
        tried = set()
        for room in sorted(self._rooms, key=lambda m: (m.free, m.worker)):
            cost_s = self._way.move_s(r.lacks(room.worker))
            if cost_s > left_s or not room.fits(r.tokens) or (room.free, room.seats, cost_s) in tried:
                continue
            tried.add((room.free, room.seats, cost_s))
            room.take(r.tokens)
            self.dive(at + 1, value + self._spares[at], left_s - cost_s, [*chosen, (r, room)])
            room.take(r.tokens, back=-1)
        self.dive(at + 1, value, left_s, chosen)
