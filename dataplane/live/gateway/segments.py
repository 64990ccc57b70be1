"""Segments: which worker runs a request, from its first place in the queue to its end.

A request whose segment ends in an error, or whose worker is lost, is replayed from prompt and tokens so far
on another worker. Only when that is impossible does the client see an error, and it always sees it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from controlplane.placement.queue import QueueSettings
from controlplane.types import RequestId, WorkerId
from dataplane.live.engine_api.kv_messages import Transfer
from dataplane.live.engine_api.link import EngineLink
from dataplane.live.engine_api.messages import Finish
from dataplane.live.engine_api.segment import obstacle_to_move, obstacle_to_replay, segment_request
from dataplane.live.gateway.connections import Attachments, RequestBook, Unread
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.handover import Handovers
from dataplane.live.gateway.metrics import PRIORITY_NAMES, Metrics
from dataplane.live.ledger.admission import Admission
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Tracked
from dataplane.live.migration.coordinator import Migrations
from dataplane.live.migration.move import Mode, MoveBudget, MoveRecord, Running

log = logging.getLogger(__name__)
MOST_FRUITLESS = 8  # segments in a row without a token, before a request is given up
COMPUTE = Transfer()  # a segment that brings no KV
BACK_S = 20.0  # within which an earlier core's requests are brought back, or their clients are gone


class LeftRequests:
    """The requests that an earlier core has left on workers, until their gateways bring them back.

    `were_mixed`: whether its workers may have run several models. `weights`: those that made the tokens of
    workers that are gone; None where that is not known.
    """

    def __init__(self) -> None:
        self._on: dict[RequestId, WorkerId] = {}
        self._awaited: Counter[WorkerId] = Counter()
        self.were_mixed = False
        self.weights: str | None = None

    def note(self, segments: Mapping[WorkerId, Sequence[str]], were_mixed: bool, weights: str | None) -> None:
        """Note the segments that were left on each worker."""
        self.were_mixed, self.weights = were_mixed, weights
        for worker, names in segments.items():
            self._awaited[worker] = len(names)
            asyncio.get_running_loop().call_later(BACK_S, self._awaited.pop, worker, None)
            for name in names:
                self._on |= {RequestId(one): worker for one in (name, name.rpartition("#")[0])}

    def weights_of(self, served: Set[str]) -> str | None:
        """The weights that a lost worker ran, where those here run `served`; None where that is not known."""
        if not served:
            return self.weights
        return next(iter(served)) if len(served) == 1 and not self.were_mixed else None

    def come_back(self, request: RequestId) -> WorkerId | None:
        """Where a request that is brought back was left."""
        worker = self._on.pop(request, None)
        if worker is not None:
            self._awaited[worker] -= 1
        return worker

    def is_awaited(self, worker: WorkerId) -> bool:
        """Whether requests that were left on a worker have not come back to it yet."""
        return self._awaited[worker] > 0


class Segments:
    """The requests of a fleet, and the segment that each listens to.

    `unread`: the way to the front end. `is_coming`: whether a fleet without workers is to get one.
    `on_begin(request, worker)` and `on_end(request, outcome)` are called in the loop.
    """

    def __init__(
        self,
        waiting: QueueSettings,
        moves: MoveBudget,
        placement: Placement,
        metrics: Metrics,
        events: EventLog,
        attached: Attachments,
        unread: Unread,
        is_coming: Callable[[], bool],
    ) -> None:
        self._placement, self._metrics, self._events = placement, metrics, events
        self._attached, self._unread = attached, unread
        self.requests = RequestBook()
        self.migrations = Migrations(self, moves)
        self.handovers = Handovers(
            placement,
            metrics,
            partial(self.move, hurried=True, mode="hand-over"),
            lambda t: self.why_fixed(t, begun=True),
        )
        self.on_begin: list[Callable[[Tracked, WorkerId], None]] = []
        self.on_end: list[Callable[[Tracked, str], None]] = []
        self._solved_in_time = True
        self.admission = Admission(
            waiting, placement, self.begin, self.turn_away, is_coming, self._note_heartbeat
        )

    def link(self, worker: WorkerId) -> EngineLink | None:
        return self._attached.link(worker)

    # Moves.

    def running(self, request: RequestId) -> Running | None:
        tracked = self.requests.get(request)
        if tracked is None or tracked.worker is None:
            return None
        return Running(tracked.request, tracked.segment, tracked.worker, tracked.output_token_ids)

    def why_fixed(self, tracked: Tracked, begun: bool = False) -> str | None:
        """Why a request cannot be moved from where it runs; None if it can, or runs nowhere.

        `begun`: as if it had its first token already.
        """
        link = self.link_of(tracked)
        if link is None:
            return None
        outputs = tracked.output_token_ids or ((0,) if begun else ())
        return obstacle_to_move(tracked.request, outputs, link.info)

    def obstacle_to_replay(self, tracked: Tracked) -> str | None:
        """What of a request cannot go on in a new segment, on engines as this fleet has them, or None."""
        return obstacle_to_replay(tracked.request, tracked.output_token_ids, self._attached.carries_penalties)

    async def cut_over(
        self, request: RequestId, target: WorkerId, transfer: Transfer
    ) -> asyncio.Future[bool]:
        """Switch a request's stream to `target`; the package docstring states the order and why."""
        arrival: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        tracked = self.requests.get(request)
        if tracked is None or tracked.worker is None or target not in self._attached:
            arrival.set_result(False)
            return arrival
        old_segment, source = tracked.segment, self.link_of(tracked)
        tracked.settle_cut(False)
        tracked.cut, tracked.moves = arrival, tracked.moves + 1
        await self.begin(tracked, target, transfer)
        if source is not None:
            await source.abort([old_segment])
        return arrival

    def at_copies(self) -> frozenset[WorkerId]:
        """Workers at either end of a move of a request that has made tokens."""
        moves = ((self.requests.get(m.request), m) for m in self.migrations.open.values())
        begun = (m for t, m in moves if t is not None and t.output_token_ids)
        return frozenset(w for m in begun for w in (m.source, m.target) if w is not None)

    async def replay_on(self, tracked: Tracked, target: WorkerId, why: str) -> asyncio.Future[bool]:
        """Let a request go on from its tokens on `target`, as far as nothing hinders it; as `cut_over`."""
        tracked.replays += 1
        self._metrics.replays.inc()
        so_far = len(tracked.output_token_ids)
        self._record("replay", why, tracked, source=tracked.worker, target=target, tokens_so_far=so_far)
        return await self.cut_over(tracked.id, target, COMPUTE)

    async def move(
        self,
        request: RequestId,
        target: WorkerId,
        reason: str,
        hurried: bool = False,
        mode: Mode = "live",
    ) -> MoveRecord:
        """Move a request and return how it went; recorded with its reason, and counted."""
        move = await self.migrations.migrate(request, target, mode, why=reason, hurried=hurried)
        self._metrics.count_move(move.outcome, move.bytes, move.downtime_s)
        said = f"{reason}; {move.outcome}" + (f": {move.reason}" if move.reason else "")
        facts = {"request_id": request, "worker": target, "source": move.source, "migration": move.id}
        cost = {"bytes": move.bytes, "downtime_s": move.downtime_s}
        self._events.record(time.time(), "migrate", said, **facts, cost=cost)
        return move

    # Segments.

    def link_of(self, tracked: Tracked) -> EngineLink | None:
        return None if tracked.worker is None else self.link(tracked.worker)

    async def begin(self, tracked: Tracked, worker: WorkerId, transfer: Transfer = COMPUTE) -> None:
        """Begin a segment. No wait before the engine has it in its queue: the token list must not grow."""
        segment, link = self.requests.listen(tracked, worker), self.link(worker)
        assert link is not None  # its callers have looked in this turn of the loop
        self._placement.put(tracked, worker, transfer.load is not None, time.monotonic())
        for tell in self.on_begin:
            tell(tracked, worker)
        if not tracked.output_token_ids:
            tracked.weights = link.info.weights
        if tracked.ticket.worker is None:
            tracked.ticket.worker = worker
        if tracked.stays == 1:
            priority = PRIORITY_NAMES[tracked.ticket.priority]
            tracked.begun_s = time.monotonic()
            self._metrics.queue_wait_s.labels(priority).observe(tracked.begun_s - tracked.arrival_s)
        await link.add(segment_request(tracked.request, tracked.output_token_ids, segment, transfer))
        if self._placement.hands_over(tracked) and transfer.load is None:
            self.handovers.begun(tracked)
        if self.requests.listening_to(segment) is not tracked:
            await link.abort([segment])  # it ended while the link was full

    def replay(self, tracked: Tracked, why: str) -> bool:
        """Put a request whose segment is over back in line, ahead of newcomers; whether it can go on."""
        if goes_on := self.may_go_on(tracked, why):
            self.admission.take_back(tracked)
        return goes_on

    def may_go_on(self, tracked: Tracked, why: str) -> bool:
        """Whether a request whose segment is over can be continued elsewhere; otherwise it fails."""
        lost_on = tracked.worker
        self.requests.ignore(tracked)
        self._placement.take(tracked)
        tracked.settle_cut(False)
        tracked.replays, tracked.fruitless = tracked.replays + 1, tracked.fruitless + 1
        obstacle = self.obstacle_to_replay(tracked) or self._other_weights(tracked)
        if obstacle is None and tracked.fruitless > MOST_FRUITLESS:
            obstacle = f"{tracked.fruitless} attempts in a row gave no token"
            params = tracked.request.sampling_params
            if tracked.output_token_ids and params is not None and params.structured_outputs is not None:
                obstacle += "; its grammar may not accept the tokens so far"
        if obstacle is not None:
            self.fail(tracked, f"{why}; it cannot be continued: {obstacle}")
            return False
        self._metrics.replays.inc()
        self._record("replay", why, tracked, source=lost_on, tokens_so_far=len(tracked.output_token_ids))
        return True

    def may_continue(self, tracked: Tracked, worker: WorkerId) -> bool:
        """Whether a worker runs the weights that have made a request's tokens, if it has any."""
        link = self.link(worker)
        return link is None or not tracked.output_token_ids or link.info.weights == tracked.weights

    def _other_weights(self, tracked: Tracked) -> str | None:
        """What hinders a request that has begun where all workers run other weights than made its tokens."""
        served = {at.link.info.weights for at in self._attached.values()}
        if not tracked.output_token_ids or not served or tracked.weights in served:
            return None
        return "no worker runs the weights that it began on"

    # Endings.

    def end(self, tracked: Tracked, outcome: str) -> None:
        self.handovers.ended(tracked)
        self.requests.remove(tracked)
        self.admission.discard(tracked)
        self._placement.forget(tracked, outcome == "finished")
        tracked.settle_cut(False)
        self._metrics.count_end(tracked, outcome)
        for tell in self.on_end:
            tell(tracked, outcome)

    def fail(self, tracked: Tracked, why: str) -> None:
        log.warning("request %s failed: %s", tracked.id, why)
        tracked.ticket.failure = why
        self._record("failed", why, tracked)
        self.end(tracked, "failed")
        self._unread.tell_end(tracked.id, Finish.ERROR)

    def turn_away(self, tracked: Tracked, why: str) -> None:
        if tracked.output_token_ids:  # the client has begun to read: too late for a refusal
            self.fail(tracked, why)
            return
        tracked.ticket.rejection = self.admission.rejection(why)
        self._record("rejected", why, tracked)
        self.end(tracked, "rejected")
        self._unread.tell_end(tracked.id, Finish.ERROR)

    def _note_heartbeat(self, requests: int, is_proven: bool) -> None:
        """Count a heartbeat of the exact policy; say so where the solver's time begins to run out."""
        if not is_proven and self._solved_in_time:
            why = f"{requests} requests were not placed exactly in time; the best placement found holds"
            self._events.record(time.time(), "fallback", why)
        self._solved_in_time = is_proven
        self._metrics.heartbeats.labels("exact" if is_proven else "best found").inc()

    def _record(self, kind: str, why: str, tracked: Tracked, **facts: object) -> None:
        self._events.record(time.time(), kind, why, request_id=tracked.id, worker=tracked.worker, **facts)
