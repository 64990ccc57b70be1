"""A plan made again: when it is due, the order for it, and how its fleet differs from the one that is served.

A plan is made again a day after the last. It is made an hour after it where the last hour shows that the plan
no longer holds. The signs are SLO attainment below the target, a rate above the plan's busiest interval, and
other lengths. Each needs `SHORTEST_S` of history. The order asks what the served plan was asked: its targets,
limits, worker types and prices.
"""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.types import PLAIN_CLASS
from tokenfleet.planning.plan_file import FleetPart, PlanFile
from tokenfleet.report.tables import fleet_text
from tokenfleet.service.forks import FEWEST_REQUESTS
from tokenfleet.service.forms import HistoryTrace, PlanOrder, Targets

DAY_S = 86_400.0
SHORTEST_S = 3600.0  # of history that a plan is made of
RECENT_S = 3600.0  # in which signs are looked for, and the shortest time between two plans by them
NEARLY = 0.95  # of a day is one: requests of a fleet that began a day ago
MORE = 1.2  # times the busiest interval that was planned for
OTHER = 1.25  # times the mean lengths that were planned for
SIGMAS = 3.0  # below the target by chance alone
COLUMNS = (
    *("arrival_s", "prompt_tokens", "output_tokens", "outcome"),
    *("ttft_s", "tpot_s", "ttft_target_s", "tpot_target_s"),
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests that a fleet recorded in some seconds. `met`: those within both targets, of `judged`.

    Requests that their clients gave up are not judged. Mean lengths are of requests with an answer.
    """

    seconds: float
    requests: int
    judged: int
    met: int
    prompt_tokens: float | None
    output_tokens: float | None

    @classmethod
    def of(cls, rows: pl.DataFrame, now_s: float) -> Recorded:
        """Those of some rows of history (COLUMNS), from the first one's arrival until `now_s`."""
        seconds = 0.0 if rows.is_empty() else now_s - float(rows["arrival_s"][0])
        judged = rows.filter(pl.col("outcome") != "aborted")
        met = judged.filter(
            pl.col("outcome") == "finished",
            pl.col("ttft_s") <= pl.col("ttft_target_s"),
            pl.col("tpot_s").fill_null(0.0) <= pl.col("tpot_target_s"),
        )
        answered = rows.filter(pl.col("output_tokens") > 0)
        lengths = [answered[name].mean() for name in ("prompt_tokens", "output_tokens")]
        prompt, output = (float(mean) if isinstance(mean, float) else None for mean in lengths)
        return cls(seconds, len(rows), len(judged), len(met), prompt, output)

    @property
    def rate_rps(self) -> float:
        return self.requests / self.seconds if self.seconds > 0 else 0.0

    @property
    def attainment(self) -> float | None:
        return self.met / self.judged if self.judged else None

    def misses(self, target: float) -> bool:
        """Whether more requests missed their targets than chance explains at this attainment."""
        allowed = self.judged * (1.0 - target)
        return self.judged - self.met > allowed + SIGMAS * math.sqrt(allowed * target)


def too_short(kept: Recorded) -> str | None:
    """Why this history is too short to plan from; None where it is long enough."""
    if kept.seconds >= SHORTEST_S and kept.requests >= FEWEST_REQUESTS:
        return None
    return (
        f"history too short: {duration_text(kept.seconds)} and {kept.requests:,} requests recorded, a re-plan"
        f" needs {duration_text(SHORTEST_S)} and {FEWEST_REQUESTS} requests"
    )


def due(plan: PlanFile, planned_s: float, now_s: float, every_s: float, recent: Recorded) -> str | None:
    """Why a plan, made last at `planned_s`, is to be made again now; None while it is not.

    `recent`: what the last RECENT_S recorded.
    """
    if now_s - planned_s >= every_s:
        return f"{duration_text(now_s - planned_s)} since the last plan"
    if now_s - planned_s < min(RECENT_S, every_s) or recent.requests < FEWEST_REQUESTS:
        return None
    return sign(plan, recent)


def sign(plan: PlanFile, recent: Recorded) -> str | None:
    """What shows that a plan no longer holds for the traffic of the last hour; None for nothing."""
    target, found = plan.attainment.target, recent.attainment
    if found is not None and recent.misses(target):
        return f"SLO attainment was {100 * found:.4g} % in the last hour, the target is {100 * target:.4g} %"
    busiest = max((rate for _, rate in plan.curves.rate_rps), default=plan.inputs.rate_rps or math.inf)
    if recent.rate_rps > MORE * busiest:
        return f"{recent.rate_rps:.3g} req/s in the last hour, the plan's busiest interval had {busiest:.3g}"
    line = plan.demand_line
    for what, now, planned in (
        ("prompt", recent.prompt_tokens, line and line.mean_prompt_tokens),
        ("output", recent.output_tokens, line and line.mean_output_tokens),
    ):
        if now and planned and not 1 / OTHER <= now / planned <= OTHER:
            return f"{now:.0f} {what} tokens a request in the last hour, the plan has {planned:.0f}"
    return None


def why_never(plan: PlanFile) -> str | None:
    """Why this plan is not made again from history; None where it is."""
    if any(part.role != "any" for part in plan.fleet):
        return "plans with prefill and decode workers are not made again"
    if plan.agents is not None:
        return "plans for a number of agents are not made again"
    return None


def next_order(plan: PlanFile, since: str, today: datetime.date) -> PlanOrder:
    """The order that asks of this fleet's last `since` what `plan` was asked. Raises BadInput."""
    if (why := why_never(plan)) is not None:
        raise BadInput(f"proposal: {why}")
    named = [one for one in plan.slo_classes if one.name != PLAIN_CLASS]
    reclaims = 0.0 if plan.spares is None else plan.spares.reclaims_per_h
    return PlanOrder(
        trace=HistoryTrace(since=since),
        slo=Targets(ttft_s=plan.slo.ttft_s, tpot_s=plan.slo.tpot_s),
        classes=[
            f"{one.name}:deadline={one.deadline_s!r}s,attainment={one.attainment!r}"
            if one.deadline_s is not None
            else f"{one.name}:ttft={one.slo.ttft_s!r}s,tpot={one.slo.tpot_s!r}s,attainment={one.attainment!r}"
            for one in named
        ],
        attainment=plan.attainment.target,
        confidence=plan.attainment.confidence or plan.inputs.confidence or 0.95,
        profiles=[json.dumps(one.profile) for one in plan.inputs.profiles],
        prices=_prices(plan, today, "spot" if reclaims else "on_demand"),
        spot=bool(reclaims),
        reclaims_per_h=reclaims or None,
        cold_start_s=plan.cold_start_s or None,
        **plan.model_dump(include={"policy", "priority_headroom", "strictness", "session_s"}),
        **plan.inputs.model_dump(include={"budget_usd_per_h", "max_gpus"}),
        no_prefix_cache=plan.prefix_cache is False,
        seed=plan.inputs.seed or 0,
    )


def _prices(plan: PlanFile, today: datetime.date, kind: str) -> str:
    """The prices that were planned with, as a price list."""
    priced = {p.gpu: p.usd_per_gpu_h for p in plan.inputs.profiles if p.usd_per_gpu_h}
    rows = [
        {"gpu": gpu, kind: usd, "date": str(today), "source": "the served plan"}
        for gpu, usd in priced.items()
    ]
    return json.dumps({"schema": "tokenfleet.prices/1", "prices": rows})


@dataclass(frozen=True, slots=True)
class FleetChange:
    """What a new plan would change of a served fleet: its workers by type, and their dollars an hour.

    `observed`: the SLO attainment that was recorded. `expected`: the new fleet's, with its lower `bound`.
    """

    before: tuple[FleetPart, ...]
    after: tuple[FleetPart, ...]
    usd_before: float | None
    usd_after: float | None
    observed: float | None
    expected: float | None
    bound: float | None

    @classmethod
    def between(cls, before: PlanFile, after: PlanFile, observed: float | None) -> FleetChange:
        """From the plan that is served to the new one."""
        fleets, usd = (tuple(before.fleet), tuple(after.fleet)), (before.usd_per_hour, after.usd_per_hour)
        return cls(*fleets, *usd, observed, after.attainment.expected, after.attainment.low)

    @property
    def is_none(self) -> bool:
        return _counts(self.before) == _counts(self.after)

    @property
    def workers(self) -> tuple[int, int]:
        """Before and after."""
        before, after = (sum(part.workers for part in parts) for parts in (self.before, self.after))
        return before, after

    @property
    def usd(self) -> float | None:
        """Dollars an hour more, below 0 where it is less; None without prices."""
        both = self.usd_before, self.usd_after
        return None if both[0] is None or both[1] is None else both[1] - both[0]

    def as_json(self) -> dict[str, Any]:
        """`change` of a proposal."""
        before, after = self.workers
        return {
            "workers": {"before": before, "after": after},
            "tp_degrees": {
                "before": _several(self.before, "tp_degree"),
                "after": _several(self.after, "tp_degree"),
            },
            "gpu_types": {"before": _several(self.before, "gpu"), "after": _several(self.after, "gpu")},
            "usd_per_hour": {"before": self.usd_before, "after": self.usd_after},
            "attainment": {"observed": self.observed, "expected": self.expected, "low": self.bound},
            "fleet": {
                name: [part.model_dump(mode="json") for part in parts]
                for name, parts in (("before", self.before), ("after", self.after))
            },
        }

    def text(self) -> str:
        """The change in a line."""
        was, will = fleet_text(self.before), fleet_text(self.after)
        if self.is_none:
            return f"keep {was}"
        parts = [f"{was} → {will}"]
        if self.usd is not None:
            sign_of = "+" if self.usd > 0 else "-" if self.usd < 0 else "±"
            parts.append(f"${self.usd_after:,.2f}/h ({sign_of}${abs(self.usd):,.2f}/h)")
        if self.expected is not None:
            seen = "" if self.observed is None else f", {100 * self.observed:.2f} % recorded"
            parts.append(f"SLO attainment {100 * self.expected:.2f} % expected{seen}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class AutoApply:
    """The limits within which a proposal is applied without an operator; None for no limit."""

    max_workers: int | None = None
    usd_per_h: float | None = None

    @classmethod
    def read(cls, text: str) -> AutoApply:
        """`max-workers=8,usd=20`, or one of them. Raises BadInput."""
        wrong = BadInput(f"--auto-apply: expected limits such as max-workers=8,usd=20, got {text!r}")
        values: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                values[name] = float(value)
            except ValueError:
                raise wrong from None
            if name not in ("max-workers", "usd") or not 0 < values[name] < 1e9:
                raise wrong
        workers = values.get("max-workers")
        if workers is not None and workers != int(workers):
            raise wrong
        return cls(None if workers is None else int(workers), values.get("usd"))

    def refusal(self, change: FleetChange, recorded_s: float) -> str | None:
        """Why an operator has to apply this change; None where the fleet may."""
        workers, usd = change.workers[1], change.usd_after
        if self.max_workers is not None and workers > self.max_workers:
            return f"{workers} workers are more than max-workers={self.max_workers}"
        if self.usd_per_h is not None and usd is None:
            return f"the plan has no price to compare with usd={self.usd_per_h:g}"
        if self.usd_per_h is not None and usd is not None and usd > self.usd_per_h:
            return f"${usd:,.2f}/h is more than usd={self.usd_per_h:g}"
        before, after = (sum(part.gpus for part in parts) for parts in (change.before, change.after))
        if after < before and recorded_s < NEARLY * DAY_S:
            return f"fewer GPUs need a whole day of history, there are {duration_text(recorded_s)}"
        return None


def _counts(parts: Sequence[FleetPart]) -> Counter[tuple[str, int, str, str]]:
    counts: Counter[tuple[str, int, str, str]] = Counter()
    for part in parts:
        counts[part.gpu, part.tp_degree, part.ranks, part.role] += part.workers
    return counts


def _several(parts: Sequence[FleetPart], name: str) -> list[Any]:
    return sorted({getattr(part, name) for part in parts})
