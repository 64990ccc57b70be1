"""A plan as a deployment: worker groups, engine limits, targets, and worker counts over time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from controlplane.errors import BadInput
from controlplane.types import Slo
from tokenfleet.field_errors import fault_line

MAX_FILE_BYTES = 50_000_000

# The library's names as the hub's; a name that is not here must be given.
_WEIGHTS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-chat-hf",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
# The library's GPUs as NVIDIA's feature discovery labels their nodes (nvidia.com/gpu.product).
_PRODUCTS = {
    "a100-sxm": "NVIDIA-A100-SXM4-80GB",
    "a100-80gb": "NVIDIA-A100-SXM4-80GB",
    "h100-sxm": "NVIDIA-H100-80GB-HBM3",
    "h100-80gb": "NVIDIA-H100-80GB-HBM3",
    "h200-sxm": "NVIDIA-H200",
    "rtx-pro-6000": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
}


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Equal workers: `workers` of `gpus` GPUs each. `product`: their nodes' label, None where not known."""

    gpu: str
    gpus: int
    workers: int
    role: str
    product: str | None
    max_batched_tokens: int | None
    max_seqs: int | None

    @property
    def engine_flags(self) -> list[str]:
        """vLLM's flags for what the plan assumed of the engine."""
        flags: list[str] = []
        if self.max_batched_tokens is not None:
            flags += ["--max-num-batched-tokens", str(self.max_batched_tokens)]
        if self.max_seqs is not None:
            flags += ["--max-num-seqs", str(self.max_seqs)]
        return flags


@dataclass(frozen=True, slots=True)
class Span:
    """So many workers from second `start_s` to `end_s` of the trace's own time."""

    start_s: float
    end_s: float
    workers: int


@dataclass(frozen=True)
class Deployment:
    """A fleet to be deployed. `weights`: what the engines load. `clock_start_s`: the schedule's zero."""

    groups: tuple[WorkerGroup, ...]
    weights: str
    slo: Slo
    attainment: float
    schedule: tuple[Span, ...]
    clock_start_s: float | None
    cold_start_s: float

    @property
    def workers(self) -> int:
        return sum(group.workers for group in self.groups)

    @property
    def slo_text(self) -> str:
        """The targets as `--slo` takes them."""
        return f"ttft={self.slo.ttft_s:g}s,tpot={self.slo.tpot_s:g}s"


def deployment(plan: dict[str, Any], where: str, weights: str | None = None) -> Deployment:
    """The deployment of a plan's JSON. Raises BadInput naming `where` and the field."""
    form = _read_form(plan, where)
    profile = {(p.gpu, p.tp_degree): p for p in form.inputs.profiles}
    groups = []
    for i, part in enumerate(form.fleet):
        profile_of_group = profile.get((part.gpu, part.tp_degree))
        if profile_of_group is None:
            raise BadInput(f"{where}: fleet.{i}: inputs.profiles has no {part.gpu} TP{part.tp_degree}")
        limits = profile_of_group.engine_limits
        groups.append(
            WorkerGroup(
                part.gpu,
                part.tp_degree,
                part.workers,
                part.role,
                _PRODUCTS.get(part.gpu),
                limits.max_batched_tokens if limits else None,
                limits.max_seqs if limits else None,
            )
        )
    model = form.inputs.profiles[0].model
    loads = weights or _WEIGHTS.get(model)
    if loads is None:
        raise BadInput(f"--weights: missing; {model} is no name the hub knows: give a hub name or a folder")
    paid = form.schedule_detail.paid if form.schedule_detail else None
    scale = form.inputs.rate_scale
    return Deployment(
        tuple(groups),
        loads,
        Slo(form.slo.ttft_s, form.slo.tpot_s),
        form.attainment.target,
        tuple(Span(s.start_s * scale, s.end_s * scale, s.workers) for s in form.schedule),
        form.inputs.clock_start_unix_s,
        paid.cold_start_s if paid else 0.0,
    )


def read_deployment(path: Path, weights: str | None = None) -> Deployment:
    """The same from a saved plan. Raises BadInput naming the file and the field."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadInput(f"{path}: larger than {MAX_FILE_BYTES} bytes, no plan")
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is not JSON: {error}") from None
    return deployment(plan, str(path), weights)


_Count = Annotated[int, Field(ge=1, le=100_000)]
_Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


class _Part(BaseModel):
    gpu: _Name
    tp_degree: _Count
    workers: _Count
    role: Literal["any", "prefill", "decode"] = "any"


class _Limits(BaseModel):
    max_batched_tokens: _Count
    max_seqs: _Count


class _Profile(BaseModel):
    model: str
    gpu: str
    tp_degree: int
    engine_limits: _Limits | None = None


class _Slo(BaseModel):
    ttft_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    tpot_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Attainment(BaseModel):
    target: Annotated[float, Field(gt=0, lt=1)]


class _Stretch(BaseModel):
    start_s: _Seconds
    end_s: _Seconds
    workers: Annotated[int, Field(ge=0)]


class _Paid(BaseModel):
    cold_start_s: _Seconds


class _Detail(BaseModel):
    paid: _Paid | None = None


class _Inputs(BaseModel):
    profiles: Annotated[list[_Profile], Field(min_length=1)]
    clock_start_unix_s: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)] | None = None
    rate_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class _Plan(BaseModel):
    """The fields of `tokenfleet.plan/1` that a deployment needs."""

    form: Literal["tokenfleet.plan/1"] = Field(alias="schema")
    feasible: bool
    fleet: list[_Part]
    slo: _Slo
    attainment: _Attainment
    schedule: list[_Stretch] = []
    schedule_detail: _Detail | None = None
    inputs: _Inputs


def _read_form(plan: Any, where: str) -> _Plan:
    try:
        form = _Plan.model_validate(plan)
    except ValidationError as error:
        raise BadInput(fault_line(where, error)) from None
    if not form.feasible or not form.fleet:
        raise BadInput(f"{where}: feasible: this plan found no fleet, so there is none to deploy")
    return form
