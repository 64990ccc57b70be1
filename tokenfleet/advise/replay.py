"""A recorded day on a simulated fleet that follows the advice, next to fleets that follow other rules.

Every fleet starts with what the hindsight optimum starts with, and pays for starts and drains. Requests go to
the replica with the fewest in the system, as gateways do; one row shows the placement of `serve` instead. The
advice sees the metrics that vLLM would show (`followers.FleetMeter`).

Of several worker types, each has an autoscaler of its own, and one row an `advise` for each type. The optimum
is that of each type alone, without its limits; the cheapest of those within the target comes first. Every
fleet starts with the counts that the advice has after the first window, which it sees with as many of each
type as that type alone needs.

A baseline is run at several targets. It is shown at the one that is cheapest within the target, or where none
is, at the one that keeps most requests in time. So the baselines are tuned on the day itself, and the advice
is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.control import Settings
from controlplane.errors import BadInput
from controlplane.placement.policies import Policy
from controlplane.port import Decide
from controlplane.scaler.hpa import TOLERANCE
from controlplane.workload import Workload
from dataplane.simulated.elastic import ElasticSettings, FleetRecord
from dataplane.simulated.elastic_run import simulate_elastic
from dataplane.simulated.outcome import Outcome
from dataplane.simulated.simulate import ControlSettings, WorkerSpec, simulate
from tokenfleet.advise.advice import AdviceSettings
from tokenfleet.advise.decide import looked_at
from tokenfleet.advise.followers import BASELINES, LOOK_S, BaselineRule, Bounds, Brain, advised, scheduled
from tokenfleet.advise.hindsight import WINDOW_S, Hindsight, HindsightRun, Schedule

HINDSIGHT = "Hindsight optimum"
ADVICE = "Advice"
TOLERANT = "Advice, HPA tolerance 10 %"
PLACED = "Advice, placed by tokenfleet serve"
EACH = "One advice for each type"
MOST = 256  # replicas of a replay
Counts = Mapping[str, int]  # replicas, by worker type
SPARE_TIMES, SPARE = 2, 8  # slots over the most of the hindsight optimum


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What a rule did with the day. `target`: of a baseline, as a text. `hours`: of each worker type.

    `usd`: of all; None where a price is not known.
    """

    rule: str
    target: str
    requests: int
    attainment: float
    worker_s: float
    changes: int
    most: int
    hours: Mapping[str, float]
    usd: float | None

    @property
    def cost(self) -> float:
        """What rules are compared by: dollars, or else seconds."""
        return self.worker_s if self.usd is None else self.usd

    @classmethod
    def of(cls, rule: str, outcome: Outcome, record: FleetRecord, target: str = "") -> ReplayRow:
        return cls(
            rule,
            target,
            len(outcome.workload),
            outcome.attainment,
            record.worker_s,
            len(record.reasons),
            max(there for _, _, there in record.changes),
            {name: seconds / 3600.0 for name, seconds in record.kind_s.items()},
            record.usd,
        )


@dataclass(frozen=True)
class ReplayedDay:
    """A day, the advice's settings, the bounds of every fleet, and how hard the optimum is looked for."""

    workload: Workload
    settings: AdviceSettings
    low: int = 1
    high: int = MOST
    trims: bool = False

    def __post_init__(self) -> None:
        if len(self.workload) == 0:
            raise BadInput("--replay: the trace has no requests")
        for one in self.settings.types if self.settings.scaling.is_mix else ():
            if one.usd_per_h is None:
                raise BadInput(
                    f"--replay: {one.name} has no price, so mixes cannot be compared; give --prices"
                )

    @property
    def alone(self) -> list[ReplayedDay]:
        """The day on each worker type alone."""
        scaling = self.settings.scaling
        return [
            replace(self, settings=replace(self.settings, scaling=replace(scaling, worker_types=(one,))))
            for one in self.settings.types
        ]

    def run(
        self,
        start: Counts,
        slots: Counts,
        brain: Brain | None = None,
        decide: Decide | None = None,
        policy: Policy = Policy.JSQ,
    ) -> tuple[Outcome, FleetRecord]:
        """The day on a fleet that starts with `start` replicas and is scaled by a brain, or by a decision."""
        types = self.settings.types
        prices = {one.name: one.usd_per_h for one in types if one.usd_per_h is not None}
        return simulate_elastic(
            self.workload,
            [WorkerSpec(one.profile) for one in types for _ in range(slots[one.name])],
            self.settings.slo,
            ElasticSettings(0, self.settings.cold_start_s, start_kinds=start, usd_per_h=prices),
            ControlSettings(Settings(moves=None, shed=None), beat_s=LOOK_S),
            policy,
            brain=brain,
            decide=decide,
        )

    def hindsight(self) -> HindsightRun:
        """The cheapest schedule of the first worker type within the target, and its run."""
        one, slo, high = self.settings.worker_type, self.settings.slo, min(self.high, MOST)
        lead_s = self.settings.cold_start_s + LOOK_S

        def at_once(part: Workload, workers: int) -> Outcome:
            return simulate(part, [WorkerSpec(one.profile)] * workers, slo, Policy.JSQ)

        def on_all(schedule: Schedule) -> tuple[Outcome, FleetRecord]:
            return self.run({one.name: schedule[0][1]}, {one.name: high}, decide=scheduled(schedule, lead_s))

        return Hindsight(self.workload, self.settings.attainment, high, at_once, on_all).cheapest(self.trims)

    def rows(
        self, baselines: Sequence[BaselineRule] = BASELINES, tell: Callable[[str], None] = lambda said: None
    ) -> Iterator[list[ReplayRow]]:
        """The rows of each rule, those of a baseline at every target."""
        optima, schedules = [], {}
        for one, day in zip(self.settings.types, self.alone, strict=True):
            rule = f"{HINDSIGHT} of {one.name} alone" if self.settings.scaling.is_mix else HINDSIGHT
            tell(rule)
            schedule, outcome, record = day.hindsight()
            schedules[one.name] = [count for _, count in schedule]
            optima.append(ReplayRow.of(rule, outcome, record))
        for row in sorted(optima, key=lambda row: (row.attainment < self.settings.attainment, row.cost)):
            yield [row]
        most = {name: max(counts) for name, counts in schedules.items()}
        bounds, whole = self._bounds(most), [looked_at(self.settings, LOOK_S)]
        slots = {name: high for name, (_, high) in bounds.items()}
        start = self._start({name: counts[0] for name, counts in schedules.items()}, bounds)
        each = [looked_at(day.settings, LOOK_S) for day in self.alone]
        ways = {ADVICE: (whole, 0.0, Policy.JSQ)} | ({EACH: (each, 0.0, Policy.JSQ)} if each[1:] else {})
        ways |= {TOLERANT: (whole, TOLERANCE, Policy.JSQ), PLACED: (whole, 0.0, Policy.SPREAD)}
        for name, (of, tolerance, policy) in ways.items():
            tell(name)
            brain = advised(of, bounds, tolerance)
            outcome, record = self.run(start, slots, brain, policy=policy)
            yield [ReplayRow.of(name, outcome, record)]
        for baseline in baselines:
            tried = []
            for said, target in baseline.targets.items():
                tell(f"{baseline.name} at {said}")
                brain = baseline.brain(target, bounds)
                tried.append(ReplayRow.of(baseline.name, *self.run(start, slots, brain), said))
            yield tried
        if not self.settings.scaling.is_mix:
            tell("a fixed fleet")
            fixed = self.run(most, slots, decide=lambda state, seen: (state, []))
            yield [ReplayRow.of("Fixed at the optimum's peak", *fixed)]

    def _bounds(self, most: Counts) -> Bounds:
        """The fewest and the most replicas of each type. `most`: what each has in its optimum."""
        found = {}
        for one in self.settings.types:
            low, high = self.low, self.high
            if self.settings.scaling.is_mix:
                low, high = one.low, MOST if one.limit is None else one.limit
            found[one.name] = low, min(high, SPARE_TIMES * most[one.name] + SPARE, MOST)
        return found

    def _start(self, first: Counts, bounds: Bounds) -> Counts:
        """What every fleet starts with. `first`: what each type's optimum starts with."""
        start = {name: min(max(first[name], low), high) for name, (low, high) in bounds.items()}
        if not self.settings.scaling.is_mix:
            return start
        begin = replace(self, workload=self.workload.window(0.0, WINDOW_S))
        slots = {name: high for name, (_, high) in bounds.items()}
        _, record = begin.run(start, slots, advised([looked_at(self.settings, LOOK_S)], bounds, 0.0))
        return record.kinds[-1][1] if record.kinds else start


def best(tried: Sequence[ReplayRow], attainment: float) -> ReplayRow:
    """The cheapest of those within the target, or the one that keeps most requests in time."""
    meets = [row for row in tried if row.attainment >= attainment]
    return min(meets, key=lambda row: row.cost) if meets else max(tried, key=lambda row: row.attainment)
