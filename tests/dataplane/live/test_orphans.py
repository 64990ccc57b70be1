"""Processes end with their parent, from the moment they have read their settings."""

import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import multiprocessing, os, sys, time
sys.path.insert(0, {root!r})
from dataplane.live.engine_api.processes import EndsWithParent

class Slow:
    def __reduce__(self):
        return wait, (os.getpid() if {dies_first} else 0,)

def wait(parent):
    print(os.getpid(), flush=True)
    while parent and os.getppid() == parent:  # the worker dies before its engine can watch it
        time.sleep(0.01)

def sleep(*settings):
    time.sleep(600)

if __name__ == "__main__":
    arguments = (Slow(), EndsWithParent(a=1))
    multiprocessing.get_context("spawn").Process(target=sleep, args=arguments).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("dies_first", [True, False])
def test_an_engine_ends_with_a_worker_that_dies_while_it_starts(tmp_path, dies_first):
    from checkout import ROOT

    script = tmp_path / "worker.py"
    script.write_text(PARENT.format(root=str(ROOT), dies_first=dies_first))
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    if not dies_first:
        while len(engine.threads()) < 2:  # the one that watches
            time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([engine], timeout=60)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
