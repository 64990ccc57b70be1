"""A scaler's memory across restarts of its controller: the same forecasts as without a restart."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import msgspec
import pytest
from checkout import ROOT
from made_states import PROFILE, counted, state, worker

from controlplane.errors import BadInput
from controlplane.scaler.autoscale import scale
from controlplane.scaler.bounds import Autoscale
from controlplane.scaler.correction import Correction
from controlplane.scaler.forecast import ForecastSettings
from controlplane.scaler.state import Scaling, ScalingSettings, resumed, to_keep
from controlplane.scaler.target import TargetSettings
from controlplane.snapshot import Snapshot
from controlplane.worker_type import WorkerType
from dataplane.history.fleet_log import read_fleet_log
from dataplane.live.control.controller import DemandFile
from dataplane.live.control.controller_process import CONTROLLER_SETTINGS, ControllerSettings

SETTINGS = ScalingSettings(
    TargetSettings(0.5, 0.2, high=40),
    ahead=ForecastSettings(bin_s=60.0, season=24),
    near=ForecastSettings(bin_s=30.0, season=1_000),
)


def watch(state, start_s, looks, clock_s=0.0):
    """Looks every 10 s at traffic with a season of 24 minutes; `clock_s`: what this life's clock is ahead."""
    for n in range(looks):
        at_s = start_s + 10.0 * n
        busy = (at_s // 60.0) % 24 >= 18
        seen = Snapshot(
            at_s + clock_s, (), 5, arrivals=(90 if busy else 20) if n else None, cold_start_s=60.0
        )
        state, _ = scale(SETTINGS, state, seen)
    return state


def test_after_a_restart_forecasts_are_those_of_a_life_without_one():
    before = watch(Scaling(), 0.0, 700)
    kept = json.loads(json.dumps(to_keep(before, 6_990.0)))
    # Its clock is another, 2,400 s ahead; four minutes go by, which nobody counts.
    again = resumed(SETTINGS, kept, 240.0, 6_990.0 + 240.0 + 2_400.0)
    assert again.far.past.closed[-4:] == (None,) * 4
    assert again.far.past.closed[:-4] == before.far.past.closed
    here = watch(again, 7_230.0, 40, 2_400.0)
    there = watch(before, 7_230.0, 40)
    assert here.far.coming.candidate == there.far.coming.candidate == "seasonal"
    assert here.far.coming.rps == pytest.approx(there.far.coming.rps, rel=0.05)
    assert watch(Scaling(), 7_230.0, 40).far.coming is None


def test_what_was_counted_too_long_ago_or_otherwise_is_no_history():
    kept = to_keep(watch(Scaling(), 0.0, 700), 6_990.0)
    assert resumed(SETTINGS, kept, 1e7, 0.0) == Scaling()
    other = replace(SETTINGS, ahead=ForecastSettings(bin_s=120.0, season=24), near=None)
    assert resumed(other, kept, 0.0, 0.0) == Scaling()
    for spoiled in ({"far": {}}, {"far": kept["far"] | {"counts": ["x"]}}, {"soon": 3}):
        with pytest.raises(BadInput, match="demand remembered"):
            resumed(SETTINGS, spoiled, 0.0, 0.0)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "another"}', '{"schema": "tokenfleet.demand/1"}'])
def test_a_spoiled_file_is_said_and_forgotten(tmp_path, capsys, text):
    path = tmp_path / "demand.json"
    path.write_text(text)
    assert DemandFile(path).read(SETTINGS, 0.0) == Scaling()
    assert "demand before is not known" in capsys.readouterr().err


def test_a_file_is_written_when_a_bin_closes_and_what_cannot_be_written_is_said(tmp_path, capsys):
    path = tmp_path / "data" / "demand.json"
    file, state = DemandFile(path), watch(Scaling(), 0.0, 100)
    file.write(state, 990.0)
    first = path.read_text()
    file.write(state, 991.0)
    assert path.read_text() == first
    file.write(watch(state, 1_000.0, 10), 1_090.0)
    assert path.read_text() != first
    assert list(path.parent.iterdir()) == [path]
    (tmp_path / "file").write_text("")
    DemandFile(tmp_path / "file" / "demand.json").write(state, 990.0)
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_between_two_controllers_changes_no_forecast(tmp_path, monkeypatch, jump_s):
    path, real = tmp_path / "demand.json", time.time
    DemandFile(path).write(watch(Scaling(), 0.0, 100), 990.0)
    still = DemandFile(path).read(SETTINGS, 1_000.0)
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert DemandFile(path).read(SETTINGS, 1_000.0) == still != Scaling()
    # On a machine that has booted since, or another one, only the wall clock tells.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boot": "another"}))
    assert (DemandFile(path).read(SETTINGS, 1_000.0) == still) == (jump_s < 0)


@pytest.fixture
def control_api():
    """A fleet of one worker as its control API shows it, some requests more at every look; its orders."""
    orders, looks = Queue(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            looks.append(self.path)
            now = state(
                worker("a"), arrivals=[counted(len(looks))], wanted_kinds={"a": 1}, cold_start_s=300.0
            )
            self.reply(msgspec.msgpack.encode(now))

        def do_POST(self):
            orders.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.reply(b"{}")

        def reply(self, body):
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,))
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}", orders
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_controller_that_was_killed_forecasts_by_the_days_before_when_it_is_back(tmp_path, control_api):
    url, orders = control_api
    path = tmp_path / "demand.json"
    # Three days of five-minute bins, quiet but for the hours that begin right after the last of them.
    day = [3_000 if n < 24 else 300 for n in range(288)]
    far = {"bin_s": 300.0, "age_s": 1.0, "counts": day * 3, "regimes_rps": [1.0] * 864}
    said = {"schema": "tokenfleet.demand/1", "unix_s": 0.0, "kept": {"far": far}}
    types, scale_out = (WorkerType.of(PROFILE),), Autoscale(1, 40, (1.0, 0.0), 6.0)
    told = ControllerSettings(url, None, False, os.getpid(), types, scale_out, str(tmp_path))
    lives = []
    for life in range(2):
        if life == 0:
            clock = subprocess.run(
                [sys.executable, "-c", "import time; print(time.time())"], capture_output=True, check=True
            )
            path.write_text(json.dumps(said | {"unix_s": float(clock.stdout)}))
        controller = subprocess.Popen(
            [sys.executable, "-m", "dataplane.live.control.controller"],
            cwd=ROOT, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            controller.stdin.write(CONTROLLER_SETTINGS.dump_json(told))
            controller.stdin.close()
            lives.append(orders.get(timeout=60.0))
        finally:
            os.kill(controller.pid, signal.SIGKILL)
            controller.wait()
        while not orders.empty():
            orders.get()
        written = json.loads(path.read_text())
        assert written["unix_s"] > said["unix_s"] + 1.0  # its own by now
        assert len(written["kept"]["far"]["counts"]) >= 864
    # Both lives told the fleet's log what they saw.
    looks, fleets = read_fleet_log(tmp_path / "history", 0.0, 1e11)
    assert fleets[-1].types[0].profile == PROFILE
    assert {tuple(one.workers.values()) for one in looks} == {((0, 1, 0),)}
    assert len(looks) >= 2
    for order in lives:
        assert order["reason"].startswith("forecast")
        assert order["workers"] >= 9


def test_a_lines_correction_is_known_after_a_restart():
    kept = json.loads(json.dumps(to_keep(Scaling(correction=Correction(1.2, refit=1.1)), 5.0)))
    again = resumed(SETTINGS, kept, 10.0, 15.0).correction
    assert (again.factor, again.refit) == (1.2, 1.1)
    with pytest.raises(BadInput, match="demand remembered"):
        resumed(SETTINGS, {"correction": {"factor": 9.0, "refit": 1.0}}, 10.0, 15.0)
