"""How long a whole plan takes, and how much memory: the Azure conversation hour, four kinds of worker.

    python experiments/planning/plan_time.py [--quick] [--seed N] [--format table|json]

Runs `tokenfleet plan` as a user would, with the default confidence and everything the report explains, and
reads the wall time and the peak memory of the process. A run on a two-minute window comes before, so that
the simulator is compiled (`compiled_s`: once on a machine, and after an upgrade). `cpu_s` is what the plan
asks of all cores together: where other work shares them, the wall time says little. --quick plans ten
minutes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

from experiments.lib.public_data import AZURE_HOUR
from experiments.lib.results import bar, flags, show

MOST_S = 60.0
MOST_GB = 1.0
KINDS = ("--gpu", "a100", "--gpu", "h100", "--tp", "4", "--tp", "8")


def run(arguments: list[str]) -> tuple[float, float, dict[str, Any]]:
    """Wall seconds, processor seconds and the plan of one run of the command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tokenfleet", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s, json.loads(done.stdout)


def main() -> int:
    asked = flags(__doc__, AZURE_HOUR).parse_args()
    trace = asked.data / AZURE_HOUR
    with tempfile.TemporaryDirectory() as folder:
        command = ["plan", "--trace", str(trace), "--model", "llama-3.1-70b", *KINDS]
        command += ["--slo", "ttft=1.6s,tpot=75ms", "--seed", str(asked.seed), "--format", "json"]
        compiled_s, _, _ = run([*command, "--window", "0..120", "--attainment", "0.9"])
        window = ["--window", "0..600"] if asked.quick else []
        wall_s, cpu_s, plan = run([*command, *window, "--output-dir", folder])
    # Of all children so far the largest; kilobytes on Linux, bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    peak_gb = peak / (1e9 if sys.platform == "darwin" else 1e6)
    row = {
        "requests": plan["inputs"]["requests"],
        "kinds": len(plan["inputs"]["profiles"]),
        "answer": " + ".join(f"{g['workers']} x {g['gpu']} TP{g['tp_degree']}" for g in plan["fleet"]),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "peak_gb": round(peak_gb, 3),
        "compiled_s": round(compiled_s, 2),
        "cores": os.cpu_count(),
    }
    bars = {"wall_s": bar(row["wall_s"], MOST_S), "peak_gb": bar(row["peak_gb"], MOST_GB)}
    return show("time of a plan", [row], bars, asked)


if __name__ == "__main__":
    sys.exit(main())
