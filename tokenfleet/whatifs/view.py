"""The views of a grid: JSON, a table for the terminal, and a page with the plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from controlplane.figures import counted
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.report.answer import ages
from tokenfleet.report.page import page, section
from tokenfleet.report.tables import fleet_text, share_text, table, usd_text
from tokenfleet.version import VERSION
from tokenfleet.whatifs.axes import Scenario, checked
from tokenfleet.whatifs.marginal import marginal
from tokenfleet.whatifs.pareto import cost, cost_figure, is_priced, unbeaten

SCHEMA = "tokenfleet.whatif/1"
_COLUMNS = ("fleet", "GPUs", "cost", "expected", "lower bound")
_SENTENCES, _BRIEF = 12, 3
_UNMOVED = "Scenarios are planned without moves of running requests; `plan` judges its fleet with them"
_PARETO = "Pareto-optimal: nothing cheaper meets this target"


def whatif_json(scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """The JSON of `tokenfleet.whatif/1`."""
    best = unbeaten(scenarios)
    return {
        "schema": SCHEMA,
        "scenarios": [
            {
                "changes": {key: checked(key, value) for key, value in one.changes.items()},
                "plan": one.plan.document if one.plan else None,
                "error": one.error or None,
                "unbeaten": is_best,
                "command": one.command,
            }
            for one, is_best in zip(scenarios, best, strict=True)
        ],
        "marginal": marginal(scenarios),
    }


def whatif_tables(scenarios: Sequence[Scenario], verbose: bool) -> Iterable[RenderableType]:
    """The verdict, a row for each scenario, and the dearest steps; `verbose`: more steps, and commands."""
    keys = tuple(scenarios[0].changes)
    yield Text(verdict(scenarios), style="bold green" if any(s.feasible for s in scenarios) else "bold red")
    yield table((*keys, *columns(scenarios), ""), _rows(scenarios, "*"), left=(*keys, "fleet", ""))
    yield Text(f"* {_PARETO}", style="dim")
    yield from _notes([one.plan for one in scenarios if one.plan])
    told = sentences(scenarios)
    yield from (Text(sentence) for sentence in (told if verbose else told[:_BRIEF]))
    if verbose:
        yield from (Text(f"{_changes(one.changes)}: {one.command}", style="dim") for one in scenarios)


def _notes(plans: Sequence[PlanFile]) -> Iterable[Text]:
    if any(plan.moves is not None for plan in plans):
        yield Text(_UNMOVED, style="dim")
    if plans:
        yield Text(ages([one for plan in plans for one in plan.inputs.profiles]), style="dim")


def verdict(scenarios: Sequence[Scenario]) -> str:
    """How many scenarios can meet their target, and the fleet of the cheapest that does."""
    met = [one for one in scenarios if one.feasible]
    if not met:
        return f"No fleet meets the target in any of {counted(len(scenarios), 'scenario')}"
    head = f"{len(met)} of {counted(len(scenarios), 'scenario')} can meet the target"
    best = min(met, key=lambda one: cost(one, is_priced(scenarios)))
    assert best.plan is not None
    price = f"({counted(best.plan.gpus, 'GPU')}, {usd_text(best.plan.usd_per_hour)})"
    return f"{head}; the cheapest is {fleet_text(best.plan.fleet)} {price} at {_changes(best.changes)}"


def sentences(scenarios: Sequence[Scenario]) -> list[str]:
    """Marginal prices in words: of each axis in turn the dearest step first, a dozen in all.

    Steps that cost nothing are left out, except one of an axis that has no others.
    """
    ranked = []
    for rows in marginal(scenarios).values():
        rows = sorted(rows, key=lambda row: -abs(_rise(row)))
        telling = [row for row in rows if _rise(row)] or rows[:1]
        ranked.append([_held(row) for row in telling])
    mixed = [steps[i] for i in range(max(map(len, ranked), default=0)) for steps in ranked if i < len(steps)]
    return mixed[:_SENTENCES]


def _rise(row: dict[str, Any]) -> float:
    usd: float | None = row["usd_per_hour"]
    return float(row["gpus"]) if usd is None else usd


def _held(row: dict[str, Any]) -> str:
    return f"{row['says']} (at {_changes(row['held'])})." if row["held"] else f"{row['says']}."


def _changes(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in changes.items())


def columns(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """Columns of a scenario's row; the schedule's price where one was asked for."""
    return (*_COLUMNS, "schedule") if any(one.plan and one.plan.paid for one in scenarios) else _COLUMNS


def cells(one: Scenario, scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """A scenario's cells under `columns`."""
    width = len(columns(scenarios))
    plan = one.plan
    if plan is None or not plan.feasible:
        why = one.error or (plan.reason if plan else "")
        return (f"no fleet: {why}", *["-"] * (width - 1))
    attained = plan.attainment
    reached = attained.on_trace if attained.expected is None else attained.expected
    row = (
        fleet_text(plan.fleet, {part.gpu for s in scenarios if s.plan for part in s.plan.fleet})
        + _of_which_spare(plan),
        str(plan.gpus),
        usd_text(plan.usd_per_hour),
        "-" if reached is None else share_text(reached),
        "-" if attained.low is None else share_text(attained.low),
    )
    return row if width == len(row) else (*row, usd_text(plan.paid.usd_per_hour) if plan.paid else "-")


def _rows(scenarios: Sequence[Scenario], mark: str) -> Iterator[tuple[str, ...]]:
    """A row for each scenario; `mark` ends those that no other beats."""
    for one, is_best in zip(scenarios, unbeaten(scenarios), strict=True):
        yield (*one.changes.values(), *cells(one, scenarios), mark * is_best)


def _of_which_spare(plan: PlanFile) -> str:
    return f", {plan.spares.workers} of them standby" if plan.spares and plan.spares.workers else ""


def whatif_report(scenarios: Sequence[Scenario]) -> str:
    """The page: what each scenario costs, what a step along each axis costs, and the command of each row."""
    keys = tuple(scenarios[0].changes)
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences(scenarios))
    prices = f"<section><h2>What steps cost</h2><ul>{items}</ul></section>" if items else ""
    return page(
        "Tokenfleet what-if",
        f"{len(scenarios)} scenarios over {', '.join(keys)}",
        f"{verdict(scenarios)}. Each scenario is a plan of its own, on the same resampled traces.",
        prices,
        [cost_figure(scenarios)],
        [
            section("Scenarios", (*keys, *columns(scenarios), "Pareto-optimal"), _rows(scenarios, "yes")),
            *_steps(scenarios),
            section(
                "The command of each scenario",
                (*keys, "command"),
                [(*one.changes.values(), one.command) for one in scenarios],
            ),
        ],
        f"Made by tokenfleet {VERSION}. Latencies come from simulation, not from a running fleet.",
    )


def _steps(scenarios: Sequence[Scenario]) -> Iterable[str]:
    for key, steps in marginal(scenarios).items():
        rows = [
            (
                f"{step['from']:g} to {step['to']:g}",
                _changes(step["held"]) or "-",
                f"{step['gpus']:+d}",
                "-" if step["usd_per_hour"] is None else f"{step['usd_per_hour']:+,.2f}",
                step["says"],
            )
            for step in steps
        ]
        yield section(f"What a step in {key} costs", ("step", "held", "GPUs", "USD/h", ""), rows)
