"""The form of a profile file: `tokenfleet.profile/1` in YAML, read into and written from a `Profile`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from datetime import date
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import BeforeValidator, Field, create_model

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Frontend, Profile
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
from tokenfleet.field_errors import FilePart, no_bool, parse_yaml

SCHEMA = "tokenfleet.profile/1"


def _iso(value: Any) -> Any:
    """YAML reads 2026-01-31 as a date; a profile keeps its ISO text."""
    return value.isoformat() if isinstance(value, date) else value


Seconds = Annotated[float, BeforeValidator(no_bool), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(no_bool), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(no_bool), Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _HingePart(FilePart):
    of: HingeOf
    start: Seconds = Field(alias="from")
    per_unit_s: Seconds


def _coefficients(name: str, terms: Iterable[Term], **more: Any) -> type[FilePart]:
    """The part of a file that holds a model's coefficients; the optional ones may be left out."""
    named: dict[str, Any] = {t.name: (Seconds, 0.0 if t.words else ...) for t in terms}
    return create_model(name, __base__=FilePart, **named, **more)


_StepPart = _coefficients("_StepPart", STEP_TERMS)
_PrefillPart = _coefficients("_PrefillPart", PREFILL_TERMS, hinges=(list[_HingePart], []))


def _part(noun: type, **bounds: Any) -> type[FilePart]:
    """The part of a file that holds a record: its fields and defaults, numbers in bounds."""
    from_0: dict[Any, Any] = {int: Count, float: Seconds, float | None: Seconds | None}
    above_0: dict[Any, Any] = {int: Positive, float: Annotated[Seconds, Field(gt=0)]}
    types = get_type_hints(noun)
    held: dict[str, Any] = {}
    for field in fields(noun):
        plain = (above_0 if field.metadata else from_0).get(types[field.name], types[field.name])
        default = ... if field.default is MISSING else field.default
        held[field.name] = (bounds.get(field.name, plain), default)
    return create_model(f"_{noun.__name__}Part", __base__=FilePart, **held)


# The records that a profile consists of, by its fields. Step times have a form of their own.
_NOUNS: dict[str, Any] = {
    name: noun
    for name, kind in get_type_hints(Profile).items()
    for noun in (kind, *get_args(kind))
    if is_dataclass(noun) and noun not in (StepModel, PrefillModel)
}
_BOUNDS: dict[str, dict[str, Any]] = {
    "kv": {"gpu_memory_utilization": Annotated[Seconds, Field(le=1)]},
    "source": {
        "what": Annotated[str, Field(min_length=1, max_length=2000)],
        "licence": Name,
        "date": Annotated[str, BeforeValidator(_iso), Field(pattern=r"^\d{4}-\d{2}-\d{2}$")],
    },
    "speculation": {"acceptance": Annotated[tuple[Seconds, ...], Field(min_length=1)]},
}
# The order in a file, where it is not a record's own. A group that begins with ? is left out where its first
# field is as usual.
_WRITTEN = {
    "frontend": ("per_request_s per_prompt_token_s", "?doubt_s", "?late_s"),
    "kv": (
        *("capacity_tokens block_tokens bytes_per_token", "?gpu_memory_bytes gpu_memory_utilization"),
        *("?request_tokens window_tokens", "?window_is_chunk", "?vocabulary step_token_bytes"),
        "?measured_per_token measured_per_request measured_error",
    ),
    "engine": ("name version mode max_batched_tokens max_seqs", "?steps_ahead"),
    "residuals": (
        *("mean_relative p95_relative max_relative samples", "?held_out_mean", "?held_out_max"),
        *("unseen_relative", "?unseen_prefill_relative"),
    ),
    "source": ("kind what licence date", "?host_s"),
}
_PARTS: dict[str, Any] = {name: _part(noun, **_BOUNDS.get(name, {})) for name, noun in _NOUNS.items()}
_AT_END = ("engine", "residuals", "fitted", "source")
_NEEDED = ("kv", "residuals", "source")
_PLAIN = ("engine", "frontend")  # those that have a default for each field
_FIELDS: dict[str, Any] = {
    "form": (Literal["tokenfleet.profile/1"], Field(alias="schema")),
    "model": (Name, ...),
    "gpu": (Name, ...),
    "tp_degree": (Positive, ...),
    "step": (_StepPart, ...),
    "prefill": (_PrefillPart | None, None),
    "hinges": (list[_HingePart], []),
    **{name: (_PARTS[name], ...) for name in _NEEDED},
    "context_limit_tokens": (Count, 0),
    "workers_per_gpu": (Positive, 1),
    **{name: (_PARTS[name], _PARTS[name]()) for name in _PLAIN},
    **{name: (part | None, None) for name, part in _PARTS.items() if name not in _NEEDED + _PLAIN},
}
_ProfileFile: Any = create_model("_ProfileFile", __base__=FilePart, **_FIELDS)


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


def _noun(file: Any) -> Profile:
    prefill = None
    if file.prefill is not None:
        plain = file.prefill.model_dump()
        prefill = PrefillModel(**plain | {"hinges": _hinges(plain["hinges"])})
    hinges = _hinges(hinge.model_dump() for hinge in file.hinges)
    stated = {name: part for name in _NOUNS if (part := getattr(file, name)) is not None}
    return Profile(
        model=file.model,
        gpu=file.gpu,
        tp_degree=file.tp_degree,
        step=StepModel(**file.step.model_dump(), hinges=hinges),
        prefill=prefill,
        context_limit_tokens=file.context_limit_tokens,
        workers_per_gpu=file.workers_per_gpu,
        **{name: _NOUNS[name](**part.model_dump()) for name, part in stated.items()},
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
    content |= _parts(profile, *(name for name in _NOUNS if name not in (*_AT_END, "kv")), "kv")
    content["context_limit_tokens"] = profile.context_limit_tokens
    if profile.workers_per_gpu > 1:
        content["workers_per_gpu"] = profile.workers_per_gpu
    return content | _parts(profile, *_AT_END)


def _parts(profile: Profile, *names: str) -> dict[str, Any]:
    nouns = {name: getattr(profile, name) for name in names}
    return {name: _written(noun, name) for name, noun in nouns.items() if noun not in (None, Frontend())}


def _written(noun: Any, name: str) -> dict[str, Any]:
    """The fields of a noun that a file states, in the order of _WRITTEN."""
    usual = {field.name: field.default for field in fields(noun)}
    stated: dict[str, Any] = {}
    for group in _WRITTEN.get(name, usual):
        head, *more = group.removeprefix("?").split()
        if not group.startswith("?") or getattr(noun, head) != usual[head]:
            stated |= {one: _plain(getattr(noun, one)) for one in (head, *more)}
    return stated


def _plain(value: Any) -> Any:
    """A value as YAML has it."""
    return str(value) if isinstance(value, str) else list(value) if isinstance(value, tuple) else value


def _stated(model: StepModel | PrefillModel, terms: Iterable[Term]) -> dict[str, Any]:
    """The coefficients that a file states: an optional one only where it is more than 0."""
    values = coefficients(model)
    return {term.name: values[term.name] for term in terms if not term.words or values[term.name]}


def _hinge_rows(hinges: Iterable[Hinge]) -> list[dict[str, Any]]:
    return [{"of": h.of, "from": h.start, "per_unit_s": h.per_unit_s} for h in hinges]
