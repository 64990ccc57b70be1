"""The trace formats, identified by their columns.

Column names are compared without case, spaces or punctuation, so `Context Tokens` is `ContextTokens`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from controlplane.errors import BadInput

OPTIONAL = ("priority", "tenant", "slo_class")
SHARED = ("session", "turn", "after", "think_s", "hash_ids", "block_tokens", "system", "system_tokens")
ANSWERED = ("ttft_s", "tpot_s")  # when answers were complete
MOST_SHOWN = 12


class ArrivalUnit(StrEnum):
    """The unit of a format's arrival column."""

    DATE = "a date and time"
    SECONDS = "seconds"
    MILLISECONDS = "milliseconds"


@dataclass(frozen=True, slots=True)
class Format:
    """One published format by the names of its columns.

    `relative` says that arrivals count from a start chosen by the writer of the file, which is then kept.
    `also` are further columns without which it is not this format. `shared` are those, if they are there,
    that tell what requests share and wait for (traces/identity.py). `block_tokens` is the unit of its
    hash_ids, 0 where a column says it. `known` are further columns that a workload has no use for.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    clock: ArrivalUnit
    relative: bool = False
    also: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    block_tokens: int = 0
    known: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns without which it is not this format."""
        return self.arrival, self.prompt, self.output, *self.also


FORMATS = (
    Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", ArrivalUnit.DATE),
    Format(
        "burstgpt", "Timestamp", "Request tokens", "Response tokens", ArrivalUnit.SECONDS,
        known=("Model", "Total tokens", "Log Type", "Session ID", "Elapsed time"),
    ),
    Format(
        "mooncake", "timestamp", "input_length", "output_length", ArrivalUnit.MILLISECONDS,
        shared=("hash_ids",), block_tokens=512,
    ),
    Format(
        "weka", "t_s", "input_tokens", "output_tokens", ArrivalUnit.SECONDS, relative=True,
        also=("session", "agent", "turn", "parent_agent", "parent_turn", "think_s", "hash_ids"),
        shared=("session", "agent", "turn", "parent_agent", "parent_turn", "think_s", "api_s", "hash_ids"),
        block_tokens=64, known=("ttft_s", "stream", "model"),
    ),
    Format("vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens", ArrivalUnit.SECONDS),
    Format("splitwise", "arrival_timestamp", "prompt_size", "token_size", ArrivalUnit.SECONDS),
    Format(
        "vllm-log", "arrival_time", "input_toks", "output_toks", ArrivalUnit.SECONDS,
        known=("request_id", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"),
    ),
    Format(
        "plain", "arrival_s", "prompt_tokens", "output_tokens", ArrivalUnit.SECONDS, relative=True,
        shared=(*SHARED, *ANSWERED),
        known=(
            "request", "worker", "first_token_s", "finish_s", "preemptions", "migrations", "outcome",
            "cached_tokens", "queued_s", "ttft_target_s", "tpot_target_s", "moves", "replays", "model",
        ),
    ),
)  # fmt: skip
# Each request's outcome: `simulate --per-request` and a served fleet write it next to the plain columns.
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
    shared: dict[str, str]
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
    arrival, prompt, output = (spelled[plain_name(column)] for column in form.needed[:3])
    told = {name: spelled[plain_name(name)] for name in form.shared if plain_name(name) in spelled}
    optional = {name: spelled[plain_name(name)] for name in OPTIONAL if plain_name(name) in spelled}
    expected = {plain_name(c) for c in (*form.needed, *form.known, *form.shared, *OPTIONAL)}
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
        shared=told,
        ignored=tuple(column for plain, column in spelled.items() if plain not in expected),
    )


def _unknown_columns(columns: Sequence[str], spelled: dict[str, str]) -> str:
    shown = ", ".join(repr(c[:40]) for c in columns[:MOST_SHOWN]) + (
        ", …" if len(columns) > MOST_SHOWN else ""
    )
    shared = {form: sum(plain_name(c) in spelled for c in form.needed) for form in FORMATS}
    most = max(shared.values())
    nearest = [form for form in FORMATS if shared[form] == most]
    expected = "; ".join(f"{form.name}: {', '.join(form.needed)}" for form in nearest)
    if len(nearest) == 1:
        missing = [c for c in nearest[0].needed if plain_name(c) not in spelled]
        return f"columns found: {shown}; a {nearest[0].name} trace also has {', '.join(missing)}"
    return f"columns found: {shown}; expected those of one of: {expected}"


def plain_name(column: str) -> str:
    """A column's name without case, spaces or punctuation."""
    return re.sub(r"[^a-z0-9]", "", column.lower())
