"""Simulations in parallel on threads, and the watch that follows a plan's progress.

The compiled simulator releases the GIL, so threads are enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tokenfleet.planning.fleet import Fleet

T = TypeVar("T")
R = TypeVar("R")


class Threads:
    """Threads for tasks that run in parallel, which may themselves run tasks in parallel.

    A thread that needs an answer runs the task itself where no other thread has begun it. So
    none waits for itself.
    """

    def __init__(self, executor: ThreadPoolExecutor, count: int) -> None:
        self._executor, self.count = executor, count
        self._inside = threading.local()

    def begin(self, does: Callable[[], R]) -> Callable[[], R]:
        """Queue `does`; what is returned waits for its result, and returns or raises it."""

        def inside() -> R:
            self._inside.yes = True
            return does()

        future = self._executor.submit(inside)

        def result() -> R:
            if self._is_inside and future.cancel():
                return does()
            return future.result()

        return result

    def map(self, does: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`does(item)` for each item, in order; an exception is raised."""
        results = [self.begin(partial(does, item)) for item in items]
        if not self._is_inside:
            return [result() for result in results]
        # Other threads take the first that are left; this one takes the last, until the two meet.
        return [result() for result in reversed(results)][::-1]

    @property
    def _is_inside(self) -> bool:
        return getattr(self._inside, "yes", False)


@contextmanager
def open_threads(count: int) -> Iterator[Threads]:
    """`count` threads; on any exception what has not begun is dropped."""
    count = max(count, 1)
    executor = ThreadPoolExecutor(count, thread_name_prefix="simulate")
    try:
        yield Threads(executor, count)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


class Watch:
    """Subclass to show progress; `simulated` is called from several threads."""

    def stage(self, text: str, share: float) -> None:
        """A stage begins; `share` in [0, 1] of the work is behind it."""

    def found(self, fleet: Fleet) -> None:
        """The answer is known, if moves save no worker; its reasons are not yet."""

    def simulated(self) -> None:
        """One more simulation has run."""
