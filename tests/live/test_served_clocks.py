"""Wall clocks that jump by an hour under streams: no client, no worker and no decision may notice."""

import asyncio
import json
import time
import urllib.request

import pytest
from served_fleet import serve

from harness.clocks import Clocks, compiler
from harness.fault_schedules import schedule_of, violations
from harness.served import by_role
from harness.served_faults import CLOCKS, HOUR_S, JUMPS, TOGETHER, played_served

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler to build the settable clock with")
WORKERS = 3


@pytest.fixture(scope="module")
def clocks(tmp_path_factory):
    made = Clocks(tmp_path_factory.mktemp("clocks"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def fleet(model_folder, scratch, clocks):
    flags = ("--engine", "emulated", "--workers", str(WORKERS), "--autoscale", f"{WORKERS}..4")
    more = ("--gateways", "2", "--queue-wait", "10m", "--slo", "ttft=600s,tpot=60s")
    served = serve(model_folder, *flags, *more, folder=scratch, environment=clocks.environment)
    yield served
    served.stop()


def ahead_s(stamp):
    """A stamp's hours off this clock, in seconds."""
    return HOUR_S * round((stamp - time.time()) / HOUR_S)


def created(fleet):
    """The time that a gateway writes into an answer."""
    body = json.dumps({"model": "tiny-llama", "prompt": [7, 8], "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{fleet.gateway}/v1/completions", body)
    request.add_header("content-type", "application/json")
    request.add_header("connection", "close")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["created"]


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_the_clocks_of_a_fleet_are_settable(fleet, clocks, scratch, jump_s):
    """What the other tests set is what the fleet's processes read: the control of their silence."""
    roles = by_role(fleet)
    pids = [roles["core"][0].pid, roles["controller"][0].pid, *(one.pid for one in roles["gateway"])]
    for pid in pids:
        clocks.set(pid, jump_s)
    try:
        assert ahead_s(created(fleet)) == jump_s
        assert ahead_s(fleet.ask("GET", "/v1/fleet/timeline")["now_s"]) == jump_s
        demand = scratch / "data" / "demand.json"
        fleet.until(lambda: demand.exists() and ahead_s(json.loads(demand.read_text())["unix_s"]) == jump_s)
    finally:
        for pid in pids:
            clocks.set(pid, 0)


@pytest.mark.parametrize("seed", [1])
def test_a_clock_that_jumps_under_streams_ends_none_and_decides_nothing(fleet, clocks, seed):
    before = fleet.ask("GET", "/v1/fleet")
    replays = fleet.metric("tokenfleet_replays_total")
    play = played_served(fleet, schedule_of(seed, JUMPS, TOGETHER), WORKERS, clocks=clocks)
    played = asyncio.run(play)
    assert violations(played) == []
    assert {ends[0] for ends in played.ends.values()} == {"LENGTH"}
    assert sum(times for what, times in played.happened.items() if what.startswith("jump")) >= 5
    after = fleet.ask("GET", "/v1/fleet")
    for fact in ("scaling", "wanted_workers", "auto", "core"):
        assert after[fact] == before[fact]
    assert [w["worker"] for w in after["workers"]] == [w["worker"] for w in before["workers"]]
    assert fleet.metric("tokenfleet_replays_total") == replays


@pytest.mark.parametrize("seed", [2])
def test_jumps_among_other_faults_lose_no_token(fleet, clocks, seed):
    play = played_served(fleet, schedule_of(seed, CLOCKS, TOGETHER), WORKERS, clocks=clocks)
    played = asyncio.run(play)
    assert violations(played) == []
    assert sum(times for what, times in played.happened.items() if what.startswith("jump")) >= 2
