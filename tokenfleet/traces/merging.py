"""Several trace files as one trace.

Traces that all carry a real clock (dates, Unix times) are laid on it, so that what overlapped still
overlaps. Traces whose clocks do not meet (a gap longer than all of them together), and traces of which any
has only relative times, are overlaid: each keeps its own times and all begin at zero, as the services
behind them would run side by side on one fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from controlplane.errors import BadInput
from controlplane.workload import Workload
from tokenfleet.traces.readers import read_trace
from tokenfleet.traces.trace import Trace


def read_traces(paths: Sequence[str | Path]) -> Trace:
    """Read files and merge their requests in order of arrival.

    Raises BadInput if there is no file, or any cannot be used.
    """
    if not paths:
        raise BadInput("trace: no file given; expected at least one")
    return merged([read_trace(path) for path in paths])


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace of all the requests; ties keep the order of the traces."""
    if len(traces) == 1:
        return traces[0]
    starts = _common_clock(traces)
    clock_start_s = min(starts) if starts else None
    offset_s = [start - min(starts) for start in starts] if starts else [0.0] * len(traces)
    slo_classes = tuple(dict.fromkeys(name for t in traces for name in t.workload.slo_classes))
    tenants = tuple(dict.fromkeys(name for t in traces for name in t.tenants))
    parts = [t.workload for t in traces]
    arrival_s = np.concatenate([w.arrival_s + o for w, o in zip(parts, offset_s, strict=True)])
    order = np.argsort(arrival_s, kind="stable")
    slo_class = [np.array([slo_classes.index(n) for n in w.slo_classes])[w.slo_class] for w in parts]
    tenant = [np.array([tenants.index(n) for n in t.tenants])[t.tenant] for t in traces]
    formats = dict.fromkeys(t.format for t in traces)
    said = [warning for t in traces for warning in t.warnings]
    if not starts and any(t.clock_start_s is not None for t in traces):
        said.append(f"{len(traces)} traces without a clock in common; overlaid, each from its own start")
    return Trace(
        name=" + ".join(t.name for t in traces),
        format=" + ".join(formats),
        workload=Workload(
            arrival_s=arrival_s[order],
            prompt_tokens=np.concatenate([w.prompt_tokens for w in parts])[order],
            output_tokens=np.concatenate([w.output_tokens for w in parts])[order],
            priority=np.concatenate([w.priority for w in parts])[order],
            slo_class=np.concatenate(slo_class)[order],
            slo_classes=slo_classes,
        ),
        warnings=said,
        clock_start_s=clock_start_s,
        tenant=np.concatenate(tenant)[order],
        tenants=tenants,
        out_of_order=sum(t.out_of_order for t in traces),
        empty_outputs=sum(t.empty_outputs for t in traces),
        blank_rows=sum(t.blank_rows for t in traces),
    )


def _common_clock(traces: Sequence[Trace]) -> list[float]:
    """Each trace's start on the clock they share; empty if they share none."""
    starts = [t.clock_start_s for t in traces if t.clock_start_s is not None]
    if len(starts) < len(traces):
        return []
    spans = sorted((s, s + float(t.workload.arrival_s[-1])) for s, t in zip(starts, traces, strict=True))
    longest_gap_s, covered_s = 0.0, spans[0][1]
    for start_s, end_s in spans[1:]:
        longest_gap_s = max(longest_gap_s, start_s - covered_s)
        covered_s = max(covered_s, end_s)
    return starts if longest_gap_s <= sum(end - start for start, end in spans) else []
