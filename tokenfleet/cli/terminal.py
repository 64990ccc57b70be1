"""The terminal: data on stdout, warnings on stderr, colour only where it is wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from tokenfleet.cli.flags import OutputFormat
from tokenfleet.report.progress import console, counted_bar, progress_bar

__all__ = ["answer", "console", "counted_bar", "progress_bar", "show", "warn"]


def show(renderables: Iterable[RenderableType]) -> None:
    """Print on stdout, one after the other. A sentence stays on one line where no person reads along."""
    out = console()
    for renderable in renderables:
        out.print(renderable, soft_wrap=isinstance(renderable, str | Text) and not out.is_terminal)


def answer(
    asked: OutputFormat,
    text: str,
    tables: Callable[[], Iterable[RenderableType]],
    written: Sequence[Path] = (),
) -> None:
    """Print a result on stdout as it was asked for: its JSON, or tables and the files written."""
    if asked == OutputFormat.JSON:
        print(text.rstrip("\n"))
        return
    show(tables())
    if written:
        print(f"\nwritten: {', '.join(map(str, written))}")


def warn(messages: Iterable[str]) -> None:
    """One line each on stderr."""
    for message in messages:
        print(f"warning: {message}", file=sys.stderr)
