"""What the front door learns of an HTTP request, and what the fleet tells it back.

vLLM's server stands between the front door (ASGI) and FleetCore, and passes neither our headers down nor
our refusals up. A ticket in a context variable does: the handler of a request runs in the context its
middleware set.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from controlplane.types import Slo, WorkerId


@dataclass(frozen=True, slots=True)
class Rejection:
    """The request was turned away before any token; the client may try again."""

    reason: str
    retry_after_s: int


@dataclass(slots=True)
class Ticket:
    """One HTTP request. The first four come from the client, the rest is written by the fleet.

    `worker` is where the request (or its first part) was first placed; `failure` why a stream that had
    begun could not be finished; `left` that the client went away before its answer was complete (`answered`).
    """

    id: str
    key: str
    slo: Slo
    priority: int
    worker: WorkerId | None = None
    rejection: Rejection | None = None
    failure: str | None = None
    left: bool = False
    answered: bool = False


CURRENT_TICKET: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)
