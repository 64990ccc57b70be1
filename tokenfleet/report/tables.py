"""Tables for the terminal, and figures as a person reads them: dollars, shares, counts, names of GPUs."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from controlplane.figures import duration_text

if TYPE_CHECKING:
    from tokenfleet.planning.plan_file import FleetPart, PassedOver, PlannedPhase, PlannedProfile, Shown
    from tokenfleet.traces.shape import Phase

PHASES = ("Traffic phase from", "length", "req/s", "prompt tokens", "output tokens")

_FIGURE = re.compile(r"[-–?$]|\d[^x]*$")  # of a table: a number, or a dash where there is none
# `h100-sxm`, `l40s`, `gb200`: a name of letters and digits, and how the board is built.
_GPU = re.compile(r"([a-z]{1,3}\d+[a-z]?)(?:-(sxm|pcie|nvl|80gb|40gb))?")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    left: Container[str] = (),
) -> Table:
    """A table whose columns are flush right, except those in `left`."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def facts_table(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Topics and what there is to say about them, a line each."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def plan_table(shown: Shown, most: int | None = None) -> Table:
    """A table of a plan's answer, or its first rows; columns of figures are flush right."""
    cells = zip(*shown.rows, strict=True)
    words = [not all(_FIGURE.match(cell) for cell in column) for column in cells]
    left = [name for name, is_words in zip(shown.columns, words, strict=True) if is_words]
    return table(shown.columns, shown.rows[:most], left)


def lines_table(lines: Iterable[Sequence[str]], opens: Container[str], verdict: str) -> Table:
    """(topic, text) lines, the first in the style `verdict`; each topic in `opens` begins a block."""
    made = facts_table(())
    for i, (topic, text) in enumerate(lines):
        if topic in opens:
            made.add_row("", "")
        made.add_row(*(Text(cell, style="" if i else verdict) for cell in (topic, text)))
    return made


def phase_row(phase: Phase | PlannedPhase) -> tuple[str, ...]:
    """A phase of the traffic under `PHASES`."""
    return (
        duration_text(phase.start_s) if phase.start_s >= 1.0 else "0 s",
        duration_text(phase.end_s - phase.start_s),
        f"{phase.rate_rps:.3g}",
        f"{phase.prompt_tokens:,.0f}",
        f"{phase.output_tokens:,.0f}",
    )


def usd_text(usd: float | None) -> str:
    """Dollars an hour, or that no price is known."""
    return "no price known" if usd is None else f"${usd:,.2f}/h"


def share_text(share: float) -> str:
    """A share as a percentage with the digits that its distance from 100 % needs."""
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    return f"{share * 100:.2f} %" if share < 0.9995 else f"{share * 100:.3f} %"


def asked_text(share: float) -> str:
    """A requested share, without digits that were not typed: 99 %."""
    return f"{share * 100:.6g} %"


def count_text(count: int) -> str:
    """A large count in thousands or millions."""
    return (
        f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count / 1e3:.3g} k" if count >= 1e4 else f"{count:,}"
    )


def gpu_text(gpu: str, others: Collection[str] = ()) -> str:
    """`h100-sxm` as people call it: H100, or H100 SXM where another H100 is among the `others`."""
    if (match := _GPU.fullmatch(gpu)) is None:
        return gpu
    name, form = match.groups()
    alike = {other for other in others if other == name or other.startswith(f"{name}-")} - {gpu}
    return f"{name} {form}".upper() if alike and form else name.upper()


def kind_text(part: FleetPart | PassedOver | PlannedProfile, gpus: Collection[str] = ()) -> str:
    """A worker type: `H100 TP2`, its ranks and its role included."""
    role = getattr(part, "role", "any")
    words = [
        gpu_text(part.gpu, gpus),
        f"TP{part.tp_degree}",
        part.ranks,
        "" if role == "any" else f"({role})",
    ]
    return " ".join(filter(None, words))


def fleet_text(fleet: Iterable[FleetPart], gpus: Collection[str] = ()) -> str:
    """`1x H100 TP2 + 1x H100 TP4`."""
    return " + ".join(f"{part.workers}x {kind_text(part, gpus)}" for part in fleet)
