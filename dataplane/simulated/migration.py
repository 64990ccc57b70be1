"""Moves in the simulated plane, walked through migration.protocol's table.

Two stages, as Llumnix measured them to suffice. All but the last block is copied while the request decodes
on. Then it stops at a step boundary of its source, and the rest is copied. It joins the target's batch at the
target's next boundary.

    copy    tokens · bytes / bandwidth, both workers' steps `slowdown` longer
    pause   fixed + (tokens that came since + the last block) · bytes / bandwidth, then the boundary's wait

What the target has cached as the copy begins is not copied, and kept there for the request.

One move a worker at a time. What goes to a worker of another kind is recomputed: it stops at its source's
next boundary and waits in the target's queue. A request that ends, is preempted or loses its worker before
the stop stays where it is (ABORTED). A target that fails after the stop leaves the request to the cluster's
queue, to be prefilled again (LOST).

Room is reserved on the target before anything is copied: blocks for the tokens that are not there, and a slot
in the batch. Admission there respects it, and decoding may preempt for it. Requests join and leave compiled
engine state at step boundaries only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from controlplane.migration.move import Happened, Price, Stage, step
from controlplane.placement import ledger as state
from controlplane.placement.queue import readmit
from controlplane.snapshot import Migrate, Reassign
from dataplane.simulated import moving
from dataplane.simulated.engine import arrive, cut
from dataplane.simulated.records import DECODE_RUN, IDLE
from dataplane.simulated.run import RunState


class Room(NamedTuple):
    """A worker's promise to a request of `tokens` tokens: blocks, and copies of `cached` tokens kept for it.

    `life`: of the worker's cache, which may start over meanwhile.
    """

    tokens: int
    blocks: int
    copies: int
    cached: int
    life: int


@dataclass(slots=True)
class Move:
    """One move: its stage, and the time of its next action."""

    request: int
    source: int
    target: int
    stage: Stage
    at_s: float
    copied: int = 0  # by the first stage, or cached at the target
    room: Room | None = None  # on the target
    preemptions: int = 0
    stopping: bool = False  # `at_s` is the source's boundary
    landing: bool = False  # `at_s` is the target's boundary
    anew: bool = False  # nothing is copied: the target computes it
    stopped_s: float = 0.0


class Moves:
    """The moves of a run. Every method leaves ledger and engines consistent at `now_s`."""

    def __init__(self, run: RunState, prices: Iterable[Price]) -> None:
        self._run = run
        self._prices = tuple(prices)  # by variant
        self.open: list[Move] = []
        self.outcomes = dict.fromkeys((Stage.DONE, Stage.ABORTED, Stage.LOST), 0)
        self.pauses_s: list[float] = []
        self.requeued = 0
        self._computing: dict[int, tuple[int, int]] = {}  # recomputed, by source: request, target

    @property
    def next_s(self) -> float:
        """The time of the next action; inf for no moves."""
        return min((move.at_s for move in self.open), default=inf)

    def busy(self) -> frozenset[int]:
        """Workers at either end of a copy, and those with a request off them that is being recomputed."""
        rows = self._run.ledger.requests
        for source, (r, target) in tuple(self._computing.items()):
            if rows["worker"][r] != target or rows["phase"][r] not in (state.QUEUED, state.PREFILLING):
                del self._computing[source]
        ends = (w for move in self.open for w in (move.source, state.NONE if move.anew else move.target))
        return frozenset((*ends, *self._computing)) - {state.NONE}

    def reassign(self, move: Reassign, now_s: float) -> str | None:
        """Take a waiting request to the target's queue, or say why that is no longer possible."""
        ledger, engines = self._run.ledger, self._run.engines
        r, source, target, why = self._asked(move)
        if why is None and not moving.requeue(ledger, engines, source, target, r, now_s):
            why = "it does not wait any more"
        self.requeued += why is None
        return why

    def migrate(self, move: Migrate, now_s: float) -> str | None:
        """Begin to copy a running request, or say why that is not possible."""
        ledger, engines = self._run.ledger, self._run.engines
        r, source, target, why = self._asked(move)
        if why is not None:
            return why
        tokens = int(moving.tokens_of(ledger, engines, source, r, now_s))
        if tokens == 0:
            return "it does not decode"
        if {source, target} & self.busy():
            return "a worker is at an end of another move"
        room = self._reserve(target, r, tokens, now_s)
        if room is None:
            self.outcomes[step(Stage.PENDING, Happened.REFUSED)] += 1
            return "the target has no room"
        price = self._price(source)
        block = self._run.profiles[int(ledger.workers["variant"][source])].kv.block_tokens
        copied = (tokens - 1) // block * block
        self._slow((source, target), price.slowdown, now_s)
        self.open.append(
            Move(
                r,
                source,
                target,
                step(Stage.PENDING, Happened.ACCEPTED),
                now_s + price.copy_s(max(copied - room.cached, 0)),
                max(copied, room.cached),
                room,
                int(engines.requests["preemptions"][r]),
            )
        )
        return None

    def compute_anew(self, move: Migrate, now_s: float) -> str | None:
        """Let the target compute a running request's KV from its next boundary on, or say why it cannot."""
        ledger, engines = self._run.ledger, self._run.engines
        r, source, target, why = self._asked(move)
        if why is None and int(moving.tokens_of(ledger, engines, source, r, now_s)) == 0:
            why = "it does not decode"
        if why is None:
            stage, at_s = step(Stage.PENDING, Happened.ACCEPTED), self._boundary_s(source, now_s)
            self.open.append(Move(r, source, target, stage, at_s, 0, stopping=True, anew=True))
        return why

    def _leave(self, move: Move, now_s: float) -> None:
        """Stop a request that moves by recomputation at its source's boundary, and queue it at its target."""
        ledger, engines, r = self._run.ledger, self._run.engines, move.request
        move.at_s, serves = inf, ledger.workers["status"][move.target] == state.SERVING
        at_boundary = serves and engines.workers["next_s"][move.source] == now_s
        if not at_boundary or moving.take_out(ledger, engines, move.source, r, now_s) == 0:
            self.outcomes[step(move.stage, Happened.ENDED)] += 1
            return
        arrive(ledger, engines, move.target, r, now_s, False)
        engines.requests["migrations"][r] += 1
        self._computing[move.source] = r, move.target
        self.outcomes[step(step(move.stage, Happened.SWITCHED), Happened.RESUMED)] += 1

    def _asked(self, move: Migrate | Reassign) -> tuple[int, int, int, str | None]:
        """The request, the worker it is on, the target, and what hinders it."""
        r, target, why = int(move.request), int(move.target), None
        source = int(self._run.ledger.requests["worker"][r])
        if source in (state.NONE, target):
            why = "it is on no worker" if source == state.NONE else "it is there already"
        elif self._run.ledger.workers["status"][target] != state.SERVING:
            why = "the target does not serve"
        return r, source, target, why

    def act(self, now_s: float) -> None:
        """Do what is due at `now_s`, all that happened before it being done."""
        for move in [m for m in self.open if m.at_s <= now_s]:
            if move.anew:
                self._leave(move, now_s)
            elif move.stage is Stage.COPYING:
                self._stop(move, now_s) if move.stopping else self._copied(move, now_s)
            elif move.landing:
                self._land(move, now_s)
            else:
                self._arrived(move, now_s)
        self.open = [m for m in self.open if m.at_s < inf]

    def _copied(self, move: Move, now_s: float) -> None:
        """The first stage is on the target: the request is to stop at its source's next boundary."""
        if not self._decodes(move, now_s):
            self._close(move, Happened.ENDED, now_s)
            return
        move.stage = step(move.stage, Happened.COPIED)
        move.stopping = True
        move.at_s = self._boundary_s(move.source, now_s)

    def _stop(self, move: Move, now_s: float) -> None:
        ledger, engines = self._run.ledger, self._run.engines
        if engines.workers["next_s"][move.source] != now_s or not self._decodes(move, now_s):
            self._close(move, Happened.ENDED, now_s)
            return
        # With the token that this boundary gives it.
        tokens = int(moving.tokens_of(ledger, engines, move.source, move.request, now_s)) + 1
        self._release(move)
        move.room = self._reserve(move.target, move.request, tokens, now_s)
        if move.room is None:
            self._close(move, Happened.COPY_FAILED, now_s)
            return
        left = int(moving.take_out(ledger, engines, move.source, move.request, now_s))
        if left == 0:
            self._close(move, Happened.ENDED, now_s)
            return
        if left != tokens:  # a prefill step gave it none
            self._release(move)
            move.room = self._reserve(move.target, move.request, left, now_s)
        price = self._price(move.source)
        move.stage = step(move.stage, Happened.SWITCHED)
        move.stopped_s = now_s
        move.at_s = now_s + price.fixed_s + price.copy_s(left - move.copied)

    def _arrived(self, move: Move, now_s: float) -> None:
        """All KV is on the target: the request joins at its next boundary, at once if it idles."""
        move.landing = True
        if self._run.engines.workers["activity"][move.target] == IDLE:
            self._land(move, now_s)
        else:
            move.at_s = self._boundary_s(move.target, now_s)

    def _land(self, move: Move, now_s: float) -> None:
        ledger, engines = self._run.ledger, self._run.engines
        if ledger.workers["status"][move.target] == state.OFF:
            self._close(move, Happened.RESUME_FAILED, now_s)
            return
        idle = engines.workers["activity"][move.target] == IDLE
        if not idle and engines.workers["next_s"][move.target] != now_s:
            self._arrived(move, now_s)  # it failed and came back meanwhile: another boundary
            return
        assert move.room is not None  # since it was stopped
        copies = self._kept(move.target, move.room)
        moving.put_in(ledger, engines, move.target, move.request, move.room.blocks, copies, now_s)
        self.pauses_s.append(now_s - move.stopped_s)
        self.outcomes[step(move.stage, Happened.RESUMED)] += 1
        move.at_s = inf

    def _close(self, move: Move, happened: Happened, now_s: float) -> None:
        """Give the move up, and give back what is held for it."""
        ledger, cluster = self._run.ledger, self._run.cluster
        self._release(move)
        self.outcomes[step(move.stage, happened)] += 1
        if happened is Happened.RESUME_FAILED:
            readmit(ledger, cluster.queue, move.request, now_s)
            cluster.clock["offer_s"] = min(
                float(cluster.clock["offer_s"][0]), now_s + self._run.rules.offer_every_s
            )
        self._slow((move.source, move.target), 0.0, now_s)
        move.at_s = inf

    def _decodes(self, move: Move, now_s: float) -> bool:
        """Whether the request still decodes on its source, its KV that of the first stage."""
        ledger, engines = self._run.ledger, self._run.engines
        return (
            ledger.workers["status"][move.target] == state.SERVING
            and int(engines.requests["preemptions"][move.request]) == move.preemptions
            and int(moving.tokens_of(ledger, engines, move.source, move.request, now_s)) > 0
        )

    def _boundary_s(self, w: int, now_s: float) -> float:
        """The worker's first step boundary from now on, at which its run is cut short."""
        ledger, engines = self._run.ledger, self._run.engines
        if engines.workers["activity"][w] == DECODE_RUN:
            cut(ledger, engines, w, now_s)
        return float(engines.workers["next_s"][w])

    def _slow(self, workers: tuple[int, ...], slowdown: float, now_s: float) -> None:
        ledger, engines = self._run.ledger, self._run.engines
        for w in workers:
            engines.workers["slowdown"][w] = slowdown
            moving.look_again(ledger, engines, w, now_s)

    def _reserve(self, w: int, r: int, tokens: int, now_s: float) -> Room | None:
        ledger = self._run.ledger
        blocks, copies, cached = moving.reserve(ledger, self._run.engines, w, r, tokens, now_s)
        life = int(ledger.caches.workers["lives"][w]) if ledger.caches.tokens else 0
        return None if blocks == state.NONE else Room(tokens, int(blocks), int(copies), int(cached), life)

    def _release(self, move: Move) -> None:
        ledger, room = self._run.ledger, move.room
        if room is not None:
            copies = self._kept(move.target, room)
            moving.release(
                ledger, self._run.engines, move.target, move.request, room.tokens, room.blocks, copies
            )
            move.room = None

    def _kept(self, w: int, room: Room) -> int:
        """The copies that are still kept there for the request."""
        return room.copies if room.copies and self._run.ledger.caches.workers["lives"][w] == room.life else 0

    def _price(self, w: int) -> Price:
        return self._prices[int(self._run.ledger.workers["variant"][w])]
