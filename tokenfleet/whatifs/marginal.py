"""Marginal prices: the cost of a step along one axis, the other changes held, in numbers and words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from controlplane.figures import duration_text
from tokenfleet.planning.plan_file import PlanFile, kind_of_worker
from tokenfleet.whatifs.axes import Scenario, axis_of, checked, is_numeric

# Axes that change what the schedule costs, not the fleet; only the schedule's price tells.
_BY_SCHEDULE = ("cold-start",)
_SCALES = ("rate", "price", "lengths", "lengths.prompt", "lengths.output")  # multiples of what is given
Span = tuple[float, float, int]  # seconds, and workers
_SAME = 0.005  # dollars an hour below which two prices are the same


def marginal(scenarios: Sequence[Scenario]) -> dict[str, list[dict[str, Any]]]:
    """For each numeric axis: its steps between neighbouring values.

    `usd_per_hour` and `gpus` are what going from `from` to `to` adds (`cold-start`: to the schedule's price).
    `per_unit` is USD an hour (GPUs where a price is unknown) per unit of the axis, seconds for durations.
    """
    result: dict[str, list[dict[str, Any]]] = {}
    for key in scenarios[0].changes if scenarios else ():
        if not is_numeric(key):
            continue
        groups: dict[tuple[tuple[str, str], ...], list[tuple[float, Scenario]]] = {}
        for one in scenarios:
            if one.feasible:
                others = tuple((k, v) for k, v in one.changes.items() if k != key)
                groups.setdefault(others, []).append((float(checked(key, one.changes[key])), one))
        rows = []
        for others, points in groups.items():
            points.sort(key=lambda point: point[0])
            for (x0, first), (x1, second) in pairwise(points):
                rows.append({"held": dict(others), **_step(key, x0, first, x1, second)})
        if rows:
            result[key] = rows
    return result


def _step(key: str, x0: float, first: Scenario, x1: float, second: Scenario) -> dict[str, Any]:
    assert first.plan is not None
    assert second.plan is not None
    gpus = second.plan.gpus - first.plan.gpus
    before, after = (_usd(key, plan) for plan in (first.plan, second.plan))
    usd = None if before is None or after is None else round(after - before, 4)
    rise = gpus if usd is None else usd
    return {
        "from": x0,
        "to": x1,
        "usd_per_hour": usd,
        "gpus": gpus,
        "per_unit": float(f"{rise / (x1 - x0):.6g}"),
        "says": _sentence(key, x0, first, x1, second, usd, gpus),
    }


def _usd(key: str, plan: PlanFile) -> float | None:
    if key in _BY_SCHEDULE:
        return plan.paid.usd_per_hour if plan.paid else None
    return plan.usd_per_hour


def _sentence(
    key: str,
    x0: float,
    first: Scenario,
    x1: float,
    second: Scenario,
    usd: float | None,
    gpus: int,
) -> str:
    """The step in a sentence: a tighter target, more traffic, higher prices, and what it costs."""
    axis = axis_of(key)
    what, of_what = axis.name, axis.part or key
    costs = _costs(usd, gpus, _fleet(first) == _fleet(second))
    if of_what in ("ttft", "tpot", "session-time"):
        # Towards the tighter target, since that is what is bought.
        costs = _costs(None if usd is None else -usd, -gpus, _fleet(first) == _fleet(second))
        return f"Tightening {what} from {duration_text(x1)} to {duration_text(x0)} {costs}"
    if of_what in ("attainment", "confidence"):
        return f"Raising {what} from {x0 * 100:g} % to {x1 * 100:g} % {costs}"
    if key == "cold-start":
        before = duration_text(x0) if x0 else "none"
        return f"A {what} of {duration_text(x1)} instead of {before} {costs}, averaged over the schedule"
    times = "x" if key in _SCALES else ""
    sentence = f"Raising {what} from {x0:g}{times} to {x1:g}{times} {costs}"
    when = _when(first, second) if key == "rate" else ""
    return f"{sentence}: {when}" if when else sentence


def _fleet(one: Scenario) -> list[tuple[str, int]]:
    return [(kind_of_worker(part), part.workers) for part in one.plan.fleet] if one.plan else []


def _costs(usd: float | None, gpus: int, is_same: bool) -> str:
    """The price of a step; GPUs where dollars are not known."""
    if is_same and not (usd and abs(usd) >= _SAME):
        return "needs the same fleet"
    if usd is None:
        more = "more" if gpus > 0 else "fewer"
        return (
            f"needs {abs(gpus)} {more} GPU{'' if abs(gpus) == 1 else 's'}" if gpus else "needs as many GPUs"
        )
    if abs(usd) < _SAME:
        return "costs the same"
    return f"costs ${usd:,.2f}/h more" if usd > 0 else f"saves ${-usd:,.2f}/h"


def _when(first: Scenario, second: Scenario) -> str:
    """When busier traffic needs more workers, in the trace's own time: `one more worker from 17:20 to 18:00`.

    Empty where the schedules are of different kinds of workers, or do not differ.
    """
    assert first.plan is not None
    assert second.plan is not None
    if _kinds(first.plan) != _kinds(second.plan):
        return ""
    # In the trace's own time: requests that come x times as fast pass in 1/x of it, more sessions do not.
    before, after = (_spans(plan) for plan in (first.plan, second.plan))
    more = _more(before, after)
    if not more:
        return ""
    start_s, stop_s, extra = max(more, key=lambda span: (span[2], span[1] - span[0]))
    rest = (
        "" if len(more) == 1 else ", and once more" if len(more) == 2 else f", and {len(more) - 1} times more"
    )
    many = "one more worker" if extra == 1 else f"{extra} more workers"
    return f"{many} from {_moment(first.plan, start_s)} to {_moment(first.plan, stop_s)}{rest}"


def _moment(plan: PlanFile, second: float) -> str:
    """A moment of the trace in words: 17:20 in UTC, or the minute it is where the trace has no dates."""
    if (start_s := plan.inputs.clock_start_unix_s) is None:
        return f"minute {second / 60:.3g}"
    return datetime.fromtimestamp(start_s + second, UTC).strftime("%H:%M")


def _spans(plan: PlanFile) -> list[Span]:
    """The schedule in the trace's time."""
    scale = plan.inputs.rate_scale
    return [(s.start_s * scale, s.end_s * scale, s.workers) for s in plan.schedule]


def _more(before: Sequence[Span], after: Sequence[Span]) -> list[Span]:
    """The spans, of a second and more, in which `after` has more workers, and how many more."""
    end_s = min((stretches[-1][1] for stretches in (before, after) if stretches), default=0.0)
    edges = sorted({t for s, e, _ in (*before, *after) for t in (s, e) if t <= end_s} | {end_s})
    more: list[Span] = []
    for a, b in pairwise(edges):
        extra = _at(after, a) - _at(before, a)
        if extra <= 0 or b - a < 1.0:
            continue
        if more and more[-1][2] == extra and a - more[-1][1] < 1.0:
            more[-1] = (more[-1][0], b, extra)
        else:
            more.append((a, b, extra))
    return more


def _kinds(plan: PlanFile) -> set[str]:
    return {kind_of_worker(part) for part in plan.fleet}


def _at(stretches: Sequence[Span], second: float) -> int:
    return next((n for start_s, end_s, n in stretches if start_s <= second < end_s), 0)
