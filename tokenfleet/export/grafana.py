"""The Grafana dashboard for a target: its thresholds are the target's, and it shows the budget's burn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from controlplane.types import Slo
from tokenfleet.export.prometheus import BURNS, WINDOWS, error_ratio, target_text, threshold

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
