"""A profile: the measured or composed step times, KV capacity and limits of a worker with one model.

A fit keeps its absolute relative errors e = |predicted / measured - 1| at their mean, 95th percentile and
maximum. The error of what no sample shows (composed profiles, `Residuals.unseen_relative`) joins them as
independent errors do. `relative_error` reads them at a confidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.offload import HostKv, no_offload
from controlplane.perfmodel.ranks import Ranks
from controlplane.perfmodel.speculation import Speculation, verified_base_s, verified_step
from controlplane.perfmodel.step import Batch, Hinge, PrefillModel, StepModel
from controlplane.types import EngineMode

# Of a composed profile's host time, what a step of decode alone hides in an engine that plans ahead.
HIDDEN_HOST_S = 0.0007
# An engine that plans no step ahead takes up to 0.5 ms longer for a step of a few tokens than for one token.
# A mixture's experts have this form already.
HOST = Hinge("experts", 5.0, 1e-4)
NORMAL_MEAN_ABS = 0.7978845608  # E|z| of a standard normal
MEAN_RANK = 0.575  # share of normal errors below their mean size
UNSEEN = ("unseen_relative", "unseen_prefill_relative")
# Fields that profiles of one worker at several TP degrees have in common.
OF_EVERY_DEGREE = ("model", "gpu", "ranks", "speculation", "host_kv", "workers_per_gpu")


@dataclass(frozen=True, slots=True)
class Frontend:
    """Seconds of a request's first token outside steps: HTTP, tokenisation, the way to the engine.

    It delays all of a request's tokens alike and keeps no engine busy. `doubt_s`: standard deviation of
    `per_request_s`, which no engine's measurement shows. `late_s`: mean of what chance adds to it, for each
    request another exponential time; drawn profiles have it (`uncertainty.py`).
    """

    per_request_s: float = 0.0
    per_prompt_token_s: float = 0.0
    doubt_s: float = 0.0
    late_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("per_request_s", "per_prompt_token_s", "doubt_s", "late_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadInput(f"frontend: {name}: must be a number of at least 0, got {getattr(self, name)}")

    def seconds(self, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of requests with such prompts, cached or not."""
        return self.per_request_s + self.per_prompt_token_s * np.asarray(prompt_tokens, float)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Absolute relative errors |predicted / measured - 1| of the fit.

    `held_out_mean` and `held_out_max` are of samples the fit did not see, where there were enough.
    `unseen_relative` is a standard deviation for what no sample shows (a composed profile's host time
    and mixed steps); it is stated, not measured, and widens every interval. `unseen_prefill_relative` is of
    prefill alone, on top: what the prompts of a calibration leave open.
    """

    mean_relative: float
    p95_relative: float
    max_relative: float
    samples: int
    held_out_mean: float | None = None
    held_out_max: float | None = None
    unseen_relative: float = 0.0
    unseen_prefill_relative: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mean_relative", "p95_relative", "max_relative", *UNSEEN):
            if not 0 <= getattr(self, name) < float("inf"):
                raise BadInput(
                    f"residuals: {name}: must be a number of at least 0, got {getattr(self, name)}"
                )
        if self.samples < 0:
            raise BadInput(f"residuals: samples: must be at least 0, got {self.samples}")

    @property
    def spread(self) -> float:
        """The standard deviation of an error: of held-out samples where known, with what no sample shows."""
        fit = max(self.mean_relative, self.held_out_mean or 0.0) / NORMAL_MEAN_ABS
        return float(np.hypot(fit, self.unseen_relative))


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
    frontend: Frontend = Frontend()
    speculation: Speculation | None = None  # what the step times count already (`speculation.py`)
    host_kv: HostKv | None = None  # below its KV memory, where prefixes are cached
    ranks: Ranks | None = None  # `tp_degree` GPUs and the step times are those of one of them (`ranks.py`)
    workers_per_gpu: int = 1  # that step times and KV allow for on its GPU, itself among them (`shared`)

    def __post_init__(self) -> None:
        if self.tp_degree < 1:
            raise BadInput(f"profile: tp_degree: must be at least 1, got {self.tp_degree}")
        if self.workers_per_gpu < 1:
            raise BadInput(f"profile: workers_per_gpu: must be at least 1, got {self.workers_per_gpu}")
        if self.workers_per_gpu > 1 and (why := self._whole_gpus_since) is not None:
            raise BadInput(f"profile: workers_per_gpu: {self.workers_per_gpu}: {self.label}: {why}")
        if self.engine.mode == EngineMode.PREFILL_FIRST and self.prefill is None:
            raise BadInput(f"profile: prefill: engine mode {self.engine.mode} needs prefill coefficients")
        if self.engine.mode == EngineMode.PREFILL_FIRST and self.ranks is not None:
            raise BadInput(f"profile: ranks: {self.ranks.name} engines chunk prefill, not {self.engine.mode}")
        if self.host_kv is not None:
            _refuse_offload(self)

    @property
    def _whole_gpus_since(self) -> str | None:
        """Why no other worker may be on its GPUs; None where others may."""
        if self.gpus > 1:
            return f"a worker of {self.gpus} GPUs shares none"
        if self.engine.mode == EngineMode.SPLIT:
            return "prefill and decode workers share no GPU"
        if self.speculation is not None or self.host_kv is not None:
            return "workers with drafts or KV in host memory share no GPU"
        return None

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""
        return self.tp_degree * (self.ranks.count if self.ranks is not None else 1)

    @property
    def _kv_gpus(self) -> int:
        """GPUs that its KV capacity is of: those of one rank where each has KV of its own."""
        of_a_rank = self.ranks is not None and self.ranks.of == "data"
        return self.tp_degree if of_a_rank else self.gpus

    @property
    def type_name(self) -> str:
        """The name of the type of worker that this is a profile of."""
        ranks = f" {self.ranks.name}" if self.ranks is not None else ""
        return f"{self.gpu} TP{self.tp_degree}{ranks}"

    @property
    def host_bytes(self) -> int:
        """Host memory that keeps its KV, bytes; 0 where none does."""
        return 0 if self.host_kv is None else self.host_kv.capacity_bytes

    @property
    def host_tokens(self) -> int:
        """Tokens of KV that its host memory keeps; 0 where none does."""
        return self.host_bytes // max(self.kv.bytes_per_token, 1)

    @property
    def load_bytes_per_s(self) -> float:
        """Bytes a second that a GPU loads from host memory; 0 where nothing is kept there."""
        return 0.0 if self.host_kv is None else self.host_kv.bytes_per_s

    def load_s(self, block_bytes: int, gpus: int) -> float | None:
        """Seconds in which GPUs load a block from host memory; None where none is kept there."""
        return None if self.host_kv is None else block_bytes / (self.host_kv.bytes_per_s * gpus)

    def with_host_memory_of(self, other: Profile | None) -> Profile:
        """With the host memory of another profile; None: without."""
        return replace(self, host_kv=None if other is None else other.host_kv)

    @property
    def label(self) -> str:
        part = f"1/{self.workers_per_gpu} of " if self.workers_per_gpu > 1 else ""
        kind = "predicted" if self.source.kind == "composed" else self.source.kind
        return f"{self.model} on {part}{self.type_name} ({kind})"

    def with_engine(
        self,
        mode: EngineMode | None = None,
        max_batched_tokens: int | None = None,
        max_seqs: int | None = None,
        steps_ahead: float | None = None,
        version: str | None = None,
    ) -> Profile:
        """The same worker with other engine settings, and the KV memory that they leave."""
        engine = replace(
            self.engine,
            mode=mode or self.engine.mode,
            max_batched_tokens=max_batched_tokens or self.engine.max_batched_tokens,
            max_seqs=max_seqs or self.engine.max_seqs,
            steps_ahead=self.engine.steps_ahead if steps_ahead is None else steps_ahead,
            version=self.engine.version if version is None else version,
        )
        step = self.step
        if self.source.kind == "composed" and self.engine.steps_ahead and not engine.steps_ahead:
            step = hiding(step, -min(HIDDEN_HOST_S, self.source.host_s, step.per_prefill_step_s))
            if not any(hinge.of == HOST.of for hinge in step.hinges):
                base_s = step.base_s - HOST.per_unit_s * HOST.regressor(Batch(0.0, 1.0, 0.0))
                step = replace(step, base_s=base_s, hinges=(*step.hinges, HOST))
        kv = self.kv.with_limits(self.engine, engine, self._kv_gpus)
        return replace(self, step=step, engine=engine, kv=kv)

    def with_kv(
        self, gpu_memory_utilization: float | None, kv_tokens: int | None, block_tokens: int | None = None
    ) -> Profile:
        """The same worker whose engine takes another share of its GPUs' memory, or says what its KV holds.

        `block_tokens`: of the engine's KV blocks, where it says that, too. Raises BadInput where a share
        alone does not tell the capacity.
        """
        kv = self.kv
        if kv_tokens is not None:
            # The engine's own figure: that it is from the share stated so far is no longer known, and the
            # limits it ran with are counted in it.
            share = gpu_memory_utilization or 0.0
            kv = replace(kv, capacity_tokens=kv_tokens, gpu_memory_utilization=share, vocabulary=0)
            kv = kv if block_tokens is None else replace(kv, block_tokens=block_tokens)
        elif gpu_memory_utilization is not None:
            try:
                kv = kv.with_utilization(gpu_memory_utilization, self._kv_gpus)
            except BadInput as error:
                raise BadInput(f"--gpu-memory-utilization: {self.label}: {error}") from None
        return replace(self, kv=kv)

    def shared(self, workers: int) -> Profile:
        """The same worker where `workers` are on its GPU, each with an equal part of one's memory.

        Processes take turns on a GPU. The profile is of the worst case: all of them compute all the time, so
        each step takes `workers` times as long. Raises BadInput where a worker shares no GPU, where its
        weights do not fit into a part, and where its memory is not known.
        """
        if workers == self.workers_per_gpu:
            return self
        if self.workers_per_gpu > 1:
            raise BadInput(f"{self.label}: is of {self.workers_per_gpu} workers on a GPU, not {workers}")
        try:
            kv = self.kv.with_utilization(self.kv.gpu_memory_utilization / workers, 1)
        except BadInput as error:
            raise BadInput(f"{self.label}: {error}") from None
        if kv.capacity_tokens <= kv.block_tokens:
            raise BadInput(f"{self.label}: its weights do not fit into 1/{workers} of a GPU")
        return replace(with_times(self, workers, workers), kv=kv, workers_per_gpu=workers)

    def alone_ttft_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a request that has an idle worker to itself."""
        return float(self.alone_ttfts_s(prompt_tokens))

    def alone_ttfts_s(self, prompt_tokens: ArrayLike, cached_tokens: ArrayLike = 0) -> NDArray[np.float64]:
        """The same of several requests; of each prompt `cached_tokens`, fewer than all, are cached."""
        return self.frontend.seconds(prompt_tokens) + self.prefill_alone_s(prompt_tokens, cached_tokens)

    def prefill_alone_s(self, prompt_tokens: ArrayLike, cached_tokens: ArrayLike = 0) -> NDArray[np.float64]:
        """Seconds of the steps that make the first token."""
        prompt, cached = np.asarray(prompt_tokens, float), np.asarray(cached_tokens, float)
        attended = prompt**2 - cached**2
        if self.engine.mode == EngineMode.PREFILL_FIRST:
            assert self.prefill is not None
            return self.prefill.prefill_s(prompt - cached, attended)
        budget = float(self.engine.max_batched_tokens)
        # Full chunks take equal times except for their attention, which adds up over all chunks.
        before = np.ceil((prompt - cached) / budget) - 1.0
        last = prompt - cached - before * budget
        full_s, last_s = self.step.step_s(budget, 0, 0), self.step.step_s(last, 0, 0, attended)
        return np.asarray(before * full_s + last_s)

    def alone_tpot_s(self, context_tokens: int) -> float:
        """Seconds of a decode step of one sequence."""
        return float(self.step.step_s(0, 1, context_tokens))


def _refuse_offload(profile: Profile) -> None:
    """Raise BadInput where a tier in host memory is not simulated."""
    if profile.engine.mode != EngineMode.CHUNKED or profile.ranks is not None:
        what = (
            f"{profile.engine.mode} engines" if profile.ranks is None else f"workers of {profile.ranks.name}"
        )
        raise no_offload(f"{profile.label}: only chunked engines are simulated with it, no {what}")
    if not profile.kv.bytes_per_token or profile.kv.request_tokens:
        what = (
            "it keeps windows or states"
            if profile.kv.request_tokens
            else "its profile has no bytes_per_token"
        )
        raise no_offload(f"{profile.label}: what a block takes in host memory is not known: {what}")


def relative_error(residuals: Residuals, confidence: float) -> float:
    """The relative error that the fit's own samples stay within with this probability.

    Between the kept quantiles it is interpolated; past 1 - 1/n the samples say nothing, and the largest
    error is stretched as the tail of a normal would be. Raises BadInput unless 0 < confidence < 1.
    """
    if not 0 < confidence < 1:
        raise BadInput(f"confidence: must be between 0 and 1, got {confidence:g}")
    sampled = max(1.0 - 1.0 / (residuals.samples + 1), 0.96)
    quantiles = np.maximum.accumulate(
        [0.0, residuals.mean_relative, residuals.p95_relative, residuals.max_relative]
    )
    error = float(np.interp(confidence, [0.0, MEAN_RANK, 0.95, sampled], quantiles))
    if confidence > sampled:
        error *= _two_sided(confidence) / _two_sided(sampled)
    # What held-out samples say about the fit's optimism scales the whole curve.
    if residuals.held_out_mean and residuals.mean_relative > 0:
        error *= max(1.0, residuals.held_out_mean / residuals.mean_relative)
    return error


def _two_sided(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def hiding(step: StepModel, host_s: float) -> StepModel:
    """Step times whose steps of decode alone hide this part of the host's time; a negative part is shown."""
    shown_s = step.per_prefill_step_s + host_s
    return replace(step, base_s=step.base_s - host_s, per_prefill_step_s=shown_s)


def with_times(profile: Profile, decode: float, prefill: float) -> Profile:
    """The profile with the terms of decode and of prefill multiplied by these factors."""
    alone = profile.prefill.scaled(prefill) if profile.prefill is not None else None
    ranks = profile.ranks
    if ranks is not None:
        ranks = replace(ranks, shared_token_s=ranks.shared_token_s * prefill)
    return replace(profile, step=profile.step.scaled(decode, prefill), prefill=alone, ranks=ranks)


def rank_of(profile: Profile) -> Profile:
    """The profile of one rank: of a pipeline, a batch's share of the KV and of the sequences."""
    ranks = profile.ranks
    if ranks is None or ranks.of == "data":
        return profile
    blocks = profile.kv.capacity_tokens // profile.kv.block_tokens // ranks.count
    if blocks < 1 or profile.engine.max_seqs < ranks.count:
        raise BadInput(f"{profile.label}: KV and max_seqs must have room for {ranks.count} batches")
    kv = replace(profile.kv, capacity_tokens=blocks * profile.kv.block_tokens)
    return replace(profile.with_engine(max_seqs=profile.engine.max_seqs // ranks.count), kv=kv)


def speculating(profile: Profile, speculation: Speculation) -> Profile:
    """The profile of such an engine: `profile`'s, which decodes plainly, with a step for each token."""
    if profile.speculation is not None:
        raise BadInput(f"{profile.label}: its step times count speculation already")
    most = profile.engine.max_seqs
    fitted = profile.fitted.sequences if profile.fitted is not None else float(most)
    step = verified_step(profile.step, speculation, fitted, most)
    waits_s = profile.engine.first_steps * verified_base_s(profile.step, speculation)
    whole_s = waits_s * (1.0 - 1.0 / speculation.tokens_per_step)
    frontend = replace(profile.frontend, per_request_s=profile.frontend.per_request_s + whole_s)
    return replace(profile, step=step, frontend=frontend, speculation=speculation)
