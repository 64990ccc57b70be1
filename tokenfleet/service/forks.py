"""A fork of history: the requests that a fleet served lately, written as a trace that no longer changes.

`--since 1h` means another hour each minute; the file that is written always means the same one, so that
a plan made from it can be made again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from dataplane.history.files import read_history
from tokenfleet.files import keep_newest
from tokenfleet.service.data_folder import default_data_folder
from tokenfleet.texts import parse_duration_s

FEWEST_REQUESTS = 100
SHORTEST_S = 60.0
KEPT_FORKS = 50
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "priority", "tenant", "slo_class")
KEEPS_PREFIXES = "block_tokens"  # no row of a history without them has it
SHARED = ("session", "hash_ids", KEEPS_PREFIXES, "ttft_s", "tpot_s")


@dataclass(frozen=True, slots=True)
class Fork:
    """Requests of the last `since` of a fleet: a trace file, its name for people, what to know of it."""

    path: Path
    name: str
    warnings: tuple[str, ...]


def asked_traces(
    traces: Sequence[Path] | None, since: str | None, data: Path | None, is_biased: bool = False
) -> tuple[list[Path], tuple[str, ...]]:
    """The trace files that `--trace` names or `--since` makes, and what to warn of.

    Raises BadInput unless exactly one of the two was given, or where history is too short.
    """
    if since is None:
        if not traces:
            raise BadInput("--trace: missing; name a trace, or --since 1h for what this fleet has served")
        if data is not None and not is_biased:
            raise BadInput("--data: says where --since finds history; without it there is no use for it")
        return list(traces), ()
    if traces:
        raise BadInput("--since: contradicts --trace; give one of them")
    folder = data or default_data_folder()
    forked = fork(folder, since, time.time(), folder / "forks")
    keep_newest((folder / "forks").glob("last-*.parquet"), KEPT_FORKS)
    return [forked.path], forked.warnings


def fork(data: Path, since: str, now_s: float, into: Path) -> Fork:
    """Write the requests of the last `since` before `now_s` (Unix time) to a Parquet trace in `into`.

    A request that was turned away or failed before its first token has no length and is not in it; how
    many there were is a warning. Raises BadInput where too little is left to plan from.
    """
    asked_s = parse_duration_s(since, "--since")
    columns: tuple[str, ...] = COLUMNS
    rows = recent(data, since, asked_s, now_s, (*columns, KEEPS_PREFIXES))
    if rows[KEEPS_PREFIXES].is_not_null().any():
        columns = (*COLUMNS, *SHARED)
        rows = recent(data, since, asked_s, now_s, columns)
    served = rows.filter(pl.col("output_tokens") > 0, pl.col("prompt_tokens") > 0)
    span_s = float(served["arrival_s"][-1] - served["arrival_s"][0]) if len(served) else 0.0
    if len(served) < FEWEST_REQUESTS or span_s < SHORTEST_S:
        raise BadInput(
            f"--since {since}: {data} has {len(served)} requests over {duration_text(span_s)} of that time;"
            f" a plan needs at least {FEWEST_REQUESTS} over {duration_text(SHORTEST_S)}"
        )
    warnings = []
    unserved = len(rows) - len(served)
    if unserved:
        warnings.append(
            f"history: {unserved} of {len(rows)} requests got no token (turned away, failed or left) and have"
            " no length; they are not in the trace, so demand was higher"
        )
    first_s = float(rows["arrival_s"][0])
    if now_s - first_s < 0.9 * asked_s:
        began = duration_text(now_s - first_s)
        warnings.append(f"history: asked for the last {duration_text(asked_s)}, it begins {began} ago")
    until = datetime.fromtimestamp(now_s, UTC)
    into.mkdir(parents=True, exist_ok=True)
    path = into / f"last-{since.strip().replace(' ', '')}-until-{until:%Y%m%dT%H%M%S}Z.parquet"
    served.lazy().select(*columns).with_columns(pl.col(pl.Categorical).cast(pl.String)).sink_parquet(path)
    return Fork(path, f"the last {since} until {until:%Y-%m-%d %H:%M} UTC", tuple(warnings))


def recent(data: Path, since: str, asked_s: float, now_s: float, columns: Sequence[str]) -> pl.DataFrame:
    """These columns of the rows of history of one model. Raises BadInput, also for none at all."""
    folder = data / "history"
    if not folder.is_dir():
        raise BadInput(
            f"--since {since}: {data} has no history; `tokenfleet serve --data {data}` records one"
        )
    if not asked_s > 0:
        raise BadInput(f"--since: must be positive, got {since}")
    rows = read_history(folder, now_s - asked_s, now_s, (*columns, "model"))
    models = rows["model"].unique().sort().to_list()
    if len(models) > 1:
        raise BadInput(
            f"--since {since}: {data} has history of {', '.join(models)}; a plan is for one model, so give"
            " each fleet a --data folder of its own"
        )
    return rows
