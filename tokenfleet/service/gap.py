"""The excess cost: what a fleet cost over the cheapest that would have served the same requests, by day.

The cheapest fleet is the hindsight optimum (`hindsight_fleet.py`). P workers were paid, and S served. T is
what the scaler's rule asked for at the time, and U what the same line asks for at the rate that came. V is
what the line as measured by the day's end asks for at that rate. C is the optimum's. Worker-time by
worker-time,

    P - C = (P - S) + max(S - T, 0) + min(S - T, 0) + (T - U) + (U - V) + (V - C)
            starts    hold            not there yet   forecast  model     margin
            and drains

The optimum's own cold starts are taken off the first, so the parts add up to the whole. Where an operator
fixed the number, S - C is `fixed`. Where no line of single workers decided (several types, load alone), it is
`not told apart`. Stretches without a log count for neither side.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import msgspec
import polars as pl

from controlplane.figures import duration_text
from controlplane.worker_type import WorkerType
from dataplane.history.files import read_history
from dataplane.history.fleet_log import (
    DAY_S,
    FleetSpec,
    LogWindows,
    Look,
    Ruled,
    day_begin_s,
    day_of,
    logged_days,
    read_fleet_log,
)
from tokenfleet.files import write_files
from tokenfleet.service.hindsight_fleet import LEAD_S, MOST_REQUESTS, HindsightFleet, Requests, cheapest

SCHEMA = "tokenfleet.gap/1"
# The parts of an excess cost by their names in JSON, and what people call them.
PARTS = {
    "starts and drains": "starts and drains",
    "hold": "scale-in delay",
    "not there yet": "scale-up lag",
    "forecast": "forecast error",
    "model": "model error",
    "margin": "over-provisioning",
    "fixed": "manual scaling",
    "not told apart": "unexplained",
}
LATE_S = 600.0  # requests of a day may still end


class Amount(TypedDict):
    """What worker-time comes to; dollars where its prices are known."""

    gpu_h: float
    usd: float | None


class Gap(TypedDict):
    """A day's excess cost in JSON; `least`, `ratio` and parts where there is a hindsight optimum."""

    schema: str
    day: str
    hours: float
    paid: Amount
    least: Amount | None
    ratio: float | None
    type: str | None
    requests: int | None
    parts: dict[str, Amount]
    says: list[str]


def parts_of(
    timeline: LogWindows, requests: Requests, best: HindsightFleet, types: Mapping[str, WorkerType]
) -> dict[str, dict[str, float]]:
    """Worker-seconds by part of the excess cost and by type; they add up to what is paid over the optimum."""
    rates = [requests.rate_rps(*window) for window in timeline.windows.tolist()]
    ruled = [look.rule for _, look, _ in timeline.pieces if look.rule is not None]
    since = ruled[-1].slope / ruled[-1].given_slope if ruled and ruled[-1].given_slope > 0 else None
    name = best.worker_type.name
    parts: dict[str, defaultdict[str, float]] = {part: defaultdict(float) for part in PARTS}
    parts["starts and drains"][name] += (best.counts * timeline.seconds).sum() - best.paid_s
    for w, look, seconds in timeline.pieces:
        serving = 0
        for kind, (starting, serves, draining) in look.workers.items():
            parts["starts and drains"][kind] += (starting + draining) * seconds
            serving += serves
        rule, least = look.rule, int(best.counts[w])
        if rule is None or since is None or len(types) > 1:
            part = parts["fixed" if look.fixed else "not told apart"]
            for kind, (_, serves, _) in look.workers.items():
                part[kind] += serves * seconds
            part[name] -= least * seconds
            continue
        came = asked(rule, rule.slope, rates[w])
        measured = asked(rule, rule.given_slope * since, rates[w])
        for told, workers in (
            ("hold", max(serving - rule.workers, 0)),
            ("not there yet", min(serving - rule.workers, 0)),
            ("forecast", rule.workers - came),
            ("model", came - measured),
            ("margin", measured - least),
        ):
            parts[told][name] += workers * seconds
    return dict(parts)


def asked(rule: Ruled, slope: float, rate_rps: float) -> int:
    """What the rule would have asked for at a rate, by a line of another slope."""
    if rate_rps == 0 and rule.low == 0:
        return 0
    workers = max(math.ceil(slope * rate_rps + rule.intercept - 1e-9), 1, rule.low)
    return workers if rule.high is None else min(workers, rule.high)


def gap_of(
    looks: Sequence[Look], fleets: Sequence[FleetSpec], rows: pl.DataFrame, start_s: float, end_s: float,
    most_requests: int = MOST_REQUESTS,
) -> Gap | None:  # fmt: skip
    """The gap of [start_s, end_s) by a log and rows of history; None where the log tells nothing of it."""
    timeline = LogWindows.of(looks, start_s, end_s)
    if not timeline.pieces or not fleets:
        return None
    fleet, types = fleets[-1], {t.name: t for one in fleets for t in one.types}
    spent = _spent(timeline)
    told: Gap = {
        "schema": SCHEMA,
        "day": day_of(start_s),
        "hours": round(float(timeline.seconds.sum()) / 3600.0, 4),
        "paid": _amount(spent, types),
        "least": None,
        "ratio": None,
        "type": None,
        "requests": None,
        "parts": {},
        "says": [],
    }
    why = _untold(spent, fleet, types)
    if why is not None:
        return {**told, "says": [why]}
    requests = Requests.of(rows, fleet, start_s - LEAD_S[1])
    best = cheapest(requests, timeline, fleet, most_requests // len(fleet.types))
    least = _amount({best.worker_type.name: best.paid_s}, types)
    parts = parts_of(timeline, requests, best, types)
    paid_for, whole = told["paid"]["usd"], least["usd"]
    if paid_for is None or whole is None:
        paid_for, whole = told["paid"]["gpu_h"], least["gpu_h"]
    return {
        **told,
        "least": least,
        "ratio": round(paid_for / whole, 4) if whole else None,
        "type": best.worker_type.name,
        "requests": int((requests.workload.arrival_s >= LEAD_S[1]).sum()),
        "parts": {part: _amount(seconds, types) for part, seconds in parts.items() if any(seconds.values())},
        "says": _remarks(best, timeline, len(fleet.types)),
    }


def _spent(timeline: LogWindows) -> dict[str, float]:
    """Worker-seconds paid, by type."""
    spent: defaultdict[str, float] = defaultdict(float)
    for _, look, seconds in timeline.pieces:
        for kind, workers in look.workers.items():
            spent[kind] += sum(workers) * seconds
    return dict(spent)


def _untold(paid: Mapping[str, float], fleet: FleetSpec, types: Mapping[str, WorkerType]) -> str | None:
    """Why there is no hindsight optimum; None where there is one."""
    if any(t.role != "any" for t in fleet.types):
        return "no hindsight optimum: it is not simulated for prefill and decode workers"
    unknown = sorted({t.name for t in fleet.types if t.known_profile is None} | (paid.keys() - types.keys()))
    return f"no hindsight optimum: the step times of {', '.join(unknown)} are not known" if unknown else None


def _amount(seconds: Mapping[str, float], types: Mapping[str, WorkerType]) -> Amount:
    """GPU-hours and dollars of worker-seconds by type; None where a price is not known."""
    gpu_h = sum(
        s / 3600.0 * (types[kind].reserved_gpus if kind in types else 1) for kind, s in seconds.items()
    )
    prices = {kind: types[kind].usd_per_h if kind in types else None for kind, s in seconds.items() if s}
    usd = [s / 3600.0 * price for kind, s in seconds.items() if s and (price := prices[kind]) is not None]
    return {"gpu_h": round(gpu_h, 6), "usd": round(sum(usd), 6) if len(usd) == len(prices) else None}


def _remarks(best: HindsightFleet, timeline: LogWindows, types: int) -> list[str]:
    says = []
    if best.looked < len(timeline.windows):
        says.append(
            f"{best.looked} of {len(timeline.windows)} windows were simulated, the others estimated by rate"
        )
    if best.late:
        says.append(f"windows in which no number of workers meets the targets: {best.late}")
    if types > 1:
        says.append(f"the optimum has one worker type, {best.worker_type.name}; mixes were not tried")
    return says


def gaps(data: Path, start_s: float, now_s: float, days: int = 7) -> list[Gap]:
    """Excess costs of the last days of a folder's log from `start_s` on, oldest first, today's so far too.

    A whole day is computed once and kept next to the log. Raises BadInput for what cannot be read.
    """
    folder = data / "history"
    of = [d for d in logged_days(folder) if day_begin_s(d) + DAY_S > start_s and day_begin_s(d) < now_s]
    kept = {day: known for day in of[-days:] if (known := kept_gap(folder, day)) is not None}
    share = MOST_REQUESTS // max(len(of[-days:]) - len(kept), 1)
    found = (kept.get(day) or made_gap(folder, day, now_s, share) for day in of[-days:])
    return [one for one in found if one is not None]


def made_gap(folder: Path, day: str, now_s: float, most_requests: int = MOST_REQUESTS) -> Gap | None:
    """A day's gap by its log and history, kept once the day is over; None where no log tells of it."""
    start_s = day_begin_s(day)
    end_s = min(start_s + DAY_S, now_s)
    looks, fleets = read_fleet_log(folder, start_s, end_s)
    rows = read_history(folder, start_s - LEAD_S[1], end_s)
    found = gap_of(looks, fleets, rows, start_s, end_s, most_requests)
    if found is not None and now_s >= start_s + DAY_S + LATE_S:
        write_files({folder / f"gap-{day}.json": msgspec.json.encode(found).decode()})
    return found


def kept_gap(folder: Path, day: str) -> Gap | None:
    """A day's gap as it was kept; None where it was not, or not by this version."""
    with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        found = msgspec.json.decode((folder / f"gap-{day}.json").read_bytes(), type=Gap)
        return found if (found["schema"], found["day"]) == (SCHEMA, day) else None
    return None


def last_kept_gap(folder: Path) -> Gap | None:
    """The gap of the last day that one was kept of."""
    days = sorted((path.stem.removeprefix("gap-") for path in folder.glob("gap-*.json")), reverse=True)
    return next((found for day in days if (found := kept_gap(folder, day)) is not None), None)


def last_whole_day(data: Path, now_s: float) -> str | None:
    """The last day of a folder's log that is over; None without one."""
    over = [day for day in logged_days(data / "history") if day_begin_s(day) + DAY_S + LATE_S <= now_s]
    return over[-1] if over else None


def shown(day: Gap, amount: Amount) -> str:
    """One of a day's amounts for people: in dollars where the day's prices are known, else in GPU-hours."""
    if not is_priced(day) or (usd := amount["usd"]) is None:
        return f"{amount['gpu_h']:,.2f} GPU-hours"
    return f"{'-' if usd < 0 else ''}${abs(usd):,.2f}"


def is_priced(day: Gap) -> bool:
    """Whether prices of what was paid, and of the cheapest, are known."""
    return None not in (day["paid"]["usd"], (day["least"] or day["paid"])["usd"])


def gap_line(day: Gap) -> str:
    """A day's excess cost in a line: paid, the hindsight optimum, and the reasons of 1 % or more by size."""
    told = f"{day['day']} (UTC, {duration_text(3600.0 * day['hours'])}): cost {shown(day, day['paid'])}"
    if day["least"] is None:
        told += f"; {'; '.join(day['says'])}"
    else:
        optimum = f"the hindsight optimum of {shown(day, day['least'])}"
        told += f", {'above' if day['ratio'] is None else excess_text(day['ratio'])} {optimum}"
        parts = sorted(day["parts"].items(), key=lambda part: -abs(part[1]["gpu_h"]))
        least_h = 0.01 * day["paid"]["gpu_h"]
        why = [f"{PARTS[name]} {shown(day, one)}" for name, one in parts if abs(one["gpu_h"]) >= least_h]
        told += f" ({', '.join(why)})" if why else ""
    return told if is_priced(day) else f"{told}; not all prices are known"


def excess_text(ratio: float) -> str:
    """A cost against the optimum's: 17 % above, 3 % below, equal to."""
    points = round(100.0 * (ratio - 1.0))
    return f"{abs(points)} % {'above' if points > 0 else 'below'}" if points else "equal to"
