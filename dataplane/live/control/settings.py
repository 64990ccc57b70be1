"""What the controller is told by the fleet that starts it: plain values, over a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from controlplane.control import Settings
from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings
from controlplane.migration.cost import Price
from controlplane.migration.overload import ShedSettings
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.scaler.forecast import NEAR, ForecastSettings
from controlplane.scaler.line import Speed
from controlplane.scaler.load import LoadSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import HoldSettings, TargetSettings
from controlplane.scaler.worker_types import KindSettings
from controlplane.types import ClassArrivals, Slo
from dataplane.live.control.snapshot_builder import Speeds

# The fleet empties its draining workers itself. Shedding is off until a worker's speed is known.
MOVES = MoveSettings(pressure=0.6, drains=False)
ANY_SLO = Slo(1.0, 1.0)  # a line's lengths are compared within each class, at its own targets
BIN_S = 10.0
BINS_A_HOLD = 6  # a fall is seen in a few bins, so a short hold asks for short ones


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Bounds of the number of workers, and how it follows demand.

    `low` 0 lets an idle fleet have none. `line`: Eq 7's slope (workers per request a second) and intercept,
    as a plan learned them; None takes them from what a worker can do. `hold_s`: how long fewer must be
    enough before workers are drained. `usd_per_worker_h`: a worker's price, where it is known. `learned_at`:
    the mean prompt and output tokens that `line` holds for; it follows those that arrive.
    """

    low: int
    high: int
    line: tuple[float, float] | None = None
    hold_s: float = 80.0
    usd_per_worker_h: float | None = None
    learned_at: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or self.high < 1:
            raise BadInput(
                f"autoscale: need 0 <= MIN <= MAX and MAX of at least 1, got {self.low}..{self.high}"
            )

    def settings(self, speed: Speed | None, kinds: tuple[KindSettings, ...] = ()) -> ScalingSettings:
        """How this fleet follows demand; `kinds`: where there are several, each with its speed if known."""
        slope, intercept = self.line or (None, None)
        return ScalingSettings(
            TargetSettings(
                slope,
                intercept,
                self.low,
                self.high,
                usd_per_worker_h=self.usd_per_worker_h,
                to_zero=self.low == 0,
            ),
            HoldSettings(0.0, self.hold_s),
            speed=speed,
            bin_s=max(min(BIN_S, self.hold_s / BINS_A_HOLD), 1.0),
            ahead=ForecastSettings(),
            near=NEAR,
            learned_at=None if self.learned_at is None else ClassArrivals(ANY_SLO, 1.0, *self.learned_at),
            kinds=kinds,
        )


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Where the control API is, and what tick is told.

    `parent`: the process to end with. `speeds`: what workers can do, by kind, where profiles say. `demand`:
    the file that counts are kept in; None keeps none. `kinds`: of a fleet of several, speeds apart.
    """

    control: str
    key: str | None
    advisory: bool
    parent: int
    autoscale: Autoscale | None = None
    speeds: Mapping[str, Speed] = field(default_factory=dict)
    demand: str | None = None
    kinds: tuple[KindSettings, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> ControllerSettings:
        scaled = given["autoscale"]
        if scaled is not None:
            pairs = {name: scaled[name] and tuple(scaled[name]) for name in ("line", "learned_at")}
            scaled = Autoscale(**(scaled | pairs))
        speeds = {kind: _speed(speed) for kind, speed in given["speeds"].items()}
        kinds = tuple(KindSettings(**kind) for kind in given["kinds"])
        return cls(**(given | {"autoscale": scaled, "speeds": speeds, "kinds": kinds}))

    def tick(self, speeds: Speeds, kv_bytes_per_token: int = 0) -> Settings:
        """This heartbeat's settings; speeds and size of KV as known by now: with both, moves must pay."""
        speed = speeds.any()
        price = Price(float(kv_bytes_per_token)) if kv_bytes_per_token else None
        shed = ShedSettings(price=price) if speed is not None else None
        plain = Settings(replace(MOVES, price=price), shed)
        if self.autoscale is None:
            return plain
        # Load alone cannot tell an idle fleet from one that is not asked: it keeps one worker.
        load = LoadSettings(max(self.autoscale.low, 1), self.autoscale.high)
        kinds = tuple(replace(kind, speed=speeds.of(kind.kind)) for kind in self.kinds)
        return replace(plain, load=load, scaling=self.autoscale.settings(speed, kinds))


def _speed(given: dict[str, Any]) -> Speed:
    step = StepModel(**(given["step"] | {"hinges": _hinges(given["step"])}))
    prefill = given["prefill"]
    if prefill is not None:
        prefill = PrefillModel(**(prefill | {"hinges": _hinges(prefill)}))
    return Speed(**(given | {"step": step, "prefill": prefill}))


def speed_of(profile: Profile) -> Speed:
    """What a worker of this profile can do."""
    return Speed(
        profile.step,
        profile.kv.capacity_tokens,
        profile.engine.max_seqs,
        profile.prefill if profile.engine.mode != "chunked" else None,
        f"the profile {profile.model} on {profile.gpu}",
    )


def _hinges(of: dict[str, Any]) -> tuple[Hinge, ...]:
    return tuple(Hinge(**hinge) for hinge in of["hinges"])
