"""The views of a portfolio's plan: JSON, tables for the terminal, and a page with GPUs over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, pairwise
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from controlplane.figures import counted
from tokenfleet.planning.plan_file import Shown
from tokenfleet.portfolios.offers import GpuPurchase
from tokenfleet.portfolios.plan import PortfolioPlan, Row, Use
from tokenfleet.report.answer import GAP, OPENS, ages, verdict_text
from tokenfleet.report.figures import TONES, Axis, Figure, Series
from tokenfleet.report.page import lines_section, page, section
from tokenfleet.report.plan_json import rounded
from tokenfleet.report.tables import fleet_text, gpu_text, lines_table, plan_table, share_text, usd_text
from tokenfleet.version import VERSION

SCHEMA = "tokenfleet.portfolio-plan/1"
_MODELS = ["model", "fleet", "constant size", "on schedule", "lower bound", "on other GPUs"]
_LIMITS = ["limit", "maximum", "peak use", "gain if raised"]


def portfolio_json(plan: PortfolioPlan) -> dict[str, Any]:
    """The JSON of `tokenfleet.portfolio-plan/1`."""
    return {
        "schema": SCHEMA,
        "says": [list(line) for line in says(plan)],
        "tables": [shown.model_dump() for shown in tables(plan)],
        "figures": [rounded(asdict(_over_time(plan)))],
        "usd_per_hour": plan.usd_per_h,
        "unlimited_usd_per_hour": plan.unlimited_usd_per_h,
        "constant_usd_per_hour": plan.constant_usd_per_h,
        "free_parts_usd_per_hour": plan.free_usd_per_h,
        "models": [
            {
                "name": row.name,
                **_kind(row.kind),
                "on_demand_workers": row.on_demand_workers,
                "may_share_with": list(row.beside),
                "zone": row.zone,
                "adapters": [{"name": name, "share": share} for name, share in row.adapters.items()],
                "adapters_usd_per_hour": row.adapters_usd_per_h,
                "usd_per_hour": row.usd_per_h,
                "constant_usd_per_hour": row.constant_usd_per_h,
                "others": [_kind(kind) | _cost(found) for kind, found in row.others.items()],
                "plan": row.plan.document,
            }
            for row in plan.rows
        ],
        "limits": [
            {
                "name": use.name,
                "most": use.most,
                "peak": use.peak,
                "more": use.more,
                "saves_usd_per_hour": use.saves_usd_per_h,
            }
            for use in plan.uses
        ],
        "gpus": [
            {"start_s": start_s, "end_s": end_s}
            | {gpu: int(count) for gpu, count in zip(plan.gpu_types, counts, strict=True)}
            for start_s, end_s, counts in zip(plan.edges_s[:-1], plan.edges_s[1:], plan.gpus, strict=True)
        ],
        "warnings": list(plan.warnings),
    }


def _kind(kind: GpuPurchase) -> dict[str, Any]:
    return {"gpu": kind.gpu, "spot": kind.is_spot, "workers_per_gpu": kind.workers_per_gpu}


def _cost(found: float | str) -> dict[str, Any]:
    usd, reason = (None, found) if isinstance(found, str) else (found, None)
    return {"usd_per_hour": usd, "reason": reason}


def headline(plan: PortfolioPlan) -> str:
    """The verdict in one line."""
    return verdict_text(_verdict(plan))


def _verdict(plan: PortfolioPlan) -> tuple[str, str]:
    most = ", ".join(
        f"{int(count)} {gpu_text(gpu)}"
        for gpu, count in zip(plan.gpu_types, plan.gpus.max(axis=0), strict=True)
        if count
    )
    meet = "meet their targets" if len(plan.rows) > 1 else "meets its targets"
    models = counted(len(plan.rows), "model")
    figures = (models, usd_text(plan.usd_per_h), f"at peak {most}", f"{meet} within the limits")
    return "Recommended fleets", GAP.join(figures)


def says(plan: PortfolioPlan) -> list[tuple[str, str]]:
    """(topic, text) lines that terminal, report and console print, the verdict first."""
    profiles = [profile for row in plan.rows for profile in row.plan.inputs.profiles]
    return [_verdict(plan), *_of_adapters(plan), *_costs(plan), *_shared(plan), ("Note", ages(profiles))]


def tables(plan: PortfolioPlan) -> Iterator[Shown]:
    """A row for each model, and a row for each limit."""
    yield Shown(title="Models", columns=_MODELS, rows=[_model(row) for row in plan.rows])
    if plan.uses:
        yield Shown(title="Limits", columns=_LIMITS, rows=[_limit(use) for use in plan.uses])


def portfolio_tables(plan: PortfolioPlan) -> Iterator[RenderableType]:
    """The lines, the tables, and the note, as `plan` prints them."""
    *lines, (topic, note) = says(plan)
    yield lines_table(lines, OPENS, "bold green")
    for shown in tables(plan):
        yield Text("")
        yield plan_table(shown)
    yield Text(f"\n{topic}: {note}", style="dim")


def _model(row: Row) -> list[str]:
    low = row.plan.attainment.low
    others = ", ".join(
        f"{kind}: {usd_text(found) if isinstance(found, float) else 'no fleet'}"
        for kind, found in row.others.items()
    )
    fleet = fleet_text(row.plan.fleet) + _on_spot(row)
    if row.kind.workers_per_gpu > 1:
        fleet += f", each 1/{row.kind.workers_per_gpu} of a GPU"
    return [
        row.name,
        fleet + (f", {row.zone}" if row.zone else ""),
        usd_text(row.constant_usd_per_h),
        usd_text(row.usd_per_h),
        "-" if low is None else share_text(low),
        others or "-",
    ]


def _on_spot(row: Row) -> str:
    on_demand = row.on_demand_workers
    if row.kind.is_spot and on_demand:
        return f", {on_demand} on demand, {row.plan.workers - on_demand} on spot"
    return " on spot" * row.kind.is_spot


def _limit(use: Use) -> list[str]:
    gain = "a higher limit saves nothing"
    if use.more is not None and use.saves_usd_per_h is not None:
        gain = f"{use.more:.4g} more saves {usd_text(use.saves_usd_per_h)}"
    return [use.name, f"{use.most:g}", f"{use.peak:.4g}", gain]


def _of_adapters(plan: PortfolioPlan) -> Iterator[tuple[str, str]]:
    for row in plan.rows:
        if row.adapters:
            shares = ", ".join(f"{name} {share_text(share)}" for name, share in row.adapters.items())
            adds = "" if row.adapters_usd_per_h is None else f"; they add {usd_text(row.adapters_usd_per_h)}"
            yield "Adapters", f"share of the requests of {row.name}: {shares}{adds}"


def _costs(plan: PortfolioPlan) -> Iterator[tuple[str, str]]:
    """The cost without limits, and that of fleets which follow no schedule."""
    now = usd_text(plan.usd_per_h)
    if plan.uses:
        without = usd_text(plan.unlimited_usd_per_h)
        yield "Without limits", "the fleets cost the same" if without == now else f"the fleets cost {without}"
    if plan.constant_usd_per_h is None:
        yield "Constant size", "exceeds the limits; only fleets that follow their schedules fit"
    else:
        constant = usd_text(plan.constant_usd_per_h)
        yield "Constant size", "costs the same" if constant == now else f"costs {constant}"


def _shared(plan: PortfolioPlan) -> Iterator[tuple[str, str]]:
    """Which models may be on one GPU, and what is paid for parts of GPUs that no worker has."""
    told: set[str] = set()
    for row in plan.rows:
        if row.kind.workers_per_gpu > 1 and row.name not in told:
            told |= {row.name, *row.beside}
            at = str(row.kind) + (f", {row.zone}" if row.zone else "")
            names = ", ".join([row.name, *row.beside])
            yield "Shared GPUs", f"{at}: any {row.kind.workers_per_gpu} workers of {names} share one"
    if plan.free_usd_per_h > 0.005:
        yield "Unused parts", f"of shared GPUs cost {usd_text(plan.free_usd_per_h)}"


def portfolio_report(plan: PortfolioPlan) -> str:
    """The page: GPUs of each type over time, models, limits."""
    return page(
        "Tokenfleet portfolio",
        headline(plan),
        "",
        lines_section(says(plan)[1:]),
        [_over_time(plan)],
        [section(shown.title, shown.columns, shown.rows) for shown in tables(plan)],
        f"Made by tokenfleet {VERSION}. Latencies come from simulation, not from a running fleet.",
    )


def _over_time(plan: PortfolioPlan) -> Figure:
    unit, per = ("min", 60.0) if plan.edges_s[-1] - plan.edges_s[0] < 4 * 3600 else ("h", 3600.0)
    edges = [round(float(t) / per, 4) for t in plan.edges_s]
    used = [(gpu, counts) for gpu, counts in zip(plan.gpu_types, plan.gpus.T, strict=True) if counts.any()]
    series = [
        Series(gpu_text(gpu), "steps", list(zip(edges, map(float, [*counts, counts[-1]]), strict=True)), tone)
        for (gpu, counts), tone in zip(used, cycle(TONES))
    ]
    rows = [
        (f"{a:g}", f"{b:g}", *(str(counts[i]) for _, counts in used))
        for i, (a, b) in enumerate(pairwise(edges))
    ]
    return Figure(
        "gpus",
        "GPUs over time",
        "GPUs of each type that all models take together, on their schedules.",
        Axis(f"time ({unit})", edges[0], edges[-1]),
        Axis("GPUs", 0.0, whole=True),
        series,
        (f"from ({unit})", f"to ({unit})", *(gpu_text(gpu) for gpu, _ in used)),
        rows,
        True,
    )
