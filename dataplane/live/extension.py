"""What else a live fleet's control API offers, handed in by who starts the fleet (plan jobs, the console)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from prometheus_client.registry import Collector


def _nothing() -> AbstractAsyncContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Extension:
    """Routes, and what they need: `running` is entered while the API answers, `collectors` join /metrics.

    `open_paths` answer without a key; `body_bytes` lets a path take a larger body than others.
    """

    routers: Sequence[APIRouter]
    running: Callable[[], AbstractAsyncContextManager[Any]] = _nothing
    collectors: Sequence[Collector] = ()
    open_paths: frozenset[str] = frozenset()
    body_bytes: Mapping[str, int] = field(default_factory=dict)
