"""A request in the gateway, from the HTTP ticket through its arrival to what the ledger tracks.

vLLM's server stands between the ASGI middleware and FleetCore, and passes neither Tokenfleet's headers down
nor its refusals up. A `Ticket` in a context variable does: the handler of a request runs in the context that
its middleware set.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from controlplane.types import Slo
from dataplane.live.engine_api.link import PRIOR_TOKENS
from dataplane.live.ledger.request import Ticket, Tracked, expected_tokens

if TYPE_CHECKING:
    from dataplane.live.engine_api.messages import EngineRequest

CURRENT_TICKET: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)


def tracked_from(
    request: EngineRequest, default_slo: Slo, predict: Callable[[int], int], now_s: float
) -> Tracked:
    """The request with its HTTP request's ticket, its priority for the engine, and its expected output."""
    ticket = CURRENT_TICKET.get() or Ticket("", "anyone", default_slo, 0)
    request.priority = -ticket.priority  # vLLM: lower goes first
    _strip_reserved(request)
    return Tracked(request, ticket, ticket.take_arrival_s(now_s), expected_tokens(request, predict))


def _strip_reserved(request: EngineRequest) -> None:
    """Drop what only the fleet may say to an engine; clients reach `extra_args` through `vllm_xargs`."""
    params = request.sampling_params
    if params is not None and params.extra_args:
        allowed = {
            k: v for k, v in params.extra_args.items() if k not in (PRIOR_TOKENS, "kv_transfer_params")
        }
        params.extra_args = allowed or None
