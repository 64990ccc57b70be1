"""How the scaler is told to follow demand, and what it remembers from one heartbeat to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.errors import BadInput
from controlplane.scaler.changepoint import Regimes
from controlplane.scaler.demand import Demand
from controlplane.scaler.forecast import Forecast, ForecastSettings
from controlplane.scaler.hold import Held, HoldSettings
from controlplane.scaler.kinds import KindSettings, MixingSettings, Weights, check_kinds
from controlplane.scaler.line import Speed
from controlplane.scaler.mix import ClassArrivals, Mix
from controlplane.scaler.mixed import Mixed
from controlplane.scaler.target import TargetSettings


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """How demand becomes workers. `stale_s`: counts older than this are no news.

    `speed`: what a worker can do, where the target has no line of its own, or where the lengths drift from
    those that its line was learned at (`learned_at`). `bin_s`: a bin of the counts. `catch_up_s`: in which a
    backlog is to be served. `ahead`: whether and how to forecast; `near`: by short bins as well.

    `kinds`: of worker that may be had, where there are several; then each has a speed of its own and `speed`
    is not read. `line_kind`: the one whose workers the target's line counts, by default the first. `mixing`:
    how counts are chosen among them, and their budget.
    """

    target: TargetSettings
    hold: HoldSettings = field(default_factory=HoldSettings)
    strictness: float = 4.0
    stale_s: float = 60.0
    speed: Speed | None = None
    bin_s: float = 10.0
    catch_up_s: float = 30.0
    ahead: ForecastSettings | None = None
    near: ForecastSettings | None = None
    learned_at: ClassArrivals | None = None
    kinds: tuple[KindSettings, ...] = ()
    line_kind: str | None = None
    mixing: MixingSettings = field(default_factory=MixingSettings)

    def __post_init__(self) -> None:
        if not self.kinds:
            return
        check_kinds(self.kinds, self.mixing, self.target.low, self.target.high, self.line_kind)
        if self.target.budget_usd_per_h is not None:
            raise BadInput("scaling: budget_usd_per_h: of several kinds it belongs to `mixing`")


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast, the bins it is made from, and the regime's rate as each of them closed."""

    past: Demand | None = None
    past_rps: tuple[float, ...] = ()
    coming: Forecast | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the scaler remembers; empty at the start. A restart loses all but what scaler.remembered keeps.

    `far` belongs to `ScalingSettings.ahead`, `soon` to its `near`; `weights` and `mixed` to its `kinds`.
    """

    demand: Demand | None = None
    regimes: Regimes = field(default_factory=Regimes)
    held: Held | None = None
    counted_s: float | None = None  # when arrivals were last reported
    mix: Mix = field(default_factory=Mix)
    far: Outlook = field(default_factory=Outlook)
    soon: Outlook = field(default_factory=Outlook)
    weights: Weights | None = None
    mixed: Mixed | None = None
