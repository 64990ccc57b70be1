"""Cost against promise: which scenarios nobody beats, and the plot of it.

A scenario is beaten when another in the same circumstances promises at least as much for less, or more for as
little. Promises are both targets, attainment and confidence; cost is dollars an hour, GPUs where a price is
not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.report.figures import Figure
from tokenfleet.report.tables import usd_text
from tokenfleet.whatif.axes import AXES, checked
from tokenfleet.whatif.scenario import Scenario

_COLOURS = ("--blue", "--orange", "--good", "--bad", "--soft")
_PLOTTED = ("slo.ttft", "slo.tpot", "attainment", "confidence")  # the first that varies is the x-axis


def unbeaten(found: Sequence[Scenario]) -> list[bool]:
    """For each scenario whether no other beats it; False where it has no fleet."""
    priced = is_priced(found)
    return [
        one.feasible
        and not any(
            _circumstances(other) == _circumstances(one) and _beats(other, one, priced)
            for other in found
            if other.feasible and other is not one
        )
        for one in found
    ]


def is_priced(found: Sequence[Scenario]) -> bool:
    """Whether every fleet that was found has a price."""
    return all(one.plan.usd_per_hour is not None for one in found if one.plan and one.feasible)


def cost(one: Scenario, priced: bool) -> float:
    """Dollars an hour, or GPUs."""
    assert one.plan is not None
    usd = one.plan.usd_per_hour
    return float(one.plan.gpus) if usd is None or not priced else usd


def _circumstances(one: Scenario) -> list[tuple[str, object]]:
    return [(k, checked(k, v)) for k, v in one.changes.items() if AXES[k].role == "circumstance"]


def _beats(first: Scenario, second: Scenario, priced: bool) -> bool:
    mine, yours = _promise(first), _promise(second)
    if any(a < b for a, b in zip(mine, yours, strict=True)):
        return False
    cheaper = cost(second, priced) - cost(first, priced)
    return cheaper > 1e-9 or (cheaper > -1e-9 and mine != yours)


def _promise(one: Scenario) -> tuple[float, ...]:
    """What is promised, each figure the larger the better."""
    assert one.plan is not None
    slo, attained = one.plan.slo, one.plan.attainment
    return (-slo.ttft_s, -slo.tpot_s, attained.target, attained.confidence or 0.0)


def cost_figure(found: Sequence[Scenario]) -> Figure:
    """Cost against the first promise that varies, or each scenario's cost as a bar where none does."""
    varied = [key for key in _PLOTTED if found and key in found[0].changes]
    return _against(found, varied[0]) if varied else _bars(found)


def _against(found: Sequence[Scenario], key: str) -> Figure:
    priced, best = is_priced(found), unbeaten(found)
    unit = "USD an hour" if priced else "GPUs"
    series: dict[str, list[int]] = {}
    for i, one in enumerate(found):
        if one.feasible:
            # A line joins what competes: choices are points on it, everything else is a line of its own.
            rest = [f"{k} {v}" for k, v in one.changes.items() if k != key and AXES[k].role != "choice"]
            series.setdefault(", ".join(rest) or "cheapest", []).append(i)
    data: list[dict[str, Any]] = []
    scale, label = (1e3, "ms") if key.startswith("slo.") else (100.0, "%")
    for number, (name, members) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        at = {i: float(checked(key, found[i].changes[key])) * scale for i in members}
        lowest: dict[float, int] = {}
        for i in members:
            held = lowest.get(at[i])
            if held is None or cost(found[i], priced) < cost(found[held], priced):
                lowest[at[i]] = i
        line = [lowest[x] for x in sorted(lowest)]
        data.append(
            {
                "x": [at[i] for i in line],
                "y": [round(cost(found[i], priced), 4) for i in line],
                "text": [_label(found[i]) for i in line],
                "name": name,
                "mode": "lines+markers",
                "line": {"color": colour, "width": 2},
                "marker": {
                    "color": colour,
                    "size": 9,
                    "symbol": ["circle" if best[i] else "circle-open" for i in line],
                },
            }
        )
        dearer = [i for i in members if i not in line]
        if dearer:
            data.append(
                {
                    "x": [at[i] for i in dearer],
                    "y": [round(cost(found[i], priced), 4) for i in dearer],
                    "text": [_label(found[i]) for i in dearer],
                    "name": f"{name}, dearer",
                    "mode": "markers",
                    "showlegend": False,
                    "marker": {"color": colour, "size": 7, "symbol": "x-thin-open"},
                }
            )
    layout = {
        "xaxis": {"title": {"text": f"{AXES[key].name} ({label})"}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "showlegend": len(series) > 1,
    }
    caption = (
        "Each line joins the cheapest fleets; a full dot is unbeaten: nothing in the same circumstances"
        " promises as much for less. Crosses are dearer choices for the same promise."
    )
    rows = [
        (*one.changes.values(), _fleet(one), usd_text(one.plan.usd_per_hour), "yes" if b else "")
        for one, b in zip(found, best, strict=True)
        if one.plan is not None and one.feasible
    ]
    columns = (*(found[0].changes if found else ()), "fleet", "cost", "unbeaten")
    return Figure("cost", "Cost against the promise", caption, _spec(data, layout), columns, rows, True)


def _bars(found: Sequence[Scenario]) -> Figure:
    priced = is_priced(found)
    unit = "USD an hour" if priced else "GPUs"
    some = [one for one in found if one.feasible]
    bars = {
        "type": "bar",
        "x": ["<br>".join(f"{k} {v}" for k, v in one.changes.items()) for one in some],
        "y": [round(cost(one, priced), 4) for one in some],
        "text": [_label(one) for one in some],
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
    return Figure("cost", "Cost", caption, _spec([bars], layout), (), [], True)


def _label(one: Scenario) -> str:
    assert one.plan is not None
    return f"{one.plan.gpus} GPUs"


def _fleet(one: Scenario) -> str:
    return fleet_text(one.plan) if one.plan else "-"


def fleet_text(plan: PlanFile) -> str:
    """A plan's fleet in words, as `Fleet.label` says it."""
    return " + ".join(
        f"{part.workers} x {part.gpu} TP{part.tp_degree}" + (f" ({part.role})" if part.role != "any" else "")
        for part in plan.fleet
    )


def _spec(data: list[dict[str, Any]], layout: dict[str, Any]) -> dict[str, Any]:
    return {"data": data, "layout": layout}
