"""The fleet's own Ray, in its process: how it ends, and what a fleet does whose Ray has died."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
from checkout import ROOT
from raw_stream import session, stream
from served_fleet import serve

from harness.served import begun


def test_rays_own_end_is_not_waited_for(live_extra, scratch):
    """Its processes are stopped before its end, so whatever waited for them would wait for ever."""
    folder = scratch / "r"
    folder.mkdir()
    file = folder / "ray.txt"
    keeper = subprocess.Popen(
        [sys.executable, "-m", "dataplane.live.pool.own_ray", str(file)],
        cwd=ROOT,
        env=os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
    )
    started = []
    try:
        while not file.exists():
            assert keeper.poll() is None
            signal.sigtimedwait([], 0.05)
        started = psutil.Process(keeper.pid).children(recursive=True)
        assert {"raylet", "gcs_server"} <= {one.name() for one in started}
        own = psutil.Process(keeper.pid).children()
        for one in own:
            one.suspend()
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(timeout=60) == 0
        assert psutil.wait_procs(own, timeout=60)[1] == []
    finally:
        keeper.kill()
        for one in started:
            if one.is_running():
                one.kill()


@pytest.fixture(scope="module")
def fleet(model_folder, scratch):
    """A worker behind one gateway. Its targets hold at any speed of the machine."""
    flags = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20))
    asked = ("--workers", "1", "--slo", "ttft=60s,tpot=5s", "--queue-wait", "10m")
    served = serve(model_folder, *asked, engine_flags=flags, folder=scratch)
    yield served
    assert served.stop() == 0


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_stream_goes_on_when_a_daemon_of_ray_dies_and_the_core_starts_a_worker_on_another(fleet, name):
    def serving():
        return [w["worker"] for w in fleet.ask("GET", "/v1/fleet")["workers"] if w["state"] == "serving"]

    async def run(disturb):
        async with session() as http:
            asked = stream(http, fleet.gateway, prompt=list(range(5, 25)), max_tokens=1200)
            running = asyncio.create_task(asked)
            if disturb is not None:
                await begun(fleet, 1, [running])
                await asyncio.to_thread(disturb)
            return await running

    def kill():
        below = psutil.Process(fleet.process.pid).children(recursive=True)
        next(one for one in below if one.name() == name).kill()

    (gone,), core = serving(), fleet.ask("GET", "/v1/fleet")["core"]
    expected = asyncio.run(run(None))
    assert asyncio.run(run(kill)) == expected
    fleet.until(lambda: serving() and gone not in serving(), 900)
    assert fleet.ask("GET", "/v1/fleet")["core"] == core
    log = fleet.log.read_text()
    assert f"Ray's {name} has died" in log
    assert f"in place of {gone}\n" in log
    assert fleet.metric("tokenfleet_requests_total", outcome="failed") == 0
