"""A trace's checkup as a table for people and as JSON for programs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenfleet.traces.check import Checkup
from tokenfleet.traces.shape import JUDGED_SHARE, Tail

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: NDArray[np.float64]) -> str:
    """Values as bars, from 0 to their maximum; a value of 0 is a space."""
    if not len(values) or values.max() <= 0:
        return ""
    levels = np.minimum((values / values.max() * len(BARS)).astype(int), len(BARS) - 1)
    return "".join(BARS[level] if value > 0 else " " for level, value in zip(levels, values, strict=True))


def as_tables(checkup: Checkup) -> list[RenderableType]:
    """What to print: what the trace is, its lengths, each finding, and a verdict."""
    trace, shape = checkup.trace, checkup.shape
    head = f"{trace.name} ({trace.format}): {shape.requests} requests in {shape.duration_s:.1f} s"
    parts: list[RenderableType] = [Text(f"{head}, {shape.rate_rps:.3g}/s", style="bold")]
    if len(shape.rates_rps):
        parts.append(Text(f"rate  {sparkline(shape.rates_rps)}  0 to {shape.rates_rps.max():.3g}/s"))
    lengths = Table(title=None)
    for column in ("tokens", "mean", "p50", "p95", "p99", "max"):
        lengths.add_column(column, justify="left" if column == "tokens" else "right")
    for name, tail in (("prompt", shape.prompt), ("output", shape.output)):
        row = (tail.mean, tail.p50, tail.p95, tail.p99, tail.most)
        lengths.add_row(name, *(f"{value:.0f}" for value in row))
    found = Table()
    found.add_column("looked at", no_wrap=True)
    found.add_column("")
    found.add_column("found", overflow="fold")
    for finding in checkup.findings:
        mark = Text("warning", style="yellow") if finding.warns else Text("ok", style="green")
        found.add_row(finding.name, mark, Text(finding.words))
    ignored = [Text(warning, style="yellow") for warning in trace.warnings]
    verdict = f"warnings: {checkup.warnings or 'none'}"
    return [*parts, lengths, found, *ignored, Text(verdict)]


def as_json(checkup: Checkup) -> dict[str, Any]:
    """The same for programs; figures that are not defined are null."""
    trace, shape = checkup.trace, checkup.shape
    return {
        "schema": "tokenfleet.trace-check/1",
        "trace": trace.name,
        "format": trace.format,
        "requests": shape.requests,
        "duration_s": shape.duration_s,
        "rate_rps": shape.rate_rps,
        "rates_rps": [round(float(rate), 6) for rate in shape.rates_rps],
        "gap_cv": _or_null(shape.gap_cv),
        "longest_gap_s": shape.longest_gap_s,
        "longest_gap_at_s": shape.longest_gap_at_s,
        "resolution_s": shape.resolution_s,
        "fano": {f"{window_s:g}s": _or_null(value) for window_s, value in shape.fano.items()},
        "prompt_tokens": _tail(shape.prompt),
        "output_tokens": _tail(shape.output),
        "drift": {
            "rate": _or_null(shape.drift.rate),
            "prompt_tokens": _or_null(shape.drift.prompt_tokens),
            "output_tokens": _or_null(shape.drift.output_tokens),
        },
        "out_of_order": trace.out_of_order,
        "empty_outputs": trace.empty_outputs,
        "blank_rows": trace.blank_rows,
        "same_time": shape.same_time,
        "same_rows": shape.same_rows,
        "attainment_half_width": {"share": JUDGED_SHARE, "half_width": shape.half_width},
        "requests_needed": shape.requests_needed,
        "findings": [
            {"name": finding.name, "level": "warning" if finding.warns else "ok", "found": finding.words}
            for finding in checkup.findings
        ],
        "reading": trace.warnings,
        "warnings": checkup.warnings,
    }


def _tail(tail: Tail) -> dict[str, float]:
    return {"mean": tail.mean, "p50": tail.p50, "p95": tail.p95, "p99": tail.p99, "max": tail.most}


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
