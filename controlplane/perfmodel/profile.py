"""A profile: the measured or composed step times, KV capacity and limits of a worker with one model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from controlplane.errors import BadInput
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.types import EngineMode


@dataclass(frozen=True, slots=True)
class KvModel:
    """KV memory of a worker (Eq 1 is linear: a request holds one slot per token of context)."""

    capacity_tokens: int
    block_tokens: int = 16
    bytes_per_token: int = 0

    def __post_init__(self) -> None:
        if self.capacity_tokens < 1 or self.block_tokens < 1 or self.bytes_per_token < 0:
            raise BadInput(f"kv: capacity_tokens and block_tokens must be at least 1, got {self}")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's software and its batch limits."""

    name: str = "vllm"
    version: str = ""
    mode: EngineMode = EngineMode.CHUNKED
    max_batched_tokens: int = 2048
    max_seqs: int = 256

    def __post_init__(self) -> None:
        if self.max_batched_tokens < 1 or self.max_seqs < 1:
            raise BadInput("engine: max_batched_tokens and max_seqs must be at least 1")
        if self.mode == EngineMode.CHUNKED and self.max_batched_tokens < self.max_seqs:
            raise BadInput(
                f"engine: max_batched_tokens: {self.max_batched_tokens} is below max_seqs {self.max_seqs};"
                " a chunked step must hold a token for each sequence"
            )


@dataclass(frozen=True, slots=True)
class Residuals:
    """Absolute relative errors |predicted / measured - 1| of the fit.

    `held_out_mean` and `held_out_max` are of samples the fit did not see, where there were enough.
    `unseen_relative` is a standard deviation for what no sample shows (a composed profile's host time
    and mixed steps); it is stated, not measured, and widens every interval.
    """

    mean_relative: float
    p95_relative: float
    max_relative: float
    samples: int
    held_out_mean: float | None = None
    held_out_max: float | None = None
    unseen_relative: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mean_relative", "p95_relative", "max_relative", "unseen_relative"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadInput(
                    f"residuals: {name}: must be a number of at least 0, got {getattr(self, name)}"
                )
        if self.samples < 0:
            raise BadInput(f"residuals: samples: must be at least 0, got {self.samples}")


@dataclass(frozen=True, slots=True)
class FittedRange:
    """The largest values the samples reached; beyond them a prediction is an extrapolation."""

    prefill_tokens: float
    sequences: float
    context_tokens: float


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a profile's numbers. `kind` is stated wherever a profile is used."""

    kind: Literal["measured", "composed", "published"]
    what: str
    licence: str
    date: str  # ISO, of the measurement
    host_s: float = 0.0  # the part of the base times that was stated for the host, not measured


@dataclass(frozen=True, slots=True)
class Profile:
    """One worker of (model, gpu, tp_degree): step times, KV, engine limits, and how far to trust them."""

    model: str
    gpu: str
    tp_degree: int
    step: StepModel
    kv: KvModel
    engine: EngineLimits
    residuals: Residuals
    source: Source
    prefill: PrefillModel | None = None
    context_limit_tokens: int = 0  # the model's longest prompt + output; 0 = not stated
    fitted: FittedRange | None = None

    def __post_init__(self) -> None:
        if self.tp_degree < 1:
            raise BadInput(f"profile: tp_degree: must be at least 1, got {self.tp_degree}")
        if self.engine.mode != EngineMode.CHUNKED and self.prefill is None:
            raise BadInput(f"profile: prefill: engine mode {self.engine.mode} needs prefill coefficients")

    @property
    def type_name(self) -> str:
        """The name of the type of worker that this is a profile of."""
        return f"{self.gpu} TP{self.tp_degree}"

    @property
    def label(self) -> str:
        return f"{self.model} on {self.type_name} ({self.source.kind})"

    def with_engine(
        self,
        mode: EngineMode | None = None,
        max_batched_tokens: int | None = None,
        max_seqs: int | None = None,
    ) -> Profile:
        """The same worker with other engine settings."""
        engine = replace(
            self.engine,
            mode=mode or self.engine.mode,
            max_batched_tokens=max_batched_tokens or self.engine.max_batched_tokens,
            max_seqs=max_seqs or self.engine.max_seqs,
        )
        return replace(self, engine=engine)

    def alone_ttft_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a request that has an idle worker to itself."""
        if self.engine.mode != EngineMode.CHUNKED:
            assert self.prefill is not None
            return float(self.prefill.prefill_s(prompt_tokens))
        total, done = 0.0, 0
        while done < prompt_tokens:
            chunk = min(self.engine.max_batched_tokens, prompt_tokens - done)
            total += float(self.step.step_s(chunk, 0, 0, (done + chunk) ** 2 - done**2))
            done += chunk
        return total

    def alone_tpot_s(self, context_tokens: int) -> float:
        """Seconds of a decode step of one sequence."""
        return float(self.step.step_s(0, 1, context_tokens))
