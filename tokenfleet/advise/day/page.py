"""The page of an advice as JSON: the newest advice in its words, and the last day as charts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenfleet.advise.advice import Advice, AdviceSettings
from tokenfleet.advise.day.history import AdviceHistory, AdvicePoint
from tokenfleet.advise.view import Clock, document

SCHEMA = "tokenfleet.advice-page/1"


def page_document(
    settings: AdviceSettings, advice: Advice, history: AdviceHistory, clock: Clock
) -> dict[str, Any]:
    """The page. Its sentences are those of the terminal; its charts bring their own words."""
    points = history.until_now()
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
