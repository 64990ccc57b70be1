"""The nouns of the advice: what it is for, what is kept between looks, and the advice of one look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.line import Line
from controlplane.scaler.state import Scaling, ScalingSettings
from controlplane.scaler.traffic import Regime
from controlplane.types import ClassOutcomes, Slo
from controlplane.worker_type import WorkerType
from tokenfleet.advise.look import Buckets


@dataclass(frozen=True, slots=True)
class AdviceSettings:
    """What the fleet's replicas are, its target, how demand is followed, and the served model's name."""

    worker_type: WorkerType
    slo: Slo
    attainment: float
    scaling: ScalingSettings
    cold_start_s: float
    served: str = ""

    @property
    def settled_s(self) -> float:
        """After the first look, until a fall would have lasted long enough."""
        return max(self.scaling.window.down_s, self.cold_start_s)


@dataclass(frozen=True, slots=True)
class AdviceChange:
    """A change of the advice: when, from and to how many replicas, and why."""

    at_s: float
    before: int | None
    after: int
    why: str


@dataclass(frozen=True, slots=True)
class AdviceState:
    """What is kept between two looks. `profile`: as calibrated by now; None before."""

    scaling: Scaling = field(default_factory=Scaling)
    wanted: int | None = None
    first_s: float | None = None
    counted_s: float | None = None
    has: int = 0
    arrivals: float = 0.0
    change: AdviceChange | None = None
    profile: Profile | None = None
    recent: Buckets = field(default_factory=dict)
    outcomes: ClassOutcomes | None = None

    @property
    def begun_s(self) -> float:
        """The first look."""
        return 0.0 if self.first_s is None else self.first_s

    @property
    def held_since_s(self) -> float:
        """The last look that counted, or the first of all."""
        return self.begun_s if self.counted_s is None else self.counted_s


@dataclass(frozen=True, slots=True)
class Spent:
    """Replica-hours of the last day, or since the first advice: had, advised, and the advice's 90 % range."""

    hours: float
    had: float
    advised: float
    likely: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Advice:
    """A look's advice. `wanted` None: not yet known. `published`: for a scaler that follows it.

    `likely`: 90 % of what it may be. `regime`, `since_s`: the rate since the last change point, `upper_rps`
    at most. `arrivals`: counted so far. `shares`: of recent requests within TTFT and TPOT, at least and at
    most. `held`: why this look counted nothing, and `held_since_s` when the last did.
    `applied`: what was done with it. `spent`: over the last day.
    """

    at_s: float
    has: int
    starting: int
    wanted: int | None
    published: int | None
    likely: tuple[int, int] | None
    regime: Regime | None
    upper_rps: float
    since_s: float | None
    line: Line | None
    lengths: tuple[float, float] | None
    running: float
    waiting: float
    arrivals: float
    shares: Mapping[str, tuple[float, float] | None]
    edges: Mapping[str, tuple[float, ...]]
    change: AdviceChange | None
    profile: Profile
    held: str = ""
    held_since_s: float | None = None
    applied: str = ""
    spent: Spent | None = None
