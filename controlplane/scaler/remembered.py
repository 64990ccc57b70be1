"""What a scaler's next life keeps of this one: the counts that its forecasts are made from.

A season is learned over days, and a controller that starts again has none of its own. Bins have no dates
here: whoever keeps them says how old they are, and what lies between is not counted (`None`). The rest of the
state (regime, hold, mix) is of minutes, and is found anew in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from controlplane.errors import BadInput
from controlplane.scaler.demand import Demand
from controlplane.scaler.forecast import ForecastSettings
from controlplane.scaler.scaling import Outlook, Scaling, ScalingSettings


def to_keep(state: Scaling, now_s: float) -> dict[str, Any]:
    """The closed bins of both forecasts as plain values, and how long ago the last of them ended."""
    kept = {}
    for name, outlook in (("far", state.far), ("soon", state.soon)):
        past = outlook.past
        if past is not None and past.closed:
            kept[name] = {
                "bin_s": past.bin_s,
                "age_s": now_s - (past.first_bin + len(past.closed)) * past.bin_s,
                "counts": list(past.closed),
                "regimes_rps": [round(rate, 6) for rate in outlook.past_rps],
            }
    return kept


def resumed(settings: ScalingSettings, kept: Mapping[str, Any], since_s: float, now_s: float) -> Scaling:
    """A scaler at `now_s` that knows what `to_keep` gave `since_s` earlier; bins of another length are none.

    Raises BadInput for what `to_keep` did not give.
    """
    state = Scaling()
    try:
        if settings.ahead is not None and "far" in kept:
            state = replace(state, far=_outlook(settings.ahead, kept["far"], since_s, now_s))
        if settings.near is not None and "soon" in kept:
            state = replace(state, soon=_outlook(settings.near, kept["soon"], since_s, now_s))
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"demand remembered: not what was kept: {error}") from None
    return state


def _outlook(settings: ForecastSettings, kept: Mapping[str, Any], since_s: float, now_s: float) -> Outlook:
    counts = [None if c is None else int(c) for c in kept["counts"]]
    levels = [float(rate) for rate in kept["regimes_rps"]]
    if len(counts) != len(levels):
        raise ValueError(f"{len(counts)} bins and {len(levels)} regimes")
    if kept["bin_s"] != settings.bin_s or not counts:
        return Outlook()
    at = int(now_s // settings.bin_s)
    ended_s = float(kept["age_s"]) + since_s - (now_s - at * settings.bin_s)  # before the bin in progress
    lost = max(round(ended_s / settings.bin_s), 0)
    if lost >= settings.keep:
        return Outlook()
    counts = [*counts, *[None] * lost][-settings.keep :]
    levels = [*levels, *[levels[-1]] * lost][-settings.keep :]
    past = Demand(settings.bin_s, settings.keep, at - len(counts), tuple(counts), None, now_s)
    return Outlook(past, tuple(levels))
