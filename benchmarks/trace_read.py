"""What reading a trace costs: time and peak memory, against a plain csv-module reader in the same run.

    python benchmarks/trace_read.py [--quick] [--rows N] [--seed S] [--format table|json]

Every reader runs in a process of its own, so that its peak resident memory is its own; `import only` is the
floor, a process that imports the same libraries and reads nothing. The naive reader uses `csv.DictReader`
and lists and checks nothing but that the values are numbers.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import numpy as np

from tokenfleet.traces import Trace, read_trace
from tokenfleet.traces.synth import synthesise
from tokenfleet.traces.writers import write_trace

SECONDS_BAR, MIB_BAR = 5.0, 1024.0


def naive(path: str) -> int:
    """Requests in a plain or Azure CSV, read row by row."""
    arrivals, prompts, outputs = [], [], []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if "TIMESTAMP" in row:
                arrivals.append(datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp())
                prompts.append(int(row["ContextTokens"]))
                outputs.append(int(row["GeneratedTokens"]))
            else:
                arrivals.append(float(row["arrival_s"]))
                prompts.append(int(row["prompt_tokens"]))
                outputs.append(int(row["output_tokens"]))
    columns = np.array(arrivals), np.array(prompts), np.array(outputs)
    return len(columns[0])


READERS = {
    "import only": lambda path: 0,
    "naive csv": naive,
    "read_trace": lambda path: len(read_trace(path)),
}


def measure(reader: str, path: Path) -> dict[str, float | int]:
    """Run one reader in a fresh process; its seconds, peak MiB and row count."""
    command = [sys.executable, __file__, "--reader", reader, "--file", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def read_here(reader: str, path: str) -> None:
    """What the fresh process does."""
    start_s = time.perf_counter()
    rows = READERS[reader](path)
    seconds = time.perf_counter() - start_s
    print(json.dumps({"rows": rows, "seconds": seconds, "peak_mib": peak_mib()}))


def peak_mib() -> float:
    """This process' own peak. Linux' `ru_maxrss` would start from the parent's, VmHWM does not."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes on macOS


def main() -> None:
    """Make the files, measure each reader on each, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100,000 rows")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--reader", choices=tuple(READERS), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.reader:
        read_here(asked.reader, asked.file)
        return
    requests = 100_000 if asked.quick else asked.rows
    trace = Trace("made up", "plain", synthesise("gamma:20:2", "azure-conv", requests, asked.seed))
    shuffled = np.random.default_rng(asked.seed).permutation(requests)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, form, suffix in (
            ("plain CSV", "plain", "csv"),
            ("Azure CSV", "azure", "csv"),
            ("plain JSONL", "plain", "jsonl"),
            ("Mooncake JSONL", "mooncake", "jsonl"),
            ("plain Parquet", "plain", "parquet"),
        ):
            files[name] = Path(folder) / f"{form}.{suffix}"
            write_trace(trace, files[name], form)
        files["plain CSV, shuffled"] = Path(folder) / "shuffled.csv"
        lines = files["plain CSV"].read_text().splitlines()
        files["plain CSV, shuffled"].write_text(
            "\n".join([lines[0], *(lines[1 + i] for i in shuffled)]) + "\n"
        )
        for name, path in files.items():
            for reader in READERS:
                if reader == "naive csv" and path.suffix != ".csv":
                    continue
                mib = path.stat().st_size / 2**20
                rows.append({"file": name, "file_mib": mib, "reader": reader, **measure(reader, path)})
    ours = [row for row in rows if row["reader"] == "read_trace"]
    worst_s, worst_mib = max(r["seconds"] for r in ours), max(r["peak_mib"] for r in ours)
    result = {
        "experiment": "trace_read",
        "rows": rows,
        "bars": {
            "slowest_s": {"value": worst_s, "bar": SECONDS_BAR, "ok": worst_s <= SECONDS_BAR},
            "peak_mib": {"value": worst_mib, "bar": MIB_BAR, "ok": worst_mib <= MIB_BAR},
        },
        "command": " ".join(["python", "benchmarks/trace_read.py", *sys.argv[1:]]),
        "seed": asked.seed,
    }
    if asked.format == "json":
        print(json.dumps(result, indent=1))
        return
    print(f"{requests} requests")
    print(f"{'file':22}{'MiB':>8}  {'reader':12}{'seconds':>9}{'peak MiB':>10}")
    for row in rows:
        cells = f"{row['file']:22}{row['file_mib']:8.1f}  {row['reader']:12}"
        print(f"{cells}{row['seconds']:9.2f}{row['peak_mib']:10.0f}")
    for name, bar in result["bars"].items():
        print(f"{name}: {bar['value']:.4g}, at most {bar['bar']:g}: {'ok' if bar['ok'] else 'MISSED'}")


if __name__ == "__main__":
    main()
