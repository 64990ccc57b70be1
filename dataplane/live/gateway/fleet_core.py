"""FleetCore: the fleet in the place where vLLM's front end expects an engine.

It takes the place of AsyncLLM's EngineCoreClient. A request is assigned on arrival, tracked by its token
list, and its outputs come back under its own id whatever worker made them. Invariants:

- A request listens to at most one segment; outputs of any other segment id are dropped.
- Tokens enter `Tracked.output_token_ids` and the front end's queue in the same instant and order, so each
  reaches the client exactly once.
- A segment that ends in an error, or whose worker is lost, is replayed from prompt and tokens so far on
  another worker. Only when that is impossible does the client see an error, and it always sees it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from controlplane.placement.queue import QueueSettings
from controlplane.types import RequestId, Role, Slo, SloClass, WorkerId
from dataplane.live.engine_api import link as links
from dataplane.live.engine_api.cache_events import CacheChange
from dataplane.live.engine_api.kv_messages import LOADER_PREFIX
from dataplane.live.engine_api.messages import Adapter, EngineRequest, Finish, SegmentOutput, StepOutputs
from dataplane.live.engine_api.step_trace import take_prefilled
from dataplane.live.gateway.connections import AdapterBook, Attached, Attachments, FrontEndClient
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.metrics import Metrics
from dataplane.live.gateway.segments import LeftRequests, Segments
from dataplane.live.ledger.mirrors import Found
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Ticket, Tracked, tracked_from
from dataplane.live.migration.move import MoveBudget

log = logging.getLogger(__name__)
LAST_WORDS_S = 2.0
CLOSING = "the fleet is shutting down"


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

    Hooks, called in the loop: `on_lost(worker, reason, whether each request goes on)`, `on_arrival(request)`,
    `on_end(request, outcome)`, `on_step(telemetry)`, `on_closing(reason)`. `predict(prompt, generated)`: the
    output tokens to expect of a new request, and again of one that has outlived that (Algorithm 2).
    """

    def __init__(
        self,
        settings: CoreSettings,
        placement: Placement,
        metrics: Metrics,
        events: EventLog,
        predict: Callable[[int, int], int],
    ) -> None:
        super().__init__(settings.slots)
        self.settings, self.placement, self.metrics, self.events = settings, placement, metrics, events
        self.adapters, self._attached, self.left = AdapterBook(), Attachments(settings.slots), LeftRequests()
        placement.holders = self.adapters.holders
        self._is_starting: Callable[[], bool] = lambda: False
        self.segments = Segments(
            settings.waiting,
            settings.moves,
            placement,
            metrics,
            events,
            self._attached,
            self.unread,
            lambda: not self._attached and self._is_starting(),
        )
        self.requests, self.admission = self.segments.requests, self.segments.admission
        self.migrations, self.handovers = self.segments.migrations, self.segments.handovers
        self.on_lost: list[Callable[[WorkerId, str, Sequence[bool]], None]] = []
        self.on_arrival: list[Callable[[Tracked], None]] = []
        self.on_step: list[Callable[[links.Telemetry], None]] = []
        self.on_end, self.on_closing = self.segments.on_end, list[Callable[[str], None]]()
        self._predict = predict

    def await_workers(self, is_starting: Callable[[], bool]) -> None:
        """Let requests to a fleet without workers wait while one is on its way, however long."""
        self._is_starting = is_starting

    # What a front end calls.

    async def add_adapter(self, adapter: Adapter) -> None:
        await self.adapters.load([at.link for at in self._attached.values()], adapter)

    async def add_request_async(self, request: EngineRequest) -> None:
        """Track a new request; it is placed at once where a worker has room, or waits."""
        if not self.settings.reasons:
            request.reasoning_ended = True
        await self.admission.take_in(self._track(request))

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

        Where this core has adopted that worker, it goes back there, since its prefix is cached there. Where
        it is unknown which weights made its tokens, it fails rather than go on with another model.
        """
        tracked = self._track(request)
        tracked.resume(tokens, first_s, time.monotonic(), core)
        was_on = self.left.come_back(tracked.id)
        at = None if was_on is None else self._attached.get(was_on)
        served = {one.link.info.weights for one in self._attached.values()}
        weights = self.left.weights_of(served) if at is None else at.link.info.weights
        tracked.weights, why = weights or "", "the fleet's core was lost"
        if tokens and weights is None:
            self.segments.fail(tracked, f"{why}, and it is not known which weights it began on")
        elif self.segments.may_go_on(tracked, why):
            if at is not None and at.role == "any":
                await self.segments.begin(tracked, at.worker)
            else:
                self.admission.take_back(tracked)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            tracked = self.requests.get(RequestId(request_id))
            if tracked is not None:
                segment, link = tracked.segment, self.segments.link_of(tracked)
                self.segments.end(tracked, "aborted" if tracked.ticket.client_left else "finished")
                if link is not None:
                    await link.abort([segment])

    @property
    def _is_closed(self) -> bool:
        return self.admission.is_over

    # Workers.

    def attach(self, link: links.EngineLink, kind: str = "", role: Role = "any") -> None:
        """Take a worker in; it gets requests from now on. Raises StopIteration when every slot is taken."""
        at = self._attached.add(link, kind, role)
        self.placement.attach(link.info, kind, role)
        at.reader = self._loop.create_task(self._read(at))
        self.admission.look()

    async def detach(self, worker: WorkerId, why: str = "the worker was stopped") -> Sequence[bool]:
        """Part with a worker on purpose; whatever it still runs is replayed elsewhere, where it can go on."""
        at = self._attached.get(worker)
        if at is None:
            return ()
        if at.reader is not None:
            at.reader.cancel()
        go_on = self._forget_worker(at, why)
        await at.link.close()
        return go_on

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
        self.admission.look()

    def set_open(self, worker: WorkerId, is_open: bool) -> None:
        """Whether new requests may be placed on a worker."""
        if worker in self._attached:
            self.placement.set_open(worker, is_open)
            self.admission.look()

    def link(self, worker: WorkerId) -> links.EngineLink | None:
        return self._attached.link(worker)

    def kind_of(self, worker: WorkerId) -> str | None:
        at = self._attached.get(worker)
        return None if at is None else at.kind

    def attached(self) -> Iterator[Attached]:
        """The workers attached now, whatever changes during the iteration."""
        return iter(tuple(self._attached.values()))

    def workers_by_slot(self) -> dict[str, WorkerId]:
        """vLLM's engine index → worker."""
        return {str(at.slot): at.worker for at in self._attached.values()}

    # Requests.

    async def abandon(self, ticket: Ticket) -> None:
        """The client of this ticket is gone: end all its requests, here and in the engines."""
        ticket.client_left = True
        for request in tuple(ticket.requests):
            tracked = self.requests.get(request)
            await self.abort_requests_async([request])
            if tracked is not None:
                self.unread.tell_end(tracked.id, Finish.ABORT)

    async def fail(self, requests: Sequence[RequestId], why: str) -> None:
        """End requests in an explicit error, here and in the engines."""
        for request in requests:
            tracked = self.requests.get(request)
            if tracked is not None:
                segment, link = tracked.segment, self.segments.link_of(tracked)
                self.segments.fail(tracked, why)
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
                event = links.Lost(f"its link broke: {error!r}")
            if isinstance(event, links.Outputs):
                self._deliver(at, event.batch)
                await self.unread.until_room()
            elif isinstance(event, links.Telemetry):
                at.telemetry = event
                self.placement.take_loads(at.link.info, event)
                for take in self.on_step:
                    take(event)
                self.admission.look()
            elif isinstance(event, CacheChange):
                await self._take_cached(at, event)
            elif isinstance(event, links.SegmentRefused):
                tracked = self.requests.listening_to(event.segment)
                if tracked is not None:
                    self.segments.replay(tracked, f"{at.worker} refused it: {event.reason}")
            elif isinstance(event, links.Adapters):
                self.adapters.take(at.worker, event)
            elif isinstance(event, links.Silence):
                self._suspect(at, not event.is_over)
            else:
                go_on = self._forget_worker(at, event.reason)
                await at.link.close()
                for tell in self.on_lost:
                    tell(at.worker, event.reason, go_on)
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
        why = "unresponsive: others get new requests" if is_silent else "reachable again"
        self.events.record(time.time(), "silent" if is_silent else "heard", why, worker=at.worker)
        self.admission.look()

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
            self.segments.replay(tracked, f"{at.worker} ended it in an error")

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
            if tracked.has_outlived:
                tracked.expect(self._predict(tracked.prompt_tokens, len(tracked.output_token_ids)))
        output.request_id = tracked.id
        output.kv_transfer_params = None  # ours, and no client's business
        if not is_first:
            output.events = output.prefill_stats = None  # the front end has had a prefill already
        for event in output.events or ():
            event.timestamp += shift_s
            self.metrics.see(tracked, event)
        if output.finish_reason is not None:
            self.segments.end(tracked, "finished")

    def _forget_worker(self, at: Attached, reason: str) -> Sequence[bool]:
        self._attached.pop(at.worker, None)
        self.placement.detach(at.worker)
        self.adapters.forget(at.worker)
        self.migrations.paces.forget(at.worker)
        self.metrics.forget_worker(at.worker)
        left, why = self.requests.on_worker(at.worker), f"{at.worker} is gone: {reason}"
        return [self.segments.replay(tracked, why) for tracked in left]

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
        self.admission.close()


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
