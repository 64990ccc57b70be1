"""An advice in words and as JSON, and as Prometheus gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from tokenfleet.advise.advice import Advice, AdviceSettings, Spent
from tokenfleet.advise.bottleneck import bottleneck, hopeless
from tokenfleet.advise.decide import doubt_of
from tokenfleet.report.tables import asked_text, share_text, usd_text
from tokenfleet.texts import duration_text

SCHEMA = "tokenfleet.advice/1"
SHORTEST_H = 0.05  # of a watch whose cost is worth a line
TARGETS = {"ttft": "TTFT", "tpot": "TPOT"}
MOST = 100_000  # replicas, where no ceiling is given
OPENS = ("Target", "Why", "Replicas")
Clock = Callable[[float], datetime]


def verdict(settings: AdviceSettings, advice: Advice) -> str:
    """The advice in a sentence."""
    has, wanted = replicas_text(advice.has), advice.wanted
    if wanted is None:
        return f"None yet, since {_awaited(advice)}; {has} now"
    sure = ""
    if advice.likely is not None and advice.likely[0] != advice.likely[1]:
        sure = f" (90 % sure: {advice.likely[0]} to {advice.likely[1]})"
    if wanted == advice.has:
        text = f"Keep {has}: they are what the traffic needs{sure}"
    elif wanted > advice.has:
        text = f"Add {wanted - advice.has}: {has}, the traffic needs {wanted}{sure}"
    else:
        text = f"Remove {advice.has - wanted}: {has}, the traffic needs {wanted}{sure}"
    return f"HELD. {text}" if advice.held else text


def lines(settings: AdviceSettings, advice: Advice, clock: Clock) -> Iterator[tuple[str, str]]:
    """What there is to say, the verdict first: (topic, text)."""
    slo, profile = settings.slo, advice.profile
    yield "Advice", verdict(settings, advice)
    if advice.held:
        yield "Metrics", held_text(advice, clock)
    if advice.applied:
        yield "Applied", advice.applied
    yield "Cost", cost_text(settings, advice)
    if advice.spent is not None and advice.spent.hours >= SHORTEST_H:
        yield "Spent", spent_text(settings, advice.spent)
    within = f"TTFT {duration_text(slo.ttft_s)} and TPOT {duration_text(slo.tpot_s)}"
    yield "Target", f"{asked_text(settings.attainment)} of requests within {within}"
    yield "In time", _shares_text(advice)
    if advice.regime is not None and advice.since_s is not None:
        yield "Traffic", _traffic_text(advice, clock)
    if advice.line is not None:
        rule = f"ceil({advice.line.workers_per_rps:.3g} x req/s + {advice.line.intercept:.2g})"
        yield "Why", f"replicas = {rule}, at {advice.upper_rps:.3g} req/s"
    if advice.lengths is not None:
        binds = bottleneck(profile, slo, *advice.lengths)
        saves = f"25 % more of it would save {percent(binds.spares)} of the replicas"
        yield "Bottleneck", f"{binds.name}; {saves}"
        if why := hopeless(profile, slo, *advice.lengths):
            yield "Beware", f"no number of replicas meets the target: {why}"
    if (change := advice.change) is not None and change.before is not None:
        at = f"{clock(change.at_s):%H:%M:%S}"
        yield "Last change", f"{at} from {change.before} to {change.after}: {change.why}"
    busy = f"{advice.running:.0f} requests running, {advice.waiting:.0f} waiting"
    starting = f", {advice.starting} starting" if advice.starting else ""
    yield "Replicas", f"{advice.has} answer{starting}; {busy}; {advice.arrivals:,.0f} arrivals counted"
    is_known = profile is not settings.worker_type.profile
    known = "calibrated by these servers" if is_known else "not yet calibrated"
    yield "Step times", f"{profile.label}, {known}: off by up to {percent(doubt_of(profile))}"


def held_text(advice: Advice, clock: Clock) -> str:
    """Why this look counted nothing, and what becomes of the advice."""
    since = "" if advice.held_since_s is None else f" since {clock(advice.held_since_s):%H:%M:%S}"
    kept = "the last advice stands" if advice.published is not None else "no advice is published"
    return f"{advice.held}. Not counted{since}; {kept}"


def cost_text(settings: AdviceSettings, advice: Advice) -> str:
    """What the fleet costs, and what it would by the advice."""
    each = settings.worker_type.usd_per_h
    if each is None:
        return "no price known for this GPU; give one with --prices"
    has, more = usd_text(advice.has * each), (advice.wanted or advice.has) - advice.has
    if advice.wanted is None or more == 0:
        return has
    return f"{has}; this advice costs {usd_text(abs(more) * each)} {'more' if more > 0 else 'less'}"


def spent_text(settings: AdviceSettings, spent: Spent) -> str:
    """Replica-hours that the fleet had and that the advice asked for, with what they cost."""
    each = settings.worker_type.usd_per_h
    had, advised = (
        f"{hours:.3g} replica-hours" + ("" if each is None else f" (${hours * each:,.2f})")
        for hours in (spent.had, spent.advised)
    )
    low, high = spent.likely
    sure = f"; 90 % sure: {low:.3g} to {high:.3g}" if f"{low:.3g}" != f"{high:.3g}" else ""
    return f"{had} in the last {duration_text(spent.hours * 3600.0)}; the advice asked for {advised}{sure}"


def percent(share: float) -> str:
    """A share in whole percents."""
    return f"{share * 100:.0f} %"


def replicas_text(count: int) -> str:
    return f"{count} replica" + ("" if count == 1 else "s")


def _awaited(advice: Advice) -> str:
    if advice.held:
        return "the metrics are missing"
    if advice.lengths is None:
        return "no request has ended"
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
    exact = f" (vLLM counts exactly at {', '.join(edges)})" if edges else ""
    return "; ".join(parts) + exact


def document(settings: AdviceSettings, advice: Advice, clock: Clock) -> dict[str, Any]:
    """The advice as JSON."""
    each, rate_rps = settings.worker_type.usd_per_h, None if advice.regime is None else advice.regime.rate_rps
    prompt_tokens, output_tokens = advice.lengths or (None, None)
    binds = None if advice.lengths is None else bottleneck(advice.profile, settings.slo, *advice.lengths).name
    change = advice.change
    return {
        "schema": SCHEMA,
        "at": _iso(advice.at_s, clock),
        "model": settings.served,
        "worker_type": settings.worker_type.name,
        "replicas": advice.has,
        "starting": advice.starting,
        "wanted_replicas": advice.wanted,
        "published_replicas": advice.published,
        "likely": advice.likely,
        "floor": settings.scaling.limits.low,
        "ceiling": None if settings.scaling.limits.high in (None, MOST) else settings.scaling.limits.high,
        "held": advice.held or None,
        "held_since": _iso(advice.held_since_s, clock),
        "usd_per_hour": _product(each, advice.has),
        "wanted_usd_per_hour": _product(each, advice.wanted),
        "rate_rps": _product(rate_rps, 1),
        "rate_since": _iso(advice.since_s, clock),
        "mean_prompt_tokens": _product(prompt_tokens, 1),
        "mean_output_tokens": _product(output_tokens, 1),
        "workers_per_rps": None if advice.line is None else advice.line.workers_per_rps,
        "intercept": None if advice.line is None else advice.line.intercept,
        "bottleneck": binds,
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
        "step_time_doubt": round(doubt_of(advice.profile), 4),
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


def _iso(at_s: float | None, clock: Clock) -> str | None:
    return None if at_s is None else clock(at_s).astimezone(UTC).isoformat(timespec="seconds")


def _product(value: float | None, times: int | None) -> float | None:
    return None if value is None or times is None else round(value * times, 4)
