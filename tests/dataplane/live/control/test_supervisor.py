"""The supervisor: who gets a successor, who does not, and that nothing is left below it."""

import os
import signal
import subprocess
import sys

import pytest
from checkout import ROOT

# Each core does what the next word says; what runs below it is a `sleep` that ignores its end.
PROGRAM = """
import asyncio, os, signal, socket, subprocess, sys
from contextlib import suppress
from dataplane.live.control import processes

processes.SILENT_S, processes.YOUNG_S, processes.END_S = 0.5, 0.0, 0.2
processes.LAST_S = 0.5 if "lingers" in sys.argv else 60.0
if "lingers" in sys.argv:
    processes.SILENT_S = 60.0
fates = sys.argv[1:]


def core(estate):
    fate = fates[estate.number - 1]
    print(estate.number, fate, estate.record.found.get("left"), flush=True)
    estate.record.note(left=fate)
    if fate == "refuses":
        return 2
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(estate.pulse.show(), 0.05))
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


doors = [socket.socket(), socket.socket()]
code = processes.Supervisor(*doors, core, None, None).run()
print("left below:", len(processes.descendants()), flush=True)
sys.exit(code)
"""


def play(*fates):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *fates],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def said(process):
    lines = process.communicate(timeout=60)[0].splitlines()
    assert lines.pop() == "left below: 0"
    return lines


def test_a_core_that_dies_or_hangs_gets_a_successor_that_finds_its_record_and_one_that_ends_gets_none():
    process = play("dies", "hangs", "ends")
    assert said(process) == ["1 dies None", "2 hangs dies", "3 ends hangs"]
    assert process.returncode == 0


def test_a_core_that_has_never_served_ends_the_fleet_with_its_own_code():
    process = play("refuses")
    assert said(process) == ["1 refuses None"]
    assert process.returncode == 2


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_tells_the_core(sign):
    process = play("waits")
    assert [process.stdout.readline() for _ in range(2)] == ["1 waits None\n", "ready\n"]
    process.send_signal(sign)
    assert said(process) == []
    assert process.returncode == 0


def test_told_to_end_it_kills_a_core_that_does_not():
    process = play("lingers")
    assert [process.stdout.readline() for _ in range(2)] == ["1 lingers None\n", "ready\n"]
    process.send_signal(signal.SIGTERM)
    assert said(process) == []
    assert process.returncode == 128 + signal.SIGKILL


def test_a_core_ends_with_its_supervisor():
    process = play("waits")
    assert [process.stdout.readline() for _ in range(2)] == ["1 waits None\n", "ready\n"]
    process.kill()
    assert process.stdout.read() == ""  # nobody holds the other end any more
    process.wait()
    process.stdout.close()
