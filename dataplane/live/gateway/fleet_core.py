"""FleetCore: the fleet in the place where vLLM's front end expects an engine.

It takes the place of AsyncLLM's EngineCoreClient. A request is assigned on arrival, tracked by its token
list, and its outputs come back under its own id whatever worker made them. Invariants:

- a request listens to at most one segment; outputs of any other segment id are dropped;
- tokens enter `Tracked.output_token_ids` and the front end's queue in the same instant and order, so each
  reaches the client exactly once;
- a segment that ends in an error, or whose worker is lost, is replayed from prompt and tokens so far on
  another worker; only when that is impossible does the client see an error, and it always sees it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from controlplane.placement.queue import QueueSettings
from controlplane.types import RequestId, Role, Slo, SloClass, WorkerId
from dataplane.live.engine_api.cache_events import CacheChange
from dataplane.live.engine_api.kv_messages import LOADER_PREFIX, Transfer
from dataplane.live.engine_api.link import (
    Adapters,
    EngineLink,
    Lost,
    Outputs,
    SegmentRefused,
    Silence,
    Telemetry,
)
from dataplane.live.engine_api.messages import Adapter, EngineRequest, Finish, SegmentOutput, StepOutputs
from dataplane.live.engine_api.segment import obstacle_to_move, obstacle_to_replay, segment_request
from dataplane.live.engine_api.step_trace import take_prefilled
from dataplane.live.gateway.admission import Admission
from dataplane.live.gateway.connections import AdapterBook, Attached, Attachments, FrontEndClient, RequestBook
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.handover import Handovers
from dataplane.live.gateway.metrics import PRIORITY_NAMES, Metrics
from dataplane.live.gateway.mirrors import Found
from dataplane.live.gateway.placement import Placement
from dataplane.live.gateway.request import Ticket, Tracked, tracked_from
from dataplane.live.migration.coordinator import Migrations
from dataplane.live.migration.move import Mode, MoveBudget, MoveRecord, Running

log = logging.getLogger(__name__)
LAST_WORDS_S = 2.0
BACK_S = (
    20.0  # within which gateways bring back what an earlier core has left on a worker, or its client is gone
)
CLOSING = "the fleet is shutting down"
MOST_FRUITLESS = 8  # segments in a row without a token, before a request is given up
COMPUTE = Transfer()  # a segment that brings no KV


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """`slots` bounds the workers at any one time: vLLM's metrics are laid out once. `reasons`: a grammar
    begins to hold where the model's reasoning ends, which only the engine notices."""

    slots: int
    default_slo: Slo
    waiting: QueueSettings = field(default_factory=QueueSettings)
    moves: MoveBudget = field(default_factory=MoveBudget)
    reasons: bool = False
    classes: tuple[SloClass, ...] = ()


class FleetCore(FrontEndClient):
    """The fleet as one engine.

    Hooks, called in the loop: `on_lost(worker, reason)`, `on_arrival(request)`, `on_end(request, outcome)`,
    `on_step(telemetry)`, `on_closing(reason)`. `is_starting`: whether a worker is on its way to a fleet that
    has none; requests then wait for it, however long. `predict_anew(prompt, generated)`: what to expect of a
    request that has outlived its prediction (Algorithm 2).
    """

    def __init__(
        self,
        settings: CoreSettings,
        placement: Placement,
        metrics: Metrics,
        events: EventLog,
        predict: Callable[[int], int],
    ) -> None:
        super().__init__(settings.slots)
        self.settings, self.placement, self.metrics, self.events = settings, placement, metrics, events
        self.requests, self.adapters = RequestBook(), AdapterBook()
        placement.holders = self.adapters.holders
        self.migrations = Migrations(self, settings.moves)
        self.handovers = Handovers(
            placement, metrics, self._hand_over, lambda t: self.why_fixed(t, begun=True)
        )
        self.on_lost: list[Callable[[WorkerId, str], None]] = []
        self.on_arrival: list[Callable[[Tracked], None]] = []
        self.on_end: list[Callable[[Tracked, str], None]] = []
        self.on_step: list[Callable[[Telemetry], None]] = []
        self.on_closing: list[Callable[[str], None]] = []
        self._predict = predict
        self._attached = Attachments(settings.slots)
        self._left: dict[RequestId, WorkerId] = {}
        self._awaited: Counter[WorkerId] = Counter()  # requests that an earlier core has left there
        self.was_mixed = False  # whether that core's workers may have run several models
        self._solved_in_time = self._carries_penalties = True
        self.is_starting: Callable[[], bool] = lambda: False
        self.predict_anew: Callable[[int, int], int] | None = None
        self._admission = Admission(
            settings.waiting,
            placement,
            self._begin,
            self._turn_away,
            lambda: not self._attached and self.is_starting(),
            self._note_heartbeat,
        )

    # What a front end calls.

    async def add_adapter(self, adapter: Adapter) -> None:
        await self.adapters.load([at.link for at in self._attached], adapter)

    async def add_request_async(self, request: EngineRequest) -> None:
        """Track a new request; it is placed at once where a worker has room, or waits."""
        if not self.settings.reasons:
            request.reasoning_ended = True
        await self._admission.take_in(self._track(request))

    def _track(self, request: EngineRequest) -> Tracked:
        tracked = tracked_from(request, self.settings.default_slo, self._predict, time.monotonic())
        self.requests.add(tracked)
        for tell in self.on_arrival:
            tell(tracked)
        return tracked

    async def resume(
        self, request: EngineRequest, tokens: Sequence[int], first_s: float | None, core: int
    ) -> None:
        """Take over a request of an earlier core with its tokens so far: as if its worker had been lost.

        It goes back to that worker, which has its text cached, where this core has adopted it. Where nobody
        knows what made its tokens, it fails rather than go on with another model.
        """
        tracked = self._track(request)
        tracked.resume(tokens, first_s, time.monotonic(), core)
        was_on = self._left.pop(tracked.id, None)
        at = None if was_on is None else self._attached.get(was_on)
        if was_on is not None:
            self._awaited[was_on] -= 1
        served = {one.link.info.weights for one in self._attached}
        if at is not None:
            tracked.weights = at.link.info.weights
        elif len(served) == 1 and not self.was_mixed:
            tracked.weights = served.pop()
        if not self._may_go_on(tracked, "the fleet's core was lost"):
            return
        if at is not None and at.role == "any":
            await self._begin(tracked, at.worker)
        else:
            self._admission.take_back(tracked)

    def was_running(self, worker: WorkerId, segments: Sequence[str]) -> None:
        """Note the segments that an earlier core has left on a worker, for `resume`."""
        self._awaited[worker] = len(segments)
        self._loop.call_later(BACK_S, self._awaited.pop, worker, None)
        for segment in segments:
            self._left |= {RequestId(name): worker for name in (segment, segment.rpartition("#")[0])}

    def is_awaited(self, worker: WorkerId) -> bool:
        """Whether requests that an earlier core has left on a worker have not come back to it yet."""
        return self._awaited[worker] > 0

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            tracked = self.requests.get(RequestId(request_id))
            if tracked is not None:
                segment, link = tracked.segment, self._link_of(tracked)
                self._end(tracked, "aborted" if tracked.ticket.client_left else "finished")
                if link is not None:
                    await link.abort([segment])

    @property
    def _is_closed(self) -> bool:
        return self._admission.is_over

    # Workers.

    def attach(self, link: EngineLink, kind: str = "", role: Role = "any") -> None:
        """Take a worker in; it gets requests from now on. Raises StopIteration when every slot is taken."""
        at = self._attached.add(link, kind, role)
        self._carries_penalties = link.info.carries_penalties  # as all of a fleet's
        self.placement.attach(link.info, kind, role)
        at.reader = self._loop.create_task(self._read(at))
        self._admission.look()

    async def detach(self, worker: WorkerId, why: str = "the worker was stopped") -> None:
        """Part with a worker on purpose; whatever it still runs is replayed elsewhere."""
        at = self._attached.get(worker)
        if at is None:
            return
        if at.reader is not None:
            at.reader.cancel()
        self._forget_worker(at, why)
        await at.link.close()

    def become(self, worker: WorkerId, kind: str, role: Role) -> None:
        """Give a worker another kind and role; what its new role does not do leaves it."""
        at = self._attached.get(worker)
        if at is None:
            return
        at.kind, at.role = kind, role
        self.placement.become(at.link.info, kind, role)
        for tracked in self.requests.on_worker(worker) if role == "prefill" else ():
            if self.placement.is_decoding(tracked):
                self.handovers.prefilled(tracked)
        self._admission.look()

    def set_open(self, worker: WorkerId, is_open: bool) -> None:
        """Whether new requests may be placed on a worker."""
        if worker in self._attached:
            self.placement.set_open(worker, is_open)
            self._admission.look()

    def link(self, worker: WorkerId) -> EngineLink | None:
        at = self._attached.get(worker)
        return None if at is None else at.link

    def kind_of(self, worker: WorkerId) -> str | None:
        at = self._attached.get(worker)
        return None if at is None else at.kind

    def attached(self) -> Iterator[Attached]:
        return iter(self._attached)

    def workers_by_slot(self) -> dict[str, WorkerId]:
        """vLLM's engine index → worker."""
        return {str(at.slot): at.worker for at in self._attached}

    # Requests.

    @property
    def waiting(self) -> int:
        """Requests that no worker has taken yet."""
        return len(self._admission)

    def held(self) -> list[tuple[Tracked, float]]:
        """The first in line who may still be on time, and in how many seconds each must begin."""
        return self._admission.held()

    def running(self, request: RequestId) -> Running | None:
        tracked = self.requests.get(request)
        if tracked is None or tracked.worker is None:
            return None
        return Running(tracked.request, tracked.segment, tracked.worker, tracked.output_token_ids)

    def why_fixed(self, tracked: Tracked, begun: bool = False) -> str | None:
        """Why a request cannot be moved from where it runs; None if it can, or runs nowhere.

        `begun`: as if it had its first token already.
        """
        link = self._link_of(tracked)
        if link is None:
            return None
        outputs = tracked.output_token_ids or ((0,) if begun else ())
        return obstacle_to_move(tracked.request, outputs, link.info)

    def obstacle_to_replay(self, tracked: Tracked) -> str | None:
        """What of a request cannot go on in a new segment, on engines as this fleet has them, or None."""
        return obstacle_to_replay(tracked.request, tracked.output_token_ids, self._carries_penalties)

    async def cut_over(
        self, request: RequestId, target: WorkerId, transfer: Transfer
    ) -> asyncio.Future[bool]:
        """Switch a request's stream to `target`; the package docstring states the order and why."""
        arrival: asyncio.Future[bool] = self._loop.create_future()
        tracked = self.requests.get(request)
        if tracked is None or tracked.worker is None or target not in self._attached:
            arrival.set_result(False)
            return arrival
        old_segment, source = tracked.segment, self._link_of(tracked)
        tracked.settle_cut(False)
        tracked.cut, tracked.moves = arrival, tracked.moves + 1
        await self._begin(tracked, target, transfer)
        if source is not None:
            await source.abort([old_segment])
        return arrival

    def at_copies(self) -> frozenset[WorkerId]:
        """Workers at either end of a move of a request that has made tokens."""
        begun = (m for m in self.migrations.open.values() if self._has_begun(m.request))
        return frozenset(w for m in begun for w in (m.source, m.target) if w is not None)

    def _has_begun(self, request: RequestId) -> bool:
        tracked = self.requests.get(request)
        return tracked is not None and bool(tracked.output_token_ids)

    async def replay_on(self, tracked: Tracked, target: WorkerId, why: str) -> asyncio.Future[bool]:
        """Let a request go on from its tokens on `target`, as far as nothing hinders it; as `cut_over`."""
        tracked.replays += 1
        self.metrics.replays.inc()
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
        self.metrics.count_move(move.outcome, move.bytes, move.downtime_s)
        said = f"{reason}; {move.outcome}" + (f": {move.reason}" if move.reason else "")
        facts = {"request_id": request, "worker": target, "source": move.source, "migration": move.id}
        cost = {"bytes": move.bytes, "downtime_s": move.downtime_s}
        self.events.record(time.time(), "migrate", said, **facts, cost=cost)
        return move

    async def _hand_over(self, tracked: Tracked, target: WorkerId, reason: str) -> MoveRecord:
        return await self.move(tracked.id, target, reason, hurried=True, mode="hand-over")

    async def abandon(self, ticket: Ticket) -> None:
        """The client of this ticket is gone: end all its requests, here and in the engines."""
        ticket.client_left = True
        for request in tuple(ticket.requests):
            tracked = self.requests.get(request)
            await self.abort_requests_async([request])
            if tracked is not None:
                self._tell_end(tracked, Finish.ABORT)

    async def fail(self, requests: Sequence[RequestId], why: str) -> None:
        """End requests in an explicit error, here and in the engines."""
        for request in requests:
            tracked = self.requests.get(request)
            if tracked is not None:
                segment, link = tracked.segment, self._link_of(tracked)
                self._fail(tracked, why)
                if link is not None:
                    await link.abort([segment])

    # Tokens.

    async def _read(self, at: Attached) -> None:
        await at.link.ask_cached()
        while True:
            try:
                event = await at.link.receive()
            except Exception as error:
                log.exception("link to %s broke", at.worker)
                event = Lost(f"its link broke: {error!r}")
            if isinstance(event, Outputs):
                self._deliver(at, event.batch)
                await self.unread.until_room()
            elif isinstance(event, Telemetry):
                at.telemetry = event
                self.placement.take_loads(at.link.info, event)
                for take in self.on_step:
                    take(event)
                self._admission.look()
            elif isinstance(event, CacheChange):
                await self._take_cached(at, event)
            elif isinstance(event, SegmentRefused):
                tracked = self.requests.listening_to(event.segment)
                if tracked is not None:
                    self._replay(tracked, f"{at.worker} refused it: {event.reason}")
            elif isinstance(event, Adapters):
                self.adapters.take(at.worker, event)
            elif isinstance(event, Silence):
                self._suspect(at, not event.is_over)
            else:
                self.metrics.lost_workers.inc()
                self._forget_worker(at, event.reason)
                await at.link.close()
                for tell in self.on_lost:
                    tell(at.worker, event.reason)
                return

    async def _take_cached(self, at: Attached, change: CacheChange) -> None:
        fault = self.placement.take_cached(at.worker, change)
        if fault:
            log.warning("%s: %s; all of it is asked for", at.worker, fault)
            self.events.record(time.time(), "resync", f"{fault}; all of it is asked for", worker=at.worker)
            await at.link.ask_cached()

    def _suspect(self, at: Attached, is_silent: bool) -> None:
        at.is_silent = is_silent
        self.placement.suspect(at.worker, is_silent)
        why = "nothing is heard of it: others get new requests" if is_silent else "it is heard of again"
        self.events.record(time.time(), "silent" if is_silent else "heard", why, worker=at.worker)
        self._admission.look()

    def _deliver(self, at: Attached, batch: StepOutputs) -> None:
        now_s = time.monotonic()
        shift_s = now_s - batch.timestamp  # the worker's clock is another machine's
        listened: list[tuple[Tracked, SegmentOutput]] = []
        broken: list[Tracked] = []
        for output in batch.outputs:
            tracked = self.requests.listening_to(output.request_id)
            if tracked is None:
                if output.request_id.startswith(LOADER_PREFIX):
                    self.migrations.engines.claim(output)
            elif output.finish_reason in (Finish.ERROR, Finish.ABORT):
                broken.append(tracked)
            else:
                listened.append((tracked, output))
        token_counts = [(tracked, len(output.new_token_ids)) for tracked, output in listened]
        prefilled = take_prefilled(batch)
        is_step = self.placement.advance(at.worker, token_counts, now_s, _found(listened), prefilled)
        self.metrics.count_tokens(sum(tokens for _, tokens in token_counts))
        for tracked, output in listened:
            self._accept(tracked, output, now_s, shift_s)
            if at.role == "prefill" and output.finish_reason is None:
                self.handovers.prefilled(tracked)
        if is_step:  # those that have ended are in it no more
            self.placement.begin_step(at.worker, now_s)
        if listened or batch.scheduler_stats is not None:
            batch.outputs = [output for _, output in listened]
            batch.engine_index, batch.timestamp = at.slot, now_s
            self.unread.tell(batch)
        for tracked in broken:
            self._replay(tracked, f"{at.worker} ended it in an error")

    def _accept(self, tracked: Tracked, output: SegmentOutput, now_s: float, shift_s: float) -> None:
        is_first = not tracked.output_token_ids
        if output.new_token_ids:
            tracked.output_token_ids.extend(output.new_token_ids)
            tracked.last_token_s, tracked.fruitless = now_s, 0
            if is_first:
                tracked.first_token_s = now_s
                tracked.ties = None  # one that has begun may not be movable any more
            if tracked.cut is not None:
                tracked.settle_cut(True)
            if self.predict_anew is not None and tracked.has_outlived:
                output_tokens = len(tracked.output_token_ids)
                tracked.expect(self.predict_anew(tracked.prompt_tokens, output_tokens))
        output.request_id = tracked.id
        output.kv_transfer_params = None  # ours, and no client's business
        if not is_first:
            output.events = output.prefill_stats = None  # the front end has had a prefill already
        for event in output.events or ():
            event.timestamp += shift_s
        if output.finish_reason is not None:
            self._end(tracked, "finished")

    def _tell_end(self, tracked: Tracked, reason: Finish) -> None:
        output = SegmentOutput(tracked.id, [], finish_reason=reason)
        self.unread.tell(StepOutputs(outputs=[output], timestamp=time.monotonic()))

    # Segments.

    def _link_of(self, tracked: Tracked) -> EngineLink | None:
        return None if tracked.worker is None else self.link(tracked.worker)

    async def _begin(self, tracked: Tracked, worker: WorkerId, transfer: Transfer = COMPUTE) -> None:
        """Begin a segment. No wait before the engine has it in its queue: the token list must not grow."""
        segment, link = self.requests.listen(tracked, worker), self.link(worker)
        assert link is not None  # its callers have looked in this turn of the loop
        self.placement.put(tracked, worker, transfer.load is not None, time.monotonic())
        if not tracked.output_token_ids:
            tracked.weights = link.info.weights
        if tracked.ticket.worker is None:
            tracked.ticket.worker = worker
        if tracked.stays == 1:
            priority = PRIORITY_NAMES[tracked.ticket.priority]
            self.metrics.queue_wait_s.labels(priority).observe(time.monotonic() - tracked.arrival_s)
        await link.add(segment_request(tracked.request, tracked.output_token_ids, segment, transfer))
        if self.placement.hands_over(tracked) and transfer.load is None:
            self.handovers.begun(tracked)
        if self.requests.listening_to(segment) is not tracked:
            await link.abort([segment])  # it ended while the link was full

    def _forget_worker(self, at: Attached, reason: str) -> None:
        self._attached.discard(at.worker)
        self.placement.detach(at.worker)
        self.adapters.forget(at.worker)
        self.migrations.paces.forget(at.worker)
        self.metrics.forget_worker(at.worker)
        for tracked in self.requests.on_worker(at.worker):
            self._replay(tracked, f"{at.worker} is gone: {reason}")

    def _replay(self, tracked: Tracked, why: str) -> None:
        """Put a request whose segment is over back in line, ahead of newcomers."""
        if self._may_go_on(tracked, why):
            self._admission.take_back(tracked)

    def _may_go_on(self, tracked: Tracked, why: str) -> bool:
        """Whether a request whose segment is over can be continued elsewhere; otherwise it fails."""
        lost_on = tracked.worker
        self.requests.ignore(tracked)
        self.placement.take(tracked)
        tracked.settle_cut(False)
        tracked.replays, tracked.fruitless = tracked.replays + 1, tracked.fruitless + 1
        obstacle = self.obstacle_to_replay(tracked) or self._other_weights(tracked)
        if obstacle is None and tracked.fruitless > MOST_FRUITLESS:
            obstacle = f"{tracked.fruitless} attempts in a row gave no token"
            params = tracked.request.sampling_params
            if tracked.output_token_ids and params is not None and params.structured_outputs is not None:
                obstacle += "; its grammar may not accept the tokens so far"
        if obstacle is not None:
            self._fail(tracked, f"{why}; it cannot be continued: {obstacle}")
            return False
        self.metrics.replays.inc()
        self._record("replay", why, tracked, source=lost_on, tokens_so_far=len(tracked.output_token_ids))
        return True

    def may_continue(self, tracked: Tracked, worker: WorkerId) -> bool:
        """Whether a worker runs the weights that have made a request's tokens, if it has any."""
        link = self.link(worker)
        return link is None or not tracked.output_token_ids or link.info.weights == tracked.weights

    def _other_weights(self, tracked: Tracked) -> str | None:
        """What hinders a request that has begun where all workers run other weights than made its tokens."""
        served = {at.link.info.weights for at in self._attached}
        if not tracked.output_token_ids or not served or tracked.weights in served:
            return None
        return "no worker runs the weights that it began on"

    # Endings.

    def _end(self, tracked: Tracked, outcome: str) -> None:
        self.handovers.ended(tracked)
        self.requests.remove(tracked)
        self._admission.discard(tracked)
        self.placement.forget(tracked)
        tracked.settle_cut(False)
        self.metrics.count_end(tracked, outcome)
        for tell in self.on_end:
            tell(tracked, outcome)

    def _fail(self, tracked: Tracked, why: str) -> None:
        log.warning("request %s failed: %s", tracked.id, why)
        tracked.ticket.failure = why
        self._record("failed", why, tracked)
        self._end(tracked, "failed")
        self._tell_end(tracked, Finish.ERROR)

    def _turn_away(self, tracked: Tracked, why: str) -> None:
        if tracked.output_token_ids:  # the client has begun to read: too late for a refusal
            self._fail(tracked, why)
            return
        tracked.ticket.rejection = self._admission.rejection(why)
        self._record("rejected", why, tracked)
        self._end(tracked, "rejected")
        self._tell_end(tracked, Finish.ERROR)

    async def _close(self, timeout_s: float) -> None:
        for tell in self.on_closing:
            tell(CLOSING)
        deadline_s = time.monotonic() + timeout_s
        while len(self.requests) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        await self.fail([tracked.id for tracked in self.requests], CLOSING)
        with suppress(TimeoutError):  # a front end that has stopped reading is not waited for
            async with asyncio.timeout(LAST_WORDS_S):
                while len(self.unread):
                    await asyncio.sleep(0.01)
        self.handovers.close()
        await asyncio.sleep(0.1)  # for it to write the last events
        self._admission.close()

    # Small things.

    def _note_heartbeat(self, requests: int, is_proven: bool) -> None:
        """Count a heartbeat of the exact policy; say so where the solver's time begins to run out."""
        if not is_proven and self._solved_in_time:
            why = f"{requests} requests were not placed exactly in time; the best placement found holds"
            self.events.record(time.time(), "fallback", why)
        self._solved_in_time = is_proven
        self.metrics.heartbeats.labels("exact" if is_proven else "best found").inc()

    def _record(self, kind: str, why: str, tracked: Tracked, **facts: object) -> None:
        self.events.record(time.time(), kind, why, request_id=tracked.id, worker=tracked.worker, **facts)


def _found(listened: Sequence[tuple[Tracked, SegmentOutput]]) -> dict[RequestId, Found]:
    """The tokens that an engine had of those requests whose prefill is done with these outputs.

    What the connector loaded for one that moves came from its source; else it is from host memory.
    """
    told = ((tracked, output.prefill_stats) for tracked, output in listened)
    return {
        tracked.id: Found(
            stats.num_local_cached_tokens, stats.num_external_cached_tokens if tracked.cut is None else 0
        )
        for tracked, stats in told
        if stats is not None
    }
