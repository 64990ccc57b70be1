"""A recorded day on a simulated fleet that follows the advice, next to fleets that follow other rules.

Every fleet starts with what the hindsight optimum starts with, and pays for starts and drains. Requests go to
the replica with the fewest in the system, as gateways do; one row shows the placement of `serve` instead. The
advice sees the metrics that vLLM would show (`advise.meter`).

A baseline is run at several targets. It is shown at the one that is cheapest within the target, or where none
is, at the one that keeps most requests in time. So the baselines are tuned on the day itself, and the advice
is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
from tokenfleet.advise.followers import BASELINES, LOOK_S, BaselineRule, Brain, advised, scheduled
from tokenfleet.advise.hindsight import Hindsight, HindsightRun, Schedule

HINDSIGHT = "Hindsight optimum"
ADVICE = "Advice"
TOLERANT = "Advice, HPA tolerance 10 %"
PLACED = "Advice, placed by tokenfleet serve"
MOST = 256  # replicas of a replay
SPARE_TIMES, SPARE = 2, 8  # slots over the most of the hindsight optimum


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """What a rule did with the day. `target`: of a baseline, as a text."""

    rule: str
    target: str
    requests: int
    attainment: float
    worker_s: float
    changes: int
    most: int

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

    def run(
        self,
        start: int,
        slots: int,
        brain: Brain | None = None,
        decide: Decide | None = None,
        policy: Policy = Policy.JSQ,
    ) -> tuple[Outcome, FleetRecord]:
        """The day on a fleet that starts with `start` replicas and is scaled by a brain, or by a decision."""
        return simulate_elastic(
            self.workload,
            [WorkerSpec(self.settings.worker_type.profile)] * slots,
            self.settings.slo,
            ElasticSettings(start, self.settings.cold_start_s),
            ControlSettings(Settings(moves=None, shed=None), beat_s=LOOK_S),
            policy,
            brain=brain,
            decide=decide,
        )

    def hindsight(self) -> HindsightRun:
        """The cheapest schedule within the target, and its run."""
        profile, slo, high = self.settings.worker_type.profile, self.settings.slo, min(self.high, MOST)
        lead_s = self.settings.cold_start_s + LOOK_S

        def at_once(part: Workload, workers: int) -> Outcome:
            return simulate(part, [WorkerSpec(profile)] * workers, slo, Policy.JSQ)

        def on_all(schedule: Schedule) -> tuple[Outcome, FleetRecord]:
            return self.run(schedule[0][1], high, decide=scheduled(schedule, lead_s))

        return Hindsight(self.workload, self.settings.attainment, high, at_once, on_all).cheapest(self.trims)

    def rows(
        self, baselines: Sequence[BaselineRule] = BASELINES, tell: Callable[[str], None] = lambda said: None
    ) -> Iterator[list[ReplayRow]]:
        """The rows of each rule, those of a baseline at every target."""
        tell(HINDSIGHT.lower())
        schedule, outcome, record = self.hindsight()
        yield [ReplayRow.of(HINDSIGHT, outcome, record)]
        counts = [count for _, count in schedule]
        start, most = max(counts[0], self.low), max(counts)
        slots = min(self.high, SPARE_TIMES * most + SPARE, MOST)
        settings = looked_at(self.settings, LOOK_S)
        ways = ((ADVICE, 0.0, Policy.JSQ), (TOLERANT, TOLERANCE, Policy.JSQ), (PLACED, 0.0, Policy.SPREAD))
        for name, tolerance, policy in ways:
            tell(name)
            brain = advised(settings, self.low, slots, tolerance)
            outcome, record = self.run(start, slots, brain, policy=policy)
            yield [ReplayRow.of(name, outcome, record)]
        for baseline in baselines:
            tried = []
            for said, target in baseline.targets.items():
                tell(f"{baseline.name} at {said}")
                brain = baseline.brain(target, self.low, slots)
                tried.append(ReplayRow.of(baseline.name, *self.run(start, slots, brain), said))
            yield tried
        tell("a fixed fleet")
        fixed = self.run(most, slots, decide=lambda state, seen: (state, []))
        yield [ReplayRow.of("Fixed at the optimum's peak", *fixed)]


def best(tried: Sequence[ReplayRow], attainment: float) -> ReplayRow:
    """The cheapest of those within the target, or the one that keeps most requests in time."""
    meets = [row for row in tried if row.attainment >= attainment]
    return min(meets, key=lambda row: row.worker_s) if meets else max(tried, key=lambda row: row.attainment)
