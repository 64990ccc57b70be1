"""Messages between a gateway and an engine: requests down, the outputs of steps up.

The fields have vLLM's names, order and defaults, and msgpack writes them as vLLM's own messages. So either
side may use either, and nothing is converted token by token: vllm_surface.py turns frames into vLLM's
messages, and ours into vLLM's for its front end. FleetCore and all above it read only the fields named here,
and import no vLLM. tests/live/test_vllm_surface.py holds both to each other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import msgspec


class Finish(IntEnum):
    """Why a segment has ended. An engine's error and abort are no end of the request."""

    STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)


class MomentKind(IntEnum):
    """What an engine did with a segment."""

    QUEUED, SCHEDULED, PREEMPTED = range(1, 4)


class Moment(msgspec.Struct):
    """When an engine did something with a segment; `timestamp` is of its machine's monotonic clock."""

    type: MomentKind
    timestamp: float


class Sampling(msgspec.Struct, omit_defaults=True):
    """How to choose tokens, as far as Tokenfleet reads or sets it. `max_tokens` counts outputs."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    seed: int | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    detokenize: bool = True
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    trace_decode_token_ids: Any = None
    routed_experts_prompt_start: int = 0

    @property
    def eos_token_id(self) -> int | None:
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        return self._all_stop_token_ids

    def clone(self) -> Sampling:
        return copy.deepcopy(self)


class Adapter(msgspec.Struct, array_like=True, omit_defaults=True):
    """A LoRA adapter by its name, its number in the fleet, and where its weights are."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False


class EngineRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A segment as an engine gets it. `arrival_time` is Unix time; a lower `priority` goes first.

    `prompt_token_ids` is a list, or None where the prompt is embeddings. `abort_immediately`: it only carries
    a message to the engine's KV connector (kv_messages.py).
    """

    request_id: str
    prompt_token_ids: Any
    mm_features: list[Any] | None
    sampling_params: Sampling | None
    pooling_params: Any
    arrival_time: float
    lora_request: Adapter | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False


@dataclass(slots=True)
class Prefilled:
    """The tokens of a prompt: computed, and found in the engine's cache or loaded by its connector."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0


class Logprobs(NamedTuple):
    """Log-probabilities of a step's tokens: arrays of shape [tokens, asked + 1], and the tokens' ranks."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None


class SegmentOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a step has made for one segment. `request_id` is the segment's id."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    events: list[Moment] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    prefill_stats: Prefilled | None = None


@dataclass(slots=True)
class EngineLoad:
    """An engine's load after a step; `kv_connector_stats` is step_trace.py's."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    kv_connector_stats: dict[str, Any] | None = None


class StepOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step of an engine has made. `timestamp` is of its machine's monotonic clock."""

    engine_index: int = 0
    outputs: list[SegmentOutput] = []
    scheduler_stats: EngineLoad | None = None
    timestamp: float = 0.0


class Codec(Protocol):
    """Messages as frames and back, for one wire. A fleet's is `vllm_surface.VllmCodec`."""

    @property
    def version(self) -> str:
        """What both ends of a wire must have in common."""

    def encode(self, message: Any) -> Sequence[Any]: ...

    def request(self, frames: Sequence[Any]) -> EngineRequest: ...

    def outputs(self, frames: Sequence[Any]) -> StepOutputs: ...

    def adapter(self, fields: Sequence[Any]) -> Adapter: ...
