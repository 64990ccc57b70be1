"""Runs of the command line in a process of its own, and what they take."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from experiments.lib.public_data import ROOT


def tokenfleet(*words: str) -> str:
    """What a command prints; raises CalledProcessError where it fails."""
    run = [sys.executable, "-m", "tokenfleet", *words]
    return subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def timed_plan(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plan's JSON, and a row: its fleet, its time, and the memory of the largest process so far."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    plan: dict[str, Any] = json.loads(tokenfleet("plan", *words, "--format", "json"))
    wall_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return plan, {
        "requests": plan["inputs"]["requests"],
        "answer": " + ".join(f"{g['workers']} x {g['gpu']} TP{g['tp_degree']}" for g in plan["fleet"]),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "peak_gb": round(after.ru_maxrss / 1e6, 3),  # kilobytes on Linux
        "cores": os.cpu_count(),
    }
