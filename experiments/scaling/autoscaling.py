"""Autoscaling on production rates: worker-hours against the hindsight optimum's, cold starts of 60 s.

    python experiments/scaling/autoscaling.py [--quick] [--azure] [--planned] [--advice] [--dated DAY]
        [--without DAY...] [--resume FOLDER] [--jobs N] [--format table|json]

Traffic. ServeGen's rates of 14 days are points of 10-minute windows with straight lines between, scaled to a
mean of 12 requests a second. Arrivals are Poisson at that rate, lengths ShareGPT's. An hour of every day is
simulated request by request, that of day d from (6 + 5 (d - 1)) mod 24 o'clock on. The days before it are the
forecast's history. An hour without arrivals is left out. Each hour has its own optimum. Settings were chosen
on day 11. Azure's conversation trace (`--azure`) is one hour, too short for any season. Llama-2 70B on 2
A100s, 1.6 s / 75 ms, `spread`.

Hindsight optimum. Each window of `WINDOW_S` is simulated alone at every count. The start is the fewest
workers with each window at the target. Then workers go where that misses least, while the whole meets it,
also in a run launched a cold start ahead. At last every window is tried with fewer.

Ours is `control.tick` as it runs live. Eq 7's line is learned by simulation at steady rates on these lengths
(another draw). Traffic phases, bursts, backlog and forecast are used. The reactive rules get the cheapest of
several targets at 99 % over all hours together; where none reaches it, the one with the best attainment. They
are tuned on the traffic that judges them, ours is not.

Planned (`--planned`). `tokenfleet plan` sees the busiest 20 minutes of the day before, without dates. Its
loop, as `serve --plan` has it, starts with the plan's workers half an hour before the hour that counts, as a
fleet that runs on, without a floor by the clock or a memory of other days. What it takes above the optimum is
told apart as in the scorecard (tokenfleet.service.gap). The first day has none before it. Nothing arrives in
the hour of day 8: its next hour with arrivals stands in, after silence. Azure's trace has no other day: the
plan sees its busiest 20 minutes, and minutes 8 to 58 count, without requests beyond the model's context.

Dated (`--dated DAY`). The plan sees the whole day before, with its dates, at a mean of 4 requests a second.
Its loop serves the day, with its schedule as a floor by the clock and without. Windows of the optimum are not
tried with fewer, so it is a little too dear.

Advice (`--advice`). The same hours through `tokenfleet advise --replay`: it sees vLLM's metrics alone, HPA
follows it (15 s, tolerance 0 or 10 %), and it remembers no earlier days. Llama-3.1 70B on 2 H100s, chunked
prefill, 1 s / 75 ms, each request to the worker with the fewest. The rules of the replay (HPA on utilisation,
KV memory and queue length) and Ray Serve's are tuned as above.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from controlplane.control import Settings, tick
from controlplane.port import Decide
from controlplane.scaler.bounds import DAY_S, Autoscale
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.history.fleet_log import LogWindows
from dataplane.simulated.elastic import FleetRecord
from dataplane.simulated.simulate import ControlSettings, Outcome
from experiments.lib.autoscaling import (
    BEAT_S,
    CASE,
    COLD_S,
    SLOTS,
    TARGET,
    Bench,
    Traffic,
    azure,
    busiest_h,
    hpa,
    line_at,
    loop_run,
    ours,
    ray_serve,
    remembered,
    servegen,
)
from experiments.lib.command import timed_plan
from experiments.lib.fewest_workers import Lengths, sharegpt
from experiments.lib.public_data import AZURE_HOUR, SERVEGEN, SHAREGPT
from experiments.lib.results import bar, flags, show
from experiments.lib.resume import Parts
from experiments.scaling.closed_loop import paid_s
from tokenfleet.advise.advice import AdviceSettings
from tokenfleet.advise.followers import BASELINES, RAY_SERVE
from tokenfleet.advise.hindsight import WINDOW_S
from tokenfleet.advise.replay import ADVICE, ReplayedDay
from tokenfleet.planning.inputs import within_context
from tokenfleet.planning.plan_file import parse_plan
from tokenfleet.profiles.library import find_profiles, library_folder
from tokenfleet.service.gap import PARTS, parts_of
from tokenfleet.service.hindsight_fleet import HindsightFleet, Requests

TARGETS = (12.0, 16.0, 20.0, 26.0)  # requests in the system per worker
RULES = (("HPA", hpa), ("Ray Serve ±1", ray_serve))
SERIES, MEAN_RPS = "m-mid", 12.0
ADVISED_SLO = Slo(1.0, 0.075)  # edges of vLLM's histograms
DAYS = range(1, 15)
PLANNED = "the loop of a plan of the day before"
PLANNED_H = 1.0 / 3.0
DATED, DATED_RPS = "the loop of a dated plan, {}floor by the clock", 4.0
FIRST_DAY_S = 1_767_225_600.0  # Unix time of day 1: 2026-01-01
HOUR_S, LEAD_S = 3600.0, 1800.0  # the hour that counts, and what the planned loop serves before it
AZURE_S, AZURE_LEAD_S = 3000.0, 500.0  # the same of Azure's trace, which ends after 3,502 s
SILENT = {8: 20.0}  # its hour has no arrivals: from when on the next one does
CHOSEN_ON = {4, 5, 6, 11, 14}  # days on which settings or this comparison were developed


@dataclass(frozen=True)
class Run:
    """What one rule did in one piece of traffic. `target`: a reactive rule's."""

    rule: str
    target: str | None
    requests: int
    misses: int
    worker_s: float
    above: dict[str, float] = field(default_factory=dict)  # worker-seconds over the optimum's, by cause


def seen(rule: str, outcome: Outcome, record: FleetRecord, target: str | None = None) -> Run:
    requests = len(outcome.workload)
    misses = requests - round(outcome.attainment * requests)
    return Run(rule, target, requests, misses, record.worker_s)


def runs(traffic: Traffic, lengths: Lengths, line: tuple[float, float], quick: bool) -> list[Run]:
    """Every rule on one piece of traffic."""
    bench = Bench(traffic, lengths)
    still = ControlSettings(Settings(moves=None, shed=None), beat_s=BEAT_S)
    schedule, *known = bench.hindsight().cheapest(trims=True)
    first = schedule[0][1]
    found = [seen("clairvoyant", *known)]
    for name in ("ours", "ours, no forecast", "ours, not corrected"):
        control = ours(line, lengths, name != "ours, no forecast")
        decide: Decide | None = None
        if name == "ours, not corrected":
            decide = lambda state, seen, c=control: tick(c.tick, state, replace(seen, outcomes=()))  # noqa: E731
        state = remembered(traffic.past) if control.tick.scaling.ahead and traffic.past else None
        found.append(seen(name, *bench.run(first, control, decide, state)))
    for name, rule in RULES:
        for target in TARGETS[:3:2] if quick else TARGETS:
            found.append(seen(name, *bench.run(first, still, rule(target, 1, SLOTS)), f"{target:g} a worker"))
    fixed = bench.run(max(count for _, count in schedule), still, lambda state, snapshot: (state, []))
    found.append(seen("fixed at the clairvoyant's most", *fixed))
    for one in found:
        share = one.worker_s / found[0].worker_s
        print(f"{one.rule} {one.target or ''} {attained([one]):.4f} {share:.3f}", file=sys.stderr)
    return found


def advised_runs(traffic: Traffic) -> list[Run]:
    """The replay of one piece of traffic, the optimum first."""
    worker_type = WorkerType.of(find_profiles("llama-3.1-70b", ["h100"], [2])[0])
    scaling = Autoscale(1, SLOTS).settings((worker_type,))
    settings = AdviceSettings(ADVISED_SLO, TARGET, scaling, COLD_S)
    day = ReplayedDay(traffic.workload, settings, 1, SLOTS, trims=True)
    tried = [row for of_rule in day.rows((*BASELINES, RAY_SERVE)) for row in of_rule]
    for row in tried:
        share = row.worker_s / tried[0].worker_s
        print(f"{traffic.name}: {row.rule} {row.target} {row.attainment:.4f} {share:.3f}", file=sys.stderr)
    late = (round((1.0 - row.attainment) * row.requests) for row in tried)
    return [Run(row.rule, row.target or None, row.requests, next(late), row.worker_s) for row in tried]


def plan_of(known: Workload, began_unix_s: float = 0.0) -> dict[str, Any]:
    """The plan's JSON of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "before.csv"
        columns = ("arrival_s", "prompt_tokens", "output_tokens")
        table = pl.DataFrame({column: getattr(known, column) for column in columns})
        table.with_columns(pl.col("arrival_s") + began_unix_s).write_csv(trace, float_precision=6)
        slo = f"ttft={CASE.slo.ttft_s}s,tpot={CASE.slo.tpot_s}s"
        of = ("--trace", str(trace), "--profile", str(library_folder() / "aladdin" / CASE.file), "--slo", slo)
        return timed_plan(*of, "--drop-too-long", "--cold-start", f"{COLD_S:g}s", "--jobs", "1")[0]


def optimum_of(hour: Traffic, lengths: Lengths, long_s: float) -> dict[str, Any]:
    """The hindsight optimum's workers in each window, and its run, paid for within the hour."""
    schedule, outcome, record = Bench(hour, lengths).hindsight().cheapest(trims=True)
    paid = paid_s([(at_s, there) for at_s, _, there in record.changes], 0.0, long_s)
    run = replace(seen("clairvoyant", outcome, record), worker_s=paid)
    return {"counts": [count for _, count in schedule], "run": asdict(run)}


def planned_runs(
    name: str, traffic: Traffic, known: Workload, lengths: Lengths, times: tuple[float, float], resume: Parts
) -> list[Run]:
    """The optimum and the loop of `known`'s plan. `times`: served before, and counted."""
    lead_s, long_s = times
    hour = replace(traffic, workload=traffic.workload.window(lead_s, lead_s + long_s))
    plan = parse_plan(resume.part(f"{name} plan", lambda: plan_of(known)), "plan.json")
    best = resume.part(f"{name} optimum", lambda: optimum_of(hour, lengths, long_s))
    load = traffic.workload
    outcome, _, looks = loop_run(plan, COLD_S, load, lengths.table())
    log, worker_type = LogWindows.of(looks, lead_s, lead_s + long_s), plan.groups[0].worker_type
    arrived = Requests(load, 0.0, (CASE.slo,), np.array([TARGET]), load.arrival_s, 0.0)
    known = HindsightFleet(worker_type, np.array(best["counts"]), best["run"]["worker_s"], 0, 0)
    parts = parts_of(log, arrived, known, {worker_type.name: worker_type})
    above = {PARTS[name]: sum(of_type.values()) for name, of_type in parts.items() if of_type}
    met = outcome.met[(load.arrival_s >= lead_s) & (load.arrival_s < lead_s + long_s)]
    worker_s = best["run"]["worker_s"] + sum(above.values())
    return [Run(**best["run"]), Run(PLANNED, None, len(met), int((~met).sum()), worker_s, above)]


def dated_runs(day: int, asked: argparse.Namespace) -> list[Run]:
    """The optimum of a whole day, and the loop of the day before's dated plan, without its floor and with."""
    lengths = sharegpt(asked.data)
    before, today = (
        servegen(asked.data, SERIES, lengths, DATED_RPS, 24.0, asked.seed + known, day - known, 0.0)
        for known in (1, 0)
    )
    began = FIRST_DAY_S + (day - 1) * DAY_S
    document = asked.resume.part(f"dated {day}", lambda: plan_of(before.workload, began - DAY_S))
    plan, table = parse_plan(document, "plan.json"), lengths.table()
    found = [seen("clairvoyant", *Bench(today, lengths).hindsight().cheapest(trims=False)[1:])]
    for name, at in ((DATED.format("no "), None), (DATED.format(""), began)):
        outcome, record, _ = loop_run(plan, COLD_S, today.workload, table, at, BEAT_S)
        found.append(seen(name, outcome, record))
    return found


def rows(name: str, pieces: list[list[Run]]) -> list[dict[str, Any]]:
    """One row a rule, all pieces together; of a reactive rule that of its best target."""
    columns = [list(column) for column in zip(*pieces, strict=True)]
    least_s = sum(one.worker_s for one in columns[0])
    by_rule: dict[str, list[list[Run]]] = {}
    for column in columns:
        by_rule.setdefault(column[0].rule, []).append(column)
    table = []
    for rule, tried in by_rule.items():
        meets = [column for column in tried if attained(column) >= TARGET]
        chosen = min(meets, key=hired_s) if meets else max(tried, key=attained)
        target = chosen[0].target
        row: dict[str, Any] = {
            "traffic": name,
            "requests": sum(one.requests for one in chosen),
            "rule": rule if target is None else f"{rule} at {target}",
            "attainment": round(attained(chosen), 4),
            "worker_hours": round(hired_s(chosen) / 3600.0, 2),
            "of clairvoyant": round(hired_s(chosen) / least_s, 3),
        }
        if len(chosen) > 1:
            shares = [a.worker_s / b.worker_s for a, b in zip(chosen, columns[0], strict=True)]
            row |= {
                "worst piece": round(min(attained([one]) for one in chosen), 4),
                "dearest piece": round(max(shares), 3),
            }
        table.append(row)
        for cause in chosen[0].above:
            share = sum(one.above.get(cause, 0.0) for one in chosen) / least_s
            table.append({"traffic": name, "rule": f"above: {cause}", "of clairvoyant": round(share, 3)})
    return table


def attained(column: Iterable[Run]) -> float:
    pairs = [(one.misses, one.requests) for one in column]
    return 1.0 - sum(m for m, _ in pairs) / sum(n for _, n in pairs)


def hired_s(column: Iterable[Run]) -> float:
    return sum(one.worker_s for one in column)


def piece(day: int, asked: argparse.Namespace, line: tuple[float, float]) -> list[Run]:
    """The runs of an hour of a day; none where nothing arrived."""
    from_h = (6.0 + 5.0 * (day - 1)) % 24.0
    from_h = SILENT.get(day, from_h) if asked.planned else from_h
    how = " quick" * asked.quick + " advice" * asked.advice + " planned" * asked.planned

    def work() -> list[dict[str, Any]]:
        lengths = sharegpt(asked.data)
        lead_s = LEAD_S * asked.planned
        times = (HOUR_S + lead_s) / 3600.0, asked.seed, day, from_h - lead_s / 3600.0
        traffic = servegen(asked.data, SERIES, lengths, MEAN_RPS, *times)
        if not len(traffic.workload):
            return []
        if asked.planned:
            at = day - 1, busiest_h(asked.data, SERIES, day - 1)
            before = servegen(asked.data, SERIES, lengths, MEAN_RPS, PLANNED_H, asked.seed + 1, *at)
            windows = math.ceil(
                (traffic.workload.arrival_s[-1] - LEAD_S) / WINDOW_S
            )  # the last day ends early
            name, served = f"day{day} {asked.seed}", (LEAD_S, windows * WINDOW_S)
            found = planned_runs(name, traffic, before.workload, lengths, served, asked.resume)
        else:
            found = advised_runs(traffic) if asked.advice else runs(traffic, lengths, line, asked.quick)
        return [asdict(one) for one in found]

    kept = asked.resume.part(f"day{day} {from_h:g}h {asked.seed}{how}", work)
    return [Run(**one) for one in kept]


def days(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all days together."""
    line, lengths = (0.0, 0.0), sharegpt(asked.data)
    if not (asked.advice or asked.planned):
        line = line_at(lengths, (4.0, 8.0) if asked.quick else (4.0, 8.0, 16.0), 200.0, asked.seed)
    of = [day for day in DAYS[asked.planned :] if day not in asked.without][: 1 if asked.quick else None]
    with ProcessPoolExecutor(min(asked.jobs, len(of)), get_context("spawn")) as processes:
        pieces = zip(of, processes.map(partial(piece, asked=asked, line=line), of), strict=True)
        busy = {day: found for day, found in pieces if found}
    groups = {f"ServeGen {SERIES}, {len(busy)} hours": list(busy)}
    if asked.planned:
        groups |= {"the days held apart": apart} if (apart := sorted(busy.keys() - CHOSEN_ON)) else {}
        groups |= {f"day {day}{', chosen on' * (day in CHOSEN_ON)}": [day] for day in busy}
    return [row for name, of in groups.items() for row in rows(name, [busy[day] for day in of])]


def run(asked: argparse.Namespace) -> int:
    if asked.azure:
        real = azure(asked.data)
        own = Lengths(real.workload.prompt_tokens, real.workload.output_tokens)
        if asked.planned:
            real = replace(real, workload=within_context(real.workload, [CASE.profile], True, real.name)[0])
            known, served = real.workload.window(1200.0, 2400.0), (AZURE_LEAD_S, AZURE_S)
            found = planned_runs("azure", real, known, own, served, asked.resume)
        else:
            found = runs(real, own, line_at(own, (3.0, 6.0, 9.0), 200.0, asked.seed), asked.quick)
        table = rows(real.name, [found])
    elif asked.dated:
        table = rows(f"ServeGen {SERIES}, day {asked.dated}", [dated_runs(asked.dated, asked)])
    else:
        table = days(asked)
    bars = {}
    for mine in (r for r in table if r["rule"] in ("ours", PLANNED, ADVICE) and "day " not in r["traffic"]):
        says = f"{mine['traffic']}: {mine['rule']}"
        bars[f"{says}: worker-hours over the clairvoyant's"] = bar(
            mine["of clairvoyant"], 1.12 if asked.advice else 1.08 if asked.planned else 1.10
        )
        bars[f"{says}: attainment"] = bar(mine["attainment"], TARGET, at_least=True)
        if asked.planned and "dearest piece" in mine:
            bars[f"{says}: the dearest hour"] = bar(mine["dearest piece"], 1.15)
    return show("autoscaling", table, bars, asked)


if __name__ == "__main__":
    parser = flags(__doc__, AZURE_HOUR, SHAREGPT, SERVEGEN[SERIES], resumes=True)
    parser.add_argument("--azure", action="store_true", help="Azure's hour instead of ServeGen's days")
    parser.add_argument("--advice", action="store_true", help="replay `tokenfleet advise` instead")
    parser.add_argument("--planned", action="store_true", help="the loop of the day before's plan instead")
    parser.add_argument(
        "--dated", type=int, metavar="DAY", help="a whole day, by a dated plan of the day before"
    )
    parser.add_argument("--without", type=int, nargs="*", default=[], help="days to leave out")
    parser.add_argument("--jobs", type=int, default=2, help="hours simulated at a time")
    sys.exit(run(parser.parse_args()))
