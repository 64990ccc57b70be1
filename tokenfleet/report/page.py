"""A plan as one self-contained HTML file: text, tables, plots, and Plotly inside.

It is readable on a phone, in light and dark, and without scripts: every plot's numbers stand in a table too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from controlplane.worker_type import WorkerType
from tokenfleet import __version__
from tokenfleet.planning.result import Candidate, Plan
from tokenfleet.report.figures import Figure, figures
from tokenfleet.report.tables import (
    CLASS_COLUMNS,
    baseline_counts,
    class_rows,
    expected_text,
    facts,
    gpus_text,
    headline,
    least_text,
    session_text,
    target_text,
    usd_text,
)

PAGE = Path(__file__).with_name("report_page.html")


def plan_report(plan: Plan) -> str:
    """The report's HTML text."""
    asked = f"{target_text(plan)}{session_text(plan.question)}"
    return page(
        f"Tokenfleet plan: {plan.inputs.trace}",
        headline(plan),
        f"{plan.inputs.requests:,} requests: {asked}.",
        f"{_tiles(plan)}\n{_facts(plan)}",
        list(figures(plan)),
        _tables(plan),
        f"Made by tokenfleet {__version__}, seed {plan.question.seed}. Latencies come from simulation"
        " with the profiles named above, not from a running fleet.",
    )


def page(
    title: str,
    subtitle: str,
    subline: str,
    opening: str,
    drawn: Sequence[Figure],
    tables: Iterable[str],
    footer: str,
) -> str:
    """A whole page; `opening` and `tables` are HTML, the rest is plain text."""
    from plotly.offline import get_plotlyjs

    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        headline=escape(subtitle),
        subline=escape(subline),
        opening=opening,
        figures="\n".join(_figure(figure) for figure in drawn),
        tables="\n".join(tables),
        footer=escape(footer),
        plotly=get_plotlyjs(),
        # A "</script>" in a trace's name must not end the script it stands in.
        specs=json.dumps({f.id: f.spec for f in drawn}).replace("<", "\\u003c"),
    )


def _tiles(plan: Plan) -> str:
    best = plan.best
    if best is None:
        return ""
    tiles = [
        ("workers", str(best.fleet.workers)),
        ("GPUs", str(best.fleet.gpus)),
        ("cost", usd_text(best.fleet.usd_per_hour)),
        ("expected attainment", expected_text(best)),
        (f"at least, at confidence {plan.question.confidence:g}", least_text(best)),
    ]
    items = "".join(
        f"<li><b>{escape(value)}</b> <span class=soft>{escape(name)}</span></li>" for name, value in tiles
    )
    return f'<ul class="tiles">{items}</ul>'


def _facts(plan: Plan) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(plan))
    tone = "good" if plan.feasible else "bad"
    text = "Why this fleet" if plan.feasible else "Why no fleet"
    return f'<section><h2 class="{tone}">{text}</h2><dl>{rows}</dl></section>'


def _figure(figure: Figure) -> str:
    wide = ' class="wide"' if figure.wide else ""
    table = ""
    if figure.rows:
        table = f"<details><summary>Numbers</summary>{_table(figure.columns, figure.rows)}</details>"
    text = escape(f"{figure.title}: {figure.caption}")
    return (
        f"<figure{wide}><h2>{escape(figure.title)}</h2>"
        f'<div class="plot" id="{figure.id}" role="img" aria-label="{text}"></div>'
        f"<figcaption>{escape(figure.caption)}{table}</figcaption></figure>"
    )


def _tables(plan: Plan) -> Iterable[str]:
    if plan.classes:
        yield section("Classes", CLASS_COLUMNS, list(class_rows(plan)))
    if plan.alternatives:
        columns = ("fleet", "GPUs", "cost", "expected", "at least", "")
        yield section("Alternatives", columns, [_alternative(c) for c in plan.alternatives])
    if plan.baselines and plan.best:
        enough = [n for n, share in plan.on_trace.items() if share >= plan.question.attainment]
        policies = [(plan.question.policy, str(min(enough))), *baseline_counts(plan)]
        yield section("Policies on the trace as it is", ("policy", "workers"), policies)
    if plan.passed_over:
        passed = [(p.worker_type.name, p.reason) for p in plan.passed_over]
        yield section("Passed over", ("worker", "why"), passed)
    yield section(
        "What this rests on",
        ("worker", "profile", "of", "mean error", "price of a GPU-hour"),
        [_basis(worker_type) for worker_type in plan.worker_types],
    )
    if plan.inputs.warnings:
        lines = "".join(f"<li>{escape(w)}</li>" for w in plan.inputs.warnings)
        yield f"<section><h2>Warnings</h2><ul>{lines}</ul></section>"


def _alternative(candidate: Candidate) -> tuple[str, ...]:
    fleet = candidate.fleet
    cost = usd_text(fleet.usd_per_hour)
    shares = (expected_text(candidate), least_text(candidate))
    return (fleet.label, gpus_text(fleet.gpus), cost, *shares, candidate.note)


def _basis(worker_type: WorkerType) -> tuple[str, ...]:
    """A type of worker, its profile and its price."""
    source, usd = worker_type.profile.source, worker_type.usd_per_gpu_h
    return (
        worker_type.name,
        f"{source.kind}: {source.what}",
        str(source.date),
        f"{worker_type.profile.residuals.mean_relative:.1%}",
        "not known" if usd is None else f"${usd:.2f} ({worker_type.priced})",
    )


def section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under a title, as HTML."""
    return f"<section><h2>{escape(title)}</h2>{_table(columns, rows)}</section>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'
