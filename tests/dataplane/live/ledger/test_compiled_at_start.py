"""No kernel is compiled, or loaded from disk, once a fleet serves: it would stop every stream meanwhile."""

from __future__ import annotations

import subprocess
import sys

from dataplane.startup import child_environment

# The process is new: here other tests have used the kernels already.
PLAY = """
import asyncio, gc
from numba.core.dispatcher import Dispatcher
from dataplane.startup import use_kernel_cache
use_kernel_cache()
from dataplane.live.gateway.history import History
from harness import fault_schedules

late, serves = [], []
start = fault_schedules._Play.__init__

def started(play, schedule):
    serves.clear()
    start(play, schedule)
    play.core._predict = History(100.0).expected_tokens
    for kernel in [one for one in gc.get_objects() if isinstance(one, Dispatcher)]:
        watch(kernel)
    serves.append(True)

def watch(kernel):
    compile_it = kernel.compile
    def compile_now(signature):
        if serves and not kernel.overloads:
            late.append(f"{kernel.py_func.__module__}.{kernel.py_func.__name__}")
        return compile_it(signature)
    kernel.compile = compile_now

fault_schedules._Play.__init__ = started
for seed in range(3):
    asyncio.run(fault_schedules.played(fault_schedules.schedule_of(seed)))
print(" ".join(sorted(set(late))) or "none")
"""


def test_a_serving_fleet_compiles_no_kernel() -> None:
    """Requests wait, move, lose their workers and end in these schedules."""
    done = subprocess.run(
        [sys.executable, "-c", PLAY], env=child_environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "none", done.stderr
