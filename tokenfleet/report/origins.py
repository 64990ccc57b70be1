"""The origin of a plan's inputs: recorded, measured, fitted, predicted, listed, assumed or given."""

from __future__ import annotations

import re
from collections.abc import Iterator

from controlplane.figures import duration_text
from tokenfleet.planning.plan_file import PlanFile, PlannedProfile, Shown, kind_of_worker
from tokenfleet.profiles.prices import OWN
from tokenfleet.report.tables import gpu_text, kind_text

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
