"""A gateway in a process of its own: vLLM's OpenAI server in front of a core in another process.

Its settings come on stdin, its listening socket is inherited and shared with the other gateways. SIGTERM, or
the core's word, makes it leave: it takes no more connections, serves what is open, and ends.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Iterator, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from prometheus_client import values
from pydantic import TypeAdapter

from controlplane.errors import BadInput
from dataplane.http.keys import ApiKey, KeyRing
from dataplane.live.gateway.middleware import DoorPolicy
from dataplane.live.gateway.server import Gateway, GatewaySettings, stop_accepting
from dataplane.live.gateways.remote_core import RemoteCore

MOST_GATEWAYS = 128  # at once, those that leave among them
WRITE_EVERY_S = 1.0
NOT_ACCEPTING = (1 << 31) - 1  # vLLM's own mark, in place of a number of connections


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What a gateway is told: first what all are, then what its keeper adds.

    `listening` and `loads` are descriptors, of the socket and of the table of loads, in which `index` is this
    gateway's place. `core`: where the core listens.
    """

    gateway: GatewaySettings
    keys: tuple[ApiKey, ...]
    page: str
    listening: int
    core: Path = Path()
    loads: int = -1
    name: str = ""
    index: int = 0


PROCESS_SETTINGS = TypeAdapter(ProcessSettings)


class Loads(MutableSequence[int]):
    """The connections of each gateway on a shared socket, in shared memory; a place nobody has does not
    accept."""

    def __init__(self, descriptor: int) -> None:
        self._cells = memoryview(mmap.mmap(descriptor, 4 * MOST_GATEWAYS)).cast("i")
        self.has_left = False

    def __len__(self) -> int:
        return MOST_GATEWAYS

    def __iter__(self) -> Iterator[int]:
        return iter(self._cells)

    def __getitem__(self, index: Any) -> Any:
        return self._cells[index]

    def __setitem__(self, index: Any, load: Any) -> None:
        self._cells[index] = NOT_ACCEPTING if self.has_left else load

    def __delitem__(self, index: Any) -> None:
        raise TypeError("a place is never taken away")

    def insert(self, index: int, value: int) -> None:
        raise TypeError("no place can be added")


class Unwritten:
    """What metrics have counted since it was last written to the file that they share with other gateways.

    vLLM counts several things for each token, and to write each takes seven times as long as to count it.
    """

    def __init__(self, written: Any) -> None:
        """`written`: the client library's class of a value in such a file."""
        self._written, self._lock = written, Lock()
        self._changed: set[Any] = set()

    def value(self) -> Any:
        """A class of values that are written later."""
        written, changed, lock = self._written, self._changed, self._lock

        class Value(written):  # type: ignore[misc, valid-type]
            def inc(self, amount: float) -> None:
                with lock:
                    self._value += amount
                    changed.add(self)

        return Value

    def write(self) -> None:
        """Write what has changed."""
        with self._lock:
            changed = self._changed.copy()
            self._changed.clear()
        for value in changed:
            self._written.inc(value, 0.0)

    async def keep_written(self) -> None:
        """Write until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            self.write()


def traffic(server: Any) -> tuple[int, int]:
    """A uvicorn server's open connections, and the requests in progress."""
    return (
        (0, 0) if server is None else (len(server.server_state.connections), len(server.server_state.tasks))
    )


async def run(settings: ProcessSettings, unwritten: Unwritten) -> None:
    """Serve until told to leave. Raises BadInput where the core refuses this gateway."""
    loop, loads = asyncio.get_running_loop(), Loads(settings.loads)
    gateway = Gateway(settings.gateway)
    core = await RemoteCore.connect(settings.core, settings.name)
    gateway.prepare(core.welcome.kv_blocks)
    ring = KeyRing(settings.keys)
    door = DoorPolicy(
        ring, core.default_slo, core.allow, core.abandon, core, settings.page, core.welcome.closing
    )
    door.classes = {one.name: one.slo for one in core.welcome.classes}

    def leave() -> None:
        door.is_leaving = loads.has_left = True
        loads[settings.index] = NOT_ACCEPTING
        if door.server is not None:
            stop_accepting(door.server)

    def give_up() -> None:
        loop.call_later(1.0, end)  # clients read their streams' errors meanwhile

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # the way out is vLLM's

    core.on_closing.append(lambda why: setattr(door, "closing", why))
    core.on_leaving.append(leave)
    core.on_retire.append(lambda finish_s: end())
    core.on_gone.append(give_up)
    core.traffic = lambda: traffic(door.server)
    if (file := settings.gateway.keys_file) is not None:
        with suppress(BadInput):  # what was in force stays; the core has said so
            ring.reload(file)  # it may have changed since the fleet began
    following = asyncio.ensure_future(gateway.follow(ring, lambda kind, line: None))  # the core tells of it
    writing = asyncio.ensure_future(unwritten.keep_written())
    # A connection that is still open then is cut.
    with socket.socket(fileno=settings.listening) as listening, suppress(TimeoutError):
        await gateway.serve(core, door, listening, (loads, settings.index))
    following.cancel()
    writing.cancel()
    unwritten.write()


def main() -> None:
    """Read the settings from stdin and run; whoever started it may have been ended before it wrote them."""
    import uvloop

    os.setpgrp()  # Ctrl-C is for the fleet, which then ends this one
    logging.basicConfig(stream=sys.stderr, level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("torch").setLevel("ERROR")
    if not (told := sys.stdin.read()):
        return
    settings = PROCESS_SETTINGS.validate_json(told)
    unwritten = Unwritten(values.ValueClass)
    values.ValueClass = unwritten.value()
    try:
        uvloop.run(run(settings, unwritten))
    except BadInput as refusal:
        sys.exit(f"error: {refusal}")


if __name__ == "__main__":
    main()
