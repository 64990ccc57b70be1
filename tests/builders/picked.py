"""A picker in this process over small servers, and what its ledger holds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controlplane.placement.lengths import LengthTable
from controlplane.placement.queue import QueueSettings
from controlplane.types import Slo, SloClass
from dataplane.http.server import bind
from dataplane.live.gateway.history import History
from harness.vllm_like import VllmLike
from tokenfleet.advise.servers import Servers
from tokenfleet.pick.asked import PickTargets
from tokenfleet.pick.call import PromptLengths, Tokenize
from tokenfleet.pick.fleet import PickedFleet
from tokenfleet.pick.server import PickerPort, serving
from tokenfleet.pick.subsets import SubsetPlacement
from tokenfleet.pick.unseen import Unseen
from tokenfleet.pick.watch import ServerLimits, ServerWatch
from tokenfleet.profiles.library import find_profiles

LOADS = ("decoding", "queued", "queued_tokens", "queued_context", "context", "running_n")
TARGETS = PickTargets(Slo(1.0, 0.05), {"batch": SloClass("batch", Slo(60.0, 0.2), 0.9)})


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    bound = [socket.socket() for _ in range(count)]
    for one in bound:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in bound]
    for one in bound:
        one.close()
    return ports


def held(fleet: PickedFleet) -> dict[str, int]:
    """What the ledger says that servers hold, all together."""
    fleet.catch_up()  # as whatever reads the ledger does
    workers = fleet.placement.ledger.workers
    return {name: int(workers[name].sum()) for name in LOADS if int(workers[name].sum())}


def made_fleet(
    folder: Path | None = None,
    *,
    queue: QueueSettings | None = None,
    tokenize: Tokenize | None = None,
    is_known: bool = True,
    rooms: int = 16,
    clock: Callable[[], float] | None = None,
) -> PickedFleet:
    """A picker's fleet without servers, of H100s; must be called in a loop."""
    history = History(64.0, folder, "small")
    known = {"": find_profiles("llama-3.1-8b", ["h100"], [1])[0]} if is_known else {}
    placement = SubsetPlacement(known, rooms, LengthTable.constant(64.0), np.random.default_rng(0))
    more = {} if clock is None else {"clock": clock}
    return PickedFleet(placement, history, queue or QueueSettings(), PromptLengths(tokenize), 3, **more)


@dataclass
class Picked:
    """A picker that serves: its parts, its port, and the servers."""

    fleet: PickedFleet
    unseen: Unseen
    watch: ServerWatch
    port: int
    door: PickerPort
    servers: list[VllmLike]
    lines: list[str]

    async def until(self, is_so: Callable[[], bool], look: bool = False) -> None:
        """Wait until something is so; with `look`, the servers are scraped meanwhile."""
        async with asyncio.timeout(20):
            while not is_so():
                if look:
                    await self.watch.look()
                await asyncio.sleep(0.01)

    async def emptied(self) -> None:
        """Wait until the ledger holds nothing, and check that no call is left."""
        await self.until(lambda: not held(self.fleet) and not self.fleet.calls)


@asynccontextmanager
async def picking(
    folder: Path,
    *,
    servers: int = 2,
    seats: int = 64,
    queue: QueueSettings | None = None,
    step_s: float = 4e-3,
    tokenize: Tokenize | None = None,
) -> AsyncIterator[Picked]:
    """A picker over `servers` servers, which are listed in `folder/servers.txt`."""
    ports = free_ports(servers + 1)
    async with AsyncExitStack() as stack:
        of = [VllmLike(port, step_s, seats) for port in ports[1:]]
        for one in of:
            await one.start()
            stack.push_async_callback(one.stop)
        listed = folder / "servers.txt"
        listed.write_text("\n".join(f"127.0.0.1:{one.port}" for one in of), encoding="utf-8")
        fleet = made_fleet(folder, queue=queue, tokenize=tokenize)
        stack.callback(fleet.close)
        unseen, lines = Unseen(fleet), []
        door = PickerPort(fleet, TARGETS)
        list_ = await stack.enter_async_context(Servers((), listed))
        watch = ServerWatch(list_, fleet, unseen, ServerLimits(seats, 2048), lines.append)
        await watch.look()
        listening = bind("127.0.0.1", ports[0], "test")
        await stack.enter_async_context(serving(door, listening, None))
        yield Picked(fleet, unseen, watch, ports[0], door, of, lines)
