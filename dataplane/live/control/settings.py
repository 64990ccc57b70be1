"""The controller's settings: plain values that the fleet which starts it passes over a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter

from controlplane.control import Settings
from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings
from controlplane.migration.overload import ShedSettings
from controlplane.migration.usage import Reading
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import BY_TARGETS, Policy
from controlplane.placement.strictness import NORMAL, Strictness
from controlplane.scaler.clock import ClockFloor
from controlplane.scaler.forecast import NEAR, ForecastSettings
from controlplane.scaler.load import LoadSettings
from controlplane.scaler.mix import MixSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.types import ClassArrivals, Slo, SloClass
from controlplane.worker_type import WorkerType

ANY_SLO = Slo(1.0, 1.0)  # a line's lengths are compared within each class, at its own targets
BIN_S = 10.0
HAIR_S = 0.001  # past an edge of the floor, whatever was rounded
BINS_A_HOLD = 6  # a fall is seen in a few bins, so a short hold asks for short ones


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Bounds of the number of workers, and how it follows demand.

    `low` 0 lets an idle fleet have none. `line`: Eq 7's slope (workers per request a second) and intercept,
    as a plan learned them; None takes them from what a worker can do. `hold_s`: how long fewer must be
    enough before workers are drained. `learned_at`: the mean prompt and output tokens that `line` holds for;
    it follows those that arrive. `max_gpus`, `budget_usd_per_h`: limits of all workers together.
    `attainment`: the share of requests that is to be in time, of those without a class of their own.
    `most_kinds`: the most workers of each type, where they are bounded. `floor`: the fewest by the clock.
    """

    low: int
    high: int
    line: tuple[float, float] | None = None
    hold_s: float = 80.0
    learned_at: tuple[float, float] | None = None
    max_gpus: int | None = None
    budget_usd_per_h: float | None = None
    attainment: float = 0.99
    most_kinds: Mapping[str, int] = field(default_factory=dict)
    floor: ClockFloor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.high < 1:
            raise BadInput(
                f"autoscale: need 0 <= MIN <= MAX and MAX of at least 1, got {self.low}..{self.high}"
            )

    def fewest(self, unix_s: float, cold_start_s: float = 0.0) -> int:
        """The fewest workers at a Unix time; the floor counts a cold start early."""
        floor = 0 if self.floor is None else self.floor.at(unix_s, cold_start_s)
        return min(max(self.low, floor), self.high)

    def next_fewest(self, unix_s: float, cold_start_s: float = 0.0) -> tuple[float, int] | None:
        """When the fewest workers change next, and to how many; None where they never do."""
        now = self.fewest(unix_s, cold_start_s)
        edges = () if self.floor is None else self.floor.edges_s(unix_s, cold_start_s)
        after = ((at_s, self.fewest(at_s + HAIR_S, cold_start_s)) for at_s in edges)
        return next((one for one in after if one[1] != now), None)

    def settings(
        self,
        worker_types: tuple[WorkerType, ...],
        classes: tuple[SloClass, ...] = (),
        fewest: int | None = None,
    ) -> ScalingSettings:
        """How a fleet of these types follows demand; each with its profile, where there is one by now.

        `fewest`: by the clock, in place of `low`.
        """
        slope, intercept = self.line or (None, None)
        low = self.low if fewest is None else fewest
        most = self.most_kinds
        worker_types = tuple(
            replace(t, limit=min(most[t.name], most[t.name] if t.limit is None else t.limit))
            if t.name in most
            else t
            for t in worker_types
        )
        return ScalingSettings(
            TargetSettings(slope, intercept, low, self.high, to_zero=low == 0),
            StabilizationWindow(0.0, self.hold_s),
            bin_s=max(min(BIN_S, self.hold_s / BINS_A_HOLD), 1.0),
            ahead=ForecastSettings(),
            near=NEAR,
            learned_at=None if self.learned_at is None else ClassArrivals(ANY_SLO, 1.0, *self.learned_at),
            worker_types=worker_types,
            mix=MixSettings(max_gpus=self.max_gpus, budget_usd_per_h=self.budget_usd_per_h),
            attainment=self.attainment,
            classes=classes,
        )


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The control API's address, and the settings of `tick`.

    `parent`: the process to end with. `worker_types`: the fleet's, with the profiles given. `data`: the
    folder that demand and the fleet's log are kept in; None keeps none. `moves`: whether requests move
    between serving workers. `policy`: of placement, where all profiles are known; `strictness`: of
    forecasts; `headroom`: for high-priority requests. `attainment`: of requests of none of the `classes`.
    `tells_need`: whether the controller reports to the fleet how many of the workers asked for are needed.
    """

    control: str
    key: str | None
    advisory: bool
    parent: int
    worker_types: tuple[WorkerType, ...]
    autoscale: Autoscale | None = None
    data: str | None = None
    moves: bool = True
    policy: Policy = Policy.SPREAD
    strictness: Strictness = NORMAL
    headroom: float = 0.0
    attainment: float = 0.99
    classes: tuple[SloClass, ...] = ()
    tells_need: bool = False

    @property
    def profiles(self) -> dict[str, Profile]:
        """The profiles given, by the name of their type."""
        return {t.name: t.known_profile for t in self.worker_types if t.known_profile is not None}

    def tick(
        self, profiles: Mapping[str, Profile], unix_s: float = 0.0, cold_start_s: float = 0.0
    ) -> Settings:
        """This heartbeat's settings; profiles as known by now. The fleet empties draining workers itself.

        `unix_s`: for the floor by the clock, and `cold_start_s` for what it wants soon.
        """
        are_known = bool(self.worker_types) and all(t.name in profiles for t in self.worker_types)
        by_targets = are_known and self.policy in BY_TARGETS
        # Shedding is off until a worker's speed is known.
        forecasts = ShedSettings(self.strictness.theta, self.strictness.gamma, headroom=self.headroom)
        shed = forecasts if profiles and self.moves else None
        balance = MoveSettings(Reading(self.headroom)) if self.moves and not by_targets else None
        plain = Settings(balance, shed)
        if self.autoscale is None:
            return plain
        # Load alone cannot tell an idle fleet from one that is not asked: it keeps one worker.
        fewest = self.autoscale.fewest(unix_s, cold_start_s)
        load = LoadSettings(max(fewest, 1), self.autoscale.high, hold_s=self.autoscale.hold_s)
        types = tuple(replace(t, known_profile=profiles.get(t.name)) for t in self.worker_types)
        return replace(plain, load=load, scaling=self.autoscale.settings(types, self.classes, fewest))


# Sent to the controller's process as JSON, and checked when read.
CONTROLLER_SETTINGS = TypeAdapter(ControllerSettings)
