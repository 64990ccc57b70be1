"""The result of a plan: the fleet, its certainty, the reasons for its size, and the alternatives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.placement.policies import MIGRATE
from controlplane.types import Slo, SloClass
from controlplane.worker_type import WorkerType
from tokenfleet.planning import plan_file as tree
from tokenfleet.planning.classes import ClassOfPlan
from tokenfleet.planning.estimate import Estimate, attained
from tokenfleet.planning.explain import Binding
from tokenfleet.planning.fleet import Fleet, StandbyWorkers, fleet_fields
from tokenfleet.planning.mixes.cheapest import MixSearch
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.schedule import PaidSchedule, Schedule
from tokenfleet.planning.traffic.drift import Told
from tokenfleet.traces.shape import Phase
from tokenfleet.traces.trace import Assumed

QUANTILES = (0.5, 0.9, 0.99)
CURVE_POINTS = 60
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

    @property
    def quantiles(self) -> tree.Quantiles:
        """p50, p90, p99 and the mean."""
        p50, p90, p99 = (known(self.at(q)) for q in QUANTILES)
        return tree.Quantiles(p50=p50, p90=p90, p99=p99, mean=known(self.mean))

    @property
    def curve(self) -> list[list[float]]:
        """(seconds, share) pairs, closer together towards the tail, where the target is."""
        if len(self.sorted_s) == 0:
            return []
        tail = 1.0 - np.geomspace(0.1, 1e-4, CURVE_POINTS - 30)
        shares = np.unique(np.concatenate((np.linspace(0, 0.9, 31), tail)))
        return [[self.at(float(s)), float(s)] for s in (*shares, 1.0)]


def known(value: float) -> float | None:
    """None for what is not a number, which JSON cannot say."""
    return value if math.isfinite(value) else None


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

    def predicted(self, target: float) -> dict[str, Any]:
        """The prediction on the trace and beyond it, by its names in a plan."""
        return {
            "attainment": attained(self.estimate, self.on_trace, target),
            "ttft_s": self.ttft.quantiles,
            "tpot_s": self.tpot.quantiles,
            "utilisation": known(self.utilisation),
        }

    def considered(self, target: float) -> tree.Considered:
        """The candidate as an alternative of a plan."""
        fields = fleet_fields(self.fleet) | self.predicted(target)
        return tree.Considered(**fields, prefix_hit_rate=self.hit_rate, note=self.note or None)


def one_fewer(on_trace: float, estimate: Estimate | None, fails: str, **fleet: Any) -> tree.OneFewer:
    """One worker less than the answer, and how it fails; `fleet`: its workers, and their groups."""
    expected, low = (on_trace, None) if estimate is None else (estimate.expected, estimate.low)
    return tree.OneFewer(**fleet, attainment=expected, low=low, on_trace=on_trace, fails=fails)


def uncertainty(
    arrivals: float, drift: float, coefficients: float, traffic: Told = "steady", of_rate: float = 0.0
) -> tree.Uncertainty:
    """The scatter of attainment (standard deviation) from each source alone.

    The sources are other arrivals, levels of the traffic that drift (0 where it is steady), and coefficients
    within their residuals. Shares are those of the variance, most first.
    """
    parts = {"arrivals": arrivals, "drift": drift, "coefficients": coefficients}
    whole = sum(x**2 for x in parts.values())
    shares = {name: x**2 / whole for name, x in parts.items() if x > 0.0}
    shares = dict(sorted(shares.items(), key=lambda share: -share[1]))
    mostly = next(iter(shares), "arrivals")
    return tree.Uncertainty(**parts, traffic=traffic, of_rate=of_rate, mostly=mostly, shares=shares)


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
    passed_over: tuple[tree.PassedOver, ...] = ()
    nearest: tree.Nearest | None = None
    binding: Binding | None = None
    headroom: tree.Headroom | None = None
    plateau: tree.Plateau | None = None
    one_fewer: tree.OneFewer | None = None
    doubt: tree.Uncertainty | None = None
    line: tree.ScalingRule | tree.AgentsLine | None = None  # over sessions where agents run them
    schedule: Schedule | None = None
    paid: PaidSchedule | None = None  # the schedule with its cold starts
    sampled: tree.TraceSample | None = None  # where the trace is too long to be replayed whole each time
    mixes: MixSearch | None = None  # where there are several worker types to mix
    spares: StandbyWorkers | None = None  # on spot workers; `best.fleet` has them
    baselines: tuple[tree.OtherPolicy, ...] = ()
    moves: tree.PlannedMoves | None = None  # where they were asked for
    tier: tree.KvOffload | None = None  # where host memory keeps KV
    reuse: tree.Reuse | None = None  # where prefixes are known and cached
    costed: tuple[tree.Costed, ...] = ()
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
