"""Simulations side by side on threads, and the watch that is told of a plan's progress.

The compiled simulator releases the GIL, so threads are enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """A pool whose `map` keeps the order of its items; called from inside itself it just loops."""

    def __init__(self, pool: ThreadPoolExecutor, count: int) -> None:
        self._pool, self.count = pool, count
        self._inside = threading.local()

    def map(self, does: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`does(item)` for each item, in order; the first exception is raised."""
        if getattr(self._inside, "yes", False):
            return [does(item) for item in items]

        def inside(item: T) -> R:
            self._inside.yes = True
            return does(item)

        futures = [self._pool.submit(inside, item) for item in items]
        return [future.result() for future in futures]


@contextmanager
def threads(count: int) -> Iterator[Threads]:
    """A pool of `count` threads; on any exception what has not begun is dropped."""
    count = max(count, 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="simulate")
    try:
        yield Threads(pool, count)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class Watch:
    """Subclass to show progress; `simulated` is called from several threads."""

    def stage(self, text: str, share: float) -> None:
        """A stage begins; `share` in [0, 1] of the work is behind it."""

    def simulated(self) -> None:
        """One more simulation has run."""


class Part(Watch):
    """One of several equal parts of what another watches."""

    def __init__(self, whole: Watch, number: int, parts: int) -> None:
        self._whole, self._number, self._parts = whole, number, parts

    def stage(self, text: str, share: float) -> None:
        text = f"{self._number + 1} of {self._parts}: {text}"
        self._whole.stage(text, (self._number + share) / self._parts)

    def simulated(self) -> None:
        self._whole.simulated()
