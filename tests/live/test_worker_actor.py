"""A worker's actor without Ray or an engine: the core it serves, its end, and its place."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import quiet_vllm  # noqa: F401  # first
import zmq.asyncio
from far_worker import FAR, FarWorker
from front import profile
from plain_codec import PlainCodec

from controlplane.errors import BadInput
from dataplane.live.emulated.engine import EmulatedEngine, Fabric
from dataplane.live.engine_api import wire
from dataplane.live.engine_api.link import Lost
from dataplane.live.engine_api.processes import RayDaemon
from dataplane.live.engine_api.step_trace import StepTrace
from dataplane.live.engine_api.vllm_surface import VllmCodec
from dataplane.live.engine_api.wire import new_key, public_key
from dataplane.live.worker.actor import Worker
from dataplane.live.worker.gateway_peers import GatewayPeers
from dataplane.live.worker.link import WorkerLink


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
        worker._info, worker._peers = far.info, GatewayPeers(worker._socket, abort, PlainCodec())
        with pytest.raises(RuntimeError, match="does not serve"):  # it is still starting
            await worker.adopt(2, public_key(new))
        worker._tasks = [asyncio.ensure_future(worker._listen())]
        paused = await WorkerLink.connect(far.info, old, context, VllmCodec())
        (peer,) = worker._peers._peers.values()
        worker._peers.admit(peer, "r#1")
        info, left = await worker.adopt(2, public_key(new))
        assert (info.kv_secret, left, aborted) == ("", ["r#1"], ["r#1"])
        assert isinstance(await paused.receive(), Lost)
        # Its connection is still there, and says what it likes.
        await paused._socket.send_multipart([wire.ABORT, wire.pack(["r#2"])])
        link = await WorkerLink.connect(far.info, new, context, VllmCodec())
        (peer,) = worker._peers._peers.values()
        worker._peers.admit(peer, "r#2")
        assert not await worker.stop(1)
        with pytest.raises(RuntimeError, match="serves core 2"):
            await worker.adopt(1, public_key(old))
        with pytest.raises(BadInput, match="no answer"):
            await WorkerLink.connect(far.info, old, context, VllmCodec(), timeout_s=0.3)
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
        worker.patience = wire.LinkTimings(alive_every_s=0.001)
        worker._core = engine = Engine()
        worker._peers = GatewayPeers(Silent(), nothing, PlainCodec())
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

    monkeypatch.setattr(os, "_exit", end)
    asyncio.run(scene())


def test_a_worker_reserves_gpus_of_its_type():
    from dataplane.live.worker.launch import WorkerResources

    assert WorkerResources(gpus=2, accelerator="H100").bundle == {"GPU": 2.0, "accelerator_type:H100": 0.001}
    assert WorkerResources(gpus=2).bundle == {"GPU": 2.0}


@pytest.mark.parametrize(("root", "is_sent"), [("/work/checkout", True), ("/lib/site-packages", False)])
def test_a_checkout_is_named_to_workers_and_an_installed_package_is_not(monkeypatch, root, is_sent):
    from dataplane.live.worker import launch

    monkeypatch.setattr(launch, "ROOT", Path(root))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert ("PYTHONPATH" in launch._environment(launch.WorkerResources())) is is_sent


@pytest.mark.parametrize(
    ("silent_s", "has_work", "loads_adapter", "is_stuck"),
    [
        (11.0, True, False, True),
        (9.0, True, False, False),
        (11.0, False, False, False),
        (11.0, True, True, False),
    ],
)
def test_an_engine_is_stuck_that_is_silent_with_work_and_loads_no_adapter(
    monkeypatch, silent_s, has_work, loads_adapter, is_stuck
):
    killed = []

    async def nothing(segments):
        pass

    async def scene():
        worker = Worker("w", "secret")
        worker._core = Engine()
        worker._core.resources = SimpleNamespace(engine_dead=False)
        worker._peers = GatewayPeers(Silent(), nothing, PlainCodec())
        worker._trace = StepTrace("w", 100)
        load = dict.fromkeys(
            ("prefill_tokens", "context_tokens", "prefill_sum_sq", "prefill_sequences", "kv_blocks"), 0
        ) | {"sequences": 1}
        worker._trace.add(load, 0.01, 0.0, 1, 0, 0.1)
        if has_work:
            await worker._peers.welcome(b"gateway", b"")
            worker._peers.admit(worker._peers.get(b"gateway"), "r#1")
        worker._heard_s, worker._is_loading = 0.0, loads_adapter
        for now_s in (4.0, silent_s - 0.5, silent_s):
            await worker._end_stuck(now_s)
        return worker._lost

    monkeypatch.setattr("dataplane.live.worker.actor.processes.descendants", lambda: [17])
    monkeypatch.setattr("os.kill", lambda pid, sign: killed.append((pid, sign)))
    lost = asyncio.run(scene())
    assert (lost, killed) == (
        ("its engine made no step for 11 s", [(17, signal.SIGKILL)]) if is_stuck else ("", [])
    )
