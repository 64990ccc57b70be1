"""Plans and simulations as Rich tables: the answer first, then its reasons, then the alternatives."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tokenfleet.planning.classes import separate_usd
from tokenfleet.planning.classes import target_text as class_target_text
from tokenfleet.planning.comparisons import Nearest, TierWorth
from tokenfleet.planning.explain import Binding, Plateau
from tokenfleet.planning.fleet import Fleet, apportioned
from tokenfleet.planning.plan_json import week_rows
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Candidate, Plan, Sampled
from tokenfleet.planning.reuse import LOST, Reuse
from tokenfleet.planning.traffic.sample import ROUGHLY
from tokenfleet.texts import duration_text

_BINDS = {
    "ttft": "the TTFT target",
    "tpot": "the TPOT target",
    "kv": "KV memory",
    "prefill": "prefill compute",
    "session": "the time of sessions",
}
_TRAFFIC = {
    "steady": "steady: its rate and lengths differ by no more than chance, and are taken to stay",
    "changes": "goes on changing: as the trace shows, its rate is taken to be some {:.0f} % off by then",
    "too short to tell": "too short a trace to tell: its rate is taken to be some {:.0f} % off, as is usual",
}


def plan_tables(plan: Plan) -> Iterator[RenderableType]:
    """The tables of a plan for the terminal."""
    yield Text(headline(plan), style="bold green" if plan.feasible else "bold red")
    yield facts_table(facts(plan))
    if plan.classes:
        yield table(CLASS_COLUMNS, class_rows(plan), CLASS_NAMES, "Classes")
    if plan.alternatives:
        yield _alternatives(plan)
    if plan.passed_over:
        passed = [(passed.worker_type.name, passed.reason) for passed in plan.passed_over]
        yield table(("worker", "why"), passed, ("worker", "why"), "Passed over")
    if plan.schedule and plan.schedule.week:
        yield _week(plan.schedule.week)
    elif plan.schedule and len(plan.schedule.stretches) > 1:
        yield _schedule(plan)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    left: Container[str] = (),
    title: str | None = None,
) -> Table:
    """A table whose columns are flush right, but for those in `left`."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """What and how much, a line each."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column()
    for row in rows:
        made.add_row(*row)
    return made


def headline(plan: Plan) -> str:
    """The plan in one sentence."""
    if plan.best is None:
        return f"No fleet meets the target. {plan.reason}."
    fleet = plan.best.fleet
    return f"{fleet.label}: {gpus_text(fleet.gpus)}, {usd_text(fleet.usd_per_hour)}"


def usd_text(usd: float | None) -> str:
    """Dollars an hour, or that no price is known."""
    return "no price known" if usd is None else f"${usd:,.2f}/h"


def gpus_text(count: int) -> str:
    return f"{count} GPU" + ("" if count == 1 else "s")


def workers_text(count: int) -> str:
    return f"{count} worker" + ("" if count == 1 else "s")


def share_text(share: float) -> str:
    """A share as a percentage with the digits that its distance from 100 % needs."""
    if share in (0.0, 1.0):
        return f"{share:.0%}".replace("%", " %")
    return f"{share * 100:.2f} %" if share < 0.9995 else f"{share * 100:.3f} %"


def count_text(count: int) -> str:
    """A large count in thousands or millions."""
    return (
        f"{count / 1e6:.3g} M" if count >= 1e6 else f"{count / 1e3:.3g} k" if count >= 1e4 else f"{count:,}"
    )


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what, how much) lines, for the terminal and for the report."""
    question, inputs = plan.question, plan.inputs
    yield (
        "load",
        f"{inputs.trace}: {inputs.requests:,} requests in {duration_text(inputs.duration_s)},"
        f" {inputs.rate_rps:.3g} a second",
    )
    yield "target", f"{target_text(plan)}{session_text(question)}, at confidence {question.confidence:g}"
    if plan.best is not None:
        yield from _best_facts(plan, plan.best)
    if plan.nearest is not None:
        looser = (
            "" if len(inputs.classes) < 2 else f"all {plan.nearest.looser:.2f} times as loose, the tightest "
        )
        yield "nearest target", looser + nearest_text(plan.nearest)
    if plan.nearest_attainment is not None:
        yield "nearest target", f"this trace can show at most {share_text(plan.nearest_attainment)}"
    kinds = sorted({t.profile.source.kind for t in plan.worker_types})
    count = len(plan.worker_types)
    yield (
        "profiles",
        f"{count} kind{'' if count == 1 else 's'} of worker, {' and '.join(kinds)}; policy {question.policy}",
    )


def target_text(plan: Plan) -> str:
    """What is asked: of all requests, or of each class."""
    question = plan.question
    if plan.inputs.classes:
        each = [f"{c.name}: {share_text(c.attainment)} {class_target_text(c)}" for c in plan.inputs.classes]
        return "; ".join(each)
    slo = question.slo
    return (
        f"{share_text(question.attainment)} within TTFT {duration_text(slo.ttft_s)}"
        f" and TPOT {duration_text(slo.tpot_s)}"
    )


def _best_facts(plan: Plan, best: Candidate) -> Iterator[tuple[str, str]]:
    yield from _measured_facts(plan, best)
    if plan.binding is not None:
        yield "what binds", _binding_text(plan.binding)
    if plan.classes:
        yield "classes", classes_text(plan)
    if plan.plateau is not None:
        yield "flat curve", _plateau_text(plan.plateau)
    if plan.doubt is not None:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in plan.doubt.shares.items())
        yield "doubt comes from", shares or "nothing that these worlds show"
        if plan.question.agents is None:  # they set the rate
            yield "traffic", _TRAFFIC[plan.doubt.traffic].format(100 * plan.doubt.of_rate)
    line = plan.line
    if line is not None:
        yield (
            "worker line",
            f"{line.slope:.3g} x {'agents' if line.of_agents else 'rate'} {line.intercept:+.2g}, rounded up"
            f" (R² {line.r2:.4f})",
        )
    yield from _time_facts(plan, best)
    if plan.baselines:
        counts = [f"{name} {count}" for name, count in baseline_counts(plan)]
        yield "other policies", ", ".join(counts) + " workers on the trace"
    if plan.reuse is not None:
        yield from _reuse_facts(plan, plan.reuse)


def _reuse_facts(plan: Plan, reuse: Reuse) -> Iterator[tuple[str, str]]:
    """What prefix caches do on the fleet, how many more sessions it bears, and what a session costs."""
    yield (
        "prefix hits",
        f"{share_text(reuse.hit_rate)} of the prompts' tokens ({share_text(reuse.low)} to"
        f" {share_text(reuse.high)} over worlds), {share_text(reuse.ideal)} at best; ten minutes bring"
        f" {count_text(reuse.working_set_tokens)} tokens, the fleet's KV holds {count_text(reuse.kv_tokens)}",
    )
    yield "more sessions", cliff_text(reuse)
    if (cost := reuse.sessions) is not None:
        price = "" if cost.usd is None else f", ${cost.usd:,.2f} each"
        yield (
            "sessions",
            f"{cost.sessions:,}, at most {cost.at_once:,} at once, {duration_text(cost.mean_s)} on average"
            f"{'' if cost.within is None else f' ({share_text(cost.within)} in time)'}{price}",
        )
    if (text := affinity_text(plan)) is not None:
        yield "affinity", text
    if plan.tier is not None:
        yield "host memory", tier_text(plan.tier)


def session_text(question: PlanRequest) -> str:
    """What is asked of whole sessions, and how many there are at once."""
    target = (
        "" if question.session_s is None else f", and of sessions within {duration_text(question.session_s)}"
    )
    return target + ("" if question.agents is None else f", for {question.agents:,} agents")


def cliff_text(reuse: Reuse) -> str:
    """How many more sessions the fleet bears, and what goes first."""
    cliff, most = reuse.cliff, max(g.scale for g in reuse.cliff.tried)
    hits = f"hits fall below {LOST * reuse.hit_rate:.2g}"
    if cliff.hits_lost is None and cliff.target_lost is None:
        return f"no cliff up to {most:g} times as many"
    if cliff.hits_lost == cliff.target_lost and cliff.hits_lost is not None:
        return f"at {_growth(cliff.hits_lost)} {hits}, and attainment below the target"
    found = [(cliff.hits_lost, hits), (cliff.target_lost, "attainment falls below the target")]
    first, *then = sorted((at, what) for at, what in found if at is not None)
    rest = f", at {_growth(then[0][0])} {then[0][1]}" if then else ""
    kept = (
        ""
        if then
        else f"; {'hits stay' if cliff.hits_lost is None else 'the target holds'} up to {most:g} times"
    )
    return f"at {_growth(first[0])} {first[1]}{rest}{kept}"


def _growth(scale: float) -> str:
    return f"{(scale - 1) * 100:+.0f} %"


def affinity_text(plan: Plan) -> str | None:
    """What the policy saves beside the best that does not look at caches; None where none is known."""
    others = [b for b in plan.baselines if b.fleet is not None]
    own = [n for n, share in plan.on_trace.items() if share >= plan.question.attainment]
    if not others or not own or plan.best is None or plan.question.policy.startswith(others[0].policy):
        return None
    best = min(others, key=lambda b: b.fleet.cost if b.fleet else (math.inf, 0, 0))
    assert best.fleet is not None
    mine = apportioned(plan.best.fleet, min(own))
    hits = f" ({share_text(best.hit_rate)} hits)" if best.hit_rate is not None else ""
    if (saved := _saved(mine, best.fleet)) is None:
        return f"does not pay here: {best.policy} needs {workers_text(best.fleet.workers)}{hits}, too"
    return f"saves {saved} beside {best.policy}{hits}, which looks at no caches"


def _saved(fleet: Fleet, other: Fleet) -> str | None:
    """The workers and dollars that a fleet saves beside another; None where it has no fewer workers."""
    workers = other.workers - fleet.workers
    if workers <= 0:
        return None
    if other.usd_per_hour is None or fleet.usd_per_hour is None:
        return workers_text(workers)
    return f"{workers_text(workers)}, {usd_text(other.usd_per_hour - fleet.usd_per_hour)}"


def tier_text(tier: TierWorth) -> str:
    """What host memory does to hits, workers and dollars, on the trace."""
    gib, gb_per_s = tier.host_kv.capacity_bytes / 2**30, tier.host_kv.bytes_per_s / 1e9
    hits = (
        f"{gib:.4g} GiB a worker at {gb_per_s:.3g} GB/s a GPU: {share_text(tier.from_host)} of the prompts'"
        f" tokens are loaded from there, {share_text(tier.hit_rate)} hits in all beside"
        f" {share_text(tier.hit_rate_without)} without it; "
    )
    own_usd = tier.fleet.host_usd_per_hour
    if tier.fleet_without is None:
        own = f"costs {usd_text(own_usd)}" if own_usd else "has no price of its own"
        return hits + f"it takes more than {tier.tried} workers without it, and it {own}"
    workers, saved = tier.fleet_without.workers - tier.fleet.workers, _saved(tier.fleet, tier.fleet_without)
    if (usd := tier.saved_usd_per_hour) is None or not own_usd:
        return hits + f"saves {saved or 'no worker'} on the trace; it has no price of its own"
    workers_saved = workers_text(workers) if workers > 0 else "no worker"
    net = f"{usd_text(usd)} less" if usd > 0 else f"{usd_text(-usd)} more"
    return hits + f"saves {workers_saved} on the trace: {net} in all, its own {usd_text(own_usd)} counted"


def _measured_facts(plan: Plan, best: Candidate) -> Iterator[tuple[str, str]]:
    """How the best fleet does, and one of a worker fewer."""
    sure = best.estimate
    if sure is not None:
        yield (
            "attainment",
            f"{share_text(sure.expected)} expected, at least {share_text(sure.low)}"
            f" ({sure.replicates} worlds); {share_text(best.on_trace)} on the trace as it is",
        )
    if plan.sampled is not None:
        yield "sampling", sampled_text(plan.sampled)
    yield "TTFT", _quantiles(best, "ttft")
    yield "TPOT", _quantiles(best, "tpot")
    fewer = plan.one_fewer
    if fewer is not None:
        expected = fewer.estimate.expected if fewer.estimate else fewer.on_trace
        words = f"{workers_text(fewer.workers)}: {share_text(expected)} expected; {fewer.fails}"
        yield "one fewer", words if fewer.workers else fewer.fails


def sampled_text(sampled: Sampled) -> str:
    """What a long trace was judged by, what that cost, and what the replay of the whole found."""
    words = (
        f"{sampled.windows:,} of {sampled.of_windows:,} windows ({count_text(sampled.requests)} requests),"
        f" the {sampled.binding:,} that bind among them, say {share_text(sampled.attainment)}, at least"
        f" {share_text(sampled.low)} of the whole; "
    )
    reasons = f"; reasons are judged by samples of {count_text(ROUGHLY)}"
    if sampled.whole is None:
        return f"{words}this policy is not replayed whole{reasons}"
    more = f", with {workers_text(sampled.added)} more" if sampled.added else ""
    return f"{words}replayed whole{more}: {share_text(sampled.whole)}{reasons}"


def _binding_text(bind: Binding) -> str:
    start_s, end_s = bind.window_s
    helps = ", ".join(f"{name} {gain * 100:+.2f} points" for name, gain in bind.relief.items())
    faster = "" if bind.rate_scale == 1.0 else f" at {bind.rate_scale:.3g} times the traffic"
    hits = ""
    if bind.hit_rate is not None and bind.hit_rate_more_kv is not None:
        hits = f"; prefix hits {share_text(bind.hit_rate)}, with more KV {share_text(bind.hit_rate_more_kv)}"
    return (
        f"{_BINDS[bind.constraint]}, worst at {start_s:.0f}-{end_s:.0f} s with"
        f" {workers_text(bind.fleet.workers)}{faster} (a quarter's relief: {helps}{hits})"
    )


def _time_facts(plan: Plan, best: Candidate) -> Iterator[tuple[str, str]]:
    """The schedule, the spares for reclaimed workers, and what a cold start adds."""
    if plan.schedule is not None and plan.schedule.saved_share > 0:
        yield (
            "schedule",
            f"saves {share_text(plan.schedule.saved_share)} of the worker-hours,"
            f" attainment {share_text(plan.schedule.attainment)}"
            + ("" if plan.schedule.low is None else f", at least {share_text(plan.schedule.low)} by samples"),
        )
    if plan.spares is not None:
        yield (
            "spares",
            f"{plan.spares.workers} of the {workers_text(best.fleet.workers)}, for spot workers reclaimed"
            f" {plan.spares.reclaims_per_h:g} times an hour; enough stand"
            f" {share_text(plan.spares.availability)} of the time",
        )
    if plan.paid is not None:
        usd = plan.paid.usd_per_hour(best.fleet)
        yield (
            "cold start",
            f"{duration_text(plan.paid.cold_start_s)}: followed in time, the schedule takes"
            f" {plan.paid.worker_hours:.4g} worker-hours, on average {usd_text(usd)}",
        )


def baseline_counts(plan: Plan) -> list[tuple[str, str]]:
    """Each other policy, and the workers that it needs on the trace."""
    return [(b.policy, str(b.fleet.workers) if b.fleet else f"more than {b.tried}") for b in plan.baselines]


def expected_text(candidate: Candidate) -> str:
    """The attainment to be expected of a fleet."""
    return share_text(candidate.estimate.expected if candidate.estimate else candidate.on_trace)


def least_text(candidate: Candidate) -> str:
    """The attainment that a fleet has at least, at the plan's confidence."""
    return share_text(candidate.estimate.low) if candidate.estimate else "-"


def _plateau_text(flat: Plateau) -> str:
    """Between which counts workers hardly matter, which requests miss there, and what would help them."""
    words = (
        f"{flat.workers[0]} to {flat.workers[-1]} workers differ by {flat.span * 100:.2f} points on the"
        f" trace; of the {share_text(flat.missed)} missed"
    )
    targets = (("TTFT", flat.alone_ttft, flat.ttft_s), ("TPOT", flat.alone_tpot, flat.tpot_s))
    alone = [
        f"{share_text(share)} of all requests break the {name} target on an idle worker (their slowest needs"
        f" {duration_text(needed_s)})"
        for name, share, needed_s in targets
        if needed_s is not None
    ]
    if not alone:
        return (
            f"{words} none would miss on an idle worker: they meet in bursts and behind long prefills; a"
            " looser target, cheaper prefill or another policy lowers the count, not another worker"
        )
    return (
        f"{words} no worker count saves those that miss by themselves: {' and '.join(alone)}; a faster type"
        " of worker, a looser target or shorter requests lower the count, not another worker"
    )


def nearest_text(near: Nearest) -> str:
    """The nearest feasible target and its fleet, in words."""
    sessions = "" if near.session_s is None else f", sessions {duration_text(near.session_s)}"
    return (
        f"TTFT {duration_text(near.slo.ttft_s)}, TPOT {duration_text(near.slo.tpot_s)}{sessions}"
        f" with {near.fleet.label} ({gpus_text(near.fleet.gpus)}, {usd_text(near.fleet.usd_per_hour)})"
    )


def classes_text(plan: Plan) -> str:
    """That classes are judged together, which binds, where each runs, and what separate fleets would cost."""
    words = "every class has its own target at once in as many worlds as the confidence asks for"
    binding = [one.of.name for one in plan.classes if one.binds]
    if binding:
        words += f"; one short, {binding[0]} is the first to miss"
    if plan.best is not None and len(plan.best.fleet.groups) > 1:
        words += f"; {', '.join(f'{one.of.name} runs mostly on {one.mostly_on}' for one in plan.classes)}"
    whole, apart = plan.best.fleet.usd_per_hour if plan.best else None, separate_usd(plan.classes)
    if whole is None or apart is None:
        return words
    less = 1.0 - whole / apart if apart > 0 else 0.0
    saved = f"{100 * less:.0f} % less" if less >= 0 else f"{-100 * less:.0f} % more: serve them apart"
    return f"{words}; separate fleets cost {usd_text(apart)}, this one {saved}"


CLASS_COLUMNS = (
    *("class", "requests", "target", "expected", "at least", "runs on", "costs", "without it", "alone"),
)
CLASS_NAMES = ("class", "target", "runs on", "costs", "without it", "alone")  # those that are no numbers


def class_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Each class: size, target, attainment, where it runs, what it adds, fleets without it and its own."""
    whole = None if plan.best is None else plan.best.fleet.usd_per_hour
    for one in plan.classes:
        others = None if one.without is None else one.without.usd_per_hour
        adds = "-" if whole is None or others is None else usd_text(whole - others)
        yield (
            one.of.name,
            f"{one.requests:,}",
            f"{share_text(one.of.attainment)} {class_target_text(one.of)}",
            share_text(one.estimate.expected) if one.estimate else "-",
            share_text(one.estimate.low) if one.estimate else "-",
            one.mostly_on,
            adds,
            *("-" if fleet is None else fleet.label for fleet in (one.without, one.alone)),
        )


def _quantiles(best: Candidate, which: str) -> str:
    latency = best.ttft if which == "ttft" else best.tpot
    return ", ".join(f"p{q * 100:.0f} {duration_text(latency.at(q))}" for q in (0.5, 0.9, 0.99))


def _alternatives(plan: Plan) -> Table:
    columns = ("fleet", "GPUs", "USD/h", "expected", "at least", "TTFT p99", "TPOT p99", "")
    rows = (
        (
            c.fleet.label,
            str(c.fleet.gpus),
            "?" if c.fleet.usd_per_hour is None else f"{c.fleet.usd_per_hour:,.2f}",
            expected_text(c),
            least_text(c),
            duration_text(c.ttft.at(0.99)),
            duration_text(c.tpot.at(0.99)),
            c.note,
        )
        for c in plan.alternatives
    )
    return table(columns, rows, ("fleet", ""), "Alternatives")


def _week(week: Sequence[int]) -> Table:
    """The workers of each weekday's hours."""
    rows = week_rows(week)
    hours = 24 // (len(week) // len(rows))
    spans = [f"{start:02d}-{start + hours:02d}" for start in range(0, 24, hours)]
    days = ((day, *map(str, counts)) for day, counts in rows.items())
    return table(("", *spans), days, ("",), "Schedule of a week (UTC, workers)")


def _schedule(plan: Plan) -> Table:
    assert plan.schedule is not None
    assert plan.best is not None
    whole = plan.best.fleet
    rows = (
        (f"{s.start_s:.0f} s", f"{s.end_s:.0f} s", str(s.workers), apportioned(whole, s.workers).label)
        for s in plan.schedule.stretches
    )
    return table(("from", "to", "workers", "fleet"), rows, ("fleet",), "Schedule")
