"""An event loop whose clock jumps: waiting takes no time, so a story of minutes ends in seconds.

What runs in it depends on no machine's speed. A loop without anything to wait for has ended, or hangs:
it raises.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Found = TypeVar("Found")


class _Jumps(selectors.SelectSelector):
    """A selector that lets the loop's clock pass instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left that the loop could wait for")
        self.loop.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now_s`: its clock, from 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = _Jumps()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now_s


def run(story: Coroutine[Any, Any, Found]) -> Found:
    """Run a story in a loop of its own; what it leaves behind is cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(story)
