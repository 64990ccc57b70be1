"""The trace formats, told apart by the columns they carry.

A format is independent of the file that holds it: each may come as CSV, JSON lines or Parquet. Column
names are compared without case, spaces or punctuation, so `Context Tokens` is `ContextTokens`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from controlplane.errors import BadInput

OPTIONAL = ("priority", "tenant", "slo_class")
MOST_SHOWN = 12


class Clock(StrEnum):
    """What a format's arrival column counts."""

    DATE = "a date and time"
    SECONDS = "seconds"
    MILLISECONDS = "milliseconds"


@dataclass(frozen=True, slots=True)
class Format:
    """How one published format names its columns.

    `relative` says that arrivals count from a start chosen by whoever wrote the file, which is then kept.
    `known` are further columns the format has and a workload has no use for.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    clock: Clock
    relative: bool = False
    known: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, str, str]:
        """The three columns without which it is not this format."""
        return self.arrival, self.prompt, self.output


FORMATS = (
    Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", Clock.DATE),
    Format(
        "burstgpt", "Timestamp", "Request tokens", "Response tokens", Clock.SECONDS,
        known=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
    ),
    Format("mooncake", "timestamp", "input_length", "output_length", Clock.MILLISECONDS, known=("hash_ids",)),
    Format(
        "vllm-log", "arrival_time", "input_toks", "output_toks", Clock.SECONDS,
        known=("request_id", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"),
    ),
    Format(
        "plain", "arrival_s", "prompt_tokens", "output_tokens", Clock.SECONDS, relative=True,
        known=(
            "request", "worker", "first_token_s", "finish_s", "preemptions", "migrations", "outcome",
            "ttft_s", "tpot_s", "ttft_target_s", "tpot_target_s", "moves", "replays", "model",
        ),
    ),
)  # fmt: skip
# What became of each request: `simulate --per-request` and a served fleet write it beside the plain columns.
HISTORY_COLUMNS = (("worker", "first_token_s", "finish_s"), ("worker", "ttft_s", "tpot_s", "outcome"))


@dataclass(frozen=True, slots=True)
class Match:
    """A file's columns as a format understands them; values are the file's own spellings."""

    format: Format
    name: str
    arrival: str
    prompt: str
    output: str
    optional: dict[str, str]
    ignored: tuple[str, ...]


def match(columns: Sequence[str], where: str) -> Match:
    """The format whose columns these are.

    Raises BadInput naming `where`, the columns found and those expected, if there is none.
    """
    spelled = {plain_name(column): column for column in columns}
    for form in FORMATS:
        if all(plain_name(column) in spelled for column in form.needed):
            return _matched(form, spelled)
    raise BadInput(f"{where}: {_unknown_columns(columns, spelled)}")


def _matched(form: Format, spelled: dict[str, str]) -> Match:
    arrival, prompt, output = (spelled[plain_name(column)] for column in form.needed)
    optional = {name: spelled[plain_name(name)] for name in OPTIONAL if plain_name(name) in spelled}
    expected = {plain_name(c) for c in (*form.needed, *form.known, *OPTIONAL)}
    history = form.name == "plain" and any(
        all(plain_name(c) in spelled for c in columns) for columns in HISTORY_COLUMNS
    )
    return Match(
        format=form,
        name="history" if history else form.name,
        arrival=arrival,
        prompt=prompt,
        output=output,
        optional=optional,
        ignored=tuple(column for plain, column in spelled.items() if plain not in expected),
    )


def _unknown_columns(columns: Sequence[str], spelled: dict[str, str]) -> str:
    shown = ", ".join(repr(c[:40]) for c in columns[:MOST_SHOWN]) + (
        ", …" if len(columns) > MOST_SHOWN else ""
    )
    shared = {form: sum(plain_name(c) in spelled for c in form.needed) for form in FORMATS}
    most = max(shared.values())
    nearest = [form for form in FORMATS if shared[form] == most]
    known = "; ".join(f"{form.name}: {', '.join(form.needed)}" for form in nearest)
    if len(nearest) == 1:
        missing = [c for c in nearest[0].needed if plain_name(c) not in spelled]
        return f"columns found: {shown}; a {nearest[0].name} trace also has {', '.join(missing)}"
    return f"columns found: {shown}; expected those of one of: {known}"


def plain_name(column: str) -> str:
    """A column's name without case, spaces or punctuation."""
    return re.sub(r"[^a-z0-9]", "", column.lower())
