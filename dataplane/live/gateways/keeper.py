"""The gateways' processes, kept running: started, replaced when they die, renewed on demand, ended together.

All share one listening socket, which the fleet's supervisor holds. So no connection is refused while a
gateway is there or on its way, and a connection that has not been accepted does not die with a gateway. The
processes outlive the core that has started them; its successor keeps them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from controlplane.errors import BadInput
from dataplane.live.engine_api.processes import FORKS, Estate, Tasks, cancel_all
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.fleet_core import FleetCore
from dataplane.live.gateways import wire
from dataplane.live.gateways.core_server import CoreServer
from dataplane.processes.fork_server import Forked
from dataplane.processes.keeper import End, Inherited, Keeper, Process, Spec, end, tell

LOOK_S = 0.05
START_LIMIT_S = 300.0  # for a gateway to accept
END_S = 15.0  # for one with nothing open to end by itself
State = Literal["starting", "serving", "leaving"]


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """What a core's successor must know of a gateway; `index` is its place in the table of loads.

    `finish_s`: where it is to be replaced, how long it may serve what is open by then.
    """

    name: str
    index: int
    pid: int
    state: State = "starting"
    finish_s: float | None = None


@dataclass(frozen=True, slots=True)
class GatewaysRecord:
    """What a core's successor must know of the gateways. `next`: the number of the next one."""

    next: int = 0
    kept: tuple[KeptRecord, ...] = ()


class Kept:
    """A gateway's process, by its record."""

    def __init__(self, record: KeptRecord, process: Process) -> None:
        self.process, self.began_s = process, time.monotonic()
        self.name, self.index, self.pid = record.name, record.index, process.pid
        self.state, self.finish_s = record.state, record.finish_s

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    async def wait(self) -> int:
        return await self.process.wait()

    def send_signal(self, sign: int) -> None:
        self.process.send_signal(sign)


class Gateways:
    """Keeps `count` gateways in front of a core. `start`, `serve`, then `close`, once each.

    The estate's folder has the core's socket and vLLM's metrics.
    """

    def __init__(
        self,
        count: int,
        told: wire.ProcessSettings,
        server: CoreServer,
        events: EventLog,
        estate: Estate,
    ) -> None:
        self.count, self.events, self._server, self._estate = count, events, server, estate
        self._metrics = estate.folder / "metrics"
        self._metrics.mkdir(exist_ok=True)
        os.truncate(estate.loads, 4 * wire.MOST_GATEWAYS)
        self._loads = wire.Loads(estate.loads)
        self._told = replace(told, core=estate.folder / "core", metrics=self._metrics, loads=estate.loads)
        before = estate.record.part("gateways", GatewaysRecord) or GatewaysRecord()
        self._next, self._before = before.next, before.kept
        self._kept: list[Kept] = []
        self._tasks = Tasks()
        self._renewing: asyncio.Task[None] | None = None

    def registry(self) -> CollectorRegistry:
        """vLLM's metrics of all gateways together, of those that are gone, too."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self._metrics))  # type: ignore[no-untyped-call]
        return registry

    def __iter__(self) -> Iterator[Kept]:
        return iter(tuple(self._kept))

    def _find(self, name: str) -> Kept | None:
        return next((kept for kept in self if kept.name == name), None)

    def views(self) -> list[dict[str, Any]]:
        """Each gateway, for people and programs."""
        views = []
        for kept in self:
            connected = self._server.connected(kept.name)
            views.append(
                {
                    "gateway": kept.name,
                    "pid": kept.pid,
                    "state": kept.state,
                    "for_s": round(time.monotonic() - kept.began_s, 3),
                    "connections": None if (load := self._loads[kept.index]) == wire.NOT_ACCEPTING else load,
                    "requests": 0 if connected is None else len(connected.requests),
                    "served": 0 if connected is None else connected.served,
                }
            )
        return views

    async def start(self) -> None:
        """Return once all accept connections; those of an earlier core are kept.

        Raises RuntimeError where one of the fleet's first ends before it does.
        """
        self._inherit()
        await self._server.start(self._told.core, self._find, self._disconnected)
        for index in set(range(wire.MOST_GATEWAYS)) - {kept.index for kept in self}:
            self._loads[index] = wire.NOT_ACCEPTING
        while sum(kept.state != "leaving" for kept in self) < self.count:
            await self._launch()
        for kept in self:
            if kept.state == "leaving":  # the core before may have died before it said so
                self._retire(kept)
            elif await self._accepts(kept):
                kept.state = "serving"
            elif self._before:  # another takes its place
                tell(kept, signal.SIGKILL)
            else:
                raise RuntimeError(f"gateway {kept.name}: did not start; its log is above")
            self._keep(kept)
        self._note()
        if self._next_to_replace() is not None:
            self._renewing = self._tasks.spawn(self._renew())

    async def serve(self, core: FleetCore, shutdown_s: float) -> None:
        """Answer until SIGTERM or SIGINT, then let streams finish for a while, end the rest, and return."""
        told, loop = asyncio.Event(), asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, told.set)
        await told.wait()
        await asyncio.to_thread(core.shutdown, shutdown_s)

    def renew(self, finish_s: float) -> None:
        """Begin to replace every gateway by a new process, one after another.

        An old one serves what is open there, for at most `finish_s`. A core's successor goes on with it.
        Raises BadInput while they are renewed.
        """
        if self._renewing is not None and not self._renewing.done():
            raise BadInput("gateways: are being restarted already")
        for kept in self:
            if kept.state == "serving":
                kept.finish_s = finish_s
        self._note()
        self._renewing = self._tasks.spawn(self._renew())

    async def close(self, error: type[BaseException] | None, *_: object) -> None:
        """End every gateway, and cut what is open there; but leave them to the successor after an error."""
        await cancel_all(self._tasks)
        if error is None or not issubclass(error, Exception):
            await asyncio.gather(*(end(kept, END_S) for kept in self))
        await self._server.close()

    def _inherit(self) -> None:
        """Keep the gateways of the core before, except those that are gone or have accepted nothing yet."""
        for left in self._before:
            with suppress(OSError, psutil.NoSuchProcess):
                kept = Kept(left, Inherited(left.pid))
                if psutil.Process(left.pid).ppid() == os.getppid():  # else the number is another's by now
                    self._kept.append(kept)
                    if left.state == "starting" and self._loads[left.index] == wire.NOT_ACCEPTING:
                        tell(kept, signal.SIGKILL)
                        self._forget(kept)
        if sum(kept.state != "leaving" for kept in self) > self.count and (old := self._next_to_replace()):
            old.state = "leaving"  # the one in its place serves
        self._server.await_gateways([kept.name for kept in self._kept])

    def _note(self) -> None:
        kept = tuple(KeptRecord(k.name, k.index, k.pid, k.state, k.finish_s) for k in self)
        self._estate.record.note(gateways=GatewaysRecord(self._next, kept))

    async def _launch(self) -> Kept:
        index = next(i for i in range(wire.MOST_GATEWAYS) if all(kept.index != i for kept in self))
        name, self._next = f"g{self._next}", self._next + 1
        self._note()  # first: should this core die here, no other gateway gets the name
        settings = wire.PROCESS_SETTINGS.dump_json(replace(self._told, name=name, index=index))
        process = await Forked.start(self._estate.folder / FORKS, "gateway", settings)
        kept = Kept(KeptRecord(name, index, process.pid), process)
        self._kept.append(kept)
        self._note()
        return kept

    async def _accepts(self, kept: Kept) -> bool:
        """Whether a gateway accepts connections; waits until it does, ends, or has taken too long."""
        until_s = kept.began_s + START_LIMIT_S
        while kept.returncode is None and time.monotonic() < until_s:
            if self._loads[kept.index] != wire.NOT_ACCEPTING:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _keep(self, kept: Kept) -> None:
        """Start another in a gateway's place when it ends, unless it was to leave."""
        begin = partial(self._begin_serving, why=f"in place of {kept.name}")
        spec = Spec(self._launch, self._ended, self._accepts, begin)
        self._tasks.spawn(Keeper(spec, kept).run())

    def _ended(self, end: End[Kept]) -> bool:
        kept = end.process
        if kept is None:
            self._record("gateway-lost", end.why)
            return True
        self._forget(kept)
        if kept.state == "leaving":
            self._record("gateway-left", f"{kept.name}: what was open there has ended", gateway=kept.name)
            return False
        self._record("gateway-lost", f"{kept.name} {end.why}; another is started", gateway=kept.name)
        return True

    async def _renew(self) -> None:
        replaced = 0
        while (old := self._next_to_replace()) is not None:
            new = await self._launch()
            if not await self._accepts(new):
                why = f"{new.name} did not start: {old.name} and those after it stay"
                for kept in self:
                    if kept.state == "serving":
                        kept.finish_s = None
                await self._kill(new)
                self._record("gateways", why, gateway=new.name, is_done=False)
                return
            if old not in self._kept:  # it died meanwhile, and is being replaced
                await self._kill(new)
                continue
            old.state = "leaving"
            self._begin_serving(new, f"in place of {old.name}")
            self._keep(new)
            self._retire(old)
            replaced += 1
        self._record("gateways", f"{replaced} restarted; streams finish where they are", is_done=True)

    def _next_to_replace(self) -> Kept | None:
        return next((k for k in self if k.finish_s is not None and k.state == "serving"), None)

    def _begin_serving(self, kept: Kept, why: str) -> None:
        kept.state = "serving"
        self._note()
        self._record("gateway-start", why, gateway=kept.name)

    def _disconnected(self, name: str) -> None:
        """The core has parted with a gateway; one whose process lives on hangs, or has lost its way."""
        if (kept := self._find(name)) is not None:
            self._tasks.spawn(self._end(kept))

    async def _end(self, kept: Kept) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(kept.wait(), END_S)
        tell(kept, signal.SIGKILL)

    def _retire(self, kept: Kept) -> None:
        assert kept.finish_s is not None
        self._server.retire(kept.name, kept.finish_s)

    async def _kill(self, kept: Kept) -> None:
        await end(kept, 0.0)
        self._forget(kept)

    def _forget(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._loads[kept.index] = wire.NOT_ACCEPTING
        self._note()

    def _record(self, kind: str, reason: str, **facts: object) -> None:
        self.events.record(time.time(), kind, reason, **facts)
