"""Seeded schedules of faults over the processes of a served fleet, and the judge of what its clients saw."""

import asyncio
import socket
import subprocess
import sys

import psutil
import pytest
from served_fleet import serve

from harness.fault_schedules import schedule_of, violations
from harness.served_faults import SERVED, TOGETHER, Link, _Play, await_status, played_served

WORKERS = 3


@pytest.fixture(scope="module")
def fleet(model_folder, scratch):
    flags = ("--engine", "emulated", "--workers", str(WORKERS), "--gateways", "2", "--queue-wait", "10m")
    served = serve(model_folder, *flags, "--slo", "ttft=600s,tpot=60s", folder=scratch)
    yield served
    served.stop()


def history(fleet, seed, whats=SERVED):
    return asyncio.run(played_served(fleet, schedule_of(seed, whats, TOGETHER), WORKERS))


@pytest.mark.parametrize("seed", [1, 16])
def test_no_client_sees_a_wrong_stream_whatever_dies_or_stops(fleet, seed):
    played = history(fleet, seed)
    assert violations(played) == []
    assert sum(times for what, times in played.happened.items() if "nobody" not in what) >= 5


def test_the_port_of_a_link_is_known_once_the_gateway_has_its_connection():
    """Else the judge would not know whose stream a killed gateway breaks."""

    async def scene():
        with socket.create_server(("127.0.0.1", 0)) as gateway:  # it accepts nothing yet
            port, link, seen = gateway.getsockname()[1], Link(), []
            at = await link.open(f"http://127.0.0.1:{port}")
            _, client = await asyncio.open_connection("127.0.0.1", int(at.rpartition(":")[2]))
            while not seen:
                await asyncio.sleep(0)
                there = [c for c in psutil.net_connections("tcp") if c.laddr.port == port and c.raddr]
                seen = [(c.raddr.port, c.pid) for c in there]
            client.close()
            link.close()
            return seen, link.port

    seen, known = asyncio.run(scene())
    assert seen == [(known, None)]


def test_a_killed_process_takes_no_connection_once_its_end_was_awaited():
    """It does until then, and loses them; the judge would not know why."""
    program = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True)"
    for _ in range(20):
        command = [sys.executable, "-c", f"{program}; s.accept()"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            port, known = int(process.stdout.readline()), psutil.Process(process.pid)
            process.kill()
            await_status(known, psutil.STATUS_ZOMBIE)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))


def test_the_judge_finds_a_stream_that_breaks_without_a_cause(fleet, monkeypatch):
    """A gateway is killed, and the judge is not told whose."""
    monkeypatch.setattr(_Play, "_part_from", lambda play, gateway: None)
    found = violations(history(fleet, 0, ("kill gateway",)))
    assert any(what.endswith("was aborted though its client stayed") for what in found)
