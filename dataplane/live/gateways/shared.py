"""State that gateways in processes share: settings, the table of their loads, and a file of counts."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import TypeAdapter

from dataplane.http.keys import ApiKey
from dataplane.live.gateway.settings import GatewaySettings

MOST_GATEWAYS = 128  # at once, those that leave among them
WRITE_EVERY_S = 1.0
NOT_ACCEPTING = (1 << 31) - 1  # vLLM's own mark, in place of a number of connections


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """The settings of a gateway's process: first those that all share, then those that its keeper adds.

    `listening` and `loads` are descriptors, of the socket and of the table of loads. `index` is this
    gateway's place in that table. `core`: where the core listens; `metrics`: the folder of vLLM's metrics.
    """

    gateway: GatewaySettings
    keys: tuple[ApiKey, ...]
    page: str
    listening: int
    core: Path = Path()
    metrics: Path = Path()
    loads: int = -1
    name: str = ""
    index: int = 0


PROCESS_SETTINGS = TypeAdapter(ProcessSettings)


class Loads(MutableSequence[int]):
    """The connections of each gateway on a shared socket, in shared memory; a place without a gateway does
    not accept."""

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
