"""`tokenfleet profile` on a real engine: what it measures, and what is left when the engine is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT

from tokenfleet.profiles.measurements import beside, read_measurements

pytestmark = pytest.mark.live
LONG_S = 300.0


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def test_an_engine_that_is_killed_mid_grid_costs_only_the_point_it_was_at(
    model_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "steps.csv"
    command = [sys.executable, "-m", "tokenfleet"]
    command += [
        "profile",
        "--model",
        str(model_folder),
        "--output",
        str(out),
        "--repeats",
        "1",
        "--clock",
        "cpu",
    ]
    command += ["--max-context", "512", "--cores", "0"]
    command += ["--", "--dtype", "float32", "--max-model-len", "1024"]
    command += ["--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline_s = time.monotonic() + LONG_S
        while not beside(out).exists():
            assert process.poll() is None, process.communicate()[1][-2000:]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        for engine in children(process.pid):
            os.kill(engine, signal.SIGKILL)
        _, said = process.communicate(timeout=LONG_S)
    finally:
        process.kill()
    assert process.returncode == 2
    assert "points before it are kept" in said
    state = json.loads(beside(out).read_text())
    samples = read_measurements(out)
    assert len(state["visits"]) >= 1
    assert len(samples) >= len(state["visits"])
    assert state["environment"]["dtype"] == "float32"
    assert state["environment"]["clock"] == "cpu"
    assert (samples.step_s > 0).all()
    assert (samples.kv_blocks > 0).all()
