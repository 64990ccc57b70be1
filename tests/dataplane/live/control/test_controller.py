"""The controller's process: what it loads."""

import subprocess
import sys

from checkout import ROOT


def test_the_controller_s_process_loads_no_engine_and_no_server():
    """It starts within a second, on a host where workers need the memory."""
    code = (
        "import sys, dataplane.live.control.controller\n"
        "print(sorted({'vllm', 'torch', 'ray', 'fastapi'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
