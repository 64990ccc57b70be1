"""Compiles the kernels that a wheel brings, for every CPU: those of plans, simulations and gateways.

It runs the same commands twice, with a kernel folder of their own. The first run compiles. The second, in a
new process, loads the kernels that Python calls; each of them contains all that it calls. Only these are
kept. `make wheel` runs this script before it builds the wheel.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "examples" / "sample_trace.csv"
TARGETS = ["--model", "llama-3.1-8b", "--slo", "ttft=1s,tpot=50ms", "--gpu", "h100", "--tp", "1"]
PLAN = ["plan", "--trace", str(SAMPLE), *TARGETS, "--window", "20m..25m"]
SIMULATE = ["simulate", *TARGETS, "--workers", "2", "--trace"]
SYNTH = [
    *("trace", "synth", "--arrivals", "poisson:1", "--turns", "fixed:3", "--lengths", "fixed:200:50"),
    *("--system-tokens", "500", "--requests", "300", "--output"),
]


def commands(scratch: str) -> list[list[str]]:
    """What the kernels are to serve: plans, sessions with caches, split fleets, and other targets."""
    sessions = str(Path(scratch, "sessions.csv"))
    return [
        [*SYNTH, sessions, "--overwrite"],
        PLAN,
        [*PLAN, "--rate-scale", "8", "--policy", "longest-prefix"],
        ["plan", "--trace", sessions, *TARGETS],
        [*SIMULATE, sessions, "--agents", "8", "--host-kv", "64GiB@25GB/s"],
        [*SIMULATE, str(SAMPLE), "--window", "0s..60s", "--engine", "split", "--prefill-workers", "1"],
    ]


async def gateway() -> None:
    """Make what places requests, as a gateway does before it is ready; it compiles all that it will call."""
    import numpy as np

    from controlplane.types import Slo
    from dataplane.live.gateway.events import EventLog
    from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
    from dataplane.live.gateway.history import History
    from dataplane.live.gateway.metrics import Metrics
    from dataplane.live.ledger.placement import Placement
    from tokenfleet.profiles.library import find_profiles

    (profile,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    settings, lengths = CoreSettings(1, Slo(1.0, 0.05)), History(100.0)
    placement = Placement({"": profile}, 1, lengths.lengths, np.random.default_rng(0))
    FleetCore(settings, placement, Metrics(), EventLog(), lengths.expected_tokens)


def loaded(scratch: str) -> list[str]:
    """Run the commands in this process; the files of kernels that were loaded from disk."""
    from numba.core.dispatcher import Dispatcher

    from tokenfleet.cli.main import main as run

    for command in commands(scratch):
        with redirect_stdout(StringIO()) as said:
            code = run(command)
        if code not in (0, 1):
            raise SystemExit(f"{' '.join(command)}: exit code {code}\n{said.getvalue()}")
    asyncio.run(gateway())
    kernels = [one for one in gc.get_objects() if isinstance(one, Dispatcher) and one._cache_hits]
    return sorted({f"{one._cache._cache_path}/{one._cache._impl.filename_base}" for one in kernels})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "kernels")
    parser.add_argument("--within", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.within:
        print(json.dumps(loaded(asked.within)))
        return 0
    from dataplane.startup import kernel_digest

    into = asked.into / f"kernels-{kernel_digest()}"
    if into.exists():
        print(f"{into}: compiled already")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        alone = {"HOME": scratch, "NUMBA_CPU_NAME": "generic", "PYTHONPATH": str(ROOT)}
        again, own = [sys.executable, __file__, "--within", scratch], os.environ | alone
        for _ in ("compile", "load"):
            said = subprocess.run(again, env=own, stdout=subprocess.PIPE, text=True, check=True)
        shutil.rmtree(asked.into, ignore_errors=True)
        for base in map(Path, json.loads(said.stdout)):
            for file in base.parent.glob(f"{base.name}.*"):
                place = into / base.parent.name / file.name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
    files = [path for path in into.rglob("*") if path.is_file()]
    print(f"{into}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
