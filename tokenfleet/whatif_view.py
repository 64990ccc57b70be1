"""What-ifs for people: a table for the terminal, and a page with the plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from tokenfleet import __version__
from tokenfleet.report import page, section
from tokenfleet.report_figures import Figure
from tokenfleet.tables import share_text, usd_text
from tokenfleet.whatif import Scenario, marginal

_COLUMNS = ("fleet", "GPUs", "cost", "expected", "at least")


def whatif_table(found: Sequence[Scenario]) -> Table:
    """One row a scenario."""
    table = Table()
    for key in found[0].changes:
        table.add_column(key)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "fleet" else "right")
    for scenario in found:
        table.add_row(*scenario.changes.values(), *_cells(scenario))
    return table


def whatif_report(found: Sequence[Scenario]) -> str:
    """The page: what each scenario costs, and what a step along each axis costs."""
    keys = tuple(found[0].changes)
    rows = [(*s.changes.values(), *_cells(s)) for s in found]
    return page(
        "Tokenfleet what-if",
        f"{len(found)} scenarios over {', '.join(keys)}",
        "Each is a plan of its own, in the same worlds.",
        "",
        [_figure(found)],
        [section("Scenarios", (*keys, *_COLUMNS), rows), *_marginal(found)],
        f"Made by tokenfleet {__version__}. Latencies come from simulation, not from a running fleet.",
    )


def _cells(scenario: Scenario) -> tuple[str, ...]:
    plan = scenario.plan
    if plan is None or plan.best is None:
        why = scenario.error or (plan.reason if plan else "")
        return (f"none: {why}", "-", "-", "-", "-")
    fleet, sure = plan.best.fleet, plan.best.estimate
    return (
        fleet.label,
        str(fleet.gpus),
        usd_text(fleet.usd_per_hour),
        share_text(sure.expected if sure else plan.best.on_trace),
        share_text(sure.low) if sure else "-",
    )


def _figure(found: Sequence[Scenario]) -> Figure:
    bests = [(s, s.plan.best) for s in found if s.plan is not None and s.plan.best is not None]
    priced = all(best.fleet.usd_per_hour is not None for _, best in bests)
    unit = "USD an hour" if priced else "GPUs"
    heights = [best.fleet.usd_per_hour if priced else best.fleet.gpus for _, best in bests]
    bars = {
        "type": "bar",
        "x": ["<br>".join(f"{k} {v}" for k, v in s.changes.items()) for s, _ in bests],
        "y": heights,
        "text": [f"{best.fleet.gpus} GPUs" for _, best in bests],
        "textposition": "outside",
        "textangle": 0,
        "cliponaxis": False,
        "marker": {"color": "--blue"},
        "name": unit,
    }
    layout = {
        "xaxis": {"type": "category"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "showlegend": False,
    }
    caption = "The cheapest fleet of each scenario; scenarios without a bar have none."
    return Figure("cost", "Cost", caption, {"data": [bars], "layout": layout}, (), [], True)


def _marginal(found: Sequence[Scenario]) -> Iterable[str]:
    for key, steps in marginal(found).items():
        rows = [
            (
                f"{step['from']:g} to {step['to']:g}",
                ", ".join(f"{k} {v}" for k, v in step["held"].items()) or "-",
                f"{step['gpus']:+d}",
                "-" if step["usd_per_hour"] is None else f"{step['usd_per_hour']:+,.2f}",
            )
            for step in steps
        ]
        yield section(f"What a step in {key} costs", ("step", "held", "GPUs", "USD/h"), rows)
