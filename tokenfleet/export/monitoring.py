"""Prometheus rules for the latency objective, and the Grafana dashboard that shows its error budget.

A request is an *error* when it finished outside its targets, failed, or was rejected for want of room. A
request that its client gave up or that a rate limit refused is no error. The gateway counts errors per
request, so no histogram bucket has to lie near a target. The windows and factors are the usual ones for a
budget of 30 days. An alert pages when 2 % of the budget is used in an hour, or 5 % in six hours. It makes a
ticket at 10 % in a day, or at a rate that uses all of it in 30 days. The dashboard's thresholds are the
target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.types import Slo
from tokenfleet.field_errors import load_yaml
from tokenfleet.report.tables import asked_text

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
_RECORD = "tokenfleet:slo_errors:ratio_rate{window}"
ALERTS = Path(__file__).with_name("alerts.yaml")  # those that need no target
_BAD_ENDS = 'tokenfleet_requests_total{outcome=~"failed|rejected"}'


class Burn(NamedTuple):
    """An alert: the error ratio over both windows is above `factor` times the budget."""

    long: str
    short: str
    factor: float
    severity: str
    summary: str


BURNS = (
    Burn("1h", "5m", 14.4, "page", "2 % of the 30-day error budget is spent in an hour"),
    Burn("6h", "30m", 6.0, "page", "5 % of the 30-day error budget is spent in six hours"),
    Burn("1d", "2h", 3.0, "ticket", "10 % of the 30-day error budget is spent in a day"),
    Burn("3d", "6h", 1.0, "ticket", "the 30-day error budget will be spent if this goes on"),
)


def error_ratio(window: str) -> str:
    """PromQL: the share of requests that were errors over a window; no value without requests."""
    missed = f'sum(rate(tokenfleet_slo_requests_total{{target="both",met="false"}}[{window}]))'
    judged = f'sum(rate(tokenfleet_slo_requests_total{{target="both"}}[{window}]))'
    ended = f"sum(rate({_BAD_ENDS}[{window}]))"
    # A counter that has never counted has no series, which is a zero and not an absence of news.
    errors = f"({missed} or vector(0)) + ({ended} or vector(0))"
    return f"({errors}) / (({judged} or vector(0)) + ({ended} or vector(0)))"


def threshold(factor: float, budget: float) -> float:
    """The error ratio an alert fires above. Where the factor asks for more than all requests, the middle
    between the budget and everything failing: an alert that cannot fire is none."""
    ratio = factor * budget
    return ratio if ratio < 0.9 else (1.0 + budget) / 2.0


def target_text(slo: Slo, attainment: float) -> str:
    """`99 % of requests within TTFT 400 ms and TPOT 30 ms`."""
    targets = f"TTFT {duration_text(slo.ttft_s)} and TPOT {duration_text(slo.tpot_s)}"
    return f"{asked_text(attainment)} of requests within {targets}"


def rule_groups(slo: Slo, attainment: float) -> dict[str, Any]:
    """The rules for a target, as a Prometheus rule file has them. Raises BadInput for no share."""
    if not 0.0 < attainment < 1.0:
        raise BadInput(f"--attainment: must be above 0 and below 1, got {attainment:g}")
    budget = 1.0 - attainment
    target = target_text(slo, attainment)
    records = [{"record": _RECORD.format(window=w), "expr": error_ratio(w)} for w in WINDOWS]
    alerts = []
    for burn in BURNS:
        limit = float(f"{threshold(burn.factor, budget):.6g}")
        over = " and ".join(f"{_RECORD.format(window=w)} > {limit}" for w in (burn.long, burn.short))
        alerts.append(
            {
                "alert": f"TokenfleetBudgetBurn{burn.long.upper()}",
                "expr": over,
                "labels": {"severity": burn.severity},
                "annotations": {
                    "summary": f"SLO missed ({target}): {burn.summary}",
                    "description": (
                        "{{ $value | humanizePercentage }} of the requests were late, failed or rejected;"
                        f" the target allows {asked_text(budget)}. `tokenfleet fleet status` shows the fleet."
                        " `tokenfleet whatif --vary rate=1,1.5` shows what more traffic would need."
                    ),
                },
            }
        )
    return {
        "groups": [
            {"name": "tokenfleet-slo", "interval": "30s", "rules": records},
            {"name": "tokenfleet-slo-alerts", "rules": alerts},
            {"name": "tokenfleet-fleet-alerts", "rules": load_yaml(ALERTS.read_text("utf-8"), ALERTS.name)},
        ]
    }


def prometheus_rules(slo: Slo, attainment: float) -> str:
    """A rule file for Prometheus itself."""
    return yaml.safe_dump(rule_groups(slo, attainment), sort_keys=False, width=110, allow_unicode=True)


def prometheus_rule_object(slo: Slo, attainment: float, name: str) -> dict[str, Any]:
    """The same as the Prometheus operator takes it."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "tokenfleet"}},
        "spec": rule_groups(slo, attainment),
    }


# The panels that need no target; those with one are changed, and a row about the budget is put in.
PLAIN = Path(__file__).with_name("dashboard.json")
_ROW_Y, _ROW_H = 5, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(slo: Slo, attainment: float) -> dict[str, Any]:
    """The dashboard's JSON. Raises BadInput for no share."""
    if not 0.0 < attainment < 1.0:
        raise BadInput(f"--attainment: must be above 0 and below 1, got {attainment:g}")
    board: dict[str, Any] = json.loads(PLAIN.read_text(encoding="utf-8"))
    panels = {panel["title"]: panel for panel in board["panels"]}
    _steps(panels["SLO attainment"], [("red", None), ("orange", 2 * attainment - 1), ("green", attainment)])
    _line(panels["Attainment by target and priority"], attainment, below=True)
    _line(panels["Time to first token"], slo.ttft_s)
    _line(panels["Time per output token"], slo.tpot_s)
    for panel in board["panels"]:
        if panel["gridPos"]["y"] >= _ROW_Y:
            panel["gridPos"]["y"] += _ROW_H
    number = max(panel.get("id", 0) for panel in board["panels"])
    board["panels"] += _budget(attainment, number)
    board["panels"].sort(key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    board["description"] = target_text(slo, attainment)
    return board


def dashboard_text(slo: Slo, attainment: float) -> str:
    """The dashboard as the file that Grafana imports."""
    return json.dumps(dashboard(slo, attainment), indent=1) + "\n"


def _budget(attainment: float, number: int) -> list[dict[str, Any]]:
    budget = 1.0 - attainment
    burn = {
        "id": number + 1,
        "type": "timeseries",
        "title": "Error budget burn",
        "description": "Errors over those that the target allows, by window. At 1 the budget lasts 30 days.",
        "datasource": _SOURCE,
        "gridPos": {"h": _ROW_H, "w": 16, "x": 0, "y": _ROW_Y},
        "fieldConfig": {"defaults": {"unit": "short", "min": 0, "custom": {}}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}},
        "targets": [
            _target(f"({error_ratio(window)}) / {budget:.6g}", window, ref)
            for window, ref in zip(WINDOWS[:5], "ABCDE", strict=True)
        ],
    }
    worst = max(threshold(one.factor, budget) for one in BURNS) / budget
    _line(burn, round(worst, 4))
    remaining = {
        "id": number + 2,
        "type": "stat",
        "title": "Error budget left",
        "description": "What is left of the last three days' budget. Below zero it is overspent.",
        "datasource": _SOURCE,
        "gridPos": {"h": _ROW_H, "w": 8, "x": 16, "y": _ROW_Y},
        "fieldConfig": {"defaults": {"unit": "percentunit"}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"},
        "targets": [_target(f"1 - ({error_ratio('3d')}) / {budget:.6g}", "", "A")],
    }
    _steps(remaining, [("red", None), ("orange", 0.0), ("green", 0.5)])
    return [burn, remaining]


def _target(expression: str, legend: str, ref: str) -> dict[str, Any]:
    return {"expr": expression, "legendFormat": legend, "refId": ref, "datasource": _SOURCE}


def _steps(panel: dict[str, Any], steps: list[tuple[str, float | None]]) -> None:
    listed = [{"color": c, "value": None if v is None else round(v, 9)} for c, v in steps]
    panel["fieldConfig"]["defaults"]["thresholds"] = {"mode": "absolute", "steps": listed}


def _line(panel: dict[str, Any], value: float, below: bool = False) -> None:
    """A dashed line at the target, the bad side of it red."""
    _steps(panel, [("red", None), ("green", value)] if below else [("green", None), ("red", value)])
    panel["fieldConfig"]["defaults"].setdefault("custom", {})["thresholdsStyle"] = {"mode": "dashed"}
