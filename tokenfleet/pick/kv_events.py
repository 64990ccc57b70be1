"""KV events of vLLM servers over ZMQ: what each has cached, followed from the first event that it still has.

A message is a topic, a number of eight bytes, and msgpack of [time, events, rank]. Where numbers are missing,
the server's replay endpoint is asked for them; where they are gone there too, the mirror
begins again, empty.
vLLM's publisher binds to an address with a `*`, and connects to any other; the picker does what is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from dataplane.live.engine_api.cache_events import CachedBlocks
from tokenfleet.pick.fleet import PickedFleet

log = logging.getLogger(__name__)
REPLAY_S = 2.0
CLEARED = ({"type": "AllBlocksCleared"},)
END = (-1).to_bytes(8, "big", signed=True)


def port_of(text: str, server: WorkerId, flag: str) -> str:
    """The ZMQ address of a server: PORT on its host, or +N from the port that it serves at."""
    host, _, port = server.rpartition(":")
    if not text.lstrip("+").isdecimal():
        raise BadInput(f"{flag}: expected PORT or +N, got {text!r}")
    number = int(text) + (int(port) if text.startswith("+") else 0)
    return f"tcp://{host}:{number}"


class ServerEvents:
    """One server's events, in order, and the mirror of its cache."""

    def __init__(self, fleet: PickedFleet, server: WorkerId, block_tokens: int, counts: Counter[str]) -> None:
        self._fleet, self._server, self._counts = fleet, server, counts
        self.last: int | None = None
        self._cached = CachedBlocks(block_tokens)
        fleet.take_cached(server, self._cached.all())

    def take(self, number: int, payload: bytes) -> None:
        """The events of one message; those of an earlier one are left out."""
        if self.last is not None and number <= self.last:
            return
        self.last = number
        try:
            change = self._cached.take(_events(payload))
        except (msgspec.DecodeError, ValueError, KeyError, TypeError, IndexError, OverflowError):
            self._counts["unreadable"] += 1
            return
        self._counts["taken"] += 1
        if change is not None and self._fleet.take_cached(self._server, change):
            self._fleet.take_cached(self._server, self._cached.all())

    def lost(self) -> None:
        """Events are missing for good: the cache counts as empty, and its mirror begins again."""
        self._counts["lost"] += 1
        self._fleet.take_cached(self._server, self._cached.take(CLEARED) or self._cached.all())

    def restarted(self) -> None:
        """The server has started again: its numbers begin at 0, and its cache is empty."""
        self.lost()
        self.last = None


def _events(payload: bytes) -> list[dict[str, Any]]:
    """The events of a message. Raises ValueError for another form than maps with a `type`."""
    batch = msgspec.msgpack.decode(payload)
    events = batch[1] if isinstance(batch, list) else batch["events"]
    if not isinstance(events, list) or not all(isinstance(one, dict) and "type" in one for one in events):
        raise ValueError("events of another version")
    return events


class KvFollower:
    """Follows the servers' events. `counts`: messages taken, unreadable, and gaps that lost some."""

    def __init__(
        self, fleet: PickedFleet, port: str, replay_port: str | None, block_of: Callable[[WorkerId], int]
    ) -> None:
        try:
            self._zmq, self._asyncio = import_module("zmq"), import_module("zmq.asyncio")
        except ImportError:
            raise BadInput("--kv-events: needs pyzmq, which vLLM brings; `pip install pyzmq`") from None
        for flag, text in (("--kv-events", port), ("--kv-replay", replay_port)):
            if text is not None:
                port_of(text, WorkerId("h:1"), flag)
        self._fleet, self._port, self._replay_port, self._block_of = fleet, port, replay_port, block_of
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._context = self._asyncio.Context()
        self.counts: Counter[str] = Counter()

    def told(self, server: WorkerId, is_here: bool) -> None:
        """A server has come, or gone."""
        if (task := self._tasks.pop(server, None)) is not None:
            task.cancel()
        if is_here:
            events = ServerEvents(self._fleet, server, self._block_of(server), self.counts)
            self._tasks[server] = asyncio.get_running_loop().create_task(self._follow(server, events))

    async def close(self) -> None:
        """Follow nothing more."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._context.destroy(linger=0)

    async def _follow(self, server: WorkerId, events: ServerEvents) -> None:
        heard = self._context.socket(self._zmq.SUB)
        try:
            heard.connect(port_of(self._port, server, "--kv-events"))
            heard.subscribe(b"")
            await self._replay(server, events, 0)
            before = -1
            while True:
                parts = await heard.recv_multipart()
                if len(parts) != 3 or len(parts[1]) != 8:
                    self.counts["unreadable"] += 1
                    continue
                number = int.from_bytes(parts[1], "big")
                if number <= before:
                    events.restarted()
                before = number
                if events.last is None or number > events.last + 1:
                    await self._replay(server, events, 0 if events.last is None else events.last + 1)
                if events.last is not None and number > events.last + 1:
                    events.lost()
                events.take(number, parts[2])
        finally:
            heard.close(linger=0)

    async def _replay(self, server: WorkerId, events: ServerEvents, first: int) -> None:
        """Ask for the events from a number on."""
        if self._replay_port is None:
            return
        asked = self._context.socket(self._zmq.DEALER)
        try:
            asked.connect(port_of(self._replay_port, server, "--kv-replay"))
            async with asyncio.timeout(REPLAY_S):
                await asked.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    *_, number, payload = await asked.recv_multipart()  # with or without a topic
                    if number == END:
                        return
                    at = int.from_bytes(number, "big")
                    if events.last is not None and at > events.last + 1:
                        events.lost()
                    events.take(at, payload)
        except (TimeoutError, ValueError):
            log.warning("%s: its KV events were not replayed", server)
        finally:
            asked.close(linger=0)
