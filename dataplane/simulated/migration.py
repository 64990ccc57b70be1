"""Moves under way in the simulated plane, walked through migration.protocol's table.

Two stages, as Llumnix measured them to suffice. All but the last block is copied while the request decodes
on; then it stops at a step boundary of its source, the rest is copied, and it joins the target's batch at
the target's next boundary.

    copy    tokens · bytes / bandwidth, both workers' steps `slowdown` longer
    pause   fixed + (tokens that came since + the last block) · bytes / bandwidth, then the boundary's wait

One move a worker at a time. What ends, is preempted or loses its worker before the stop stays where it is
(ABORTED); a target that fails after it leaves the request to the cluster's queue, to be prefilled anew
(LOST).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from controlplane.migration.price import Price
from controlplane.migration.protocol import Happened, Stage, step
from controlplane.placement.ledger import OFF, SERVING
from controlplane.snapshot import Migrate, Reassign
from dataplane.simulated.engine import cut
from dataplane.simulated.engine_records import DECODE_RUN, IDLE
from dataplane.simulated.loop import hold
from dataplane.simulated.moving import (
    look_again,
    put_in,
    release,
    requeue,
    reserve,
    take_out,
    tokens_of,
)
from dataplane.simulated.state import RunState


@dataclass(slots=True)
class Move:
    """One move: where it stands, and when something is next to be done about it."""

    request: int
    source: int
    target: int
    stage: Stage
    at_s: float
    tokens: int  # as reserved on the target
    copied: int = 0  # by the first stage
    preemptions: int = 0
    stopping: bool = False  # `at_s` is the source's boundary
    landing: bool = False  # `at_s` is the target's boundary
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

    @property
    def next_s(self) -> float:
        """When something is next to be done; inf for no moves."""
        return min((move.at_s for move in self.open), default=inf)

    def busy(self) -> frozenset[int]:
        """Workers at either end of a move."""
        return frozenset(w for move in self.open for w in (move.source, move.target))

    def begin(self, action: Migrate | Reassign, now_s: float) -> None:
        """Do what tick asks, if it is still possible: copy a running request, requeue a waiting one."""
        led, eng = self._run.ledger, self._run.engines
        r, target = int(action.request), int(action.target)
        source = int(led.requests["worker"][r])
        if source < 0 or source == target or led.workers["status"][target] != SERVING:
            return
        if isinstance(action, Reassign):
            self.requeued += bool(requeue(led, eng, source, target, r, now_s))
            return
        tokens = int(tokens_of(led, eng, source, r, now_s))
        busy = self.busy()
        if tokens == 0 or source in busy or target in busy:
            return
        if not reserve(led, eng, target, tokens, now_s):
            self.outcomes[step(Stage.PENDING, Happened.REFUSED)] += 1
            return
        price = self._price(source)
        block = self._run.profiles[int(led.workers["variant"][source])].kv.block_tokens
        copied = (tokens - 1) // block * block
        self._slow((source, target), price.slowdown, now_s)
        self.open.append(
            Move(
                r,
                source,
                target,
                step(Stage.PENDING, Happened.ACCEPTED),
                now_s + price.copy_s(copied),
                tokens,
                copied,
                int(eng.requests["preemptions"][r]),
            )
        )

    def act(self, now_s: float) -> None:
        """Do what is due at `now_s`, all that happened before it being done."""
        for move in [m for m in self.open if m.at_s <= now_s]:
            if move.stage is Stage.COPYING:
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
        led, eng = self._run.ledger, self._run.engines
        if eng.workers["next_s"][move.source] != now_s or not self._decodes(move, now_s):
            self._close(move, Happened.ENDED, now_s)
            return
        # With the token that this boundary gives it.
        tokens = int(tokens_of(led, eng, move.source, move.request, now_s)) + 1
        release(led, eng, move.target, move.tokens)
        if not reserve(led, eng, move.target, tokens, now_s):
            move.tokens = 0
            self._close(move, Happened.COPY_FAILED, now_s)
            return
        move.tokens = tokens
        left = int(take_out(led, eng, move.source, move.request, now_s))
        if left == 0:
            self._close(move, Happened.ENDED, now_s)
            return
        if left != tokens:  # a prefill step gave it none
            release(led, eng, move.target, tokens)
            reserve(led, eng, move.target, left, now_s)
            move.tokens = left
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
        led, eng = self._run.ledger, self._run.engines
        if led.workers["status"][move.target] == OFF:
            self._close(move, Happened.RESUME_FAILED, now_s)
            return
        idle = eng.workers["activity"][move.target] == IDLE
        if not idle and eng.workers["next_s"][move.target] != now_s:
            self._arrived(move, now_s)  # it failed and came back meanwhile: another boundary
            return
        put_in(led, eng, move.target, move.request, now_s)
        self.pauses_s.append(now_s - move.stopped_s)
        self.outcomes[step(move.stage, Happened.RESUMED)] += 1
        move.at_s = inf

    def _close(self, move: Move, happened: Happened, now_s: float) -> None:
        """Give the move up, and give back what is held for it."""
        led, eng, clu = self._run.ledger, self._run.engines, self._run.cluster
        if move.tokens:
            release(led, eng, move.target, move.tokens)
        self.outcomes[step(move.stage, happened)] += 1
        if happened is Happened.RESUME_FAILED:
            priority = int(led.requests["priority"][move.request])
            hold(led, clu, priority, move.request, True)
            clu.clock["offer_s"] = min(float(clu.clock["offer_s"][0]), now_s + self._run.rules.offer_every_s)
        self._slow((move.source, move.target), 0.0, now_s)
        move.at_s = inf

    def _decodes(self, move: Move, now_s: float) -> bool:
        """Whether the request still decodes on its source, its KV that of the first stage."""
        led, eng = self._run.ledger, self._run.engines
        return (
            led.workers["status"][move.target] == SERVING
            and int(eng.requests["preemptions"][move.request]) == move.preemptions
            and int(tokens_of(led, eng, move.source, move.request, now_s)) > 0
        )

    def _boundary_s(self, w: int, now_s: float) -> float:
        """The worker's first step boundary from now on, where it is made to stop and look."""
        led, eng = self._run.ledger, self._run.engines
        if eng.workers["activity"][w] == DECODE_RUN:
            cut(led, eng, w, now_s)
        return float(eng.workers["next_s"][w])

    def _slow(self, workers: tuple[int, ...], slowdown: float, now_s: float) -> None:
        led, eng = self._run.ledger, self._run.engines
        for w in workers:
            eng.workers["slowdown"][w] = slowdown
            look_again(led, eng, w, now_s)

    def _price(self, w: int) -> Price:
        return self._prices[int(self._run.ledger.workers["variant"][w])]
