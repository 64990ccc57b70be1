"""The plots of a plan, made from its document: report and console draw the same ones.

Titles, captions and legends stand here alone. The document has them as `figures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controlplane.figures import counted, duration_text
from tokenfleet.planning.plan_file import Costed, Counted, PlanFile, ScalingRule, Stretch
from tokenfleet.report.answer import cliff_text, scaling_text
from tokenfleet.report.figures import Axis, Figure, Mark, Series
from tokenfleet.report.tables import asked_text, share_text, usd_text

LEAST_LATE = 1e-4  # the smallest share of requests that is drawn


def plan_figures(plan: PlanFile) -> Iterator[Figure]:
    """The plots that this plan has the numbers for."""
    curves, target = plan.curves, plan.attainment.target
    if len(curves.rate_rps) > 1:
        yield _load(plan)
    if len({s.workers for s in plan.schedule}) > 1:
        yield _schedule(plan)
    if len(plan.classes) < 2:  # others have a target each
        if curves.ttft_cdf:
            yield _tail("ttft", "Time to first token", curves.ttft_cdf, plan.slo.ttft_s, target)
        if curves.tpot_cdf:
            yield _tail("tpot", "Time per output token", curves.tpot_cdf, plan.slo.tpot_s, target)
    if curves.attainment_by_workers:
        yield _by_workers(plan)
    if plan.reuse is not None:
        yield _more_sessions(plan)
    if any(one.workers for one in curves.cost_by_slo):
        yield _by_target(plan)
    if plan.demand_line is not None and plan.demand_line.points:
        yield _by_rate(plan, plan.demand_line)


def _time(plan: PlanFile) -> tuple[str, float]:
    return ("min", 60.0) if plan.inputs.duration_s < 4 * 3600 else ("h", 3600.0)


def _load(plan: PlanFile) -> Figure:
    unit, per = _time(plan)
    points = [(t / per, rate) for t, rate in plan.curves.rate_rps]
    series = Series("", "filled steps", [*points, (plan.inputs.duration_s / per, points[-1][1])])
    window, phases = plan.binding_window_s, plan.inputs.phases
    caption = f"Requests a second over the trace, {plan.inputs.rate_rps or 0.0:.3g} on average."
    marks: list[Mark] = [("x", phase.start_s / per, "") for phase in phases[1:]]
    if marks:
        caption += f" Lines mark the change points between {len(phases)} traffic phases."
    if window is not None:
        marks.append(("x", window[0] / per, "bottleneck worst here"))
    return Figure(
        "rate",
        "Load",
        caption,
        Axis(f"time ({unit})", 0.0, plan.inputs.duration_s / per or 1.0),
        Axis("req/s", 0.0),
        [series],
        (f"from ({unit})", "req/s"),
        [(f"{t:.4g}", f"{rate:.3g}") for t, rate in points],
        True,
        marks,
    )


def _schedule(plan: PlanFile) -> Figure:
    """Workers over time; with a cold start also those that are paid for, and when to order them."""
    unit, per = _time(plan)
    detail, paid = plan.schedule_detail, plan.paid
    saved = paid.saved_share if paid else detail.saved_share if detail else None
    caption = "The fewest workers of each interval."
    if saved:
        caption += f" They save {share_text(saved)} of the constant fleet's worker-hours."
    if paid:
        caption += (
            f" Each worker is ordered and paid for {duration_text(paid.cold_start_s)} before it serves."
        )
    columns: tuple[str, ...] = (f"from ({unit})", f"to ({unit})", "workers", "GPUs", "fleet")
    rows: list[tuple[str, ...]] = [
        (f"{s.start_s / per:.4g}", f"{s.end_s / per:.4g}", *_fleet_of(s)) for s in plan.schedule
    ]
    series = [Series("serving", "steps", _steps(plan.schedule, per), "b")]
    if paid and paid.stretches:
        series.insert(0, Series("paid for", "steps", _steps(paid.stretches, per), "c"))
        columns += (f"ordered at ({unit})",)
        ordered = (
            ", ".join(
                f"{order.workers} at {order.order_s / per:.4g}"
                for order in paid.orders
                if s.start_s <= order.ready_s < s.end_s
            )
            for s in plan.schedule
        )
        rows = [(*row, text or "-") for row, text in zip(rows, ordered, strict=True)]
    return Figure(
        "schedule",
        "Scaling schedule",
        caption,
        Axis(f"time ({unit})", 0.0, plan.schedule[-1].end_s / per),
        Axis("workers", 0.0, whole=True),
        series,
        columns,
        rows,
        True,
    )


def _steps(stretches: Sequence[Stretch], per: float) -> list[tuple[float, float]]:
    last = stretches[-1]
    steps = [(s.start_s / per, float(s.workers)) for s in stretches]
    return [*steps, (last.end_s / per, float(last.workers))]


def _fleet_of(stretch: Stretch) -> tuple[str, str, str]:
    gpus = "-" if stretch.gpus is None else str(stretch.gpus)
    return str(stretch.workers), gpus, stretch.fleet or "-"


def _tail(id_: str, title: str, cdf: Sequence[Sequence[float]], limit_s: float, target: float) -> Figure:
    """The share of requests slower than x, on a logarithmic scale: the tail is where targets are missed."""
    late = [(s, max(1.0 - share, LEAST_LATE) * 100) for s, share in cdf]
    missed = next((1.0 - share for s, share in reversed(cdf) if s <= limit_s), 1.0)
    at = {round(share, 4): s for s, share in cdf}
    return Figure(
        id_,
        title,
        f"On the recorded trace {share_text(max(missed, 0.0))} of requests are slower than the limit."
        f" Together both limits may miss {asked_text(1.0 - target)}.",
        Axis("seconds", 0.0, 1.08 * max(limit_s, cdf[-1][0])),
        Axis("slower than x (%)", 100 * LEAST_LATE, 100.0, log=True),
        [Series("requests slower than x", "line", late)],
        ("quantile", "latency"),
        [(f"p{share * 100:g}", duration_text(s)) for share, s in at.items() if share >= 0.5],
        marks=[("x", limit_s, f"limit {duration_text(limit_s)}")],
    )


def _by_workers(plan: PlanFile) -> Figure:
    rows, target = plan.curves.attainment_by_workers, plan.attainment.target
    least = min(target, *(v for r in rows for v in (r.low, r.on_trace) if v is not None))
    floor = max(least, 1.0 - 12.0 * (1.0 - target), 0.0)
    sure = plan.attainment.confidence
    return Figure(
        "attainment",
        "SLO attainment by workers",
        "The answer is the smallest count whose lower bound reaches the target.",
        Axis("workers", rows[0].workers - 0.5, rows[-1].workers + 0.5, whole=True),
        Axis("attainment (%)", 100.0 * floor, 100.0 + (1.0 - floor) * 4),
        [
            Series(
                f"bounds at {asked_text(sure)} confidence" if sure else "bounds",
                "band",
                list(_shares(rows, floor, "low", "high")),
            ),
            Series("expected", "dots", list(_shares(rows, floor, "expected"))),
            Series("recorded trace", "open dots", list(_shares(rows, floor, "on_trace")), "c"),
        ],
        ("workers", "expected", "lower bound", "upper bound", "recorded trace"),
        [(str(r.workers), *map(_share_or_dash, (r.expected, r.low, r.high, r.on_trace))) for r in rows],
        marks=[("y", 100 * target, f"target {asked_text(target)}")],
    )


def _shares(rows: Sequence[Counted], floor: float, *names: str) -> Iterator[tuple[float, ...]]:
    """Workers and these shares, in percent, of the counts that have them, down to `floor`."""
    for row in rows:
        shares = [getattr(row, name) for name in names]
        if None not in shares and shares[-1] >= floor:
            yield (float(row.workers), *(100.0 * max(share, floor) for share in shares))


def _share_or_dash(share: float | None) -> str:
    return "-" if share is None else share_text(share)


def _more_sessions(plan: PlanFile) -> Figure:
    assert plan.reuse is not None
    tried, text = plan.reuse.cliff.tried, cliff_text(plan.reuse)
    return Figure(
        "cliff",
        "More sessions on this fleet",
        f"{text[:1].upper()}{text[1:]}.",
        Axis("times the trace's sessions"),
        Axis("%", 0.0, 101.0),
        [
            Series("SLO attainment", "line", [(g.scale, 100 * g.attainment) for g in tried]),
            Series("prefix hit rate", "line", [(g.scale, 100 * g.hit_rate) for g in tried], "b"),
        ],
        ("sessions", "prefix hit rate", "SLO attainment"),
        [(f"x {g.scale:.3g}", share_text(g.hit_rate), share_text(g.attainment)) for g in tried],
    )


def _by_target(plan: PlanFile) -> Figure:
    rows = plan.curves.cost_by_slo
    possible = [(float(i), row) for i, row in enumerate(rows) if row.workers is not None]
    priced = all(row.usd_per_hour is not None for _, row in possible)
    limits = [f"{duration_text(row.ttft_s)}, {duration_text(row.tpot_s)}" for row in rows]
    judged = {"hardest resampled traces": "judged on the recorded trace and the hardest resampled traces"}
    on = judged.get(rows[0].on, "sized on the recorded trace alone")
    bars = Series(
        "",
        "bars",
        [(i, float((row.usd_per_hour if priced else row.gpus) or 0.0)) for i, row in possible],
        labels=[counted(row.workers or 0, "worker") for _, row in possible],
        tones=["b" if row.scale == 1.0 else "a" for _, row in possible],
    )
    return Figure(
        "cost",
        "Cost by target",
        f"Fleets of the same worker types, {on}. The other colour marks the limits that were asked for.",
        Axis("TTFT and TPOT limits", -0.5, len(rows) - 0.5, list(enumerate(limits))),
        Axis("$/h" if priced else "GPUs", 0.0),
        [bars],
        ("limits", "workers", "GPUs", "cost"),
        [_target_row(limit, row) for limit, row in zip(limits, rows, strict=True)],
        True,
    )


def _target_row(limits: str, row: Costed) -> tuple[str, ...]:
    if row.workers is None:
        return (limits, "not possible", "-", "-")
    return (limits, str(row.workers), str(row.gpus), usd_text(row.usd_per_hour))


def _by_rate(plan: PlanFile, line: ScalingRule) -> Figure:
    """The scaling rule, and the simulated points that it was fitted to."""
    ends = (0.0, max(rate for rate, _ in line.points))
    rule = scaling_text(plan)
    return Figure(
        "workers",
        "Workers by rate",
        f"The scaling rule: {rule}.",
        Axis("req/s", 0.0),
        Axis("workers", 0.0),
        [
            Series("rule", "line", [(x, line.workers_per_rps * x + line.intercept) for x in ends], "b"),
            Series("simulated", "dots", [(rate, workers) for rate, workers in line.points]),
        ],
        ("req/s", "workers"),
        [(f"{rate:.3g}", f"{workers:.4g}") for rate, workers in line.points],
    )
