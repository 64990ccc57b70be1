"""The fleet's core as a gateway in a process of its own sees it: the engine client beneath vLLM's front end.

Requests go to the core unchanged, and outputs come back in its order. What the fleet writes on a request's
ticket comes before them. When the core is lost, all that is open waits for its successor, and is sent to it
with the tokens that have come. When none comes, or the core ended on purpose, every open stream ends in an
explicit error, and new requests get 503.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from controlplane.errors import BadInput
from controlplane.types import RequestId, Slo, WorkerId
from dataplane.http.keys import ApiKey
from dataplane.live.engine_api.messages import Adapter, Codec, EngineRequest, Finish, StepOutputs
from dataplane.live.gateway.connections import FrontEndClient
from dataplane.live.gateway.idempotency import OtherBody, StoredAnswer
from dataplane.live.gateway.middleware import Refusal
from dataplane.live.gateways import wire
from dataplane.live.gateways.wire import WIRE_VERSION, MessageType, NewRequest, TicketNews, Welcome, pack
from dataplane.live.ledger.request import CURRENT_TICKET, Rejection, Ticket

IDLE_S = 10.0  # an idle connection of a gateway that leaves is closed after so long
LAST_WORDS_S = 2.0
LOOK_S = 0.02
SUCCESSOR_S = 120.0  # that a lost core's is waited for
GONE = "the fleet's core is gone"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class CoreGone(Refusal):
    """The core did not answer, and will not: 503."""

    def __init__(self) -> None:
        super().__init__(503, "service_unavailable", "shutting_down", GONE, retry_after="5")


@dataclass(slots=True, eq=False)
class Open:
    """A request that has not ended, and what has come of it."""

    ticket: Ticket
    new: NewRequest
    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    first_s: float | None = None


class CoreListener(Protocol):
    """The HTTP server of a gateway, as its core calls it in the loop."""

    def close(self, why: str) -> None:
        """Let no request in any more."""

    def retire(self, finish_s: float) -> None:
        """The core asks this gateway to leave within `finish_s`."""

    def leave(self) -> None:
        """It begins to leave."""

    def core_gone(self) -> None:
        """The core is lost, and no other has come."""

    def traffic(self) -> tuple[int, int]:
        """The connections that are open, and the HTTP requests in progress."""


class RemoteCore(FrontEndClient):
    """Make one with `connect`, inside the event loop it will live in."""

    def __init__(
        self, address: Path, name: str, codec: Codec, door: CoreListener, ends: Ends, welcome: Welcome
    ) -> None:
        super().__init__(welcome.slots)
        self._address, self._name = address, name
        self._reader, self._writer = ends
        self.welcome = welcome
        self.default_slo = Slo(welcome.ttft_s, welcome.tpot_s)
        self._door = door
        self._requests: dict[RequestId, Open] = {}
        self._tickets: dict[int, Ticket] = {}  # those with open requests; their identity is their number
        self._questions = itertools.count(1)
        self._answers: dict[int, tuple[asyncio.Future[Any], bytes]] = {}  # with their questions
        self._claims: dict[str, bytes] = {}  # that are ours
        self._codec = codec
        self._finish_s = 0.0
        self._closing = welcome.closing
        self._is_gone = self._has_left = self._is_lost = self._is_retiring = False
        self._listener = self._loop.create_task(self._listen())
        self._pulse = self._loop.create_task(self._show())

    @classmethod
    async def connect(cls, address: Path, name: str, codec: Codec, door: CoreListener) -> RemoteCore:
        """Greet the core. Raises BadInput where it is not there, or refuses this gateway."""
        return cls(address, name, codec, door, *await _greet(address, name, codec.version))

    # What a front end calls.

    async def add_adapter(self, adapter: Adapter) -> None:
        await self._ask("adapter", adapter)

    async def add_request_async(self, request: EngineRequest) -> None:
        ticket = CURRENT_TICKET.get() or Ticket("", "anyone", self.default_slo, 0)
        name = RequestId(request.request_id)
        self._tickets[id(ticket)] = ticket
        ticket.requests.append(name)
        new = NewRequest(
            id(ticket),
            ticket.id,
            ticket.key,
            ticket.slo.ttft_s,
            ticket.slo.tpot_s,
            ticket.priority,
            ticket.take_arrival_s(time.monotonic()),
            ticket.session,
            slo_class=ticket.slo_class,
            traceparent=ticket.traceparent,
        )
        self._requests[name] = Open(ticket, new, request)
        if self._is_gone:
            self._fail(name, GONE)
            return
        self._say(MessageType.ADD, pack(new), *self._codec.encode(request))
        with suppress(ConnectionError):  # its successor will be told
            await self._writer.drain()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        for name in map(RequestId, request_ids):
            if name in self._requests:
                self._say(MessageType.ABORT, pack([[name], self._requests[name].ticket.client_left]))
                self._forget(name)

    @property
    def _is_closed(self) -> bool:
        return self._has_left

    # What the front door calls.

    async def abandon(self, ticket: Ticket) -> None:
        """The client of this ticket is gone: end all its requests."""
        ticket.client_left = True
        if ticket.requests:
            self._say(MessageType.ABANDON, pack(id(ticket)))

    async def allow(self, key: ApiKey) -> float:
        """Count a request of a key with limits with the core; the seconds until it may come, 0 for now."""
        if not key.requests_per_minute and not key.tokens_per_minute:
            return 0.0
        return float(await self._ask("allow", key.name))

    async def claim(self, name: str, digest: bytes) -> StoredAnswer | None:
        """As `idempotency.KeyClaims` has it."""
        answer = await self._ask("claim", name, digest)
        if answer is None:
            self._claims[name] = digest
            return None
        return msgspec.convert(answer, StoredAnswer)

    async def settle(self, name: str, answer: StoredAnswer | None) -> None:
        """As `idempotency.KeyClaims` has it."""
        with suppress(CoreGone):  # and with it all keys
            await self._ask("settle", name, answer)
        self._claims.pop(name, None)

    # What comes from the core.

    async def _listen(self) -> None:
        while not self._is_gone:
            try:
                kind, frames = await wire.next_message(self._reader)
            except EOFError:
                if self._closing or not await self._find_successor():
                    self._lose()
                continue
            if kind == MessageType.OUTPUTS:
                self._deliver(self._codec.outputs(frames))
                await self.unread.until_room()
            else:
                self._take(kind, msgspec.msgpack.decode(frames[0]))

    async def _show(self) -> None:
        """Let the core see that this process runs."""
        while not self._is_gone:
            self._say(MessageType.PULSE)
            await asyncio.sleep(wire.PULSE_S)

    async def _find_successor(self) -> bool:
        """Turn to the core's successor, with all that is open here; whether one came."""
        self._is_lost = True
        self._writer.close()
        for _ in range(round(SUCCESSOR_S / LOOK_S)):  # while this process stands still, none is made
            with suppress(BadInput):
                ends, welcome = await _greet(self._address, self._name, self._codec.version)
                if welcome.core > self.welcome.core:
                    self._reader, self._writer = ends
                    self.welcome, self._is_lost = welcome, False
                    self._tell_all()
                    return True
                ends[1].close()  # the core that was lost is no successor
            await asyncio.sleep(LOOK_S)
        return False

    def _tell_all(self) -> None:
        """Claims first: an answer that is being made is not made twice."""
        self._say(MessageType.CLAIMED, pack(self._claims))
        for at in self._requests.values():
            again = msgspec.structs.replace(at.new, tokens=at.tokens, first_s=at.first_s)
            self._say(MessageType.ADD, pack(again), *self._codec.encode(at.request))
            if at.ticket.client_left:
                self._say(MessageType.ABANDON, pack(id(at.ticket)))
        for _, question in self._answers.values():
            self._say(MessageType.ASK, question)

    def _take(self, kind: MessageType, said: Any) -> None:
        if kind == MessageType.TICKETS:
            for news in msgspec.convert(said, list[TicketNews]):
                self._write_on_ticket(news)
        elif kind == MessageType.ANSWER:
            number, value, error = said
            asked, _ = self._answers.pop(number, (None, b""))
            if asked is not None and not asked.done():
                if error:
                    asked.set_exception(OtherBody() if error == OtherBody.__name__ else RuntimeError(error))
                else:
                    asked.set_result(value)
        elif kind == MessageType.CLOSING:
            self._close_doors(str(said))
        elif kind == MessageType.RETIRE and not self._is_retiring:  # a core's successor says it again
            self._is_retiring, self._finish_s = True, float(said)
            self._door.retire(self._finish_s)

    def _write_on_ticket(self, news: TicketNews) -> None:
        ticket = self._tickets.get(news.ticket)
        if ticket is not None:
            ticket.worker = None if news.worker is None else WorkerId(news.worker)
            ticket.failure = news.failure
            if news.refused is not None:
                ticket.rejection = Rejection(news.refused, news.retry_after_s)

    def _deliver(self, batch: StepOutputs) -> None:
        # One that was aborted while these were on their way is none of the front end's any more.
        batch.outputs = [o for o in batch.outputs if RequestId(o.request_id) in self._requests]
        for output in batch.outputs:
            at = self._requests[RequestId(output.request_id)]
            if output.new_token_ids and not at.tokens:
                at.first_s = time.monotonic()
            at.tokens += output.new_token_ids
            if output.finish_reason is not None:
                self._forget(RequestId(output.request_id))
        if batch.outputs or batch.scheduler_stats is not None:
            self.unread.tell(batch)

    def _forget(self, name: RequestId) -> None:
        ticket = self._requests.pop(name).ticket
        ticket.requests.remove(name)
        if not ticket.requests:
            del self._tickets[id(ticket)]

    # Ends.

    def _lose(self) -> None:
        self._is_gone = True
        self._close_doors(GONE)
        for name in tuple(self._requests):
            self._fail(name, GONE)
        for asked, _ in self._answers.values():
            if not asked.done():
                asked.set_exception(CoreGone())
        self._answers.clear()
        self._door.core_gone()

    def _close_doors(self, why: str) -> None:
        self._closing = why
        self._door.close(why)

    def _fail(self, name: RequestId, why: str) -> None:
        self._requests[name].ticket.failure = why
        self._forget(name)
        self.unread.tell_end(name, Finish.ERROR)

    async def _close(self, timeout_s: float) -> None:
        """Accept no connection, serve what is open and what still comes on it, then end the rest."""
        self._door.leave()
        timeout_s, began_s = max(timeout_s, self._finish_s), time.monotonic()
        while not self._is_gone and time.monotonic() < began_s + timeout_s:
            connections, requests = self._door.traffic()
            is_patient = not self._closing and time.monotonic() < began_s + IDLE_S
            if not self._requests and not requests and not (connections and is_patient):
                break
            await asyncio.sleep(LOOK_S)
        why = self._closing or "the gateway is shutting down"
        self._close_doors(why)
        if self._requests and not self._is_gone:
            self._say(MessageType.GIVE_UP, pack(why))
        until_s = time.monotonic() + LAST_WORDS_S
        while (self._requests or len(self.unread)) and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(0.1)  # for the front end to write the last events
        self._has_left = True

    # Small things.

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        """The core's answer. Raises CoreGone, OtherBody, or RuntimeError with its words."""
        if self._is_gone:
            raise CoreGone
        number, asked = next(self._questions), self._loop.create_future()
        question = pack([number, verb, arguments])
        self._answers[number] = asked, question
        self._say(MessageType.ASK, question)
        try:
            return await asked
        finally:
            self._answers.pop(number, None)

    def _say(self, kind: MessageType, *frames: Any) -> None:
        # uvloop raises at a write to a connection that broke, before its reader hears of that.
        if not (self._is_gone or self._is_lost or self._writer.is_closing()):
            self._writer.writelines(wire.message(kind, *frames))


async def _greet(address: Path, name: str, vllm_version: str) -> tuple[Ends, Welcome]:
    """Greet the core at an address. Raises BadInput where it is not there, or refuses this gateway."""
    try:
        reader, writer = await asyncio.open_unix_connection(address, limit=1 << 20)
        writer.writelines(wire.message(MessageType.HELLO, pack([WIRE_VERSION, vllm_version, name])))
        _, frames = await wire.next_message(reader)
    except (EOFError, OSError) as error:
        raise BadInput(f"gateway {name}: {GONE}") from error
    welcome = msgspec.msgpack.decode(frames[0], type=Welcome)
    if welcome.refused:
        writer.close()
        raise BadInput(f"gateway {name}: {welcome.refused}")
    return (reader, writer), welcome
