"""The last day of an advice: what the fleet had, what it should have had, and what the difference cost.

Between two points the numbers hold, as replicas do. While metrics are missing the last ones stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from tokenfleet.advise.advice import Advice, AdviceSettings, Spent
from tokenfleet.advise.view import Clock, document

SCHEMA = "tokenfleet.advice-page/1"
KEPT_S = 86_400.0
APART_S = 60.0  # between two points where nothing changes


class AdvicePoint(NamedTuple):
    """A moment: replicas that answer and start, those advised, the range that is 90 % sure, and costs."""

    at_s: float
    has: int
    wanted: int | None
    likely: tuple[int, int] | None
    rate_rps: float | None
    usd_per_h: float | None = None
    wanted_usd_per_h: float | None = None


class AdviceHistory:
    """The points of the last day, the newest look last."""

    def __init__(self) -> None:
        self.points: deque[AdvicePoint] = deque()

    def add(self, advice: Advice) -> Spent | None:
        """Keep this look, and sum up the last day; None before there is an advice to compare with."""
        rate_rps = None if advice.regime is None else advice.regime.rate_rps
        has, costs = advice.has + advice.starting, (advice.usd_per_h, advice.wanted_usd_per_h)
        now = AdvicePoint(advice.at_s, has, advice.wanted, advice.likely, rate_rps, *costs)
        if len(points := self.points) > 1:
            kept, last = points[-2], points[-1]
            if last[1:4] == kept[1:4] and last.at_s - kept.at_s < APART_S:
                points.pop()
        points.append(now)
        while points[0].at_s < now.at_s - KEPT_S:
            points.popleft()
        return self._spent()

    def _spent(self) -> Spent | None:
        lasted = [(one, (after.at_s - one.at_s) / 3600.0) for one, after in pairwise(self.points)]
        advised = [(one, hours) for one, hours in lasted if one.wanted is not None]

        def total(value: Callable[[AdvicePoint], float | None]) -> float:
            return sum((value(one) or 0.0) * hours for one, hours in advised)

        if (hours := total(lambda one: 1.0)) <= 0:
            return None
        low = total(lambda one: one.likely[0] if one.likely else one.wanted)
        high = total(lambda one: one.likely[1] if one.likely else one.wanted)
        is_priced = all(None not in (one.usd_per_h, one.wanted_usd_per_h) for one, _ in advised)
        costs = (total(lambda one: one.usd_per_h), total(lambda one: one.wanted_usd_per_h))
        had, wanted = total(lambda one: one.has), total(lambda one: one.wanted)
        return Spent(hours, had, wanted, (low, high), costs if is_priced else None)


def page_document(
    settings: AdviceSettings, advice: Advice, history: AdviceHistory, clock: Clock
) -> dict[str, Any]:
    """The page. Its sentences are those of the terminal; its charts bring their own words."""
    points = history.points
    times = [clock(point.at_s).timestamp() for point in points]

    def line(name: str, tone: str, value: Callable[[AdvicePoint], float | None]) -> dict[str, Any]:
        pairs = [list(pair) for pair in zip(times, map(value, points), strict=True)]
        return {"name": name, "kind": "steps", "tone": tone, "points": pairs}

    band = [[at, *(point.likely or (None, None))] for at, point in zip(times, points, strict=True)]
    replicas = [
        {"name": "90 % sure", "kind": "band", "tone": "b", "points": band},
        line("has", "a", lambda point: point.has),
        line("wants", "b dashed", lambda point: point.wanted),
    ]
    charts = [
        _chart("Replicas", "What the fleet has, and what the traffic needs.", "replicas", replicas),
        _chart(
            "Traffic",
            "Requests per second since each change point.",
            "req/s",
            [line("req/s", "a", lambda point: point.rate_rps)],
        ),
    ]
    if advice.usd_per_h is not None:
        cost = [
            line("has", "a", lambda point: point.usd_per_h),
            line("wants", "b dashed", lambda point: point.wanted_usd_per_h),
        ]
        charts.append(_chart("Cost", "What the fleet costs, and what the advice would.", "$/h", cost))
    return {"schema": SCHEMA, "now": document(settings, advice, clock), "charts": charts}


def _chart(title: str, says: str, unit: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "says": says, "unit": unit, "series": series}
