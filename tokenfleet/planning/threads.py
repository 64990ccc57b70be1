"""Simulations side by side. The compiled simulator releases the GIL, so threads are enough."""

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

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
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
    pool = ThreadPoolExecutor(max(count, 1), thread_name_prefix="simulate")
    try:
        yield Threads(pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
