"""The trace doctor: findings about a trace that could mislead a plan, in words and as JSON.

Each finding states its own rule. A warning is something to know before trusting a plan made from the
trace; none stops it from being used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from controlplane.figures import counted, duration_text
from tokenfleet.traces.reuse import KEEPS, TraceReuse, reuse_of
from tokenfleet.traces.shape import (
    ASKED_HALF_WIDTH,
    JUDGED_SHARE,
    Phase,
    Shape,
    half_width,
    phases_of,
    shape_of,
)
from tokenfleet.traces.trace import Trace

SLOW_RPS = 0.02  # below: likelier milliseconds read as seconds than a service worth a fleet
FAST_RPS = 1000.0  # above: likelier seconds read as milliseconds than one model's own traffic
LATEST_DATE_S = 1e11  # the year 5138: likelier milliseconds since 1970 read as seconds
LONG_PROMPT_TOKENS = 1_000_000
LONG_OUTPUT_TOKENS = 100_000
SILENCE_FACTOR = 20.0  # of the mean gap; a Poisson trace of n has its longest near ln(n) mean gaps
SHORTEST_S = 600.0
DRIFTED = 1.25  # either way
BURSTY_CV = 1.5
BURSTY_FANO = 30.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `name`, whether it `warns`, and what was found, in a sentence."""

    name: str
    warns: bool
    words: str


@dataclass(frozen=True, slots=True)
class Checkup:
    """The findings of a checkup."""

    trace: Trace
    shape: Shape
    findings: tuple[Finding, ...]
    reuse: TraceReuse | None
    phases: tuple[Phase, ...]

    @property
    def warnings(self) -> int:
        """The number of warnings."""
        return sum(finding.warns for finding in self.findings)


def check(trace: Trace) -> Checkup:
    """Look at everything that could make a plan from this trace wrong."""
    shape = shape_of(trace.workload)
    return Checkup(trace, shape, _findings(trace, shape), reuse_of(trace.workload), phases_of(trace.workload))


def _findings(trace: Trace, shape: Shape) -> tuple[Finding, ...]:
    return tuple(Finding(name, *look(trace, shape)) for name, look in LOOKS.items())


# The others a plan takes into account: it replays the bursts, schedules the drift, and bounds what a short
# trace can show.
MISLEAD_A_PLAN = ("duplicates", "units", "resolution", "lengths", "gaps")


def doctor_warnings(trace: Trace) -> list[str]:
    """The findings that would mislead a plan made from the trace, a line each."""
    if len(trace) == 0:
        return []
    warning = (f for f in _findings(trace, shape_of(trace.workload)) if f.warns and f.name in MISLEAD_A_PLAN)
    return [f"{trace.name}: {finding.name}: {finding.words}" for finding in warning]


Found = tuple[bool, str]  # whether it warns, and what was found


def _order(trace: Trace, shape: Shape) -> Found:
    if trace.out_of_order:
        return True, f"{trace.out_of_order} rows were out of order and are sorted by arrival"
    return False, "rows are in order of arrival"


def _duplicates(trace: Trace, shape: Shape) -> Found:
    share = shape.same_rows / shape.requests
    words = (
        f"{shape.same_time:,} requests arrive with the one before, {shape.same_rows:,} have its lengths too"
    )
    if share > 0.01:
        return True, f"{words} ({100 * share:.1f} %): were rows written twice?"
    return False, words


def _units(trace: Trace, shape: Shape) -> Found:
    rate = shape.rate_rps
    if trace.clock_start_s is not None and trace.clock_start_s > LATEST_DATE_S:
        scaled = f"as milliseconds they are a date, and arrive at {rate * 1000:.3g}/s"
        words = f"{rate:.3g} requests/s: arrivals begin at {trace.clock_start_s:.6g} s, which is no date"
        return True, f"{words}; {scaled}; divide them by 1000"
    if 0 < rate < SLOW_RPS and shape.requests >= 100:
        scaled = f"in milliseconds it would be {rate * 1000:.3g}/s"
        return True, f"{rate:.3g} requests/s over {shape.duration_s:.3g} s; {scaled}"
    if rate > FAST_RPS:
        scaled = f"read as seconds it would be {rate / 1000:.3g}/s"
        return True, f"{rate:.3g} requests/s is more than one service sees; {scaled}"
    if shape.requests > 1 and shape.duration_s == 0:
        return True, "every request arrives at the same instant: there is no rate"
    return False, f"{rate:.3g} requests/s over {shape.duration_s:.0f} s is plausible"


def _resolution(trace: Trace, shape: Shape) -> Found:
    if shape.resolution_s >= 0.1 and shape.rate_rps * shape.resolution_s > 0.1:
        hidden = "shorter bursts are hidden, and separate arrivals look simultaneous"
        return True, f"arrivals are whole multiples of {shape.resolution_s:g} s: {hidden}"
    step = duration_text(shape.resolution_s) if shape.resolution_s else "less than 1 ms"
    return False, f"the resolution of arrival times is {step}"


def _lengths(trace: Trace, shape: Shape) -> Found:
    prompt, output = shape.prompt, shape.output
    if prompt.max > LONG_PROMPT_TOKENS or output.max > LONG_OUTPUT_TOKENS:
        return True, f"up to {prompt.max} prompt and {output.max} output tokens: are these characters?"
    if shape.requests >= 100 and prompt.p50 == prompt.max and output.p50 == output.max:
        return True, "nearly all requests are of one length; real traffic has a tail"
    words = f"p99/p50 is {prompt.p99 / prompt.p50:.1f} for prompts"
    return False, f"{words}, {output.p99 / output.p50:.1f} for outputs"


def _empty(trace: Trace, shape: Shape) -> Found:
    if not trace.empty_outputs:
        return False, "every request has an output"
    share = trace.empty_outputs / (trace.empty_outputs + shape.requests)
    return True, f"{trace.empty_outputs} requests ({100 * share:.1f} %) had no output and are left out"


def _gaps(trace: Trace, shape: Shape) -> Found:
    words = f"the longest is {shape.longest_gap_s:.3g} s, at {shape.longest_gap_at_s:.0f} s"
    expected_s = (math.log(max(shape.requests, 2)) + SILENCE_FACTOR) * shape.duration_s / shape.requests
    if shape.longest_gap_s > expected_s:
        return True, f"{words}: was recording interrupted? (more than {expected_s:.3g} s is unusual)"
    return False, words


def _bursts(trace: Trace, shape: Shape) -> Found:
    indices = {window: value for window, value in shape.fano.items() if not math.isnan(value)}
    fano = ", ".join(f"{value:.1f} at {window:g} s" for window, value in indices.items()) or "unknown"
    cv = "unknown" if math.isnan(shape.gap_cv) else f"{shape.gap_cv:.2f}"
    words = f"CV of gaps {cv}, Fano index {fano} (Poisson: 1)"
    if shape.gap_cv > BURSTY_CV or any(value > BURSTY_FANO for value in shape.fano.values()):
        return True, f"{words}: a plan from the mean rate alone would be too small"
    return False, words


def _drift(trace: Trace, shape: Shape) -> Found:
    drift = shape.drift
    if math.isnan(drift.rate):
        return False, "all requests arrive at one instant: no first and last third to compare"
    ratios = {"rate": drift.rate, "prompt": drift.prompt_tokens, "output": drift.output_tokens}
    named = ", ".join(f"{name} ×{ratio:.2f}" for name, ratio in ratios.items())
    words = f"the last third against the first: {named}"
    if shape.requests >= 300 and any(not 1 / DRIFTED <= r <= DRIFTED for r in ratios.values()):
        return True, f"{words}; plan for the part that recurs (--window), or use a schedule"
    return False, words


def _enough(trace: Trace, shape: Shape) -> Found:
    minute = shape.fano[60.0]
    crowd = max(1.0, minute) if math.isfinite(minute) else 1.0
    apart, together = shape.half_width * 100, half_width(shape.requests / crowd) * 100
    statement = f"an attainment of {JUDGED_SHARE * 100:g} % is known to ±{apart:.2f} points"
    if crowd > 1:
        statement += f" (±{together:.2f} if latency is correlated within a minute)"
    if shape.requests < shape.requests_needed:
        rule = f"{shape.requests_needed:,} would give ±{ASKED_HALF_WIDTH * 100:g} points (95 % confidence)"
        return True, f"{counted(shape.requests, 'request')}, too few for a p99: {statement}; {rule}"
    if shape.duration_s < SHORTEST_S:
        short = f"the trace is only {shape.duration_s:.0f} s long and lacks slow swings of load"
        return True, f"{short}; {statement}"
    return False, statement


LOOKS = {
    "order": _order, "duplicates": _duplicates, "units": _units, "resolution": _resolution,
    "lengths": _lengths, "empty outputs": _empty, "gaps": _gaps, "bursts": _bursts, "drift": _drift,
    "enough for p99": _enough,
}  # fmt: skip


def verdict(checkup: Checkup) -> str:
    """Whether the trace can be planned from, its size, and how many warnings there are."""
    trace, shape, count = checkup.trace, checkup.shape, checkup.warnings
    misleads = any(finding.warns and finding.name in MISLEAD_A_PLAN for finding in checkup.findings)
    can = "may mislead a plan" if misleads else "is ready for planning"
    warnings = counted(count, "warning") if count else "no warnings"
    requests, lasted = counted(shape.requests, "request"), duration_text(shape.duration_s)
    read = "" if trace.format == "plain" else f" ({trace.format} format)"
    return f"{trace.name}{read} {can}: {warnings}; {requests} in {lasted}, {shape.rate_rps:.3g} req/s"


def _reuse_json(reuse: TraceReuse, kv_tokens: Mapping[str, int]) -> dict[str, Any]:
    within, hits = reuse.within_tokens, len(reuse.hits) > 0
    return {
        "ideal_hit_rate": reuse.ideal,
        "within_sessions": None if within is None else within / reuse.prompt_tokens,
        "across_sessions": None if within is None else reuse.ideal - within / reuse.prompt_tokens,
        "distance_tokens": {"p50": reuse.distance(0.5), "p90": reuse.distance(KEEPS)} if hits else None,
        "unique_tokens": reuse.unique_tokens,
        "workers": [
            {"worker": name, "kv_tokens": tokens, "hit_rate": reuse.kept(tokens)}
            for name, tokens in kv_tokens.items()
        ],
    }


def as_json(checkup: Checkup, kv_tokens: Mapping[str, int]) -> dict[str, Any]:
    """The checkup for programs; figures that are not defined are null."""
    trace, shape = checkup.trace, checkup.shape
    return {
        "schema": "tokenfleet.trace-check/1",
        "trace": trace.name,
        "format": trace.format,
        "requests": shape.requests,
        "duration_s": shape.duration_s,
        "rate_rps": _or_null(shape.rate_rps),
        "rates_rps": [_or_null(round(float(rate), 6)) for rate in shape.rates_rps],
        "phases": [
            {
                "start_s": round(phase.start_s, 3),
                "end_s": round(phase.end_s, 3),
                "requests": phase.requests,
                "rate_rps": float(f"{phase.rate_rps:.6g}"),
                "prompt_tokens": round(phase.prompt_tokens, 1),
                "output_tokens": round(phase.output_tokens, 1),
            }
            for phase in checkup.phases
        ],
        "gap_cv": _or_null(shape.gap_cv),
        "longest_gap_s": shape.longest_gap_s,
        "longest_gap_at_s": shape.longest_gap_at_s,
        "resolution_s": shape.resolution_s,
        "fano": {f"{window_s:g}s": _or_null(value) for window_s, value in shape.fano.items()},
        "prompt_tokens": asdict(shape.prompt),
        "output_tokens": asdict(shape.output),
        "drift": {name: _or_null(ratio) for name, ratio in asdict(shape.drift).items()},
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
        "prefixes": None if checkup.reuse is None else _reuse_json(checkup.reuse, kv_tokens),
        "reading": trace.warnings,
        "warnings": checkup.warnings,
    }


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None
