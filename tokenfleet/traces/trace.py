"""A trace: a workload with its source and the corrections that reading it took; and several traces as one.

Traces that all carry a real clock (dates, Unix times) are laid on it, so that what overlapped still overlaps.
They are overlaid if any has only relative times, or if their clocks do not meet (a gap longer than all of
them together). Each then keeps its own times and all begin at zero, as if their services ran on one fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from controlplane.figures import duration_text
from controlplane.prefixes import Prefixes, Sessions
from controlplane.workload import Workload
from tokenfleet.traces.identity import SystemPrompts

SEAM_S = 60.0  # that files on one clock may overlap, or lie apart
SILENCE = 100.0  # requests that might have come there
COUNTS = ("out_of_order", "empty_outputs", "blank_rows")


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a drawn trace rests on.

    `levels`: the uncertainty of rate, prompts and outputs, as standard deviations of their logarithms.
    `rows`: for a person, (name, value, where from).
    """

    levels: tuple[float, float, float]
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Trace:
    """Requests read from a file.

    `clock_start_s` is the Unix time (seconds) of the workload's zero, None where the file's times are
    relative. `tenant` [requests] indexes `tenants`; a file without tenants has the one called "default".
    `warnings` are whole lines for a person. The counts behind them are `out_of_order` (rows that came before
    an earlier arrival and were sorted in), `empty_outputs` (requests that returned nothing and were dropped)
    and `blank_rows`. `from_lengths`: the workload's prefixes follow from its sessions, lengths and `systems`.
    `assumed`: what a trace rests on that is drawn instead of recorded.
    """

    name: str
    format: str
    workload: Workload
    warnings: list[str] = field(default_factory=list)
    clock_start_s: float | None = None
    tenant: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    tenants: tuple[str, ...] = ("default",)
    out_of_order: int = 0
    empty_outputs: int = 0
    blank_rows: int = 0
    systems: SystemPrompts | None = None
    from_lengths: bool = False
    assumed: Assumed | None = None

    def __post_init__(self) -> None:
        if len(self.tenant) != len(self.workload):
            object.__setattr__(self, "tenant", np.zeros(len(self.workload), np.int8))

    def __len__(self) -> int:
        return len(self.workload)


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace of all the requests; ties keep the order of the traces."""
    if len(traces) == 1:
        return traces[0]
    starts = _common_clock(traces)
    first_s = min(starts) if starts else None
    parts = [t.workload for t in traces]
    arrival_s = _arrivals_s(parts, starts)
    in_order = bool((np.diff(arrival_s) >= 0).all())
    order = np.arange(len(arrival_s)) if in_order else np.argsort(arrival_s, kind="stable")
    rows = slice(None) if in_order else order
    slo_classes, slo_class = _one_list([(w.slo_classes, w.slo_class) for w in parts])
    tenants, tenant = _one_list([(t.tenants, t.tenant) for t in traces])
    columns = {
        name: np.concatenate([getattr(w, name) for w in parts])[rows]
        for name in ("prompt_tokens", "output_tokens", "priority")
    }
    return Trace(
        name=" + ".join(t.name for t in traces),
        format=" + ".join(dict.fromkeys(t.format for t in traces)),
        workload=Workload(
            arrival_s=arrival_s[rows],
            **columns,
            slo_class=slo_class[rows],
            slo_classes=slo_classes,
            prefixes=_prefixes(parts, order),
            sessions=_sessions(parts, order),
        ),
        warnings=_warnings(traces, overlaid=not starts),
        clock_start_s=first_s,
        tenant=tenant[rows],
        tenants=tenants,
        **{name: sum(getattr(t, name) for t in traces) for name in COUNTS},
    )


def _prefixes(parts: Sequence[Workload], order: NDArray[np.int64]) -> Prefixes | None:
    """What requests share within each part, in the largest unit into which all parts can be cut."""
    units = [part.prefixes.block_tokens for part in parts if part.prefixes is not None]
    if not units:
        return None
    unit, named = math.gcd(*units), 0
    counts, ids = [], []
    for part in parts:
        own = part.prefixes
        if own is None:
            counts.append(np.zeros(len(part), np.int64))
            continue
        pieces = own.block_tokens // unit
        counts.append(np.diff(own.offsets) * pieces)
        ids.append(named + (own.ids[:, None] * pieces + np.arange(pieces)).ravel())
        named += (int(own.ids.max(initial=-1)) + 1) * pieces
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return Prefixes(unit, offsets, np.concatenate(ids)).pick(order)


def _sessions(parts: Sequence[Workload], order: NDArray[np.int64]) -> Sessions | None:
    """The sessions of all parts, each part's apart from the others'."""
    if all(part.sessions is None for part in parts):
        return None
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    session, think_s = np.full(len(order), -1, np.int64), np.zeros(len(order))
    owners, befores = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    start = named = 0
    for part in parts:
        rows = place[start : start + len(part)]
        start += len(part)
        if (own := part.sessions) is None:
            continue
        session[rows] = np.where(own.session >= 0, own.session + named, -1)
        named += int(own.session.max(initial=-1)) + 1
        think_s[rows] = own.think_s
        owners.append(np.repeat(rows, np.diff(own.offsets)))
        befores.append(rows[own.before])
    owner = np.concatenate(owners)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(order)))])
    return Sessions(session, offsets, np.concatenate(befores)[np.argsort(owner, kind="stable")], think_s)


def _arrivals_s(parts: Sequence[Workload], starts: Sequence[float]) -> NDArray[np.float64]:
    """Everyone's arrivals since the first start; since the own one where the parts share no clock."""
    offset_s = [start - min(starts) for start in starts] if starts else [0.0] * len(parts)
    return np.concatenate([part.arrival_s + offset for part, offset in zip(parts, offset_s, strict=True)])


def _warnings(traces: Sequence[Trace], overlaid: bool) -> list[str]:
    warnings = [warning for t in traces for warning in t.warnings]
    if overlaid and any(t.clock_start_s is not None for t in traces):
        warnings.append(f"{len(traces)} traces without a clock in common; overlaid, each from its own start")
    return warnings + ([] if overlaid else _seams(traces))


def _seams(traces: Sequence[Trace]) -> list[str]:
    """Where files on one clock go back, overlap or leave a gap, a line for the first of each kind."""
    spans = [
        (t.clock_start_s or 0.0, (t.clock_start_s or 0.0) + float(t.workload.arrival_s[-1]), t)
        for t in traces
    ]
    found = {}
    for (start_s, _, one), (next_s, _, other) in pairwise(spans):
        if next_s < start_s - SEAM_S:
            found["back"] = f"{other.name} begins {duration_text(start_s - next_s)} before {one.name}, which"
            found["back"] += " was given before it; both are laid on their clock"
            break
    covered_s, last = -math.inf, None
    for start_s, end_s, one in sorted(spans, key=lambda span: span[0]):
        if last is not None:
            apart_s, beside = start_s - covered_s, f"{last.name} ends"
            if apart_s < -SEAM_S:
                text = f"{one.name} begins {duration_text(-apart_s)} before {beside}; overlaps add up"
                found.setdefault("overlap", text)
            elif apart_s > max(SEAM_S, SILENCE / max(last.workload.rate_rps, 1e-9)):
                text = f"{one.name} begins {duration_text(apart_s)} after {beside}; the gap counts as idle"
                found.setdefault("gap", text)
        if end_s > covered_s:
            covered_s, last = end_s, one
    return list(found.values())


def _one_list(
    labelled: Sequence[tuple[tuple[str, ...], NDArray[np.int64]]],
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """One list of names in place of several, and every index as one into it."""
    all_names = tuple(dict.fromkeys(name for names, _ in labelled for name in names))
    if all(names == all_names for names, _ in labelled):
        return all_names, np.concatenate([index for _, index in labelled])
    places = [np.array([all_names.index(name) for name in names])[index] for names, index in labelled]
    return all_names, np.concatenate(places)


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
