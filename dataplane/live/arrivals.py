"""A request as it arrives from vLLM's front end, made into one the gateway tracks."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.types import Slo
from dataplane.live.penalties import PRIOR_TOKENS
from dataplane.live.ticket import CURRENT_TICKET, Ticket
from dataplane.live.tracked import Tracked
from dataplane.live.vllm_surface import EngineCoreRequest


def tracked_from(
    request: EngineCoreRequest, default_slo: Slo, predict: Callable[[int], int], now_s: float
) -> Tracked:
    """The request with its HTTP request's ticket, its priority for the engine, and its expected output."""
    ticket = CURRENT_TICKET.get() or Ticket("", "anyone", default_slo, 0)
    request.priority = -ticket.priority  # vLLM: lower goes first
    _strip_reserved(request)
    return Tracked(request, ticket, now_s, _expected_tokens(request, predict))


def _expected_tokens(request: EngineCoreRequest, predict: Callable[[int], int]) -> int:
    expected = predict(len(request.prompt_token_ids or ()))
    params = request.sampling_params
    if params is None or params.max_tokens is None:
        return expected
    return int(params.max_tokens) if params.ignore_eos else min(expected, int(params.max_tokens))


def _strip_reserved(request: EngineCoreRequest) -> None:
    """Drop what only the fleet may say to an engine; clients reach `extra_args` through `vllm_xargs`."""
    params = request.sampling_params
    if params is not None and params.extra_args:
        kept = {k: v for k, v in params.extra_args.items() if k not in (PRIOR_TOKENS, "kv_transfer_params")}
        params.extra_args = kept or None
