"""The traffic, the fleet, the clairvoyant and the scalers of autoscaling.py: ours, HPA, and Ray Serve's."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.control import Settings, State, tick
from controlplane.perfmodel.profile import Profile
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import Policy, read_policy
from controlplane.port import Decide
from controlplane.scaler.forecast import NEAR, ForecastSettings, Outlook
from controlplane.scaler.hpa import HpaMemory, HpaRule, by_total, stabilized
from controlplane.scaler.state import Scaling, ScalingSettings
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.scaler.traffic import Demand, Regimes, follow
from controlplane.snapshot import Action, Scale, Snapshot
from controlplane.types import ClassArrivals
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.history.fleet_log import Look, look_of
from dataplane.live.control.controller import HEARTBEAT_S
from dataplane.live.control.controller_process import ControllerSettings
from dataplane.simulated.elastic import ElasticSettings, FleetRecord
from dataplane.simulated.elastic_run import simulate_elastic
from dataplane.simulated.simulate import ControlSettings, Outcome, WorkerSpec, simulate
from experiments.lib.fewest_workers import CASES, Lengths, Question
from experiments.lib.public_data import SERVEGEN, azure_hour
from tokenfleet.advise.followers import inside, one_by_one, scheduled
from tokenfleet.advise.hindsight import Hindsight, Schedule
from tokenfleet.cli.serve.loop import autoscale_of
from tokenfleet.planning.loop import planned_loop
from tokenfleet.planning.plan_file import PlanFile

CASE = CASES[1]
TARGET = 0.99
COLD_S = 60.0
SLOTS = 64
BEAT_S = 2.0
AHEAD = ForecastSettings(bin_s=600.0, season=144)  # the rates' own windows


@dataclass(frozen=True)
class Traffic:
    """A trace, and the counts of the bins before it (the forecast's history)."""

    name: str
    workload: Workload
    past: tuple[int, ...] = ()


def servegen(
    data: Path,
    name: str,
    lengths: Lengths,
    mean_rps: float,
    hours: float,
    seed: int,
    day: int = 14,
    from_h: float = 6.0,
) -> Traffic:
    """`hours` of one of the 14 days (1 to 14) from `from_h` o'clock on, and all before."""
    with (data / SERVEGEN[name]).open() as file:
        rows = [(float(r["window_start_s"]), float(r["total_rate_rps"])) for r in csv.DictReader(file)]
    at, rate = np.array(rows).T
    rate *= mean_rps / rate.mean()
    rng = np.random.default_rng([seed, 9])
    begin_s = ((day - 1) * 24 + from_h) * 3600.0
    end_s = min(begin_s + hours * 3600.0, at[-1])
    past = rng.poisson(rate[at < begin_s] * 600.0)
    # Poisson with a rate of straight lines: thinned.
    top = float(rate.max())
    times = np.sort(rng.uniform(begin_s, end_s, rng.poisson(top * (end_s - begin_s))))
    times = times[rng.random(len(times)) < np.interp(times, at, rate) / top] - begin_s
    drawn = rng.integers(0, len(lengths.prompt), len(times))
    return Traffic(
        f"ServeGen {name}",
        Workload(times, lengths.prompt[drawn], lengths.output[drawn]),
        tuple(int(c) for c in past),
    )


def azure(data: Path) -> Traffic:
    return Traffic("Azure conv", azure_hour(data))


@dataclass
class Bench:
    """The runs of one traffic: all with the same fleet, predictor and seed."""

    traffic: Traffic
    lengths: Lengths

    def run(
        self, start: int, control: ControlSettings, decide: Decide | None = None, state: State | None = None
    ) -> tuple[Outcome, FleetRecord]:
        return simulate_elastic(
            self.traffic.workload,
            [WorkerSpec(CASE.profile)] * SLOTS,
            CASE.slo,
            ElasticSettings(start, COLD_S),
            control,
            Policy.SPREAD,
            decide=decide,
            state=state,
            predictor=self.lengths.table(),
        )

    def hindsight(self) -> Hindsight:
        """The search for the cheapest schedule; see autoscaling.py's head."""
        still = ControlSettings(Settings(moves=None, shed=None), beat_s=BEAT_S)

        def at_once(part: Workload, workers: int) -> Outcome:
            fleet = [WorkerSpec(CASE.profile)] * workers
            return simulate(part, fleet, CASE.slo, predictor=self.lengths.table())

        def on_all(schedule: Schedule) -> tuple[Outcome, FleetRecord]:
            return self.run(schedule[0][1], still, scheduled(schedule, COLD_S + BEAT_S))

        return Hindsight(self.traffic.workload, TARGET, SLOTS, at_once, on_all)


def busiest_h(data: Path, name: str, day: int) -> float:
    """From what hour of a day on most arrives in two of the rates' windows."""
    with (data / SERVEGEN[name]).open() as file:
        rates = np.array([float(row["total_rate_rps"]) for row in csv.DictReader(file)])
    of_day = rates[(day - 1) * 144 : day * 144]
    return float((of_day[:-1] + of_day[1:]).argmax()) / 6.0


def loop_run(
    plan: PlanFile,
    cold_start_s: float,
    workload: Workload,
    predictor: LengthTable,
    began_unix_s: float | None = None,
    beat_s: float = HEARTBEAT_S,
) -> tuple[Outcome, FleetRecord, list[Look]]:
    """The loop of `serve --plan` with its default flags, and its log of the fleet.

    `began_unix_s`: when the workload begins, for the plan's schedule; None: the schedule does not cover it.
    """
    kinds = {group.worker_type.name: group.workers for group in plan.groups}
    loop, (policy, moves) = planned_loop(plan), read_policy(plan.policy)
    floor = None if began_unix_s is None else loop.floor
    bounds = autoscale_of(f"{loop.fewest}..{loop.most}", "80s", plan)
    bounds = replace(bounds, most_kinds=kinds, floor=floor)
    types = tuple(group.worker_type for group in plan.groups)
    settings = ControllerSettings("", None, False, 0, types, bounds, moves=moves, policy=policy)
    workers = [WorkerSpec(g.worker_type.profile) for g in plan.groups for _ in range(g.workers)]
    by_fewest: dict[int, Settings] = {}

    def rules_at(now_s: float) -> Settings:
        unix_s = (began_unix_s or 0.0) + now_s
        fewest = bounds.fewest(unix_s, cold_start_s)
        if fewest not in by_fewest:
            by_fewest[fewest] = settings.tick(settings.profiles, unix_s, cold_start_s)
        return by_fewest[fewest]

    control = ControlSettings(rules_at(0.0), beat_s=beat_s)
    start = ElasticSettings(start_kinds=kinds, cold_start_s=cold_start_s)
    looks: list[Look] = []

    def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
        rules = rules_at(seen.now_s)
        state, actions = tick(rules, state, seen)
        looks.append(look_of(seen, seen.now_s, rules.scaling, state.scaling))
        return state, actions

    run = simulate_elastic(
        workload, workers, plan.targets, start, control, policy, decide=decide, predictor=predictor
    )
    return *run, looks


def line_at(
    lengths: Lengths, rates: tuple[float, ...], seconds: float, seed: int, profile: Profile = CASE.profile
) -> tuple[float, float]:
    """Eq 7 by simulation at steady rates, other draws than those judged.

    Workers with a fraction, between the last count that fails and the first that does not, as in
    tokenfleet.planning.comparisons: whole numbers would be rounded up twice.
    """
    counts = []
    for rate in rates:
        workloads = [lengths.poisson(rate, round(rate * seconds), seed + 1000 + i) for i in range(2)]
        question = Question(workloads, profile, CASE.slo, lengths.table(), Policy.SPREAD)
        found = question.fewest(TARGET, max(rate, 1.0)) or question.most
        allowed = (1.0 - TARGET) * question.requests
        few, many = (math.log(question.misses(n, question.requests) + 0.5) for n in (found - 1, found))
        share = (few - math.log(allowed + 0.5)) / (few - many) if few > many else 1.0
        counts.append(found - 1 + min(max(share, 0.0), 1.0))
    slope, intercept = np.polyfit(rates, counts, 1)
    return float(slope), float(intercept)


def ours(
    line: tuple[float, float], lengths: Lengths, forecasts: bool, profile: Profile = CASE.profile
) -> ControlSettings:
    prompt, output = float(lengths.prompt.sum()), float(lengths.output.sum())
    scaling = ScalingSettings(
        TargetSettings(*line, low=1, high=SLOTS),
        StabilizationWindow(),
        worker_types=(WorkerType.of(profile),),
        ahead=AHEAD if forecasts else None,
        near=NEAR if forecasts else None,
        learned_at=ClassArrivals(CASE.slo, len(lengths.prompt), prompt, output),
    )
    return ControlSettings(Settings(moves=None, shed=None, scaling=scaling), beat_s=BEAT_S)


def remembered(past: tuple[int, ...]) -> State:
    """A scaler that has watched the days before."""
    demand = Demand(AHEAD.bin_s, AHEAD.keep)
    regimes, levels = Regimes(), []
    for n in range(1, len(past) + 1):
        seen = replace(demand, first_bin=0, closed=past[:n])
        regimes = follow(regimes, seen)
        assert regimes.current is not None
        levels.append(regimes.current.rate_rps)
    demand = replace(demand, first_bin=-len(past), closed=past, seen_s=0.0)
    return State(scaling=Scaling(far=Outlook(demand, tuple(levels))))


def hpa(target: float, low: int, high: int) -> Decide:
    """HPA on requests in the system, `target` for each worker. It remembers the number that it finds."""
    rule, memory = HpaRule(target, low, high), HpaMemory()

    def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
        nonlocal memory
        memory = memory if memory.looks else HpaMemory(((seen.now_s, seen.wanted),))
        if not memory.is_due(seen.now_s):
            return state, []
        asked = by_total(rule, seen.waiting_requests + sum(map(inside, seen.workers)), seen.wanted)
        memory, wanted = stabilized(rule, memory, seen.now_s, seen.wanted, asked)
        return state, [] if wanted == seen.wanted else [Scale(wanted, "a rule")]

    return decide


def ray_serve(target: float, low: int, high: int) -> Decide:
    """One worker more or fewer, as the advice's baselines have it."""
    no_plane: Any = None  # it looks at snapshots alone
    return one_by_one(target, {"": (low, high)})(no_plane)
