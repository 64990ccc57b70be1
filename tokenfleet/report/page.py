"""A plan as one self-contained HTML file: its lines, its plots and its tables.

It is readable on a phone, in light and dark, and without scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from tokenfleet.planning.plan_file import PlanFile, PlannedProfile
from tokenfleet.report.answer import GUIDE, OPENS, gpus_of, headline
from tokenfleet.report.figures import Figure, figure_html
from tokenfleet.report.plan_figures import plan_figures
from tokenfleet.report.tables import kind_text
from tokenfleet.version import VERSION

PAGE = Path(__file__).with_name("report_page.html")
COMMAND = re.compile("`((?:tokenfleet |--)[^`]+|serve|compare|fit)`")  # other backticks may be a name's own


def plan_report(plan: PlanFile) -> str:
    """The report's HTML text."""
    return page(
        f"Tokenfleet plan: {plan.inputs.trace}",
        headline(plan),
        "",
        lines_section(plan.says[1:]),
        list(plan_figures(plan)),
        _tables(plan),
        f"Made by tokenfleet {VERSION}, seed {plan.inputs.seed}, placement policy {plan.policy}."
        " Latencies come from simulation with these profiles, not from a running fleet. Every line and plot"
        f" is explained in {GUIDE}.",
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
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        headline=escape(subtitle),
        subline=escape(subline),
        opening=opening,
        figures="\n".join(figure_html(figure, _table(figure.columns, figure.rows)) for figure in drawn),
        tables="\n".join(tables),
        footer=escape(footer),
    )


def framed(whole: str) -> str:
    """A whole page within another, such as a notebook: a frame keeps each page's own style."""
    return f'<iframe srcdoc="{escape(whole)}" style="width:100%;height:900px;border:0"></iframe>'


def lines_section(lines: Iterable[Sequence[str]]) -> str:
    """The lines of an answer as HTML, in the blocks that the terminal has."""
    blocks: list[list[str]] = [[]]
    for topic, text in lines:
        if topic in OPENS and blocks[-1]:
            blocks.append([])
        blocks[-1].append(f"<dt>{escape(topic)}</dt><dd>{_coded(text)}</dd>")
    return "\n".join(f"<section><dl>{''.join(rows)}</dl></section>" for rows in blocks)


def _tables(plan: PlanFile) -> Iterator[str]:
    yield from (section(shown.title, shown.columns, shown.rows) for shown in plan.tables)
    columns = ("worker type", "profile", "date", "mean error", "price of a GPU-hour")
    yield section("Profiles and prices", columns, [_basis(plan, one) for one in plan.inputs.profiles])
    if warnings := [w for w in plan.inputs.warnings if w not in plan.inputs.ages]:
        lines = "".join(f"<li>{_coded(w)}</li>" for w in warnings)
        yield f"<section><h2>Warnings</h2><ul>{lines}</ul></section>"


def _basis(plan: PlanFile, one: PlannedProfile) -> tuple[str, ...]:
    """A worker type, its profile and its price."""
    error, usd = one.mean_relative_error, one.usd_per_gpu_h
    return (
        kind_text(one, gpus_of(plan)),
        f"{'predicted' if one.kind == 'composed' else one.kind}, {one.engine or 'engine not known'}",
        one.date,
        "-" if error is None else f"{100 * error:.1f} %",
        "not known" if usd is None else f"${usd:.2f} ({one.price})",
    )


def section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under a title, as HTML."""
    return f"<section><h2>{escape(title)}</h2>{_table(columns, rows)}</section>"


def _coded(text: str) -> str:
    """Text as HTML, with its commands and flags as code, where the terminal's text has backticks."""
    return COMMAND.sub(r"<code>\1</code>", escape(text))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{_coded(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'
