"""The supervisor of a fleet or a portfolio: who gets a successor, who does not, and that nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from checkout import ROOT

from dataplane.live.control import supervisor

# Each core does what the next word says; what runs below it is a `sleep` that ignores its end.
PROGRAM = """
import asyncio, json, os, signal, subprocess, sys, time
from contextlib import suppress
from pathlib import Path
from dataplane.live.control.supervisor import Supervised, Times, run_supervised
from dataplane.live.engine_api.processes import Pulse, Record

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests run below nohup, too
fates, pulse = sys.argv[1:], Pulse()
times = Times(
    silent_s=3.0 if {"hangs", "runs", "reads"} & {*fates} else 60.0,  # a busy machine is slow, too
    last_s=0.5 if "lingers" in fates else 5.0 if "stands" in fates else 60.0,
    end_s=600.0 if "computes" in fates else 0.2,
    longest_pause_s=0.0,
)


def core(settings):
    order = json.loads(settings)
    record = Record(Path(order["folder"]) / "record.json")
    fate = fates[order["number"] - 1]
    print(order["number"], fate, record.found.get("left"), flush=True)
    with suppress(BlockingIOError):
        print("begins", file=sys.stderr, flush=True)
    record.note(left=fate)
    if fate == "refuses":
        return 2
    if fate == "where":
        print(Path(order["folder"]).parent, flush=True)
        return 0
    if fate == "server":
        os.kill(os.getppid(), signal.SIGKILL)
    if fate in ("starts", "computes"):  # and does not look at what it is told
        signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
        print("ready", flush=True)
        while True:
            signal.pause()
    if fate == "reads":
        with suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(pulse.show(), 0.05))
        time.sleep(6.0)
        return 0
    if fate == "stands":
        os.kill(os.getpid(), signal.SIGSTOP)
    pulse.serves()
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(pulse.show(), 0.05))
    if fate == "runs":
        signal.signal(signal.SIGCONT, lambda *_: print("goes on", flush=True))
        print(os.getpid(), flush=True)
        asyncio.run(pulse.show())
    if fate == "waits":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        print("ready", flush=True)
        signal.sigwait([signal.SIGTERM])
        return 0
    if fate == "lingers":
        signal.signal(signal.SIGTERM, lambda *_: None)
        print("ready", flush=True)
        while True:
            signal.pause()
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", stubborn])
    if fate != "ends":
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "hangs": signal.SIGSTOP}[fate])
    return 0


run_supervised({"core": core}, Supervised({"": pulse.descriptor}, times=times))
"""


# A fleet and a front, which says that all serve, unless the fleet refuses: which came first would be chance.
PORTFOLIO = """
import json, os, signal, sys
from dataplane.live.control.supervisor import Supervised, Times, run_supervised
from dataplane.live.engine_api.processes import Pulse

fates, pulse, of_chat = sys.argv[1:], Pulse(), Pulse()


def say(line):
    os.write(1, (line + "\\n").encode())  # in one write, whatever buffers: processes share the pipe


def run(name, again):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # before a line that the test answers by it
    if name == "front":
        if "refuses" not in fates:
            pulse._shared[1] = 1.0
        say(f"ready {os.getpid()}")
    elif not again and fates:
        if fates[0] == "refuses":
            return 2
        while not pulse.served:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "chat":
        say("again" if again else "begun")
    signal.sigwait([signal.SIGTERM])
    say(f"{name} ends")
    return 0


jobs = {
    "front": lambda settings: run("front", False),
    "core chat": lambda settings: run("chat", json.loads(settings)["again"]),
}
times = Times(end_s=0.2, longest_pause_s=0.0)
run_supervised(jobs, Supervised({"chat": of_chat.descriptor}, pulse.descriptor, times=times))
"""


def play(*fates, program=PROGRAM, stderr=None):
    return subprocess.Popen(
        [sys.executable, "-c", program, *fates],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def said(process):
    """What it still says, once its pipe is closed: none of those that held it is left."""
    try:
        return process.communicate(timeout=60)[0].splitlines()
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def test_a_core_that_dies_or_hangs_gets_a_successor_that_finds_its_record_and_one_that_ends_gets_none():
    process = play("dies", "hangs", "ends")
    assert said(process) == ["1 dies None", "2 hangs dies", "3 ends hangs"]
    assert process.returncode == 0


def test_a_successor_that_computes_for_long_in_its_start_is_not_killed():
    assert said(play("dies", "reads")) == ["1 dies None", "2 reads dies"]


def test_no_core_waits_for_whoever_takes_the_log():
    """A disk that stands still takes none, and neither does a pipe that is full."""
    taken, written = os.pipe()
    os.set_blocking(written, False)
    with suppress(BlockingIOError):
        while True:
            os.write(written, b"x")
    os.set_blocking(written, True)
    process = play("dies", "dies", "ends", stderr=written)
    os.close(written)
    lines = [process.stdout.readline() for _ in range(3)]
    os.close(taken)
    assert lines == ["1 dies None\n", "2 dies dies\n", "3 ends dies\n"]
    assert said(process) == []


def test_what_is_logged_is_written_to_the_end(tmp_path):
    with (tmp_path / "log").open("w") as log:
        assert said(play("dies", "ends", stderr=log)) == ["1 dies None", "2 ends dies"]
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.split("  ")[-1] for line in lines] == [
        "begins",
        "warning: core 1 ended with -9; another takes its place in 0 s",
        "begins",
        "stopped",
    ]


def test_a_successor_loads_no_module_of_ours_that_an_update_may_have_changed():
    """What the fork server has not loaded, each core would read from the files as they are by then."""
    program = """
import sys
from tokenfleet.cli.serve.processes import _shared_jobs

_shared_jobs([])
before = set(sys.modules)
import dataplane.live.control.fleet
import dataplane.live.gateways.process
print(sorted(set(sys.modules) - before))
"""
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout == "[]\n", told.stderr


def test_what_cores_and_gateways_write_is_in_memory():
    """A disk that stands still stops no gateway at its metrics, and no core at its record."""
    process = play("where")
    assert said(process) == ["1 where None", "/dev/shm"]


def test_a_successor_that_hangs_before_its_loop_runs_is_killed():
    """Else the gateways would wait for it until they give their streams up."""
    process = play("dies", "stands", "ends")
    assert said(process) == ["1 dies None", "2 stands dies", "3 ends stands"]


def test_a_core_is_not_killed_where_its_supervisor_stood_still_with_it():
    """As on a virtual machine that its host pauses, for longer than a core may be silent."""
    process = play("runs", "ends")
    assert process.stdout.readline() == "1 runs None\n"
    core = int(process.stdout.readline())
    for pid in (process.pid, core):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    looked = psutil.Process(process.pid).num_ctx_switches().voluntary
    os.kill(process.pid, signal.SIGCONT)
    while psutil.Process(process.pid).num_ctx_switches().voluntary < looked + 2:
        time.sleep(0.01)
    os.kill(core, signal.SIGCONT)
    assert process.stdout.readline() == "goes on\n"
    process.send_signal(signal.SIGTERM)
    assert said(process) == []


def test_a_core_that_has_never_served_ends_the_fleet_with_its_own_code():
    process = play("refuses")
    assert said(process) == ["1 refuses None"]
    assert process.returncode == 2


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_told_to_end_it_tells_the_core(sign):
    process = play("waits")
    assert [process.stdout.readline() for _ in range(2)] == ["1 waits None\n", "ready\n"]
    process.send_signal(sign)
    assert said(process) == []
    assert process.returncode == 0


def test_the_fork_server_passes_on_that_all_is_to_end():
    """It has the fleet's command line, so an operator's `pkill` or `ps` finds it, too."""
    process = play("waits")
    assert [process.stdout.readline() for _ in range(2)] == ["1 waits None\n", "ready\n"]
    (server,) = (int(of) for of in children_of(process.pid) if "waits" in command_of(of))
    os.kill(server, signal.SIGTERM)
    assert said(process) == []
    assert process.returncode == 0


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_told_to_end_it_kills_a_core_that_does_not():
    process = play("lingers")
    assert [process.stdout.readline() for _ in range(2)] == ["1 lingers None\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    assert said(process) == []
    assert process.returncode == 128 + signal.SIGKILL


def test_told_to_end_it_kills_a_core_that_starts_and_does_not_and_at_once_where_it_is_told_again():
    process = play("starts")
    assert [process.stdout.readline() for _ in range(2)] == ["1 starts None\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    assert said(process) in (["told"], [])  # it had little time to say so
    assert process.returncode == 128 + signal.SIGINT
    process = play("computes")  # which may take ten minutes to end
    assert [process.stdout.readline() for _ in range(2)] == ["1 computes None\n", "ready\n"]
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "told\n"
    process.send_signal(signal.SIGINT)
    assert "told" not in said(process)[1:]
    assert process.returncode == 128 + signal.SIGINT


def test_a_portfolio_ends_its_fleets_before_the_front_that_passes_on_what_they_still_say():
    process = play(program=PORTFOLIO)
    lines = {process.stdout.readline().split()[0] for _ in range(2)}
    assert lines == {"begun", "ready"}
    process.send_signal(signal.SIGTERM)
    assert said(process) == ["chat ends", "front ends"]
    assert process.returncode == 0


def test_a_fleet_that_ends_before_all_serve_ends_the_portfolio_and_one_that_dies_later_is_started_again():
    process = play("refuses", program=PORTFOLIO)
    assert "chat ends" not in said(process)
    assert process.returncode == 2
    process = play("dies", program=PORTFOLIO)
    assert process.stdout.readline().startswith("ready")
    assert process.stdout.readline() == "again\n"
    process.send_signal(signal.SIGTERM)
    assert said(process) == ["chat ends", "front ends"]


def test_a_core_ends_with_its_supervisor():
    process = play("waits")
    assert [process.stdout.readline() for _ in range(2)] == ["1 waits None\n", "ready\n"]
    process.kill()
    assert process.stdout.read() == ""  # nobody holds the other end any more
    process.wait()
    process.stdout.close()


def test_a_fleet_whose_fork_server_dies_ends_and_leaves_nothing_below():
    process = play("server")
    assert said(process) == ["1 server None"]
    assert process.returncode == 70


def test_a_ray_that_ends_is_started_again_and_its_address_is_gone_until_then(monkeypatch, tmp_path, caplog):
    """Unless all are to end."""
    said = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).write_text('here'); signal.pause()"
    (tmp_path / "a_ray.py").write_text(said)
    monkeypatch.setattr(supervisor, "RAY_PROGRAM", "a_ray")
    monkeypatch.setattr(supervisor, "child_environment", lambda: os.environ | {"PYTHONPATH": str(tmp_path)})
    own = tmp_path / "own-ray"

    async def story():
        orders = supervisor.EndSignals()
        keeper = supervisor._ray_keeper(own, 0.0, orders)
        keeper.start()

        async def there(holds):
            async with asyncio.timeout(60):
                while not holds():
                    await asyncio.sleep(0.01)

        await there(own.exists)
        first = keeper.process
        first.send_signal(signal.SIGKILL)
        await there(lambda: not own.exists())
        await there(own.exists)
        assert keeper.process.pid != first.pid
        orders.since_s, last = 1.0, keeper.process
        last.send_signal(signal.SIGKILL)
        await there(lambda: keeper.process is None)
        assert not own.exists()

    asyncio.run(story())
    assert [one.message for one in caplog.records] == ["the fleet's Ray has ended; another starts in 0 s"]
