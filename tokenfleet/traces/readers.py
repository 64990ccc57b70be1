"""The trace reader: any known format in any known file, checked and put in order.

It is strict where the data would be meaningless: a missing column, a value that is no number, NaN, a negative
time or token count, an empty prompt. BadInput names file, row, column, value and what was expected. It warns
where a real log is merely untidy: it sorts rows out of order, drops requests that returned nothing, and
passes over blank rows and unknown further columns. Equal arrival times are fine.

Times become seconds. Dates and other clocks count from the first arrival. `arrival_s` of the plain format and
of Tokenfleet's request history is kept as written, as its zero is the start of the recording. It too counts
from the first arrival if that comes later than the whole recording lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.workload import LONGEST_S, Workload
from tokenfleet.traces.container import ROW, UNREADABLE, TableFile, blame, open_container
from tokenfleet.traces.formats import ANSWERED, ArrivalUnit, Match, match
from tokenfleet.traces.identity import identify
from tokenfleet.traces.sessions import RequestRows, codes_of
from tokenfleet.traces.trace import Trace, merged

MOST_TOKENS = 100_000_000
LATEST_S = 1e15  # beyond any date in milliseconds, far below where sums of squares overflow
EPOCH_S = 631_152_000.0  # 1990-01-01: seconds this large are dates, not offsets
NS = 1e9
NARROW = 100_000  # requests; the tokens of more are kept as int32
DATE_FORM = "YYYY-MM-DD HH:MM:SS"
LISTED = "a list of whole numbers, none negative"
HIGH = ("high", "1", "1.0")
NORMAL = ("normal", "0", "0.0")


@dataclass(frozen=True, slots=True)
class ColumnRule:
    """A rule for the values of one column: `fault` is true of a row that breaks it."""

    column: str
    fault: pl.Expr
    expected: str


def read_traces(paths: Sequence[str | Path]) -> Trace:
    """Read files and merge their requests in order of arrival.

    Raises BadInput if there is no file, or any cannot be used.
    """
    if not paths:
        raise BadInput("trace: no file given; expected at least one")
    return merged([read_trace(path) for path in paths])


def read_trace(path: str | Path) -> Trace:
    """Read one trace file; its format is found by its content.

    Raises BadInput, in one line, for anything that cannot be used.
    """
    container = open_container(Path(path))
    form = match(container.columns, str(path))
    if container.tool:  # its times are a clock's: they begin with the first arrival
        form = replace(form, name=container.tool, format=replace(form.format, relative=False))
    frame, rules = _numbers(container, form)
    table = _collect(container, frame)
    faults = table.select(pl.col("^__fault_.*$").any())
    for rule, column in zip(rules, faults.iter_columns(), strict=True):
        if column.item():
            raise _first_fault(container, table, rule, column.name)
    return _in_order(Path(path), form, table)


def _numbers(container: TableFile, form: Match) -> tuple[pl.LazyFrame, list[ColumnRule]]:
    """The columns as numbers, a fault column for each rule, blank and empty rows still in."""
    wanted = list(
        dict.fromkeys(
            [form.arrival, form.prompt, form.output, *form.optional.values(), *form.shared.values()]
        )
    )
    raw = container.scan(wanted)
    try:
        types = raw.collect_schema()
    except UNREADABLE as error:
        raise blame(container, error) from error
    dated = form.format.clock is ArrivalUnit.DATE or types[form.arrival].is_temporal()
    arrival = _date_ns(form.arrival, types[form.arrival]) if dated else _number(form.arrival)
    late = pl.lit(False) if dated else ~pl.col("arrival").is_between(0, LATEST_S)
    expected = f"a date and time, {DATE_FORM}" if dated else f"{form.format.clock}, not negative"
    rules = [ColumnRule(form.arrival, pl.col("arrival").is_null() | late, expected)]
    columns = [arrival.alias("arrival")]
    for name, column, least in (("prompt", form.prompt, 1), ("output", form.output, 0)):
        columns.append(_number(column).alias(name))
        value = pl.col(name)
        fault = value.is_null() | ~value.is_between(least, MOST_TOKENS) | (value != value.floor())
        rules.append(ColumnRule(column, fault, f"a whole number of tokens from {least} to {MOST_TOKENS}"))
    told, told_rules = _told(form.shared, types)
    columns, rules = columns + told, rules + told_rules
    if "priority" in form.optional:
        word = pl.col(form.optional["priority"]).cast(pl.String).str.strip_chars().str.to_lowercase()
        is_known = word.is_in([*HIGH, *NORMAL, ""]) | word.is_null()
        columns += [word.is_in(HIGH).fill_null(False).alias("priority"), is_known.alias("known_priority")]
        rules.append(
            ColumnRule(form.optional["priority"], ~pl.col("known_priority"), "high or normal (1 or 0)")
        )
    for name in ("tenant", "slo_class"):
        if name in form.optional:
            text = pl.col(form.optional[name]).cast(pl.String).str.strip_chars().replace("", None)
            columns.append(text.fill_null("default").cast(pl.Categorical).alias(name))
    faults = [(rule.fault & ~pl.col("__blank")).alias(f"__fault_{n}") for n, rule in enumerate(rules)]
    rows = raw.select(ROW, "__blank", *columns).with_columns(*faults)
    rows = rows.with_columns(pl.col("prompt", "output").cast(pl.Int32, strict=False))
    return rows.drop("known_priority", "^__bad_.*$", strict=False), rules


WHOLE = {  # from
    "turn": 0, "agent": 0, "parent_agent": -1, "parent_turn": -1, "block_tokens": 1, "system_tokens": 0,
}  # fmt: skip


def _told(shared: dict[str, str], types: pl.Schema) -> tuple[list[pl.Expr], list[ColumnRule]]:
    """The columns that tell what requests share and wait for; a row may leave any of them empty."""
    columns, rules = [], []
    for name, column in shared.items():
        text = pl.col(column).cast(pl.String, strict=False).str.strip_chars().replace("", None)
        if name in ("session", "system"):
            columns.append(text.alias(name))
            continue
        if name in ("hash_ids", "after"):
            value, has_value, expected = _list(column, types[column])
            bad = value.list.drop_nulls().list.len() != value.list.len()
        else:
            has_value, value = text.is_not_null(), _number(column)
            bad = value.is_null() | ~value.is_between(WHOLE.get(name, 0), LATEST_S)
            expected = "seconds, not negative"
            if name in WHOLE:
                bad |= value != value.floor()
                expected = f"a whole number, at least {WHOLE[name]}"
        columns += [value.alias(name), (has_value & bad).fill_null(False).alias(f"__bad_{name}")]
        if name not in ANSWERED:
            rules.append(ColumnRule(column, pl.col(f"__bad_{name}"), expected))
    return columns, rules


def _list(column: str, kind: pl.DataType) -> tuple[pl.Expr, pl.Expr, str]:
    """A list of whole numbers, as a list, as JSON, or separated by spaces; null elements are no numbers."""
    if isinstance(kind, pl.List):
        return pl.col(column).cast(pl.List(pl.UInt64), strict=False), pl.col(column).is_not_null(), LISTED
    text = pl.col(column).cast(pl.String, strict=False)
    words = text.str.replace_all(r"[\[\],\s]+", " ").str.strip_chars()
    empty = pl.lit([], dtype=pl.List(pl.UInt64))
    value = words.str.split(" ").cast(pl.List(pl.UInt64), strict=False)
    return pl.when(words == "").then(empty).otherwise(value), text.is_not_null(), LISTED


def _number(column: str) -> pl.Expr:
    """A column as floats; null where it is no finite number."""
    text = pl.col(column).cast(pl.String).str.strip_chars()
    value = text.cast(pl.Float64, strict=False)
    return pl.when(value.is_finite()).then(value)


def _date_ns(column: str, kind: pl.DataType) -> pl.Expr:
    """Nanoseconds since 1970; dates without an offset are taken as UTC."""
    if kind.is_temporal():
        return pl.col(column).dt.epoch("ns")
    text = pl.col(column).cast(pl.String).str.strip_chars()
    text = text.str.replace(r"^(\d{4}-\d\d-\d\d)T", "$1 ").str.replace(r" ?[zZ]$", "+00:00")
    text = text.str.replace(r" ([+-]\d\d:?\d\d)$", "$1")
    # Nanoseconds wrap round outside 1677-2262 instead of failing.
    text = pl.when(text.str.contains(r"^(19|20|21)\d\d-")).then(text)
    here = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", strict=False, time_unit="ns")
    there = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", strict=False, time_unit="ns", time_zone="UTC")
    return pl.coalesce(here, there.dt.replace_time_zone(None)).dt.epoch("ns")


def _collect(container: TableFile, frame: pl.LazyFrame) -> pl.DataFrame:
    try:
        return frame.collect(engine="streaming")
    except UNREADABLE as error:
        raise blame(container, error) from error


def _first_fault(container: TableFile, table: pl.DataFrame, rule: ColumnRule, fault: str) -> BadInput:
    row = int(table.filter(pl.col(fault))[ROW][0])
    raw = container.scan([rule.column]).filter(pl.col(ROW) == row).select(pl.col(rule.column).cast(pl.String))
    value = _collect(container, raw).item()
    shown = "no value" if value is None else repr(value[:40])
    return BadInput(f"{container.path}: row {row + 1}: {rule.column}: {shown}, expected {rule.expected}")


def _in_order(path: Path, form: Match, table: pl.DataFrame) -> Trace:
    blank_rows = int(table["__blank"].sum())
    silent = int((table["output"] == 0).sum())
    table = table.drop("^__fault_.*$")
    if blank_rows or silent:
        table = table.filter(~pl.col("__blank") & (pl.col("output") > 0))
    if not len(table):
        found_rows = f"{silent} requests, all without output" if silent else "no requests"
        raise BadInput(f"{path}: {found_rows}; expected at least one with output tokens")
    arrival_s, clock_start_s, moved = _seconds(form, table["arrival"].to_numpy())
    if arrival_s.max() > LONGEST_S:
        length = f"lasts {arrival_s.max():.6g} s, at most {LONGEST_S:g} s (31 years) can be planned for"
        raise BadInput(f"{path}: {form.arrival}: {length}; are these {form.format.clock}?")
    apart = form.name == "weka"
    late = 0 if apart else int((np.diff(arrival_s) < 0).sum())
    found = identify(RequestRows(str(path), form, table, arrival_s))
    if late or apart:
        table = table[found.order]
    tokens = np.int32 if len(table) > NARROW else np.int64
    slo_class, slo_classes = _names(table, "slo_class")
    tenant, tenants = _names(table, "tenant")
    workload = Workload(
        arrival_s=found.arrival_s,
        prompt_tokens=table["prompt"].to_numpy().astype(tokens),
        output_tokens=table["output"].to_numpy().astype(tokens),
        priority=table["priority"].to_numpy().astype(np.int64) if "priority" in table.columns else _none(),
        slo_class=slo_class,
        slo_classes=slo_classes,
        prefixes=found.prefixes,
        sessions=found.sessions,
    )
    remarks = [
        (late, f"rows that arrive before the row above them: {late}; sorted by arrival"),
        (apart, "sessions without a common clock; each from its own start, all begin together"),
        (silent, f"requests that returned no tokens: {silent}; dropped"),
        (blank_rows, f"blank rows: {blank_rows}; skipped"),
        (moved, f"{form.arrival} begins at {moved:.0f} s; counted from the first arrival instead"),
        (len(form.ignored), f"columns not used: {', '.join(form.ignored[:12])}"),
    ]
    return Trace(
        name=path.name,
        format=form.name,
        workload=workload,
        warnings=[f"{path}: {remark}" for count, remark in remarks if count],
        clock_start_s=clock_start_s,
        tenant=tenant,
        tenants=tenants,
        out_of_order=late,
        empty_outputs=silent,
        blank_rows=blank_rows,
        systems=found.systems,
        from_lengths=found.from_lengths,
    )


def _seconds(form: Match, arrival: NDArray[np.generic]) -> tuple[NDArray[np.float64], float | None, float]:
    """Arrivals in seconds from the workload's zero; that zero's Unix time; a start moved away, if any."""
    first = arrival.min()
    if np.issubdtype(arrival.dtype, np.integer):  # dates: subtract before floats lose the nanoseconds
        return (arrival - first) / NS, float(first) / NS, 0.0
    unit_s = 1e-3 if form.format.clock is ArrivalUnit.MILLISECONDS else 1.0
    start_s, span_s = float(first) * unit_s, float(arrival.max() - first) * unit_s
    clock_start_s = start_s if start_s > EPOCH_S else None
    if form.format.relative and start_s <= span_s:
        return arrival.astype(np.float64), None, 0.0
    moved = form.format.relative and clock_start_s is None and form.name != "history"
    return (arrival - first) * unit_s, clock_start_s, start_s if moved else 0.0


def _names(table: pl.DataFrame, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """A text column as indices into its distinct values, in order of first appearance."""
    return codes_of(table[column]) if column in table.columns else (_none(), ("default",))


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)
