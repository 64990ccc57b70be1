"""An advice in words and as JSON, and as Prometheus gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from controlplane.figures import counted, duration_text
from controlplane.scaler.line import LEAST_REQUESTS
from controlplane.types import Slo
from tokenfleet.advise.advice import Advice, AdviceSettings, Spent, TypeAdvice
from tokenfleet.advise.bottleneck import bottleneck, hopeless
from tokenfleet.advise.decide import doubt_of
from tokenfleet.report.tables import asked_text, share_text, usd_text

SCHEMA = "tokenfleet.advice/1"
SHORTEST_H = 0.05  # of a watch whose cost is worth a line
TARGETS = {"ttft": "TTFT", "tpot": "TPOT"}
MOST = 100_000  # replicas, where no ceiling is given
EASED = {"step time": "steps 20 % shorter", "TPOT target": "one 25 % looser"}
OPENS = ("Target", "Why", "Replicas")
Clock = Callable[[float], datetime]


def verdict(settings: AdviceSettings, advice: Advice) -> str:
    """The advice in a sentence."""
    has, wanted = counted(advice.has, "replica"), advice.wanted
    if wanted is None:
        return f"None yet, since {_awaited(advice)}; {has} now"
    sure = ""
    if advice.likely is not None and advice.likely[0] != advice.likely[1]:
        sure = f" (90 % sure: {advice.likely[0]} to {advice.likely[1]})"
    if len(advice.of_types) > 1:
        text = _mix_text(advice)
    elif wanted == advice.has:
        text = f"Keep {has}: the traffic needs {wanted}{sure}"
    elif wanted > advice.has:
        text = f"Add {wanted - advice.has}: {has}, the traffic needs {wanted}{sure}"
    else:
        text = f"Remove {advice.has - wanted}: {has}, the traffic needs {wanted}{sure}"
    return f"HELD. {text}" if advice.held else text


def lines(settings: AdviceSettings, advice: Advice, clock: Clock) -> Iterator[tuple[str, str]]:
    """What there is to say, the verdict first: (topic, text)."""
    slo = settings.slo
    yield "Advice", verdict(settings, advice)
    if advice.held:
        yield "Metrics", held_text(advice, clock)
    if advice.applied:
        yield "Applied", advice.applied
    yield "Cost", cost_text(advice)
    if advice.spent is not None and advice.spent.hours >= SHORTEST_H:
        yield "Spent", spent_text(advice.spent)
    for one in advice.of_types if len(advice.of_types) > 1 else ():
        yield one.worker_type.name, _type_text(settings, advice, one)
    within = f"TTFT {duration_text(slo.ttft_s)} and TPOT {duration_text(slo.tpot_s)}"
    yield "Target", f"{asked_text(settings.attainment)} of requests within {within}"
    yield "In time", _shares_text(advice)
    if advice.regime is not None and advice.since_s is not None:
        yield "Traffic", _traffic_text(advice, clock)
    yield from _reasons(slo, advice)
    if (change := advice.change) is not None and change.before is not None:
        at = f"{clock(change.at_s):%H:%M:%S}"
        yield "Last change", f"{at} from {change.before} to {change.after}: {change.why}"
    there = f"{advice.has} at the last count" if advice.held else f"{advice.has} answering"
    starting = f", {advice.starting} starting" if advice.starting else ""
    busy = (
        f"{advice.running:.0f} running, {advice.waiting:.0f} waiting, {advice.arrivals:,.0f} arrivals counted"
    )
    yield "Replicas", f"{there}{starting}; requests: {busy}"
    for one in advice.of_types:
        known = "calibrated by these servers" if one.is_calibrated else "not yet calibrated"
        yield "Step times", f"{one.profile.label}, {known}: off by up to {percent(doubt_of(one.profile))}"


def _reasons(slo: Slo, advice: Advice) -> Iterator[tuple[str, str]]:
    """The scaling rule and the bottleneck of the only type, and the types that cannot meet the target."""
    several = len(advice.of_types) > 1
    if advice.line is not None:
        rule = f"ceil({advice.line.workers_per_rps:.3g} x req/s + {advice.line.intercept:.2g})"
        yield "Why", f"replicas = {rule}, at {advice.upper_rps:.3g} req/s"
    for one in advice.of_types if advice.lengths is not None else ():
        assert advice.lengths is not None
        if not several:
            binds = bottleneck(one.profile, slo, *advice.lengths)
            eased = EASED.get(binds.name, "25 % more of it")
            yield "Bottleneck", f"{binds.name}; {eased} would save {percent(binds.spares)} of the replicas"
        if why := hopeless(one.profile, slo, *advice.lengths):
            of = f" of {one.worker_type.name}" if several else ""
            yield "Warning", f"no number of replicas{of} meets the target: {why}"


def _mix_text(advice: Advice) -> str:
    """What to add and to remove of each type."""
    changes = [(one.worker_type.name, (one.wanted or 0) - one.has) for one in advice.of_types]
    steps = [f"{'add' if n > 0 else 'remove'} {abs(n)} {name}" for name, n in changes if n]
    if not steps:
        has = " + ".join(f"{one.has} {one.worker_type.name}" for one in advice.of_types)
        return f"Keep {has}: they are the cheapest for the traffic"
    said = ", ".join(steps)
    return f"{said[0].upper()}{said[1:]}: then the fleet is the cheapest for the traffic"


def _type_text(settings: AdviceSettings, advice: Advice, one: TypeAdvice) -> str:
    """What runs of a type, what should run, and why."""
    text = f"{one.has} answering" + (f", {one.starting} starting" if one.starting else "")
    if one.wanted is not None:
        text += f", {one.wanted} desired"
        if one.likely is not None and one.likely[0] != one.likely[1]:
            text += f" (90 % sure: {one.likely[0]} to {one.likely[1]})"
        text += {one.worker_type.low: ", the floor", one.worker_type.limit: ", the ceiling"}.get(
            one.wanted, ""
        )
    if one.carries_rps is not None:
        text += f"; one carries {one.carries_rps:.3g} req/s"
        if one.worker_type.usd_per_h is not None:
            text += f", ${one.worker_type.usd_per_h / one.carries_rps / 3.6:.3g} per 1,000 requests"
    if binds := _bottleneck(settings, advice, one):
        text += f"; bottleneck {binds}"
    carried = sum(of.has * (of.carries_rps or 0.0) for of in advice.of_types)
    if one.gets is not None and one.carries_rps is not None and carried > 0:
        could = percent(one.has * one.carries_rps / carried)
        text += f"; gets {percent(one.gets)} of the requests, could take {could}"
    return text


def held_text(advice: Advice, clock: Clock) -> str:
    """Why this look counted nothing, and what becomes of the advice."""
    since = "" if advice.held_since_s is None else f" since {clock(advice.held_since_s):%H:%M:%S}"
    kept = "the last advice stands" if advice.published is not None else "no advice is published"
    return f"{advice.held}. Not counted{since}; {kept}"


def cost_text(advice: Advice) -> str:
    """What the fleet costs, and what it would by the advice."""
    if advice.usd_per_h is None or any(one.worker_type.usd_per_h is None for one in advice.of_types):
        return "no price known for this GPU; give one with --prices"
    has, wanted = usd_text(advice.usd_per_h), advice.wanted_usd_per_h
    if wanted is None or abs(more := wanted - advice.usd_per_h) < 0.005:
        return has
    return f"{has}; this advice costs {usd_text(abs(more))} {'more' if more > 0 else 'less'}"


def spent_text(spent: Spent) -> str:
    """Replica-hours that the fleet had and that the advice asked for, with what they cost."""
    had, advised = (
        f"{hours:.3g} replica-hours" + ("" if spent.usd is None else f" (${spent.usd[i]:,.2f})")
        for i, hours in enumerate((spent.had, spent.advised))
    )
    low, high = spent.likely
    sure = f"; 90 % sure: {low:.3g} to {high:.3g}" if f"{low:.3g}" != f"{high:.3g}" else ""
    return f"{had} in the last {duration_text(spent.hours * 3600.0)}; the advice asked for {advised}{sure}"


def percent(share: float) -> str:
    """A share in whole percents."""
    return f"{share * 100:.0f} %"


def _awaited(advice: Advice) -> str:
    if advice.held:
        return "the metrics are missing"
    if advice.of_types[0].carries_rps is None:
        return f"fewer than {LEAST_REQUESTS:.0f} requests ended lately"
    return "counting the traffic takes some 20 s"


def _traffic_text(advice: Advice, clock: Clock) -> str:
    assert advice.regime is not None
    assert advice.since_s is not None
    text = f"{advice.regime.rate_rps:.3g} req/s since {clock(advice.since_s):%H:%M:%S}"
    text += f" (the advice allows for {advice.upper_rps:.3g})"
    if advice.lengths is not None:
        text += f", {advice.lengths[0]:,.0f} prompt and {advice.lengths[1]:,.0f} output tokens on average"
    return text


def _shares_text(advice: Advice) -> str:
    """The shares of recent requests in time, and the targets that vLLM's histograms count exactly."""
    parts, edges = [], []
    for name, said in TARGETS.items():
        share = advice.shares[name]
        if share is None:
            parts.append(f"{said} not known")
        elif share[0] == share[1]:
            parts.append(f"{said} {share_text(share[0])}")
        else:
            parts.append(f"{said} {share_text(share[0])} to {share_text(share[1])}")
            edges.append(f"{said} {' or '.join(map(duration_text, advice.edges[name]))}")
    exact = f" (vLLM's counts are exact at {', '.join(edges)})" if edges else ""
    return "; ".join(parts) + exact


def document(settings: AdviceSettings, advice: Advice, clock: Clock) -> dict[str, Any]:
    """The advice as JSON."""
    rate_rps = None if advice.regime is None else advice.regime.rate_rps
    prompt_tokens, output_tokens = advice.lengths or (None, None)
    only = None if advice.of_types[1:] else advice.of_types[0]
    change = advice.change
    return {
        "schema": SCHEMA,
        "at": _iso(advice.at_s, clock),
        "model": settings.served,
        "worker_type": None if only is None else only.worker_type.name,
        "replicas": advice.has,
        "starting": advice.starting,
        "wanted_replicas": advice.wanted,
        "published_replicas": advice.published,
        "likely": advice.likely,
        "floor": settings.scaling.target.low,
        "ceiling": _bounded(settings.scaling.target.high),
        "held": advice.held or None,
        "held_since": _iso(advice.held_since_s, clock),
        "usd_per_hour": _product(advice.usd_per_h, 1),
        "wanted_usd_per_hour": _product(advice.wanted_usd_per_h, 1),
        "worker_types": [_type_document(one) for one in advice.of_types] if only is None else None,
        "rate_rps": _product(rate_rps, 1),
        "rate_since": _iso(advice.since_s, clock),
        "mean_prompt_tokens": _product(prompt_tokens, 1),
        "mean_output_tokens": _product(output_tokens, 1),
        "workers_per_rps": None if advice.line is None else advice.line.workers_per_rps,
        "intercept": None if advice.line is None else advice.line.intercept,
        "bottleneck": _bottleneck(settings, advice, only),
        "spent": None
        if advice.spent is None
        else {
            "hours": round(advice.spent.hours, 4),
            "replica_hours": round(advice.spent.had, 4),
            "advised_replica_hours": round(advice.spent.advised, 4),
            "likely": [round(hours, 4) for hours in advice.spent.likely],
        },
        "applied": advice.applied or None,
        "running": advice.running,
        "waiting": advice.waiting,
        "arrivals": advice.arrivals,
        "in_time": advice.shares,
        "step_time_doubt": round(max(doubt_of(one.profile) for one in advice.of_types), 4),
        "change": None
        if change is None
        else {
            "at": _iso(change.at_s, clock),
            "from": change.before,
            "to": change.after,
            "reason": change.why,
        },
        "says": list(lines(settings, advice, clock)),
    }


def _bottleneck(settings: AdviceSettings, advice: Advice, one: TypeAdvice | None) -> str | None:
    """The bottleneck of a type's replica; None for no type, and before lengths are known."""
    if one is None or advice.lengths is None:
        return None
    return bottleneck(one.profile, settings.slo, *advice.lengths).name


def _type_document(one: TypeAdvice) -> dict[str, Any]:
    """The part of a type as JSON."""
    return {
        "worker_type": one.worker_type.name,
        "replicas": one.has,
        "starting": one.starting,
        "wanted_replicas": one.wanted,
        "published_replicas": one.published,
        "likely": one.likely,
        "floor": one.worker_type.low,
        "ceiling": _bounded(one.worker_type.limit),
        "usd_per_hour": one.worker_type.usd_per_h,
        "carries_rps": _product(one.carries_rps, 1),
        "arrivals": one.arrivals,
        "share_of_requests": _product(one.gets, 1),
    }


def _bounded(most: int | None) -> int | None:
    """A ceiling; None where none was given."""
    return None if most == MOST else most


def _iso(at_s: float | None, clock: Clock) -> str | None:
    return None if at_s is None else clock(at_s).astimezone(UTC).isoformat(timespec="seconds")


def _product(value: float | None, times: int | None) -> float | None:
    return None if value is None or times is None else round(value * times, 4)
