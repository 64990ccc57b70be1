"""The ways in which requests leave a worker: unhurried in a drain, and by a deadline's plan in an evacuation.

An evacuation makes its plan (controlplane.migration.evacuation) again whenever something has ended, with the
pace that its moves have shown and the KV that is then free. Moves fill the worker's budget of moves. Replays
run at the same time, one at a time on each target, so that none waits for another's prefill. A request that
could be moved is replayed only once a move has shown its pace. Shortly before the deadline whatever may be
replayed is, at once. What cannot go on elsewhere ends in an explicit error as the worker is parted with.

A drain takes caches along, too: what only the worker has cached is copied to where its next turns will go
(controlplane.migration.drain says what, and where). A worker that comes is given its share in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from controlplane.figures import counted
from controlplane.migration.drain import BRING_S, DRAIN_LOOK_S, Bring, pulled_along, warmed
from controlplane.migration.evacuation import MOVE, REPLAY, STAY, Haven, Leaving, Order, Way, plan_evacuation
from controlplane.migration.usage import WorkerView
from controlplane.types import RequestId, WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.engine_api.processes import cancel_all
from dataplane.live.gateway.connections import Attached
from dataplane.live.gateway.fleet_core import FleetCore
from dataplane.live.ledger.request import Tracked
from dataplane.live.migration.coordinator import layout, meaning
from dataplane.live.migration.move import CopyFailed

log = logging.getLogger(__name__)
LOOK_S = 0.05
RESERVE_S, RESERVE_SHARE = 1.0, 0.1  # of the time given, kept for the last replays


@dataclass(slots=True)
class Evacuated:
    """The outcome of an evacuation: requests by how they left, and the time from the order to the end."""

    moved: int = 0
    replayed: int = 0
    ended: int = 0
    failed: int = 0
    moved_tokens: int = 0
    replayed_tokens: int = 0
    seconds: float = 0.0
    in_time: bool = True

    def __str__(self) -> str:
        late = "" if self.in_time else ", too late"
        return (
            f"empty after {self.seconds:.1f} s{late}: {counted(self.moved, 'request')} moved, {self.replayed}"
            f" recomputed, {self.ended} ended by themselves, {self.failed} could not be continued"
        )


@dataclass(slots=True)
class _Under:
    """Moves and replays under way."""

    moves: dict[RequestId, asyncio.Task[bool]] = field(default_factory=dict)
    replays: dict[WorkerId, asyncio.Future[bool]] = field(default_factory=dict)
    # Of those that move: their tokens, and the ones that targets have not cached.
    sending: dict[RequestId, tuple[int, int]] = field(default_factory=dict)

    @property
    def half_sent(self) -> float:
        """The bytes that running moves have sent, if they are half done."""
        return sum(sent for _, sent in self.sending.values()) / 2


class Exit:
    """The way out of one worker of `core`. `is_open`: whether a worker takes requests."""

    def __init__(self, core: FleetCore, worker: WorkerId, is_open: Callable[[WorkerId], bool]) -> None:
        self._core, self.worker, self._is_open = core, worker, is_open
        self._under = _Under()
        self._fixed: set[RequestId] = set()  # a move of theirs has failed
        self._moved: set[RequestId] = set()
        self._done = Evacuated()
        self._moving_s = 0.0  # how long at least one move has been under way
        self._sent = 0  # tokens, by moves that have ended

    # Unhurried.

    async def drain(self, why: str, until_s: float = math.inf) -> None:
        """Move everything off as it fits elsewhere, until nothing is left or the time has come.

        Waiting requests go at once, decoding ones by the rule of both planes; caches are copied meanwhile.
        What an earlier core has left there comes back first: it may be this worker's alone to continue.
        """
        while self._core.left.is_awaited(self.worker) and time.monotonic() < until_s:
            await asyncio.sleep(DRAIN_LOOK_S)
        shedding: asyncio.Task[None] | None = None
        stay: set[RequestId] = set()  # a move of theirs has failed: until the next look
        along = asyncio.ensure_future(self._bring_along(until_s))
        try:
            while (remaining := self._here()) and time.monotonic() < until_s:
                if shedding is None or shedding.done():
                    shedding = asyncio.ensure_future(self.shed_unstarted(why))
                may = [t for t in remaining if t.id not in stay and self._core.segments.why_fixed(t) is None]
                busy = self._core.segments.at_copies()
                next_off = self._core.placement.next_off(self.worker, may, busy, time.monotonic())
                if next_off is None:
                    await asyncio.sleep(DRAIN_LOOK_S)  # nothing fits elsewhere, or may move: they run on
                    stay.clear()
                elif not await self._move_off(*next_off, why):
                    stay.add(next_off[0].id)
            await along
        finally:
            along.cancel()
            if shedding is not None:
                shedding.cancel()

    async def _bring_along(self, until_s: float) -> None:
        """Copy what only this worker has cached to where its next turns will go."""
        core, worker, placement = self._core, self.worker, self._core.placement
        with _a_fault_ends_only_this(worker):
            alike = _alike(core, worker, self._is_open)
            tokens = BRING_S * _tokens_per_s(core, worker) if alike else 0.0
            copies = pulled_along(placement.texts(), worker, placement.views(alike), tokens)
            await _bring(core, copies, f"{worker} is being drained", until_s)

    async def shed_unstarted(self, why: str) -> None:
        """Let those that only wait be prefilled elsewhere, where there is room; else they are here."""
        # No more at a time than may move, so that each is placed by what those before it have taken.
        turns, placement = asyncio.Semaphore(self._core.settings.moves.per_worker), self._core.placement

        async def in_turn(tracked: Tracked) -> None:
            async with turns:
                if tracked.worker != self.worker or placement.is_begun(tracked):
                    return
                target = placement.choose(tracked, time.monotonic(), (self.worker,))
                if target is not None and self._core.segments.why_fixed(tracked) is None:
                    await self._move_off(tracked, target, why)

        await asyncio.gather(*map(in_turn, self._here()))

    async def _move_off(self, tracked: Tracked, target: WorkerId, why: str, hurried: bool = False) -> bool:
        self._core.placement.expect(tracked, target)  # so that the next placements count it
        try:
            return (await self._core.segments.move(tracked.id, target, why, hurried)).moved
        except Exception:  # a fault of ours in one move must not leave the worker half empty for ever
            log.exception("the move of %s broke", tracked.id)
            return False
        finally:
            self._core.placement.expect(tracked, None)

    # By a deadline.

    def plan(self, seconds: float) -> tuple[Order, ...]:
        """The plan of an evacuation now. Raises BadInput where there is nowhere to go."""
        moving = self._under.moves.keys() | self._core.migrations.open.keys()
        leaving = [self._leaving(tracked) for tracked in self._here() if tracked.id not in moving]
        way = self._way()
        left_s = seconds - self._under.half_sent / way.tokens_per_s
        return plan_evacuation(leaving, self._havens(), left_s, way)

    async def evacuate(self, deadline_s: float, why: str) -> Evacuated:
        """Empty the worker by `deadline_s` (monotonic), by a plan that is made again each time round."""
        began_s = time.monotonic()
        cut_s = deadline_s - min(RESERVE_S, RESERVE_SHARE * (deadline_s - began_s))
        here = {tracked: tracked.replays for tracked in self._here()}
        try:
            # A move whose stream has switched still takes the last KV from here.
            while (self._here() or self._under.moves) and (left_s := cut_s - time.monotonic()) > 0:
                if self._havens():
                    await self._begin(self.plan(left_s), why)
                await self._wait(min(LOOK_S, left_s))
                self._reap()
        finally:
            await cancel_all(self._under.moves.values())
            self._reap()
        await self._replay_all(f"{why}; its deadline is near")
        self._under.replays.clear()
        while self._here() and time.monotonic() < deadline_s - LOOK_S:
            await asyncio.sleep(LOOK_S)  # what cannot go on elsewhere may still end by itself
        done, failed = self._done, {*self._here(), *(t for t in here if t.ticket.failure)}
        replayed = {t for t, before in here.items() if t.replays > before} - failed
        moved = {t for t in here if t.id in self._moved} - failed - replayed
        done.moved, done.replayed, done.failed = len(moved), len(replayed), len(failed)
        done.ended = len(here.keys() - moved - replayed - failed)
        done.seconds, done.in_time = time.monotonic() - began_s, time.monotonic() <= deadline_s
        return done

    async def _wait(self, look_s: float) -> None:
        """Until something under way has ended, or it is time to look."""
        waits = [*self._under.moves.values(), *self._under.replays.values()]
        is_moving, began_s = bool(self._under.moves), time.monotonic()
        if waits:
            await asyncio.wait(waits, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(look_s)
        if is_moving:
            self._moving_s += time.monotonic() - began_s

    async def _begin(self, plan: tuple[Order, ...], why: str) -> None:
        """Begin as many of the plan's orders as may be under way at a time."""
        most = self._core.settings.moves.per_worker
        for order, tracked in self._still_here(plan):
            if order.target is None:
                continue
            tokens = tracked.context_tokens
            if order.how == MOVE and len(self._under.moves) < most:
                cached = self._core.placement.cached_at(tracked, order.target)
                self._under.sending[order.request] = tokens, tokens - cached
                move = self._move_off(tracked, order.target, why, hurried=True)
                self._under.moves[order.request] = asyncio.ensure_future(move)
            elif order.how == REPLAY and order.target not in self._under.replays and self._is_sure(tracked):
                await self._replay(tracked, order.target, why)

    def _still_here(self, plan: tuple[Order, ...]) -> Iterator[tuple[Order, Tracked]]:
        """The orders of requests that are on the worker when their turn comes."""
        for order in plan:
            tracked = self._core.requests.get(order.request)
            if tracked is not None and tracked.worker == self.worker:
                yield order, tracked

    def _is_sure(self, tracked: Tracked) -> bool:
        """Whether a replay that is planned should be begun: it is not taken back when moves prove faster."""
        return bool(self._done.moved_tokens) or not self._under.moves or not self._leaving(tracked).may_move

    async def _replay(self, tracked: Tracked, target: WorkerId, why: str) -> None:
        self._done.replayed_tokens += tracked.context_tokens if tracked.output_token_ids else 0
        reason = f"{why}; recomputed on {target}"
        self._under.replays[target] = await self._core.segments.replay_on(tracked, target, reason)

    async def _replay_all(self, why: str) -> None:
        """Replay everything that may be, at once: there is no time for moves any more."""
        if not self._havens():
            return
        going = []
        plan = plan_evacuation([self._leaving(t) for t in self._here()], self._havens(), 0.0, self._way())
        for order, tracked in self._still_here(plan):
            target = order.target
            # It did not end by itself.
            if order.how == STAY and self._core.segments.obstacle_to_replay(tracked) is None:
                target = max(self._havens(), key=lambda h: (h.free_tokens, h.worker)).worker
            if target is not None:
                going.append(self._replay(tracked, target, why))
        await asyncio.gather(*going)

    def _reap(self) -> None:
        """Take note of what has ended."""
        for request, task in [(r, t) for r, t in self._under.moves.items() if t.done()]:
            del self._under.moves[request]
            tokens, sent = self._under.sending.pop(request)
            with suppress(asyncio.CancelledError):
                if task.result():
                    self._moved.add(request)
                    self._done.moved_tokens += tokens
                    self._sent += sent
                else:
                    self._fixed.add(request)
        for worker in [w for w, arrival in self._under.replays.items() if arrival.done()]:
            del self._under.replays[worker]

    # What is there.

    def _here(self) -> list[Tracked]:
        return self._core.requests.on_worker(self.worker)

    def _leaving(self, tracked: Tracked) -> Leaving:
        outputs = tracked.output_token_ids
        may_move = self._core.segments.why_fixed(tracked) is None and tracked.id not in self._fixed
        rest = max(tracked.predicted_tokens - len(outputs), 1)
        pace_s = tracked.tpot_s() if outputs else None
        return Leaving(
            tracked.id,
            tracked.context_tokens,
            math.inf if pace_s is None else rest * pace_s,
            has_kv=bool(outputs),
            may_move=may_move,
            may_replay=self._core.segments.obstacle_to_replay(tracked) is None,
            cached=partial(self._core.placement.cached_at, tracked),
        )

    def _havens(self) -> list[Haven]:
        """Open workers that run the same model in the same way."""
        link, there = self._core.link(self.worker), _others(self._core, self.worker, self._is_open)
        views = self._core.placement.views([at.worker for at in there])
        return [
            _haven(at.link.info, view, link is not None and layout(at.link.info) == layout(link.info))
            for at, view in zip(there, views, strict=True)
        ]

    def _way(self) -> Way:
        """The pace of this evacuation's moves, overhead included; until one has ended, of the fleet's."""
        if self._sent:
            return Way((self._sent + self._under.half_sent) / max(self._moving_s, 1e-3), 0.0)
        return Way(_tokens_per_s(self._core, self.worker))


async def bring_to(core: FleetCore, worker: WorkerId, is_open: Callable[[WorkerId], bool]) -> None:
    """Give a worker that has just come its share of what the others have cached."""
    with _a_fault_ends_only_this(worker):
        alike = _alike(core, worker, is_open)
        views = core.placement.views([worker] if alike else [])
        for view in views:
            copies = warmed(core.placement.texts(), view, alike, BRING_S * _tokens_per_s(core, worker))
            await _bring(core, copies, f"{worker} has come", math.inf)


@contextmanager
def _a_fault_ends_only_this(worker: WorkerId) -> Iterator[None]:
    """No fault of ours in copying caches must keep a worker from leaving, or from serving."""
    try:
        yield
    except Exception:
        log.exception("caches of %s are left where they are", worker)


async def _bring(core: FleetCore, copies: Sequence[Bring], why: str, until_s: float) -> None:
    """Make copies between caches, one after another, for as long as there is time; say how many."""
    until_s = min(until_s, time.monotonic() + 2 * BRING_S)
    made = tokens = sent = 0
    for copy in copies:
        if time.monotonic() > until_s or core.link(copy.source) is None or core.link(copy.target) is None:
            break
        try:
            text = copy.text.of.as_request()
            sent += await core.migrations.bring(text, copy.tokens, copy.source, copy.target)
        except CopyFailed as failure:
            log.info("a cached prefix is not copied: %s", failure)
            continue
        core.placement.brought(copy.target, copy.text.of.ids[: copy.tokens // copy.text.block_tokens])
        made, tokens = made + 1, tokens + copy.tokens
    if made:
        said = f"{why}: {made} cached prefixes ({tokens} tokens) copied to where their next turns run"
        core.events.record(time.time(), "bring", said, texts=made, tokens=tokens, sent_tokens=sent)


def _others(core: FleetCore, worker: WorkerId, is_open: Callable[[WorkerId], bool]) -> list[Attached]:
    """The other open workers that run the same model in the same way."""
    link = core.link(worker)
    there = [at for at in core.attached() if at.worker != worker and is_open(at.worker)]
    return [at for at in there if link is not None and meaning(at.link.info) == meaning(link.info)]


def _alike(core: FleetCore, worker: WorkerId, is_open: Callable[[WorkerId], bool]) -> list[WorkerId]:
    """The other open workers of its kind that can read its KV and go on with it."""
    link, kind = core.link(worker), core.kind_of(worker)
    if link is None or link.info.why_fixed:
        return []
    there = [at for at in _others(core, worker, is_open) if at.kind == kind]
    return [at.worker for at in there if layout(at.link.info) == layout(link.info)]


def _tokens_per_s(core: FleetCore, worker: WorkerId) -> float:
    """The fleet's pace of moves, for a worker's KV."""
    link = core.link(worker)
    size = 0 if link is None else link.info.kv_bytes_per_token
    return core.migrations.paces.usual.bytes_per_s / max(size, 1)


def _haven(info: WorkerInfo, view: WorkerView, reads_kv: bool) -> Haven:
    requests = view.load.running + view.load.waiting
    # Each request's last block is begun, and grows while the others come.
    free = view.free_tokens - view.load.waiting_tokens - (requests + 1) * info.block_tokens
    return Haven(view.id, free, info.max_seqs - requests, reads_kv)
