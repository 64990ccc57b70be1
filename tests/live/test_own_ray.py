"""The fleet's own Ray, in its process: how it ends."""

import os
import signal
import subprocess
import sys

import psutil
from checkout import ROOT


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
