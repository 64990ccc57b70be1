"""Progress bars on stderr, shown to a person at a terminal and to nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dataplane.startup import has_other_kernels, has_simulator
from tokenfleet.planning.threads import Watch
from tokenfleet.report.tables import gpu_text, usd_text

if TYPE_CHECKING:
    from tokenfleet.planning.fleet import Fleet

COMPILES = "Compiling the simulator: once, for a minute or two. Later runs load it from disk."


def console(*, stderr: bool = False) -> Console:
    """A console that honours NO_COLOR. Where it is no terminal, tables are $COLUMNS or 110 wide."""
    shown = Console(stderr=stderr, no_color="NO_COLOR" in os.environ, highlight=False, markup=False)
    if not shown.is_terminal and "COLUMNS" not in os.environ:
        shown.width = 110
    return shown


def tell_compiling() -> None:
    """Say on stderr that the simulator is compiled first, where it is not on disk."""
    if not has_simulator():
        why = " The wheel's kernels are for another Numba or Python." if has_other_kernels() else ""
        print(COMPILES + why, file=sys.stderr, flush=True)


class Bar(Watch):
    """A progress bar with the stage and the number of simulations so far."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._lock = Lock()
        self._count = 0

    def stage(self, text: str, share: float) -> None:
        self._progress.update(self._task, description=text, completed=share)

    def found(self, fleet: Fleet) -> None:
        if not self._progress.disable:
            kinds = [(group.workers, group.worker_type.profile) for group in fleet.groups]
            parts = " + ".join(f"{n}x {gpu_text(profile.gpu)} TP{profile.tp_degree}" for n, profile in kinds)
            cost = usd_text(fleet.usd_per_hour)
            self._progress.console.print(f"{parts}, {cost}, meets the target. Looking for its reasons …")

    def simulated(self) -> None:
        with self._lock:
            self._count += 1
            self._progress.update(self._task, simulations=self._count)


def _progress(count: ProgressColumn, is_shown: bool | None) -> Progress:
    """A bar on stderr while it is watched by a person; a silent one otherwise."""
    to = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), count, TimeElapsedColumn()
    shown = to.is_terminal if is_shown is None else is_shown
    return Progress(*columns, console=to, transient=True, disable=not shown)


@contextmanager
def progress_bar(is_shown: bool | None = None) -> Iterator[Watch]:
    """A bar of a plan's progress, with the simulations that it took; by default where a person watches."""
    if is_shown is not False:
        tell_compiling()
    with _progress(TextColumn("{task.fields[simulations]} simulations"), is_shown) as progress:
        yield Bar(progress, progress.add_task("planning", total=1.0, simulations=0))


@contextmanager
def counted_bar(text: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
    """A bar of `total` equal things, some of them `done`.

    Call what it yields after one more, or with a count; it also takes the next one's `description`.
    """
    with _progress(MofNCompleteColumn(), None) as progress:
        task = progress.add_task(text, total=total, completed=done)

        def advance(count: int = 1, **told: str) -> None:
            progress.update(task, advance=count, **told)  # type: ignore[arg-type]

        yield advance
