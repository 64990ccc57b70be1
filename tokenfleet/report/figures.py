"""The report's plots as Plotly specifications (plain dictionaries), each with its caption and its table.

A colour that begins with `--` is one of the page's own, looked up when the plot is drawn; so one
specification serves light and dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenfleet.planning.comparisons import Costed
from tokenfleet.planning.result import Latency, Plan
from tokenfleet.planning.reuse import Reuse
from tokenfleet.report.tables import cliff_text, share_text, usd_text, workers_text
from tokenfleet.texts import duration_text

TAIL = 1e-4  # the smallest share of requests that is drawn
TAIL_POINTS = 80

Spec = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One plot: where it goes, what it shows in words, its specification and its numbers as a table."""

    id: str
    title: str
    caption: str
    spec: Spec
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    wide: bool = False


def figures(plan: Plan) -> Iterator[Figure]:
    """The plots that this plan has the numbers for."""
    yield rate_figure(plan)
    if plan.best is None:
        return
    slo, target = plan.question.slo, plan.question.attainment
    if len(plan.inputs.classes) < 2:  # others have a target each
        yield tail_figure("ttft", "Time to first token", plan.best.ttft, slo.ttft_s, target)
        yield tail_figure("tpot", "Time per output token", plan.best.tpot, slo.tpot_s, target)
    if plan.on_trace or plan.sure:
        yield attainment_figure(plan)
    if plan.reuse is not None:
        yield cliff_figure(plan.reuse)
    if plan.costed:
        yield cost_figure(plan)


def rate_figure(plan: Plan) -> Figure:
    """Arrivals over time, with the schedule of workers where there is one."""
    start_s, rate = zip(*plan.inputs.rate_curve, strict=True)
    unit, per = ("min", 60.0) if plan.inputs.duration_s < 4 * 3600 else ("h", 3600.0)
    data: list[Spec] = [
        {
            "x": [round(t / per, 4) for t in start_s],
            "y": [float(f"{r:.4g}") for r in rate],
            "name": "requests a second",
            "line": {"color": "--blue", "width": 1.5, "shape": "hv"},
            "fill": "tozeroy",
            "fillcolor": "--band",
        }
    ]
    layout: Spec = {
        "xaxis": {"title": {"text": f"time ({unit})"}},
        "yaxis": {"title": {"text": "requests a second"}, "rangemode": "tozero"},
    }
    rows: list[tuple[str, ...]] = []
    caption = "Requests a second over the trace."
    if plan.schedule is not None and plan.best is not None:
        stretches = plan.schedule.stretches
        x = [t / per for s in stretches for t in (s.start_s, s.end_s)]
        y = [s.workers for s in stretches for _ in range(2)]
        data.append(
            {
                "x": x,
                "y": y,
                "name": "workers",
                "yaxis": "y2",
                "line": {"color": "--orange", "width": 3},
                "mode": "lines",
            }
        )
        layout["yaxis2"] = {
            "title": {"text": "workers"},
            "overlaying": "y",
            "side": "right",
            "range": [0, max(y) * 1.15],
            "showgrid": False,
            "tickformat": "d",
            "dtick": max(1, max(y) // 5),
        }
        rows = [(f"{s.start_s:.0f}", f"{s.end_s:.0f}", str(s.workers)) for s in stretches]
        caption += " The orange line is the fewest workers for each stretch"
        saved = plan.schedule.saved_share
        caption += (
            f"; it saves {share_text(saved)} of the constant fleet's worker-hours." if saved > 0 else "."
        )
    return Figure(
        "rate",
        "Load and schedule",
        caption,
        {"data": data, "layout": layout},
        ("from (s)", "to (s)", "workers"),
        rows,
        True,
    )


def tail_figure(id_: str, title: str, latency: Latency, slo_s: float, target: float) -> Figure:
    """Share of requests slower than x, on a logarithmic scale: the tail is where targets are missed."""
    shares = np.geomspace(1.0, TAIL, TAIL_POINTS)
    x = [latency.at(1.0 - float(s)) for s in shares]
    data: list[Spec] = [
        {
            "x": [float(f"{v:.5g}") for v in x],
            "y": [float(f"{s * 100:.4g}") for s in shares],
            "name": "requests slower than x",
            "line": {"color": "--blue", "width": 2.5},
        },
        {
            "x": [slo_s, slo_s],
            "y": [100.0, TAIL * 100],
            "name": f"target {duration_text(slo_s)}",
            "mode": "lines",
            "line": {"color": "--orange", "width": 2, "dash": "dash"},
        },
    ]
    layout: Spec = {
        "xaxis": {"title": {"text": "seconds"}, "range": [0, 1.08 * max(slo_s, *x)]},
        "yaxis": {
            "title": {"text": "slower than x (%)"},
            "type": "log",
            "range": [np.log10(TAIL * 100), 2],
            "tickvals": [100, 10, 1, 0.1, 0.01],
            "ticktext": ["100", "10", "1", "0.1", "0.01"],
        },
    }
    late = float(np.mean(latency.sorted_s > slo_s)) if len(latency.sorted_s) else 0.0
    caption = (
        f"On the trace as it is {share_text(late)} of the requests are slower than the target;"
        f" both targets together may miss {share_text(1.0 - target)}."
    )
    rows = [(f"p{q * 100:g}", duration_text(latency.at(q))) for q in (0.5, 0.9, 0.95, 0.99, 0.999)]
    return Figure(id_, title, caption, {"data": data, "layout": layout}, ("quantile", "latency"), rows)


def attainment_figure(plan: Plan) -> Figure:
    """Attainment against workers: on the trace, and the band of what other replicates would give."""
    target = plan.question.attainment
    workers = sorted({*plan.sure, *plan.on_trace})
    lowest = min([e.low for e in plan.sure.values()] + list(plan.on_trace.values()))
    floor = max(lowest, 1.0 - 12.0 * (1.0 - target))
    layout: Spec = {
        "xaxis": {"title": {"text": "workers"}, "tickformat": "d", "dtick": max(1, len(workers) // 8)},
        "yaxis": {"title": {"text": "attainment (%)"}, "range": [floor * 100, 100.0 + (1.0 - floor) * 4]},
    }
    ends = [workers[0], workers[-1]]
    data = [
        *_attainment_lines(plan),
        _line(ends, [target, target], "target", color="--orange", width=2, dash="dash"),
    ]
    caption = (
        f"The answer is the smallest count whose lower bound, at confidence {plan.question.confidence:g},"
        " reaches the target. Dotted: the trace as it is."
    )
    return Figure(
        "attainment",
        "Attainment against workers",
        caption,
        {"data": data, "layout": layout},
        ("workers", "trace", "expected", "bounds"),
        [_attainment_row(plan, n) for n in workers],
    )


def _attainment_lines(plan: Plan) -> list[Spec]:
    sure, banded, counts = plan.sure, sorted(plan.sure), sorted(plan.on_trace)
    lines: list[Spec] = []
    if banded:
        high, low = [sure[n].high for n in banded], [sure[n].low for n in banded]
        expected = [sure[n].expected for n in banded]
        band: Spec = {"color": "--band", "width": 0}
        lines += [
            _line(banded, high, "high", **band, showlegend=False),
            _line(banded, low, "bounds", **band, fill="tonexty", fillcolor="--band"),
            _line(banded, expected, "expected", color="--blue", width=2.5, mode="lines+markers"),
        ]
    shares = [plan.on_trace[n] for n in counts]
    dotted: Spec = {"color": "--soft", "width": 1.5, "mode": "lines+markers", "dash": "dot"}
    return [*lines, _line(counts, shares, "trace", **dotted)]


def _attainment_row(plan: Plan, workers: int) -> tuple[str, ...]:
    on_trace = share_text(plan.on_trace[workers]) if workers in plan.on_trace else "-"
    sure = plan.sure.get(workers)
    if sure is None:
        return (str(workers), on_trace, "-", "-")
    bounds = f"{share_text(sure.low)} to {share_text(sure.high)}"
    return (str(workers), on_trace, share_text(sure.expected), bounds)


def cliff_figure(reuse: Reuse) -> Figure:
    """Hits and attainment of the fleet as sessions grow."""
    tried = reuse.cliff.tried
    scales = [round(g.scale, 3) for g in tried]
    data = [
        _line(scales, [g.attainment for g in tried], "within both targets", color="--blue", width=3.0),
        _line(scales, [g.hit_rate for g in tried], "prefix hits", color="--orange", width=3.0),
    ]
    layout: Spec = {
        "xaxis": {"title": {"text": "times the trace's sessions"}},
        "yaxis": {"title": {"text": "%"}, "range": [0, 101]},
    }
    return Figure(
        "cliff",
        "More sessions on this fleet",
        f"{cliff_text(reuse)[:1].upper()}{cliff_text(reuse)[1:]}.",
        {"data": data, "layout": layout},
        ("sessions", "prefix hits", "within both targets"),
        [(f"x {g.scale:.3g}", share_text(g.hit_rate), share_text(g.attainment)) for g in tried],
    )


def cost_figure(plan: Plan) -> Figure:
    """The fleet's cost as both targets are tightened or eased."""
    possible = [(c, c.fleet) for c in plan.costed if c.fleet is not None]
    priced = all(fleet.usd_per_hour is not None for _, fleet in possible)
    unit = "USD an hour" if priced else "GPUs"
    label = {c.scale: f"{duration_text(c.slo.ttft_s)}<br>{duration_text(c.slo.tpot_s)}" for c in plan.costed}
    data: list[Spec] = [
        {
            "type": "bar",
            "x": [label[c.scale] for c, _ in possible],
            "y": [round(f.usd_per_hour or 0.0, 2) if priced else f.gpus for _, f in possible],
            "text": [workers_text(f.workers) for _, f in possible],
            "textposition": "outside",
            "textangle": 0,
            "cliponaxis": False,
            "marker": {"color": ["--orange" if c.scale == 1.0 else "--blue" for c, _ in possible]},
            "name": unit,
        }
    ]
    layout: Spec = {
        "xaxis": {"title": {"text": "TTFT and TPOT targets"}, "type": "category"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "showlegend": False,
    }
    caption = "Fleets of the same kind, sized on the trace as it is; orange is what was asked."
    return Figure(
        "cost",
        "Cost against the targets",
        caption,
        {"data": data, "layout": layout},
        ("TTFT", "TPOT", "fleet", "cost"),
        [_cost_row(costed) for costed in plan.costed],
    )


def _cost_row(costed: Costed) -> tuple[str, ...]:
    targets = (duration_text(costed.slo.ttft_s), duration_text(costed.slo.tpot_s))
    if costed.fleet is None:
        return (*targets, "not possible", "-")
    return (*targets, costed.fleet.label, usd_text(costed.fleet.usd_per_hour))


def _line(
    x: Sequence[float],
    share: Sequence[float],
    name: str,
    *,
    color: str,
    width: float,
    dash: str = "solid",
    **more: Any,
) -> Spec:
    y = [float(f"{s * 100:.6g}") for s in share]
    return {
        "x": list(x),
        "y": y,
        "name": name,
        "mode": "lines",
        "line": {"color": color, "width": width, "dash": dash},
    } | more
