"""What `tokenfleet serve` takes from a plan and from --autoscale."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput
from tokenfleet.durations import parse_duration_s

if TYPE_CHECKING:
    from dataplane.live.controller_settings import Autoscale


def read_plan(path: Path) -> dict[str, Any]:
    """A feasible plan's JSON. Raises BadInput for anything else."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path}: is not JSON: {error}") from None
    if not isinstance(plan, dict) or plan.get("schema") != "tokenfleet.plan/1":
        raise BadInput(f"{path}: schema: expected tokenfleet.plan/1 (plan --format json)")
    if not plan.get("feasible") or not plan.get("fleet"):
        raise BadInput(f"{path}: feasible: this plan found no fleet, so there is none to serve")
    return plan


def slo_of(plan: dict[str, Any]) -> str | None:
    """A plan's targets, as --slo has them."""
    slo = plan.get("slo") or plan.get("inputs", {}).get("slo")
    return f"ttft={slo['ttft_s']}s,tpot={slo['tpot_s']}s" if isinstance(slo, dict) else None


def bounds_of(text: str) -> tuple[int, int]:
    """MIN and MAX of --autoscale."""
    low, dots, high = text.partition("..")
    if not dots or not low.isdigit() or not high.isdigit() or not 0 <= int(low) <= int(high) or high == "0":
        raise BadInput(f"--autoscale: expected MIN..MAX such as 1..8, got {text!r}")
    return int(low), int(high)


def autoscale_of(text: str, hold: str, plan: tuple[Path, dict[str, Any]] | None) -> Autoscale:
    """--autoscale and --scale-in-after, with a plan's line and price where it has them."""
    from dataplane.live.controller_settings import Autoscale

    low, high = bounds_of(text)
    hold_s = parse_duration_s(hold, "--scale-in-after")
    if plan is None:
        return Autoscale(low, high, hold_s=hold_s)
    path, found = plan
    # A mix's line counts workers of no one kind: what each kind can do says how many of which.
    line = found.get("demand_line") if len(found["fleet"]) == 1 else None
    usd = found.get("usd_per_hour")
    slope_and_intercept = learned_at = None
    if line is not None:
        try:
            slope_and_intercept = float(line["workers_per_rps"]), float(line["intercept"])
        except (KeyError, TypeError, ValueError):
            raise BadInput(
                f"{path}: demand_line: expected workers_per_rps and intercept, got {line!r}"
            ) from None
        if not all(map(math.isfinite, slope_and_intercept)) or slope_and_intercept[0] < 0:
            raise BadInput(f"{path}: demand_line: expected a slope of at least 0, got {line!r}")
        learned_at = _lengths_of(path, line)
    each = float(usd) / int(found["workers"]) if usd is not None and int(found["workers"]) else None
    return Autoscale(low, high, slope_and_intercept, hold_s, each, learned_at)


def _lengths_of(path: Path, line: dict[str, Any]) -> tuple[float, float] | None:
    """Mean prompt and output tokens that a plan's line was drawn at; None in a plan that does not say."""
    names = ("mean_prompt_tokens", "mean_output_tokens")
    if not any(name in line for name in names):
        return None
    try:
        prompt, output = (float(line[name]) for name in names)
    except (KeyError, TypeError, ValueError):
        prompt = output = math.nan
    if not (0 < prompt < math.inf and 0 < output < math.inf):
        raise BadInput(f"{path}: demand_line: expected {' and '.join(names)} above 0, got {line!r}")
    return prompt, output
