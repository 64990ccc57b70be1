"""The Pareto front of a grid: the scenarios that no other beats in cost and promise, and the plot of it.

A scenario is beaten when another in the same circumstances promises at least as much for less, or more for as
little. Promises are both targets, attainment and confidence; cost is dollars an hour, GPUs where a price is
not known.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain
from math import inf

from tokenfleet.report.figures import TONES, Axis, Figure, Kind, Series
from tokenfleet.report.tables import fleet_text, usd_text
from tokenfleet.whatifs.axes import Scenario, axis_of, checked

_PLOTTED = ("ttft", "tpot", "attainment", "confidence")  # the first that varies is the x-axis


def unbeaten(scenarios: Sequence[Scenario]) -> list[bool]:
    """For each scenario whether no other beats it; False where it has no fleet."""
    priced = is_priced(scenarios)
    return [
        one.feasible
        and not any(
            _circumstances(other) == _circumstances(one) and _beats(other, one, priced)
            for other in scenarios
            if other.feasible and other is not one
        )
        for one in scenarios
    ]


def is_priced(scenarios: Sequence[Scenario]) -> bool:
    """Whether every fleet that was found has a price."""
    return all(one.plan.usd_per_hour is not None for one in scenarios if one.plan and one.feasible)


def cost(one: Scenario, priced: bool) -> float:
    """Dollars an hour, or GPUs."""
    assert one.plan is not None
    usd = one.plan.usd_per_hour
    return float(one.plan.gpus) if usd is None or not priced else usd


def _circumstances(one: Scenario) -> list[tuple[str, object]]:
    return [(k, checked(k, v)) for k, v in one.changes.items() if axis_of(k).role == "circumstance"]


def _beats(first: Scenario, second: Scenario, priced: bool) -> bool:
    mine, yours = _promise(first), _promise(second)
    if any(a < b for a, b in zip(mine, yours, strict=True)):
        return False
    cheaper = cost(second, priced) - cost(first, priced)
    return cheaper > 1e-9 or (cheaper > -1e-9 and mine != yours)


def _promise(one: Scenario) -> tuple[float, ...]:
    """The promise of a scenario, each figure the larger the better."""
    assert one.plan is not None
    slo, attained = one.plan.slo, one.plan.attainment
    session_s = inf if one.plan.session_s is None else one.plan.session_s
    plain = (-slo.ttft_s, -slo.tpot_s, -session_s, attained.target, attained.confidence or 0.0)
    classes = ((-c.slo.ttft_s, -c.slo.tpot_s, c.attainment) for c in one.plan.slo_classes)
    return plain + tuple(chain.from_iterable(classes))


def cost_figure(scenarios: Sequence[Scenario]) -> Figure:
    """Cost against the first promise that varies, or each scenario's cost as a bar where none does."""
    changes = scenarios[0].changes if scenarios else {}
    varied = [key for what in _PLOTTED for key in changes if (axis_of(key).part or key) == what]
    return _against(scenarios, varied[0]) if varied else _bars(scenarios)


def _against(scenarios: Sequence[Scenario], key: str) -> Figure:
    """Cost against a promise: a line and its crosses for each choice of everything else."""
    best = unbeaten(scenarios)
    series: dict[str, list[Scenario]] = {}
    for one in scenarios:
        if one.feasible:
            # A line joins what competes: choices are points on it, everything else is a line of its own.
            rest = [f"{k} {v}" for k, v in one.changes.items() if k != key and axis_of(k).role != "choice"]
            series.setdefault(", ".join(rest) or "cheapest", []).append(one)
    stars = {id(one) for one, is_best in zip(scenarios, best, strict=True) if is_best}
    drawn: list[Series] = []
    for number, (name, members) in enumerate(series.items()):
        tone, named = TONES[number % len(TONES)], name if len(series) > 1 else ""
        drawn += _drawn(members, stars, key, is_priced(scenarios), tone, named)
    caption = (
        "Each line joins the cheapest fleets. A full dot is Pareto-optimal: nothing cheaper meets this"
        " target. Crosses are dearer fleets for the same target."
    )
    columns = (*(scenarios[0].changes if scenarios else ()), "fleet", "cost", "Pareto-optimal")
    rows = _rows(scenarios, best)
    x = Axis(f"{axis_of(key).name} ({_scale(key)[1]})")
    y = Axis(_unit(is_priced(scenarios)), 0.0)
    return Figure("cost", "Cost against the target", caption, x, y, drawn, columns, rows, True)


def _rows(scenarios: Sequence[Scenario], best: Sequence[bool]) -> list[tuple[str, ...]]:
    return [
        (*one.changes.values(), _fleet(one), usd_text(one.plan.usd_per_hour), "yes" if is_best else "")
        for one, is_best in zip(scenarios, best, strict=True)
        if one.plan is not None and one.feasible
    ]


def _cheapest(members: Sequence[Scenario], key: str, priced: bool) -> tuple[list[Scenario], list[Scenario]]:
    """The cheapest scenario at each value of the promise, in its order, and all others."""
    lowest: dict[float, Scenario] = {}
    for one in members:
        x = _promised(one, key)
        if x not in lowest or cost(one, priced) < cost(lowest[x], priced):
            lowest[x] = one
    line = [lowest[x] for x in sorted(lowest)]
    chosen = {id(one) for one in line}
    return line, [one for one in members if id(one) not in chosen]


def _drawn(
    members: Sequence[Scenario], stars: Container[int], key: str, priced: bool, tone: str, name: str
) -> Iterator[Series]:
    """A line through the cheapest scenarios, a full dot for each whose id is in `stars`, and crosses."""
    line, dearer = _cheapest(members, key, priced)
    kinds: dict[Kind, list[Scenario]] = {
        "line": line,
        "dots": [one for one in line if id(one) in stars],
        "open dots": [one for one in line if id(one) not in stars],
        "crosses": dearer,
    }
    for kind, some in kinds.items():
        points = [(_promised(one, key), cost(one, priced)) for one in some]
        yield Series(name * (kind == "line"), kind, points, tone, [_label(one) for one in some])


def _scale(key: str) -> tuple[float, str]:
    return (1e3, "ms") if axis_of(key).part in ("ttft", "tpot") else (100.0, "%")


def _promised(one: Scenario, key: str) -> float:
    """Where a scenario stands on the x-axis."""
    return float(checked(key, one.changes[key])) * _scale(key)[0]


def _unit(priced: bool) -> str:
    return "USD an hour" if priced else "GPUs"


def _bars(scenarios: Sequence[Scenario]) -> Figure:
    priced = is_priced(scenarios)
    some = [one for one in scenarios if one.feasible]
    bars = Series(
        "",
        "bars",
        [(float(i), cost(one, priced)) for i, one in enumerate(some)],
        labels=[_label(one) for one in some],
    )
    names = [", ".join(f"{k} {v}" for k, v in one.changes.items()) for one in some]
    x = Axis("", -0.5, len(some) - 0.5, list(enumerate(names)))
    caption = "The cheapest fleet of each scenario; scenarios without a bar have none."
    return Figure("cost", "Cost", caption, x, Axis(_unit(priced), 0.0), [bars], (), [], True)


def _label(one: Scenario) -> str:
    assert one.plan is not None
    return f"{one.plan.gpus} GPUs"


def _fleet(one: Scenario) -> str:
    return fleet_text(one.plan.fleet) if one.plan else "-"
