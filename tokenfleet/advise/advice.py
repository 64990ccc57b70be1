"""The nouns of the advice: what it is for, what is kept between looks, and the advice of one look."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.scaler.line import Line
from controlplane.scaler.state import Scaling, ScalingSettings
from controlplane.scaler.traffic import Regime
from controlplane.types import ClassOutcomes, Slo
from controlplane.worker_type import WorkerType
from tokenfleet.advise.look import Buckets

KINDS = {"deployment": "Deployment", "statefulset": "StatefulSet"}
NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True)
class AdviceSettings:
    """The target, how demand is followed with which types of worker, and the served model's name."""

    slo: Slo
    attainment: float
    scaling: ScalingSettings
    cold_start_s: float
    served: str = ""

    @property
    def types(self) -> tuple[WorkerType, ...]:
        """The types of replica; looks name them by their places here."""
        return self.scaling.worker_types

    @property
    def worker_type(self) -> WorkerType:
        """The only type, or the first."""
        return self.types[0]

    def profile(self, kind: int, state: AdviceState) -> Profile:
        """The step times of a type, as calibrated by now."""
        return state.profiles.get(kind, self.types[kind].profile)

    def usd_per_h(self, counts: Sequence[int]) -> float | None:
        """The cost of these counts of each type; None where a price is not known."""
        total = 0.0
        for worker_type, count in zip(self.types, counts, strict=True):
            if count and worker_type.usd_per_h is None:
                return None
            total += count * (worker_type.usd_per_h or 0.0)
        return total

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
    """What is kept between two looks.

    `wanted`, `has`, `arrivals` and the recent ones (`recently`): of each type. `profiles`: of the types that
    were calibrated.
    """

    scaling: Scaling = field(default_factory=Scaling)
    wanted: tuple[int, ...] | None = None
    first_s: float | None = None
    counted_s: float | None = None
    has: tuple[int, ...] = ()
    arrivals: tuple[float, ...] = ()
    recently: tuple[float, ...] = ()
    change: AdviceChange | None = None
    profiles: Mapping[int, Profile] = field(default_factory=dict)
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
    """Replica-hours of the last day, or since the first advice: had, advised, and the advice's 90 % range.

    `usd`: what was had and advised; None without prices.
    """

    hours: float
    had: float
    advised: float
    likely: tuple[float, float]
    usd: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class TypeAdvice:
    """The part of an advice that is for one type of worker.

    `carries_rps`: by a replica, with the scaling rule's headroom. `gets`: its share of recent requests.
    """

    worker_type: WorkerType
    profile: Profile
    is_calibrated: bool
    has: int
    starting: int
    wanted: int | None
    published: int | None
    likely: tuple[int, int] | None
    arrivals: float
    carries_rps: float | None
    gets: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    """A look's advice. `wanted` None: not yet known. `published`: for a scaler that follows it.

    `likely`: 90 % of what it may be. `regime`, `since_s`: the rate since the last change point, `upper_rps`
    at most. `arrivals`: counted so far. `shares`: of recent requests within TTFT and TPOT, at least and at
    most. `held`: why this look counted nothing, and `held_since_s` when the last did. `of_types`: for each
    type; counts are else of all together.
    `applied`: what was done with it. `spent`: over the last day. `usd_per_h`, `wanted_usd_per_h`: the cost
    of what answers and of the advice; None where it is not known.
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
    of_types: tuple[TypeAdvice, ...]
    usd_per_h: float | None
    wanted_usd_per_h: float | None
    held: str = ""
    held_since_s: float | None = None
    applied: str = ""
    spent: Spent | None = None


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """A Deployment or StatefulSet by its name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind.lower()}/{self.name}"


def scale_target(text: str, flag: str) -> ScaleTarget:
    """`deployment/NAME` or `statefulset/NAME`. Raises BadInput."""
    kind, _, name = text.partition("/")
    if kind not in KINDS or re.fullmatch(NAME, name) is None:
        raise BadInput(f"{flag}: expected deployment/NAME or statefulset/NAME, got {text!r}")
    return ScaleTarget(KINDS[kind], name)
