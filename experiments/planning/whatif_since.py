"""How long `tokenfleet whatif --since 1h` takes on a fleet's own history at 10 requests a second.

The history is written by the gateway's own writer: an hour (36,000 requests) of bursty arrivals with the
lengths of the bundled trace, in which the fleet met its targets. The answer's time is that of the whole
command, from the shell: reading the history, three rates, each planned at the default attainment and
confidence on one kind of worker, without the cache of earlier answers. The compiled simulator is loaded from
its cache, as on every day but the first.

Wall time is what the bar is about; processor time is given beside it, since a machine that others use shows
the one and not the other.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.history.files import HistoryLimits, HistoryWriter
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from tokenfleet.service.uploads import sample_path
from tokenfleet.traces import read_trace

BAR_S = 15.0
PR_SET_CHILD_SUBREAPER = 36
ASKED = [
    "--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "1", "--slo", "ttft=400ms,tpot=30ms",
    "--vary", "rate=0.8,1,1.25", "--no-cache", "--format", "json",
]  # fmt: skip


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    asked = parser.parse_args()
    minutes, times = (6, 1) if asked.quick else (60, 3)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        requests = record(data, asked.rate, minutes * 60.0, asked.seed)
        whatif(data, "2m")  # compiles the simulator where nothing has before
        for i in range(times):
            rows.append({"run": i + 1, "requests": requests} | whatif(data, f"{minutes}m"))
    bars = {
        f"wall time of whatif --since {minutes}m, best of {times} (s)": bar(
            min(r["wall_s"] for r in rows), BAR_S
        )
    }
    return show("whatif --since", rows, bars, asked)


def record(data: Path, rate_rps: float, span_s: float, seed: int) -> int:
    """A history that ends now; returns its number of requests."""
    rng = np.random.default_rng(seed)
    sample = sample_path()
    assert sample is not None
    lengths = read_trace(sample).workload
    count = int(rate_rps * span_s)
    gaps_s = rng.gamma(0.5, 2.0, count)  # coefficient of variation 1.4: burstier than Poisson
    arrival_s = time.time() - 1.0 - span_s + np.cumsum(gaps_s) * (span_s / gaps_s.sum())
    picked = rng.integers(0, len(lengths), count)
    writer = HistoryWriter(data / "history", HistoryLimits())
    for at_s, i in zip(arrival_s, picked, strict=True):
        writer.add(
            {
                "arrival_s": float(at_s), "prompt_tokens": int(lengths.prompt_tokens[i]),
                "output_tokens": int(lengths.output_tokens[i]), "priority": "normal", "tenant": "key-0",
                "outcome": "finished", "ttft_s": 0.2, "tpot_s": 0.02, "ttft_target_s": 0.4,
                "tpot_target_s": 0.03, "worker": f"w{i % 3}", "moves": 0, "replays": 0, "model": "served",
            }
        )  # fmt: skip
    writer.close()
    return count


def whatif(data: Path, since: str) -> dict[str, Any]:
    """Run the command; its wall and processor time, and the workers of each rate."""
    run = [
        sys.executable,
        "-m",
        "tokenfleet",
        "whatif",
    ]
    # What the command leaves behind for a moment becomes ours to wait for, so that its time is counted, too.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [*run, "--since", since, "--data", str(data), *ASKED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    wall_s = time.monotonic() - began_s
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"whatif: {done.stderr.strip()}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    workers = [s["plan"]["workers"] for s in json.loads(done.stdout)["scenarios"]]
    return {"wall_s": wall_s, "cpu_s": cpu_s, "workers": " ".join(str(n) for n in workers)}


if __name__ == "__main__":
    sys.exit(main())
