"""The gateways that a core finds: which it keeps, which it replaces, and what its start survives."""

import asyncio
import os
import subprocess
import sys

import pytest

from dataplane.live.engine_api.processes import Estate, Pulse, Record
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.settings import GatewaySettings
from dataplane.live.gateways import keeper, wire
from dataplane.live.gateways.keeper import Gateways, GatewaysRecord, KeptRecord
from dataplane.processes.keeper import Inherited

SLEEPS = "import time; time.sleep(600)"


class Server:
    """In the place of the core's end of its gateways."""

    def __init__(self):
        self.awaited, self.retired = [], []
        self.await_gateways = self.awaited.extend

    async def start(self, *_):
        pass

    async def close(self):
        pass

    def retire(self, name, finish_s):
        self.retired.append((name, finish_s))


class World:
    """Gateways that are plain processes, and the records that a core has left of them."""

    def __init__(self, folder, count):
        self.folder, self.count, self.server, self.loads = folder, count, Server(), os.memfd_create("loads")
        os.truncate(self.loads, 4 * wire.MOST_GATEWAYS)
        self.cells, self.processes, self.record = wire.Loads(self.loads), [], Record(folder / "record.json")

    def process(self, code=SLEEPS):
        self.processes.append(subprocess.Popen([sys.executable, "-c", code]))
        return self.processes[-1].pid

    def left(self, *kept):
        """An earlier core has left these."""
        self.record.note(gateways=GatewaysRecord(len(kept), kept))

    async def start(self):
        """The gateways of the successor."""
        found = Record(self.folder / "record.json")
        estate = Estate(2, self.folder, None, None, self.loads, found, Pulse())
        told = wire.ProcessSettings(GatewaySettings("m", "127.0.0.1", 0), (), "", -1)
        made = Gateways(self.count, told, self.server, EventLog(), estate)
        await made.start()
        return made

    def ended(self, at):
        return self.processes[at].wait(60)


@pytest.fixture
def world(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getppid", os.getpid)  # the processes are this one's, as the fork server's are
    made = []

    def world(count):
        made.append(World(tmp_path, count))
        return made[0]

    yield world
    for process in made[0].processes:
        process.kill()
        process.wait()


def test_a_gateway_that_took_clients_before_its_core_knew_is_kept_and_one_without_is_replaced(world):
    at = world(1)
    at.left(KeptRecord("g0", 0, at.process()), KeptRecord("g1", 1, at.process()))
    at.cells[0], at.cells[1] = wire.NOT_ACCEPTING, 3

    async def story():
        gateways = await at.start()
        assert [(kept.name, kept.state) for kept in gateways] == [("g1", "serving")]
        assert at.server.awaited == ["g1"]

    asyncio.run(story())
    assert at.ended(0) < 0
    assert at.processes[1].poll() is None


def test_a_gateway_whose_successor_took_clients_already_is_asked_to_leave(world):
    at = world(1)
    at.left(KeptRecord("g0", 0, at.process(), "serving", finish_s=7.0), KeptRecord("g1", 1, at.process()))

    async def story():
        gateways = await at.start()
        assert [(kept.name, kept.state) for kept in gateways] == [("g0", "leaving"), ("g1", "serving")]
        assert at.server.retired == [("g0", 7.0)]

    asyncio.run(story())
    assert all(process.poll() is None for process in at.processes)


def test_gateways_outlive_a_core_that_fails_by_an_error_and_end_with_one_that_ends(world):
    at = world(1)
    at.left(KeptRecord("g0", 0, at.process(), "serving"))

    async def story(error):
        await (await at.start()).close(error)

    asyncio.run(story(RuntimeError))
    assert at.processes[0].poll() is None
    asyncio.run(story(asyncio.CancelledError))
    assert at.ended(0) < 0


def test_a_gateway_that_dies_in_a_successor_s_start_does_not_end_that(monkeypatch, world):
    at = world(2)
    at.left(KeptRecord("g0", 0, at.process(), "serving"))

    class Forked:
        @staticmethod
        async def start(*_):
            return Inherited(at.process("" if len(at.processes) == 1 else SLEEPS))

    monkeypatch.setattr(keeper, "Forked", Forked)

    async def story():
        gateways = await at.start()
        async with asyncio.timeout(60):
            while [kept.name for kept in gateways] != ["g0", "g2"]:
                await asyncio.sleep(0.01)

    asyncio.run(story())
