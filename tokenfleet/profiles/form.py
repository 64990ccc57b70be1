"""The form of a profile file: `tokenfleet.profile/1` in YAML, read into and written from a `Profile`.

Reading refuses unknown keys: they are most likely typing errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import (
    EngineLimits,
    FittedRange,
    Frontend,
    HostKv,
    KvModel,
    Profile,
    Residuals,
    Source,
)
from controlplane.perfmodel.ranks import Ranks, RanksOf
from controlplane.perfmodel.speculation import Speculation
from controlplane.perfmodel.step import (
    PREFILL_TERMS,
    STEP_TERMS,
    Hinge,
    HingeOf,
    PrefillModel,
    StepModel,
    Term,
    coefficients,
)
from controlplane.types import EngineMode
from tokenfleet.field_errors import parse_yaml

SCHEMA = "tokenfleet.profile/1"


def _no_bool(value: Any) -> Any:
    """YAML's `yes` is a bool, and Python would take it for the number 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected")
    return value


def _iso(value: Any) -> Any:
    """YAML reads 2026-01-31 as a date; a profile keeps its ISO text."""
    return value.isoformat() if isinstance(value, date) else value


Seconds = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _HingePart(_Part):
    of: HingeOf
    start: Seconds = Field(alias="from")
    per_unit_s: Seconds


def _coefficients(name: str, terms: Iterable[Term], **more: Any) -> type[_Part]:
    """The part of a file that holds a model's coefficients; the optional ones may be left out."""
    named: dict[str, Any] = {t.name: (Seconds, 0.0 if t.words else ...) for t in terms}
    return create_model(name, __base__=_Part, **named, **more)


_StepPart = _coefficients("_StepPart", STEP_TERMS)
_PrefillPart = _coefficients("_PrefillPart", PREFILL_TERMS, hinges=(list[_HingePart], []))


class _KvPart(_Part):
    capacity_tokens: Positive
    block_tokens: Positive = 16
    bytes_per_token: Count = 0
    gpu_memory_bytes: Count = 0
    gpu_memory_utilization: Annotated[Seconds, Field(le=1)] = 0.0
    request_tokens: Count = 0
    window_tokens: Count = 0


class _FrontendPart(_Part):
    per_request_s: Seconds = 0.0
    per_prompt_token_s: Seconds = 0.0


class _SpeculationPart(_Part):
    acceptance: Annotated[list[Seconds], Field(min_length=1)]
    draft_s: Seconds = 0.0


class _HostKvPart(_Part):
    capacity_bytes: Positive
    bytes_per_s: Annotated[Seconds, Field(gt=0)]


class _RanksPart(_Part):
    of: RanksOf
    count: Positive
    shared_token_s: Seconds = 0.0


class _EnginePart(_Part):
    name: str = "vllm"
    version: str = ""
    mode: EngineMode = EngineMode.CHUNKED
    max_batched_tokens: Positive = 2048
    max_seqs: Positive = 256


class _ResidualsPart(_Part):
    mean_relative: Seconds
    p95_relative: Seconds
    max_relative: Seconds
    samples: Count
    held_out_mean: Seconds | None = None
    held_out_max: Seconds | None = None
    unseen_relative: Seconds = 0.0


class _FittedPart(_Part):
    prefill_tokens: Seconds
    sequences: Seconds
    context_tokens: Seconds


class _SourcePart(_Part):
    kind: Literal["measured", "composed", "published"]
    what: Annotated[str, Field(min_length=1, max_length=2000)]
    licence: Name
    date: Annotated[str, BeforeValidator(_iso), Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    host_s: Seconds = 0.0


class _ProfileContent(_Part):
    form: Literal["tokenfleet.profile/1"] = Field(alias="schema")
    model: Name
    gpu: Name
    tp_degree: Positive
    step: _Part
    prefill: _Part | None = None
    hinges: list[_HingePart] = []
    kv: _KvPart
    engine: _EnginePart = _EnginePart()
    residuals: _ResidualsPart
    source: _SourcePart
    context_limit_tokens: Count = 0
    fitted: _FittedPart | None = None
    frontend: _FrontendPart = _FrontendPart()
    speculation: _SpeculationPart | None = None
    host_kv: _HostKvPart | None = None
    ranks: _RanksPart | None = None


_MODELS: dict[str, Any] = {"step": (_StepPart, ...), "prefill": (_PrefillPart | None, None)}
_ProfileFile = create_model("_ProfileFile", __base__=_ProfileContent, **_MODELS)


def parse_profile(text: str, where: str) -> Profile:
    """The profile in YAML `text`; `where` names it in errors."""
    no_profile = f"not a profile: expected `schema: {SCHEMA}` and its fields"
    part = parse_yaml(text, where, _ProfileFile, no_profile)
    try:
        return _noun(part)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error


def _hinges(parts: Iterable[dict[str, Any]]) -> tuple[Hinge, ...]:
    return tuple(Hinge(**part) for part in parts)


def _noun(part: _ProfileContent) -> Profile:
    prefill = None
    if part.prefill is not None:
        plain = part.prefill.model_dump()
        prefill = PrefillModel(**plain | {"hinges": _hinges(plain["hinges"])})
    hinges = _hinges(hinge.model_dump() for hinge in part.hinges)
    return Profile(
        model=part.model,
        gpu=part.gpu,
        tp_degree=part.tp_degree,
        step=StepModel(**part.step.model_dump(), hinges=hinges),
        kv=KvModel(**part.kv.model_dump()),
        engine=EngineLimits(**part.engine.model_dump()),
        residuals=Residuals(**part.residuals.model_dump()),
        source=Source(**part.source.model_dump()),
        prefill=prefill,
        context_limit_tokens=part.context_limit_tokens,
        fitted=FittedRange(**part.fitted.model_dump()) if part.fitted else None,
        frontend=Frontend(**part.frontend.model_dump()),
        speculation=None
        if part.speculation is None
        else Speculation(tuple(part.speculation.acceptance), part.speculation.draft_s),
        host_kv=None if part.host_kv is None else HostKv(**part.host_kv.model_dump()),
        ranks=None if part.ranks is None else Ranks(**part.ranks.model_dump()),
    )


def profile_text(profile: Profile) -> str:
    """The YAML of a profile; `parse_profile` gives the same profile back."""
    return yaml.safe_dump(profile_document(profile), sort_keys=False, width=110, allow_unicode=True)


def profile_document(profile: Profile) -> dict[str, Any]:
    """A profile as plain values, in the form of its file."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "model": profile.model,
        "gpu": profile.gpu,
        "tp_degree": profile.tp_degree,
        "step": _stated(profile.step, STEP_TERMS),
    }
    if profile.prefill is not None:
        prefill: dict[str, Any] = _stated(profile.prefill, PREFILL_TERMS)
        if profile.prefill.hinges:
            prefill["hinges"] = _hinge_rows(profile.prefill.hinges)
        content["prefill"] = prefill
    content["hinges"] = _hinge_rows(profile.step.hinges)
    if profile.frontend != Frontend():
        content["frontend"] = _numbers(profile.frontend, "per_request_s per_prompt_token_s")
    if profile.speculation is not None:
        drafts = profile.speculation
        content["speculation"] = {"acceptance": list(drafts.acceptance), "draft_s": drafts.draft_s}
    if profile.host_kv is not None:
        content["host_kv"] = _numbers(profile.host_kv, "capacity_bytes bytes_per_s")
    if profile.ranks is not None:
        content["ranks"] = _numbers(profile.ranks, "of count shared_token_s")
    content["kv"] = _numbers(profile.kv, "capacity_tokens block_tokens bytes_per_token")
    if profile.kv.gpu_memory_bytes:
        content["kv"] |= _numbers(profile.kv, "gpu_memory_bytes gpu_memory_utilization")
    if profile.kv.request_tokens:
        content["kv"] |= _numbers(profile.kv, "request_tokens window_tokens")
    content["context_limit_tokens"] = profile.context_limit_tokens
    engine = profile.engine
    content["engine"] = {
        "name": engine.name,
        "version": engine.version,
        "mode": str(engine.mode),
        "max_batched_tokens": engine.max_batched_tokens,
        "max_seqs": engine.max_seqs,
    }
    residuals = _numbers(profile.residuals, "mean_relative p95_relative max_relative samples")
    for name in ("held_out_mean", "held_out_max", "unseen_relative"):
        value = getattr(profile.residuals, name)
        if value is not None:
            residuals[name] = value
    content["residuals"] = residuals
    if profile.fitted is not None:
        content["fitted"] = _numbers(profile.fitted, "prefill_tokens sequences context_tokens")
    source = _numbers(profile.source, "kind what licence date")
    if profile.source.host_s:
        source["host_s"] = profile.source.host_s
    content["source"] = source
    return content


def _numbers(noun: object, names: str) -> dict[str, Any]:
    return {name: getattr(noun, name) for name in names.split()}


def _stated(model: StepModel | PrefillModel, terms: Iterable[Term]) -> dict[str, Any]:
    """The coefficients that a file states: an optional one only where it is more than 0."""
    values = coefficients(model)
    return {term.name: values[term.name] for term in terms if not term.words or values[term.name]}


def _hinge_rows(hinges: Iterable[Hinge]) -> list[dict[str, Any]]:
    return [{"of": h.of, "from": h.start, "per_unit_s": h.per_unit_s} for h in hinges]
