"""The controller's process as the core keeps it, and its settings: plain values passed over a pipe."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from signal import SIGKILL, SIGTERM

from pydantic import TypeAdapter

from controlplane.control import Settings
from controlplane.migration.balance import MoveSettings
from controlplane.migration.overload import ShedSettings
from controlplane.migration.usage import Reading
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import BY_TARGETS, Policy
from controlplane.placement.strictness import NORMAL, Strictness
from controlplane.scaler.bounds import Autoscale
from controlplane.scaler.load import LoadSettings
from controlplane.types import SloClass
from controlplane.worker_type import WorkerType
from dataplane.live.gateway.events import EventLog
from dataplane.processes.keeper import End, Keeper, Pauses, Spec, program, told
from dataplane.processes.keeper import tell as signal_to

RESTART_AFTER_S = 2.0
END_S = 5.0
LOOK_S = 1.0
SILENT_S = 120.0  # its first round may compile

log = logging.getLogger("tokenfleet.core")


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


class ControllerProcess:
    """Keeps one controller running. It starts while workers do, and gets its settings later: what it loads
    then slows no request."""

    def __init__(self, events: EventLog) -> None:
        self._settings: asyncio.Future[ControllerSettings] = asyncio.get_running_loop().create_future()
        self._events, self._was_lost, self._is_renewed = events, False, False
        self._began_s = math.inf
        pauses = Pauses(RESTART_AFTER_S, RESTART_AFTER_S, math.inf)
        self._keeper = Keeper(Spec(self._begin, self._ended, self._decides, pauses=pauses))

    def start(self) -> None:
        """Begin to keep it running."""
        self._keeper.start()

    def tell(self, settings: ControllerSettings) -> None:
        """Let it begin to decide."""
        self._settings.set_result(settings)

    def renew(self, settings: ControllerSettings) -> None:
        """Let another, which begins in its place, decide by these."""
        self._settings = asyncio.get_running_loop().create_future()
        self._settings.set_result(settings)
        if self._keeper.process is not None:
            self._is_renewed = True
            signal_to(self._keeper.process, SIGTERM)

    async def watch(self, looked_s: Callable[[], float]) -> None:
        """Kill one that has looked at the fleet, at `looked_s`, and does not look again for SILENT_S."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._keeper.process is not None and self._began_s < looked_s() < time.monotonic() - SILENT_S:
                log.warning("the controller has not looked at the fleet for %.0f s: it is killed", SILENT_S)
                signal_to(self._keeper.process, SIGKILL)

    async def close(self) -> None:
        """End it."""
        await self._keeper.close(END_S)

    @property
    def pid(self) -> int | None:
        """The id of its process while there is one."""
        return None if self._keeper.process is None else self._keeper.process.pid

    async def _begin(self) -> asyncio.subprocess.Process:
        if self._was_lost:
            self._events.record(time.time(), "controller-start", "replaces the one that is gone")
        self._began_s = time.monotonic()
        return await program("dataplane.live.control.controller")

    async def _decides(self, process: asyncio.subprocess.Process) -> bool:
        told(process, CONTROLLER_SETTINGS.dump_json(await asyncio.shield(self._settings)))
        return True

    def _ended(self, end: End[asyncio.subprocess.Process]) -> bool:
        if self._is_renewed:
            self._is_renewed = False
            return True
        self._was_lost = True
        why = f"{end.why}; nothing is moved or scaled until it is back"
        self._events.record(time.time(), "controller-lost", why)
        return True
