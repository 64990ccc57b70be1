"""NIXL's cases (nixl_cases.py), in a process of their own: NIXL and OR-tools end one that loads both."""

import subprocess
import sys
from pathlib import Path

import pytest

from dataplane.live.kv import nixl


@pytest.mark.skipif(not nixl.installed(), reason="NIXL is not installed (pip install nixl-cu12)")
def test_kv_moves_by_nixl_between_processes_exactly_or_with_an_error():
    cases = Path(__file__).with_name("nixl_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
