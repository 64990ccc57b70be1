"""The core's end of its gateways: FleetCore for front ends that run in processes of their own.

It stands where vLLM's front end stands in a fleet of one gateway, and reads FleetCore's outputs for all of
them. So the ledger, the queue, moves, replays and evacuations are the same for the requests of every gateway.
What is open of a gateway that goes, or does not take its outputs, ends as if its clients had left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from controlplane.errors import BadInput
from controlplane.types import RequestId, Slo
from dataplane.live.engine_api.messages import Codec, EngineRequest, SegmentOutput, StepOutputs
from dataplane.live.engine_api.processes import Tasks, cancel_all
from dataplane.live.gateway.fleet_core import FleetCore
from dataplane.live.gateway.idempotency import Answers, OtherBody, StoredAnswer
from dataplane.live.gateways import wire
from dataplane.live.gateways.wire import MessageType, NewRequest, TicketNews, Welcome, pack
from dataplane.live.ledger.request import CURRENT_TICKET, Ticket

log = logging.getLogger(__name__)
BACK_S = 10.0  # within which an earlier core's gateways come, or are gone
MOST_UNSENT = 64 << 20  # bytes of outputs that a gateway may leave untaken
MOST_SILENT = 12  # pulses in a row that a gateway may leave out


@dataclass(slots=True, eq=False)
class OpenTicket:
    """A ticket by its gateway's number, the number of its open requests, and the news last sent of it."""

    number: int
    ticket: Ticket
    parts: int = 0
    told: TicketNews | None = None

    def news(self) -> TicketNews | None:
        """The changes on the ticket since the last news to its gateway; None if there are none."""
        ticket, refusal = self.ticket, self.ticket.rejection
        why, wait_s = (None, 0) if refusal is None else (refusal.reason, refusal.retry_after_s)
        now = TicketNews(self.number, ticket.worker, why, wait_s, ticket.failure)
        if now == (self.told or TicketNews(self.number)):
            return None
        self.told = now
        return now


@dataclass(slots=True, eq=False)
class Connected:
    """A gateway that is connected, and what is open there."""

    name: str
    writer: asyncio.StreamWriter
    requests: dict[RequestId, OpenTicket] = field(default_factory=dict)
    tickets: dict[int, OpenTicket] = field(default_factory=dict)
    asking: Tasks = field(default_factory=Tasks)
    served: int = 0
    silent: int = 0  # pulses that were due since its last message

    def say(self, kind: MessageType, *frames: Any) -> None:
        if not self.writer.is_closing():
            self.writer.writelines(wire.message(kind, *frames))


class CoreServer:
    """Serves `core` to gateways on a Unix socket.

    `allow(key)` counts a request of a key, and says in how many seconds it may come, 0 for now. `number`: of
    this core in its fleet's life.
    """

    def __init__(
        self, core: FleetCore, codec: Codec, kv_blocks: int, allow: Callable[[str], float], number: int = 1
    ) -> None:
        self.core, self._allow, self.number = core, allow, number
        self.answers = Answers()
        self._kv_blocks = kv_blocks
        self._retiring: dict[str, float] = {}
        self._awaited: set[str] = set()
        self._all_back = asyncio.Event()
        self._gateways: dict[str, Connected] = {}
        self._owners: dict[RequestId, Connected] = {}
        self._closing = ""
        self._server: asyncio.Server | None = None
        self._codec = codec
        self._tasks = Tasks()
        core.on_closing.append(self._close_doors)

    async def start(
        self,
        address: Path,
        knows: Callable[[str], object] = lambda name: True,
        on_gone: Callable[[str], object] = lambda name: None,
    ) -> None:
        """Listen at `address`, and pass outputs on.

        A gateway that nothing `knows` is refused; `on_gone` is called with the name of one that is gone.
        """
        self._knows, self._on_gone = knows, on_gone
        self._server = await asyncio.start_unix_server(self._serve, address, limit=1 << 20)
        self.core.unread.sink = self._share_out
        self._tasks.spawn(self._watch())

    def await_gateways(self, names: Sequence[str]) -> None:
        """Hold new claims until these gateways of an earlier core are here, for BACK_S at most."""
        self._awaited = set(names)
        asyncio.get_running_loop().call_later(BACK_S, self._all_back.set)

    def connected(self, name: str) -> Connected | None:
        return self._gateways.get(name)

    def retire(self, name: str, finish_s: float) -> None:
        """Let a gateway end once what is open there has ended, within `finish_s`; if absent, as it comes."""
        self._retiring[name] = finish_s
        if (gateway := self._gateways.get(name)) is not None:
            gateway.say(MessageType.RETIRE, pack(finish_s))

    async def close(self) -> None:
        """Part with every gateway."""
        if self._server is not None:
            self._server.close()
        await cancel_all(self._tasks)

    def _close_doors(self, why: str) -> None:
        self._closing = why
        for gateway in self._gateways.values():
            gateway.say(MessageType.CLOSING, pack(why))

    # Connections.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gateway: Connected | None = None
        here = asyncio.current_task()
        assert here is not None
        self._tasks.add(here)
        try:
            kind, frames = await wire.next_message(reader)
            refused, name = _greeting(kind, frames, self._codec.version)
            refused = refused or ("" if self._knows(name) else "it is none of this fleet's")
            slo = self.core.settings.default_slo
            slots, closing = self.core.settings.slots, self._closing
            targets, classes = (slo.ttft_s, slo.tpot_s), self.core.settings.classes
            said = Welcome(refused, slots, self._kv_blocks, *targets, closing, self.number, classes)
            writer.writelines(wire.message(MessageType.WELCOME, pack(said)))
            if refused:
                return
            gateway = self._gateways[name] = Connected(name, writer)
            if name in self._retiring:
                self.retire(name, self._retiring[name])
            await self._listen(gateway, reader)
        except EOFError:
            pass
        except Exception:  # a gateway that talks nonsense must not take others along
            log.exception("gateway %s", "?" if gateway is None else gateway.name)
        finally:
            if gateway is not None:
                await self._part(gateway)
            writer.close()
            self._tasks.discard(here)

    async def _listen(self, gateway: Connected, reader: asyncio.StreamReader) -> None:
        while True:
            kind, frames = await wire.next_message(reader)
            gateway.silent = 0
            if kind == MessageType.ADD:
                new = msgspec.msgpack.decode(frames[0], type=NewRequest)
                await self._add(gateway, new, self._codec.request(frames[1:]))
            elif kind == MessageType.ABORT:
                names, has_left = msgspec.msgpack.decode(frames[0])
                await self._abort(gateway, names, has_left)
            elif kind == MessageType.ABANDON:
                if (at := gateway.tickets.get(msgspec.msgpack.decode(frames[0]))) is not None:
                    await self.core.abandon(at.ticket)
            elif kind == MessageType.GIVE_UP:
                await self.core.fail(tuple(gateway.requests), msgspec.msgpack.decode(frames[0]))
            elif kind == MessageType.CLAIMED:
                for name, digest in msgspec.msgpack.decode(frames[0]).items():
                    await self.answers.claim(name, digest, gateway)
                self._awaited.discard(gateway.name)
                if not self._awaited:
                    self._all_back.set()
            elif kind == MessageType.ASK:
                number, verb, arguments = msgspec.msgpack.decode(frames[0])
                gateway.asking.spawn(self._answer(gateway, number, verb, arguments))

    async def _watch(self) -> None:
        """Part with gateways that hang. While this process stands still, no pulse is due."""
        while True:
            await asyncio.sleep(wire.PULSE_S)
            for gateway in self._gateways.values():
                gateway.silent += 1
                if gateway.silent > MOST_SILENT:
                    log.warning("gateway %s has not run for %.0f s", gateway.name, MOST_SILENT * wire.PULSE_S)
                    gateway.writer.transport.abort()

    async def _part(self, gateway: Connected) -> None:
        """A gateway is gone: end what it had open, and let others answer what it was about to."""
        if self._gateways.get(gateway.name) is gateway:
            del self._gateways[gateway.name]
            self._retiring.pop(gateway.name, None)
        for task in gateway.asking:
            task.cancel()
        await self._abort(gateway, list(gateway.requests), True)
        await self.answers.release(gateway)
        self._on_gone(gateway.name)

    # Requests.

    async def _add(self, gateway: Connected, new: NewRequest, request: EngineRequest) -> None:
        if (at := gateway.tickets.get(new.ticket)) is None:
            slo = Slo(new.ttft_s, new.tpot_s)
            ticket = Ticket(new.id, new.key, slo, new.priority, session=new.session, slo_class=new.slo_class)
            ticket.traceparent = new.traceparent
            at = gateway.tickets[new.ticket] = OpenTicket(new.ticket, ticket)
        at.parts += 1
        at.ticket.sent_s = new.sent_s
        name = RequestId(request.request_id)
        gateway.requests[name], self._owners[name] = at, gateway
        gateway.served += 1
        CURRENT_TICKET.set(at.ticket)
        # A full link makes this request wait, not the messages after it; it is tracked before its first wait.
        self._tasks.spawn(self._begin(request, new))
        await asyncio.sleep(0)

    async def _begin(self, request: EngineRequest, new: NewRequest) -> None:
        try:
            if new.tokens is None:
                await self.core.add_request_async(request)
            else:
                await self.core.resume(request, new.tokens, new.first_s, self.number)
        except Exception as error:  # whatever it is, its client must hear of it
            log.exception("request %s", request.request_id)
            await self.core.fail([RequestId(request.request_id)], f"it could not be begun: {error!r}")

    async def _abort(self, gateway: Connected, names: Sequence[str], has_left: bool) -> None:
        for request in map(RequestId, names):
            if request in gateway.requests:
                gateway.requests[request].ticket.client_left |= has_left
                self._forget(gateway, request)
                await self.core.abort_requests_async([request])

    def _forget(self, gateway: Connected, request: RequestId) -> None:
        """A request is over; so is its ticket with the last of its requests."""
        self._owners.pop(request, None)
        at = gateway.requests.pop(request)
        at.parts -= 1
        if at.parts == 0:
            del gateway.tickets[at.number]

    def _share_out(self, batch: StepOutputs) -> None:
        """Pass a step's outputs on in this very call: a task of its own would cost a turn of the loop."""
        parts: dict[Connected, list[SegmentOutput]] = {}
        for output in batch.outputs:
            gateway = self._owners.get(RequestId(output.request_id))
            if gateway is not None:
                parts.setdefault(gateway, []).append(output)
        if not parts and batch.scheduler_stats is not None and self._gateways:
            parts[next(iter(self._gateways.values()))] = []  # statistics of a step without outputs
        for gateway, outputs in parts.items():
            self._pass_on(gateway, batch, outputs)
            batch.scheduler_stats = None  # one gateway counts a step: their metrics are added up

    def _pass_on(self, gateway: Connected, batch: StepOutputs, outputs: list[SegmentOutput]) -> None:
        news = []
        for output in outputs:
            at = gateway.requests[RequestId(output.request_id)]
            # What is written on a ticket is its worker, before its first output, and why it ended.
            if (at.told is None or output.finish_reason is not None) and (told := at.news()) is not None:
                news.append(told)
        if news:
            gateway.say(MessageType.TICKETS, pack(news))
        batch.outputs = outputs
        gateway.say(MessageType.OUTPUTS, *self._codec.encode(batch))
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(gateway, RequestId(output.request_id))
        if gateway.writer.transport.get_write_buffer_size() > MOST_UNSENT:
            log.warning("gateway %s did not take its outputs in time", gateway.name)
            gateway.writer.transport.abort()

    # Questions.

    async def _answer(self, gateway: Connected, number: int, verb: str, arguments: Sequence[Any]) -> None:
        value: Any = None
        error = ""
        try:
            if verb == "allow":
                value = self._allow(*arguments)
            elif verb == "claim":
                name, digest = arguments
                if self._awaited:
                    await self._all_back.wait()
                value = await self.answers.claim(name, digest, gateway)
            elif verb == "settle":
                name, answer = arguments
                await self.answers.settle(name, msgspec.convert(answer, StoredAnswer | None))
            elif verb == "adapter":
                await self.core.add_adapter(self._codec.adapter(arguments[0]))
        except OtherBody:
            error = OtherBody.__name__
        except (BadInput, RuntimeError) as refusal:  # an engine's own words
            error = str(refusal)
        except Exception as fault:  # of ours: the gateway that asks must not wait for ever
            log.exception("gateway %s: its question %r broke", gateway.name, verb)
            error = repr(fault)
        gateway.say(MessageType.ANSWER, pack([number, value, error]))


def _greeting(kind: MessageType, frames: Sequence[memoryview], vllm_version: str) -> tuple[str, str]:
    """Why a gateway is not welcome, or an empty text; and its name. Raises ValueError for no greeting."""
    if kind != MessageType.HELLO:
        raise ValueError("it did not greet")
    with suppress(ValueError, TypeError):
        version, theirs, name = msgspec.msgpack.decode(frames[0])
        if (version, theirs) == (wire.WIRE_VERSION, vllm_version):
            return "", str(name)
        ours = f"the core runs vllm {vllm_version}, wire {wire.WIRE_VERSION}"
        return f"{ours}; this gateway {theirs}, {version}", str(name)
    raise ValueError("its greeting cannot be read")
