"""How long a what-if grid of 48 scenarios takes on the Azure hour, and that it is the same wherever it runs.

    python experiments/planning/whatif_grid.py [--quick] [--seed N] [--format table|json] [--only WAY]…

Runs `tokenfleet whatif` as a user would, with an empty cache: 4 rates x 3 TTFT targets x 2 TPOT targets x
2 GPUs with every TP degree there is (48 scenarios), on one process, on two and on a Ray cluster of this
machine, and again from the cache. A run on a two-minute window comes before, to compile the simulator.

`cpu_s` is what all its processes took (Ray's own too), looked up four times a second; `load` the mean number
of processes that wanted a core at the end. Where other work shares the machine the wall time says little,
and `alone_s`, the processor time over the cores that the run may use, is what it would be about without.
--quick plans four minutes of the hour; --only runs some of the ways, whose digests tell whether runs agree.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.lib.public_data import AZURE_HOUR
from experiments.lib.results import bar, flags, show

MOST_S = 180.0
VARY = ("rate=0.5,1,1.1,2", "slo.ttft=300ms,400ms,600ms", "slo.tpot=20ms,30ms", "gpu=a100,h100")
WAYS = ("1 process", "2 processes", "2 processes, all kept", "Ray")
COMMAND = "import sys; from tokenfleet.cli.main import main; sys.exit(main())"


def run(arguments: list[str]) -> tuple[float, float, bytes]:
    """Wall seconds, processor seconds and the standard output of one run of the command."""
    mark = f"TOKENFLEET_MEASURED={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    took: dict[int, float] = {}
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, name: value},
    ) as command:
        assert command.stdout is not None
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(command.stdout.read()))
        reader.start()
        while command.poll() is None:
            took.update(processor_s(mark.encode()))
            reader.join(0.25)
        wall_s = time.perf_counter() - began
        reader.join()
    if command.returncode != 0:
        raise SystemExit(f"exit code {command.returncode}: {' '.join(arguments)}")
    return wall_s, sum(took.values()), b"".join(said)


def processor_s(mark: bytes) -> dict[int, float]:
    """Processor seconds so far of every process that was started with `mark` in its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def main() -> int:
    parser = flags(__doc__, AZURE_HOUR)
    parser.add_argument("--only", action="append", choices=WAYS, help="not all of these ways")
    asked = parser.parse_args()
    trace = asked.data / AZURE_HOUR
    command = ["whatif", "--trace", str(trace), "--model", "llama-3.1-8b", "--slo", "ttft=400ms,tpot=30ms"]
    command += ["--seed", str(asked.seed), "--format", "json"]
    for vary in VARY:
        command += ["--vary", vary]
    run([*command, "--window", "0..120", "--attainment", "0.9", "--no-cache", "--jobs", "1"])
    command += ["--window", "0..240", "--attainment", "0.98"] if asked.quick else []
    with tempfile.TemporaryDirectory() as folder:
        kept = ["--cache", str(Path(folder, "cache"))]
        ways = {
            "1 process": [*command, "--no-cache", "--jobs", "1"],
            "2 processes": [*command, *kept, "--jobs", "2"],
            "2 processes, all kept": [*command, *kept, "--jobs", "2"],
            "Ray": [*command, "--no-cache", "--ray", "local"],
        }
        taken = [name for name in ways if name in (asked.only or WAYS)]
        rows = [row(name, ways[name], 1 if name.startswith("1") else 2) for name in taken]
    bars = {"different answers": bar(len({row["digest"] for row in rows}) - 1, 0)}
    for one in rows:
        if one["where"] == "2 processes":
            bars["wall_s on 2 processes"] = bar(one["wall_s"], MOST_S)
    return show("what-if grid", rows, bars, asked)


def row(where: str, words: list[str], cores: int) -> dict[str, Any]:
    """One run of the grid, with a digest of everything it said."""
    wall_s, cpu_s, said = run(words)
    return {
        "where": where,
        "scenarios": said.count(b'"changes"'),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "alone_s": round(cpu_s / cores, 1),
        "load": round(os.getloadavg()[1], 1),
        "digest": hashlib.sha256(said).hexdigest()[:12],
    }


if __name__ == "__main__":
    sys.exit(main())
