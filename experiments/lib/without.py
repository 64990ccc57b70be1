"""What a rule of moving gives, by leaving it out: the rules are no settings, so they are patched here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from controlplane import control


@contextmanager
def without_room(leave_out: bool = True) -> Iterator[None]:
    """Nothing moves for what waits at the gateway."""
    with _nothing("make_room", leave_out):
        yield


@contextmanager
def without_consolidation(leave_out: bool = True) -> Iterator[None]:
    """Draining workers keep what they have until it ends."""
    with _nothing("empty", leave_out):
        yield


@contextmanager
def _nothing(rule: str, leave_out: bool) -> Iterator[None]:
    kept = getattr(control, rule)
    if leave_out:
        setattr(control, rule, _no_moves)
    try:
        yield
    finally:
        setattr(control, rule, kept)


def _no_moves(*_: Any) -> list[Any]:
    return []
