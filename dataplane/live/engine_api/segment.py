"""Segments as requests to an engine: a first stay, a continuation, a loader, or a control message.

A continuation's prompt is the client's prompt followed by the tokens already sent, so the engine's result
must not depend on where one ends and the other begins. `OBSTACLES` lists the request options for which it
does; `segment_request` adjusts those that can be adjusted:

- max_tokens and min_tokens count what is left.
- Presence and frequency penalties count the earlier tokens through `penalties.CarriedPenalties`.
- A grammar is advanced over the earlier tokens by the engine's connector, before it masks the next one.
- Prompt logprobs were delivered with the first token and are not asked for again.

Stop strings, text and logprob records live above the fleet and do not notice a new segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from dataplane.live.engine_api.kv_messages import VLLM_KEY, Control, KvLoad, Transfer, params_from
from dataplane.live.engine_api.link import PRIOR_TOKENS, WorkerInfo
from dataplane.live.engine_api.messages import EngineRequest, Sampling


def _has_long_bad_words(params: Sampling) -> bool:
    return any(len(tokens) > 1 for tokens in params._bad_words_token_ids or ())


def _is_penalised(params: Sampling) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty)


# What depends on the outputs as outputs, and would start again in a continuation: (present?, what).
OBSTACLES: tuple[tuple[Callable[[Sampling], bool], str], ...] = (
    (lambda p: p.n > 1, "several outputs of one engine request (n > 1)"),
    (_has_long_bad_words, "bad words of several tokens: one could straddle the move"),
    (lambda p: p.repetition_detection is not None, "repetition detection: it would forget the text so far"),
    (lambda p: p.thinking_token_budget is not None, "a thinking budget: it would start again"),
    (lambda p: bool(p.watermarking), "watermarking: its state would start again"),
    (lambda p: p.trace_decode_token_ids is not None, "traced decode tokens"),
    (lambda p: p.routed_experts_prompt_start != 0, "routed experts: their record would be cut"),
)


def obstacle_to_replay(
    request: EngineRequest, output_token_ids: Sequence[int], carries_penalties: bool
) -> str | None:
    """What of a request cannot go on correctly in a new segment, or None.

    With no token sent there is none: the request starts over. Seeded sampling is no obstacle here, since
    the alternative to a replay is an error: the draws are right in distribution, not those of the seed.
    `carries_penalties`: whether engines go on counting the tokens so far.
    """
    if not output_token_ids:
        return None
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "a prompt given as embeddings"
    if request.sampling_params is None:
        return "a pooling request"
    if request.resumable:
        return "streaming input"
    for present, what in OBSTACLES:
        if present(request.sampling_params):
            return what
    if not carries_penalties and _is_penalised(request.sampling_params):
        return "penalties: an engine that takes drafts would not count the tokens so far"
    if request.sampling_params.structured_outputs is not None and not request.reasoning_ended:
        return "structured output after reasoning: where its grammar began is not known"
    return None


def obstacle_to_move(
    request: EngineRequest, output_token_ids: Sequence[int], source: WorkerInfo
) -> str | None:
    """What of a request on `source` could not continue exactly after a move, or None."""
    obstacle = obstacle_to_replay(request, output_token_ids, source.carries_penalties)
    if obstacle is not None or not output_token_ids:
        return obstacle
    if source.why_fixed:
        return source.why_fixed
    params: Any = request.sampling_params
    if params.seed is not None and params.temperature > 0 and not source.has_stateless_seeds:
        return "seeded sampling: the generator's state stays in the worker"
    return None


def segment_request(
    request: EngineRequest, output_token_ids: Sequence[int], segment: str, transfer: Transfer
) -> EngineRequest:
    """The request as the next segment's engine gets it, to go on after `output_token_ids`."""
    sent = len(output_token_ids)
    params: Any = request.sampling_params
    params = params.clone()
    extra = dict(params.extra_args or {}) | {VLLM_KEY: params_from(transfer)}
    if sent:
        params.max_tokens -= sent
        params.min_tokens = max(0, params.min_tokens - sent)
        params.prompt_logprobs = None
        params.prompt_logprob_token_ids = None
        params.skip_reading_prefix_cache = False
        if _is_penalised(params) or params.structured_outputs:
            extra[PRIOR_TOKENS] = list(output_token_ids)
    params.extra_args = extra
    continued = copy(request)
    continued.request_id = continued.external_req_id = segment
    continued.sampling_params = params
    if sent:
        continued.prompt_token_ids = [*request.prompt_token_ids, *output_token_ids]
    return continued


def loader_request(
    request: EngineRequest,
    output_token_ids: Sequence[int],
    segment: str,
    load: KvLoad,
    drop: tuple[str, ...],
) -> EngineRequest:
    """A request that brings `load.tokens` tokens of KV to an engine and holds them."""
    tokens = [*request.prompt_token_ids, *output_token_ids]
    loader = _holder(request, segment, tokens[: load.tokens + 1], Transfer(load, hold=True, drop=drop))
    loader.priority = request.priority - 1  # ahead of its like: the source decodes on meanwhile
    return loader


def keeper_request(request: EngineRequest, segment: str, tokens: int) -> EngineRequest:
    """A request that keeps the first `tokens` of a text in an engine's cache readable until it is released.

    What is not cached there any more is computed.
    """
    return _holder(request, segment, request.prompt_token_ids[: tokens + 1], Transfer(hold=True))


def _holder(request: EngineRequest, segment: str, prompt: Sequence[int], transfer: Transfer) -> EngineRequest:
    """A request for a prompt's KV alone, which is one token longer: an engine computes at least one.

    That token's result is thrown away. It shares whatever enters the block hashes (cache salt, LoRA, images).
    """
    holder = copy(request)
    holder.request_id = holder.external_req_id = segment
    holder.prompt_token_ids = prompt
    extra = {VLLM_KEY: params_from(transfer)}
    holder.sampling_params = Sampling(temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra)
    return holder


def control_request(request: EngineRequest, segment: str, control: Control) -> EngineRequest:
    """A request that only tells the connector something; vLLM aborts it on arrival."""
    params = Sampling(max_tokens=1, extra_args={VLLM_KEY: params_from(control)})
    return plain_request(segment, [0], params, request.arrival_time, abort_immediately=True)


def plain_request(
    segment: str, prompt: list[int], params: Sampling, arrival_s: float, **more: Any
) -> EngineRequest:
    """A request of tokens alone, for an engine; `arrival_s` is Unix time."""
    return EngineRequest(
        request_id=segment,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_s,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **more,
    )
