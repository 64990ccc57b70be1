"""The result of a plan: the fleet, its certainty, the reasons for its size, and the alternatives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.placement.policies import MIGRATE
from controlplane.types import Slo, SloClass
from controlplane.worker_type import WorkerType
from tokenfleet.planning.classes import ClassOfPlan
from tokenfleet.planning.comparisons import Baseline, DemandLine, NearestTarget, ScaledTarget, TierWorth
from tokenfleet.planning.estimate import Estimate
from tokenfleet.planning.explain import AttainmentPlateau, Binding, TrafficHeadroom
from tokenfleet.planning.fleet import Fleet, StandbyWorkers
from tokenfleet.planning.mixes.cheapest import MixSearch
from tokenfleet.planning.moves import MovesWorth
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.reuse import PrefixReuse
from tokenfleet.planning.schedule import PaidSchedule, Schedule
from tokenfleet.planning.traffic.drift import Told
from tokenfleet.traces.phases import Phase
from tokenfleet.traces.trace import Assumed

QUANTILES = (0.5, 0.9, 0.99)
POINTS = 500_000


@dataclass(frozen=True)
class Latency:
    """One latency over the requests of a replay (seconds, ascending): quantiles, mean, and the curve."""

    sorted_s: NDArray[np.float64]

    def at(self, share: float) -> float:
        """The latency that `share` of the requests do not exceed; NaN without requests."""
        if len(self.sorted_s) == 0:
            return float("nan")
        return float(np.quantile(self.sorted_s, share, method="inverted_cdf"))

    @property
    def mean(self) -> float:
        return float(self.sorted_s.mean()) if len(self.sorted_s) else float("nan")


def latency(values_s: NDArray[np.floating], weight: NDArray[np.float64] | None = None) -> Latency:
    """The latency of those that have one (NaN: a one-token output has no TPOT); of many, `POINTS` quantiles.

    `weight`: of how many requests each tells.
    """
    has_one = ~np.isnan(values_s)
    values_s = values_s[has_one]
    if weight is None and len(values_s) <= POINTS:
        return Latency(np.sort(values_s).astype(np.float64))
    places = (np.arange(POINTS) + 0.5) / POINTS
    if weight is None:  # of many millions the order itself would take more memory than they do
        values_s.sort()
        return Latency(values_s[np.ceil(places * len(values_s)).astype(np.int64) - 1].astype(np.float64))
    order = np.argsort(values_s)
    upto = np.cumsum(weight[has_one][order])
    at = np.searchsorted(upto, places * (upto[-1] if len(upto) else 0.0))
    return Latency(values_s[order[at]].astype(np.float64) if len(order) else np.zeros(0))


@dataclass(frozen=True, slots=True)
class Sampled:
    """How a long trace was judged: the `requests` of a sample, its windows, and what they and the whole say.

    `binding` of the windows were there for certain. `attainment` of the fleet in the sample, which the whole
    exceeds or falls below by chance: at the plan's confidence not below `low`. `whole`: in a replay of every
    request; None where there was none. `added`: the workers that took more than the sample had asked for.
    """

    requests: int
    windows: int
    binding: int
    of_windows: int
    attainment: float
    low: float
    whole: float | None = None
    added: int = 0


@dataclass(frozen=True)
class Candidate:
    """A fleet that was considered. `estimate` is None when it was sized on the trace alone."""

    fleet: Fleet
    on_trace: float
    estimate: Estimate | None
    ttft: Latency
    tpot: Latency
    utilisation: float  # NaN where it was judged by a sample
    note: str = ""
    hit_rate: float | None = None  # of prefix caches on the trace; None where nothing is cached
    classes: tuple[tuple[int, float], ...] = ()  # of each SLO class its requests, and attainment on the trace
    runs_on: tuple[tuple[tuple[str, float], ...], ...] = ()  # and the shares of them by kind of worker


@dataclass(frozen=True, slots=True)
class SmallerFleet:
    """One worker less than the answer, and how it fails."""

    workers: int
    on_trace: float
    estimate: Estimate | None
    fails: str
    fleet: Fleet | None = None


@dataclass(frozen=True, slots=True)
class Doubt:
    """The scatter of attainment (standard deviation) from each source of uncertainty alone.

    The sources are other arrivals, levels of the traffic that drift (0 where it is steady), and coefficients
    within their residuals. `traffic`: whether the trace shows that its levels change. `of_rate`: how much
    the rate is assumed to change (a standard deviation of its logarithm).
    """

    arrivals: float
    drift: float
    coefficients: float
    traffic: Told = "steady"
    of_rate: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Of the variance, most first; without those that scatter nothing."""
        parts = {"arrivals": self.arrivals, "drift": self.drift, "coefficients": self.coefficients}
        whole = sum(x**2 for x in parts.values())
        shares = ((name, x**2 / whole) for name, x in parts.items() if x > 0.0)
        return dict(sorted(shares, key=lambda share: -share[1]))

    @property
    def mostly(self) -> str:
        return next(iter(self.shares), "arrivals")


@dataclass(frozen=True, slots=True)
class InfeasibleType:
    """A worker type that is no alternative, and why."""

    worker_type: WorkerType
    reason: str


@dataclass(frozen=True)
class Inputs:
    """The inputs of a plan, for the record."""

    trace: str
    requests: int
    rate_rps: float
    duration_s: float
    warnings: tuple[str, ...]
    rate_curve: tuple[tuple[float, float], ...]  # (start_s, rps)
    clock_start_s: float | None = None  # Unix time of the workload's zero, where the trace tells
    rate_scale: float = 1.0  # seconds of the trace that pass in one of the workload's
    ideal_hit_rate: float | None = None  # of caches that forget nothing; None where nothing is cached
    classes: tuple[SloClass, ...] = ()  # of the workload, in its order; none where the targets are plain
    ages: tuple[str, ...] = ()  # those of the warnings that tell how old prices and profiles are
    phases: tuple[Phase, ...] = ()  # none where concurrent sessions set the rate
    assumed: Assumed | None = None  # of a trace that was drawn


@dataclass(frozen=True)
class Plan:
    """The answer to a plan request; `best` is None when it is infeasible, and `reason` says why."""

    request: PlanRequest
    inputs: Inputs
    worker_types: tuple[WorkerType, ...]
    best: Candidate | None
    reason: str = ""
    alternatives: tuple[Candidate, ...] = ()
    passed_over: tuple[InfeasibleType, ...] = ()
    nearest: NearestTarget | None = None
    nearest_attainment: float | None = None
    binding: Binding | None = None
    headroom: TrafficHeadroom | None = None
    plateau: AttainmentPlateau | None = None
    one_fewer: SmallerFleet | None = None
    doubt: Doubt | None = None
    line: DemandLine | None = None
    schedule: Schedule | None = None
    paid: PaidSchedule | None = None  # the schedule with its cold starts
    sampled: Sampled | None = None  # where the trace is too long to be replayed whole each time
    mixes: MixSearch | None = None  # where there are several worker types to mix
    spares: StandbyWorkers | None = None  # on spot workers; `best.fleet` has them
    baselines: tuple[Baseline, ...] = ()
    moves: MovesWorth | None = None  # where they were asked for
    tier: TierWorth | None = None  # where host memory keeps KV
    reuse: PrefixReuse | None = None  # where prefixes are known and cached
    costed: tuple[ScaledTarget, ...] = ()
    classes: tuple[ClassOfPlan, ...] = ()
    on_trace: dict[int, float] = field(default_factory=dict)
    sure: dict[int, Estimate] = field(default_factory=dict)

    @property
    def feasible(self) -> bool:
        return self.best is not None

    @property
    def slo(self) -> Slo:
        return self.request.slo

    @property
    def policy(self) -> str:
        """The placement policy by name, with moves where the plan has them."""
        moves = self.request.moves and (self.moves is None or self.moves.kept)
        return self.request.placement + (MIGRATE if moves else "")

    @property
    def prefix_cache(self) -> bool | None:
        """Whether engines keep prefixes; None where the trace does not say what is shared."""
        if self.request.no_prefix_cache:
            return False
        return None if self.inputs.ideal_hit_rate is None else True
