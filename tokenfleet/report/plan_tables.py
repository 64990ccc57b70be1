"""The tables of a plan's answer. One has the origin of each input: recorded, measured, assumed or other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from controlplane.figures import duration_text
from tokenfleet.planning import plan_file as tree
from tokenfleet.planning.plan_file import PlanFile, PlannedProfile, Shown, kind_of_worker
from tokenfleet.profiles.prices import OWN
from tokenfleet.report.answer import BINDS, gpus_of, within_text
from tokenfleet.report.tables import (
    PHASES,
    asked_text,
    fleet_text,
    gpu_text,
    kind_text,
    phase_row,
    share_text,
    usd_text,
)

ALTERNATIVES = ("Alternatives", "GPUs", "$/h", "attainment", "lower bound", "TTFT p99", "TPOT p99", "note")
CLASSES = ("Class", "requests", "target", "expected", "lower bound", "runs on", "adds", "without it", "alone")
COLUMNS = ["Where numbers come from", "value", "origin", "from", "narrowed by"]
OF_PROFILE = {"measured": "measured", "composed": "predicted", "published": "published"}
DATE = re.compile(r"\d{4}-\d\d-\d\d")


def origins(plan: PlanFile, gpus: set[str]) -> Shown:
    """One row for each input that the answer rests on. `gpus`: those of the plan, for short names."""
    return Shown(title="Where numbers come from", columns=COLUMNS, rows=list(_rows(plan, gpus)))


def _rows(plan: PlanFile, gpus: set[str]) -> Iterator[list[str]]:
    inputs = plan.inputs
    scaled = "" if inputs.rate_scale == 1.0 else f", at {inputs.rate_scale:g}x its rate"
    requests = f"{inputs.requests:,} requests{scaled}"
    origin, narrower = ("assumed", "a recorded trace") if inputs.assumed else ("recorded", "a longer trace")
    yield ["Traffic", requests, origin, inputs.trace, narrower]
    if plan.doubt is not None:
        growth = f"{100 * plan.doubt.of_rate:.0f} % of the rate"
        drift = ("fitted", "the trace, and usual traffic", "traces of more days")
        if inputs.assumed:
            drift = ("assumed", "usual traffic, and the assumptions", "a recorded trace")
        yield ["Traffic drift", growth, *drift]
    serving = {kind_of_worker(part) for part in plan.fleet}
    used = [one for one in inputs.profiles if kind_of_worker(one) in serving] or inputs.profiles
    for profile in used:
        yield from _of_profile(profile, kind_text(profile, gpus))
    for gpu, one in {profile.gpu: profile for profile in used}.items():
        yield _price(gpu_text(gpu, gpus), one)
    if plan.spares is not None:
        rate = f"{plan.spares.reclaims_per_h:g} a worker and hour"
        yield ["Spot interruptions", rate, "given", "--reclaims-per-h", "your provider's record"]
    if (paid := plan.paid) is not None:
        yield ["Cold start", duration_text(paid.cold_start_s), "given", "--cold-start", "a measured start"]


def _of_profile(one: PlannedProfile, name: str) -> Iterator[list[str]]:
    """Step times, KV memory, the time outside the engine, and the KV link, of one worker type."""
    origin = OF_PROFILE.get(one.kind, one.kind)
    source = f"{one.engine or 'an engine'}, {one.date[:7]}"
    error = "" if one.mean_relative_error is None else f"{100 * one.mean_relative_error:.1f} % off on average"
    yield [f"Step times, {name}", error or "-", origin, source, "`tokenfleet calibrate`, or `fit`"]
    kv, frontend = one.profile.get("kv", {}), one.profile.get("frontend", {})
    yield [
        *(f"KV memory, {name}", f"{kv.get('capacity_tokens', 0):,} tokens", origin, source),
        "--kv-tokens, from the engine's log",
    ]
    if (constant := frontend.get("per_request_s")) is not None:
        assumed = "assumed" if one.kind == "composed" else origin
        yield [f"HTTP and tokenizer, {name}", duration_text(constant), assumed, source, "`compare`"]
    if ahead := one.profile.get("engine", {}).get("steps_ahead"):
        yield [
            f"Steps planned ahead, {name}",
            f"{ahead:g}",
            "assumed",
            source,
            "the engine's async scheduling",
        ]
    if one.kv_link is not None:
        value = f"{one.kv_link.gb_per_s:g} GB/s a GPU"
        yield [f"KV link, {name}", value, "assumed", "data sheets, or --kv-gb-per-s", "a measured copy"]


def _price(gpu: str, one: PlannedProfile) -> list[str]:
    if one.usd_per_gpu_h is None:
        return [f"Price, {gpu}", "unknown", "-", "-", "--prices"]
    text = one.price or ""
    list_name, dated = text.partition(":")[0] if text.startswith(OWN) else "price list", DATE.search(text)
    return [
        *(f"Price, {gpu}", f"${one.usd_per_gpu_h:.2f} a GPU and hour"),
        "given" if text.startswith(OWN) else "listed",
        *(f"{list_name} of {dated[0]}" if dated else list_name, "--prices"),
    ]


def tables(plan: PlanFile) -> Iterator[Shown]:
    """Classes, alternatives, what would help, ruled-out types, the schedule, and the inputs' origins."""
    gpus = gpus_of(plan)
    yield from _assumed(plan)
    if rows := [_class_row(one, gpus) for one in plan.classes if one.requests is not None]:
        yield Shown(title="Classes", columns=list(CLASSES), rows=rows)
    if plan.alternatives:
        rows = [_alternative_row(one, gpus) for one in plan.alternatives]
        if not any(row[-1] for row in rows):
            rows = [row[:-1] for row in rows]
        yield Shown(title="Alternatives", columns=list(ALTERNATIVES[: len(rows[0])]), rows=rows)
    if plan.binding_detail is not None:
        gains = sorted(plan.binding_detail.relief.items(), key=lambda gain: -gain[1])
        rows = [[BINDS[name][1], f"{100 * gain:+.2f}"] for name, gain in gains]
        yield Shown(title="What would help", columns=["What would help there", "points"], rows=rows)
    if plan.passed_over:
        rows = [[kind_text(one, gpus), one.reason] for one in plan.passed_over]
        yield Shown(title="Ruled out", columns=["Ruled out", "why"], rows=rows)
    if len(plan.inputs.phases) > 1:
        rows = [list(phase_row(phase)) for phase in plan.inputs.phases]
        yield Shown(title="Traffic phases", columns=list(PHASES), rows=rows)
    yield from _schedule(plan)
    yield origins(plan, gpus)


def _assumed(plan: PlanFile) -> Iterator[Shown]:
    """The assumptions of a trace that was drawn."""
    if plan.inputs.assumed:
        columns = ["Assumed", "value", "from"]
        yield Shown(title="Assumptions", columns=columns, rows=plan.inputs.assumed)


def _schedule(plan: PlanFile) -> Iterator[Shown]:
    """The workers of each interval, or of each hour of a week."""
    if plan.schedule_detail and (week := plan.schedule_detail.week):
        hours = 24 // len(next(iter(week.values())))
        spans = [f"{start:02d}-{start + hours:02d}" for start in range(0, 24, hours)]
        rows = [[day, *map(str, counts)] for day, counts in week.items()]
        yield Shown(title="Scaling schedule", columns=["Workers (UTC)", *spans], rows=rows)
    elif len(plan.schedule) > 1:
        rows = [[f"{s.start_s:.0f}", f"{s.end_s:.0f}", str(s.workers), s.fleet or ""] for s in plan.schedule]
        yield Shown(title="Scaling schedule", columns=["from (s)", "to (s)", "workers", "fleet"], rows=rows)


def _alternative_row(one: tree.Considered, gpus: set[str]) -> list[str]:
    reached = one.attainment
    expected = reached.on_trace if reached.expected is None else reached.expected
    p99 = (None if of is None else of.p99 for of in (one.ttft_s, one.tpot_s))
    return [
        fleet_text(one.fleet, gpus),
        str(one.gpus),
        "?" if one.usd_per_hour is None else f"{one.usd_per_hour:,.2f}",
        *("-" if share is None else share_text(share) for share in (expected, reached.low)),
        *("-" if at_s is None else duration_text(at_s) for at_s in p99),
        one.note or "",
    ]


def _class_row(one: tree.PlannedClass, gpus: set[str]) -> list[str]:
    """Size, target, attainment, where it runs, what it adds, fleets without it and its own."""
    reached, adds = one.attainment, one.marginal_usd_per_hour
    return [
        one.name,
        f"{one.requests:,}",
        f"{asked_text(reached.target)} within {within_text(one)}",
        *("-" if share is None else share_text(share) for share in (reached.expected, reached.low)),
        f"{one.runs_on[0].worker} ({100 * one.runs_on[0].share:.0f} %)" if one.runs_on else "-",
        "-" if adds is None else usd_text(adds),
        *("-" if fleet is None else fleet_text(fleet.fleet, gpus) for fleet in (one.without, one.alone)),
    ]
