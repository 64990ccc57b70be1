"""Both ends of a link when nothing comes over it any more, and when something does after all."""

import asyncio
import os
from dataclasses import asdict, replace

import pytest
import quiet_vllm  # noqa: F401  # first
import zmq.asyncio
from front import B, Front, profile
from zmq.constants import Flag
from zmq.error import Again

from controlplane.errors import BadInput
from controlplane.placement.queue import QueueSettings
from controlplane.types import WorkerId
from dataplane.live.emulated.engine import EmulatedEngine, Fabric
from dataplane.live.engine_api import wire
from dataplane.live.engine_api.link import Lost, Silence, Telemetry
from dataplane.live.engine_api.processes import RayDaemon
from dataplane.live.engine_api.vllm_surface import EngineCoreOutput, EngineCoreOutputs, MsgpackEncoder
from dataplane.live.worker.actor import Worker
from dataplane.live.worker.door import Door, new_key, public_key
from dataplane.live.worker.gateway_peers import GatewayPeers
from dataplane.live.worker.link import WorkerLink

FAR = WorkerId("far")
TELEMETRY = Telemetry(FAR, 0, 0, 0, 0, 0, 0, 0.0, 0, 4096, 0)


class FarWorker:
    """A worker's end of a link, which says what a test makes it say."""

    def __init__(self, gateways, info):
        self._door = Door("127.0.0.1", gateways)
        self._socket = self._door.socket
        self._socket.router_mandatory = 0  # it speaks on to gateways that have given it up
        self.info = replace(info, worker=FAR, endpoint=self._door.endpoint, link_key=self._door.key)
        self.segments = []
        self.has_segment = asyncio.Event()
        self._gateway = b""
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self):
        while True:
            self._gateway, kind, *frames = await self._socket.recv_multipart()
            if kind == wire.HELLO:
                await self.say(wire.WELCOME, wire.pack(asdict(self.info)))
            elif kind == wire.ADD:
                self.segments.append(wire.unpack(frames[0]))
                self.has_segment.set()

    async def say(self, *frames):
        await self._socket.send_multipart([self._gateway, *frames])

    async def tokens(self, *tokens):
        batch = EngineCoreOutputs(outputs=[EngineCoreOutput(self.segments[0], list(tokens))])
        await self.say(wire.OUTPUTS, *MsgpackEncoder().encode(batch))

    async def load(self):
        await self.say(wire.LOAD, wire.pack(asdict(TELEMETRY)))

    def close(self):
        self._reader.cancel()
        self._door.close(linger_ms=0)


@pytest.fixture
def play(monkeypatch):
    """Runs a story with a far worker, a link to it, and how soon its silence counts."""

    def run(story, suspect_s=1e6, silence_s=1e6):
        monkeypatch.setattr(wire, "ALIVE_EVERY_S", 0.005)
        monkeypatch.setattr(wire, "SUSPECT_S", suspect_s)
        monkeypatch.setattr(wire, "SILENCE_S", silence_s)

        async def scene():
            context, key = zmq.asyncio.Context(), new_key()
            far = FarWorker(public_key(key), EmulatedEngine(FAR, profile(), Fabric()).info)
            link = await WorkerLink.connect(far.info, key, context)
            try:
                await asyncio.wait_for(story(far, link), 60)
            finally:
                if not link._socket.closed:  # by the fleet that it was lost to
                    await link.close()
                far.close()
                context.destroy(linger=0)

        asyncio.run(scene())

    return run


def test_silence_is_said_and_so_is_its_end(play):
    async def story(far, link):
        assert await link.receive() == Silence(is_over=False)
        await far.load()
        assert await link.receive() == Silence(is_over=True)
        assert await link.receive() == TELEMETRY

    play(story, suspect_s=0.05)


def test_a_queue_that_nobody_empties_does_not_hide_that_nobody_speaks(play):
    async def story(far, link):
        async def full(frames, flags=0, **options):
            if flags & Flag.DONTWAIT:
                raise Again
            await asyncio.Event().wait()

        object.__setattr__(link._socket, "send_multipart", full)
        try:
            assert isinstance(await link.receive(), Lost)
        finally:
            object.__delattr__(link._socket, "send_multipart")

    play(story, silence_s=0.05)


def test_nothing_follows_the_end_of_a_link_whatever_the_worker_still_says(play):
    async def story(far, link):
        assert isinstance(await link.receive(), Lost)
        for _ in range(10):
            await far.load()
        while link._tasks[0].done() is False:  # it has heard the worker, and stopped listening
            await asyncio.sleep(0)
        assert isinstance(await link.receive(), Lost)
        assert isinstance(await link.receive(), Lost)

    play(story, silence_s=0.05)


def test_a_worker_that_comes_back_after_its_requests_were_replayed_changes_nothing(play, monkeypatch):
    async def story(far, link):
        front = Front((), profile(), QueueSettings())
        try:
            front.core.attach(link)
            sending = asyncio.ensure_future(front.send("r"))
            await far.has_segment.wait()
            await far.tokens(7, 8)
            await front.until("r", 2)
            await sending
            front.engines[B] = front.launch(B)
            front.core.attach(front.engines[B])
            monkeypatch.setattr(wire, "SUSPECT_S", 0.0)
            while "silent" not in [e.kind for e in front.events]:
                await asyncio.sleep(0.001)
            monkeypatch.setattr(wire, "SILENCE_S", 0.0)
            while front.core.link(FAR) is not None:
                await asyncio.sleep(0.001)
            await far.tokens(666)
            await front.ended("r")
            await far.tokens(666)
            replays = [e for e in front.events if e.kind == "replay"]
            assert (front.finish["r"], front.tokens["r"][:2]) == ("LENGTH", [7, 8])
            assert (len(front.tokens["r"]), 666 in front.tokens["r"], len(replays)) == (100, False, 1)
            assert [e.kind for e in front.events if e.kind in ("silent", "heard")] == ["silent"]
        finally:
            await front.close()

    play(story)


class Engine:
    """Of a worker that has nothing to do."""

    def __init__(self):
        self.shut = []

    def shutdown(self, seconds):
        self.shut.append(seconds)


def test_a_worker_serves_its_newest_core_alone_and_an_older_one_changes_nothing(monkeypatch):
    aborted, _ended = [], []

    async def abort(segments):
        aborted.extend(segments)

    async def scene():
        context, old, new = zmq.asyncio.Context(), new_key(), new_key()
        far = FarWorker(public_key(old), EmulatedEngine(FAR, profile(), Fabric()).info)
        far._reader.cancel()
        worker = Worker("far", public_key(old), core=1)
        worker._core, worker._door, worker._socket = Engine(), far._door, far._door.socket
        worker._info, worker._peers = far.info, GatewayPeers(worker._socket, abort)
        with pytest.raises(RuntimeError, match="does not serve"):  # it is still starting
            await worker.adopt(2, public_key(new))
        worker._tasks = [asyncio.ensure_future(worker._listen())]
        paused = await WorkerLink.connect(far.info, old, context)
        (peer,) = worker._peers._peers.values()
        worker._peers.admit(peer, "r#1")
        info, left = await worker.adopt(2, public_key(new))
        assert (info.kv_secret, left, aborted) == ("", ["r#1"], ["r#1"])
        assert isinstance(await paused.receive(), Lost)
        # Its connection is still there, and says what it likes.
        await paused._socket.send_multipart([wire.ABORT, wire.pack(["r#2"])])
        link = await WorkerLink.connect(far.info, new, context)
        (peer,) = worker._peers._peers.values()
        worker._peers.admit(peer, "r#2")
        assert not await worker.stop(1)
        with pytest.raises(RuntimeError, match="serves core 2"):
            await worker.adopt(1, public_key(old))
        with pytest.raises(BadInput, match="no answer"):
            await WorkerLink.connect(far.info, old, context, timeout_s=0.3)
        assert peer.segments == {"r#2"}
        for one in (paused, link):
            await one.close()
        assert await worker.stop(2)
        context.destroy(linger=0)

    asyncio.run(scene())


class Silent:
    async def send_multipart(self, frames, flags=0, copy=True):
        pass


@pytest.mark.parametrize("has_gateway", [True, False])
def test_a_worker_ends_itself_once_it_has_neither_gateway_nor_daemon(monkeypatch, has_gateway):
    class Ended(BaseException):
        """In place of the process' end."""

    def end(code):
        raise Ended

    async def nothing(segments):
        pass

    async def scene():
        worker = Worker("w", "secret")
        worker._core = engine = Engine()
        worker._peers = GatewayPeers(Silent(), nothing)
        worker._tell_load = lambda now_s: told.append(now_s)
        told = []
        if has_gateway:
            await worker._peers.welcome(b"g", b"info")
        beat = asyncio.ensure_future(worker._beat())
        while len(told) < 3:
            await asyncio.sleep(0)
        assert not beat.done()  # its daemon lives
        monkeypatch.setattr(RayDaemon, "is_gone", property(lambda daemon: True))
        if has_gateway:
            seen = len(told)
            while len(told) < seen + 3:
                await asyncio.sleep(0)
            assert not beat.done()
            await worker._peers.dismiss_all("the end")
        with pytest.raises(Ended):
            await beat
        assert len(engine.shut) == 1

    monkeypatch.setattr(wire, "ALIVE_EVERY_S", 0.001)
    monkeypatch.setattr(os, "_exit", end)
    asyncio.run(scene())
