"""The engine link: a gateway's interface to one engine, real or emulated, to send, abort and receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from controlplane.types import WorkerId
from dataplane.live.engine_api.cache_events import CacheChange

if TYPE_CHECKING:
    from dataplane.live.engine_api.messages import Adapter, EngineRequest, StepOutputs

# In Sampling.extra_args: output tokens that an earlier segment of the request made.
PRIOR_TOKENS = "tokenfleet_prior_tokens"
# There too, from a client: the context at which an emulated engine ends an answer. Placement ignores it.
ENDS_AT = "tokenfleet_emulated_end"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker is, told once when it is ready. `kv_addresses` holds one address per TP rank.

    `weights` is a digest: equal for engines that continue each other's outputs. `kv_dtype` is vLLM's name.
    `why_fixed`: why no request of it can be moved, or empty. `has_stateless_seeds`: it derives each draw from
    (seed, position), as vLLM's second model runner does. `carries_penalties`: it goes on counting the tokens
    that earlier segments of a request made. `device`: the name of its GPUs or of its processor.
    `host_blocks`: blocks of KV that its host memory keeps below its KV; 0 for none.
    `steps_ahead`: steps that it has planned when a request comes, as in a profile's EngineLimits.
    `link_key`: its door's public key. `kv_secret`: what readers of its KV must know; told over links alone.
    """

    worker: WorkerId
    engine: Literal["vllm", "emulated"]
    model: str
    endpoint: str
    kv_addresses: tuple[str, ...]
    block_tokens: int
    kv_blocks: int
    kv_bytes_per_token: int
    max_model_len: int
    max_seqs: int
    max_batched_tokens: int
    tp_degree: int
    vllm_version: str
    dtype: str
    pid: int
    weights: str = ""
    kv_dtype: str = "auto"
    why_fixed: str = ""
    caches_prefixes: bool = True
    has_stateless_seeds: bool = False
    carries_penalties: bool = True
    device: str = ""
    host_blocks: int = 0
    steps_ahead: float = 0.0
    link_key: str = ""
    kv_secret: str = field(default="", repr=False)

    @property
    def block_bytes(self) -> int:
        """What a block of KV takes, over all ranks."""
        return self.block_tokens * self.kv_bytes_per_token


class Step(NamedTuple):
    """A step as it was executed; all but `age_s` are columns of a measurements file.

    `kv_blocks`: in use once it was planned, with those of its own tokens; 0 where that is not known. `age_s`:
    from its end to the message that tells of it.
    """

    prefill_tokens: int
    sequences: int
    context_tokens: int
    step_s: float
    prefill_sum_sq: int
    prefill_sequences: int
    kv_blocks: int = 0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Telemetry:
    """A worker's load after one of its steps; counters grow from the worker's start.

    `context_tokens` is what the decoding sequences held at the step's start, `prefill_tokens` what the step
    computed of prompts, `prefill_sum_sq` its Σ (end² - start²). `executed` are the last steps, the newest
    last. They are all since the telemetry before the last one at least (up to a few hundred). Messages come
    at their own times, and long steps are likelier to be the last before one. Readers see by `steps` which of
    them are new to them. `kv_fetched`: bytes that its ranks have fetched, by the way that they took.
    `host_loaded_bytes`, `host_loading_s`: those loaded from host memory, and how long its ranks took in all.
    """

    worker: WorkerId
    steps: int
    running: int
    waiting: int
    sequences: int
    context_tokens: int
    prefill_tokens: int
    step_s: float
    kv_used_blocks: int
    kv_total_blocks: int
    preemptions: int
    prefill_sum_sq: int = 0
    executed: tuple[Step, ...] = ()
    kv_fetched: dict[str, int] = field(default_factory=dict)
    host_loaded_bytes: int = 0
    host_loading_s: float = 0.0

    def since(self, steps: int) -> tuple[Step, ...]:
        """The executed steps after the worker's first `steps`, as far as `executed` holds them."""
        new = min(max(self.steps - steps, 0), len(self.executed))
        return self.executed[len(self.executed) - new :]


@dataclass(frozen=True, slots=True)
class Outputs:
    """One step's outputs for this gateway, in vLLM's own message; `batch.engine_index` is not set."""

    batch: StepOutputs


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters that a worker holds, after an order to load `asked`; `error` if it could not."""

    held: tuple[int, ...]
    asked: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class SegmentRefused:
    """A worker would not take a segment (its queue is full, or the request cannot be read)."""

    segment: str
    reason: str


@dataclass(frozen=True, slots=True)
class Silence:
    """Nothing has come from a worker for a while; or, `is_over`, something has again."""

    is_over: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker's engine is gone, or has dropped this gateway. The last event of a link."""

    reason: str


Event = Outputs | Telemetry | CacheChange | SegmentRefused | Adapters | Silence | Lost


class EngineLink(Protocol):
    """One gateway's connection to one engine. Events arrive in order; after `Lost` none follows."""

    @property
    def info(self) -> WorkerInfo: ...

    async def add(self, request: EngineRequest) -> None:
        """Send a segment; waits while the connection's bounded queue is full."""

    async def abort(self, segments: Sequence[str]) -> None:
        """End segments; unknown ids are ignored. No output follows for them."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """Have the engine load an adapter; `Adapters` follows. A request brings its own if it is missing."""

    async def ask_cached(self) -> None:
        """Have the engine say all that it has cached, where it says such things; a `CacheChange` follows."""

    async def receive(self) -> Event:
        """Return the next event."""

    async def close(self) -> None:
        """End the connection; segments of this gateway are aborted by the worker."""
