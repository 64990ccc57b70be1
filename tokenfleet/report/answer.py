"""The plan's answer in words: the lines that terminal, report and console print.

Each line is a topic and a text, made from the plan's document alone. docs/read-your-plan.md explains every
topic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date

from controlplane.figures import counted, duration_text
from controlplane.perfmodel.uncertainty import calibrating_narrows
from tokenfleet.planning import plan_file as tree
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.prices import OWN
from tokenfleet.report.tables import asked_text, count_text, fleet_text, share_text, usd_text

GUIDE = "docs/read-your-plan.md"
GAP = "   "  # between the figures of a line
# The topics that begin a block: a blank line goes before each.
OPENS = ("Target", "SLO attainment", "Why not fewer?")
LEAST_SAVING = 0.005  # of the cost, that a line tells of
LOST = 0.5  # of the hit rate, where the search for more sessions counts the caches as lost

BINDS = {
    "ttft": ("the TTFT target", "A TTFT target 25 % looser"),
    "tpot": ("the TPOT target", "A TPOT target 25 % looser"),
    "kv": ("KV memory", "25 % more KV memory"),
    "prefill": ("prefill compute", "Prefill 20 % faster"),
    "session": ("the time of whole sessions", "A session time 25 % longer"),
}
_DRIFT = {
    "steady": "steady",
    "changes": "drifting (rate ±{:.0f} %)",
    "assumed": "assumed (rate ±{:.0f} %)",
    "too short to tell": "too short to show drift (rate ±{:.0f} %)",
}
_DRAWN = re.compile("the recorded(?= tra(?:ce|ffic))")
_SOURCES = {"arrivals": "arrivals", "drift": "traffic drift", "coefficients": "step times"}


def says(plan: PlanFile) -> Iterator[tuple[str, str]]:
    """(topic, text) lines, the verdict first. A trace that was drawn is called so."""
    for topic, text in _says(plan):
        yield topic, text if not plan.inputs.assumed else _DRAWN.sub("the drawn", text)


def _says(plan: PlanFile) -> Iterator[tuple[str, str]]:
    yield from _verdict(plan)
    yield "Target", target_text(plan)
    yield "Traffic", _traffic(plan)
    if plan.feasible:
        yield from _measured(plan)
        yield from _reasons(plan)
        yield from _reused(plan)
        yield from _over_time(plan)
    yield "Note", ages(plan.inputs.profiles)


def headline(plan: PlanFile) -> str:
    """The verdict in one line."""
    return verdict_text(next(_verdict(plan)))


def verdict_text(line: Sequence[str]) -> str:
    """A line of an answer as a sentence without its gaps."""
    return ": ".join(line).replace(GAP, ", ")


def gpus_of(plan: PlanFile) -> set[str]:
    """The types of GPU that were planned with."""
    return {profile.gpu for profile in plan.inputs.profiles}


def _verdict(plan: PlanFile) -> Iterator[tuple[str, str]]:
    gpus = gpus_of(plan)
    if not plan.feasible:
        yield "No fleet meets the target", f"{plan.reason}."
        near = plan.nearest_feasible
        if near is not None and near.ttft_s is not None and near.tpot_s is not None:
            several = len(plan.classes) > 1
            looser = (
                f"all {near.looser:.2f} times as loose; the tightest is " if several and near.looser else ""
            )
            session = "" if near.session_s is None else f", sessions {duration_text(near.session_s)}"
            within = f"TTFT {duration_text(near.ttft_s)} and TPOT {duration_text(near.tpot_s)}{session}"
            cost = f"{counted(near.gpus, 'GPU')}{GAP}{usd_text(near.usd_per_hour)}"
            yield "Nearest target", f"{looser}{within}, met by {fleet_text(near.fleet, gpus)}{GAP}{cost}"
        elif near is not None and near.attainment is not None:
            yield "Nearest target", f"this trace can show at most {share_text(near.attainment)}"
        return
    cost = f"{counted(plan.gpus, 'GPU')}{GAP}{usd_text(plan.usd_per_hour)}"
    yield "Recommended fleet", f"{fleet_text(plan.fleet, gpus)}{GAP}{cost}{GAP}meets the target"
    second = next((one for one in plan.alternatives if one.attainment.low is not None), None)
    if second is not None:
        cost = f"{counted(second.gpus, 'GPU')}{GAP}{usd_text(second.usd_per_hour)}"
        yield "Next best", f"{fleet_text(second.fleet, gpus)}{GAP}{cost}"


def within_text(one: tree.PlannedClass) -> str:
    """The targets of a class: `TTFT 400 ms and TPOT 30 ms`, or when its answers are due."""
    if one.deadline_s is not None:
        return f"a deadline of {duration_text(one.deadline_s)}"
    return f"TTFT {duration_text(one.ttft_s)} and TPOT {duration_text(one.tpot_s)}"


def target_text(plan: PlanFile) -> str:
    """The targets: of all requests, or of each class."""
    asked = asked_text(plan.attainment.target)
    within = f"TTFT {duration_text(plan.slo.ttft_s)} and TPOT {duration_text(plan.slo.tpot_s)}"
    text = f"{asked} of requests within {within}"
    if plan.classes:
        each = (f"{c.name}: {asked_text(c.attainment.target)} within {within_text(c)}" for c in plan.classes)
        text = "; ".join(each)
    if plan.session_s is not None:
        text += f", {asked} of sessions within {duration_text(plan.session_s)}"
    if plan.agents is not None:
        text += f", {plan.agents:,} concurrent sessions"
    sure = plan.inputs.confidence or plan.attainment.confidence
    return text if sure is None else f"{text}, {asked_text(sure)} confidence"


def _traffic(plan: PlanFile) -> str:
    inputs, doubt = plan.inputs, plan.doubt
    text = f"{inputs.trace}: {counted(inputs.requests, 'request')} in {duration_text(inputs.duration_s)}"
    if plan.agents is not None:  # concurrent sessions set the rate
        return text
    text += f", {inputs.rate_rps or 0.0:.3g} req/s"
    return text if doubt is None else f"{text}, {_DRIFT[doubt.traffic].format(100 * doubt.of_rate)}"


def _measured(plan: PlanFile) -> Iterator[tuple[str, str]]:
    reached, slo = plan.attainment, plan.slo
    figures = []
    if reached.expected is not None and reached.low is not None:
        figures += [f"{share_text(reached.expected)} expected", f"{share_text(reached.low)} lower bound"]
    if reached.on_trace is not None:
        figures.append(f"{share_text(reached.on_trace)} on the recorded trace")
    yield "SLO attainment", GAP.join(figures)
    several = len(plan.classes) > 1  # each has limits of its own
    yield "TTFT", _quantiles(plan.ttft_s, None if several else slo.ttft_s)
    yield "TPOT", _quantiles(plan.tpot_s, None if several else slo.tpot_s)
    if plan.sampling is not None:
        yield "Sampling", sampling_text(plan.sampling)


def _quantiles(of: tree.Quantiles | None, limit_s: float | None) -> str:
    if of is None or of.p50 is None or of.p90 is None or of.p99 is None:
        return "no request has one"
    row = [f"p50 {duration_text(of.p50)}", f"p90 {duration_text(of.p90)}", f"p99 {duration_text(of.p99)}"]
    return GAP.join(row if limit_s is None else [*row, f"(limit {duration_text(limit_s)})"])


def sampling_text(sampled: tree.TraceSample) -> str:
    """The sample of a long trace, and the result of replaying all of it."""
    text = (
        f"{sampled.windows:,} of {sampled.of_windows:,} windows ({count_text(sampled.requests)} requests)"
        f" reach {share_text(sampled.attainment)}, at least {share_text(sampled.low)} of the whole trace. "
    )
    if sampled.full_replay is None:
        return f"{text}This policy is not replayed on the whole trace."
    more = f" with {counted(sampled.added_workers, 'worker')} more" if sampled.added_workers else ""
    return f"{text}Replayed{more}, the whole trace reaches {share_text(sampled.full_replay)}."


def _reasons(plan: PlanFile) -> Iterator[tuple[str, str]]:
    target = asked_text(plan.attainment.target)
    if plan.one_fewer is not None:
        yield "Why not fewer?", fewer_text(plan.one_fewer, plan)
    if plan.workers_range is not None:
        low, high = plan.workers_range
        count = counted(low, "worker") if low == high else f"{low} to {high} workers"
        yield "Range", f"{count}, once your own trace replaces the assumptions (nine times in ten)"
    yield from _cheaper_mixes(plan)
    if plan.moves is not None:
        yield "Moves", moves_text(plan.moves, plan)
    if plan.binding is not None:
        yield "Bottleneck", bottleneck_text(plan)
    if (room := plan.headroom) is not None:
        end = f"misses it at {room.misses:g}x" if room.misses else "the most that was tried"
        text = f"meets {target} up to {room.meets:g}x this traffic, {end} (in the hardest resampled traces)"
        yield "Headroom", text
    if plan.demand_line is not None or plan.agents_line is not None:
        yield "Scaling rule", scaling_text(plan)
    if (doubt := plan.doubt) is not None:
        yield "Main uncertainty", _uncertainty(plan, doubt.shares)
    if plan.plateau is not None:
        yield "More workers", plateau_text(plan.plateau)
    if any(one.requests for one in plan.classes):
        yield "Classes", classes_text(plan)


def fewer_text(fewer: tree.OneFewer, plan: PlanFile) -> str:
    """Why one worker less does not do."""
    workers, target, asked = _few(fewer, plan), plan.attainment.target, asked_text(plan.attainment.target)
    reaches, expects = ("reaches", "is") if fewer.workers == 1 else ("reach", "are")
    if fewer.attainment is None or fewer.workers == 0:
        return "One worker is the smallest fleet."
    if fewer.low is None and fewer.on_trace == 0.0:
        return f"{workers} cannot carry the load."
    if fewer.on_trace is not None and fewer.on_trace < target:
        return f"{workers} {reaches} {share_text(fewer.on_trace)} on the recorded trace, below {asked}."
    expected = f"{workers} {expects} expected to reach {share_text(fewer.attainment)}"
    if fewer.attainment < target:
        recorded = "" if fewer.on_trace is None else f" ({share_text(fewer.on_trace)} on the recorded trace)"
        return f"{expected}, below {asked}{recorded}."
    if fewer.low is not None and fewer.low < target:
        return f"{expected}, but the lower bound of {share_text(fewer.low)} is below {asked}."
    return f"{workers} may do, too; the mix was chosen for its price."


def _few(of: tree.OneFewer | tree.BindingDetail, plan: PlanFile) -> str:
    return fleet_text(of.fleet, gpus_of(plan)) if of.fleet else counted(of.workers, "worker")


def _cheaper_mixes(plan: PlanFile) -> Iterator[tuple[str, str]]:
    """The most that an untried mix may save; nothing if none can be cheaper."""
    mixes = plan.mixes
    if mixes is not None and (may_save := mixes.may_save or 0.0) >= LEAST_SAVING:
        stopped = f"The search stopped after {mixes.replayed} mixes ({mixes.replays} replays)"
        yield "Cheaper mixes", f"one up to {100 * may_save:.0f} % cheaper may exist. {stopped}."


def moves_text(moves: tree.PlannedMoves, plan: PlanFile) -> str:
    """The saving by moves: workers, late requests, or nothing; else why the plan makes none."""
    on, off = moves.with_moves, moves.without_moves
    if on is None or off is None:
        return f"{moves.why_not}."
    late = f"late requests from {off.late:,} to {on.late:,} of {plan.inputs.requests:,} on the recorded trace"
    if not moves.kept:
        return f"none: with them this fleet misses the target ({late})."
    serving = plan.workers if plan.spares is None else plan.workers - plan.spares.workers
    if (saved := moves.workers_without - serving) > 0:
        return (
            f"save {counted(saved, 'worker')}: without them the target takes {moves.workers_without}"
            f" ({usd_text(moves.usd_per_hour_without)}). On this fleet they cut {late}."
        )
    if on.late < off.late:
        return f"cut {late}."
    before, after = share_text(off.expected), share_text(on.expected)
    if on.late == off.late and on.expected > off.expected and before != after:
        return f"raise expected attainment from {before} to {after}."
    if on.late > off.late:
        return f"save nothing here ({late})."
    both = f": {on.late:,} of {plan.inputs.requests:,} requests late either way" if on.late else ""
    return f"save nothing here{both}."


def bottleneck_text(plan: PlanFile) -> str:
    """The fleet's bottleneck, when it binds, and what would help."""
    text, detail = BINDS[plan.binding or "ttft"][0], plan.binding_detail
    if (window := plan.binding_window_s) is not None:
        per, unit = (60.0, "min") if window[1] >= 120.0 else (1.0, "s")
        text += f", worst at {window[0] / per:.3g} to {window[1] / per:.3g} {unit}"
    if detail is None:
        return text
    few = f"with {_few(detail, plan)}"
    faster = "" if detail.rate_scale == 1.0 else f" at {detail.rate_scale:.3g}x the recorded traffic"
    first = "" if detail.slo_class is None else f"; class {detail.slo_class} misses first"
    name, gain = max(detail.relief.items(), key=lambda relief: relief[1])
    helps = f". {BINDS[name][1]} would gain {100 * gain:.2f} points of attainment." if gain > 0 else ""
    return f"{text}, {few}{faster}{first}{helps}"


def scaling_text(plan: PlanFile) -> str:
    """The workers that a rate needs, as a formula."""
    line = plan.demand_line or plan.agents_line
    assert line is not None
    by_rate = plan.demand_line
    slope = by_rate.workers_per_rps if by_rate is not None else getattr(line, "workers_per_agent", 0.0)
    sign = "-" if line.intercept < 0 else "+"
    of = "concurrent sessions" if by_rate is None else "req/s"
    rule = f"{slope:.2g} x {of} {sign} {abs(line.intercept):.2g}"
    rough = f"; a rough fit (R² {line.r2:.2f})" if line.r2 is not None and line.r2 < 0.95 else ""
    return f"workers = ceil({rule}), for this traffic mix{rough}"


def _uncertainty(plan: PlanFile, shares: dict[str, float]) -> str:
    if not shares:
        return "none visible in the resampled traces"
    source, share = next(iter(shares.items()))
    text = f"{_SOURCES[source]} ({100 * share:.0f} %)"
    if source == "arrivals":
        return f"{text}: requests may come in other bursts. A longer trace narrows it."
    if source == "drift":
        return f"{text}: rate and lengths may change. Traces of more days narrow it."
    if all(profile.kind == "measured" for profile in plan.inputs.profiles):
        text = f"{text}: measured, with some scatter"
    elif calibrating_narrows("first" if plan.binding in ("ttft", "prefill") else "decode"):
        return f"{text}: predicted. A minute of `tokenfleet calibrate --endpoint` narrows it."
    else:
        text = f"{text}: predicted"
    return f"{text}. `tokenfleet compare` on one engine shows the error."


def plateau_text(flat: tree.Plateau) -> str:
    """Between which counts workers hardly matter, and what would help instead."""
    text = (
        f"{flat.workers[0]} to {flat.workers[-1]} workers differ by {flat.span * 100:.2f} points on the"
        f" recorded trace; {share_text(flat.missed)} of requests miss. "
    )
    needs = (
        ("TTFT", flat.alone.ttft, flat.alone_needs_s.ttft),
        ("TPOT", flat.alone.tpot, flat.alone_needs_s.tpot),
    )
    alone = [
        f"{share_text(share or 0.0)} break the {name} target on an idle worker (the slowest needs"
        f" {duration_text(s)})"
        for name, share, s in needs
        if s is not None
    ]
    if not alone:
        return (
            f"{text}None would miss on an idle worker: they arrive in bursts and behind long prompts."
            " A looser target, faster prefill or another policy helps."
        )
    return f"{text}{' and '.join(alone)}. A faster worker type, a looser target or shorter requests help."


def classes_text(plan: PlanFile) -> str:
    """The classes: that they are judged together, which misses first, and the cost of separate fleets."""
    text = "every class meets its own target at once."
    if first := [one.name for one in plan.classes if one.binds]:
        text += f" With less, {first[0]} misses first."
    whole, apart = plan.usd_per_hour, plan.separate_usd_per_hour
    if whole is None or apart is None:
        return text
    less = 1.0 - whole / apart if apart > 0 else 0.0
    saved = f"{100 * less:.0f} % less" if less >= 0 else f"{-100 * less:.0f} % more: serve them apart"
    return f"{text} Separate fleets cost {usd_text(apart)}; this one costs {saved}."


def _reused(plan: PlanFile) -> Iterator[tuple[str, str]]:
    """The hits of prefix caches, the room for more sessions, and the cost of one."""
    reuse = plan.reuse
    if reuse is None:
        return
    yield (
        "Prefix cache",
        f"{share_text(reuse.hit_rate)} of prompt tokens hit ({share_text(reuse.low)} to"
        f" {share_text(reuse.high)} over resampled traces), {share_text(reuse.ideal)} at best. Ten minutes"
        f" use {count_text(reuse.working_set_tokens)} tokens; the fleet's KV holds"
        f" {count_text(reuse.kv_tokens)}.",
    )
    yield "More sessions", cliff_text(reuse)
    if (cost := reuse.sessions) is not None:
        price = "" if cost.usd is None else f", ${cost.usd:,.2f} each"
        in_time = "" if cost.within is None else f" ({share_text(cost.within)} in time)"
        mean = f"{duration_text(cost.mean_s)} on average{in_time}{price}"
        yield "Sessions", f"{cost.sessions:,}, at most {cost.at_once:,} at once, {mean}"
    if plan.affinity is not None:
        yield "Cache-aware policy", affinity_text(plan.affinity)
    if plan.host_kv is not None:
        yield "KV offload", offload_text(plan.host_kv)


def cliff_text(reuse: tree.Reuse) -> str:
    """The room for more sessions, and what fails first."""
    cliff: tree.Cliff = reuse.cliff
    most = max(grown.scale for grown in cliff.tried)
    hits = f"the hit rate falls below {share_text(LOST * reuse.hit_rate)}"
    found = [(cliff.hits_lost, hits), (cliff.target_lost, "attainment falls below the target")]
    lost = sorted((at, what) for at, what in found if at is not None)
    if not lost:
        return f"both hit rate and target hold up to {most:g}x the sessions"
    text = "; ".join(f"at {(at - 1) * 100:+.0f} % sessions {what}" for at, what in lost)
    stays = "the hit rate stays" if cliff.hits_lost is None else "the target holds"
    return text if len(lost) == 2 else f"{text}; {stays} up to {most:g}x"


def affinity_text(other: tree.Affinity) -> str:
    """The saving of the plan's policy over the best that ignores caches, both on the recorded trace."""
    hits = "" if other.prefix_hit_rate is None else f" ({share_text(other.prefix_hit_rate)} hits)"
    if other.saved_workers <= 0:
        return f"saves nothing here: {other.policy}{hits} needs {counted(other.workers, 'worker')}, too"
    usd = "" if other.saved_usd_per_hour is None else f", {usd_text(other.saved_usd_per_hour)},"
    saves = f"saves {counted(other.saved_workers, 'worker')}{usd}"
    return f"{saves} against {other.policy}{hits} on the recorded trace"


def offload_text(host: tree.KvOffload) -> str:
    """The effect of KV offload on hits, workers and dollars on the recorded trace."""
    text = (
        f"{host.gib:.4g} GiB a worker at {host.gb_per_s:.3g} GB/s a GPU reload {share_text(host.loaded)} of"
        f" prompt tokens. Hit rate {share_text(host.prefix_hit_rate)},"
        f" {share_text(host.prefix_hit_rate_without)} without. "
    )
    own = host.host_usd_per_hour
    if host.workers_without is None:
        price = f"It costs {usd_text(own)}." if own else "It has no price of its own."
        return f"{text}Without it the trace needs more than {counted(host.tried_up_to, 'worker')}. {price}"
    saved = max(host.workers_without - host.workers, 0)
    text += f"It saves {counted(saved, 'worker') if saved else 'no worker'} on the recorded trace"
    if (usd := host.saved_usd_per_hour) is None or not own:
        return f"{text}; it has no price of its own."
    net = f"{usd_text(usd)} less" if usd > 0 else f"{usd_text(-usd)} more"
    return f"{text}: {net} in all, its own {usd_text(own)} included."


def _over_time(plan: PlanFile) -> Iterator[tuple[str, str]]:
    """The scaling schedule, the standby workers, and what a cold start adds."""
    detail, spares = plan.schedule_detail, plan.spares
    if detail is not None and detail.saved_share and detail.attainment is not None:
        low = "" if detail.low is None else f", lower bound {share_text(detail.low)}"
        saves = f"saves {share_text(detail.saved_share)} of the worker-hours"
        yield "Scaling schedule", f"{saves} at {share_text(detail.attainment)} attainment{low}"
    if plan.loop is not None:
        yield "Autoscaling", loop_text(plan.loop, plan.workers, plan.usd_per_hour)
    if spares is not None:
        rate = f"{spares.reclaims_per_h:g} spot interruptions an hour each"
        text = f"{spares.workers} of {counted(plan.workers, 'worker')}, for {rate}"
        if spares.availability is not None:
            text += f"; enough serve {share_text(spares.availability)} of the time"
        yield "Standby workers", text
    if (paid := plan.paid) is not None and paid.worker_hours is not None:
        cost = f"{paid.worker_hours:.4g} worker-hours, {usd_text(paid.usd_per_hour)} on average"
        yield "Cold start", f"{duration_text(paid.cold_start_s)}: with it the schedule takes {cost}"


def loop_text(loop: tree.ExpectedLoop, fixed: int, fixed_usd: float | None) -> str:
    """The expected mean cost of `serve --plan`, compared with the `fixed` workers."""
    if loop.saved_share <= 0:
        needs = f"with the plan's margin the trace needs {counted(fixed, 'worker')} throughout"
        less = "; at quiet times `serve` may still release some" if loop.fewest_workers < fixed else ""
        return f"saves nothing for sure: {needs}{less}"
    mean, all_fixed = f"takes {loop.mean_workers:.3g} workers", str(fixed)
    if loop.usd_per_hour is not None and fixed_usd is not None:
        mean, all_fixed = f"costs {usd_text(loop.usd_per_hour)}", usd_text(fixed_usd)
    cold = "" if loop.cold_starts else ", cold starts left out"
    saved = f"saves {share_text(loop.saved_share)} of the worker-hours"
    return f"{mean} on average (expected{cold}), a fixed fleet {all_fixed}; {saved}"


def ages(profiles: Sequence[tree.PlannedProfile]) -> str:
    """The dates of the prices and profiles that an answer rests on."""
    priced = [match[0] for p in profiles if (match := re.search(r"\d{4}-\d\d-\d\d", p.price or ""))]
    whose = "Your" if any((p.price or "").startswith(OWN) for p in profiles) else "List"
    prices = f"{whose} prices date from {_span(priced)} (--prices to change). " if priced else ""
    if all(profile.usd_per_gpu_h is None for profile in profiles):
        prices = "No price is known (--prices gives them). "
    return f"{prices}Profiles date from {_span([p.date for p in profiles])}."


def _span(dates: list[str]) -> str:
    """The months of some dates: `March to May 2026`; what is no date stays unchanged."""
    months = []
    for text in sorted({text[:7] for text in dates}):
        try:
            months.append(date.fromisoformat(f"{text}-01").strftime("%B %Y"))
        except ValueError:
            months.append(text)
    first, last = months[0], months[-1]
    if first == last:
        return first
    return f"{first.removesuffix(last[-5:])} to {last}"
